//! A cgroup v2 for each job, so that one write kills every process of the job.
//!
//! `<own cgroup>/dsl-<pid>-<token>/a<attempt>`: the workers live in the innermost directory. Each attempt has a fresh
//! directory: the kernel compares kill counts when a child is cloned into a cgroup, and a child cloned into a cgroup
//! that was ever killed is dead at birth. Contract: the kernel's [cgroup v2] page, "Core Interface Files".
//!
//! [cgroup v2]: https://docs.kernel.org/admin-guide/cgroup-v2.html

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::procfs::number;
use crate::token;

mod dir;
mod memory;
pub mod mount;

pub use dir::keyed_value;
pub(crate) use memory::OomCounter;

use dir::{Cgroup, remove_tree, require_cgroup2};
use mount::Hierarchy;

const PREFIX: &str = "dsl-";

/// Why the job has no cgroup of its own: one line for the user or a log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no cgroup for the job: {0}")]
pub struct Unavailable(String);

/// The name of a job's cgroup: `dsl-<pid>-<token>`. By `pid`, [`sweep_stale`] finds the owner.
pub fn job_name(pid: u32, token: &str) -> String {
    format!("{PREFIX}{pid}-{token}")
}

/// Lines of `/proc/<pid>/cgroup` without the cgroups of jobs: these set no limits.
pub(crate) fn above_jobs(lines: &str) -> String {
    let above = |line: &str| {
        let mut path = line;
        while let Some((job, attempt)) = path.rsplit_once("/a") {
            let Some((outside, name)) = job.rsplit_once('/') else {
                break;
            };
            if number::<u32>(attempt.as_bytes()).is_none() || owner_of(name).is_none() {
                break;
            }
            path = outside;
        }
        format!("{}\n", path.trim_end_matches('/'))
    };
    lines.lines().map(above).collect()
}

/// Whether lines of `/proc/<pid>/cgroup` lead into the cgroup of a job.
pub(crate) fn is_of_job(lines: &str) -> bool {
    lines
        .lines()
        .any(|line| line.split('/').any(|name| owner_of(name).is_some()))
}

/// The directory of the caller's own cgroup in the v2 hierarchy.
pub fn own_dir() -> Result<PathBuf, Unavailable> {
    let read = |path: &str| {
        crate::kernel_file::read(path).map_err(|error| Unavailable(format!("cannot read {path}: {error}")))
    };
    let mountinfo = read("/proc/self/mountinfo")?;
    if mount::mounts(&mountinfo, Hierarchy::Unified).is_empty() {
        return Err(Unavailable("cgroup v2 is not mounted".to_owned()));
    }
    let place = mount::own_place(&mountinfo, &read("/proc/self/cgroup")?, Hierarchy::Unified);
    place
        .map(|place| place.dir)
        .ok_or_else(|| Unavailable("no cgroup v2 mount shows our own cgroup".to_owned()))
}

/// Why this process cannot make a cgroup for a job; empty if it can. To find out, a cgroup is made and removed.
pub(crate) fn trial() -> String {
    // The name differs from any job's and from that of another trial in this process.
    let nanos = std::time::SystemTime::UNIX_EPOCH
        .elapsed()
        .map_or(0, |time| time.as_nanos());
    match JobCgroup::create(&job_name(std::process::id(), &format!("trial{nanos:x}"))) {
        Ok(job) => {
            job.remove();
            String::new()
        }
        Err(Unavailable(reason)) => reason,
    }
}

/// The cgroup that holds all attempts of one job.
///
/// A shared lock is held on the directory while a process of the job has it open, so [`sweep_stale`] leaves the
/// cgroup alone. Dropping this value removes nothing: see [`JobCgroup::remove`].
#[derive(Debug)]
pub struct JobCgroup(Cgroup);

impl JobCgroup {
    /// Makes `<own cgroup>/<name>` and proves that workers can be moved and killed there.
    pub fn create(name: &str) -> Result<Self, Unavailable> {
        Self::create_in(&own_dir()?, name)
    }

    /// Makes `<parent>/<name>`, where `parent` is a cgroup v2 directory at or above the caller's own cgroup.
    pub fn create_in(parent: &Path, name: &str) -> Result<Self, Unavailable> {
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\n', '\0']) {
            return Err(Unavailable(format!("{name:?} cannot name a directory")));
        }
        let path = parent.join(name);
        let failed =
            |what: &str, error: io::Error| Unavailable(format!("cannot {what} {}: {error}", path.display()));
        require_cgroup2(parent).map_err(|error| failed("make", error))?;
        rustix::fs::mkdirat(CWD, &path, Mode::from_raw_mode(0o755))
            .map_err(|errno| failed("make", errno.into()))?;
        Self::open_existing(&path)
            .and_then(|job| job.check(parent).map(|()| job))
            .map_err(|error| {
                remove_tree(&path);
                failed("use", error)
            })
    }

    /// Opens a job's cgroup by its path, in another process of the same job.
    pub fn open_existing(path: &Path) -> io::Result<Self> {
        let cgroup = Cgroup::open(path)?;
        rustix::fs::flock(&cgroup.dir, FlockOperation::NonBlockingLockShared)?;
        Ok(Self(cgroup))
    }

    /// The path of its directory.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Makes the fresh cgroup of an attempt. Fails with `AlreadyExists` if this number was used before.
    pub fn attempt(&self, number: u32) -> io::Result<AttemptCgroup> {
        let path = self.0.path.join(format!("a{number}"));
        rustix::fs::mkdirat(CWD, &path, Mode::from_raw_mode(0o755))?;
        Cgroup::open(&path).map(AttemptCgroup).inspect_err(|_| {
            remove_tree(&path);
        })
    }

    /// Sends SIGKILL to every process of the job, including those that are just being forked. Does not wait.
    pub fn kill(&self) -> io::Result<()> {
        self.0.kill()
    }

    /// Whether a process lives in it or below. Zombies do not count.
    pub fn populated(&self) -> io::Result<bool> {
        self.0.populated()
    }

    /// Removes the cgroup with everything below; `true` when it is gone. Never waits: while processes are still
    /// exiting it returns `false`, and the caller tries again later.
    pub fn remove(&self) -> bool {
        remove_tree(&self.0.path)
    }

    /// Checks that a process can move here: the cgroup must be a domain, and we must be able to write the member list
    /// of the common ancestor, too.
    fn check(&self, parent: &Path) -> io::Result<()> {
        let kind = self.0.read("cgroup.type")?;
        let kind = String::from_utf8_lossy(kind.trim_ascii());
        if kind != "domain" {
            let refused = format!("its type is \"{kind}\"");
            return Err(io::Error::new(io::ErrorKind::Unsupported, refused));
        }
        self.0.open_for_write("cgroup.procs")?;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, parent.join("cgroup.procs"), flags, Mode::empty())?;
        Ok(())
    }
}

