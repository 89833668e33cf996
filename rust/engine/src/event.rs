//! What the engine reports.

use std::ffi::CString;
use std::time::{Duration, SystemTime};

pub use crate::stage::Stage;

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// It returned this code.
    Code(u8),
    /// This signal ended it.
    Signal {
        /// The signal's number.
        number: i32,
        /// It dumped core.
        core: bool,
    },
    /// It never ran.
    NotStarted(StartFailure),
    /// The group was stopped before this worker was started.
    Cancelled,
    /// It died, but other code in this program had already waited for it.
    Lost,
}

/// Why a worker never ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartFailure {
    /// The step that failed.
    pub stage: Stage,
    /// Its errno.
    pub errno: i32,
    /// The program, directory or file that the step was about.
    pub path: Option<CString>,
}

/// The end of one worker, reported once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// Index of the worker in its spec.
    pub worker: usize,
    /// Process id; 0 when it never ran.
    pub pid: i32,
    /// How it ended.
    pub ending: Ending,
    /// Position among the deaths of the group, in the kernel's order.
    pub order: usize,
    /// Whether it died after we had begun to stop it.
    pub caused_by_stop: bool,
    /// Processor time in user mode.
    pub user: Duration,
    /// Processor time in kernel mode.
    pub system: Duration,
    /// Peak resident memory in bytes. At least that of this process at the start, because the child shares it until
    /// its program runs.
    pub max_rss: u64,
    /// When its program began to run; `None` if it never ran.
    pub started: Option<SystemTime>,
    /// When its death was noticed.
    pub ended: SystemTime,
}

impl Exit {
    /// Whether it ended in any way but with code 0.
    pub fn failed(&self) -> bool {
        self.ending != Ending::Code(0)
    }

    /// The exit code by the shell's convention: the code, 128 + signal, 127 for a program that was not found, 126 for
    /// a program that could not be executed. A cancelled worker counts as ended by SIGTERM; a lost status is 255.
    pub fn status(&self) -> u8 {
        match &self.ending {
            Ending::Code(code) => *code,
            Ending::Signal { number, .. } => 128u8.saturating_add(*number as u8),
            Ending::NotStarted(failure) => {
                let missing = matches!(failure.errno, libc::ENOENT | libc::ENOTDIR);
                if failure.stage == Stage::Exec && missing {
                    127
                } else {
                    126
                }
            }
            Ending::Cancelled => 128 + libc::SIGTERM as u8,
            Ending::Lost => u8::MAX,
        }
    }
}

/// Why a group is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A worker failed.
    Failure,
    /// The owner of the supervisor asked.
    Request,
    /// The job got this signal.
    Signal(i32),
    /// The guard process is gone.
    GuardLost,
}

/// How the engine reacts to a signal to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalAction {
    /// Pass it on and go on.
    Forward,
    /// Pass it on, and kill what is left after the grace period.
    Stop,
    /// Pass it on, and give the workers the time of a preemption to write a checkpoint and end.
    Preempt,
    /// Tell the user what the workers do, and go on.
    Explain,
    /// Reopen the log files, as after a rotation.
    Reopen,
    /// Do nothing: the job is ending already.
    Ignore,
}

/// How the whole tree was killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KillTier {
    /// Through `cgroup.kill`.
    Cgroup,
    /// By passes over the process table.
    Scan,
}

/// A process that SIGKILL did not end in time, or processes that we cannot see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survivor {
    /// Its pid; 0 for processes that may be left, but are not known.
    pub pid: i32,
    /// Its state letter in `/proc`, or `?`.
    pub state: char,
    /// Its name, or `?`.
    pub name: String,
    /// The kernel function in which it sleeps, if the kernel shows it.
    pub wchan: Option<String>,
    /// Why no signal reaches it: `EPERM` for a process that we may not signal. If the pid is 0: why `/proc` does not
    /// show it. That is `EACCES` if only other users may see it, `ECHILD` if a dead branch has left it and its warm server
    /// has not told that it is gone, else the error from opening `/proc`.
    pub errno: Option<i32>,
}

impl Survivor {
    /// Processes that may exist although `/proc` does not show them.
    pub(crate) fn unseen(errno: i32) -> Self {
        Self {
            pid: 0,
            state: '?',
            name: "?".to_owned(),
            wchan: None,
            errno: Some(errno),
        }
    }
}

/// A process that a worker has left running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    /// Its pid.
    pub pid: i32,
    /// The beginning of its command line, or its name.
    pub command: String,
    /// Index of the worker; `None` if that is not known.
    pub worker: Option<usize>,
}

