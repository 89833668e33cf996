//! What to start: plain data that is checked once and leaves no decision open.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::time::Duration;

/// One `KEY=value` entry of an environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvEntry {
    text: CString,
    key_len: usize,
}

impl EnvEntry {
    /// Makes an entry. The key must not be empty or contain `=`; neither part may contain a NUL byte.
    pub fn new(key: &[u8], value: &[u8]) -> Result<Self, SpecError> {
        if key.is_empty() || key.contains(&b'=') {
            return Err(SpecError::BadKey(String::from_utf8_lossy(key).into_owned()));
        }
        let text = [key, b"=", value].concat();
        let text = CString::new(text)
            .map_err(|_| SpecError::Nul(format!("environment variable {}", String::from_utf8_lossy(key))))?;
        Ok(Self {
            text,
            key_len: key.len(),
        })
    }

    /// The variable's name.
    pub fn key(&self) -> &[u8] {
        &self.text.as_bytes()[..self.key_len]
    }

    /// The variable's value.
    pub fn value(&self) -> &[u8] {
        &self.text.as_bytes()[self.key_len + 1..]
    }

    pub(crate) fn text(&self) -> &CStr {
        &self.text
    }
}

/// Entries of an environment block that are lost when it becomes a mapping such as `env`: entries without a name or
/// without `=`, and repeated entries of a name. Repeated entries count only if `env` still has the first value of
/// that name.
pub fn odd_entries(block: &[CString], env: &[EnvEntry]) -> Vec<CString> {
    let mut first: HashMap<&[u8], &[u8]> = HashMap::with_capacity(block.len());
    let mut odd = Vec::new();
    for entry in block {
        let text = entry.as_bytes();
        let Some(equals) = text.iter().position(|&byte| byte == b'=').filter(|&at| at > 0) else {
            odd.push(entry.clone());
            continue;
        };
        let (name, value) = (&text[..equals], &text[equals + 1..]);
        if let Some(before) = first.get(name) {
            let now = env.iter().rev().find(|entry| entry.key() == name);
            if now.is_some_and(|now| now.value() == *before) {
                odd.push(entry.clone());
            }
        } else {
            first.insert(name, value);
        }
    }
    odd
}

pub use crate::sys::environment as own_block;

/// Where a standard stream of a worker goes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Stdio {
    /// The same stream of this process.
    Inherit,
    /// `/dev/null`.
    #[default]
    Null,
    /// For stdin: a terminal of the size of ours, from which nothing can be read.
    Unreadable,
    /// A file that the worker reads or writes by itself. Created with mode 0640.
    File {
        /// Its path, relative to this process's directory.
        path: CString,
        /// Whether its old content is kept.
        append: bool,
    },
    /// A descriptor of this process. The caller still owns it.
    Fd(i32),
    /// A pipe that the engine reads.
    Pipe,
    /// For stderr: the worker's stdout.
    Stdout,
    /// A stream that the engine reads and passes on.
    Log {
        /// File that gets the bytes unchanged. Created with mode 0640, and appended to.
        path: Option<CString>,
        /// Where its lines are shown, whole and with the worker's prefix.
        console: Option<Console>,
        /// Whether the worker gets a terminal of its own. Without one, many programs buffer their output and leave
        /// out colours.
        terminal: bool,
        /// Put before each of its lines instead of the worker's prefix.
        prefix: Option<Vec<u8>>,
    },
}

/// One of our own streams that people read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Console {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A file that gets each line with certain words, from all workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineFile {
    /// The workers' stream that is searched.
    pub stream: Console,
    /// The file.
    pub path: CString,
    /// A line with one of these words is copied, with its prefix.
    pub words: Vec<Vec<u8>>,
}

/// What is done with the streams of [`Stdio::Log`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Maximum size of each file; a larger file loses its middle.
    pub max_bytes: Option<u64>,
    /// Show equal lines of several workers once, with a count.
    pub collapse: bool,
    /// Files that get copies of some lines.
    pub line_files: Vec<LineFile>,
    /// Without a terminal, an unfinished line is shown when nothing was added to it for this time, or after twice
    /// this time if it keeps growing. `None`: only when it is finished.
    pub partial_after: Option<Duration>,
    /// Whether another part of dsl reads our stdout and stderr, and shows them among other output.
    pub relayed: bool,
    /// Whether to report the first output of each worker.
    pub tells_first: bool,
}

