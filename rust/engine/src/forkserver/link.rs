//! The server's end of the link.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Resource, Rlimit, WaitOptions, getpid, getrlimit, pidfd_open, setrlimit, waitpid,
};

use super::message::{Command, Report, VERSION};
use super::order::{Order, Trace};
use super::pages;
use super::socket;
use crate::error::Error;
use crate::poller::Poller;
use crate::sys;
use crate::sys::wait::{Target, try_wait};

/// Bytes that are kept of what a server says of its refusal.
const REFUSAL_BYTES: usize = 1000;
/// What the poller calls the link; workers go by the numbers of their orders, which begin with 1.
const LINK: u64 = 0;
/// Workers for which it pays at once to gather pages, which takes as long as 10 to 40 forks, and to fork the next
/// ones ahead.
const MANY_WORKERS: u64 = 32;
/// How often a dead worker is looked at that somebody traces: nothing tells that its tracer is done with it.
const TRACED_POLL: Duration = Duration::from_millis(10);
/// Time after the last order that belongs to its worker, before others are forked ahead.
const AHEAD_DELAY: Duration = Duration::from_secs(1);

/// A fork server's connection with the engine. To be used by the thread that forks, which must outlive the workers.
pub struct Link {
    /// The process that made it. In its children nothing is to be closed: the numbers are another's there.
    pid: i32,
    ends: Option<Ends>,
    /// The limit of open files that this process was given.
    open_files: Rlimit,
    trace: Arc<Trace>,
}

struct Ends {
    socket: OwnedFd,
    poller: Poller,
    workers: BTreeMap<u64, Worker>,
    /// Workers of the orders up to this one are reaped when they are dead.
    reaped: u64,
    /// Its memory was made cheap to fork.
    is_gathered: bool,
    /// Children that wait for their orders.
    spares: VecDeque<Spare>,
    /// How many of them there shall be.
    wanted: usize,
    /// When the next of them is forked. `None`: when an order has come.
    spare_due: Option<Instant>,
    /// Orders whose workers are dead, which is not shown to us yet.
    traced: Vec<u64>,
    /// When these are looked at again.
    traced_due: Option<Instant>,
}

/// A child that waits for its order at the other end.
struct Spare {
    pid: i32,
    end: OwnedFd,
}

struct Worker {
    pid: i32,
    /// `None` for one that is dead.
    pidfd: Option<OwnedFd>,
}

impl Link {
    /// Takes over the descriptor that the engine has left to this process, and says hello.
    pub fn new(fd: RawFd) -> Result<Self, Error> {
        let socket = sys::take_over(fd).map_err(Error::os("take the link"))?;
        let poller = Poller::new()?;
        poller.watch(&socket, LINK)?;
        let hello = Report::Hello { version: VERSION }.encode();
        socket::send(&socket, &hello, &[], true).map_err(Error::os("speak to the engine"))?;
        let ends = Ends {
            socket,
            poller,
            workers: BTreeMap::new(),
            reaped: 0,
            is_gathered: false,
            spares: VecDeque::new(),
            wanted: 0,
            spare_due: None,
            traced: Vec::new(),
            traced_due: None,
        };
        Ok(Self {
            pid: own_pid(),
            ends: Some(ends),
            open_files: getrlimit(Resource::Nofile),
            trace: Arc::default(),
        })
    }

    /// Everything is imported: notes what workers are to have of that, which this process does not keep for itself.
    pub fn settle(&mut self) -> Result<(), Error> {
        let open_files = getrlimit(Resource::Nofile);
        self.trace = Arc::new(Trace {
            actions: sys::signal::own_actions(),
            open_files: (open_files != self.open_files).then_some(open_files),
        });
        sys::exit::write_streams();
        // Whoever ignores it is not told how its children end.
        sys::signal::reset_child_signal().map_err(Error::os("listen for deaths"))?;
        raise_open_files();
        Ok(())
    }

    /// Says that orders may come.
    pub fn ready(&self) -> Result<(), Error> {
        self.ends()?.tell(&Report::Ready)
    }

    /// Says why none may come.
    pub fn refuse(&self, text: &[u8]) -> Result<(), Error> {
        let text = text[..text.len().min(REFUSAL_BYTES)].to_vec();
        self.ends()?.tell(&Report::Refused { text })
    }

