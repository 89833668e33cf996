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
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cgroup::mount::{self, Hierarchy};
use crate::kernel_file;
use crate::procfs::{number, status_value};

const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_RESOURCE: u32 = 24;
const NO_LIMIT: &str = "unlimited";

/// Descriptors that the engine and its owner need in addition to those of the workers, as a rule of thumb.
pub(crate) const OWN_FDS: usize = 64;
/// Descriptors of a worker at most: a pidfd, and two streams with a pipe and a file each. Log files with a limit need more.
pub(crate) const MOST_WORKER_FDS: usize = 5;

/// What a worker group needs from the machine. Only the workers themselves count, not the processes that they start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// Worker processes.
    pub(crate) workers: usize,
    /// Threads that the engine starts for the group.
    pub(crate) threads: usize,
    /// Descriptors that the engine keeps open for each worker.
    pub(crate) fds_per_worker: usize,
    /// Other open descriptors, including those of the caller.
    pub(crate) fds_base: usize,
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
pub(crate) struct Limits {
    /// Soft limit on descriptors (`RLIMIT_NOFILE`).
    pub(crate) nofile_soft: Option<u64>,
    /// Hard limit on descriptors.
    pub(crate) nofile_hard: Option<u64>,
    /// `fs.nr_open`: no process can have more descriptors, whatever its hard limit.
    pub(crate) nr_open: Option<u64>,
    /// `RLIMIT_NPROC` and the tasks of this user.
    pub(crate) user_tasks: Option<Usage>,
    /// `kernel.threads-max` and the tasks of the machine.
    pub(crate) threads_max: Option<Usage>,
    /// `kernel.pid_max` and the pids in use in this pid namespace.
    pub(crate) pid_max: Option<Usage>,
    /// Limits of our own cgroup and of the cgroups above it, innermost first.
    pub(crate) cgroup_pids: Vec<CgroupPids>,
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
#[derive(Debug, Clone, PartialEq, Eq)]
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
    pub(crate) fn read(root: &Path, need: &Need) -> Self {
        let proc_root = root.join("proc");
        let resource = kernel_file::read(proc_root.join("self/limits")).unwrap_or_default();
        let resource = String::from_utf8_lossy(&resource);
        let (nofile_soft, nofile_hard) = resource_limit(&resource, "Max open files");
        let (user_limit, _) = resource_limit(&resource, "Max processes");
        let user_limit = user_limit.filter(|_| !is_exempt(&proc_root));
        let sysctl = |name: &str| one_number(&proc_root.join("sys").join(name));
        let pid_max = sysctl("kernel/pid_max");
        let threads_max = sysctl("kernel/threads-max");

        // All tasks of the machine: an upper bound for this user's tasks and for the tasks in this pid namespace.
        let total = kernel_file::read(proc_root.join("loadavg"))
            .ok()
            .and_then(|text| total_tasks(&text));
        let tasks = (need.workers as u64).saturating_add(need.threads as u64);
        let in_doubt = |limit: Option<u64>| {
            limit.is_some_and(|limit| total.is_none_or(|total| total.saturating_add(tasks) > limit))
        };
        let count = (in_doubt(user_limit) || in_doubt(pid_max)).then(|| Count::of(&proc_root));
        let usage = |limit: Option<u64>, exact: fn(&Count) -> u64| {
            let used = count.as_ref().map(exact).or(total);
            limit.zip(used).map(|(limit, used)| Usage { limit, used })
        };
        Self {
            nofile_soft,
            nofile_hard,
            nr_open: sysctl("fs/nr_open"),
            user_tasks: usage(user_limit, |count| count.own),
            threads_max: threads_max.zip(total).map(|(limit, used)| Usage { limit, used }),
            pid_max: usage(pid_max, |count| count.all),
            cgroup_pids: cgroup_pids(root, &proc_root),
        }
    }

    /// Checks that the group fits. Returns the soft limit of open files that it needs, if that must be raised first.
    pub(crate) fn check(&self, need: &Need) -> Result<Option<u64>, Shortage> {
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
        Ok(self.nofile_soft.filter(|&soft| files > soft).map(|_| files))
    }
}

