//! An epoll set whose events carry a token that the owner chooses, waits for single descriptors, and a bell by which one
//! thread wakes another.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

use crate::error::Error;

/// The longest wait: kernels before 5.11 allow at most 24.8 days.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Events taken from the kernel at once.
const BATCH: usize = 512;

/// What to wait for. The end of the other side is reported in any case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Interest {
    /// Bytes to read.
    pub read: bool,
    /// Room to write.
    pub write: bool,
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, self.read);
        flags.set(epoll::EventFlags::OUT, self.write);
        flags
    }
}

/// A descriptor on which something has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// The token of the descriptor.
    pub token: u64,
    /// Whether there is something to read.
    pub is_readable: bool,
    /// Whether the other side has ended, or the descriptor is broken.
    pub is_broken: bool,
}

/// An epoll set. Threads may share it: a waiting thread gets events of descriptors that another thread adds.
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// Makes an empty set.
    pub fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Error::os("epoll"))?;
        Ok(Self { epoll })
    }

    /// Reports when a descriptor is readable or hung up.
    pub fn watch(&self, fd: impl AsFd, token: u64) -> Result<(), Error> {
        self.add(fd, token, epoll::EventFlags::IN)
    }

    /// Reports what a caller is interested in.
    pub fn watch_for(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<(), Error> {
        self.add(fd, token, interest.flags())
    }

    /// Reports something else from now on for a descriptor that is watched.
    pub fn change(&self, fd: impl AsFd, token: u64, interest: Interest) -> Result<(), Error> {
        epoll::modify(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(token),
            interest.flags(),
        )
        .map_err(Error::os("epoll_ctl"))
    }

    /// Reports when the other side has ended, or says nothing more.
    pub(crate) fn watch_end(&self, fd: impl AsFd, token: u64) -> Result<(), Error> {
        self.add(fd, token, epoll::EventFlags::RDHUP)
    }

    /// Reports an exceptional condition, by which the kernel announces a change in one of its own files.
    pub(crate) fn watch_changes(&self, fd: impl AsFd, token: u64) -> Result<(), Error> {
        self.add(fd, token, epoll::EventFlags::PRI)
    }

    fn add(&self, fd: impl AsFd, token: u64, flags: epoll::EventFlags) -> Result<(), Error> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags).map_err(Error::os("epoll_ctl"))
    }

    /// Removes a descriptor from the set. Call it before the descriptor is closed: a forked helper may hold a copy,
    /// which would keep the entry.
    pub fn forget(&self, fd: impl AsFd) {
        // Fails only for a descriptor that is not watched.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until an event happens or the timeout (at most a day) is over. Returns the tokens in the kernel's order.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Result<Vec<u64>, Error> {
        let ready = self.wait_ready(timeout)?;
        Ok(ready.into_iter().map(|ready| ready.token).collect())
    }

    /// As `wait`, and says what has happened.
    pub fn wait_ready(&self, timeout: Option<Duration>) -> Result<Vec<Ready>, Error> {
        use epoll::EventFlags as Flags;
        let to_ready = |event: &epoll::Event| {
            let flags = event.flags;
            Ready {
                token: event.data.u64(),
                is_readable: flags.contains(Flags::IN),
                is_broken: flags.intersects(Flags::ERR | Flags::HUP),
            }
        };
        let mut list = [MaybeUninit::<epoll::Event>::uninit(); BATCH];
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout.min(LONGEST)).ok());
        match epoll::wait(&self.epoll, &mut list, timeout.as_ref()) {
            Ok((ready, _)) => Ok(ready.iter().map(to_ready).collect()),
            Err(Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(Error::os("epoll_wait")(error)),
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// Whether a descriptor is readable now, or was hung up.
pub(crate) fn is_readable(fd: impl AsFd) -> bool {
    wait_readable(&[fd.as_fd()], Duration::ZERO)
}

/// Waits until one of these descriptors is readable or hung up; false when the time is over.
pub(crate) fn wait_readable(fds: &[BorrowedFd<'_>], timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match poll_once(fds, PollFlags::IN, Some(left)) {
            Ok(false) if Instant::now() < deadline => {}
            ready => return ready == Ok(true),
        }
    }
}

/// Waits until one of these descriptors is as `flags` say, hung up or broken. False: the time is over (`None`: never), or
/// a signal handler has run.
pub fn poll_once(fds: &[BorrowedFd<'_>], flags: PollFlags, timeout: Option<Duration>) -> Result<bool, Errno> {
    let mut polled: Vec<PollFd<'_>> = fds.iter().map(|fd| PollFd::new(fd, flags)).collect();
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(&mut polled, timeout.as_ref()) {
        Err(Errno::INTR) => Ok(false),
        ready => ready.map(|count| count > 0),
    }
}

/// Becomes readable at the first ring and stays so until it is silenced, no matter how often it was rung.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// Makes a bell that has not been rung.
    pub fn new() -> Result<Self, Error> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        fd.map(Self).map_err(Error::os("eventfd"))
    }

    /// Rings the bell: makes it readable.
    pub fn ring(&self) {
        // The 64-bit counter cannot overflow in practice.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Whether the bell was rung and not silenced since.
    pub fn is_rung(&self) -> bool {
        is_readable(&self.0)
    }

    /// Makes the bell unreadable, and returns whether it was rung. If several threads call this, only one gets true.
    pub fn silence(&self) -> bool {
        let mut counter = [0u8; 8];
        rustix::io::read(&self.0, &mut counter).is_ok()
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
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

    #[test]
    fn rings_are_heard_until_it_is_silenced_and_only_once() {
        let bell = Bell::new().unwrap();
        assert!(!bell.is_rung());
        assert!(!bell.silence());
        bell.ring();
        bell.ring();
        assert!(bell.is_rung());
        assert!(bell.silence());
        assert!(!bell.is_rung());
        assert!(!bell.silence());
    }
}
