//! Engine events as the records of `dsl.engine`, which have their fields and the dict form of docs/events.md.

use std::ffi::{CString, OsString};
use std::os::unix::ffi::OsStringExt;
use std::time::{SystemTime, UNIX_EPOCH};

use dsl_engine::event::{self as engine, Ending, KillTier, SignalAction, StopReason};
use pyo3::IntoPyObjectExt;
use pyo3::call::PyCallArgs;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyTuple};

/// A record of `dsl.engine`, from its fields in order.
pub(crate) fn record<'py>(
    py: Python<'py>,
    class: &str,
    fields: impl PyCallArgs<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    static RECORDS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let records = RECORDS.get_or_try_init(py, || py.import("dsl.engine").map(Bound::unbind))?;
    records.bind(py).getattr(class)?.call1(fields)
}

fn nanoseconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos() as u64)
}

fn text(path: CString) -> OsString {
    OsString::from_vec(path.into_bytes())
}

/// (pid, state, name, kernel function that it sleeps in, why no signal reaches it), each.
pub(crate) fn survivors(py: Python<'_>, left: Vec<engine::Survivor>) -> PyResult<Bound<'_, PyTuple>> {
    let fields = |one: engine::Survivor| (one.pid, one.state.to_string(), one.name, one.wchan, one.errno);
    PyTuple::new(py, left.into_iter().map(fields))
}

fn exit(py: Python<'_>, exit: engine::Exit) -> PyResult<Bound<'_, PyAny>> {
    let status = exit.status();
    let (code, signal, dumped, stage, failure) = match exit.ending {
        Ending::Code(code) => (Some(code), None, false, None, None),
        Ending::Signal { number, core } => (None, Some(number), core, None, None),
        Ending::NotStarted(failure) => (None, None, false, Some(failure.stage.name()), Some(failure)),
        Ending::Cancelled => (None, None, false, Some("cancelled"), None),
        Ending::Lost => (None, None, false, None, None),
    };
    let errno = failure.as_ref().map(|failure| failure.errno);
    let path = failure.and_then(|failure| failure.path).map(text);
    let fields = [
        exit.worker.into_bound_py_any(py)?,
        exit.pid.into_bound_py_any(py)?,
        code.into_bound_py_any(py)?,
        signal.into_bound_py_any(py)?,
        dumped.into_bound_py_any(py)?,
        stage.into_bound_py_any(py)?,
        errno.into_bound_py_any(py)?,
        path.into_bound_py_any(py)?,
        status.into_bound_py_any(py)?,
        exit.order.into_bound_py_any(py)?,
        exit.caused_by_stop.into_bound_py_any(py)?,
        exit.user.as_secs_f64().into_bound_py_any(py)?,
        exit.system.as_secs_f64().into_bound_py_any(py)?,
        exit.max_rss.into_bound_py_any(py)?,
        exit.started.map_or(0, nanoseconds).into_bound_py_any(py)?,
        nanoseconds(exit.ended).into_bound_py_any(py)?,
    ];
    record(py, "Exit", PyTuple::new(py, fields)?)
}

fn notice(py: Python<'_>, notice: engine::LogNotice) -> PyResult<Bound<'_, PyAny>> {
    use engine::LogNotice as Notice;
    let fields = match notice {
        Notice::FileFailed { worker, path, errno } => ("file_failed", worker, path.map(text), Some(errno), 0),
        Notice::ReopenFailed { worker, path, errno } => {
            ("reopen_failed", worker, path.map(text), Some(errno), 0)
        }
        Notice::BytesLost { worker, path, count } => ("bytes_lost", worker, path.map(text), None, count),
        Notice::FirstOutput { worker } => ("first_output", Some(worker), None, None, 0),
        Notice::ConsoleClosed => ("console_closed", None, None, None, 0),
        Notice::LinesDropped { count } => ("lines_dropped", None, None, None, count),
    };
    record(py, "LogNotice", fields)
}

/// One engine event as its record.
#[expect(clippy::too_many_lines, reason = "one arm an event, nothing else")]
pub(crate) fn to_python(py: Python<'_>, event: engine::Event) -> PyResult<Bound<'_, PyAny>> {
    use engine::Event;
    match event {
        Event::Started { worker, pid, time } => record(py, "Started", (worker, pid, nanoseconds(time))),
        Event::Unbound { worker, stage, errno } => record(py, "Unbound", (worker, stage.name(), errno)),
        Event::Exited(ended) => record(py, "Exited", (exit(py, ended)?,)),
        Event::Output { worker, stream, data } => {
            record(py, "Output", (worker, stream, PyBytes::new(py, &data)))
        }
        Event::SignalReceived {
            signal,
            action,
            from_terminal,
        } => record(
            py,
            "SignalReceived",
            (signal, name_of_action(action), from_terminal),
        ),
        Event::Stopping {
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
            record(py, "Stopping", (reason, signal, grace.as_secs_f64()))
        }
        Event::Leftovers { processes, grace } => {
            let fields = |one: engine::Leftover| (one.pid, one.command, one.worker);
            let processes = PyTuple::new(py, processes.into_iter().map(fields))?;
            record(py, "Leftovers", (processes, grace.as_secs_f64()))
        }
        Event::Killing { workers, tier } => {
            let tier = match tier {
                KillTier::Cgroup => "cgroup",
                KillTier::Scan => "scan",
            };
            record(py, "Killing", (PyTuple::new(py, workers)?, tier))
        }
        Event::Log(log) => notice(py, log),
        Event::Called => record(py, "Called", ()),
        Event::ForkServerReady { server } => record(py, "ForkServerReady", (server,)),
        Event::ForkServerSlow { server, pid, after } => {
            record(py, "ForkServerSlow", (server, pid, after.as_secs_f64()))
        }
        Event::ForkServerLost {
            server,
            pid,
            signal,
            text,
            workers,
        } => record(
            py,
            "ForkServerLost",
            (server, pid, signal, text, PyTuple::new(py, workers)?),
        ),
        Event::Ended {
            first_failure,
            stop_signal,
            stragglers,
            survivors: left,
            oom_kills,
            tail,
            shown_since,
        } => {
            let failure = first_failure.map(|failure| exit(py, failure)).transpose()?;
            let (left, tail) = (survivors(py, left)?, PyBytes::new(py, &tail));
            record(
                py,
                "Ended",
                (
                    failure,
                    stop_signal,
                    stragglers,
                    left,
                    oom_kills,
                    tail,
                    shown_since,
                ),
            )
        }
    }
}

fn name_of_action(action: SignalAction) -> &'static str {
    match action {
        SignalAction::Forward => "forward",
        SignalAction::Stop => "stop",
        SignalAction::Preempt => "preempt",
        SignalAction::Explain => "explain",
        SignalAction::Reopen => "reopen",
        SignalAction::Ignore => "ignore",
    }
}
