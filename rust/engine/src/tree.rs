//! Finds and ends every process of a job, even if it has left its parent, process group or session.
//!
//! A process belongs to a job in three cases: it descends from one of our processes (as a subreaper we keep the
//! descendants of dead workers); its environment carries the job's token, which `setsid` and forking do not remove;
//! or it descends from a process with the token. No other process is ever signalled: after a pidfd has pinned a
//! process, its start time is compared.

use std::collections::{HashMap, HashSet};
use std::io;

use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getuid, kill_process, pidfd_open, pidfd_send_signal, test_kill_process,
};

use rustix::io::Errno;

use crate::event::Survivor;
use crate::procfs::{ProcFs, Stat, descendants};

/// Variable that carries the tokens of a process's jobs, outermost first, separated by `:`.
pub(crate) const TOKEN_VARIABLE: &str = "DSL_JOB_ID";

/// Maximum number of passes in one call; the caller calls again if processes are left.
const PASSES: usize = 64;

/// Which processes belong to the job.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Scope<'a> {
    /// Whether all descendants of this process belong to the job.
    pub(crate) own_descendants: bool,
    /// These processes and their descendants belong to the job.
    pub(crate) roots: &'a [i32],
    /// Pids with start times that belonged to the job when they were seen. They and their descendants still belong to
    /// it.
    pub(crate) known: &'a [(i32, u64)],
    /// Processes whose environment carries this token, and their descendants, belong to the job.
    pub(crate) token: Option<&'a str>,
    /// This process does not belong to the job, even if it descends from one that does.
    pub(crate) spared: Option<i32>,
    /// Fork servers. They do not belong to the job, and neither do their descendants that are not below a root.
    pub(crate) servers: &'a [i32],
    /// Pids with start times of the branches of warm servers, which are not below this process. They do not belong to the
    /// job, but all their descendants do.
    pub(crate) branches: &'a [(i32, u64)],
}

impl<'a> Scope<'a> {
    /// Everything below this process but these children and what is below them.
    pub(crate) fn below_us(spared: &'a [i32]) -> Self {
        Self {
            own_descendants: true,
            servers: spared,
            ..Self::default()
        }
    }
}

/// The result of a pass over the job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Reached {
    /// Processes that got the signal.
    pub(crate) count: usize,
    /// Processes that we may not signal.
    pub(crate) refused: usize,
}

/// The result of a signal to one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sent {
    Yes,
    /// The process is gone.
    Gone,
    /// It runs as a user whose processes we may not signal.
    Refused,
}

/// Searches the process table.
pub(crate) struct Tree {
    procfs: ProcFs,
}

impl Tree {
    pub(crate) fn open() -> io::Result<Self> {
        Ok(Self {
            procfs: ProcFs::open()?,
        })
    }

    /// Every process of the job that has not ended.
    pub(crate) fn members(&mut self, scope: Scope<'_>) -> io::Result<Vec<Stat>> {
        let all = self.procfs.scan()?;
        let own = getpid().as_raw_nonzero().get();
        let is_root = |stat: &&Stat| {
            scope.roots.contains(&stat.pid) || scope.known.contains(&(stat.pid, stat.start_time))
        };
        let mut found: Vec<Stat> = all.iter().filter(is_root).copied().collect();
        let mut above: Vec<i32> = found.iter().map(|stat| stat.pid).collect();
        let sheltered = sheltered(&all, scope.servers, &above);
        above.extend(scope.own_descendants.then_some(own));
        let is_branch = |stat: &&Stat| scope.branches.contains(&(stat.pid, stat.start_time));
        let branches: Vec<i32> = all.iter().filter(is_branch).map(|stat| stat.pid).collect();
        above.extend(&branches);
        found.extend(descendants(&all, &above));
        if let Some(token) = scope.token {
            let mut carriers = self.carriers(&all, &found, token);
            carriers.retain(|stat| stat.pid != own);
            let above: Vec<i32> = carriers.iter().map(|stat| stat.pid).collect();
            found.append(&mut carriers);
            found.extend(descendants(&all, &above));
        }
        let mut known = HashSet::new();
        let is_other = |pid| scope.spared == Some(pid) || branches.contains(&pid) || sheltered.contains(&pid);
        found.retain(|stat| !stat.is_dead() && !is_other(stat.pid) && known.insert(stat.pid));
        Ok(found)
    }

