//! Children that this process did not start: as a subreaper, it adopts descendants that outlive their parents.

use crate::sys::wait::{Target, find_dead, try_wait};

/// Result of a look for dead children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orphans {
    /// There are no children, living or dead.
    None,
    /// No dead child is left, and some child is alive.
    Alive,
    /// A spared child is dead. The kernel shows it first, so other dead children stay hidden until its waiter has
    /// reaped it.
    Hidden,
}

/// Reaps every dead child except the `spared` ones, which have waiters of their own.
pub(crate) fn reap_orphans(spared: &[i32]) -> Orphans {
    loop {
        match find_dead() {
            Ok(Some(pid)) if spared.contains(&pid) => return Orphans::Hidden,
            Ok(Some(pid)) => {
                // The child is dead, and no other code waits for it.
                let _ = try_wait(Target::Pid(pid), true);
            }
            Ok(None) => return Orphans::Alive,
            Err(_) => return Orphans::None,
        }
    }
}

/// A lock for tests: a subreaper's test reaps every dead child of its process, and all tests may share one process.
#[cfg(test)]
pub(crate) mod sharing {
    use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

    static CHILDREN: RwLock<()> = RwLock::new(());

    /// For a test that reaps every dead child it finds.
    pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
        CHILDREN.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a test with children of its own. Do not take it twice at a time.
    pub(crate) fn beside_others() -> RwLockReadGuard<'static, ()> {
        CHILDREN.read().unwrap_or_else(PoisonError::into_inner)
    }
}