/// Kind of a NUMA memory policy.
///
/// [set_mempolicy(2)](https://man7.org/linux/man-pages/man2/set_mempolicy.2.html)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryMode {
    /// Memory comes only from these nodes.
    Bind,
    /// Memory comes from this node as long as it has free memory.
    Preferred,
    /// Pages are spread over the nodes in turn.
    Interleave,
    /// Memory comes from the node of the CPU that asks for it.
    Local,
}

/// One worker: what to execute and how.
#[derive(Debug, Clone, Default)]
pub struct WorkerSpec {
    /// Program and arguments; a program without a slash is looked up on the worker's `PATH`.
    pub argv: Vec<CString>,
    /// Added to the group's environment. An entry here replaces a group entry of the same name.
    pub env: Vec<EnvEntry>,
    /// Working directory; `None` for that of this process.
    pub cwd: Option<CString>,
    /// stdin, stdout, stderr.
    pub stdio: [Stdio; 3],
    /// CPUs to run on; empty: as inherited.
    pub cpus: Vec<u32>,
    /// NUMA memory policy and its nodes; `None`: as inherited.
    pub memory: Option<(MemoryMode, Vec<u32>)>,
    /// Leave the worker in the terminal's foreground process group.
    pub foreground: bool,
    /// Put before each line that is shown of [`Stdio::Log`] streams.
    pub prefix: Vec<u8>,
    /// Descriptors of this process, from 3 on, that the worker gets under the same numbers. The caller still owns
    /// them.
    pub keep_fds: Vec<i32>,
    /// The fork server that may fork the worker. Without a server, `argv` is executed.
    pub fork: Option<Fork>,
}

/// How a worker can be forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fork {
    /// Number that the supervisor gave the fork server.
    pub server: usize,
    /// Index in `argv` of the first word after the interpreter and its flags.
    pub entry: usize,
}

impl WorkerSpec {
    /// Frees what is of no use once the worker has ended.
    pub(crate) fn forget(&mut self) {
        *self = Self {
            foreground: self.foreground,
            fork: self.fork,
            ..Self::default()
        };
    }

    /// Whether the engine makes a terminal for one of its streams.
    pub(crate) fn sees_own_terminal(&self) -> bool {
        let is_terminal = |stdio: &Stdio| matches!(stdio, Stdio::Log { terminal: true, .. });
        self.stdio.iter().any(is_terminal)
    }
}

/// What to do with the other workers when one fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// Stop the group.
    #[default]
    Stop,
    /// Report it and go on.
    Report,
}

/// Who hears a signal to a worker.
///
/// SIGKILL, SIGSTOP and the signals of job control always go to the whole process group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SignalScope {
    /// The worker's own process. Its helpers get SIGTERM when the worker has ended, or shortly before the grace period
    /// of a stop is over.
    Rank,
    /// Its process group: the worker's program may be a wrapper that does not pass the signal on.
    #[default]
    Group,
}

/// What to do with a worker that cannot be bound to its CPUs and memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Strictness {
    /// It is not started. A group is refused if it wants CPUs or memory nodes that this process may not use.
    #[default]
    Required,
    /// As `Required` for its CPUs, and as `Wanted` for its memory policy.
    CpusRequired,
    /// It runs with the binding that the kernel allows, and [`crate::event::Event::Unbound`] reports what is missing.
    Wanted,
}

impl Strictness {
    /// Whether a worker must not run without its CPUs.
    pub fn requires_cpus(self) -> bool {
        self != Self::Wanted
    }

    /// Whether a worker must not run without its memory policy.
    pub fn requires_memory(self) -> bool {
        self == Self::Required
    }
}

