//! Ends what an agent has left: kills the cgroup, if there is one, and what is below the guard.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use crate::cgroup::Cgroup;
use crate::clearing::{CLEAR_PATIENCE, Clearing, Left};
use crate::event::Survivor;
use crate::forkserver::estate;
use crate::poller::poll_once;
use crate::sys::signal;
use crate::sys::wait::{Target, try_wait};
use crate::tree::{Scope, Tree};

/// Time that the job's helper has to take leave of the other nodes.
const HELPER_PATIENCE: Duration = Duration::from_secs(4);
/// Time that a warm server has to end what a branch has left. It waits some seconds before it kills a branch that does
/// not end by itself.
const BRANCH_PATIENCE: Duration = Duration::from_secs(2 + CLEAR_PATIENCE.as_secs());
/// How often the removal of a cgroup is tried, and the time between.
const REMOVALS: u32 = 20;
const REMOVAL_RETRY: Duration = Duration::from_millis(5);

/// What a job may have left, and how to tell its processes from others.
pub(super) struct Leftovers<'a> {
    /// Connections with warm servers, on which we have hung up.
    pub(super) links: &'a [OwnedFd],
    pub(super) cgroup: Option<&'a Cgroup>,
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
            token: (self.agent_killed || self.has_strangers).then_some(self.token),
            ..Scope::default()
        }
    }
}

/// Whether a child has ended. Reaps it then.
pub(super) fn has_ended(child: i32) -> bool {
    !matches!(try_wait(Target::Pid(child), true), Ok(None))
}

/// Lets branches and warm servers do their part that somebody has stopped, if the agent was killed.
pub(super) fn resume_branches(left: &Leftovers<'_>, tree: Option<&mut Tree>) {
    let listeners: Vec<i32> = left.links.iter().filter_map(estate::listener).collect();
    if let (true, false, Some(tree)) = (left.agent_killed, listeners.is_empty(), tree) {
        let _ = tree.resume_branches(left.token, &listeners);
    }
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
        let _ = poll_once(&[intake], PollFlags::IN, Some(rest));
        signal::drain(intake);
    }
    true
}

/// Ends every process of the job that is left. Returns how many were killed, and the processes that would not die.
pub(super) fn clear(
    left: &Leftovers<'_>,
    tree: io::Result<Tree>,
    intake: BorrowedFd<'_>,
) -> (usize, Vec<Survivor>) {
    let (ended, mut survivors) = kill_all(left, tree, intake);
    if let Some(cgroup) = left.cgroup {
        remove_cgroup(cgroup);
    }
    // An agent that has ended by itself has told what is left.
    let is_cleared = |link| !left.agent_killed || estate::is_cleared(link, BRANCH_PATIENCE);
    if survivors.is_empty() && !left.links.iter().all(is_cleared) {
        survivors.push(Survivor::unseen(libc::ECHILD));
    }
    (ended, survivors)
}

fn kill_all(left: &Leftovers<'_>, tree: io::Result<Tree>, intake: BorrowedFd<'_>) -> (usize, Vec<Survivor>) {
    let known = Left {
        has_strangers: left.has_strangers,
        are_astray: left.agent_killed,
    };
    let mut clearing = Clearing::begin(tree, known);
    let is_done = clearing.finish(left.scope(), intake, || left.cgroup.is_some_and(kill_cgroup));
    let ended = clearing.ended;
    let survivors = (!is_done).then(|| clearing.survivors(left.scope()));
    (ended, survivors.unwrap_or_default())
}

/// Kills everything in a cgroup. Returns whether there was anything.
fn kill_cgroup(cgroup: &Cgroup) -> bool {
    let is_populated = cgroup.populated().unwrap_or(false);
    if is_populated {
        // A failure leaves the work to the passes over the process table.
        let _ = cgroup.kill();
    }
    is_populated
}

/// Removes the job's cgroup; processes that have just died may hold it for a moment.
fn remove_cgroup(job: &Cgroup) {
    for _ in 0..REMOVALS {
        if job.remove() {
            return;
        }
        let _ = poll_once(&[], PollFlags::IN, Some(REMOVAL_RETRY));
    }
}
