//! Facts about processes from `/proc`: one-pass scans, the tree below a process, and the job's token in an
//! environment.
//!
//! Contract of the texts: [proc_pid_stat(5)], [proc_pid_environ(5)], [proc_pid_status(5)].
//!
//! [proc_pid_stat(5)]: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
//! [proc_pid_environ(5)]: https://man7.org/linux/man-pages/man5/proc_pid_environ.5.html
//! [proc_pid_status(5)]: https://man7.org/linux/man-pages/man5/proc_pid_status.5.html

use std::fmt::Write as _;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

use crate::kernel_file;

mod snapshot;

pub use snapshot::{Stat, Vitals, descendants, parse_stat};
use snapshot::{has_no_memory, parse_children, parse_exit_status, parse_vitals};

/// Bytes of one read; a whole `stat` line and most environments fit.
const CHUNK: usize = 16 * 1024;
/// Letters of a command line that are shown.
const COMMAND_LETTERS: usize = 80;
/// More than the kernel allows for an environment (three quarters of its 8 MiB stack default).
const ENVIRON_MAX: usize = 8 << 20;
/// How long an exec may leave a process without an environment, from the loss of its old memory until the new memory
/// is set up.
const EXEC_PATIENCE: Duration = Duration::from_millis(200);
/// Bytes of directory entries asked for at once.
const LISTING: usize = 32 * 1024;
/// Maximum number of ancestors that are followed.
const GENERATIONS: usize = 64;
/// Files in the `ns` directory of a process, and the namespace of each. Those that change the meaning of pids come
/// first.
const NAMESPACES: [(&str, &str); 10] = [
    ("pid", "pid namespace"),
    ("pid_for_children", "pid namespace"),
    ("user", "user namespace"),
    ("time", "time namespace"),
    ("time_for_children", "time namespace"),
    ("mnt", "mount namespace"),
    ("cgroup", "cgroup namespace"),
    ("ipc", "ipc namespace"),
    ("net", "network namespace"),
    ("uts", "uts namespace"),
];

/// Whether an environment block has the variable `key`, with `token` as an item of its `:`-separated value.
pub fn environ_carries(environ: &[u8], key: &[u8], token: &[u8]) -> bool {
    !key.is_empty()
        && !token.is_empty()
        && environ
            .split(|&byte| byte == 0)
            .filter_map(|entry| entry.strip_prefix(key)?.strip_prefix(b"="))
            .any(|value| value.split(|&byte| byte == b':').any(|item| item == token))
}

/// The state letter of a process; `None` if it cannot be seen.
pub(crate) fn state(pid: i32) -> Option<u8> {
    Some(ProcFs::open().ok()?.stat(pid).ok()?.state)
}

/// Pids of the children of this process, living and dead, with those that it has adopted.
pub(crate) fn own_children() -> io::Result<Vec<i32>> {
    let own = rustix::process::getpid().as_raw_pid();
    let mut found = Vec::new();
    for thread in std::fs::read_dir("/proc/self/task")?.flatten() {
        if thread.file_name().as_encoded_bytes() != own.to_string().as_bytes() {
            // A thread that has ended has given its children to the first one.
            let text = kernel_file::read(thread.path().join("children"));
            found.extend(parse_children(&text.unwrap_or_default()));
        }
    }
    // The first thread adopts, so it comes last.
    match kernel_file::read(format!("/proc/self/task/{own}/children")) {
        Ok(text) => found.extend(parse_children(&text)),
        Err(_) => return ProcFs::open()?.children(own),
    }
    Ok(found)
}

/// What each of these processes uses; `None` for a process that has ended or cannot be seen.
pub fn vitals(pids: &[i32]) -> Vec<Option<Vitals>> {
    let mut procfs = ProcFs::open().ok();
    let mut one = |pid: i32| parse_vitals(procfs.as_mut()?.starts(pid, "stat").ok()?);
    pids.iter()
        .map(|&pid| if pid > 0 { one(pid) } else { None })
        .collect()
}

/// The status of a zombie in the form of `wait(2)`; `None` if the process is no zombie or cannot be seen.
pub(crate) fn exit_status(pid: i32) -> Option<i32> {
    let mut procfs = ProcFs::open().ok()?;
    let status = parse_exit_status(procfs.starts(pid, "stat").ok()?)?;
    // The kernel shows 0 to a process without permission. It shows `io` under the same condition as the real status.
    (status != 0 || procfs.starts(pid, "io").is_ok()).then_some(status)
}

