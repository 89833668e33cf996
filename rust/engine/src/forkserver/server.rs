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
use crate::poller::{Poller, is_readable, wait_readable};
use crate::sys::clone::Step;
use crate::sys::signal;
use crate::sys::wait::{Death, Target, try_wait};

/// The longest time in which a server has imported what it is to import. Its own timer, which is that of `IMPORT_S`
/// in `dsl.forkserver.become`, rings before, unless somebody has stopped it or it hangs in the kernel.
pub const IMPORT_PATIENCE: Duration = Duration::from_secs(630);
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
/// Bytes looked at of a server's last words, and shown of them.
const LAST_WORDS_BYTES: usize = 4096;
const SHOWN_BYTES: usize = 300;

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
    /// When its workers do not wait for its imports any longer.
    due: Instant,
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
    /// A server that was executed with these ends, and may import until then.
    pub(crate) fn new(pid: i32, pidfd: OwnedFd, ends: Ends, due: Instant) -> Self {
        Self {
            pid,
            pidfd: Some(pidfd),
            link: Some(ends.ours),
            words: ends.words,
            state: State::Preparing,
            due,
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

    /// When it is done without if it has not imported everything by then.
    pub(crate) fn due(&self) -> Option<Instant> {
        (self.state == State::Preparing).then_some(self.due)
    }

    /// Does without it if its imports take too long. It is killed: nobody else can, if it does not hear of its own
    /// timer.
    pub(crate) fn end_late_imports(&mut self, now: Instant) {
        if self.due().is_none_or(|due| now < due) {
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
            Some(Report::Refused { text }) => self.close(format!("refused: {}", one_line(&text))),
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
    fn close(&mut self, why: String) {
        if self.state != State::Closed {
            self.state = State::Closed;
            self.news.push(News::Lost(why));
        }
    }

    /// Tells it how many workers will be ordered. `again`: as many may be when these have ended.
    pub(crate) fn expect(&self, workers: usize, again: bool) {
        if let Some(link) = &self.link {
            let expect = Command::Expect {
                workers: workers as u64,
                again,
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
        let words = self.last_words();
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
            let mut server = Self::new(pid, pidfd, ends, Instant::now());
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

    /// The last line that it wrote.
    fn last_words(&self) -> String {
        let length = self.words.metadata().map_or(0, |data| data.len());
        let start = length.saturating_sub(LAST_WORDS_BYTES as u64);
        let mut bytes = vec![0; LAST_WORDS_BYTES];
        let count = self.words.read_at(&mut bytes, start).unwrap_or(0);
        let text = bytes[..count].trim_ascii_end();
        let begin = text
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |at| at + 1);
        one_line(&text[begin..])
    }
}

/// Whether a child found its server dead when it entered: no other one would find it alive.
fn has_lost_parent(entered: &Entered) -> bool {
    matches!(entered.result, Err(failure) if failure.step == Step::ParentDeath)
}

/// Text of somebody else as one line of ours.
fn one_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let words: Vec<&str> = text
        .split(|letter: char| letter.is_control())
        .map(str::trim)
        .collect();
    let mut line = words
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    let end = (0..=SHOWN_BYTES.min(line.len())).rfind(|&at| line.is_char_boundary(at));
    line.truncate(end.unwrap_or(0));
    line
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_types, reason = "the process here stands for a server")]

    use std::process;

    use super::*;
    use crate::sys::clone::Failure;

    /// A server without a process, and what keeps its link and its life open.
    fn server() -> (Server, [OwnedFd; 2]) {
        let (alive, writer) = rustix::pipe::pipe().unwrap();
        let Ends { ours, theirs, words } = Ends::new().unwrap();
        let copy = theirs.try_clone().unwrap();
        (
            Server::new(0, alive, Ends { ours, theirs, words }, Instant::now()),
            [copy, writer],
        )
    }

    fn lost(text: &str) -> News {
        News::Lost(text.to_owned())
    }

    fn death(pid: i32) -> Death {
        Death {
            pid,
            status: 0,
            signaled: false,
            core: false,
            user: Duration::ZERO,
            system: Duration::ZERO,
            max_rss: 0,
        }
    }

    #[test]
    fn it_is_ready_once_and_lost_once() {
        let refused = || Report::Refused {
            text: b"a thread\nruns".to_vec(),
        };
        for (reports, state, news) in [
            (vec![], State::Preparing, vec![]),
            (
                vec![Some(Report::Hello { version: VERSION })],
                State::Preparing,
                vec![],
            ),
            (
                vec![Some(Report::Ready), Some(Report::Ready)],
                State::Ready,
                vec![News::Ready],
            ),
            (
                vec![Some(refused()), Some(Report::Ready), Some(refused())],
                State::Closed,
                vec![lost("refused: a thread runs")],
            ),
            (
                vec![Some(Report::Hello { version: 9 }), Some(Report::Ready)],
                State::Closed,
                vec![lost("speaks version 9 of the protocol, not 3")],
            ),
            (
                vec![Some(Report::Ready), None],
                State::Closed,
                vec![News::Ready, lost("cannot be understood")],
            ),
        ] {
            let (mut server, _open) = server();
            for report in reports {
                server.hear(report, Vec::new());
            }
            assert_eq!((server.state(), server.take_news()), (state, news));
        }
    }

    #[test]
    fn imports_are_waited_for_until_they_are_due_and_no_longer() {
        let past = Instant::now();
        let second = Duration::from_secs(1);
        let now = past + second;
        for (state, due, is_out_of_time) in [
            (State::Preparing, now + second, false),
            (State::Preparing, now, true),
            (State::Preparing, past, true),
            (State::Ready, past, false),
            (State::Closed, past, false),
        ] {
            let (mut server, _open) = server();
            // Nobody to be killed.
            server.pidfd = None;
            (server.state, server.due) = (state, due);
            server.words.write_all_at(b"while it imported x\n", 0).unwrap();
            assert_eq!(server.due().is_some(), state == State::Preparing);
            server.end_late_imports(now);
            let news = lost("ran out of time: while it imported x");
            let (state, news) = if is_out_of_time {
                (State::Closed, vec![news])
            } else {
                (state, vec![])
            };
            assert_eq!((server.state(), server.take_news()), (state, news));
        }
    }

    #[test]
    fn deaths_are_kept_until_nothing_is_left_of_their_group() {
        let (mut server, _open) = server();
        server.orders = 2;
        let ended = |order, pid| {
            let death = death(pid);
            Some(Report::Ended { order, death })
        };
        server.hear(ended(2, 12), Vec::new());
        // Whoever asks may ask again.
        assert_eq!(server.death_of(2), Some(death(12)));
        assert_eq!(server.death_of(2), Some(death(12)));
        server.reap_all();
        server.hear(ended(1, 11), Vec::new());
        server.hear(ended(3, 13), Vec::new());
        assert_eq!(server.deaths.keys().copied().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn answers_to_the_orders_of_a_group_that_has_ended_are_not_kept() {
        let (mut server, _open) = server();
        server.orders = 2;
        server.reap_all();
        let (pidfd, other) = rustix::pipe::pipe().unwrap();
        server.hear(Some(Report::Forked { order: 1, pid: 11 }), vec![pidfd]);
        server.hear(Some(Report::NotForked { order: 2, errno: 11 }), Vec::new());
        server.hear(Some(Report::Forked { order: 3, pid: 13 }), vec![other]);
        assert_eq!(server.answers.keys().copied().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn what_is_heard_by_who_asks_for_something_else_is_to_be_acted_on() {
        let (mut server, [theirs, _alive]) = server();
        let poller = Poller::new().unwrap();
        assert!(!server.has_told(1, &poller) && !server.has_heard());
        let answer = Report::NotForked { order: 2, errno: 11 };
        socket::send(&theirs, &answer.encode(), &[], false).unwrap();
        assert!(!server.has_told(1, &poller));
        assert!(server.has_heard() && server.take_heard() && !server.has_heard());
    }

    #[test]
    fn one_that_cannot_be_watched_leaves_no_zombie() {
        let _children = crate::orphans::sharing::beside_others();
        let mut child = process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = child.id() as i32;
        Server::give_up(pid, None, Ends::new().unwrap(), &Poller::new().unwrap());
        assert_eq!(child.wait().unwrap_err().raw_os_error(), Some(libc::ECHILD));
    }

    #[test]
    fn an_order_comes_to_a_worker_or_to_nothing_and_is_not_waited_for() {
        let entered = |result| Entered {
            in_cgroup: true,
            result,
        };
        let lost_parent = Failure {
            step: Step::ParentDeath,
            errno: 3,
        };
        let forked = Report::Forked { order: 1, pid: 77 };
        let not_forked = Report::NotForked { order: 1, errno: 11 };
        let late = format!("did not fork in {} s", FORK_PATIENCE.as_secs());
        let barren = "could not fork: Resource temporarily unavailable (os error 11)";
        let nothing = "forked a worker that came to nothing";
        let good = || Some(entered(Ok(None)).encode());
        let orphan = || Some(entered(Err(lost_parent)).encode());
        let answer = || Some(forked.clone());
        for (report, gate, is_late, what, why) in [
            (None, None, false, "ordered", ""),
            (None, None, true, "nothing", late.as_str()),
            (Some(not_forked), None, false, "nothing", barren),
            (answer(), None, false, "forked", ""),
            (answer(), None, true, "nothing", nothing),
            (answer(), good(), false, "worker", ""),
            (answer(), good(), true, "worker", ""),
            (answer(), orphan(), false, "nothing", nothing),
            (answer(), Some(b"x".to_vec()), false, "nothing", nothing),
        ] {
            let (mut server, _open) = server();
            server.state = State::Ready;
            let delivered = deliver(&mut server, report, gate, is_late);
            let news = if why.is_empty() { vec![] } else { vec![lost(why)] };
            assert_eq!((delivered, server.take_news()), (what, news));
        }
    }

    /// What comes of an order, when the server and the gate have said this.
    fn deliver(
        server: &mut Server,
        report: Option<Report>,
        gate: Option<Vec<u8>>,
        is_late: bool,
    ) -> &'static str {
        let (ours, theirs) = socket::pair().unwrap();
        let ordered = Ordered { order: 1, gate: ours };
        if let Some(bytes) = gate {
            socket::send(&theirs, &bytes, &[], false).unwrap();
        }
        if let Some(report) = report {
            let (pidfd, _) = rustix::pipe::pipe().unwrap();
            server.hear(Some(report), vec![pidfd]);
        }
        match server.deliver(&ordered, is_late, &Poller::new().unwrap()) {
            Delivered::Worker(delivery) => {
                assert_eq!((delivery.pid, delivery.entered.result), (77, Ok(None)));
                "worker"
            }
            Delivered::Ordered => "ordered",
            Delivered::Forked => "forked",
            Delivered::Nothing => "nothing",
        }
    }

    #[test]
    fn a_worker_that_is_cancelled_finds_its_gate_shut_whoever_holds_a_copy() {
        let (gate, theirs) = socket::pair().unwrap();
        let _copy = gate.try_clone().unwrap();
        let ordered = Ordered { order: 1, gate };
        ordered.cancel();
        assert_eq!(rustix::io::read(&theirs, &mut [0; 1]), Ok(0));
    }

    #[test]
    fn what_others_say_is_one_line_without_controls() {
        for (text, line) in [
            (&b""[..], ""),
            (b"no module named x\n", "no module named x"),
            (b"one\r\n  two\x1b[31m\0three\n", "one two [31m three"),
            (b"\xff\xfe", "\u{fffd}\u{fffd}"),
        ] {
            assert_eq!(one_line(text), line);
        }
        assert_eq!(one_line("\u{20ac}".repeat(200).as_bytes()).len(), 300);
        assert_eq!(one_line("x\u{20ac}".repeat(200).as_bytes()).len(), 300);
    }
}
