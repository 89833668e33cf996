//! A link as all threads see it.

use std::collections::VecDeque;

use crate::frame::Pong;
use crate::listener::Origin;
use crate::outbox::Outbox;
use crate::sync::{AtomicBool, AtomicI64, AtomicUsize, Mutex, MutexGuard, Ordering, PoisonError};

/// Measurements that are kept; the oldest goes first.
const SAMPLES: usize = 8;

/// An answered heartbeat.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// The answer.
    pub pong: Pong,
    /// When it came back in nanoseconds: by the clock of the day, and by a clock that never steps.
    pub back_real: u64,
    /// See `back_real`.
    pub back: u64,
}

/// What all threads may know of a link and do with it.
#[derive(Debug)]
pub struct Face {
    pub(crate) id: u64,
    /// Name of the other side, as the user knows it.
    pub name: String,
    /// How it came in; `None`: we have made the connection, or were given it.
    pub(crate) origin: Option<Origin>,
    /// Our address at this end; empty: another program has made the connection.
    pub own_address: String,
    pub(crate) place: AtomicI64,
    pub(crate) is_lost: AtomicBool,
    pub(crate) is_closing: AtomicBool,
    /// Whether we do not read because too many of its messages are unread.
    pub(crate) is_paused: AtomicBool,
    /// Whether the thread was told to look at it.
    pub(crate) is_called: AtomicBool,
    /// Bytes of unread messages, with the cost of each.
    pub(crate) unread: AtomicUsize,
    outbox: Mutex<Outbox>,
    samples: Mutex<VecDeque<Sample>>,
}

impl Face {
    pub(crate) fn new(
        id: u64,
        name: String,
        place: i64,
        origin: Option<Origin>,
        own_address: String,
    ) -> Self {
        Self {
            id,
            name,
            origin,
            own_address,
            place: AtomicI64::new(place),
            is_lost: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            is_paused: AtomicBool::new(false),
            is_called: AtomicBool::new(false),
            unread: AtomicUsize::new(0),
            outbox: Mutex::default(),
            samples: Mutex::default(),
        }
    }

    /// Our port at which it came in; 0: it did not.
    pub fn port(&self) -> u16 {
        self.origin.map_or(0, |origin| origin.port)
    }

    /// Node rank or rank of the agent there; -1: not known, or the other side is the head.
    pub fn place(&self) -> i64 {
        self.place.load(Ordering::SeqCst)
    }

    /// Changes the place.
    pub fn set_place(&self, place: i64) {
        self.place.store(place, Ordering::SeqCst);
    }

    /// Whether the connection has ended.
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::SeqCst)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::SeqCst)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::SeqCst)
    }

    /// Takes the measurements that have come since the last call, the oldest first.
    pub fn take_samples(&self) -> Vec<Sample> {
        self.samples().drain(..).collect()
    }

    pub(crate) fn note(&self, sample: Sample) {
        let mut samples = self.samples();
        if samples.len() == SAMPLES {
            samples.pop_front();
        }
        samples.push_back(sample);
    }

    fn samples(&self) -> MutexGuard<'_, VecDeque<Sample>> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn outbox(&self) -> MutexGuard<'_, Outbox> {
        // Each statement under the lock leaves the outbox consistent, so a panic does no harm.
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
