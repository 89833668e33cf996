//! The server's end of the link.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getpid, getppid, getrlimit, pidfd_open};

use super::message::{Command, Report, VERSION};
use super::order::{Order, Trace};
use super::pages;
use super::socket;
use super::wire::Wire as _;
use crate::clearing::{Clearing, Left};
use crate::error::Error;
use crate::orphans::reap;
use crate::poller::Poller;
use crate::sys::signal::{self, SignalSet};
use crate::sys::wait::{Target, try_wait};
use crate::sys::{self, own_pid};
use crate::tree::{Scope, Tree};

/// How many bytes of the reason for a refusal are sent.
const REFUSAL_BYTES: usize = 1000;
/// Poller token of the link. The token of a worker is the number of its order, from 1 on.
const LINK: u64 = 0;
/// Poller token of the deaths of children.
const ORPHANS: u64 = u64::MAX;
/// From this number of workers on it pays to gather pages, which takes as long as 10 to 40 forks.
const MANY_WORKERS: u64 = 32;
/// How often we look at a dead worker with a tracer: no event says when its tracer is done.
const TRACED_POLL: Duration = Duration::from_millis(10);

/// A fork server's connection to the engine. Use it on the thread that forks, which must outlive the workers.
pub struct Link {
    /// Pid of the process that made it. In children of that process nothing may be closed: there the numbers may
    /// belong to other files.
    pid: i32,
    ends: Option<Ends>,
    /// The limit of open files that this process was given.
    open_files: Rlimit,
    trace: Arc<Trace>,
    /// The command that this process serves as the branch of a warm server; `None` for a server of one job.
    command: Option<i32>,
}

struct Ends {
    socket: OwnedFd,
    poller: Poller,
    workers: BTreeMap<u64, Worker>,
    /// Workers of the orders up to this one are reaped when they are dead.
    reaped: u64,
    /// Whether its memory was gathered into huge pages. A warm server does that before it has branches.
    is_gathered: bool,
    /// SIGCHLD, in a branch, which adopts what its workers leave.
    intake: Option<OwnedFd>,
    /// Kept until the engine orders a worker, by which time it has met this branch.
    release: Option<OwnedFd>,
    /// Orders whose workers are dead, but whose deaths the kernel does not show us yet.
    traced: Vec<u64>,
    /// When to look at these again.
    traced_due: Option<Instant>,
}

struct Worker {
    pid: i32,
    /// `None` once the worker is dead.
    pidfd: Option<OwnedFd>,
}

impl Link {
    /// Takes over the descriptor that this process got from the engine, and says hello.
    pub fn new(fd: RawFd) -> Result<Self, Error> {
        let socket = sys::take_over(fd).map_err(Error::os("take the link"))?;
        Self::over(socket, Arc::default(), None, None)
    }

    /// The link of a branch, which keeps the state that imports have left in the warm server.
    /// `release`: what a server before waits for, until the engine has met this process.
    pub(super) fn of_branch(
        socket: OwnedFd,
        trace: Arc<Trace>,
        command: i32,
        release: Option<OwnedFd>,
    ) -> Result<Self, Error> {
        Self::over(socket, trace, Some(command), release)
    }

    fn over(
        socket: OwnedFd,
        trace: Arc<Trace>,
        command: Option<i32>,
        release: Option<OwnedFd>,
    ) -> Result<Self, Error> {
        let poller = Poller::new()?;
        poller.watch(&socket, LINK)?;
        let intake = command.map(|_| signal::intake(SignalSet::of(&[libc::SIGCHLD])));
        let intake = intake.transpose().map_err(Error::os("signalfd"))?;
        if let Some(intake) = &intake {
            poller.watch(intake, ORPHANS)?;
        }
        let hello = Report::Hello { version: VERSION }.encode();
        let own =
            pidfd_open(getpid(), PidfdFlags::empty()).map_err(Error::os("open a descriptor of itself"))?;
        socket::send(&socket, &hello, &[own.as_fd()], true).map_err(Error::os("speak to the engine"))?;
        let ends = Ends {
            socket,
            poller,
            workers: BTreeMap::new(),
            reaped: 0,
            is_gathered: command.is_some(),
            intake,
            release,
            traced: Vec::new(),
            traced_due: None,
        };
        Ok(Self {
            pid: own_pid(),
            ends: Some(ends),
            open_files: getrlimit(Resource::Nofile),
            trace,
            command,
        })
    }

