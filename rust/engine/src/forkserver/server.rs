//! The engine's end of the link: one fork server, what it was told, and what it has said.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::delivery::{Delivered, Delivery, Ends, Ordered, has_lost_parent};
use super::imports::{Imports, Look, OUT_OF_TIME, Patience};
use super::message::{Command, Entered, Report, VERSION};
use super::plan::Plan;
use super::socket::{self, MOST_DESCRIPTORS};
use super::speaker::{Child, Distrust, Speaker};
use super::words::{self, Words};
use crate::poller::{Poller, is_readable, wait_readable};
use crate::procfs::ProcFs;
use crate::sys::signal;
use crate::sys::wait::{Death, Target, try_wait};

/// The longest time in which a server has forked and its child has entered, once the orders before are delivered.
pub(crate) const FORK_PATIENCE: Duration = Duration::from_secs(10);
/// The longest time in which a server tells of a death that we have seen.
pub(crate) const DEATH_PATIENCE: Duration = Duration::from_secs(2);
/// Time that a server gets to end when we have hung up.
const END_PATIENCE: Duration = Duration::from_millis(100);
/// The same when it has, which it does by ending.
const HANG_UP_PATIENCE: Duration = Duration::from_secs(1);
/// Time that the kernel gets to carry out SIGKILL.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// What can be had of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It imports.
    Preparing,
    /// It takes orders.
    Ready,
    /// It takes none any more, but may have workers.
    Closed,
}

/// What is said of one whose child has ended before it could be watched, which needs no bad intent.
const BARREN: &str = "forked a worker that came to nothing";
/// What is said of one whose messages no server of this version sends.
const NONSENSE: &str = "cannot be understood";

/// What has become known of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    Ready,
    Slow(Duration),
    Lost(String),
}

enum Answer {
    Forked(i32, OwnedFd),
    /// Of a child that has ended and was reaped, or that is not to be acted on.
    Gone,
    NotForked(i32),
}

/// A fork server.
pub(crate) struct Server {
    pub(crate) pid: i32,
    /// `None` once it is reaped.
    pidfd: Option<OwnedFd>,
    /// `None` once one side has hung up.
    link: Option<OwnedFd>,
    words: Words,
    procfs: Option<ProcFs>,
    /// Who has said hello.
    speaker: Option<Speaker>,
    /// The signal that has ended it.
    fatal_signal: Option<i32>,
    /// It is not to be listened to any more.
    is_distrusted: bool,
    state: State,
    imports: Imports,
    news: Vec<News>,
    /// Something was heard since this was last asked, whoever listened.
    has_heard: bool,
    /// It has not told of a death in time, nor anything since.
    is_silent: bool,
    orders: u64,
    /// Nothing is told of the workers up to this order.
    reaped: u64,
    answers: BTreeMap<u64, Answer>,
    deaths: BTreeMap<u64, Death>,
}

impl Server {
    /// A server that was executed with these ends, just now. `output`: the pipe of its stdout and stderr, to be read
    /// without waiting.
    pub(crate) fn new(
        pid: i32,
        pidfd: OwnedFd,
        ends: Ends,
        output: Option<OwnedFd>,
        patience: Patience,
    ) -> Self {
        Self {
            pid,
            pidfd: Some(pidfd),
            link: Some(ends.ours),
            words: Words::new(output),
            procfs: ProcFs::open().ok(),
            speaker: None,
            fatal_signal: None,
            is_distrusted: false,
            state: State::Preparing,
            imports: Imports::begin(Instant::now(), patience),
            news: Vec::new(),
            has_heard: false,
            is_silent: false,
            orders: 0,
            reaped: 0,
            answers: BTreeMap::new(),
            deaths: BTreeMap::new(),
        }
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// When it is to be looked at if it has not imported everything by then.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.state == State::Preparing).then(|| self.imports.due())
    }

    /// Tells if its imports take long, and does without it if they take too long. It is killed then: nobody else
    /// can, if it does not hear of its own timer.
    pub(crate) fn look_at_imports(&mut self, now: Instant) {
        if self.state != State::Preparing {
            return;
        }
        match self.imports.look(self.pid, now) {
            Look::Nothing => {}
            Look::Slow(passed) => self.news.push(News::Slow(passed)),
            Look::Lost(why) => {
                self.close_with_last_words(why);
                if self.pidfd.is_some() {
                    self.kill();
                }
            }
        }
    }

