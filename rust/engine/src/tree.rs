//! Finding and ending every process of a job, wherever it has gone.
//!
//! A process belongs to a job if it descends from a process that is ours (as subreaper we keep the descendants
//! of dead workers), or if its environment carries the job's token, which nobody sheds by `setsid` or by forking.
//! Nothing else is ever signalled: a pid is compared with its start time after a pidfd has pinned it.

use std::collections::HashSet;
use std::io;

use rustix::process::{Pid, PidfdFlags, Signal, getpid, getuid, kill_process, pidfd_open, pidfd_send_signal};

use rustix::io::Errno;

use crate::event::Survivor;
use crate::procfs::{ProcFs, Stat, descendants};

/// Variable that carries the tokens of a process's jobs, outermost first, separated by `:`.
pub(crate) const TOKEN_VARIABLE: &str = "DSL_JOB_ID";

/// Passes that one call makes at most; the caller comes back if something is left.
const PASSES: usize = 64;

/// Which processes belong to the job.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scope<'a> {
    /// All descendants of this process belong to the job.
    pub(crate) own_descendants: bool,
    /// These processes and their descendants belong to the job.
    pub(crate) roots: &'a [i32],
    /// Processes whose environment carries this token belong to the job.
    pub(crate) token: Option<&'a str>,
    /// These processes and their descendants do not, unless they carry the token.
    pub(crate) strangers: &'a [(i32, u64)],
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
        let mut found = Vec::new();
        if scope.own_descendants {
            found = descendants(&all, &[own]);
        }
        if !scope.roots.is_empty() {
            found.extend(all.iter().filter(|stat| scope.roots.contains(&stat.pid)));
            found.extend(descendants(&all, scope.roots));
        }
        if !scope.strangers.is_empty() {
            let strangers: Vec<i32> = all
                .iter()
                .filter(|stat| scope.strangers.contains(&(stat.pid, stat.start_time)))
                .map(|stat| stat.pid)
                .collect();
            let mut outside: HashSet<i32> = descendants(&all, &strangers)
                .iter()
                .map(|stat| stat.pid)
                .collect();
            outside.extend(&strangers);
            found.retain(|stat| !outside.contains(&stat.pid));
        }
        let mut known: HashSet<i32> = HashSet::new();
        found.retain(|stat| known.insert(stat.pid));
        if let Some(token) = scope.token {
            for stat in &all {
                if stat.pid != own
                    && !stat.is_dead()
                    && !known.contains(&stat.pid)
                    && self.carries(stat, token)
                {
                    found.push(*stat);
                }
            }
        }
        found.retain(|stat| !stat.is_dead());
        Ok(found)
    }

    fn carries(&mut self, stat: &Stat, token: &str) -> bool {
        // Another user's environment cannot be read anyway, unless we are root.
        let own_uid = getuid().as_raw();
        (own_uid == 0 || self.procfs.uid(stat.pid).is_ok_and(|uid| uid == own_uid))
            && self
                .procfs
                .carries_token(stat.pid, TOKEN_VARIABLE.as_bytes(), token.as_bytes())
                .unwrap_or(false)
    }

    /// Sends a signal to every process of the job; returns how many got it.
    pub(crate) fn signal_all(&mut self, scope: Scope<'_>, signal: Signal) -> io::Result<usize> {
        let members = self.members(scope)?;
        Ok(members.iter().filter(|stat| self.signal(stat, signal)).count())
    }

    /// Kills the whole job. Processes are frozen first, until two passes over the table find no new one, so that
    /// nobody forks while we kill. Returns how many were killed; some may be dying still.
    pub(crate) fn kill_all(&mut self, scope: Scope<'_>) -> io::Result<usize> {
        let mut frozen: HashSet<(i32, u64)> = HashSet::new();
        let mut clean = 0;
        let mut members: Vec<Stat> = Vec::new();
        let mut empty = 0;
        for _ in 0..PASSES {
            members = self.members(scope)?;
            if members.is_empty() {
                // A process forked while the table was read may have been missed.
                empty += 1;
                if empty == 2 {
                    break;
                }
                continue;
            }
            empty = 0;
            let mut news = 0;
            for stat in &members {
                if !frozen.insert((stat.pid, stat.start_time)) {
                    continue;
                }
                if !stat.is_stopped() {
                    news += 1;
                    self.signal(stat, Signal::STOP);
                }
            }
            clean = if news == 0 { clean + 1 } else { 0 };
            if clean == 2 {
                break;
            }
        }
        Ok(members
            .iter()
            .filter(|stat| self.signal(stat, Signal::KILL))
            .count())
    }

    /// Describes what is left.
    pub(crate) fn survivors(&mut self, scope: Scope<'_>) -> Vec<Survivor> {
        let members = self.members(scope).unwrap_or_default();
        let describe = |stat: &Stat| Survivor {
            pid: stat.pid,
            state: char::from(stat.state),
            name: self.procfs.comm(stat.pid),
            wchan: self.procfs.wchan(stat.pid),
        };
        members.iter().map(describe).collect()
    }

    /// Signals exactly the process that was seen: the pid may have passed to a stranger since.
    fn signal(&mut self, seen: &Stat, signal: Signal) -> bool {
        let Some(pid) = Pid::from_raw(seen.pid) else {
            return false;
        };
        let pinned = pidfd_open(pid, PidfdFlags::empty());
        let same = self
            .procfs
            .stat(seen.pid)
            .is_ok_and(|now| now.start_time == seen.start_time);
        if !same {
            return false;
        }
        match pinned.and_then(|pidfd| pidfd_send_signal(&pidfd, signal)) {
            Ok(()) => true,
            // An old kernel or a strict profile: the start time was compared a moment ago.
            Err(Errno::NOSYS | Errno::PERM) => kill_process(pid, signal).is_ok(),
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// The process of this test: its first thread sleeps until the test is over.
    #[test]
    fn a_survivor_is_described_with_where_it_sleeps() {
        let own = getpid().as_raw_nonzero().get();
        let scope = Scope {
            own_descendants: false,
            roots: &[own],
            token: None,
            strangers: &[],
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        let found = loop {
            let survivors = Tree::open().unwrap().survivors(scope);
            let found = survivors
                .into_iter()
                .find(|survivor| survivor.pid == own)
                .unwrap();
            // It may not have come to its sleep yet.
            if found.state == 'S' || Instant::now() > deadline {
                break found;
            }
            std::thread::yield_now();
        };
        let wchan = std::fs::read_to_string(format!("/proc/{own}/wchan")).unwrap();
        assert_eq!(found.wchan.as_deref().unwrap_or("0"), wchan);
        assert_eq!(found.state, 'S');
    }
}
