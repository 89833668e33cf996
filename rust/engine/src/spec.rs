//! What to start: plain data, checked once, with no decision left in it.

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
    /// Makes an entry. The key must not be empty nor hold `=`; neither part may hold a NUL byte.
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

/// What a mapping cannot hold of an environment block that has become `env`: entries without a name or without a
/// value, and the later ones of a name, if the value of the first has not been changed.
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

/// The environment block of this process, which must not be changed meanwhile.
pub fn own_block() -> Vec<CString> {
    crate::sys::environment()
}

/// Where a standard stream of a worker goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stdio {
    /// The same stream of this process.
    Inherit,
    /// `/dev/null`.
    Null,
    /// A file that the worker reads or writes without us. Created with mode 0640.
    File {
        /// Its path, relative to this process's directory.
        path: CString,
        /// Keep what is in it.
        append: bool,
    },
    /// A descriptor of this process, which stays the caller's.
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
        /// The worker sees a terminal of its own, without which many programs buffer and leave colours out.
        terminal: bool,
        /// Put before each of its lines in place of the worker's prefix.
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

/// A file with the lines of all workers that hold certain words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineFile {
    /// Which of the workers' streams.
    pub stream: Console,
    /// The file.
    pub path: CString,
    /// A line is copied, with its prefix, if it holds one of them.
    pub words: Vec<Vec<u8>>,
}

/// What is done with the streams of [`Stdio::Log`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// Size to which each file is kept, by leaving out its middle.
    pub max_bytes: Option<u64>,
    /// Show equal lines of several workers once, with a count.
    pub collapse: bool,
    /// Copies of some lines.
    pub line_files: Vec<LineFile>,
    /// An unfinished line is shown after this time without more of it where there is no terminal, and after twice as
    /// long if it goes on; `None`: once it is finished.
    pub partial_after: Option<Duration>,
    /// Our stdout and stderr are read by a part of this program that shows them beside those of others.
    pub relayed: bool,
}

/// Kind of a NUMA memory policy.
///
/// [set_mempolicy(2)](https://man7.org/linux/man-pages/man2/set_mempolicy.2.html)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryMode {
    /// Memory comes from these nodes or not at all.
    Bind,
    /// Memory comes from this node while it has some.
    Preferred,
    /// Pages go round the nodes.
    Interleave,
    /// Memory comes from the node of the CPU.
    Local,
}

/// One worker: what to execute and how.
#[derive(Debug, Clone)]
pub struct WorkerSpec {
    /// Program and arguments; a program without a slash is looked up on the worker's `PATH`.
    pub argv: Vec<CString>,
    /// Laid over the group's environment.
    pub env: Vec<EnvEntry>,
    /// Working directory, or this process's.
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
    /// Descriptors of this process, from 3 on, that it has under the same numbers. They stay the caller's.
    pub keep_fds: Vec<i32>,
    /// The fork server that may start it; else `argv` is executed.
    pub fork: Option<Fork>,
}

/// How a worker can be forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fork {
    /// Number of the fork server, as the supervisor gave it.
    pub server: usize,
    /// The first word of `argv` behind the interpreter and its flags.
    pub entry: usize,
}

impl WorkerSpec {
    /// Whether one of its streams is a terminal that the engine makes for it.
    pub(crate) fn sees_own_terminal(&self) -> bool {
        let is_terminal = |stdio: &Stdio| matches!(stdio, Stdio::Log { terminal: true, .. });
        self.stdio.iter().any(is_terminal)
    }
}

/// What a failed worker means for the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// Stop the group.
    Stop,
    /// Report it and go on.
    Report,
}

/// What becomes of a worker that cannot be bound to its CPUs and memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Strictness {
    /// It is not started; a group that asks for what this process may not use is refused.
    #[default]
    Required,
    /// The same for its CPUs; its memory policy is only wanted.
    CpusRequired,
    /// It runs with what the kernel lets it have, and [`crate::event::Event::Unbound`] says so.
    Wanted,
}

impl Strictness {
    /// Whether a worker is not to run without its CPUs.
    pub fn requires_cpus(self) -> bool {
        self != Self::Wanted
    }

    /// Whether a worker is not to run without its memory policy.
    pub fn requires_memory(self) -> bool {
        self == Self::Required
    }
}

