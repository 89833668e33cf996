//! What a process inherits and cannot take on later: two processes that agree in it have equal children.

use std::ffi::{CString, OsStr};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hasher};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::request;
use crate::forkserver::message;
use crate::procfs::{parse_stat, status_value};
use crate::{cgroup, kernel_file, sys};

/// Lines of `/proc/self/status` that belong to the identity.
const OF_STATUS: [&str; 13] = [
    "Uid",
    "Gid",
    "Groups",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Cpus_allowed",
    "Mems_allowed",
];
/// Namespaces of a process and of its children.
const NAMESPACES: [&str; 10] = [
    "cgroup",
    "ipc",
    "mnt",
    "net",
    "pid",
    "pid_for_children",
    "time",
    "time_for_children",
    "user",
    "uts",
];
/// Whole files of `/proc/self`. A kernel need not have all of them.
const FILES: [&str; 5] = [
    "attr/current",
    "loginuid",
    "oom_score_adj",
    "personality",
    "sessionid",
];
/// Python itself ignores SIGPIPE and SIGXFSZ, and no worker ignores SIGCHLD from its start, nor what stops a job. glibc
/// lets a program that it starts ignore its own signals, 32 and 33.
const NOT_INHERITED: u64 = 1 << (libc::SIGPIPE - 1)
    | 1 << (libc::SIGXFSZ - 1)
    | 1 << (libc::SIGCHLD - 1)
    | 1 << (libc::SIGINT - 1)
    | 1 << (libc::SIGQUIT - 1)
    | 1 << (libc::SIGTERM - 1)
    | 0b11 << 31;

/// A text that is equal in two processes of this user if workers that they start are equal in everything that a
/// process inherits for good: namespaces, users and capabilities, seccomp, control groups, terminal, limits, umask,
/// priorities, CPUs, ignored signals.
fn identity(home: &Path) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name}={value}");
    };
    // A server of an earlier build understands neither our requests nor our orders if their versions differ.
    let (version, name) = (env!("CARGO_PKG_VERSION"), env!("CARGO_PKG_NAME"));
    let messages = format!("{} {}", request::VERSION, message::VERSION);
    line("build", &format!("{version} {name} {messages}"));
    let status = kernel_file::read("/proc/self/status").unwrap_or_default();
    for name in OF_STATUS {
        line(
            name,
            &String::from_utf8_lossy(status_value(&status, name).unwrap_or_default()),
        );
    }
    let ignored = status_value(&status, "SigIgn").unwrap_or_default();
    let ignored = u64::from_str_radix(&String::from_utf8_lossy(ignored), 16).unwrap_or_default();
    line("ignored signals", &format!("{:x}", ignored & !NOT_INHERITED));
    for name in NAMESPACES {
        let target = std::fs::read_link(format!("/proc/self/ns/{name}")).unwrap_or_default();
        line(name, &target.to_string_lossy());
    }
    for name in FILES {
        let value = kernel_file::read(Path::new("/proc/self").join(name)).unwrap_or_default();
        line(name, &String::from_utf8_lossy(&value));
    }
    // A worker joins the cgroup of its job, which may be below that of another job.
    let groups = kernel_file::read("/proc/self/cgroup").unwrap_or_default();
    line("cgroup", &cgroup::above_jobs(&String::from_utf8_lossy(&groups)));
    for (name, hard) in hard_limits() {
        line(name, &hard);
    }
    line("standing", &format!("{:?}", Standing::own()));
    line("terminal", &terminal());
    for folder in [Path::new("/"), Path::new("/tmp"), Path::new("."), home] {
        let place = std::fs::metadata(folder).map(|about| (about.dev(), about.ino()));
        line("folder", &format!("{:?}", place.ok()));
    }
    let place = std::fs::read_link("/proc/self/cwd").unwrap_or_default();
    line("working directory", &place.to_string_lossy());
    line("inherited", &format!("{:?}", sys::inherited()));
    text
}

/// In what a command and a server have to agree: the identity, the words that start the server, and its environment.
pub fn key(words: &[CString], environ: &[CString]) -> Vec<u8> {
    let home = environ
        .iter()
        .find_map(|entry| entry.to_bytes().strip_prefix(b"HOME="));
    let home = Path::new(OsStr::from_bytes(home.unwrap_or_default()));
    let mut key = identity(home).into_bytes();
    let mut variables: Vec<&CString> = environ.iter().collect();
    variables.sort();
    for list in [words.iter().collect(), variables] {
        for text in list {
            key.extend(text.as_bytes_with_nul());
        }
        key.push(b'\n');
    }
    key
}

