//! The epoll set of a supervisor, in words of what an event is about.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{Timespec, epoll};

use crate::error::Error;

/// Events taken from the kernel at once.
const BATCH: usize = 512;

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// This worker has died.
    Worker(usize),
    /// There is something to read from this worker's stdout (0) or stderr (1).
    Pipe(usize, usize),
    /// A signal has come.
    Intake,
    /// The guard is gone.
    Guard,
    /// Another thread wants something.
    Wake,
    /// The attempt's cgroup has become empty, or is no more.
    Cgroup,
}

impl Source {
    fn encode(self) -> u64 {
        let (kind, number) = match self {
            Self::Worker(worker) => (0, worker),
            Self::Pipe(worker, stream) => (1, worker << 1 | stream),
            Self::Intake => (2, 0),
            Self::Guard => (3, 0),
            Self::Wake => (4, 0),
            Self::Cgroup => (5, 0),
        };
        (number as u64) << 3 | kind
    }

    fn decode(data: u64) -> Option<Self> {
        let number = (data >> 3) as usize;
        match data & 7 {
            0 => Some(Self::Worker(number)),
            1 => Some(Self::Pipe(number >> 1, number & 1)),
            2 => Some(Self::Intake),
            3 => Some(Self::Guard),
            4 => Some(Self::Wake),
            5 => Some(Self::Cgroup),
            _ => None,
        }
    }

    /// The kernel tells of a cgroup by an exceptional condition, of all else by readability.
    fn flags(self) -> epoll::EventFlags {
        match self {
            Self::Cgroup => epoll::EventFlags::PRI,
            _ => epoll::EventFlags::IN,
        }
    }
}

/// An epoll set.
pub(super) struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    pub(super) fn new() -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(io::Error::from)
            .map_err(Error::os("epoll"))?;
        Ok(Self { epoll })
    }

    pub(super) fn watch(&self, fd: impl AsFd, source: Source) -> Result<(), Error> {
        let data = epoll::EventData::new_u64(source.encode());
        epoll::add(&self.epoll, fd, data, source.flags())
            .map_err(io::Error::from)
            .map_err(Error::os("epoll_ctl"))
    }

    /// Hears of a watched descriptor, or no longer.
    pub(super) fn set_listening(&self, fd: impl AsFd, source: Source, listening: bool) {
        let data = epoll::EventData::new_u64(source.encode());
        let flags = if listening {
            source.flags()
        } else {
            epoll::EventFlags::empty()
        };
        // One that cannot be modified is heard on; that costs memory, not correctness.
        let _ = epoll::modify(&self.epoll, fd, data, flags);
    }

    /// Takes a descriptor out before it is closed: a forked helper may hold a copy, which would keep the entry.
    pub(super) fn forget(&self, fd: impl AsFd) {
        // Fails only for what was never watched.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits until something happens or the time is over; what it was, in the kernel's order.
    pub(super) fn wait(&self, timeout: Option<Duration>) -> Result<Vec<Source>, Error> {
        let mut list = [MaybeUninit::<epoll::Event>::uninit(); BATCH];
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        match epoll::wait(&self.epoll, &mut list, timeout.as_ref()) {
            Ok((ready, _)) => Ok(ready
                .iter()
                .filter_map(|event| Source::decode(event.data.u64()))
                .collect()),
            Err(rustix::io::Errno::INTR) => Ok(Vec::new()),
            Err(error) => Err(Error::os("epoll_wait")(error.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_survives_the_kernel() {
        let sources = [
            Source::Worker(0),
            Source::Worker(100_000),
            Source::Pipe(0, 1),
            Source::Pipe(100_000, 0),
            Source::Intake,
            Source::Guard,
            Source::Wake,
            Source::Cgroup,
        ];
        for source in sources {
            assert_eq!(Source::decode(source.encode()), Some(source));
        }
        assert_eq!(Source::decode(7), None);
    }

    #[test]
    fn a_descriptor_that_is_not_listened_to_is_silent_until_it_is_again() {
        let poller = Poller::new().unwrap();
        let (read, write) = rustix::pipe::pipe().unwrap();
        poller.watch(&read, Source::Pipe(3, 1)).unwrap();
        rustix::io::write(&write, b"x").unwrap();
        let now = Some(Duration::ZERO);
        assert_eq!(poller.wait(now).unwrap(), [Source::Pipe(3, 1)]);
        poller.set_listening(&read, Source::Pipe(3, 1), false);
        assert_eq!(poller.wait(now).unwrap(), []);
        poller.set_listening(&read, Source::Pipe(3, 1), true);
        assert_eq!(poller.wait(now).unwrap(), [Source::Pipe(3, 1)]);
        poller.forget(&read);
        assert_eq!(poller.wait(now).unwrap(), []);
    }
}