    /// Whether it is to be ended at once: what it says is not to be believed, or its workers would not be as others.
    pub(crate) fn is_distrusted(&self) -> bool {
        self.is_distrusted && self.link.is_some()
    }

    /// What is to be watched for it, while it lives.
    pub(crate) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn fatal_signal(&self) -> Option<i32> {
        self.fatal_signal
    }

    pub(crate) fn take_news(&mut self) -> Vec<News> {
        std::mem::take(&mut self.news)
    }

    /// Whether something was heard that nobody may have acted on: who asks for one thing hears of others.
    pub(crate) fn has_heard(&self) -> bool {
        self.has_heard
    }

    /// All that was heard is acted on now.
    pub(crate) fn take_heard(&mut self) -> bool {
        std::mem::take(&mut self.has_heard)
    }

    /// Hears what it has said. A server that has hung up is waited for, and is gone then.
    pub(crate) fn listen(&mut self, poller: &Poller) {
        let mut is_dead = false;
        if self.words.read() == Some(0) {
            self.close_words(poller);
        }
        while let Some(link) = &self.link {
            match socket::receive(link) {
                // Somebody whom it has started may hold the link open.
                Ok(None) if is_dead => self.bury(poller),
                // It may have said its last just before it died.
                Ok(None) => {
                    is_dead = self.pidfd.as_ref().is_some_and(is_readable);
                    if !is_dead {
                        return;
                    }
                }
                Ok(Some((bytes, fds))) => self.hear(Report::decode(&bytes), fds),
                Err(_) => self.bury(poller),
            }
        }
    }

    fn hear(&mut self, report: Option<Report>, fds: Vec<OwnedFd>) {
        self.is_silent = false;
        self.has_heard = true;
        match report {
            Some(Report::Hello { version: VERSION }) => self.meet(fds),
            Some(Report::Hello { version }) => {
                self.close(format!("speaks version {version} of the protocol, not {VERSION}"));
            }
            Some(Report::Ready) => {
                // What it has imported may have led it elsewhere.
                let is_here = self.with_speaker(Speaker::check_place).is_some();
                if is_here && self.state == State::Preparing {
                    self.state = State::Ready;
                    self.news.push(News::Ready);
                }
            }
            Some(Report::Refused { text }) => self.close(format!("refused: {}", words::one_line(&text))),
            // Of a group that has ended.
            Some(
                Report::Forked { order, .. } | Report::NotForked { order, .. } | Report::Ended { order, .. },
            ) if order <= self.reaped => {}
            Some(Report::Forked { order }) => {
                let answer = self.meet_child(fds);
                self.answers.insert(order, answer);
            }
            Some(Report::NotForked { order, errno }) => {
                self.answers.insert(order, Answer::NotForked(errno));
            }
            Some(Report::Ended { order, death }) => {
                self.deaths.insert(order, death);
            }
            None => self.close(NONSENSE.to_owned()),
        }
    }

    /// Hears hello, which comes with a pidfd of the process that says it.
    fn meet(&mut self, fds: Vec<OwnedFd>) {
        let (Some(pidfd), None) = (fds.into_iter().next(), &self.speaker) else {
            return self.close(NONSENSE.to_owned());
        };
        let executed = self.pid;
        let met = self
            .procfs
            .as_mut()
            .map(|procfs| Speaker::meet(procfs, pidfd, executed));
        self.speaker = met.and_then(|met| met.map_err(|why| self.distrust(why)).ok());
    }

    /// Hears of a child, which comes as a pidfd.
    fn meet_child(&mut self, fds: Vec<OwnedFd>) -> Answer {
        let Some(pidfd) = fds.into_iter().next() else {
            self.close(NONSENSE.to_owned());
            return Answer::Gone;
        };
        match self.with_speaker(|speaker, procfs| speaker.child(procfs, &pidfd)) {
            Some(Child::Known(pid)) => Answer::Forked(pid, pidfd),
            Some(Child::Gone) | None => Answer::Gone,
        }
    }

    /// Asks the kernel about what was said. `None`: it is not to be acted on.
    fn with_speaker<T>(
        &mut self,
        ask: impl FnOnce(&Speaker, &mut ProcFs) -> Result<T, Distrust>,
    ) -> Option<T> {
        let (Some(speaker), Some(procfs)) = (&self.speaker, &mut self.procfs) else {
            self.close(NONSENSE.to_owned());
            return None;
        };
        ask(speaker, procfs).map_err(|why| self.distrust(why)).ok()
    }

