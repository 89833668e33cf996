//! The engine's end of the link: one fork server, what it was told, and what it has said.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{Shutdown, shutdown};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::message::{Command, Entered, Report, VERSION};
use super::plan::Plan;
use super::socket::{self, MOST_DESCRIPTORS};
use super::words;
use crate::poller::{Poller, is_readable, wait_readable};
use crate::sys::clone::Step;
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
/// What is said of a server that takes too long before it is ready.
const OUT_OF_TIME: &str = "ran out of time";

/// How long a server may import.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Then a line says that it is still importing.
    pub slow: Duration,
    /// Then it is done without. Its own timer, which is that of `IMPORT_S` in `dsl.forkserver.become`, rings before,
    /// unless somebody has stopped it or it hangs in the kernel.
    pub lost: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            slow: Duration::from_secs(30),
            lost: Duration::from_secs(630),
        }
    }
}

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

/// What has become known of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum News {
    Ready,
    Slow(Duration),
    Lost(String),
}

/// A worker that a server has forked.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
    pub(crate) entered: Entered,
}

/// A worker that was ordered, and the gate where it waits until it is watched. It ends if nobody opens.
#[derive(Debug)]
pub(crate) struct Ordered {
    order: u64,
    gate: OwnedFd,
}

impl Ordered {
    pub(crate) fn order(&self) -> u64 {
        self.order
    }

    pub(crate) fn gate(&self) -> BorrowedFd<'_> {
        self.gate.as_fd()
    }

    /// Lets the worker run.
    pub(crate) fn open(&self) {
        // A failure means that it has just died.
        let _ = socket::send(&self.gate, b"1", &[], false);
    }

    /// Ends the worker, wherever it is on its way. That does not depend on who else may hold a copy of the gate.
    pub(crate) fn cancel(&self) {
        // A failure means that it has ended.
        let _ = shutdown(&self.gate, Shutdown::Both);
    }
}

/// What has come of an order.
#[derive(Debug)]
pub(crate) enum Delivered {
    /// Its worker waits at its gate.
    Worker(Delivery),
    /// The server has not answered.
    Ordered,
    /// The server has forked, and the child has not come to its gate.
    Forked,
    /// There is no worker, and the server takes no more orders.
    Nothing,
}

enum Answer {
    Forked(i32, OwnedFd),
    NotForked(i32),
}

/// A fork server.
pub(crate) struct Server {
    pub(crate) pid: i32,
    /// `None` once it is reaped.
    pidfd: Option<OwnedFd>,
    /// `None` once one side has hung up.
    link: Option<OwnedFd>,
    /// The file that is its stdout and stderr.
    words: File,
    state: State,
    /// When it was executed.
    begin: Instant,
    patience: Patience,
    is_slow: bool,
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

/// What a server is started with: our end of its link and its own, and the file of its last words.
pub(crate) struct Ends {
    pub(crate) ours: OwnedFd,
    pub(crate) theirs: OwnedFd,
    pub(crate) words: File,
}

impl Ends {
    pub(crate) fn new() -> io::Result<Self> {
        let (ours, theirs) = socket::pair()?;
        let words = File::from(memfd_create(c"dsl-fork-server", MemfdFlags::CLOEXEC)?);
        Ok(Self { ours, theirs, words })
    }
}

impl Server {
    /// A server that was executed with these ends, just now.
    pub(crate) fn new(pid: i32, pidfd: OwnedFd, ends: Ends, patience: Patience) -> Self {
        Self {
            pid,
            pidfd: Some(pidfd),
            link: Some(ends.ours),
            words: ends.words,
            state: State::Preparing,
            begin: Instant::now(),
            patience,
            is_slow: false,
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
        let Patience { slow, lost } = self.patience;
        let is_told = self.is_slow || slow >= lost;
        (self.state == State::Preparing).then(|| self.begin + if is_told { lost } else { slow })
    }

    /// Tells if its imports take long, and does without it if they take too long. It is killed then: nobody else
    /// can, if it does not hear of its own timer.
    pub(crate) fn look_at_imports(&mut self, now: Instant) {
        if self.due().is_none_or(|due| now < due) {
            return;
        }
        let passed = now.saturating_duration_since(self.begin);
        if passed < self.patience.lost {
            self.is_slow = true;
            self.news.push(News::Slow(passed));
            return;
        }
        self.close_with_last_words(OUT_OF_TIME);
        if self.pidfd.is_some() {
            self.kill();
        }
    }

    /// What is to be watched for it, while it lives.
    pub(crate) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
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
            Some(Report::Hello { version: VERSION }) => {}
            Some(Report::Hello { version }) => {
                self.close(format!("speaks version {version} of the protocol, not {VERSION}"));
            }
            Some(Report::Ready) => {
                if self.state == State::Preparing {
                    self.state = State::Ready;
                    self.news.push(News::Ready);
                }
            }
            Some(Report::Refused { text }) => self.close(format!("refused: {}", words::one_line(&text))),
            // Of a group that has ended.
            Some(
                Report::Forked { order, .. } | Report::NotForked { order, .. } | Report::Ended { order, .. },
            ) if order <= self.reaped => {}
            Some(Report::Forked { order, pid }) => {
                if let Some(pidfd) = fds.into_iter().next() {
                    self.answers.insert(order, Answer::Forked(pid, pidfd));
                }
            }
            Some(Report::NotForked { order, errno }) => {
                self.answers.insert(order, Answer::NotForked(errno));
            }
            Some(Report::Ended { order, death }) => {
                self.deaths.insert(order, death);
            }
            None => self.close("cannot be understood".to_owned()),
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
            self.close("forked a worker that came to nothing".to_owned());
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
        let how = match self.reap(HANG_UP_PATIENCE) {
            // By its own timer.
            Some(death) if death.signaled && death.status == libc::SIGALRM => OUT_OF_TIME.to_owned(),
            Some(death) if death.signaled => format!("was ended by signal {}", death.status),
            Some(death) => format!("ended with code {}", death.status),
            None => "is gone".to_owned(),
        };
        self.close_with_last_words(&how);
    }

    fn close_with_last_words(&mut self, why: &str) {
        let words = words::last_line(&self.words);
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
    pub(crate) fn end(&mut self) {
        let is_listening = self.state != State::Preparing;
        self.reap(if is_listening {
            END_PATIENCE
        } else {
            Duration::ZERO
        });
        self.state = State::Closed;
    }

    /// Kills and reaps one that was executed and cannot be watched: nobody else reaps it in somebody's program.
    pub(crate) fn give_up(pid: i32, pidfd: Option<OwnedFd>, ends: Ends, poller: &Poller) {
        let open = || pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok();
        if let Some(pidfd) = pidfd.or_else(open) {
            let mut server = Self::new(pid, pidfd, ends, Patience::default());
            server.hang_up(poller);
            server.end();
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

/// Whether a child found its server dead when it entered: no other one would find it alive.
fn has_lost_parent(entered: &Entered) -> bool {
    matches!(entered.result, Err(failure) if failure.step == Step::ParentDeath)
}

#[cfg(test)]
mod tests;