/// Reads the limits of this machine and checks a need against them.
pub(crate) fn preflight(need: &Need) -> Result<Option<u64>, Shortage> {
    Limits::read(Path::new("/"), need).check(need)
}

impl std::error::Error for Shortage {}

impl fmt::Display for Shortage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            workers,
            threads,
            needed,
            limit,
        } = self;
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

/// Soft and hard value of one line of `/proc/self/limits`.
fn resource_limit(text: &str, name: &str) -> (Option<u64>, Option<u64>) {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_default();
    let mut values = line
        .split_ascii_whitespace()
        .map(|value| (value != NO_LIMIT).then(|| value.parse().ok()).flatten());
    (values.next().flatten(), values.next().flatten())
}

/// Whether we are exempt from `RLIMIT_NPROC`: in the first user namespace, root is, and two capabilities exempt
/// others.
fn is_exempt(proc_root: &Path) -> bool {
    let first_namespace = kernel_file::read(proc_root.join("self/uid_map")).is_ok_and(|map| {
        String::from_utf8_lossy(&map)
            .split_ascii_whitespace()
            .eq(["0", "0", "4294967295"])
    });
    let Ok(status) = kernel_file::read(proc_root.join("self/status")) else {
        return false;
    };
    let capabilities = status_value(&status, "CapEff")
        .and_then(|digits| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())
        .unwrap_or(0);
    first_namespace
        && (own_uid(&status) == Some(0) || capabilities & (1 << CAP_SYS_ADMIN | 1 << CAP_SYS_RESOURCE) != 0)
}

fn own_uid(status: &[u8]) -> Option<u32> {
    number(
        status_value(status, "Uid")?
            .split(u8::is_ascii_whitespace)
            .next()?,
    )
}

fn one_number(file: &Path) -> Option<u64> {
    number(kernel_file::read(file).ok()?.trim_ascii())
}

/// The second half of the fourth field of `/proc/loadavg`: tasks that exist.
fn total_tasks(text: &[u8]) -> Option<u64> {
    let field = text.split(|&byte| byte == b' ').nth(3)?;
    let slash = field.iter().position(|&byte| byte == b'/')?;
    number(&field[slash + 1..])
}

/// Tasks that can be seen, counted one process at a time.
struct Count {
    all: u64,
    own: u64,
}

impl Count {
    fn of(proc_root: &Path) -> Self {
        let mut count = Self { all: 0, own: 0 };
        let status = kernel_file::read(proc_root.join("self/status")).unwrap_or_default();
        let uid = own_uid(&status);
        for entry in std::fs::read_dir(proc_root).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                let (threads, owner) = threads_of(&entry.path()).unwrap_or_default();
                count.all += threads;
                count.own += if Some(owner) == uid { threads } else { 0 };
            }
        }
        count
    }
}

/// The number of a process's threads, and its user. The link count of `task` is two more than its entries.
fn threads_of(process: &Path) -> Option<(u64, u32)> {
    let tasks = process.join("task").metadata().ok()?;
    Some((tasks.nlink().saturating_sub(2), tasks.uid()))
}

/// The limits on every level from our own cgroup up to the highest visible one, in v1 and v2. All of them bind.
fn cgroup_pids(root: &Path, proc_root: &Path) -> Vec<CgroupPids> {
    let text = |name: &str| kernel_file::read(proc_root.join("self").join(name)).unwrap_or_default();
    let (mountinfo, cgroup) = (text("mountinfo"), text("cgroup"));
    let mut found = Vec::new();
    for hierarchy in [Hierarchy::Unified, Hierarchy::Controller("pids")] {
        let Some(place) = mount::own_place(&mountinfo, &cgroup, hierarchy) else {
            continue;
        };
        for dir in place
            .dir
            .ancestors()
            .take_while(|dir| dir.starts_with(&place.mount_point))
        {
            let file = dir.join("pids.max");
            let limit = one_number(&mount::rooted(root, &file));
            let used = one_number(&mount::rooted(root, &dir.join("pids.current")));
            found.extend(limit.zip(used).map(|(limit, used)| CgroupPids {
                file,
                usage: Usage { limit, used },
            }));
        }
    }
    found
}

#[cfg(test)]
mod tests;