    /// Processes that carry the token and have not been found already.
    fn carriers(&mut self, all: &[Stat], found: &[Stat], token: &str) -> Vec<Stat> {
        let known: HashSet<i32> = found.iter().map(|stat| stat.pid).collect();
        let unknown = all
            .iter()
            .filter(|stat| !stat.is_dead() && !known.contains(&stat.pid));
        unknown
            .filter(|stat| self.carries(stat, token))
            .copied()
            .collect()
    }

    fn carries(&mut self, stat: &Stat, token: &str) -> bool {
        // Unless we are root, we cannot read another user's environment anyway.
        let own_uid = getuid().as_raw();
        (own_uid == 0 || self.procfs.uid(stat.pid).is_ok_and(|uid| uid == own_uid))
            && self
                .procfs
                .carries_token(stat.pid, TOKEN_VARIABLE.as_bytes(), token.as_bytes())
                .unwrap_or(false)
    }

    /// Continues the branches whose workers carry the token, and the warm servers above them. `listeners`: pids of warm
    /// servers that were called. A child of such a server that has a worker of the job is the branch of the job.
    pub(crate) fn resume_branches(&mut self, token: &str, listeners: &[i32]) -> io::Result<()> {
        let all = self.procfs.scan()?;
        let find = |pid: i32| all.iter().find(|stat| stat.pid == pid);
        for worker in self.carriers(&all, &[], token) {
            let branch = find(worker.ppid);
            let server = branch.and_then(|branch| find(branch.ppid));
            if let Some(server) = server.filter(|server| listeners.contains(&server.pid)) {
                self.send(&[*server], Signal::CONT);
                self.send(branch.map(std::slice::from_ref).unwrap_or_default(), Signal::CONT);
            }
        }
        Ok(())
    }

    /// Sends a signal to each of the members, unless its pid now belongs to another process.
    pub(crate) fn send(&mut self, members: &[Stat], signal: Signal) -> Reached {
        let mut reached = Reached::default();
        for stat in members {
            match self.signal(stat, signal) {
                Sent::Yes => reached.count += 1,
                Sent::Refused => reached.refused += 1,
                Sent::Gone => {}
            }
        }
        reached
    }

    /// Kills the whole job, and returns its processes, too. It is stopped first, so that no process forks meanwhile.
    /// Killed processes may still be dying when this returns.
    pub(crate) fn kill_all(&mut self, scope: Scope<'_>) -> io::Result<(Reached, Vec<Stat>)> {
        let members = self.stop_all(scope)?;
        Ok((self.send(&members, Signal::KILL), members))
    }

    /// Stops every process of the job, until two passes over the table find no new process. Returns all that were seen:
    /// if their ancestor ends meanwhile, only this shows that they belong to the job.
    pub(crate) fn stop_all(&mut self, scope: Scope<'_>) -> io::Result<Vec<Stat>> {
        let mut seen: HashMap<(i32, u64), Stat> = HashMap::new();
        let mut clean = 0;
        let mut empty = 0;
        for _ in 0..PASSES {
            let members = self.members(scope)?;
            if members.is_empty() {
                // The pass may have missed a process that was forked meanwhile.
                empty += 1;
                if empty == 2 {
                    break;
                }
                continue;
            }
            empty = 0;
            let mut news = 0;
            for stat in members {
                let is_known = seen.insert((stat.pid, stat.start_time), stat).is_some();
                if !is_known && !stat.is_stopped() {
                    news += 1;
                    self.signal(&stat, Signal::STOP);
                }
            }
            clean = if news == 0 { clean + 1 } else { 0 };
            if clean == 2 {
                break;
            }
        }
        Ok(seen.into_values().collect())
    }

    /// Whether a process that adopts has no other children than these, as its list of children shows. Its dead children do
    /// not count.
    pub(crate) fn is_bare(&mut self, pid: i32, known: &[i32]) -> bool {
        let mut known = known.to_vec();
        for _ in 0..PASSES {
            let Ok(mut others) = self.procfs.children(pid) else {
                return false;
            };
            others.retain(|child| !known.contains(child));
            // When it dies, its children go to another process.
            if !self.procfs.stat(pid).is_ok_and(|stat| !stat.is_dead()) {
                return false;
            }
            if others.is_empty() {
                return true;
            }
            for child in others {
                if self
                    .procfs
                    .stat(child)
                    .is_ok_and(|stat| stat.ppid == pid && !stat.is_dead())
                {
                    return false;
                }
                // Its own children belong to `pid` since before it was dead, so the next list has them.
                known.push(child);
            }
        }
        false
    }

