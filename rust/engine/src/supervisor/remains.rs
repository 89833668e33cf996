//! Finds and ends the processes of a job that remain when its workers have ended or must be killed.
//!
//! An agent is a subreaper: it adopts all processes that outlive their parents, so the kernel says exactly when none
//! is left. If the agent has fork servers, which are its children, too, the process table says it. Inside a user's
//! program the job's cgroup says it, or the process table if there is no cgroup. Without cgroup and process table we
//! cannot prove that nothing is left, and report that.

use std::io;

use rustix::process::Signal;

use crate::cgroup::Cgroup;
use crate::event::{KillTier, Survivor};
use crate::orphans::{Orphans, reap_orphans};
use crate::procfs::Stat;
use crate::sys::signal;
use crate::sys::wait::has_child_in_group;
use crate::tree::{Scope, Tree, may_not_signal};

/// How many looks at the process table must find nothing. One look can miss a process that is just being forked.
const LOOKS: usize = 2;

/// Who looks after what dead branches of warm servers have left. Only they can prove that nothing is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heirs {
    /// Nothing is left.
    None,
    /// Warm servers, which are not done.
    Busy,
    /// Nobody.
    Gone,
}

/// Facts about a group by which its remaining processes are found.
#[derive(Clone, Copy)]
pub(super) struct Group<'a> {
    pub(super) cgroup: Option<&'a Cgroup>,
    /// Pids of the running workers.
    pub(super) workers: &'a [i32],
    /// Pids of all workers that were started. Each has led a process group.
    pub(super) leaders: &'a [i32],
    /// Pids of the fork servers, which belong to no group.
    pub(super) servers: &'a [i32],
    /// Pids and start times of the branches of warm servers: what workers leave is adopted there.
    pub(super) branches: &'a [(i32, u64)],
    pub(super) heirs: Heirs,
}

impl Group<'_> {
    /// Whether the kernel has said of all processes that dead branches have left that they are gone.
    fn has_no_estate(&self) -> bool {
        let is_empty = |cgroup: &Cgroup| cgroup.populated().is_ok_and(|populated| !populated);
        self.heirs == Heirs::None || self.cgroup.is_some_and(is_empty)
    }
}

/// Finds and ends the processes of a job.
pub(super) struct Remains {
    /// Whether we are the subreaper.
    adopting: bool,
    token: String,
    /// Opened before there is a job, so that `/proc` stays readable even if another mount covers it later.
    tree: io::Result<Tree>,
    /// Processes below the workers, noted when the workers were told to end or killed, if we could not find them
    /// afterwards.
    known: Vec<(i32, u64)>,
    /// Whether a branch has ended before its job: what its workers have left is below no process of ours.
    pub(super) has_lost_branch: bool,
}

impl Remains {
    pub(super) fn new(adopting: bool, token: String) -> Self {
        Self {
            adopting,
            token,
            tree: Tree::open(),
            known: Vec::new(),
            has_lost_branch: false,
        }
    }

    /// Whether remaining processes can be seen, and told apart from fork servers.
    pub(super) fn can_be_seen(&self) -> bool {
        self.tree.is_ok()
    }

    /// Descendants of fork servers, with pids and start times.
    pub(super) fn helpers_of(&mut self, servers: &[i32]) -> Vec<(i32, u64)> {
        let scope = Scope {
            roots: servers,
            ..Scope::default()
        };
        let members = self.tree.as_mut().ok().and_then(|tree| tree.members(scope).ok());
        let mut helpers = members.unwrap_or_default();
        helpers.retain(|stat| !servers.contains(&stat.pid));
        identities(&helpers)
    }

    /// Kills processes that were seen before, and their descendants.
    pub(super) fn kill_known(&mut self, known: &[(i32, u64)]) {
        let scope = Scope {
            known,
            ..Scope::default()
        };
        if let (Ok(tree), false) = (&mut self.tree, known.is_empty()) {
            // If the process table cannot be read, we do not find them.
            let _ = tree.kill_all(scope);
        }
    }

