//! One worker from its order to its gate, as the engine sees it.

use std::os::fd::OwnedFd;

use rustix::net::{Shutdown, shutdown};

use super::message::Entered;
use super::socket;
use crate::event::Stage;

/// A worker that a server has forked.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
    pub(crate) entered: Entered,
}

/// A worker that was ordered, and the gate where it waits until it is watched. The worker ends if the gate is never
/// opened.
#[derive(Debug)]
pub(crate) struct Ordered {
    pub(crate) order: u64,
    pub(crate) gate: OwnedFd,
}

impl Ordered {
    /// Lets the worker run.
    pub(crate) fn open(&self) {
        // A failure means that it has just died.
        let _ = socket::send(&self.gate, b"1", &[], false);
    }

    /// Ends the worker before it has passed its gate. This works even if another process holds a copy of the gate.
    pub(crate) fn cancel(&self) {
        // A failure means that it has ended.
        let _ = shutdown(&self.gate, Shutdown::Both);
    }
}

/// The state of an order.
#[derive(Debug)]
pub(crate) enum Delivered {
    /// Its worker waits at its gate.
    Worker(Delivery),
    /// The server has not answered.
    Ordered,
    /// The server has forked, but the child has not come to its gate yet.
    Forked,
    /// There will be no worker, and the server takes no more orders.
    Nothing,
}

/// Whether a child found its server dead when it entered: then every other child will find it dead as well.
pub(super) fn has_lost_parent(entered: &Entered) -> bool {
    matches!(entered.result, Err(failure) if failure.step == Stage::ParentDeath)
}