    /// A process with its command line and its environment.
    pub(crate) fn describe(&mut self, stat: &Stat) -> (Stat, String, Vec<u8>) {
        (
            *stat,
            self.procfs.command(stat.pid),
            self.procfs.environ(stat.pid),
        )
    }

    /// Describes the processes that are left.
    pub(crate) fn survivors(&mut self, scope: Scope<'_>) -> Vec<Survivor> {
        let members = self.members(scope).unwrap_or_default();
        let describe = |stat: &Stat| Survivor {
            pid: stat.pid,
            state: char::from(stat.state),
            name: self.procfs.comm(stat.pid),
            wchan: self.procfs.wchan(stat.pid),
            errno: may_not_signal(stat.pid).then_some(libc::EPERM),
        };
        members.iter().map(describe).collect()
    }

    /// Signals a process only if it is the one that was seen: the pid may belong to another process by now.
    fn signal(&mut self, seen: &Stat, signal: Signal) -> Sent {
        let Some(pid) = Pid::from_raw(seen.pid) else {
            return Sent::Gone;
        };
        let pinned = pidfd_open(pid, PidfdFlags::empty());
        let same = self
            .procfs
            .stat(seen.pid)
            .is_ok_and(|now| now.start_time == seen.start_time);
        if !same {
            return Sent::Gone;
        }
        let sent = match pinned.and_then(|pidfd| pidfd_send_signal(&pidfd, signal)) {
            // An old kernel or a strict profile: the start time was compared a moment ago.
            Err(Errno::NOSYS | Errno::PERM) => kill_process(pid, signal),
            sent => sent,
        };
        match sent {
            Ok(()) => Sent::Yes,
            Err(Errno::PERM) => Sent::Refused,
            Err(_) => Sent::Gone,
        }
    }
}

/// Fork servers and their descendants, without the workers and the workers' descendants.
fn sheltered(all: &[Stat], servers: &[i32], workers: &[i32]) -> HashSet<i32> {
    if servers.is_empty() {
        return HashSet::new();
    }
    let below = |above: &[i32]| descendants(all, above).into_iter().map(|stat| stat.pid).collect();
    let mut sheltered: HashSet<i32> = below(servers);
    sheltered.extend(servers);
    let of_workers: HashSet<i32> = below(workers);
    sheltered.retain(|pid| !workers.contains(pid) && !of_workers.contains(pid));
    sheltered
}

/// Whether the kernel refuses our signals to a process that was seen a moment ago. Sends no signal.
pub(crate) fn may_not_signal(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid) == Err(Errno::PERM))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_server_shelters_what_it_has_started_for_itself_and_no_worker() {
        // Server 10 has a helper 11, which has a child 12, and a worker 20 with children. Process 30 has no server.
        let parents = [(10, 1), (11, 10), (12, 11), (20, 10), (21, 20), (22, 21), (30, 1)];
        let all = parents.map(|(pid, ppid)| Stat {
            pid,
            ppid,
            pgrp: pid,
            session: pid,
            state: b'S',
            threads: 1,
            start_time: 7,
        });
        for (servers, workers, expected) in [
            (&[][..], &[20][..], &[][..]),
            (&[10], &[20], &[10, 11, 12]),
            (&[10], &[], &[10, 11, 12, 20, 21, 22]),
            (&[10], &[30], &[10, 11, 12, 20, 21, 22]),
            (&[99], &[20], &[99]),
        ] {
            let expected: HashSet<i32> = expected.iter().copied().collect();
            assert_eq!(
                sheltered(&all, servers, workers),
                expected,
                "{servers:?} {workers:?}"
            );
        }
    }

    /// The process of this test: its first thread sleeps until the test is over.
    #[test]
    fn a_survivor_is_described_with_where_it_sleeps() {
        let own = getpid().as_raw_nonzero().get();
        let scope = Scope {
            roots: &[own],
            ..Scope::default()
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        // The first thread may not sleep yet, or wake between two looks.
        loop {
            let survivors = Tree::open().unwrap().survivors(scope);
            let found = survivors
                .into_iter()
                .find(|survivor| survivor.pid == own)
                .unwrap();
            let wchan = std::fs::read_to_string(format!("/proc/{own}/wchan")).unwrap();
            if found.state == 'S' && found.wchan.as_deref().unwrap_or("0") == wchan {
                break;
            }
            assert!(Instant::now() < deadline, "{found:?} at {wchan}");
            std::thread::yield_now();
        }
    }
}