    /// Waits for an order that needs a fork, and tells meanwhile which workers have ended. One that comes ahead of its
    /// order needs a fork, too. `None`: the engine has hung up.
    pub fn next_order(&mut self) -> Result<Option<Order>, Error> {
        let pid = self.pid;
        let trace = Arc::clone(&self.trace);
        let ends = self.ends_mut()?;
        loop {
            for token in ends.poller.wait(ends.until_due())? {
                if token != LINK {
                    ends.tell_of_death(token)?;
                }
            }
            ends.retry_traced()?;
            match socket::receive(&ends.socket) {
                Ok(None) => {
                    if ends.until_spare() == Some(Duration::ZERO) {
                        match Order::ahead(pid, Arc::clone(&trace)) {
                            Ok(order) => return Ok(Some(order)),
                            // It can do without.
                            Err(_) => ends.expect(0, false),
                        }
                    }
                }
                Ok(Some((bytes, fds))) => match Command::decode(&bytes) {
                    Some(Command::Start { order }) => {
                        ends.spare_due = Some(Instant::now() + AHEAD_DELAY);
                        if let Some(spare) = ends.hand_over(&bytes, &fds) {
                            drop(fds);
                            ends.take_in(order, spare)?;
                            continue;
                        }
                        return Order::new(order, pid, trace, fds)
                            .map(Some)
                            .map_err(Error::os("read an order"));
                    }
                    Some(Command::Reap { through }) => ends.reap(through),
                    Some(Command::Expect { workers, again }) => ends.expect(workers, again),
                    None => return Err(bad_message()),
                },
                Err(_) => return Ok(None),
            }
        }
    }

    /// Says which process was forked for an order.
    pub fn forked(&mut self, order: &mut Order, pid: i32) -> Result<(), Error> {
        let ends = self.ends_mut()?;
        if let Some(end) = order.take_ahead() {
            ends.spares.push_back(Spare { pid, end });
            return Ok(());
        }
        // Where the child's gate is held open by nobody else, its end tells of the child's.
        order.let_go();
        ends.take_in(order.number(), pid)
    }