/// A worker group to start.
#[derive(Debug, Clone)]
pub struct LaunchSpec {
    /// The workers; their index is their identity in every event.
    pub workers: Vec<WorkerSpec>,
    /// Environment of every worker, later entries win.
    pub env: Vec<EnvEntry>,
    /// `env` is that of this process, but for changes.
    pub inherits: bool,
    /// Entries of this process's environment that `env` cannot hold, see [`odd_entries`]. Passed on as they are to
    /// each worker that has no variable of that name of its own.
    pub odd: Vec<CString>,
    /// Policy for a failed worker.
    pub on_failure: OnFailure,
    /// Time between the stop signal and SIGKILL.
    pub grace: Duration,
    /// Whether the workers' `cpus` and `memory` are a condition.
    pub binding: Strictness,
    /// What is done with the workers' output.
    pub logs: LogOptions,
    /// A signal to the job is told to the owner, and nothing is done about it.
    pub tells_signals: bool,
    /// At most so many workers that are executed import at a time, as far as can be seen; the others are started
    /// later.
    pub import_throttle: Option<usize>,
}

/// Why a spec cannot be started as written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// There is nothing to start.
    #[error("a worker group needs at least one worker")]
    NoWorkers,
    /// A worker has no program.
    #[error("worker {0} has an empty argv: name a program")]
    EmptyArgv(usize),
    /// A string cannot be passed to a program.
    #[error("{0} holds a NUL byte, which no program can be given")]
    Nul(String),
    /// An environment variable cannot have this name.
    #[error("{0:?} is no name for an environment variable: it must not be empty nor hold '='")]
    BadKey(String),
    /// Two workers want the terminal.
    #[error("workers {0} and {1} are both marked foreground: only one can read from the terminal")]
    TwoForeground(usize, usize),
    /// stdin or stdout is joined to stdout.
    #[error("worker {0}: only stderr can be joined to stdout")]
    JoinedToItself(usize),
    /// stdin is a pipe.
    #[error(
        "worker {0}: stdin cannot be a pipe read by the engine; use null, inherit, a file or a descriptor"
    )]
    StdinPipe(usize),
    /// A standard stream is to be kept as another descriptor.
    #[error(
        "worker {0}: descriptor {1} cannot be kept: 0 to 2 are the standard streams, which have a place of their own"
    )]
    KeptStream(usize, i32),
    /// A descriptor is named twice.
    #[error("worker {0}: descriptor {1} is to be kept twice")]
    KeptTwice(usize, i32),
    /// Nobody could begin.
    #[error("import_throttle 0 lets no worker begin, give 1 or more")]
    NoTokens,
    /// There is nothing for a fork server to run.
    #[error("worker {0}: fork_entry must be the place in argv of what follows the interpreter and its flags")]
    ForkEntry(usize),
    /// The supervisor has not started it.
    #[error("worker {0}: this supervisor has no fork server {1}")]
    NoForkServer(usize, usize),
}

impl LaunchSpec {
    /// Whether any output goes to a file, which a rotation may want to be opened anew.
    pub fn has_log_files(&self) -> bool {
        let is_file = |stdio: &Stdio| matches!(stdio, Stdio::File { .. } | Stdio::Log { path: Some(_), .. });
        !self.logs.line_files.is_empty()
            || self
                .workers
                .iter()
                .any(|worker| worker.stdio[1..].iter().any(is_file))
    }

    /// Checks what does not depend on the machine.
    pub fn validate(&self) -> Result<(), SpecError> {
        if self.workers.is_empty() {
            return Err(SpecError::NoWorkers);
        }
        if self.import_throttle == Some(0) {
            return Err(SpecError::NoTokens);
        }
        let mut foreground = None;
        for (index, worker) in self.workers.iter().enumerate() {
            if worker.argv.first().is_none_or(|program| program.is_empty()) {
                return Err(SpecError::EmptyArgv(index));
            }
            if matches!(worker.stdio[0], Stdio::Pipe | Stdio::Log { .. }) {
                return Err(SpecError::StdinPipe(index));
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
                && let Some(first) = foreground.replace(index)
            {
                return Err(SpecError::TwoForeground(first, index));
            }
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
        let worker = WorkerSpec {
            argv: vec![c"true".into()],
            env: Vec::new(),
            cwd: None,
            stdio: [Stdio::Null, Stdio::Null, Stdio::Null],
            cpus: Vec::new(),
            memory: None,
            foreground: false,
            prefix: Vec::new(),
            keep_fds: fds.to_vec(),
            fork: None,
        };
        let launch = LaunchSpec {
            workers: vec![worker],
            env: Vec::new(),
            inherits: false,
            odd: Vec::new(),
            on_failure: OnFailure::Stop,
            grace: Duration::ZERO,
            binding: Strictness::Required,
            logs: LogOptions::default(),
            tells_signals: false,
            import_throttle: None,
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