/// Something that happened to the workers' output.
///
/// `worker` is `None` for a file of all workers and for our own streams, whose paths are `stdout` and `stderr`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields that mean the same everywhere")]
pub enum LogNotice {
    /// A log file, or our stdout or stderr, could not be opened or written. Reported once for each file; the job goes on.
    FileFailed {
        worker: Option<usize>,
        path: Option<CString>,
        errno: i32,
    },
    /// A log file could not be reopened; the old one is still written.
    ReopenFailed {
        worker: Option<usize>,
        path: Option<CString>,
        errno: i32,
    },
    /// A log file, or our stdout or stderr, lacks this many bytes.
    BytesLost {
        worker: Option<usize>,
        path: Option<CString>,
        count: u64,
    },
    /// The first bytes of a worker have come. Reported once for each worker, if the spec asks for it.
    FirstOutput { worker: usize },
    /// The reader of our stdout or stderr has closed it.
    ConsoleClosed,
    /// Lines were not shown, because the console took no output for a while.
    LinesDropped { count: u64 },
}

/// A fact about the group. Events come in the order in which the facts became known.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields that mean the same everywhere")]
pub enum Event {
    /// A worker's program is running.
    Started {
        worker: usize,
        pid: i32,
        /// When `execve` had succeeded.
        time: SystemTime,
    },
    /// A worker runs, but is not bound as its spec says: the kernel refused the binding, or did something else.
    Unbound {
        worker: usize,
        /// The step of the binding that failed. The steps after it were not tried.
        stage: Stage,
        errno: i32,
    },
    /// A worker ended or could not be started.
    Exited(Exit),
    /// Bytes from a piped stream; empty at its end.
    Output {
        worker: usize,
        /// 1 for stdout, 2 for stderr.
        stream: u8,
        data: Vec<u8>,
    },
    /// Something happened to output that the engine passes on.
    Log(LogNotice),
    /// The job got a signal.
    SignalReceived {
        signal: i32,
        /// The reaction of the engine.
        action: SignalAction,
        from_terminal: bool,
    },
    /// The group is being stopped.
    Stopping {
        reason: StopReason,
        /// The signal sent to the workers.
        signal: i32,
        /// Time left to them.
        grace: Duration,
    },
    /// All workers have ended well, and have left processes running.
    Leftovers {
        /// The processes, without those that they have started themselves.
        processes: Vec<Leftover>,
        /// How long they may still run; zero: they are told to end now.
        grace: Duration,
    },
    /// All processes of the group that are left get SIGKILL.
    Killing {
        /// Workers that were still alive.
        workers: Vec<usize>,
        tier: KillTier,
    },
    /// A fork server has finished its imports, and takes orders.
    ForkServerReady { server: usize },
    /// A fork server imports for unusually long. Reported at most once for each server.
    ForkServerSlow {
        server: usize,
        pid: i32,
        /// How long it has imported so far.
        after: Duration,
    },
    /// A fork server takes no more orders: from now on its workers are executed. Reported once.
    ForkServerLost {
        server: usize,
        /// Its pid; 0 if it never ran.
        pid: i32,
        /// The signal that ended it, if one did.
        signal: Option<i32>,
        /// The reason, in one line.
        text: String,
        /// Running workers that die with it.
        workers: Vec<usize>,
    },
    /// Somebody calls at the job's socket. Reported again only after the callers were taken.
    Called,
    /// The last event of a group.
    Ended {
        /// The earliest failure that we did not cause.
        first_failure: Option<Exit>,
        /// The signal by which the user ended the job.
        stop_signal: Option<i32>,
        /// How many processes outlived their worker and were ended by us.
        stragglers: usize,
        /// Processes that could not be killed.
        survivors: Vec<Survivor>,
        /// Out-of-memory kills while the group ran: the count of this process's memory cgroup, or that of the
        /// workers' cgroup if it is higher. 0 without a counter.
        oom_kills: u64,
        /// Last output of the worker that failed first: the end of its stderr, if the engine passes that on.
        tail: Vec<u8>,
        /// How many lines a terminal has shown since the last line of that stream; `None` if it has shown no line of
        /// the stream.
        shown_since: Option<u64>,
    },
}

impl Event {
    /// Whether a report needs the event at once. Starts and clean exits of a healthy group can wait.
    pub fn is_urgent(&self) -> bool {
        match self {
            Self::Started { .. } | Self::ForkServerReady { .. } => false,
            Self::Exited(exit) => exit.failed() && !exit.caused_by_stop,
            _ => true,
        }
    }
}
