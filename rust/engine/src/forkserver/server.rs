//! The engine's end of the link: one fork server, the orders to it, and its reports.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::delivery::{Delivered, Delivery, Ordered, has_lost_parent};
use super::estate::{self, Estate};
use super::imports::{Imports, Look, OUT_OF_TIME, PREPARED, Patience};
use super::message::{Command, Entered, Plan, Report, VERSION};
use super::socket;
use super::speaker::{Child, Distrust, Origin, Speaker};
use super::wire::Wire as _;
use super::words::{self, Words};
use crate::clearing::CLEAR_PATIENCE;
use crate::peer::Peer;
use crate::poller::{Poller, is_readable, wait_readable};
use crate::procfs::{self, ProcFs};
use crate::sys::signal;
use crate::sys::wait::{Death, Target, try_wait};

/// The longest time that a server may take to fork and its child to enter, counted from the delivery of the order
/// before.
pub(crate) const FORK_PATIENCE: Duration = Duration::from_secs(10);
/// The longest time that a server may take to report a death that we have seen.
pub(crate) const DEATH_PATIENCE: Duration = Duration::from_secs(2);
/// Time that a server gets to end after we have hung up.
const END_PATIENCE: Duration = Duration::from_millis(100);
/// Time that a server gets to end after it has hung up, which normally means that it is ending.
const HANG_UP_PATIENCE: Duration = Duration::from_secs(1);
/// Time that the kernel gets to carry out SIGKILL.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// The state of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It imports.
    Preparing,
    /// It takes orders.
    Ready,
    /// It takes no more orders, but may still have workers.
    Closed,
}

/// The reason for a server whose child has ended before it could be watched. The server may be honest.
const BARREN: &str = "forked a worker that came to nothing";
/// The reason for a server that sends messages which no server of this version sends.
const NONSENSE: &str = "cannot be understood";

/// News about a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    Ready,
    Slow(Duration),
    Lost(String),
}

enum Answer {
    Forked(i32, OwnedFd),
    /// The child has ended and was reaped, or the report must be ignored.
    Gone,
    NotForked(i32),
}

/// A fork server.
pub(crate) struct Server {
    /// 0 for a branch of a warm server that has not said hello.
    pub(crate) pid: i32,
    /// For the branch of a warm server the poller's token, and the server that was called; `None` for a server that is
    /// our child.
    branch: Option<(u64, Peer)>,
    /// `None` once it is reaped, and for a branch before its hello.
    pidfd: Option<OwnedFd>,
    /// `None` once one side has hung up, as a server does when it dies.
    pub(crate) link: Option<OwnedFd>,
    words: Words,
    procfs: Option<ProcFs>,
    /// The process that has said hello.
    speaker: Option<Speaker>,
    /// The warm server that has forked this branch, with its start time.
    adopter: Option<(i32, u64)>,
    /// What is known about the processes that it has left.
    pub(crate) estate: Estate,
    /// How the branch of a warm server has ended, as its server tells.
    death: Option<Death>,
    /// The signal that ended the server, if one did.
    pub(crate) fatal_signal: Option<i32>,
    /// Whether its reports are no longer trusted.
    is_distrusted: bool,
    pub(crate) state: State,
    imports: Imports,
    /// News that nobody has taken yet.
    pub(crate) news: Vec<News>,
    /// Whether messages were read that may still need a reaction: while we wait for one report, others arrive, too.
    pub(crate) has_heard: bool,
    /// Whether it has failed to report a death in time, and has sent no message since.
    is_silent: bool,
    orders: u64,
    /// Reports about orders up to this one are ignored: their group has ended.
    reaped: u64,
    answers: BTreeMap<u64, Answer>,
    deaths: BTreeMap<u64, Death>,
}

impl Server {
    /// A server that was executed just now, with our end of its link. `output`: the non-blocking pipe of its stdout
    /// and stderr.
    pub(crate) fn new(
        pid: i32,
        pidfd: Option<OwnedFd>,
        link: OwnedFd,
        output: Option<OwnedFd>,
        patience: Patience,
    ) -> Self {
        Self {
            pid,
            pidfd,
            words: Words::new(output),
            ..Self::of(link, patience)
        }
    }

    /// The branch that this warm server has been asked for over this link. The poller knows it by `token`. `is_prepared`:
    /// the server has imported.
    pub(crate) fn branch(link: OwnedFd, warm: Peer, token: u64, is_prepared: bool) -> Self {
        let patience = if is_prepared {
            PREPARED
        } else {
            Patience::default()
        };
        Self {
            branch: Some((token, warm)),
            ..Self::of(link, patience)
        }
    }