/// A worker group to start.
#[derive(Debug, Clone, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "wishes that have nothing to do with each other"
)]
pub struct LaunchSpec {
    /// The workers; their index is their identity in every event.
    pub workers: Vec<WorkerSpec>,
    /// Environment of every worker; later entries win.
    pub env: Vec<EnvEntry>,
    /// Whether `env` is the environment of this process with changes.
    pub inherits: bool,
    /// Entries of this process's environment that `env` cannot hold, see [`odd_entries`]. A worker gets them
    /// unchanged unless its own `env` has a variable of that name.
    pub odd: Vec<CString>,
    /// What to do when a worker fails.
    pub on_failure: OnFailure,
    /// Time between the stop signal and SIGKILL.
    pub grace: Duration,
    /// Whether processes that outlive their workers have the grace period to end by themselves, if all workers end well.
    /// Else they are told to end at once.
    pub lingers: bool,
    /// Whether the group goes on when its workers have ended, until it is stopped or killed.
    pub stays_open: bool,
    /// How many workers may run at the same time; the next one starts when one of them has ended.
    pub at_once: Option<usize>,
    /// Who hears a signal to a worker.
    pub signal_scope: SignalScope,
    /// Whether a worker may run without its `cpus` and `memory`.
    pub binding: Strictness,
    /// What is done with the workers' output.
    pub logs: LogOptions,
    /// Whether signals to the job are only reported to the owner, without any reaction.
    pub tells_signals: bool,
}

/// Why a spec cannot be started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what it is about")]
pub enum SpecError {
    #[error("a worker group needs at least one worker")]
    NoWorkers,
    #[error("at_once 0 lets no worker begin, give 1 or more")]
    NoneAtOnce,
    #[error("worker {0} has an empty argv: name a program")]
    EmptyArgv(usize),
    #[error("{0} holds a NUL byte, which no program can be given")]
    Nul(String),
    #[error("{0:?} is no name for an environment variable: it must not be empty nor hold '='")]
    BadKey(String),
    #[error("workers {0} and {1} are both marked foreground: only one can read from the terminal")]
    TwoForeground(usize, usize),
    #[error("worker {0}: only stdin can be unreadable")]
    Unreadable(usize),
    #[error("worker {0}: only stderr can be joined to stdout")]
    JoinedToItself(usize),
    #[error(
        "worker {0}: stdin cannot be a pipe read by the engine; use null, inherit, a file or a descriptor"
    )]
    StdinPipe(usize),
    #[error(
        "worker {0}: descriptor {1} cannot be kept: 0 to 2 are the standard streams, which have a place of their own"
    )]
    KeptStream(usize, i32),
    #[error("worker {0}: descriptor {1} is to be kept twice")]
    KeptTwice(usize, i32),
    #[error("worker {0}: fork_entry must be the place in argv of what follows the interpreter and its flags")]
    ForkEntry(usize),
    #[error("worker {0}: this supervisor has no fork server {1}")]
    NoForkServer(usize, usize),
}

impl LaunchSpec {
    /// Whether any output goes to a file, which may have to be reopened after a log rotation.
    pub fn has_log_files(&self) -> bool {
        let is_file = |stdio: &Stdio| matches!(stdio, Stdio::File { .. } | Stdio::Log { path: Some(_), .. });
        !self.logs.line_files.is_empty()
            || self
                .workers
                .iter()
                .any(|worker| worker.stdio[1..].iter().any(is_file))
    }

    /// Checks everything that does not depend on the machine.
    pub fn validate(&self) -> Result<(), SpecError> {
        if self.workers.is_empty() && !self.stays_open {
            return Err(SpecError::NoWorkers);
        }
        if self.at_once == Some(0) {
            return Err(SpecError::NoneAtOnce);
        }
        (0..self.workers.len()).try_for_each(|index| self.validate_worker(index))
    }

