//! Ends what an agent has left: kills the cgroup, if there is one, and passes over the process table until nothing
//! shows.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use crate::cgroup::JobCgroup;
use crate::event::Survivor;
use crate::guard::wait_for;
use crate::orphans::{Orphans, reap_orphans};
use crate::sys::signal;
use crate::sys::wait::{Target, try_wait};
use crate::tree::{Reached, Scope, Tree};

/// Time the guard gives the kernel to end what a dead agent left.
const CLEAR_PATIENCE: Duration = Duration::from_secs(10);
/// Time that the job's helper has to take leave of the other nodes.
const HELPER_PATIENCE: Duration = Duration::from_secs(4);
/// How often a kill is repeated while something is left.
const KILL_RETRY: Duration = Duration::from_millis(20);
/// After this many looks in a row without anything to kill, we take living children for strangers, if we have
/// strangers, and give up on processes that we may not signal.
const QUIET_LOOKS: u32 = 5;
/// While a child is alive, this many looks that find nothing follow one another at once.
const HURRIED_LOOKS: u32 = 100;
/// After this time a child that no look has found counts as hidden from us.
const QUIET_PATIENCE: Duration = Duration::from_secs(2);
/// How often the removal of a cgroup is tried, and the time between.
const REMOVALS: u32 = 20;
const REMOVAL_RETRY: Duration = Duration::from_millis(5);

/// What a job may have left, and how to tell its processes from others.
pub(super) struct Leftovers<'a> {
    pub(super) cgroup: Option<&'a JobCgroup>,
    pub(super) token: &'a str,
    /// The agent was killed, so it has not ended the job by itself.
    pub(super) agent_killed: bool,
    /// This process had children before it became a guard.
    pub(super) has_strangers: bool,
    /// A child that helps the job, and ends by itself.
    pub(super) helper: Option<i32>,
}

impl Leftovers<'_> {
    /// Which processes belong to the job, apart from those in its cgroup.
    ///
    /// Without strangers: every descendant. With strangers, descent proves nothing: we also adopt the orphans of a
    /// stranger's child, and may do so after any list of strangers was made. Then every process that carries the
    /// token belongs to the job, and so do its descendants. So the guard never ends a stranger's process. It misses
    /// a process only if that process has cleared its environment, has lost its parent and is in no cgroup of ours,
    /// and only if the agent was killed: an agent that ends by itself has waited for all processes that it adopted.
    fn scope(&self) -> Scope<'_> {
        Scope {
            own_descendants: !self.has_strangers,
            roots: &[],
            known: &[],
            token: (self.agent_killed || self.has_strangers).then_some(self.token),
            spared: None,
            servers: &[],
            branches: &[],
        }
    }
}

/// Whether a child has ended. Reaps it then.
pub(super) fn has_ended(child: i32) -> bool {
    !matches!(try_wait(Target::Pid(child), true), Ok(None))
}

/// Waits for the helper, if there is one, and kills it if it stays. The helper has heard that the agent has ended.
/// What a killed agent has left is killed before the wait.
pub(super) fn see_off(left: &Leftovers<'_>, tree: Option<&mut Tree>, intake: BorrowedFd<'_>) {
    let Some(helper) = left.helper else { return };
    if left.agent_killed {
        left.cgroup.map(kill_cgroup);
        let scope = Scope {
            spared: Some(helper),
            ..left.scope()
        };
        // A process that survives this is ended later, with everything else.
        let _ = tree.map(|tree| tree.kill_all(scope));
    }
    if !ends_within(helper, HELPER_PATIENCE, intake) {
        // It is our child and not reaped, so its pid is its own.
        let _ = signal::send(helper, libc::SIGKILL);
        ends_within(helper, CLEAR_PATIENCE, intake);
    }
}

fn ends_within(child: i32, patience: Duration, intake: BorrowedFd<'_>) -> bool {
    let deadline = Instant::now() + patience;
    while !has_ended(child) {
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return false;
        }
        let _ = wait_for([Some(intake), None], Some(rest));
        while let Ok(Some(_)) = signal::read_intake(intake) {}
    }
    true
}

