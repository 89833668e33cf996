//! Limits of the machine, checked before the first worker is started.
//!
//! A shortage is reported only if it is certain. Limits that cannot be read are not checked, because the kernel
//! itself refuses a clone at a limit. Contract of the numbers: [getrlimit(2)], [proc_sys_kernel(5)],
//! [proc_sys_fs(5)], and the kernel's pages on the pids controller.
//!
//! [getrlimit(2)]: https://man7.org/linux/man-pages/man2/getrlimit.2.html
//! [proc_sys_kernel(5)]: https://man7.org/linux/man-pages/man5/proc_sys_kernel.5.html
//! [proc_sys_fs(5)]: https://man7.org/linux/man-pages/man5/proc_sys_fs.5.html

use std::fmt;
use std::path::{Path, PathBuf};

mod read;

/// What a worker group needs from the machine. Only the workers themselves count, not the processes that they start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Worker processes.
    pub workers: usize,
    /// Threads that the engine starts for the group.
    pub threads: usize,
    /// Descriptors that the engine keeps open for each worker.
    pub fds_per_worker: usize,
    /// Other open descriptors, including those of the caller.
    pub fds_base: usize,
}

/// A limit and how much of it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// The limit.
    pub limit: u64,
    /// How much is in use now.
    pub used: u64,
}

/// The limit of one cgroup on its number of tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupPids {
    /// The file that holds the limit.
    pub file: PathBuf,
    /// `pids.max` and `pids.current`.
    pub usage: Usage,
}

/// The limits that apply to the caller. `None` (or an empty list): unlimited, exempt or unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Soft limit on descriptors (`RLIMIT_NOFILE`).
    pub nofile_soft: Option<u64>,
    /// Hard limit on descriptors.
    pub nofile_hard: Option<u64>,
    /// `fs.nr_open`: no process can have more descriptors, whatever its hard limit.
    pub nr_open: Option<u64>,
    /// `RLIMIT_NPROC` and the tasks of this user.
    pub user_tasks: Option<Usage>,
    /// `kernel.threads-max` and the tasks of the machine.
    pub threads_max: Option<Usage>,
    /// `kernel.pid_max` and the pids in use in this pid namespace.
    pub pid_max: Option<Usage>,
    /// Limits of our own cgroup and of the cgroups above it, innermost first.
    pub cgroup_pids: Vec<CgroupPids>,
}

/// Changes that are needed before the group can start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Adjust {
    /// New value for the soft `RLIMIT_NOFILE`, never above the hard limit; `None` if it need not be raised.
    pub nofile: Option<u64>,
}

/// The limit that is too low.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Limit {
    /// Hard `RLIMIT_NOFILE`.
    OpenFiles(u64),
    /// `fs.nr_open`.
    NrOpen(u64),
    /// `RLIMIT_NPROC`.
    UserTasks(Usage),
    /// `kernel.threads-max`.
    ThreadsMax(Usage),
    /// `kernel.pid_max`.
    PidMax(Usage),
    /// `pids.max` of a cgroup.
    Cgroup(CgroupPids),
}

impl Limit {
    /// The value that the limit needs for `more` tasks; `None` if it is high enough.
    fn lacks(&self, more: u64) -> Option<u64> {
        let usage = match self {
            Self::OpenFiles(_) | Self::NrOpen(_) => return None,
            Self::UserTasks(usage) | Self::ThreadsMax(usage) | Self::PidMax(usage) => usage,
            Self::Cgroup(cgroup) => &cgroup.usage,
        };
        let needed = usage.used.saturating_add(more);
        (more > 0 && needed > usage.limit).then_some(needed)
    }
}

/// A limit is too low for the group. Displays as one line: the limit, its value, the needed value, and how to raise
/// it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", Sentence(self))]
pub struct Shortage {
    /// Workers in the group.
    pub workers: usize,
    /// Threads that the engine starts for them.
    pub threads: usize,
    /// The value that the limit needs.
    pub needed: u64,
    /// The limit.
    pub limit: Limit,
}

