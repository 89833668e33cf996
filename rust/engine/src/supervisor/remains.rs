//! What is left of a job once its workers have ended, or while they must not be left to end by themselves.
//!
//! As subreaper (in an agent) we are the parent of whatever outlives its own, so the kernel says exactly when
//! nothing is left; beside a fork server, which is our child, too, the process table does. Inside somebody's
//! program the job's cgroup says it, and without one the process table does. Who can look nowhere does not know
//! that nothing is left, and says so.

use std::io;

use rustix::process::Signal;

use crate::cgroup::AttemptCgroup;
use crate::event::{KillTier, Survivor};
use crate::orphans::{Orphans, reap_orphans};
use crate::procfs::Stat;
use crate::sys::signal;
use crate::sys::wait::has_child_in_group;
use crate::tree::{Scope, Tree};

/// Looks at the process table that must agree that nothing is left: one can miss what is just being forked.
const LOOKS: usize = 2;

/// What a group has that its remains are found by.
#[derive(Clone, Copy)]
pub(super) struct Group<'a> {
    pub(super) cgroup: Option<&'a AttemptCgroup>,
    /// Pids of the workers that run.
    pub(super) workers: &'a [i32],
    /// Pids of all workers that were started, each of which has led a process group.
    pub(super) leaders: &'a [i32],
    /// Pids of the fork servers, which are of no group.
    pub(super) servers: &'a [i32],
}

/// Finds and ends the processes of a job.
pub(super) struct Remains {
    /// We are the subreaper.
    adopting: bool,
    token: String,
    /// Opened before there is a job: a process table that is covered later stays readable.
    tree: io::Result<Tree>,
    /// Processes below the workers when these were told to end or killed, where nothing else leads to them afterwards.
    known: Vec<(i32, u64)>,
}

impl Remains {
    pub(super) fn new(adopting: bool, token: String) -> Self {
        Self {
            adopting,
            token,
            tree: Tree::open(),
            known: Vec::new(),
        }
    }

    /// Whether what is left can be told from fork servers.
    pub(super) fn can_spare_servers(&self) -> bool {
        self.tree.is_ok()
    }

    /// What descends from fork servers beside workers.
    pub(super) fn helpers_of(&mut self, servers: &[i32]) -> Vec<(i32, u64)> {
        let scope = Scope {
            own_descendants: false,
            roots: servers,
            known: &[],
            token: None,
            spared: None,
            servers: &[],
        };
        let members = self.tree.as_mut().ok().and_then(|tree| tree.members(scope).ok());
        let mut helpers = members.unwrap_or_default();
        helpers.retain(|stat| !servers.contains(&stat.pid));
        identities(&helpers)
    }

    /// Kills processes that were seen before, with what descends from them.
    pub(super) fn kill_known(&mut self, known: &[(i32, u64)]) {
        let scope = Scope {
            own_descendants: false,
            roots: &[],
            known,
            token: None,
            spared: None,
            servers: &[],
        };
        if let (Ok(tree), false) = (&mut self.tree, known.is_empty()) {
            // What cannot be looked for any more is not found.
            let _ = tree.kill_all(scope);
        }
    }

