//! Ends what is left below a process that adopts it, with one patience and one proof: a guard, the branch of a warm
//! server and the server itself do this alike.
//!
//! The proof is the kernel's word that no child is left. What has lost its parent becomes our child at that moment, so
//! nobody below us can be missing, even a process that changes its pid all the time.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use crate::event::Survivor;
use crate::orphans::{Orphans, hunt_orphans, reap_orphans};
use crate::poller::poll_once;
use crate::sys::signal;
use crate::tree::{Reached, Scope, Tree};

/// Time that the kernel gets to end what is left.
pub(crate) const CLEAR_PATIENCE: Duration = Duration::from_secs(10);
/// How often a kill is repeated while something is left.
const KILL_RETRY: Duration = Duration::from_millis(20);
/// After this many looks in a row without anything to kill, we take living children for strangers, if we have
/// strangers, and give up on processes that we may not signal.
const QUIET_LOOKS: u32 = 5;
/// While a child is alive, this many looks that find nothing follow one another at once.
const HURRIED_LOOKS: u32 = 100;
/// After this time a child that no look has found counts as hidden from us.
const QUIET_PATIENCE: Duration = Duration::from_secs(2);

/// What is known about the processes that have to end.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Left {
    /// This process has children that do not belong to the job, and are not known by their pids.
    pub(crate) has_strangers: bool,
    /// Some processes may not be below this process, so the process table has to be read, too.
    pub(crate) are_astray: bool,
}

/// What becomes of what is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing is left.
    Done,
    /// Something may be left, and does not end.
    GiveUp,
    /// Look again after this time, or when a child ends.
    LookAgain(Duration),
}

/// The end of what is left below this process, look by look.
pub(crate) struct Clearing {
    tree: io::Result<Tree>,
    left: Left,
    progress: Progress,
    has_looked: bool,
    /// How many processes were killed. One that is slow to die counts again.
    pub(crate) ended: usize,
}

impl Clearing {
    pub(crate) fn begin(tree: io::Result<Tree>, left: Left) -> Self {
        Self {
            tree,
            left,
            progress: Progress::new(Instant::now(), left.has_strangers),
            has_looked: false,
            ended: 0,
        }
    }

    /// Kills what shows. `is_populated`: there was a process in the job's cgroup. The servers of the scope are children
    /// that stay.
    pub(crate) fn look(&mut self, scope: Scope<'_>, is_populated: bool) -> Next {
        let mut is_childless = reap_orphans(scope.servers) == Orphans::None;
        if is_childless && !is_populated && !self.left.are_astray {
            return Next::Done;
        }
        let killed = self.tree.as_mut().map(|tree| tree.kill_all(scope));
        let mut reached = match killed {
            Ok(Ok((reached, _))) => reached,
            _ => Reached::default(),
        };
        // First all are stopped and killed at once, so that none sees another one end. What is left is out of step.
        if scope.own_descendants && std::mem::replace(&mut self.has_looked, true) {
            let (count, orphans) = hunt_orphans(scope.servers);
            reached.count += count;
            is_childless = orphans == Orphans::None;
        }
        self.ended += reached.count;
        let look = Look {
            is_childless,
            is_populated,
            reached,
        };
        match self.progress.after(look, Instant::now()) {
            Next::Done if !is_childless && self.tree.is_err() && self.left.are_astray => Next::GiveUp,
            next => next,
        }
    }

    /// Looks until nothing is left, or what is left does not end. Returns whether nothing is left. `intake`: SIGCHLD ends
    /// the waits between the looks; their time limit is for processes that are not our children. `is_populated`: kills
    /// what is in the job's cgroup, and says whether there was a process.
    pub(crate) fn finish(
        &mut self,
        scope: Scope<'_>,
        intake: BorrowedFd<'_>,
        is_populated: impl Fn() -> bool,
    ) -> bool {
        loop {
            match self.look(scope, is_populated()) {
                Next::Done => return true,
                Next::GiveUp => return false,
                Next::LookAgain(pause) => {
                    // Interrupted or not, the loop looks again.
                    let _ = poll_once(&[intake], PollFlags::IN, Some(pause));
                    signal::drain(intake);
                }
            }
        }
    }

    /// Describes what was given up.
    pub(crate) fn survivors(self, scope: Scope<'_>) -> Vec<Survivor> {
        let mut tree = match self.tree {
            Ok(tree) => tree,
            Err(error) => return vec![Survivor::unseen(error.raw_os_error().unwrap_or(libc::ENODEV))],
        };
        let seen = tree.survivors(scope);
        if seen.is_empty() && reap_orphans(scope.servers) != Orphans::None {
            return vec![Survivor::unseen(libc::EACCES)];
        }
        seen
    }
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

#[cfg(test)]
mod tests;
