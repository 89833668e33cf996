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

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::procfs::number;
use crate::{kernel_file, token};

pub mod mount;

use mount::{Hierarchy, own_place};

const PREFIX: &str = "dsl-";
/// Tries to remove one directory. Between two tries we only yield the processor.
const REMOVE_TRIES: u32 = 4;
/// Deepest nesting that we remove. Cgroups may nest deeper; those stay.
const DEPTH_MAX: u32 = 32;

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
        kernel_file::read(path).map_err(|error| Unavailable(format!("cannot read {path}: {error}")))
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
    match Cgroup::create(&job_name(std::process::id(), &format!("trial{nanos:x}"))) {
        Ok(job) => {
            job.remove();
            String::new()
        }
        Err(Unavailable(reason)) => reason,
    }
}

/// A cgroup directory with its files already open: when things go wrong, there may be no descriptor left for them.
///
/// That of a job holds all its attempts. A shared lock is held on its directory while a process of the job has it open, so
/// [`sweep_stale`] leaves the cgroup alone. That of an attempt holds the workers and all that they start. Dropping this
/// value removes nothing: see [`Cgroup::remove`].
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    dir: OwnedFd,
    kill: OwnedFd,
    events: OwnedFd,
}

impl Cgroup {
    /// Makes `<own cgroup>/<name>` for a job, and proves that workers can be moved and killed there.
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
        let cgroup = Self::open(path)?;
        rustix::fs::flock(&cgroup.dir, FlockOperation::NonBlockingLockShared)?;
        Ok(cgroup)
    }

    /// Makes the fresh cgroup of an attempt. Fails with `AlreadyExists` if this number was used before.
    pub fn attempt(&self, number: u32) -> io::Result<Self> {
        let path = self.path.join(format!("a{number}"));
        rustix::fs::mkdirat(CWD, &path, Mode::from_raw_mode(0o755))?;
        Self::open(&path).inspect_err(|_| {
            remove_tree(&path);
        })
    }

    fn open(path: &Path) -> io::Result<Self> {
        let dir = require_cgroup2(path)?;
        let open = |name: &str, flags| rustix::fs::openat(&dir, name, flags | OFlags::CLOEXEC, Mode::empty());
        let kill = open("cgroup.kill", OFlags::WRONLY).map_err(|errno| match errno {
            Errno::NOENT => io::Error::new(io::ErrorKind::Unsupported, "it has no cgroup.kill (Linux 5.14)"),
            errno => errno.into(),
        })?;
        let events = open("cgroup.events", OFlags::RDONLY)?;
        let cgroup = Self {
            path: path.to_owned(),
            dir,
            kill,
            events,
        };
        // An event is pending from the start, until the first read.
        cgroup.populated()?;
        Ok(cgroup)
    }

    /// The path of its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory, for `CLONE_INTO_CGROUP`.
    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// The list of its processes, open for a process that will move itself here.
    pub(crate) fn list(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(
            &self.dir,
            "cgroup.procs",
            flags,
            Mode::empty(),
        )?)
    }

    /// The open `cgroup.events`: wait for `EPOLLPRI`, then ask [`Cgroup::populated`], which also rearms it.
    ///
    /// The kernel reports at most once in 10 ms, so ask again after the last worker was reaped.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Whether a process lives in it or below. Zombies do not count.
    pub fn populated(&self) -> io::Result<bool> {
        let mut text = [0; 256];
        let length = rustix::io::retry_on_intr(|| rustix::io::pread(&self.events, &mut text, 0))?;
        let populated = keyed_value(&text[..length], b"populated");
        populated
            .map(|count| count != 0)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Sends SIGKILL to every process in it or below, including those that are just being forked. Does not wait.
    pub fn kill(&self) -> io::Result<()> {
        rustix::io::write(&self.kill, b"1")?;
        Ok(())
    }

    /// How many of its processes the kernel's out-of-memory killer has killed; `None` without the memory controller.
    pub fn oom_kills(&self) -> Option<u64> {
        keyed_value(
            &kernel_file::read(self.path.join("memory.events")).ok()?,
            b"oom_kill",
        )
    }

    /// Removes the cgroup with everything below; `true` when it is gone. Never waits: while processes are still
    /// exiting it returns `false`, and the caller tries again later.
    pub fn remove(&self) -> bool {
        remove_tree(&self.path)
    }

    /// Checks that a process can move here: the cgroup must be a domain, and we must be able to write the member list
    /// of the common ancestor, too.
    fn check(&self, parent: &Path) -> io::Result<()> {
        let kind = kernel_file::read(self.path.join("cgroup.type"))?;
        let kind = String::from_utf8_lossy(kind.trim_ascii());
        if kind != "domain" {
            let refused = format!("its type is \"{kind}\"");
            return Err(io::Error::new(io::ErrorKind::Unsupported, refused));
        }
        self.list()?;
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, parent.join("cgroup.procs"), flags, Mode::empty())?;
        Ok(())
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

/// Opens a directory that must be a cgroup of v2.
fn require_cgroup2(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let dir = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
    // The integer types of both differ between architectures.
    let kind = u64::try_from(rustix::fs::fstatfs(&dir)?.f_type);
    if kind == u64::try_from(libc::CGROUP2_SUPER_MAGIC) {
        return Ok(dir);
    }
    Err(io::Error::new(
        io::ErrorKind::Unsupported,
        "it is not in a cgroup v2 hierarchy",
    ))
}

/// One number of a flat keyed file such as `cgroup.events`.
pub fn keyed_value(text: &[u8], key: &[u8]) -> Option<u64> {
    text.split(|&byte| byte == b'\n')
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(b" "))
        .and_then(|value| number(value.trim_ascii()))
}