    fn distrust(&mut self, why: Distrust) {
        // Of one that has died is heard next.
        if let Some(why) = why {
            self.is_distrusted = self.orders == 0;
            self.close(why);
        }
    }

    /// Takes no more orders to it.
    pub(crate) fn close(&mut self, why: String) {
        if self.state != State::Closed {
            self.state = State::Closed;
            self.news.push(News::Lost(why));
        }
    }

    /// Tells it how many workers will be ordered.
    pub(crate) fn expect(&self, workers: usize) {
        if let Some(link) = self.link.as_ref().filter(|_| self.state != State::Closed) {
            let expect = Command::Expect {
                workers: workers as u64,
            };
            // It prepares for few if it does not hear of many.
            let _ = socket::send(link, &expect.encode(), &[], false);
        }
    }

    /// Orders a worker. `fds` are its descriptors behind plan and gate. `None`: the server takes no orders.
    pub(crate) fn order(&mut self, plan: &Plan, fds: &[OwnedFd], poller: &Poller) -> Option<Ordered> {
        if self.state != State::Ready || fds.len() + 2 > MOST_DESCRIPTORS {
            return None;
        }
        let order = self.orders + 1;
        match self.send_order(order, plan, fds) {
            Ok(gate) => {
                self.orders = order;
                Some(Ordered { order, gate })
            }
            Err(error) => {
                // If it has died, that is the better reason.
                self.listen(poller);
                self.close(format!("takes no orders: {error}"));
                None
            }
        }
    }

    fn send_order(&self, order: u64, plan: &Plan, fds: &[OwnedFd]) -> io::Result<OwnedFd> {
        let link = self.link.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        let file = File::from(memfd_create(c"dsl-order", MemfdFlags::CLOEXEC)?);
        file.write_all_at(&plan.encode(), 0)?;
        let (gate, theirs) = socket::pair()?;
        let fixed = [file.as_fd(), theirs.as_fd()];
        let all: Vec<BorrowedFd<'_>> = fixed.into_iter().chain(fds.iter().map(AsFd::as_fd)).collect();
        socket::send(link, &Command::Start { order }.encode(), &all, false)?;
        Ok(gate)
    }

    /// Whether a worker that was ordered waits at its gate. `is_late`: there is no more time for that.
    pub(crate) fn deliver(&mut self, ordered: &Ordered, is_late: bool, poller: &Poller) -> Delivered {
        self.listen(poller);
        if self.link.is_none() {
            // What it had forked dies with it, and has not run.
            return Delivered::Nothing;
        }
        let pid = match self.answers.get(&ordered.order) {
            Some(Answer::Forked(pid, _)) => *pid,
            Some(Answer::Gone) => {
                self.close(BARREN.to_owned());
                return Delivered::Nothing;
            }
            Some(Answer::NotForked(errno)) => {
                let error = io::Error::from_raw_os_error(*errno);
                self.close(format!("could not fork: {error}"));
                return Delivered::Nothing;
            }
            None if is_late => {
                self.close(format!("did not fork in {} s", FORK_PATIENCE.as_secs()));
                return Delivered::Nothing;
            }
            None => return Delivered::Ordered,
        };
        let entered = match socket::receive(&ordered.gate) {
            Ok(None) if !is_late => return Delivered::Forked,
            Ok(None) | Err(_) => None,
            Ok(Some((bytes, _))) => Entered::decode(&bytes),
        };
        let Some(entered) = entered.filter(|entered| !has_lost_parent(entered)) else {
            // If the server has died, that is the better reason.
            self.listen(poller);
            self.close(BARREN.to_owned());
            return Delivered::Nothing;
        };
        match self.answers.remove(&ordered.order) {
            Some(Answer::Forked(_, pidfd)) => Delivered::Worker(Delivery { pid, pidfd, entered }),
            _ => Delivered::Nothing,
        }
    }

    /// Whether all is known of a worker's death that will be: how it ended, or that nobody tells.
    pub(crate) fn has_told(&mut self, order: u64, poller: &Poller) -> bool {
        if !self.deaths.contains_key(&order) {
            self.listen(poller);
        }
        self.deaths.contains_key(&order) || self.link.is_none() || self.is_silent
    }

