//! A cgroup v2 directory: the operations that a job's cgroup and an attempt's have in common.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use crate::procfs::number;

/// Tries to remove one directory. Between two tries we only yield the processor.
const REMOVE_TRIES: u32 = 4;
/// Deepest nesting that we remove. Cgroups may nest deeper; those stay.
const DEPTH_MAX: u32 = 32;

/// A cgroup directory with its files already open: when things go wrong, there may be no descriptor left for them.
#[derive(Debug)]
pub(super) struct Cgroup {
    pub(super) path: PathBuf,
    pub(super) dir: OwnedFd,
    kill: OwnedFd,
    pub(super) events: OwnedFd,
}

impl Cgroup {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
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

    pub(super) fn kill(&self) -> io::Result<()> {
        rustix::io::write(&self.kill, b"1")?;
        Ok(())
    }

    pub(super) fn populated(&self) -> io::Result<bool> {
        let mut text = [0; 256];
        let length = rustix::io::retry_on_intr(|| rustix::io::pread(&self.events, &mut text, 0))?;
        let populated = keyed_value(&text[..length], b"populated");
        populated
            .map(|count| count != 0)
            .ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    pub(super) fn open_for_write(&self, name: &str) -> io::Result<OwnedFd> {
        Ok(rustix::fs::openat(
            &self.dir,
            name,
            OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?)
    }

    pub(super) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        crate::kernel_file::read(self.path.join(name))
    }
}

/// Opens a directory that must be a cgroup of v2.
pub(super) fn require_cgroup2(path: &Path) -> io::Result<OwnedFd> {
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
pub(super) fn remove_tree(path: &Path) -> bool {
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