/// Whether another process traces this process, which may be dead.
pub(crate) fn is_traced(pid: i32) -> bool {
    let tracer = || {
        let mut procfs = ProcFs::open().ok()?;
        number::<i32>(status_value(procfs.starts(pid, "status").ok()?, "TracerPid")?)
    };
    tracer().is_some_and(|tracer| tracer != 0)
}

/// An open `/proc` with the buffers for reading it. Each thread that scans needs its own.
#[derive(Debug)]
pub struct ProcFs {
    dir: OwnedFd,
    name: String,
    text: Vec<u8>,
    listing: Vec<u8>,
    expected: usize,
}

impl ProcFs {
    /// Opens `/proc`.
    ///
    /// Fails with `Unsupported` if it shows another pid namespace than the caller's: its pids would name other
    /// processes here.
    pub fn open() -> io::Result<Self> {
        let mut procfs = Self::open_at(Path::new("/proc"))?;
        procfs.require_own_namespace()?;
        Ok(procfs)
    }

    /// Opens a directory that is laid out like `/proc`, without the check of [`ProcFs::open`].
    pub fn open_at(root: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            dir: rustix::fs::openat(CWD, root, flags, Mode::empty())?,
            name: String::new(),
            text: vec![0; CHUNK],
            listing: Vec::with_capacity(LISTING),
            expected: 0,
        })
    }

    fn require_own_namespace(&mut self) -> io::Result<()> {
        let link = rustix::fs::readlinkat(&self.dir, "self", Vec::new())?;
        let own = rustix::process::getpid().as_raw_pid();
        // `NSpid` lists our pid in the namespace that `/proc` shows, and in each nested namespace down to ours. Two
        // of them may be equal.
        let numbers = read_start(&self.dir, "self/status", &mut self.text)
            .ok()
            .and_then(|text| status_value(text, "NSpid"));
        let is_only = numbers.is_none_or(|text| number(text) == Some(own));
        if number(link.as_bytes()) == Some(own) && is_only {
            return Ok(());
        }
        let why = "/proc belongs to another pid namespace";
        Err(io::Error::new(io::ErrorKind::Unsupported, why))
    }

    /// All processes, in one pass. Processes that vanish meanwhile or that this user may not see are left out.
    ///
    /// A process forked during the pass may be missing. If you need all processes, scan again.
    pub fn scan(&mut self) -> io::Result<Vec<Stat>> {
        rustix::fs::seek(&self.dir, SeekFrom::Start(0))?;
        let mut all = Vec::with_capacity(self.expected);
        let mut entries = RawDir::new(self.dir.as_fd(), self.listing.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let Some(pid) = number::<i32>(entry.file_name().to_bytes()) else {
                continue;
            };
            match read_start(&self.dir, path(&mut self.name, pid, "stat"), &mut self.text) {
                Ok(text) => all.extend(parse_stat(text)),
                Err(Errno::NOENT | Errno::SRCH | Errno::ACCESS | Errno::PERM) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        self.expected = all.len() + all.len() / 8;
        Ok(all)
    }

    /// One process; `NotFound` if no process has this pid.
    pub fn stat(&mut self, pid: i32) -> io::Result<Stat> {
        let text = self.starts(pid, "stat").map_err(gone)?;
        parse_stat(text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// The pid of the process behind a pidfd, in this pid namespace; `None` if it has ended and was reaped.
    ///
    /// Fails with `Unsupported` for a process in a pid namespace that is not below this one, and with `InvalidData`
    /// for a descriptor that is not a pidfd.
    pub(crate) fn pid_of(&mut self, pidfd: BorrowedFd<'_>) -> io::Result<Option<i32>> {
        self.name.clear();
        // Writing to a String cannot fail.
        let _ = write!(self.name, "thread-self/fdinfo/{}", pidfd.as_raw_fd());
        let text = read_start(&self.dir, &self.name, &mut self.text)?;
        match status_value(text, "Pid").and_then(number::<i32>) {
            Some(-1) => Ok(None),
            Some(0) => Err(io::ErrorKind::Unsupported.into()),
            pid => pid
                .filter(|&pid| pid > 0)
                .map(Some)
                .ok_or_else(|| io::ErrorKind::InvalidData.into()),
        }
    }

    /// The first kind of namespace that a process does not share with this thread, or the root directory; `None` if
    /// it shares all of them. Fails with `NotFound` if the process is about to end.
    pub(crate) fn foreign_place(&mut self, pid: i32) -> io::Result<Option<&'static str>> {
        for (file, kind) in NAMESPACES {
            let of = |whose: String| rustix::fs::readlinkat(&self.dir, whose, Vec::new());
            let own = match of(format!("thread-self/ns/{file}")) {
                // This kernel has no namespaces of that kind.
                Err(Errno::NOENT) => continue,
                own => own?,
            };
            match of(format!("{pid}/ns/{file}")) {
                Ok(theirs) if theirs == own => {}
                Ok(_) => return Ok(Some(kind)),
                // A namespace for children does not exist before the first child. A process that ends has no
                // mount namespace any more either, some time before its pidfd is readable.
                Err(Errno::NOENT) if of(format!("{pid}/ns/mnt")).is_ok() => return Ok(Some(kind)),
                Err(errno) => return Err(errno.into()),
            }
        }
        let root = |whose: String| {
            let stat = rustix::fs::statat(&self.dir, whose, AtFlags::empty())?;
            io::Result::Ok((stat.st_dev, stat.st_ino))
        };
        let is_shared = root(format!("{pid}/root"))? == root("thread-self/root".to_owned())?;
        Ok((!is_shared).then_some("root directory"))
    }

    /// Pids of the children of the first thread of a process, which adopts, living and dead. If none of them is reaped
    /// meanwhile, the list is true for the moment at which its last child was read. Kernels that show no such list show only a table, which
    /// changes while we read it.
    pub(crate) fn children(&mut self, pid: i32) -> io::Result<Vec<i32>> {
        let list = format!("{pid}/task/{pid}/children");
        if let Ok(text) = read_whole(&self.dir, &list, &mut self.text) {
            return Ok(parse_children(text));
        }
        let all = self.scan()?;
        Ok(all
            .iter()
            .filter(|stat| stat.ppid == pid)
            .map(|stat| stat.pid)
            .collect())
    }

    /// Whether a process is `ancestor`, or descends from it.
    pub(crate) fn descends(&mut self, mut pid: i32, ancestor: i32) -> io::Result<bool> {
        for _ in 0..GENERATIONS {
            if pid == ancestor {
                return Ok(true);
            }
            if pid <= 1 {
                break;
            }
            pid = self.stat(pid)?.ppid;
        }
        Ok(false)
    }

    /// Parent, grandparent and so on of a process, as far as they can be seen and without pid 1.
    pub(crate) fn ancestors(&mut self, mut pid: i32) -> Vec<i32> {
        let mut found = Vec::new();
        while found.len() < GENERATIONS {
            pid = self.stat(pid).map_or(0, |stat| stat.ppid);
            if pid <= 1 {
                break;
            }
            found.push(pid);
        }
        found
    }

    /// The command line of a process without its last words; empty if it cannot be seen.
    pub(crate) fn words_before(&mut self, pid: i32, last: usize) -> Vec<u8> {
        let line = self.starts(pid, "cmdline").unwrap_or_default();
        let line = line.strip_suffix(b"\0").unwrap_or(line);
        line.rsplitn(last + 1, |&byte| byte == 0)
            .nth(last)
            .unwrap_or_default()
            .to_vec()
    }

    /// Whether a process was started with a variable of this name; `false` if we may not see that.
    pub(crate) fn was_started_with(&mut self, pid: i32, key: &[u8]) -> bool {
        let environ = self.environ(pid);
        let mut rests = environ
            .split(|&byte| byte == 0)
            .filter_map(|entry| entry.strip_prefix(key));
        rests.any(|rest| rest.first() == Some(&b'='))
    }

    /// Whether the process was started with the variable `key`, with `token` as an item of its `:`-separated value.
    /// `false` if the process is gone or we may not read its environment.
    ///
    /// Can block for as long as the process is stuck in the kernel with its memory map locked. If that matters, leave
    /// out processes in state `D`. A process in the middle of an exec has no environment for a moment. This waits for
    /// the environment, for at most a fifth of a second, which a busy machine may need.
    pub fn carries_token(&mut self, pid: i32, key: &[u8], token: &[u8]) -> io::Result<bool> {
        let start = Instant::now();
        let mut is_settled = false;
        loop {
            match read_whole(&self.dir, path(&mut self.name, pid, "environ"), &mut self.text) {
                Ok([]) => {}
                Ok(environ) => return Ok(environ_carries(environ, key, token)),
                Err(Errno::NOENT | Errno::SRCH | Errno::ACCESS | Errno::PERM | Errno::IO) => {
                    return Ok(false);
                }
                Err(errno) => return Err(errno.into()),
            }
            if is_settled || !self.has_memory(pid) || start.elapsed() > EXEC_PATIENCE {
                return Ok(false);
            }
            // The arguments appear together with the environment, and are hardly ever empty.
            is_settled = self.starts(pid, "cmdline").is_ok_and(|text| !text.is_empty());
            if !is_settled {
                std::thread::yield_now();
            }
        }
    }

    fn has_memory(&mut self, pid: i32) -> bool {
        self.starts(pid, "stat").is_ok_and(|text| !has_no_memory(text))
    }

    fn starts(&mut self, pid: i32, leaf: &str) -> Result<&[u8], Errno> {
        read_start(&self.dir, path(&mut self.name, pid, leaf), &mut self.text)
    }

    /// The command name (at most 15 bytes for a program), safe to print on a terminal; `?` if the process is gone.
    pub fn comm(&mut self, pid: i32) -> String {
        match self.starts(pid, "comm") {
            Ok(text) => printable(text.strip_suffix(b"\n").unwrap_or(text)),
            Err(_) => "?".to_owned(),
        }
    }

    /// The command line, safe to print on a terminal and cut; the command name if there is none.
    pub(crate) fn command(&mut self, pid: i32) -> String {
        let words = self.starts(pid, "cmdline").unwrap_or_default().trim_ascii_end();
        let words = words.strip_suffix(b"\0").unwrap_or(words);
        if words.is_empty() {
            return self.comm(pid);
        }
        let text: Vec<u8> = words
            .iter()
            .map(|byte| if *byte == 0 { b' ' } else { *byte })
            .collect();
        let text = printable(&text);
        match text.char_indices().nth(COMMAND_LETTERS) {
            Some((end, _)) => format!("{}\u{2026}", &text[..end]),
            None => text,
        }
    }

    /// The environment; empty if we may not see it.
    pub(crate) fn environ(&mut self, pid: i32) -> Vec<u8> {
        let read = read_whole(&self.dir, path(&mut self.name, pid, "environ"), &mut self.text);
        read.unwrap_or_default().to_vec()
    }

    /// The kernel function in which the process sleeps; `None` if it runs or the kernel does not show it.
    pub fn wchan(&mut self, pid: i32) -> Option<String> {
        let text = self.starts(pid, "wchan").ok()?;
        let text = text.trim_ascii();
        (!text.is_empty() && text != b"0").then(|| printable(text))
    }

    /// Real user id; `NotFound` if no process has this pid.
    pub fn uid(&mut self, pid: i32) -> io::Result<u32> {
        let text = self.starts(pid, "status").map_err(gone)?;
        status_value(text, "Uid")
            .and_then(|ids| number(ids.split(u8::is_ascii_whitespace).next()?))
            .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }
}

/// The value of one line of `/proc/<pid>/status`, without the white space around it.
pub fn status_value<'text>(status: &'text [u8], key: &str) -> Option<&'text [u8]> {
    status
        .split(|&byte| byte == b'\n')
        .find_map(|line| line.strip_prefix(key.as_bytes())?.strip_prefix(b":"))
        .map(<[u8]>::trim_ascii)
}