    /// How a worker ended, if the server has told.
    pub(crate) fn death_of(&self, order: u64) -> Option<Death> {
        self.deaths.get(&order).copied()
    }

    /// It has not told of a death in time. The next one is not waited for.
    pub(crate) fn is_late(&mut self) {
        self.is_silent = true;
        self.close(format!(
            "did not tell of a death in {} s",
            DEATH_PATIENCE.as_secs()
        ));
    }

    /// Lets it go on, if somebody has stopped it: it alone knows how its workers end.
    pub(crate) fn resume(&self) {
        if self.link.is_some() {
            // Our unreaped child pins its pid.
            let _ = signal::send(self.pid, libc::SIGCONT);
        }
    }

    /// Nothing is left of the group: its zombies are not needed any more.
    pub(crate) fn reap_all(&mut self) {
        if self.reaped == self.orders {
            return;
        }
        self.reaped = self.orders;
        self.deaths.clear();
        self.answers.clear();
        if let Some(link) = &self.link {
            let reap = Command::Reap { through: self.reaped };
            // One that does not listen now will be told the next time, or will end.
            let _ = socket::send(link, &reap.encode(), &[], false);
        }
    }

    /// The server has hung up, as it does when it dies.
    fn bury(&mut self, poller: &Poller) {
        self.has_heard = true;
        self.hang_up(poller);
        let death = self.reap(HANG_UP_PATIENCE);
        self.fatal_signal = death.filter(|death| death.signaled).map(|death| death.status);
        let how = match death {
            // By its own timer.
            Some(death) if death.signaled && death.status == libc::SIGALRM => OUT_OF_TIME.to_owned(),
            Some(death) if death.signaled => format!("was ended by signal {}", death.status),
            Some(death) => format!("ended with code {}", death.status),
            None => "is gone".to_owned(),
        };
        self.close_with_last_words(&how);
        self.close_words(poller);
    }

    fn close_words(&mut self, poller: &Poller) {
        if let Some(pipe) = self.words.take_pipe() {
            poller.forget(pipe);
        }
    }

    fn close_with_last_words(&mut self, why: &str) {
        let words = self.words.last_line();
        self.close(if words.is_empty() {
            why.to_owned()
        } else {
            format!("{why}: {words}")
        });
    }

    /// Says nothing to it any more, by which it ends, and hears nothing.
    pub(crate) fn hang_up(&mut self, poller: &Poller) {
        if let Some(link) = self.link.take() {
            poller.forget(&link);
        }
        if let Some(pidfd) = &self.pidfd {
            // It was made known when the server was started.
            poller.forget(pidfd);
        }
    }

    /// Waits for its end, now that somebody has hung up. One that imports still has no reason to look.
    pub(crate) fn end(&mut self, poller: &Poller) {
        let is_listening = self.state != State::Preparing && !self.is_distrusted;
        self.reap(if is_listening {
            END_PATIENCE
        } else {
            Duration::ZERO
        });
        self.state = State::Closed;
        self.close_words(poller);
    }

    /// Kills and reaps one that was executed and cannot be watched: nobody else reaps it in somebody's program.
    pub(crate) fn give_up(
        pid: i32,
        pidfd: Option<OwnedFd>,
        ends: Ends,
        output: Option<OwnedFd>,
        poller: &Poller,
    ) {
        let open = || pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok();
        if let Some(pidfd) = pidfd.or_else(open) {
            let mut server = Self::new(pid, pidfd, ends, output, Patience::default());
            server.hang_up(poller);
            server.end(poller);
        } else {
            // Our unreaped child pins its pid.
            let _ = signal::send(pid, libc::SIGKILL);
        }
    }

    /// Reaps it, once it has ended or was killed for taking longer than this.
    fn reap(&mut self, patience: Duration) -> Option<Death> {
        let pidfd = self.pidfd.take()?;
        if !wait_readable(&[pidfd.as_fd()], patience) {
            self.kill();
            wait_readable(&[pidfd.as_fd()], KILL_PATIENCE);
        }
        try_wait(Target::PidFd(pidfd.as_fd()), true).ok().flatten()
    }

    /// Kills it, which is not reaped.
    fn kill(&self) {
        // Our unreaped child pins its pid and the group's.
        let _ = signal::send(-self.pid, libc::SIGKILL);
        let _ = signal::send(self.pid, libc::SIGKILL);
    }
}

#[cfg(test)]
mod tests;