impl Limits {
    /// Reads the limits of the caller. `root` is `/`, or a directory with copies of the files in a test.
    ///
    /// Looks at single processes only if the cheap upper bound does not already prove that `need` fits.
    pub fn read(root: &Path, need: &Need) -> Self {
        read::limits(root, need)
    }

    /// Checks that the group fits, and returns what must be raised first.
    pub fn check(&self, need: &Need) -> Result<Adjust, Shortage> {
        let workers = need.workers as u64;
        let short = |needed: u64, limit: Limit| Shortage {
            workers: need.workers,
            threads: need.threads,
            needed,
            limit,
        };

        let files = (need.fds_per_worker as u64)
            .saturating_mul(workers)
            .saturating_add(need.fds_base as u64);
        if let Some(hard) = self.nofile_hard.filter(|&hard| files > hard) {
            return Err(short(files, Limit::OpenFiles(hard)));
        }
        if let Some(most) = self.nr_open.filter(|&most| files > most) {
            return Err(short(files, Limit::NrOpen(most)));
        }
        let counted = (self.cgroup_pids.iter().cloned().map(Limit::Cgroup))
            .chain(self.user_tasks.map(Limit::UserTasks))
            .chain(self.threads_max.map(Limit::ThreadsMax))
            .chain(self.pid_max.map(Limit::PidMax));
        let tasks = workers.saturating_add(need.threads as u64);
        for limit in counted.filter(|_| workers > 0) {
            if let Some(needed) = limit.lacks(tasks) {
                return Err(short(needed, limit));
            }
        }
        Ok(Adjust {
            nofile: self.nofile_soft.filter(|&soft| files > soft).map(|_| files),
        })
    }
}

/// Reads the limits of this machine and checks a need against them.
pub fn preflight(need: &Need) -> Result<Adjust, Shortage> {
    Limits::read(Path::new("/"), need).check(need)
}

struct Sentence<'shortage>(&'shortage Shortage);

impl fmt::Display for Sentence<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage {
            workers,
            threads,
            needed,
            limit,
        } = self.0;
        let verb = if *workers == 1 {
            "worker needs"
        } else {
            "workers need"
        };
        let tasks = workers.saturating_add(*threads);
        let more = match (tasks, threads) {
            (1, _) => "process",
            (_, 0) => "processes",
            _ => "processes and threads",
        };
        write!(out, "{workers} {verb} ")?;
        match limit {
            Limit::OpenFiles(hard) => write!(
                out,
                "{needed} open files, but the hard limit is {hard}: raise it with ulimit -Hn {needed} or LimitNOFILE={needed}"
            ),
            Limit::NrOpen(most) => write!(
                out,
                "{needed} open files, but fs.nr_open is {most}: raise it with sysctl -w fs.nr_open={needed}"
            ),
            Limit::UserTasks(Usage { limit, used }) => write!(
                out,
                "{tasks} more {more}, but this user's limit is {limit} and {used} are in use: \
                 raise it with ulimit -u {needed} or LimitNPROC={needed}"
            ),
            Limit::ThreadsMax(Usage { limit, used }) => write!(
                out,
                "{tasks} more {more}, but kernel.threads-max is {limit} and {used} are in use: \
                 raise it with sysctl -w kernel.threads-max={needed}"
            ),
            Limit::PidMax(Usage { limit, used }) => write!(
                out,
                "{tasks} more {more}, but kernel.pid_max is {limit} and {used} are in use: \
                 raise it with sysctl -w kernel.pid_max={needed}"
            ),
            Limit::Cgroup(CgroupPids {
                file,
                usage: Usage { limit, used },
            }) => write!(
                out,
                "{tasks} more {more}, but {} is {limit} and {used} are in use: \
                 raise it to {needed} (TasksMax= of the unit, --pids-limit of the container)",
                file.display()
            ),
        }
    }
}

#[cfg(test)]
mod tests;