    /// Begins a group.
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }

    /// Whether no process of the job is left but its workers. Also so where nobody can know it: waiting would not
    /// help, and [`Remains::survivors`] tells of it.
    pub(super) fn are_none(&mut self, group: Group<'_>) -> bool {
        if self.adopting {
            let spared = [group.workers, group.servers].concat();
            let orphans = reap_orphans(&spared);
            if group.servers.is_empty() || orphans == Orphans::None {
                return orphans == Orphans::None;
            }
        } else if let Some(populated) = group.cgroup.and_then(|cgroup| cgroup.populated().ok()) {
            return !populated;
        }
        let empty = |tree: &mut Tree, scope: Scope<'_>| {
            (0..LOOKS).all(|_| tree.members(scope).is_ok_and(|members| members.is_empty()))
        };
        self.with_tree(group, true, empty).unwrap_or(true)
    }

    /// Notes what descends from the workers, who are about to be told to end. Inside somebody's program and without
    /// a cgroup nothing leads to it once they are dead, if it has an environment of its own.
    pub(super) fn remember(&mut self, group: Group<'_>) {
        if self.adopting || group.cgroup.is_some() {
            return;
        }
        let members = self.with_tree(group, false, |tree, scope| {
            tree.members(scope).unwrap_or_default()
        });
        self.known = identities(&members.unwrap_or_default());
    }

    /// Asks all of it to end; how many processes (or groups of them) were asked.
    pub(super) fn terminate(&mut self, group: Group<'_>) -> usize {
        let count = self.signal(group, Signal::TERM);
        self.signal(group, Signal::CONT);
        count
    }

    fn signal(&mut self, group: Group<'_>, signal: Signal) -> usize {
        let sent = |tree: &mut Tree, scope: Scope<'_>| tree.signal_all(scope, signal).unwrap_or_default();
        match self.with_tree(group, true, sent) {
            Some(reached) => reached.count,
            None => self.signal_groups(group.leaders, signal),
        }
    }

    /// Without a process table the kernel still tells as which process groups our children are. None of these
    /// groups can be a stranger's: a child of ours is in it, dead or alive, and only we reap it.
    fn signal_groups(&self, leaders: &[i32], signal: Signal) -> usize {
        let ours = leaders.iter().filter(|_| self.adopting);
        let reached = ours.filter(|&&leader| has_child_in_group(leader));
        reached
            .filter(|&&leader| signal::send(-leader, signal.as_raw()).is_ok())
            .count()
    }

    /// Kills the workers with all that descends from them, where their deaths would hide it. Comes before anything
    /// else that kills them.
    pub(super) fn kill_below(&mut self, group: Group<'_>) {
        if self.adopting || group.cgroup.is_some() {
            return;
        }
        // The token is left out: to read the environment of a process that hangs can take for ever.
        let killed = self.with_tree(group, false, |tree, scope| {
            let members = tree.stop_all(scope)?;
            tree.send(&members, Signal::KILL);
            io::Result::Ok(members)
        });
        if let Some(Ok(members)) = killed {
            // One that holds much memory takes a while to die, and may do so after its parent.
            self.known = identities(&members);
        }
    }

    /// Kills all of it. `again`: a first try has left something, so no means is spared.
    pub(super) fn kill(&mut self, group: Group<'_>, again: bool) -> KillTier {
        let by_cgroup = group.cgroup.is_some_and(|cgroup| cgroup.kill().is_ok());
        if !by_cgroup || again {
            let killed = self.with_tree(group, true, Tree::kill_all);
            if killed.is_none() {
                self.signal_groups(group.leaders, Signal::KILL);
            }
        }
        if by_cgroup {
            KillTier::Cgroup
        } else {
            KillTier::Scan
        }
    }

    /// Describes what is left, or may be left for all we can know. `left`: the kernel has said that something is.
    pub(super) fn survivors(&mut self, group: Group<'_>, left: bool) -> Vec<Survivor> {
        let can_tell = self.adopting || group.cgroup.is_some();
        if !left {
            let is_unknown = !can_tell && self.tree.is_err();
            return is_unknown.then(|| self.unseen()).into_iter().collect();
        }
        match self.with_tree(group, true, Tree::survivors) {
            None => vec![self.unseen()],
            Some(seen) if seen.is_empty() && can_tell && !self.are_none(group) => {
                vec![Survivor::unseen(libc::EACCES)]
            }
            Some(seen) => seen,
        }
    }

    fn unseen(&self) -> Survivor {
        let error = self.tree.as_ref().err();
        Survivor::unseen(error.and_then(io::Error::raw_os_error).unwrap_or(libc::ENODEV))
    }

    fn with_tree<T>(
        &mut self,
        group: Group<'_>,
        by_token: bool,
        work: impl FnOnce(&mut Tree, Scope<'_>) -> T,
    ) -> Option<T> {
        let scope = Scope {
            own_descendants: self.adopting,
            // Those of a fork server descend from it.
            roots: if self.adopting && group.servers.is_empty() {
                &[]
            } else {
                group.workers
            },
            known: &self.known,
            token: (by_token && !self.adopting).then_some(self.token.as_str()),
            spared: None,
            servers: group.servers,
        };
        self.tree.as_mut().ok().map(|tree| work(tree, scope))
    }
}

/// Pids with their start times.
fn identities(processes: &[Stat]) -> Vec<(i32, u64)> {
    processes.iter().map(|stat| (stat.pid, stat.start_time)).collect()
}