/// The cgroup of one attempt: the workers and all that they start.
#[derive(Debug)]
pub struct AttemptCgroup(Cgroup);

impl AttemptCgroup {
    /// The directory, for `CLONE_INTO_CGROUP`.
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.0.dir.as_fd()
    }

    /// The list of its processes, open for a process that will move itself here.
    pub(crate) fn list(&self) -> io::Result<OwnedFd> {
        self.0.open_for_write("cgroup.procs")
    }

    /// The open `cgroup.events`: wait for `EPOLLPRI`, then ask [`AttemptCgroup::populated`], which also rearms it.
    ///
    /// The kernel reports at most once in 10 ms, so ask again after the last worker was reaped.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.0.events.as_fd()
    }

    /// The path of its directory.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Whether a process lives in it or below. Zombies do not count.
    pub fn populated(&self) -> io::Result<bool> {
        self.0.populated()
    }

    /// Sends SIGKILL to every process in it or below. Does not wait.
    pub fn kill(&self) -> io::Result<()> {
        self.0.kill()
    }

    /// How many of its processes the kernel's out-of-memory killer has killed; `None` without the memory controller.
    pub fn oom_kills(&self) -> Option<u64> {
        keyed_value(&self.0.read("memory.events").ok()?, b"oom_kill")
    }

    /// Removes it with everything below; `true` when it is gone. See [`JobCgroup::remove`].
    pub fn remove(&self) -> bool {
        remove_tree(&self.0.path)
    }
}

/// Removes empty cgroups beside ours that a dead dsl has left behind. Returns how many.
///
/// A cgroup is stale when its name is `dsl-<pid>-<token>`, it belongs to this user, no process has that pid, and no
/// process holds its lock (the owner may be in another pid namespace). Other cgroups are not touched, and the kernel
/// does not remove a cgroup that is in use.
pub fn sweep_stale() -> usize {
    own_dir().map_or(0, |dir| sweep_in(&dir))
}

/// [`sweep_stale`] in a given cgroup directory.
pub fn sweep_in(parent: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(parent) else {
        return 0;
    };
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_str().and_then(owner_of).is_some_and(is_gone))
        .filter(|entry| is_abandoned(&entry.path()) && remove_tree(&entry.path()))
        .count()
}

fn owner_of(name: &str) -> Option<rustix::process::Pid> {
    let (pid, token) = name.strip_prefix(PREFIX)?.split_once('-')?;
    // Other programs may use our prefix, too.
    let pid: i32 = number(pid.as_bytes()).filter(|&pid| pid > 0 && token::is_one(token))?;
    rustix::process::Pid::from_raw(pid)
}

fn is_gone(pid: rustix::process::Pid) -> bool {
    rustix::process::test_kill_process(pid) == Err(Errno::SRCH)
}

fn is_abandoned(path: &Path) -> bool {
    Cgroup::open(path).is_ok_and(|cgroup| {
        let owner = rustix::fs::fstat(&cgroup.dir).map(|stat| stat.st_uid);
        owner == Ok(geteuid().as_raw())
            && rustix::fs::flock(&cgroup.dir, FlockOperation::NonBlockingLockExclusive).is_ok()
            && cgroup.populated().is_ok_and(|populated| !populated)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_of_jobs_are_left_out_of_a_path_and_others_are_not() {
        let token = "0123456789abcdef0123456789abcdef";
        for (path, expected) in [
            ("/".to_owned(), ""),
            (format!("/dsl-7-{token}/a0"), ""),
            (format!("/user.slice/dsl-7-{token}/a2"), "/user.slice"),
            (format!("/s/dsl-7-{token}/a0/dsl-812-{token}/a13"), "/s"),
            (format!("/s/dsl-7-{token}"), &format!("/s/dsl-7-{token}")),
            ("/s/dsl-7-short/a0".to_owned(), "/s/dsl-7-short/a0"),
            (
                format!("/dsl-7-{token}/a0/mine"),
                &format!("/dsl-7-{token}/a0/mine"),
            ),
        ] {
            let lines = format!("1:cpu:/x\n0::{path}\n");
            assert_eq!(above_jobs(&lines), format!("1:cpu:/x\n0::{expected}\n"));
            assert_eq!(is_of_job(&lines), path.contains(token), "{path}");
        }
    }
}