    /// Says that no process could be forked for an order.
    pub fn not_forked(&mut self, order: &mut Order, errno: i32) -> Result<(), Error> {
        let ends = self.ends_mut()?;
        if order.take_ahead().is_some() {
            // Nobody needs it yet, and the room that is left may be needed.
            ends.expect(0, false);
            return Ok(());
        }
        order.let_go();
        let order = order.number();
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
        // There from the beginning to the end.
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

impl Spare {
    /// Kills and reaps it: nobody has heard of it.
    fn end(self) {
        // Our unreaped child pins its pid.
        let _ = sys::signal::send(self.pid, libc::SIGKILL);
        let _ = waitpid(Pid::from_raw(self.pid), WaitOptions::empty());
    }
}

impl Ends {
    fn tell(&self, report: &Report) -> Result<(), Error> {
        socket::send(&self.socket, &report.encode(), &[], true).map_err(Error::os("speak to the engine"))
    }

    /// Prepares for so many workers. `again`: as many may come later.
    fn expect(&mut self, workers: u64, again: bool) {
        let are_many = workers >= MANY_WORKERS;
        if are_many && !self.is_gathered {
            self.is_gathered = true;
            pages::gather();
        }
        self.wanted = if again && are_many { workers as usize } else { 0 };
        // What is there already is taken by the orders that come now, or by nobody.
        self.spare_due = None;
        let kept = self.spares.len().min(workers as usize);
        for spare in self.spares.split_off(kept) {
            spare.end();
        }
    }

    /// Time until a child is to be forked ahead; `None` for ever.
    fn until_spare(&self) -> Option<Duration> {
        let due = self.spare_due.filter(|_| self.spares.len() < self.wanted)?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    /// Time until something is to be done unasked; `None` for ever.
    fn until_due(&self) -> Option<Duration> {
        let until = |due: Instant| due.saturating_duration_since(Instant::now());
        [self.until_spare(), self.traced_due.map(until)]
            .into_iter()
            .flatten()
            .min()
    }

    /// Looks again at the dead that were traced.
    fn retry_traced(&mut self) -> Result<(), Error> {
        if self.traced_due.is_some_and(|due| due <= Instant::now()) {
            self.traced_due = None;
            for order in std::mem::take(&mut self.traced) {
                self.tell_of_death(order)?;
            }
        }
        Ok(())
    }

    /// Gives an order to a child that waits for one. Its pid; `None` if none waits.
    fn hand_over(&mut self, order: &[u8], fds: &[OwnedFd]) -> Option<i32> {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        while let Some(spare) = self.spares.pop_front() {
            if socket::send(&spare.end, order, &fds, false).is_ok() {
                return Some(spare.pid);
            }
            spare.end();
        }
        None
    }

    /// Tells of the child that was forked for an order.
    fn take_in(&mut self, order: u64, pid: i32) -> Result<(), Error> {
        let pidfd = match self.watch(order, pid) {
            Ok(pidfd) => pidfd,
            // The child ends at its gate, which the engine closes.
            Err(errno) => {
                let errno = errno.raw_os_error();
                return self.tell(&Report::NotForked { order, errno });
            }
        };
        let report = Report::Forked { order, pid }.encode();
        socket::send(&self.socket, &report, &[pidfd.as_fd()], true)
            .map_err(Error::os("speak to the engine"))?;
        let pidfd = Some(pidfd);
        self.workers.insert(order, Worker { pid, pidfd });
        Ok(())
    }

    /// Has the poller tell of the death of a child.
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
            // It is shown to its tracer first.
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

    /// Reaps what is dead of the orders up to this one, and of those that were to be reaped before.
    fn reap(&mut self, through: u64) {
        self.reaped = self.reaped.max(through);
        let reaped = self.reaped;
        self.workers.retain(|order, worker| {
            let is_over = *order <= reaped && worker.pidfd.is_none();
            if is_over {
                // It is a zombie, and a child of ours that nobody else waits for.
                let _ = try_wait(Target::Pid(worker.pid), true);
            }
            !is_over
        });
    }
}

/// A worker gets its own limit when it enters; the server needs a descriptor for each.
fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // With less it serves fewer workers.
    let _ = setrlimit(Resource::Nofile, most);
}

fn own_pid() -> i32 {
    getpid().as_raw_nonzero().get()
}

fn bad_message() -> Error {
    Error::os("understand the engine")(io::Error::from(io::ErrorKind::InvalidData))
}

#[cfg(test)]
mod tests {
    #![expect(clippy::disallowed_types, reason = "the processes here stand for children")]

    use std::process;

    use super::*;

    fn ends() -> (Ends, OwnedFd) {
        let (ours, theirs) = socket::pair().unwrap();
        let ends = Ends {
            socket: ours,
            poller: Poller::new().unwrap(),
            workers: BTreeMap::new(),
            reaped: 0,
            is_gathered: true,
            spares: VecDeque::new(),
            wanted: 0,
            spare_due: None,
            traced: Vec::new(),
            traced_due: None,
        };
        (ends, theirs)
    }

    #[test]
    fn children_are_forked_ahead_where_many_may_come_again_and_have_come() {
        let before = Instant::now().checked_sub(AHEAD_DELAY);
        for (workers, again, ordered, expected) in [
            (MANY_WORKERS, true, before, Some(Duration::ZERO)),
            (MANY_WORKERS, true, None, None),
            (MANY_WORKERS, false, before, None),
            (MANY_WORKERS - 1, true, before, None),
        ] {
            let (mut ends, _theirs) = ends();
            ends.expect(workers, again);
            assert_eq!(ends.until_spare(), None);
            ends.spare_due = ordered;
            assert_eq!(ends.until_spare(), expected, "{workers} {again} {ordered:?}");
            // Orders that are about to come are not delayed.
            ends.expect(workers, again);
            assert_eq!(ends.until_spare(), None);
        }
    }

    #[test]
    fn an_order_goes_to_the_first_that_lives_and_those_beyond_the_workers_end() {
        let _children = crate::orphans::sharing::beside_others();
        let (mut ends, _theirs) = ends();
        let mut children = Vec::new();
        let mut others = Vec::new();
        for _ in 0..4 {
            let child = process::Command::new("sleep").arg("600").spawn().unwrap();
            let (end, other) = socket::pair().unwrap();
            let pid = child.id() as i32;
            ends.spares.push_back(Spare { pid, end });
            children.push(child);
            others.push(other);
        }
        // It hears nothing any more.
        drop(others.remove(0));
        ends.expect(3, true);
        assert_eq!(ends.spares.len(), 3);
        let chosen = children.remove(1).id() as i32;
        assert_eq!(ends.hand_over(b"order", &[]), Some(chosen));
        assert_eq!(socket::receive(&others[0]).unwrap().unwrap().0, b"order");
        ends.expect(0, false);
        assert_eq!(ends.hand_over(b"order", &[]), None);
        for mut child in children {
            assert_eq!(child.wait().unwrap_err().raw_os_error(), Some(libc::ECHILD));
        }
        assert_eq!(try_wait(Target::Pid(chosen), false).unwrap(), None);
        let (end, _) = socket::pair().unwrap();
        Spare { pid: chosen, end }.end();
    }
}