/// The terminal and the session that has it, in which all workers must be. A process without a terminal cannot tell
/// its session from another one but by its number.
fn terminal() -> String {
    let stat = kernel_file::read("/proc/self/stat").unwrap_or_default();
    let name_end = stat
        .iter()
        .rposition(|&byte| byte == b')')
        .map_or(0, |place| place + 1);
    let fields = String::from_utf8_lossy(&stat[name_end..]).into_owned();
    let field = |index: usize| {
        fields
            .split_ascii_whitespace()
            .nth(index)
            .unwrap_or("?")
            .to_owned()
    };
    let (terminal, priorities) = (field(4), format!("{} {} {}", field(16), field(37), field(38)));
    let session = parse_stat(&stat)
        .filter(|_| terminal != "0")
        .map(|stat| stat.session);
    format!("{terminal} {session:?}, priorities {priorities}")
}

/// 32 hexadecimal digits for a key. Two keys with the same digits are told apart by the server.
pub fn digest(key: &[u8]) -> String {
    let half = |seed: u8| {
        let mut hasher = DefaultHasher::new();
        hasher.write_u8(seed);
        hasher.write(key);
        hasher.finish()
    };
    format!("{:016x}{:016x}", half(0), half(1))
}

const RESOURCES: [(Resource, &str); 16] = [
    (Resource::As, "as"),
    (Resource::Core, "core"),
    (Resource::Cpu, "cpu"),
    (Resource::Data, "data"),
    (Resource::Fsize, "fsize"),
    (Resource::Locks, "locks"),
    (Resource::Memlock, "memlock"),
    (Resource::Msgqueue, "msgqueue"),
    (Resource::Nice, "nice"),
    (Resource::Nofile, "nofile"),
    (Resource::Nproc, "nproc"),
    (Resource::Rss, "rss"),
    (Resource::Rtprio, "rtprio"),
    (Resource::Rttime, "rttime"),
    (Resource::Sigpending, "sigpending"),
    (Resource::Stack, "stack"),
];
const DUMP_FILTER: &str = "/proc/self/coredump_filter";

/// Hard limits, which only root can raise.
fn hard_limits() -> impl Iterator<Item = (&'static str, String)> {
    RESOURCES
        .iter()
        .map(|(resource, name)| (*name, format!("{:?}", getrlimit(*resource).maximum)))
}

/// Soft limits, umask, timer slack and the filter of core dumps.
#[derive(Debug)]
pub(super) struct Standing {
    umask: u32,
    soft_limits: Vec<Option<u64>>,
    timer_slack_ns: u64,
    dump_filter: Vec<u8>,
}

impl Standing {
    /// That of this process.
    pub(super) fn own() -> Self {
        let status = kernel_file::read("/proc/self/status").unwrap_or_default();
        let umask = String::from_utf8_lossy(status_value(&status, "Umask").unwrap_or_default()).into_owned();
        Self {
            umask: u32::from_str_radix(&umask, 8).unwrap_or(0o022),
            soft_limits: RESOURCES
                .iter()
                .map(|(resource, _)| getrlimit(*resource).current)
                .collect(),
            timer_slack_ns: rustix::thread::current_timer_slack().unwrap_or_default(),
            dump_filter: kernel_file::read(DUMP_FILTER)
                .unwrap_or_default()
                .trim_ascii()
                .to_vec(),
        }
    }

    /// Gives it to this process.
    pub(super) fn take(&self) -> io::Result<()> {
        rustix::process::umask(Mode::from_raw_mode(self.umask));
        for ((resource, _), &soft) in RESOURCES.iter().zip(&self.soft_limits) {
            let limit = getrlimit(*resource);
            if limit.current != soft {
                let limit = Rlimit {
                    current: soft,
                    maximum: limit.maximum,
                };
                setrlimit(*resource, limit)?;
            }
        }
        if self.timer_slack_ns > 0 {
            rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(self.timer_slack_ns))?;
        }
        if kernel_file::read(DUMP_FILTER).unwrap_or_default().trim_ascii() != self.dump_filter {
            std::fs::write(DUMP_FILTER, [b"0x", &self.dump_filter[..]].concat())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_one_identity_and_keys_differ_in_their_digits() {
        let text = identity(Path::new("/"));
        assert_eq!(text, identity(Path::new("/")));
        for name in OF_STATUS
            .iter()
            .chain(&NAMESPACES)
            .chain(&FILES)
            .chain(&["cgroup"])
        {
            assert!(text.contains(&format!("{name}=")), "{name}");
        }
        let versions = format!(" {} {}", request::VERSION, message::VERSION);
        assert!(text.lines().next().unwrap().ends_with(&versions), "{text}");
        assert_eq!(digest(b"one"), digest(b"one"));
        assert_ne!(digest(b"one"), digest(b"other"));
        assert_eq!(digest(b"").len(), 32);
    }
}
