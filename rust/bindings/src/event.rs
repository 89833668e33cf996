//! Engine events as frozen classes.

use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStringExt;
use std::time::{SystemTime, UNIX_EPOCH};

use dsl_engine::event::{self as engine, Ending, KillTier, SignalAction, StopReason};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

fn nanoseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}

/// How one worker ended.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Exit(engine::Exit);

impl Exit {
    fn failure(&self) -> Option<&engine::StartFailure> {
        match &self.0.ending {
            Ending::NotStarted(failure) => Some(failure),
            _ => None,
        }
    }
}

#[pymethods]
impl Exit {
    #[getter]
    fn worker(&self) -> usize {
        self.0.worker
    }
    #[getter]
    fn pid(&self) -> i32 {
        self.0.pid
    }
    #[getter]
    fn code(&self) -> Option<u8> {
        match self.0.ending {
            Ending::Code(code) => Some(code),
            _ => None,
        }
    }
    #[getter]
    fn signal(&self) -> Option<i32> {
        match self.0.ending {
            Ending::Signal { number, .. } => Some(number),
            _ => None,
        }
    }
    #[getter]
    fn core_dumped(&self) -> bool {
        matches!(self.0.ending, Ending::Signal { core: true, .. })
    }
    #[getter]
    fn exec_stage(&self) -> Option<&'static str> {
        match &self.0.ending {
            Ending::NotStarted(failure) => Some(failure.stage.name()),
            Ending::Cancelled => Some("cancelled"),
            _ => None,
        }
    }
    #[getter]
    fn exec_errno(&self) -> Option<i32> {
        self.failure().map(|failure| failure.errno)
    }
    #[getter]
    fn exec_path(&self) -> Option<OsString> {
        let path = self.failure()?.path.as_ref()?;
        Some(OsString::from_vec(path.as_bytes().to_vec()))
    }
    #[getter]
    fn status(&self) -> u8 {
        self.0.status()
    }
    #[getter]
    fn order(&self) -> usize {
        self.0.order
    }
    #[getter]
    fn caused_by_stop(&self) -> bool {
        self.0.caused_by_stop
    }
    #[getter]
    fn cpu_user_s(&self) -> f64 {
        self.0.user.as_secs_f64()
    }
    #[getter]
    fn cpu_system_s(&self) -> f64 {
        self.0.system.as_secs_f64()
    }
    #[getter]
    fn max_rss_bytes(&self) -> u64 {
        self.0.max_rss
    }
    #[getter]
    fn started_ns(&self) -> u64 {
        self.0.started.map_or(0, nanoseconds)
    }
    #[getter]
    fn ended_ns(&self) -> u64 {
        nanoseconds(self.0.ended)
    }
    fn __repr__(&self) -> String {
        format!(
            "<Exit worker={} pid={} {:?}>",
            self.0.worker, self.0.pid, self.0.ending
        )
    }
}

/// The worker's program is running.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct Started {
    worker: usize,
    pid: i32,
    time_ns: u64,
}

/// The worker runs, but is not bound as its spec says.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct Unbound {
    worker: usize,
    stage: &'static str,
    errno: i32,
}

/// The worker ended, or could not be started.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct Exited {
    exit: Py<Exit>,
}

/// Bytes from a piped stream; empty at its end.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct Output {
    worker: usize,
    stream: u8,
    data: Py<PyBytes>,
}

/// A signal reached this job.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct SignalReceived {
    signum: i32,
    action: &'static str,
    from_terminal: bool,
}

/// The group is being stopped.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct Stopping {
    reason: &'static str,
    signum: i32,
    grace_s: f64,
}

/// Every process of the group gets SIGKILL.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct Killing {
    workers: Vec<usize>,
    tier: &'static str,
}

/// Last event of a group.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct Ended {
    first_failure: Option<Py<Exit>>,
    stop_signal: Option<i32>,
    stragglers: usize,
    survivors: Vec<Survivor>,
    oom_kills: u64,
    tail: Py<PyBytes>,
}

/// Something that happened to output that the engine passes on.
#[pyclass(frozen, get_all, module = "dsl._core")]
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
            engine::LogNotice::BytesLost { worker, path, count } => {
                log.kind = "bytes_lost";
                (log.worker, log.path, log.count) = (worker, text(path), count);
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

/// (pid, state, name, kernel function that it sleeps in).
pub(crate) type Survivor = (i32, String, String, Option<String>);

pub(crate) fn survivors(list: Vec<engine::Survivor>) -> Vec<Survivor> {
    list.into_iter()
        .map(|one| (one.pid, one.state.to_string(), one.name, one.wchan))
        .collect()
}

/// One engine event as its Python class.
#[expect(clippy::too_many_lines, reason = "one arm an event, nothing else")]
pub(crate) fn to_python(py: Python<'_>, event: engine::Event) -> PyResult<Py<PyAny>> {
    Ok(match event {
        engine::Event::Started { worker, pid, time } => Py::new(
            py,
            Started {
                worker,
                pid,
                time_ns: nanoseconds(time),
            },
        )?
        .into_any(),
        engine::Event::Unbound { worker, stage, errno } => Py::new(
            py,
            Unbound {
                worker,
                stage: stage.name(),
                errno,
            },
        )?
        .into_any(),
        engine::Event::Exited(exit) => Py::new(
            py,
            Exited {
                exit: Py::new(py, Exit(exit))?,
            },
        )?
        .into_any(),
        engine::Event::Output { worker, stream, data } => Py::new(
            py,
            Output {
                worker,
                stream,
                data: PyBytes::new(py, &data).unbind(),
            },
        )?
        .into_any(),
        engine::Event::SignalReceived {
            signal,
            action,
            from_terminal,
        } => {
            let action = match action {
                SignalAction::Forward => "forward",
                SignalAction::Stop => "stop",
                SignalAction::Preempt => "preempt",
                SignalAction::Reopen => "reopen",
                SignalAction::Ignore => "ignore",
            };
            Py::new(
                py,
                SignalReceived {
                    signum: signal,
                    action,
                    from_terminal,
                },
            )?
            .into_any()
        }
        engine::Event::Stopping {
            reason,
            signal,
            grace,
        } => {
            let reason = match reason {
                StopReason::Failure => "failure",
                StopReason::Request => "request",
                StopReason::Signal(_) => "signal",
                StopReason::GuardLost => "guard_lost",
            };
            Py::new(
                py,
                Stopping {
                    reason,
                    signum: signal,
                    grace_s: grace.as_secs_f64(),
                },
            )?
            .into_any()
        }
        engine::Event::Killing { workers, tier } => {
            let tier = match tier {
                KillTier::Cgroup => "cgroup",
                KillTier::Scan => "scan",
            };
            Py::new(py, Killing { workers, tier })?.into_any()
        }
        engine::Event::Log(notice) => Py::new(py, LogNotice::from(notice))?.into_any(),
        engine::Event::Ended {
            first_failure,
            stop_signal,
            stragglers,
            survivors: left,
            oom_kills,
            tail,
        } => {
            let first_failure = first_failure.map(|exit| Py::new(py, Exit(exit))).transpose()?;
            Py::new(
                py,
                Ended {
                    first_failure,
                    stop_signal,
                    stragglers,
                    survivors: survivors(left),
                    oom_kills,
                    tail: PyBytes::new(py, &tail).unbind(),
                },
            )?
            .into_any()
        }
    })
}
