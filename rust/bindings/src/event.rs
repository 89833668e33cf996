//! Engine events as frozen classes with the dict form of docs/events.md.

use std::ffi::{CString, OsString};
use std::hash::{Hash, Hasher};
use std::os::unix::ffi::OsStringExt;
use std::time::{SystemTime, UNIX_EPOCH};

use dsl_engine::event as engine;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

mod convert;
mod exit;
mod plain;

pub(crate) use convert::to_python;
pub(crate) use exit::Exit;
pub(crate) use plain::{EVENT_VERSION, Record, repr};

fn nanoseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}

/// The worker's program is running.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Started {
    worker: usize,
    pid: i32,
    time_ns: u64,
}

/// The worker runs, but is not bound as its spec says.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Unbound {
    worker: usize,
    stage: &'static str,
    errno: i32,
}

/// The worker ended, or could not be started.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
pub(crate) struct Exited {
    exit: Py<Exit>,
}

/// Bytes from a piped stream; empty at its end.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Output {
    worker: usize,
    stream: u8,
    data: PyBackedBytes,
}

/// A signal reached this job.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct SignalReceived {
    signum: i32,
    action: &'static str,
    from_terminal: bool,
}

/// The group is being stopped.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq)]
pub(crate) struct Stopping {
    reason: &'static str,
    signum: i32,
    grace_s: f64,
}

/// All workers have ended well, and have left processes running.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq)]
pub(crate) struct Leftovers {
    processes: Vec<(i32, String, Option<usize>)>,
    grace_s: f64,
}

/// Every process of the group gets SIGKILL.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Killing {
    workers: Vec<usize>,
    tier: &'static str,
}

/// Somebody calls at the job's socket.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Called {}

/// A fork server takes orders.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct ForkServerReady {
    server: usize,
}

/// A fork server imports for longer than most do.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq)]
pub(crate) struct ForkServerSlow {
    server: usize,
    pid: i32,
    import_s: f64,
}

/// A fork server takes no more orders.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct ForkServerLost {
    server: usize,
    pid: i32,
    signum: Option<i32>,
    text: String,
    workers: Vec<usize>,
}

/// Last event of a group.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
pub(crate) struct Ended {
    first_failure: Option<Py<Exit>>,
    stop_signal: Option<i32>,
    stragglers: usize,
    survivors: Vec<Survivor>,
    oom_kills: u64,
    tail: PyBackedBytes,
    shown_since: Option<u64>,
}

/// Something happened to output that the engine passes on.
#[pyclass(frozen, get_all, eq, hash, module = "dsl._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct LogNotice {
    kind: &'static str,
    worker: Option<usize>,
    path: Option<OsString>,
    errno: Option<i32>,
    count: u64,
}

impl From<engine::LogNotice> for LogNotice {
    fn from(notice: engine::LogNotice) -> Self {
        let text = |path: Option<CString>| path.map(|path| OsString::from_vec(path.into_bytes()));
        let mut log = Self {
            kind: "console_closed",
            worker: None,
            path: None,
            errno: None,
            count: 0,
        };
        match notice {
            engine::LogNotice::FileFailed { worker, path, errno } => {
                log.kind = "file_failed";
                (log.worker, log.path, log.errno) = (worker, text(path), Some(errno));
            }
            engine::LogNotice::ReopenFailed { worker, path, errno } => {
                log.kind = "reopen_failed";
                (log.worker, log.path, log.errno) = (worker, text(path), Some(errno));
            }
            engine::LogNotice::BytesLost { worker, path, count } => {
                log.kind = "bytes_lost";
                (log.worker, log.path, log.count) = (worker, text(path), count);
            }
            engine::LogNotice::FirstOutput { worker } => {
                log.kind = "first_output";
                log.worker = Some(worker);
            }
            engine::LogNotice::ConsoleClosed => {}
            engine::LogNotice::LinesDropped { count } => {
                log.kind = "lines_dropped";
                log.count = count;
            }
        }
        log
    }
}

/// (pid, state, name, kernel function that it sleeps in, why no signal reaches it).
pub(crate) type Survivor = (i32, String, String, Option<String>, Option<i32>);

pub(crate) fn survivors(list: Vec<engine::Survivor>) -> Vec<Survivor> {
    list.into_iter()
        .map(|one| (one.pid, one.state.to_string(), one.name, one.wchan, one.errno))
        .collect()
}

/// Names the fields of an event class, for its dict and its `repr`.
macro_rules! record {
    ($($class:ident { $($field:ident),* })*) => {$(
        impl Record for $class {
            const FIELDS: &'static [&'static str] = {
                // Does not compile if a field is missing here.
                let _ = |it: &Self| { let Self { $($field: _),* } = it; };
                &[$(stringify!($field)),*]
            };
        }

        #[pymethods]
        impl $class {
            /// The event as plain data.
            fn to_dict<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
                plain::event(slf)
            }
            fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
                plain::repr(slf)
            }
        }
    )*};
}

record! {
    Started { worker, pid, time_ns }
    Unbound { worker, stage, errno }
    Exited { exit }
    Output { worker, stream, data }
    SignalReceived { signum, action, from_terminal }
    Stopping { reason, signum, grace_s }
    Leftovers { processes, grace_s }
    Killing { workers, tier }
    LogNotice { kind, worker, path, errno, count }
    Called {}
    ForkServerReady { server }
    ForkServerSlow { server, pid, import_s }
    ForkServerLost { server, pid, signum, text, workers }
    Ended { first_failure, stop_signal, stragglers, survivors, oom_kills, tail, shown_since }
}

impl PartialEq for Exited {
    fn eq(&self, other: &Self) -> bool {
        self.exit.get() == other.exit.get()
    }
}

impl Hash for Exited {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.exit.get().hash(state);
    }
}

impl Hash for Stopping {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.reason, self.signum).hash(state);
    }
}

impl Hash for Leftovers {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.processes.hash(state);
    }
}

impl Hash for ForkServerSlow {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.server, self.pid).hash(state);
    }
}

impl Ended {
    fn failure(&self) -> Option<&Exit> {
        self.first_failure.as_ref().map(Py::get)
    }
}

impl PartialEq for Ended {
    fn eq(&self, other: &Self) -> bool {
        self.failure() == other.failure()
            && self.stop_signal == other.stop_signal
            && self.stragglers == other.stragglers
            && self.survivors == other.survivors
            && self.oom_kills == other.oom_kills
            && self.tail == other.tail
            && self.shown_since == other.shown_since
    }
}

impl Hash for Ended {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.failure(), self.stop_signal, &self.survivors, &self.tail).hash(state);
    }
}
