//! Ends what an agent has left: the cgroup, if there is one, and passes over the process table, until nothing shows.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::cgroup::JobCgroup;
use crate::event::Survivor;
use crate::guard::wait_for;
use crate::orphans::{Orphans, reap_orphans};
use crate::sys::signal;
use crate::tree::{Scope, Tree};

/// Time the guard gives the kernel to end what a dead agent left.
const CLEAR_PATIENCE: Duration = Duration::from_secs(10);
/// How often a kill is repeated while something is left.
const KILL_RETRY: Duration = Duration::from_millis(20);
/// Looks that find nothing, after which children that we had before are taken to be all that is left.
const QUIET_LOOKS: u32 = 5;
/// How often the removal of a cgroup is tried, and the time between.
const REMOVALS: u32 = 20;
const REMOVAL_RETRY: Duration = Duration::from_millis(5);

/// What may be left, and how it is told from what is not the job's.
pub(super) struct Leftovers<'a> {
    pub(super) cgroup: Option<&'a JobCgroup>,
    /// The job's token, if the agent has not ended the job by itself: then its processes are searched for too.
    pub(super) token: Option<&'a str>,
    /// Children that this process had before it became a guard: (pid, start time).
    pub(super) strangers: &'a [(i32, u64)],
}

/// Ends every process of the job that is left. Returns how many were killed and what would not die.
pub(super) fn clear(left: &Leftovers<'_>, intake: BorrowedFd<'_>) -> (usize, Vec<Survivor>) {
    let result = kill_all(left, intake);
    if let Some(cgroup) = left.cgroup {
        remove_cgroup(cgroup);
    }
    result
}

fn kill_all(left: &Leftovers<'_>, intake: BorrowedFd<'_>) -> (usize, Vec<Survivor>) {
    let scope = Scope {
        own_descendants: true,
        roots: &[],
        token: left.token,
        strangers: left.strangers,
    };
    let mut progress = Progress::new(Instant::now(), !left.strangers.is_empty());
    let mut tree = None;
    let mut ended = 0;
    loop {
        let is_childless = reap_orphans(&[]) == Orphans::None;
        let is_populated = left.cgroup.is_some_and(kill_cgroup);
        if is_childless && !is_populated && left.token.is_none() {
            return (ended, Vec::new());
        }
        if tree.is_none() {
            tree = Tree::open().ok();
        }
        let Some(tree) = tree.as_mut() else {
            return (ended, Vec::new());
        };
        let killed = tree.kill_all(scope).unwrap_or(0);
        ended += killed;
        let look = Look {
            is_childless,
            is_populated,
            killed,
        };
        match progress.after(look, Instant::now()) {
            Next::Done => return (ended, Vec::new()),
            Next::GiveUp => return (ended, tree.survivors(scope)),
            Next::LookAgain(pause) => {
                // Woken by SIGCHLD; the bound is for processes that are not our children.
                let _ = wait_for([Some(intake), None], Some(pause));
                while let Ok(Some(_)) = signal::read_intake(intake) {}
            }
        }
    }
}

/// Kills what is in a cgroup; whether there was anything.
fn kill_cgroup(cgroup: &JobCgroup) -> bool {
    let is_populated = cgroup.populated().unwrap_or(false);
    if is_populated {
        // A failure leaves the work to the passes over the process table.
        let _ = cgroup.kill();
    }
    is_populated
}

/// What one pass has found.
#[derive(Clone, Copy)]
struct Look {
    /// This process has no child, living or dead.
    is_childless: bool,
    /// There was a process in the job's cgroup.
    is_populated: bool,
    /// Processes that were found and killed.
    killed: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Next {
    Done,
    GiveUp,
    LookAgain(Duration),
}

/// How far the job is from its end. Pure.
struct Progress {
    deadline: Instant,
    has_strangers: bool,
    /// Looks in a row that found nothing to kill.
    quiet: u32,
}

impl Progress {
    fn new(now: Instant, has_strangers: bool) -> Self {
        Self {
            deadline: now + CLEAR_PATIENCE,
            has_strangers,
            quiet: 0,
        }
    }

    fn after(&mut self, look: Look, now: Instant) -> Next {
        let is_quiet = look.killed == 0 && !look.is_populated;
        self.quiet = if is_quiet { self.quiet + 1 } else { 0 };
        // All that is left of the job descends from a child of ours. With a child alive and none found, one
        // that keeps changing its pid has slipped through.
        if is_quiet && (look.is_childless || (self.quiet == QUIET_LOOKS && self.has_strangers)) {
            return Next::Done;
        }
        if now >= self.deadline {
            return Next::GiveUp;
        }
        Next::LookAgain(if is_quiet { Duration::ZERO } else { KILL_RETRY })
    }
}

/// Removes the job's cgroup; processes that have just died may hold it for a moment.
fn remove_cgroup(job: &JobCgroup) {
    for _ in 0..REMOVALS {
        if job.remove() {
            return;
        }
        let _ = wait_for([None, None], Some(REMOVAL_RETRY));
    }
}

#[cfg(test)]
mod tests;