    /// Call this after the imports. Notes the settings that imports have changed, because workers must get them. Then
    /// changes the settings of this process to those that a server needs.
    pub fn settle(&mut self) -> Result<(), Error> {
        self.trace = Trace::note(&self.open_files)?;
        Ok(())
    }

    /// Call this when the engine has hung up. A branch ends everything that is left below it, because it is out of
    /// reach for the agent and its guard, and tells those who still listen that nothing is left.
    pub fn clear(&self) {
        let Ok(ends) = self.ends() else { return };
        if let Some(intake) = &ends.intake
            && Clearing::begin(Tree::open(), Left::default()).finish(
                Scope::below_us(&[]),
                intake.as_fd(),
                || false,
            )
        {
            let _ = socket::send(&ends.socket, &Report::Cleared.encode(), &[], false);
        }
    }

    /// Tells the engine that the server takes orders.
    pub fn ready(&self) -> Result<(), Error> {
        self.ends()?.tell(&Report::Ready)
    }

    /// Tells the engine why the server takes no orders.
    pub fn refuse(&self, text: &[u8]) -> Result<(), Error> {
        let text = text[..text.len().min(REFUSAL_BYTES)].to_vec();
        self.ends()?.tell(&Report::Refused { text })
    }

    /// Waits for an order, and meanwhile reports workers that have ended. `None`: the engine has hung up.
    pub fn next_order(&mut self) -> Result<Option<Order>, Error> {
        let pid = self.pid;
        let trace = Arc::clone(&self.trace);
        let observer = self.command.unwrap_or_else(|| Pid::as_raw(getppid()));
        let ends = self.ends_mut()?;
        loop {
            for token in ends.poller.wait(ends.until_due())? {
                match token {
                    LINK => {}
                    ORPHANS => ends.reap_orphans(),
                    order => ends.tell_of_death(order)?,
                }
            }
            ends.retry_traced()?;
            match socket::receive(&ends.socket) {
                Ok(None) => {}
                Ok(Some((bytes, fds))) => match ends.heard(&bytes) {
                    Some(Command::Start { order }) => {
                        return Order::new(order, pid, observer, trace, fds)
                            .map(Some)
                            .map_err(Error::os("read an order"));
                    }
                    Some(Command::Reap { through }) => ends.reap(through),
                    Some(Command::Expect { workers }) => ends.expect(workers),
                    None => return Err(bad_message()),
                },
                Err(_) => return Ok(None),
            }
        }
    }

    /// Reports the process that was forked for an order.
    pub fn forked(&mut self, order: &mut Order, pid: i32) -> Result<(), Error> {
        let ends = self.ends_mut()?;
        // If no other process holds the child's end of the gate open, the engine sees on its own end when the child
        // ends.
        order.let_go();
        ends.take_in(order.number, pid)
    }

    /// Reports that no process could be forked for an order.
    pub fn not_forked(&mut self, order: &mut Order, errno: i32) -> Result<(), Error> {
        let ends = self.ends_mut()?;
        order.let_go();
        let order = order.number;
        ends.tell(&Report::NotForked { order, errno })
    }

    fn ends(&self) -> Result<&Ends, Error> {
        self.ends
            .as_ref()
            .filter(|_| self.pid == own_pid())
            .ok_or(Error::Forked)
    }

    fn ends_mut(&mut self) -> Result<&mut Ends, Error> {
        let is_own = self.pid == own_pid();
        self.ends.as_mut().filter(|_| is_own).ok_or(Error::Forked)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // `ends` is only empty while the link is dropped.
        self.ends
            .as_ref()
            .map_or(rustix::stdio::stdin(), |ends| ends.socket.as_fd())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if self.pid != own_pid() {
            std::mem::forget(self.ends.take());
        }
    }
}

impl Ends {
    fn heard(&mut self, bytes: &[u8]) -> Option<Command> {
        let command = Command::decode(bytes);
        if matches!(command, Some(Command::Start { .. })) {
            self.release = None;
        }
        command
    }

