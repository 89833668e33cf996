//! What is left of a job once its workers have ended, or while they must not be left to end by themselves.
//!
//! As subreaper (in an agent) we are the parent of whatever outlives its own, so the kernel says exactly when
//! nothing is left. Inside somebody's program the job's cgroup says it, and without one the process table does.

use rustix::process::Signal;

use crate::cgroup::AttemptCgroup;
use crate::event::{KillTier, Survivor};
use crate::orphans::{Orphans, reap_orphans};
use crate::tree::{Scope, Tree};

/// Looks at the process table that must agree that nothing is left: one can miss what is just being forked.
const LOOKS: usize = 2;

/// Finds and ends the processes of a job.
pub(super) struct Remains {
    /// We are the subreaper.
    adopting: bool,
    token: String,
    tree: Option<Tree>,
}

impl Remains {
    pub(super) fn new(adopting: bool, token: String) -> Self {
        Self {
            adopting,
            token,
            tree: None,
        }
    }

    /// Whether no process of the job is left but its workers, whose pids are `workers`.
    pub(super) fn are_none(&mut self, cgroup: Option<&AttemptCgroup>, workers: &[i32]) -> bool {
        if self.adopting {
            return reap_orphans(workers) == Orphans::None;
        }
        if let Some(populated) = cgroup.and_then(|cgroup| cgroup.populated().ok()) {
            return !populated;
        }
        let empty = |tree: &mut Tree, scope: Scope<'_>| {
            (0..LOOKS).all(|_| tree.members(scope).is_ok_and(|members| members.is_empty()))
        };
        self.with_tree(workers, empty).unwrap_or(true)
    }

    /// Asks all of it to end; how many processes were asked.
    pub(super) fn terminate(&mut self, workers: &[i32]) -> usize {
        let count = self.signal(workers, Signal::TERM);
        self.signal(workers, Signal::CONT);
        count
    }

    fn signal(&mut self, workers: &[i32], signal: Signal) -> usize {
        self.with_tree(workers, |tree, scope| tree.signal_all(scope, signal).unwrap_or(0))
            .unwrap_or(0)
    }

    /// Kills all of it. `again`: a first try has left something, so no means is spared.
    pub(super) fn kill(&mut self, cgroup: Option<&AttemptCgroup>, workers: &[i32], again: bool) -> KillTier {
        let by_cgroup = cgroup.is_some_and(|cgroup| cgroup.kill().is_ok());
        if !by_cgroup || again {
            self.with_tree(workers, Tree::kill_all);
        }
        if by_cgroup {
            KillTier::Cgroup
        } else {
            KillTier::Scan
        }
    }

    /// Describes what is left.
    pub(super) fn survivors(&mut self, workers: &[i32]) -> Vec<Survivor> {
        self.with_tree(workers, Tree::survivors).unwrap_or_default()
    }

    fn with_tree<T>(&mut self, workers: &[i32], work: impl FnOnce(&mut Tree, Scope<'_>) -> T) -> Option<T> {
        if self.tree.is_none() {
            self.tree = Tree::open().ok();
        }
        let scope = Scope {
            own_descendants: self.adopting,
            roots: if self.adopting { &[] } else { workers },
            token: (!self.adopting).then_some(self.token.as_str()),
            strangers: &[],
        };
        self.tree.as_mut().map(|tree| work(tree, scope))
    }
}