    fn of(link: OwnedFd, patience: Patience) -> Self {
        Self {
            pid: 0,
            branch: None,
            pidfd: None,
            link: Some(link),
            words: Words::new(None),
            procfs: ProcFs::open().ok(),
            speaker: None,
            adopter: None,
            estate: Estate::default(),
            death: None,
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

    /// When to look at it, if it still imports.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.state == State::Preparing).then(|| self.imports.due())
    }

    /// Reports if its imports take long, and gives the server up if they take too long. Then the server is killed, in
    /// case its own timer cannot end it.
    pub(crate) fn look_at_imports(&mut self, now: Instant) {
        if self.state != State::Preparing {
            return;
        }
        match self.imports.look(self.shown_pid(), now) {
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

    /// Whether it must be ended at once: its reports cannot be trusted, or its workers would differ from executed
    /// workers.
    pub(crate) fn is_distrusted(&self) -> bool {
        self.is_distrusted && self.link.is_some()
    }

    /// Reads its messages and output. If the server has hung up, waits for its end and reaps it.
    pub(crate) fn listen(&mut self, poller: &Poller) {
        let mut is_dead = false;
        if self.words.read() == Some(0) {
            self.close_words(poller);
        }
        while let Some(link) = &self.link {
            match socket::receive(link) {
                // A process that the server has started may hold the link open.
                Ok(None) if is_dead => self.bury(poller),
                // It may have sent a last message just before it died, so read once more.
                Ok(None) => {
                    is_dead = self.pidfd.as_ref().is_some_and(is_readable);
                    if !is_dead {
                        return;
                    }
                }
                Ok(Some((bytes, fds))) => {
                    let is_unknown = self.pidfd.is_none();
                    self.hear(Report::decode(&bytes), fds);
                    if is_unknown {
                        self.watch_branch(poller);
                    }
                }
                Err(_) => self.bury(poller),
            }
        }
        self.has_heard |= self.estate.listen(poller);
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
                // An import may have moved the server to other namespaces.
                let is_here = self.with_speaker(Speaker::check_place).is_some();
                if is_here && self.state == State::Preparing {
                    self.state = State::Ready;
                    self.news.push(News::Ready);
                }
            }
            Some(Report::Importing) => {
                self.imports = Imports::begin(Instant::now(), Patience::default());
            }
            Some(Report::Died { death }) => self.death = Some(death),
            Some(Report::Cleared) => self.estate = Estate::Settled,
            Some(Report::Refused { text }) => self.close(refused(&text)),
            // The report is about a group that has ended.
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

    /// Handles a hello, which comes with a pidfd of its sender.
    fn meet(&mut self, fds: Vec<OwnedFd>) {
        let (Some(pidfd), None) = (fds.into_iter().next(), &self.speaker) else {
            return self.close(NONSENSE.to_owned());
        };
        let origin = match &self.branch {
            Some((_, warm)) => Origin::Called(warm),
            None => Origin::Executed(self.pid),
        };
        let copy = pidfd.try_clone();
        let met = self
            .procfs
            .as_mut()
            .map(|procfs| Speaker::meet(procfs, pidfd, origin));
        self.speaker = met.and_then(|met| met.map_err(|why| self.distrust(why)).ok());
        if let (true, Some(speaker), Ok(copy)) = (self.is_branch(), &self.speaker, copy) {
            self.pid = speaker.pid();
            self.pidfd = Some(copy);
            self.adopter = self.find_adopter();
        }
    }

    /// The warm server of a branch: its parent, which was called, or was started by the one that was called.
    fn find_adopter(&mut self) -> Option<(i32, u64)> {
        let (_, warm) = self.branch.as_ref()?;
        let procfs = self.procfs.as_mut()?;
        let parent = procfs.stat(self.pid).ok()?.ppid;
        let parent = procfs.stat(parent).ok()?;
        let is_ours = procfs.descends(parent.pid, warm.pid()).unwrap_or(false);
        is_ours.then_some((parent.pid, parent.start_time))
    }

    /// Lets the poller report the end of a branch that has just said hello.
    fn watch_branch(&mut self, poller: &Poller) {
        if let (Some((token, _)), Some(pidfd)) = (&self.branch, &self.pidfd)
            && poller.watch(pidfd, *token).is_err()
        {
            self.close("cannot be watched: memory is short".to_owned());
        }
    }

    /// Whether it is the branch of a warm server, and not our child.
    pub(crate) fn is_branch(&self) -> bool {
        self.branch.is_some()
    }

    /// Pid and start time of the process that has said hello.
    pub(crate) fn identity(&self) -> Option<(i32, u64)> {
        self.speaker.as_ref().map(Speaker::identity)
    }

    /// The process to name to the user: until a branch has said hello, its warm server.
    pub(crate) fn shown_pid(&self) -> i32 {
        match &self.branch {
            Some((_, warm)) if self.pid == 0 => warm.pid(),
            _ => self.pid,
        }
    }

    /// Handles the report of a child, which comes with the child's pidfd.
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

    /// Checks a report against the kernel; `None` if the report must be ignored.
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
        // `None`: it has died, which is noticed next.
        if let Some(why) = why {
            self.is_distrusted = self.orders == 0;
            self.close(why);
        }
    }

    /// Closes the server: it gets no more orders.
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
            // Without this message the server prepares for few workers.
            let _ = socket::send(link, &expect.encode(), &[], false);
        }
    }