    /// Forgets the processes of the last group.
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }

    /// Whether no process of the job is left except its workers. True if we cannot know: waiting would not help, and
    /// [`Remains::survivors`] reports it.
    pub(super) fn are_none(&mut self, group: Group<'_>) -> bool {
        if self.adopting {
            let spared = [group.workers, group.servers].concat();
            if reap_orphans(&spared) != Orphans::None {
                return false;
            }
        } else if let Some(populated) = group.cgroup.and_then(|cgroup| cgroup.populated().ok()) {
            return !populated;
        }
        let known = [group.workers, group.leaders].concat();
        let is_bare = |tree: &mut Tree| group.branches.iter().all(|&(pid, _)| tree.is_bare(pid, &known));
        if group.heirs == Heirs::Busy || !self.tree.as_mut().ok().is_none_or(is_bare) {
            return false;
        }
        if self.adopting && !self.has_lost_branch {
            return true;
        }
        let empty = |tree: &mut Tree, scope: Scope<'_>| {
            (0..LOOKS).all(|_| tree.members(scope).is_ok_and(|members| members.is_empty()))
        };
        self.with_tree(group, true, empty).unwrap_or(true)
    }

    /// Notes the descendants of the workers before these are told to end. Inside a user's program and without a
    /// cgroup, a descendant with a changed environment cannot be found once the workers are dead. Below a branch it
    /// cannot be found once the branch is dead.
    pub(super) fn remember(&mut self, group: Group<'_>) {
        if (self.adopting && group.branches.is_empty()) || group.cgroup.is_some() {
            return;
        }
        let members = self.with_tree(group, false, |tree, scope| {
            tree.members(scope).unwrap_or_default()
        });
        self.known = identities(&members.unwrap_or_default());
    }

    /// Processes that outlived their workers and that we may end, with command line and environment; not what they have
    /// started themselves.
    pub(super) fn leftovers(&mut self, group: Group<'_>) -> Vec<(Stat, String, Vec<u8>)> {
        let describe = |tree: &mut Tree, scope: Scope<'_>| {
            let mut members = tree.members(scope).unwrap_or_default();
            members.retain(|stat| !may_not_signal(stat.pid));
            let is_first = |stat: &&Stat| members.iter().all(|other| other.pid != stat.ppid);
            let first = members.iter().filter(is_first);
            first.map(|stat| tree.describe(stat)).collect()
        };
        self.with_tree(group, true, describe).unwrap_or_default()
    }

    /// Asks all processes but the running workers to end. Returns how many processes (or process groups) were asked.
    pub(super) fn terminate(&mut self, group: Group<'_>) -> usize {
        let sent = |tree: &mut Tree, scope: Scope<'_>| {
            let mut members = tree.members(scope).unwrap_or_default();
            members.retain(|stat| !group.workers.contains(&stat.pid));
            let reached = tree.send(&members, Signal::TERM);
            tree.send(&members, Signal::CONT);
            reached.count
        };
        // While workers run, what their grace period leaves is no time to read the environment of a hanging process.
        if let Some(count) = self.with_tree(group, group.workers.is_empty(), sent) {
            return count;
        }
        let is_idle = |leader: &&i32| !group.workers.contains(leader);
        let leaders: Vec<i32> = group.leaders.iter().filter(is_idle).copied().collect();
        let count = self.signal_groups(&leaders, Signal::TERM);
        self.signal_groups(&leaders, Signal::CONT);
        count
    }

    /// Signals process groups. Without a process table, the kernel still tells whether one of our children is in a
    /// group. Such a group belongs to the job: our child is in it, dead or alive, and only we reap it.
    fn signal_groups(&self, leaders: &[i32], signal: Signal) -> usize {
        let ours = leaders.iter().filter(|_| self.adopting);
        let reached = ours.filter(|&&leader| has_child_in_group(leader));
        reached
            .filter(|&&leader| signal::send(-leader, signal.as_raw()).is_ok())
            .count()
    }

    /// Kills the workers and their descendants, if the descendants could not be found after the workers' deaths. Call
    /// it before any other kill.
    pub(super) fn kill_below(&mut self, group: Group<'_>) {
        if self.adopting || group.cgroup.is_some() {
            return;
        }
        // Does not search for the token: reading the environment of a hanging process can take for ever.
        let killed = self.with_tree(group, false, |tree, scope| {
            let members = tree.stop_all(scope)?;
            tree.send(&members, Signal::KILL);
            io::Result::Ok(members)
        });
        if let Some(Ok(members)) = killed {
            // A process with much memory takes a while to die, and may outlive its parent.
            self.known = identities(&members);
        }
    }

    /// Kills all remaining processes. `again`: a first kill has left processes, so use every means.
    pub(super) fn kill(&mut self, group: Group<'_>, again: bool) -> KillTier {
        let by_cgroup = group.cgroup.is_some_and(|cgroup| cgroup.kill().is_ok());
        if !by_cgroup || again {
            let killed = self.with_tree(group, true, Tree::kill_all);
            match killed {
                None => drop(self.signal_groups(group.leaders, Signal::KILL)),
                Some(Ok((_, members))) if !group.branches.is_empty() => {
                    self.known.extend(identities(&members));
                }
                Some(_) => {}
            }
        }
        if by_cgroup {
            KillTier::Cgroup
        } else {
            KillTier::Scan
        }
    }

    /// Describes processes that are left, or may be left as far as we know. `left`: the kernel says that processes
    /// are left.
    pub(super) fn survivors(&mut self, group: Group<'_>, left: bool) -> Vec<Survivor> {
        let is_proved = group.has_no_estate();
        let can_tell = self.adopting || group.cgroup.is_some();
        if !left {
            let is_unknown = !can_tell && self.tree.is_err();
            let unknown = is_unknown.then(|| self.unseen());
            return unknown
                .or((!is_proved).then(|| Survivor::unseen(libc::ECHILD)))
                .into_iter()
                .collect();
        }
        match self.with_tree(group, true, Tree::survivors) {
            None => vec![self.unseen()],
            Some(seen) if seen.is_empty() && !is_proved => vec![Survivor::unseen(libc::ECHILD)],
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
            // With fork servers the workers are named, because forked workers are below their server, which is
            // spared.
            roots: if self.adopting && group.servers.is_empty() && group.branches.is_empty() {
                &[]
            } else {
                group.workers
            },
            known: &self.known,
            token: (by_token && (!self.adopting || self.has_lost_branch)).then_some(self.token.as_str()),
            servers: group.servers,
            branches: group.branches,
            ..Scope::default()
        };
        self.tree.as_mut().ok().map(|tree| work(tree, scope))
    }
}

/// Pids with their start times.
fn identities(processes: &[Stat]) -> Vec<(i32, u64)> {
    processes.iter().map(|stat| (stat.pid, stat.start_time)).collect()
}
