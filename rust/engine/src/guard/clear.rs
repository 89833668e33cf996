//! Ends what an agent has left: the cgroup, if there is one, and passes over the process table, until nothing shows.

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
/// Time in which the helper of a job says goodbye to the other nodes.
const HELPER_PATIENCE: Duration = Duration::from_secs(4);
/// How often a kill is repeated while something is left.
const KILL_RETRY: Duration = Duration::from_millis(20);
/// Looks that find nothing to kill, after which children that we had before are taken to be all that is left, and
/// those that we may not signal are given up.
const QUIET_LOOKS: u32 = 5;
/// Looks that find nothing while a child is alive, which follow one another at once.
const HURRIED_LOOKS: u32 = 100;
/// Time after which a child that no look has found is taken to be hidden from us.
const QUIET_PATIENCE: Duration = Duration::from_secs(2);
/// How often the removal of a cgroup is tried, and the time between.
const REMOVALS: u32 = 20;
const REMOVAL_RETRY: Duration = Duration::from_millis(5);

/// What may be left, and how it is told from what is not the job's.
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
    /// What belongs to the job, beside what is in its cgroup.
    ///
    /// Without strangers that is every descendant. Beside strangers descent says nothing: what a stranger's child
    /// leaves behind is adopted by us, too, and later than anything that could be noted beforehand. Then it is what
    /// carries the token, and what descends from that. So nothing of a stranger's is ever ended. What is spared is
    /// a process that has cleared its environment, has lost its parent, and is in no cgroup of ours, and that only
    /// if the agent was killed: an agent that ends by itself has waited for all that it adopted.
    fn scope(&self) -> Scope<'_> {
        Scope {
            own_descendants: !self.has_strangers,
            roots: &[],
            known: &[],
            token: (self.agent_killed || self.has_strangers).then_some(self.token),
            spared: None,
            servers: &[],
        }
    }
}

/// Whether a child has ended; it is reaped.
pub(super) fn has_ended(child: i32) -> bool {
    !matches!(try_wait(Target::Pid(child), true), Ok(None))
}

/// Waits for the helper, if there is one, which has heard that the agent has ended; one that stays is killed. What
/// a killed agent has left does not live so long.
pub(super) fn see_off(left: &Leftovers<'_>, tree: Option<&mut Tree>, intake: BorrowedFd<'_>) {
    let Some(helper) = left.helper else { return };
    if left.agent_killed {
        left.cgroup.map(kill_cgroup);
        let scope = Scope {
            spared: Some(helper),
            ..left.scope()
        };
        // What is left after that is ended with everything else.
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

/// Ends every process of the job that is left. Returns how many were killed and what would not die.
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
                // Woken by SIGCHLD; the bound is for processes that are not our children.
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
    /// Processes that were found.
    reached: Reached,
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
        // All that is left of the job descends from a child of ours. With a child alive and none found, one
        // that keeps changing its pid has slipped through.
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