    /// Orders a worker; `None` if the server takes no orders. `fds` are the worker's descriptors, which follow plan
    /// and gate.
    pub(crate) fn order(&mut self, plan: &Plan, fds: &[OwnedFd], poller: &Poller) -> Option<Ordered> {
        if self.state != State::Ready {
            return None;
        }
        let order = self.orders + 1;
        match self.send_order(order, plan, fds) {
            Ok(gate) => {
                if let (0, true, Some(link)) = (self.orders, self.is_branch(), &self.link) {
                    estate::note_workers(link, true);
                }
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
        let file = socket::pack(c"dsl-order", &plan.encode())?;
        let (gate, theirs) = socket::pair()?;
        let fixed = [file.as_fd(), theirs.as_fd()];
        let all: Vec<BorrowedFd<'_>> = fixed.into_iter().chain(fds.iter().map(AsFd::as_fd)).collect();
        socket::send(link, &Command::Start { order }.encode(), &all, false)?;
        Ok(gate)
    }

    /// Looks whether an ordered worker waits at its gate. `is_late`: its time is over.
    pub(crate) fn deliver(&mut self, ordered: &Ordered, is_late: bool, poller: &Poller) -> Delivered {
        self.listen(poller);
        if self.link.is_none() {
            // Children of the dead server die with it, and have not run.
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

    /// Whether nothing more will become known about a worker's death: the server has reported it, or will not.
    pub(crate) fn has_told(&mut self, order: u64, poller: &Poller) -> bool {
        if !self.deaths.contains_key(&order) {
            self.listen(poller);
        }
        self.deaths.contains_key(&order) || self.link.is_none() || self.is_silent
    }

    /// How a worker ended, if the server has reported it.
    pub(crate) fn death_of(&self, order: u64) -> Option<Death> {
        self.deaths.get(&order).copied()
    }

    /// Notes that it has not reported a death in time. We do not wait for its next report of a death.
    pub(crate) fn is_late(&mut self) {
        self.is_silent = true;
        self.close(format!(
            "did not tell of a death in {} s",
            DEATH_PATIENCE.as_secs()
        ));
    }

    /// Continues the server if it is stopped: only the server learns how its workers end. If it is a dead branch,
    /// continues the server that has adopted what it has left.
    pub(crate) fn resume(&mut self) {
        if self.link.is_some() {
            self.send(Signal::CONT);
        }
        if let (Estate::Open(_), Some((pid, start_time)), Some(procfs)) =
            (&self.estate, self.adopter, &mut self.procfs)
            && let Some(process) = Pid::from_raw(pid)
            && let Ok(pidfd) = pidfd_open(process, PidfdFlags::empty())
            && procfs.stat(pid).is_ok_and(|stat| stat.start_time == start_time)
        {
            let _ = pidfd_send_signal(&pidfd, Signal::CONT);
        }
    }

    /// Lets the server reap a group's zombies, once no process of the group is left.
    pub(crate) fn reap_all(&mut self) {
        if self.reaped == self.orders {
            return;
        }
        self.reaped = self.orders;
        self.deaths.clear();
        self.answers.clear();
        if let Some(link) = &self.link {
            let reap = Command::Reap { through: self.reaped };
            // If this fails, the server gets the command after the next group, or ends.
            let _ = socket::send(link, &reap.encode(), &[], false);
        }
    }

    /// The server has hung up, as it does when it dies.
    fn bury(&mut self, poller: &Poller) {
        self.has_heard = true;
        if let Some(pidfd) = &self.pidfd {
            // The spawner has added it to the poller.
            poller.forget(pidfd);
        }
        let death = self.reap(HANG_UP_PATIENCE);
        self.leave_estate(poller);
        self.fatal_signal = death.filter(|death| death.signaled).map(|death| death.status);
        let how = match death {
            // Its own timer has ended it.
            Some(death) if death.signaled && death.status == libc::SIGALRM => OUT_OF_TIME.to_owned(),
            Some(death) if death.signaled => format!("was ended by signal {}", death.status),
            Some(death) => format!("ended with code {}", death.status),
            None if self.is_branch() => "has ended".to_owned(),
            None => "is gone".to_owned(),
        };
        self.close_with_last_words(&how);
        self.close_words(poller);
    }

    /// Notes who looks after what the dead branch of a warm server has left.
    fn leave_estate(&mut self, poller: &Poller) {
        let Some(link) = self.link.take() else { return };
        if self.is_branch() && self.orders > 0 && matches!(self.estate, Estate::Owned) {
            // If nobody else holds the other end, the server is dead, too, which is read next.
            self.estate = Estate::Open(link);
        } else {
            estate::note_workers(&link, false);
            poller.forget(&link);
        }
    }

    fn close_words(&mut self, poller: &Poller) {
        if let Some(pipe) = self.words.pipe.take() {
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

    /// Closes the link, at which the server ends, and stops watching the server.
    pub(crate) fn hang_up(&mut self, poller: &Poller) {
        let estate = std::mem::take(&mut self.estate);
        if let (Some(link), _) | (None, Estate::Open(link)) = (self.link.take(), estate) {
            poller.forget(&link);
            estate::hang_up(&link);
        }
        if let Some(pidfd) = &self.pidfd {
            // The spawner has added it to the poller.
            poller.forget(pidfd);
        }
    }

    /// Waits for its end after one side has hung up. A server that still imports does not look at its link, so it is
    /// killed at once, and so is an untrusted server.
    pub(crate) fn end(&mut self, poller: &Poller) {
        let is_listening = self.state != State::Preparing && !self.is_distrusted;
        self.reap(match is_listening {
            // It may have something to end. If it is killed earlier, nobody may be left who does.
            true if self.is_branch() => CLEAR_PATIENCE,
            true => END_PATIENCE,
            false => Duration::ZERO,
        });
        self.state = State::Closed;
        self.close_words(poller);
    }

    /// Kills and reaps a server that was executed but cannot be watched. Inside a user's program no other code would
    /// reap it.
    pub(crate) fn give_up(mut self, poller: &Poller) {
        self.kill();
        let open = || pidfd_open(Pid::from_raw(self.pid)?, PidfdFlags::empty()).ok();
        self.pidfd = self.pidfd.take().or_else(open);
        self.hang_up(poller);
        self.end(poller);
    }

    /// Waits until it has ended, kills it if that takes longer than `patience`, and reaps it.
    fn reap(&mut self, patience: Duration) -> Option<Death> {
        if !wait_readable(&[self.pidfd.as_ref()?.as_fd()], patience) {
            self.kill();
            wait_readable(&[self.pidfd.as_ref()?.as_fd()], KILL_PATIENCE);
        }
        let pidfd = self.pidfd.take()?;
        if self.is_branch() {
            return self.death_of_branch(&pidfd);
        }
        try_wait(Target::PidFd(pidfd.as_fd()), true).ok().flatten()
    }

    /// How a dead branch has ended. The kernel shows it until the parent of the branch reaps it, and the parent sends it to
    /// us before.
    fn death_of_branch(&mut self, pidfd: &OwnedFd) -> Option<Death> {
        let status = procfs::exit_status(self.pid);
        let is_own = self.procfs.as_mut()?.pid_of(pidfd.as_fd());
        if let (Some(status), Ok(Some(_))) = (status, is_own) {
            return Some(Death::of(status));
        }
        while let (None, Some(link)) = (self.death, &self.link) {
            let Ok(Some((bytes, fds))) = socket::receive(link) else {
                break;
            };
            self.hear(Report::decode(&bytes), fds);
        }
        self.death
    }

    /// Kills the server, which must not be reaped yet.
    fn kill(&self) {
        if !self.is_branch() {
            // The server is our unreaped child, so its process group is still its own.
            let _ = signal::send(-self.pid, libc::SIGKILL);
        }
        self.send(Signal::KILL);
    }

    fn send(&self, signal: Signal) {
        if let Some(pidfd) = &self.pidfd {
            let _ = pidfd_send_signal(pidfd, signal);
        }
    }
}

/// Why a warm server that has ended has refused to fork for the caller at this end of a link, if it has said that.
pub(crate) fn refusal(link: &OwnedFd) -> Option<String> {
    while let Ok(Some((bytes, _))) = socket::receive(link) {
        if let Some(Report::Refused { text }) = Report::decode(&bytes) {
            return Some(refused(&text));
        }
    }
    None
}

fn refused(text: &[u8]) -> String {
    format!("refused: {}", words::one_line(text))
}

#[cfg(test)]
mod tests;
