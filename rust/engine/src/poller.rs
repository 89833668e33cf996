//! An epoll set whose events carry a number of the owner's choice.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use crate::error::Error;

/// The longest wait, since kernels before 5.11 know none above 24.8 days.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Events taken from the kernel at once.
const BATCH: usize = 512;

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// An epoll set. It may be shared: what one thread adds, another that waits hears of.
pub(crate) struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    pub(crate) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::os("epoll"))?;
        Ok(Self { epoll })
    }

    /// Tells when a descriptor is readable or hung up.
    pub(crate) fn watch(&self, fd: impl AsFd, token: u64) -> Result<(), Error> {
        self.add(fd, token, epoll::EventFlags::IN)
    }

    /// Tells of an exceptional condition, which is how the kernel reports a change in a file of its own.
    pub(crate) fn watch_changes(&self, fd: impl AsFd, token: u64) -> Result<(), Error> {
        self.add(fd, token, epoll::EventFlags::PRI)
    }

    fn add(&self, fd: impl AsFd, token: u64, flags: epoll::EventFlags) -> Result<(), Error> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags).map_err(Error::os("epoll_ctl"))
    }

    /// Takes a descriptor out before it is closed: a forked helper may hold a copy, which would keep the entry.
    pub(crate) fn forget(&self, fd: impl AsFd) {
        // Fails only for what is not watched.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until something happens or the time, or a day, is over; the tokens, in the kernel's order.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Result<Vec<u64>, Error> {
        let mut list = [MaybeUninit::<epoll::Event>::uninit(); BATCH];
        let timeout = timeout.map(|timeout| timeout.min(LONGEST));
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        match epoll::wait(&self.epoll, &mut list, timeout.as_ref()) {
            Ok((ready, _)) => Ok(ready.iter().map(|event| event.data.u64()).collect()),
            Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(Error::os("epoll_wait")(error)),
        }
    }
}

/// Whether there is something to read from a descriptor now, or it was hung up.
pub(crate) fn is_readable(fd: impl AsFd) -> bool {
    wait_readable(&[fd.as_fd()], Duration::ZERO)
}

/// Waits until there is something to read from one of these, or it is hung up; false when the time is over.
pub(crate) fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match poll(&mut polled, Some(&left)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|count| count > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_heard_of_while_it_is_watched() {
        let poller = Poller::new().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        poller.watch(&read, 31).unwrap();
        rustix::io::write(&write, b"x").unwrap();
        let now = Some(Duration::ZERO);
        assert_eq!(poller.wait(now).unwrap(), [31]);
        poller.forget(&read);
        assert_eq!(poller.wait(now).unwrap(), [0u64; 0]);
        poller.watch(&read, 32).unwrap();
        assert_eq!(poller.wait(now).unwrap(), [32]);
    }
}