    /// The part of [`LaunchSpec::validate`] that is about one worker, and workers before it.
    pub(crate) fn validate_worker(&self, index: usize) -> Result<(), SpecError> {
        let worker = &self.workers[index];
        if worker.argv.first().is_none_or(|program| program.is_empty()) {
            return Err(SpecError::EmptyArgv(index));
        }
        if matches!(worker.stdio[0], Stdio::Pipe | Stdio::Log { .. }) {
            return Err(SpecError::StdinPipe(index));
        }
        if worker.stdio[1..].contains(&Stdio::Unreadable) {
            return Err(SpecError::Unreadable(index));
        }
        if worker.stdio[..2].contains(&Stdio::Stdout) {
            return Err(SpecError::JoinedToItself(index));
        }
        for (place, fd) in worker.keep_fds.iter().enumerate() {
            if *fd < 3 {
                return Err(SpecError::KeptStream(index, *fd));
            }
            if worker.keep_fds[..place].contains(fd) {
                return Err(SpecError::KeptTwice(index, *fd));
            }
        }
        let has_entry = |fork: Fork| (1..worker.argv.len()).contains(&fork.entry);
        if !worker.fork.is_none_or(has_entry) {
            return Err(SpecError::ForkEntry(index));
        }
        if worker.foreground
            && let Some(first) = self.workers[..index].iter().position(|worker| worker.foreground)
        {
            return Err(SpecError::TwoForeground(first, index));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn odd(block: &[&str], env: &[(&str, &str)]) -> Vec<String> {
        let block: Vec<CString> = block.iter().map(|entry| CString::new(*entry).unwrap()).collect();
        let entry = |(key, value): &(&str, &str)| EnvEntry::new(key.as_bytes(), value.as_bytes()).unwrap();
        let env: Vec<EnvEntry> = env.iter().map(entry).collect();
        let found = odd_entries(&block, &env).into_iter();
        found.map(|entry| entry.into_string().unwrap()).collect()
    }

    fn keeping(fds: &[i32]) -> Result<(), SpecError> {
        checked([Stdio::Null, Stdio::Null, Stdio::Null], fds)
    }

    fn checked(stdio: [Stdio; 3], fds: &[i32]) -> Result<(), SpecError> {
        let worker = WorkerSpec {
            argv: vec![c"true".into()],
            stdio,
            keep_fds: fds.to_vec(),
            ..WorkerSpec::default()
        };
        let launch = LaunchSpec {
            workers: vec![worker],
            ..LaunchSpec::default()
        };
        launch.validate()
    }

    #[test]
    fn descriptors_beside_the_standard_streams_can_be_kept_each_once() {
        assert_eq!(keeping(&[7, 3, 900]), Ok(()));
        for stream in [-1, 0, 2] {
            assert_eq!(keeping(&[7, stream]), Err(SpecError::KeptStream(0, stream)));
        }
        assert_eq!(keeping(&[7, 3, 7]), Err(SpecError::KeptTwice(0, 7)));
    }

    #[test]
    fn only_stdin_can_be_unreadable() {
        let (theirs, null) = (Stdio::Unreadable, Stdio::Null);
        assert_eq!(checked([theirs.clone(), null.clone(), null.clone()], &[]), Ok(()));
        for stdio in [
            [null.clone(), theirs.clone(), null.clone()],
            [null.clone(), null, theirs],
        ] {
            assert_eq!(checked(stdio, &[]), Err(SpecError::Unreadable(0)));
        }
    }

    #[test]
    fn what_a_mapping_cannot_hold_is_odd() {
        let env = [("A", "1"), ("B", "2"), ("C", "")];
        assert_eq!(odd(&["A=1", "B=2", "C="], &env), [""; 0]);
        assert_eq!(
            odd(&["A=1", "=x", "==", "bare", "", "A=1", "A=3"], &env),
            ["=x", "==", "bare", "", "A=1", "A=3"]
        );
    }

    #[test]
    fn a_later_value_of_a_variable_that_was_changed_or_removed_is_none() {
        assert_eq!(odd(&["A=1", "A=2", "B=1", "B=2"], &[("A", "7")]), [""; 0]);
        assert_eq!(odd(&["A=1", "A=2"], &[("A", "1"), ("A", "7")]), [""; 0]);
        assert_eq!(odd(&["A=1", "A=2"], &[("A", "7"), ("A", "1")]), ["A=2"]);
    }
}
