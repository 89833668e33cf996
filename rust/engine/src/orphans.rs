//! Children that this process did not make: as subreaper it adopts whatever outlives its own parent.

use crate::sys::wait::{Target, find_dead, try_wait};

/// What a look for dead children has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orphans {
    /// There is no child at all, living or dead.
    None,
    /// Some child is alive.
    Alive,
    /// A dead child is spared, and hides what is behind it until its own waiter has come.
    Hidden,
}

/// Reaps every dead child but the `spared`, which have waiters of their own.
pub(crate) fn reap_orphans(spared: &[i32]) -> Orphans {
    loop {
        match find_dead() {
            Ok(Some(pid)) if spared.contains(&pid) => return Orphans::Hidden,
            Ok(Some(pid)) => {
                // It is dead, and nobody else waits for it.
                let _ = try_wait(Target::Pid(pid), true);
            }
            Ok(None) => return Orphans::Alive,
            Err(_) => return Orphans::None,
        }
    }
}

/// Who adopts reaps every dead child of its process, and all tests may run in one.
#[cfg(test)]
pub(crate) mod sharing {
    use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

    static CHILDREN: RwLock<()> = RwLock::new(());

    /// For a test that reaps whatever it finds.
    pub(crate) fn alone() -> RwLockWriteGuard<'static, ()> {
        CHILDREN.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a test that has children of its own. Not to be asked for twice at a time.
    pub(crate) fn beside_others() -> RwLockReadGuard<'static, ()> {
        CHILDREN.read().unwrap_or_else(PoisonError::into_inner)
    }
}