/// Ends every process of the job that is left. Returns how many were killed, and the processes that would not die.
pub(super) fn clear(
    left: &Leftovers<'_>,
    tree: io::Result<Tree>,
    intake: BorrowedFd<'_>,
) -> (usize, Vec<Survivor>) {
    let result = kill_all(left, tree, intake);
    if let Some(cgroup) = left.cgroup {
        remove_cgroup(cgroup);
    }
    result
}

fn kill_all(
    left: &Leftovers<'_>,
    mut tree: io::Result<Tree>,
    intake: BorrowedFd<'_>,
) -> (usize, Vec<Survivor>) {
    let mut progress = Progress::new(Instant::now(), left.has_strangers);
    let mut ended = 0;
    loop {
        let is_childless = reap_orphans(&[]) == Orphans::None;
        let is_populated = left.cgroup.is_some_and(kill_cgroup);
        if is_childless && !is_populated && !left.agent_killed {
            return (ended, Vec::new());
        }
        let killed = tree
            .as_mut()
            .map(|tree| tree.kill_all(left.scope()).unwrap_or_default());
        let look = Look {
            is_childless,
            is_populated,
            reached: killed.unwrap_or_default(),
        };
        ended += look.reached.count;
        match progress.after(look, Instant::now()) {
            Next::Done if is_childless || tree.is_ok() || !left.agent_killed => return (ended, Vec::new()),
            Next::Done | Next::GiveUp => return (ended, survivors(left, tree)),
            Next::LookAgain(pause) => {
                // SIGCHLD ends the wait. The time limit is for processes that are not our children.
                let _ = wait_for([Some(intake), None], Some(pause));
                while let Ok(Some(_)) = signal::read_intake(intake) {}
            }
        }
    }
}

/// Describes what was given up.
fn survivors(left: &Leftovers<'_>, tree: io::Result<Tree>) -> Vec<Survivor> {
    let mut tree = match tree {
        Ok(tree) => tree,
        Err(error) => return vec![Survivor::unseen(error.raw_os_error().unwrap_or(libc::ENODEV))],
    };
    let seen = tree.survivors(left.scope());
    if seen.is_empty() && reap_orphans(&[]) != Orphans::None {
        return vec![Survivor::unseen(libc::EACCES)];
    }
    seen
}

/// Kills everything in a cgroup. Returns whether there was anything.
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
    /// Processes that were found.
    reached: Reached,
}

#[derive(Debug, PartialEq, Eq)]
enum Next {
    Done,
    GiveUp,
    LookAgain(Duration),
}

/// How close the job is to its end. Pure: it makes no system calls.
struct Progress {
    deadline: Instant,
    has_strangers: bool,
    /// Looks in a row that found nothing to kill, and when the first of them was.
    quiet: u32,
    quiet_since: Instant,
}

impl Progress {
    fn new(now: Instant, has_strangers: bool) -> Self {
        Self {
            deadline: now + CLEAR_PATIENCE,
            has_strangers,
            quiet: 0,
            quiet_since: now,
        }
    }

    fn after(&mut self, look: Look, now: Instant) -> Next {
        let is_quiet = look.reached.count == 0 && !look.is_populated;
        if !is_quiet {
            self.quiet = 0;
        } else if self.quiet == 0 {
            self.quiet_since = now;
        }
        self.quiet += u32::from(is_quiet);
        let is_refused = look.reached.refused > 0;
        // Everything left of the job descends from our children. If a child is alive and the look found nothing, a
        // process that keeps changing its pid may have slipped through.
        let is_all = look.is_childless || (self.quiet >= QUIET_LOOKS && self.has_strangers);
        if is_quiet && !is_refused && is_all {
            return Next::Done;
        }
        let is_in_vain =
            is_quiet && (is_refused && self.quiet >= QUIET_LOOKS || now - self.quiet_since >= QUIET_PATIENCE);
        if is_in_vain || now >= self.deadline {
            return Next::GiveUp;
        }
        let is_hurried = is_quiet && !is_refused && self.quiet < HURRIED_LOOKS;
        Next::LookAgain(if is_hurried { Duration::ZERO } else { KILL_RETRY })
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
