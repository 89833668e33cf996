//! An eventfd by which one thread wakes another.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;
use crate::poller::is_readable;

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
