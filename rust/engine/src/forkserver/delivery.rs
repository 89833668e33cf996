//! The way of one worker from its order to its gate, as the engine sees it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{Shutdown, shutdown};

use super::message::Entered;
use super::socket;
use crate::sys::clone::Step;

/// What a server is started with: our end of its link and its own.
pub(crate) struct Ends {
    pub(crate) ours: OwnedFd,
    pub(crate) theirs: OwnedFd,
}

impl Ends {
    pub(crate) fn new() -> io::Result<Self> {
        let (ours, theirs) = socket::pair()?;
        Ok(Self { ours, theirs })
    }
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
    pub(super) order: u64,
    pub(super) gate: OwnedFd,
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

/// Whether a child found its server dead when it entered: no other one would find it alive.
pub(super) fn has_lost_parent(entered: &Entered) -> bool {
    matches!(entered.result, Err(failure) if failure.step == Step::ParentDeath)
}