    fn tell(&self, report: &Report) -> Result<(), Error> {
        socket::send(&self.socket, &report.encode(), &[], true).map_err(Error::os("speak to the engine"))
    }

    /// Prepares for this many workers.
    fn expect(&mut self, workers: u64) {
        if workers >= MANY_WORKERS && !self.is_gathered {
            self.is_gathered = true;
            pages::gather();
        }
    }

    /// Time until traced dead workers are looked at again; `None` if there are none.
    fn until_due(&self) -> Option<Duration> {
        let due = self.traced_due?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    /// Looks again at dead workers that were traced.
    fn retry_traced(&mut self) -> Result<(), Error> {
        if self.traced_due.is_some_and(|due| due <= Instant::now()) {
            self.traced_due = None;
            for order in std::mem::take(&mut self.traced) {
                self.tell_of_death(order)?;
            }
        }
        Ok(())
    }

    /// Reports the child that was forked for an order.
    fn take_in(&mut self, order: u64, pid: i32) -> Result<(), Error> {
        let pidfd = match self.watch(order, pid) {
            Ok(pidfd) => pidfd,
            // The child ends at its gate, because the engine closes it.
            Err(errno) => {
                let errno = errno.raw_os_error();
                return self.tell(&Report::NotForked { order, errno });
            }
        };
        let report = Report::Forked { order }.encode();
        socket::send(&self.socket, &report, &[pidfd.as_fd()], true)
            .map_err(Error::os("speak to the engine"))?;
        let pidfd = Some(pidfd);
        self.workers.insert(order, Worker { pid, pidfd });
        Ok(())
    }

    /// Lets the poller report the death of a child.
    fn watch(&self, order: u64, pid: i32) -> Result<OwnedFd, Errno> {
        let process = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
        let pidfd = pidfd_open(process, PidfdFlags::empty())?;
        self.poller.watch(&pidfd, order).map_err(|_| Errno::NOMEM)?;
        Ok(pidfd)
    }

    fn tell_of_death(&mut self, order: u64) -> Result<(), Error> {
        let Some(worker) = self.workers.get_mut(&order) else {
            return Ok(());
        };
        let Ok(Some(death)) = try_wait(Target::Pid(worker.pid), false) else {
            // The kernel shows the death to the tracer first.
            if let Some(pidfd) = &worker.pidfd {
                self.poller.forget(pidfd);
                self.traced.push(order);
                self.traced_due = Some(Instant::now() + TRACED_POLL);
            }
            return Ok(());
        };
        if let Some(pidfd) = worker.pidfd.take() {
            self.poller.forget(pidfd);
        }
        self.tell(&Report::Ended { order, death })?;
        self.reap(self.reaped);
        Ok(())
    }

    /// Reaps the dead workers of all orders up to this one or any earlier limit.
    fn reap(&mut self, through: u64) {
        self.reaped = self.reaped.max(through);
        let reaped = self.reaped;
        self.workers.retain(|order, worker| {
            let is_over = *order <= reaped && worker.pidfd.is_none();
            if is_over {
                // It is a zombie and our child, and no other code waits for it.
                let _ = try_wait(Target::Pid(worker.pid), true);
            }
            !is_over
        });
    }

    /// Reaps what workers have left, as it dies.
    fn reap_orphans(&self) {
        if let Some(intake) = &self.intake {
            signal::drain(intake.as_fd());
        }
        let workers: Vec<i32> = self.workers.values().map(|worker| worker.pid).collect();
        reap(&workers);
    }
}

fn bad_message() -> Error {
    Error::os("understand the engine")(io::Error::from(io::ErrorKind::InvalidData))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::poller::is_readable;

    #[test]
    fn the_server_before_stays_until_the_first_order_because_the_engine_may_not_have_met_the_branch() {
        let (_engine, theirs) = socket::pair().unwrap();
        let (end, release) = rustix::pipe::pipe().unwrap();
        let mut link = Link::of_branch(theirs, Arc::default(), own_pid(), Some(release)).unwrap();
        let mut hears = |command: Command| {
            let _ = link.ends_mut().unwrap().heard(&command.encode());
            is_readable(&end)
        };
        assert!(!hears(Command::Expect { workers: 2 }));
        assert!(!hears(Command::Reap { through: 0 }));
        assert!(hears(Command::Start { order: 1 }));
    }
}
