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
    /// The group was stopped before its turn came.
    Cancelled,
    /// It died, but somebody else in this program had waited for it.
    Lost,
}

/// Why a worker never ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartFailure {
    /// The step that failed.
    pub stage: Stage,
    /// Its errno.
    pub errno: i32,
    /// The program, directory or file concerned.
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
    /// It died after we had begun to stop it.
    pub caused_by_stop: bool,
    /// Processor time in user mode.
    pub user: Duration,
    /// Processor time in kernel mode.
    pub system: Duration,
    /// Peak resident memory, bytes. At least our own when it was started, which it shares until its program runs.
    pub max_rss: u64,
    /// When its program was running.
    pub started: Option<SystemTime>,
    /// When its death was noticed.
    pub ended: SystemTime,
}

impl Exit {
    /// Anything but code 0.
    pub fn failed(&self) -> bool {
        self.ending != Ending::Code(0)
    }

    /// The exit code by the shell's convention: the code, 128 + signal, 127 for a program that was not found,
    /// 126 for one that could not be executed. A worker that was never tried counts as ended by SIGTERM;
    /// a lost status is 255.
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

/// What is done about a signal to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalAction {
    /// Pass it on and go on.
    Forward,
    /// Pass it on, and kill what is left after the grace period.
    Stop,
    /// Pass it on, and leave the workers the time of a preemption to write a checkpoint and end.
    Preempt,
    /// Open the log files anew, as after a rotation.
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

/// A process that SIGKILL did not end in time, or processes that nobody can look for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survivor {
    /// Its pid; 0 for processes that `/proc` does not show.
    pub pid: i32,
    /// Its state letter in `/proc`, or `?`.
    pub state: char,
    /// Its name, or `?`.
    pub name: String,
    /// The kernel function that it sleeps in, if that can be known.
    pub wchan: Option<String>,
    /// Why no signal reaches it: `EPERM` for a process that we may not signal. Without a pid why `/proc` does not
    /// show it: `EACCES` if only others may see it, else what keeps us from reading `/proc`.
    pub errno: Option<i32>,
}

impl Survivor {
    /// What the kernel says is there, and `/proc` does not show.
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

/// Something that happened to the workers' output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogNotice {
    /// A log file could not be opened or written. Told once a file; the job goes on.
    FileFailed {
        /// Index of the worker; `None` for a file of all.
        worker: Option<usize>,
        /// The file.
        path: Option<CString>,
        /// Its errno.
        errno: i32,
    },
    /// A log file could not be opened anew; the one that was open is still written.
    ReopenFailed {
        /// Index of the worker; `None` for a file of all.
        worker: Option<usize>,
        /// The file.
        path: Option<CString>,
        /// Its errno.
        errno: i32,
    },
    /// A log file lacks this many bytes.
    BytesLost {
        /// Index of the worker.
        worker: Option<usize>,
        /// The file.
        path: Option<CString>,
        /// How many.
        count: u64,
    },
    /// Nobody reads our stdout or stderr any more.
    ConsoleClosed,
    /// The output cannot be shown: no thread can be had that would write it.
    ConsoleFailed {
        /// Its errno.
        errno: i32,
    },
    /// Lines were not shown, because the console took none for a while.
    LinesDropped {
        /// How many.
        count: u64,
    },
}

/// A fact about the group, in the order in which it became known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A worker's program is running.
    Started {
        /// Index of the worker.
        worker: usize,
        /// Process id.
        pid: i32,
        /// When `execve` had succeeded.
        time: SystemTime,
    },
    /// A worker runs, but not bound as its spec says: the kernel refused, or did something else.
    Unbound {
        /// Index of the worker.
        worker: usize,
        /// The step of the binding that failed. What follows it was not tried.
        stage: Stage,
        /// Its errno.
        errno: i32,
    },
    /// A worker ended or could not be started.
    Exited(Exit),
    /// Bytes from a piped stream; empty at its end.
    Output {
        /// Index of the worker.
        worker: usize,
        /// 1 for stdout, 2 for stderr.
        stream: u8,
        /// The bytes.
        data: Vec<u8>,
    },
    /// Something happened to output that the engine passes on.
    Log(LogNotice),
    /// A signal reached the job.
    SignalReceived {
        /// Its number.
        signal: i32,
        /// What is done about it.
        action: SignalAction,
        /// It was made by the terminal.
        from_terminal: bool,
    },
    /// The group is being stopped.
    Stopping {
        /// Why.
        reason: StopReason,
        /// The signal sent to the workers.
        signal: i32,
        /// Time left to them.
        grace: Duration,
    },
    /// Everything that is left gets SIGKILL.
    Killing {
        /// Workers that were alive still.
        workers: Vec<usize>,
        /// By which means.
        tier: KillTier,
    },
    /// A fork server has imported what it was to import, and takes orders.
    ForkServerReady {
        /// Its number.
        server: usize,
    },
    /// A fork server imports for longer than most do. Told once, if at all.
    ForkServerSlow {
        /// Its number.
        server: usize,
        /// Its process.
        pid: i32,
        /// For how long it has imported.
        after: Duration,
    },
    /// A fork server takes no more orders: its workers are started plainly from now on. Told once.
    ForkServerLost {
        /// Its number.
        server: usize,
        /// Its process; 0 when it never ran.
        pid: i32,
        /// The signal that has ended it.
        signal: Option<i32>,
        /// Why: one line.
        text: String,
        /// Workers that ran and die with it.
        workers: Vec<usize>,
    },
    /// The last event of a group.
    Ended {
        /// The earliest death that we did not cause.
        first_failure: Option<Exit>,
        /// The signal by which the user ended the job.
        stop_signal: Option<i32>,
        /// Descendants that outlived their worker and were ended by us.
        stragglers: usize,
        /// What could not be killed.
        survivors: Vec<Survivor>,
        /// Out-of-memory kills while the group ran, in the memory cgroup of this process or, if that has a counter
        /// of its own and it says more, of the workers. 0 where nobody counts.
        oom_kills: u64,
        /// Last output of the worker that failed first: of its stderr, if the engine passes that on.
        tail: Vec<u8>,
        /// Lines that a terminal has shown since the last one of that stream; `None`: it has shown none of it.
        shown_since: Option<u64>,
    },
}

impl Event {
    /// Something a report needs at once, as against the bookkeeping of a healthy group.
    pub fn is_urgent(&self) -> bool {
        match self {
            Self::Started { .. } | Self::ForkServerReady { .. } => false,
            Self::Exited(exit) => exit.failed() && !exit.caused_by_stop,
            _ => true,
        }
    }
}