/// Removes a cgroup and everything below it, without waiting. Returns whether it is gone.
fn remove_tree(path: &Path) -> bool {
    for attempt in 0..REMOVE_TRIES {
        if attempt > 0 {
            std::thread::yield_now();
        }
        match remove_once(path, 0) {
            Ok(()) => return true,
            Err(Errno::BUSY) => {}
            Err(_) => return false,
        }
    }
    false
}

/// Removes one cgroup, with the cgroups that workers may have made below it. An empty cgroup holds nothing else
/// that could be lost.
fn remove_once(path: &Path, depth: u32) -> Result<(), Errno> {
    let remove = || match rustix::fs::unlinkat(CWD, path, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    };
    let below = match remove() {
        Err(Errno::BUSY) if depth < DEPTH_MAX => subdirectories(path),
        other => return other,
    };
    if below.is_empty() {
        return Err(Errno::BUSY);
    }
    for child in &below {
        // A child in use makes the last call fail again. It must not stop the removal of its siblings.
        let _ = remove_once(child, depth + 1);
    }
    remove()
}

fn subdirectories(path: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(path)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// How often the kernel's out-of-memory killer has struck in the memory cgroup that the caller is in, if that can be read.
///
/// Contract: `oom_kill` in `memory.events` ([cgroup v2], "Memory Interface Files") and in `memory.oom_control`
/// ([cgroup v1], since Linux 4.13). The kernel counts before it sends its SIGKILL, so the count includes every
/// death that we have seen.
///
/// [cgroup v2]: https://docs.kernel.org/admin-guide/cgroup-v2.html
/// [cgroup v1]: https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
#[derive(Debug)]
pub(crate) struct OomCounter(Option<PathBuf>);

impl OomCounter {
    /// Finds the counter. Afterwards each look reads one small file.
    pub(crate) fn own() -> Self {
        let read = |path: &str| kernel_file::read(path).unwrap_or_default();
        let files = files(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
        Self(files.into_iter().find(|path| count(path).is_some()))
    }

    /// Kills so far; 0 without a counter.
    pub(crate) fn kills(&self) -> u64 {
        self.0.as_deref().and_then(count).unwrap_or(0)
    }
}

/// Files that may hold the count: that of cgroup v1 first, if v1 has the memory controller, then that of v2.
fn files(mountinfo: &[u8], cgroup: &[u8]) -> Vec<PathBuf> {
    let places = [
        (Hierarchy::Controller("memory"), "memory.oom_control"),
        (Hierarchy::Unified, "memory.events"),
    ];
    let file = |(hierarchy, name)| Some(own_place(mountinfo, cgroup, hierarchy)?.dir.join(name));
    places.into_iter().filter_map(file).collect()
}

fn count(path: &Path) -> Option<u64> {
    keyed_value(&kernel_file::read(path).ok()?, b"oom_kill")
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

    const HYBRID: &[u8] = b"32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
    35 31 0:32 /docker/1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
    41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
    const UNIFIED: &[u8] = b"30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn the_counter_is_found_by_the_mounts_of_either_version() {
        assert_eq!(
            files(HYBRID, b"4:memory:/docker/1/job\n0::/a\n"),
            [
                Path::new("/sys/fs/cgroup/memory/job/memory.oom_control"),
                Path::new("/sys/fs/cgroup/unified/a/memory.events"),
            ]
        );
        assert_eq!(
            files(UNIFIED, b"0::/user.slice\n"),
            [Path::new("/sys/fs/cgroup/user.slice/memory.events")]
        );
        assert_eq!(files(b"", b"").len(), 0);
    }

    #[test]
    fn both_versions_have_the_count_on_a_line_of_its_own() {
        let path = std::env::temp_dir().join(format!("dsl-oom-{}", std::process::id()));
        for (text, expected) in [
            (&b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"[..], Some(3)),
            (
                b"low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 5\n",
                Some(1),
            ),
            (b"oom_kill_disable 0\nunder_oom 0\n", None),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(count(&path), expected);
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(count(&path), None);
        assert_eq!(OomCounter(Some(path)).kills(), 0);
    }
}
