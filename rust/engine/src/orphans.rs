//! Children that this process did not make: as subreaper it adopts whatever outlives its own parent.

use crate::sys::wait::{Target, try_wait};

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
        match try_wait(Target::Any, false) {
            Ok(Some(death)) if spared.contains(&death.pid) => return Orphans::Hidden,
            Ok(Some(death)) => {
                // It is dead, and nobody else waits for it.
                let _ = try_wait(Target::Pid(death.pid), true);
            }
            Ok(None) => return Orphans::Alive,
            Err(_) => return Orphans::None,
        }
    }
}
