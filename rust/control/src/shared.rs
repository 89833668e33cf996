//! What all parts of a hub have in common: numbers, counts, and how descriptors are told apart.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use dsl_engine::{Bell, Error, Recent, Tee};

use crate::count::Count;
use crate::inbox::Inbox;

/// Number of agents that share the memory for output, unless the head says another.
const USUAL_AGENTS: usize = 16;

/// What a token of the poller stands for, in its lowest bits.
pub(crate) const CALLER: u64 = 0;
pub(crate) const LISTENER: u64 = 1;
pub(crate) const LINK: u64 = 2;
pub(crate) const WRITER: u64 = 3;
pub(crate) const PIPE: u64 = 4;
pub(crate) const BELL: u64 = u64::MAX;

pub(crate) fn token(id: u64, role: u64) -> u64 {
    id << 3 | role
}

/// What the thread of a hub and its owner share.
pub(crate) struct Shared {
    pub(crate) inbox: Inbox,
    /// Wakes the thread.
    pub(crate) bell: Arc<Bell>,
    /// A head: number of agents that share the memory for output.
    pub(crate) agents: AtomicUsize,
    /// Pieces of output that have arrived and are not written.
    pub(crate) unshown: Count,
    /// A head: the last output that was shown.
    pub(crate) recent: OnceLock<Recent>,
    /// A head: copies what is shown.
    pub(crate) tee: OnceLock<Arc<Tee>>,
    /// Links that have not ended.
    pub(crate) links: Arc<Count>,
    ids: AtomicU64,
}

impl Shared {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self {
            inbox: Inbox::new(Bell::new()?),
            bell: Arc::new(Bell::new()?),
            agents: AtomicUsize::new(USUAL_AGENTS),
            unshown: Count::default(),
            recent: OnceLock::new(),
            tee: OnceLock::new(),
            links: Arc::default(),
            ids: AtomicU64::new(1),
        })
    }

    pub(crate) fn new_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }
}