/// The whole `text` as a decimal number.
pub(crate) fn number<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    // `from_str` also accepts a leading plus sign, which no kernel text has.
    if text.first() == Some(&b'+') {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn path<'name>(name: &'name mut String, pid: i32, leaf: &str) -> &'name str {
    name.clear();
    // Writing to a String cannot fail.
    let _ = write!(name, "{pid}/{leaf}");
    name
}

fn open(dir: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// The result of one read. It returns the whole of a one-record file, which saves a second call for each process.
fn read_start<'text>(dir: &OwnedFd, name: &str, text: &'text mut [u8]) -> Result<&'text [u8], Errno> {
    let file = open(dir, name)?;
    let length = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut *text))?;
    Ok(&text[..length])
}

fn read_whole<'text>(dir: &OwnedFd, name: &str, text: &'text mut Vec<u8>) -> Result<&'text [u8], Errno> {
    let file = open(dir, name)?;
    let mut length = 0;
    while length < ENVIRON_MAX {
        if text.len() - length < CHUNK {
            text.resize(length + CHUNK, 0);
        }
        match rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut text[length..]))? {
            0 => break,
            count => length += count,
        }
    }
    Ok(&text[..length])
}

fn gone(errno: Errno) -> io::Error {
    // The kernel says ESRCH when the process ends between open and read.
    if errno == Errno::SRCH {
        Errno::NOENT.into()
    } else {
        errno.into()
    }
}

fn printable(text: &[u8]) -> String {
    String::from_utf8_lossy(text)
        .chars()
        .map(|letter| {
            if letter.is_alphanumeric() || letter == ' ' || letter.is_ascii_punctuation() {
                letter
            } else {
                '?'
            }
        })
        .collect()
}

#[cfg(test)]
pub(crate) mod fake_root;
#[cfg(test)]
mod tests;
