//! Children that this process did not start: as a subreaper, it adopts descendants that outlive their parents.

use crate::procfs::own_children;
use crate::sys::signal;
use crate::sys::wait::{Target, find_dead, try_wait};

/// The most looks at the list of children in a row: a process that changes its pid all the time has a new one in each.
const MOST_LOOKS: usize = 100;

/// Result of a look at the children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Orphans {
    /// There are no children, living or dead, but the spared ones. As a child of a dead child becomes ours while the
    /// kernel holds its list of processes, nothing else is below us either.
    None,
    /// Another child may be alive.
    Alive,
}

/// Reaps every dead child except the `spared` ones, which have waiters of their own, and says what is left.
pub(crate) fn reap_orphans(spared: &[i32]) -> Orphans {
    match reap(spared) {
        Some(found) => found,
        None if spared.is_empty() => Orphans::Alive,
        None => look_through(spared, None),
    }
}

/// Reaps every dead child except the `spared` ones. Does not look whether others are alive, so `None` says nothing.
pub(crate) fn reap(spared: &[i32]) -> Option<Orphans> {
    loop {
        match find_dead() {
            Ok(Some(pid)) if !spared.contains(&pid) => {
                // The child is dead, and no other code waits for it.
                let _ = try_wait(Target::Pid(pid), true);
            }
            // The kernel shows one dead child only, so behind a spared one there may be others.
            Ok(Some(_)) => return Some(look_through(spared, None)),
            Ok(None) => return None,
            Err(_) => return Some(Orphans::None),
        }
    }
}

/// Kills and reaps the children except the `spared` ones, and what they leave to us meanwhile. This finds processes
/// that no pass over the whole process table would be quick enough for. Returns how many signals were sent, too.
/// Killed children may still be dying.
pub(crate) fn hunt_orphans(spared: &[i32]) -> (usize, Orphans) {
    let mut count = 0;
    let mut kill = |pid| {
        // It is our child and not reaped, so its pid is its own.
        count += usize::from(signal::send(pid, libc::SIGKILL).is_ok());
    };
    let found = look_through(spared, Some(&mut kill));
    (count, found)
}

/// Looks at the list of children, again and again while some of them are dead. `kill` gets those that are alive.
fn look_through(spared: &[i32], mut kill: Option<&mut dyn FnMut(i32)>) -> Orphans {
    for _ in 0..MOST_LOOKS {
        let Ok(mut others) = own_children() else {
            return Orphans::Alive;
        };
        others.retain(|pid| !spared.contains(pid));
        if others.is_empty() {
            return Orphans::None;
        }
        let mut is_new = kill.is_some();
        for pid in others {
            match (try_wait(Target::Pid(pid), true), &mut kill) {
                (Ok(Some(_)), _) => is_new = true,
                (Ok(None), Some(kill)) => kill(pid),
                (Ok(None) | Err(_), _) => {}
            }
        }
        if !is_new {
            return Orphans::Alive;
        }
    }
    Orphans::Alive
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

#[cfg(test)]
#[expect(clippy::disallowed_types, reason = "children that are not the engine's")]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use rustix::process::{getpid, set_child_subreaper};

    use super::*;

    fn until(mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < deadline);
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_dead_child_that_is_spared_hides_no_other() {
        let _alone = sharing::alone();
        let mut spared = Command::new("true").spawn().unwrap();
        let pid = spared.id() as i32;
        until(|| find_dead().unwrap() == Some(pid));
        drop(Command::new("true").spawn().unwrap());
        until(|| reap_orphans(&[pid]) == Orphans::None);
        assert!(spared.wait().unwrap().success());
        assert_eq!(reap_orphans(&[]), Orphans::None);
    }

    #[test]
    fn a_hunt_ends_all_children_but_the_spared_ones() {
        let _alone = sharing::alone();
        let mut spared = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = spared.id() as i32;
        drop(Command::new("sleep").arg("60").spawn().unwrap());
        assert_eq!(reap_orphans(&[pid]), Orphans::Alive);
        until(|| hunt_orphans(&[pid]).1 == Orphans::None);
        assert!(spared.try_wait().unwrap().is_none());
        assert_ne!(hunt_orphans(&[]).0, 0);
        assert_eq!(spared.wait().ok().and_then(|status| status.code()), None);
    }

    /// The first thread adopts, and no test runs on that one.
    #[test]
    fn what_another_thread_has_adopted_is_not_missed() {
        let _alone = sharing::alone();
        set_child_subreaper(Some(getpid())).unwrap();
        let mut spared = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = spared.id() as i32;
        let mut parent = Command::new("sh").args(["-c", "sleep 60 &"]).spawn().unwrap();
        assert!(parent.wait().unwrap().success());
        assert_eq!(reap_orphans(&[pid]), Orphans::Alive);
        until(|| hunt_orphans(&[pid]).1 == Orphans::None);
        set_child_subreaper(None).unwrap();
        spared.kill().unwrap();
        spared.wait().unwrap();
    }
}
