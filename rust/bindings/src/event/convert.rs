//! Turns the engine's events into Python objects.

use dsl_engine::event::{self as engine, KillTier, SignalAction, StopReason};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{
    Called, Ended, Exit, Exited, ForkServerLost, ForkServerReady, ForkServerSlow, Killing, Leftovers,
    LogNotice, Output, SignalReceived, Started, Stopping, Unbound, nanoseconds, survivors,
};

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
                data: PyBytes::new(py, &data).into(),
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
                SignalAction::Explain => "explain",
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
        engine::Event::Leftovers { processes, grace } => {
            let processes = processes.into_iter();
            let processes = processes.map(|one| (one.pid, one.command, one.worker)).collect();
            let grace_s = grace.as_secs_f64();
            Py::new(py, Leftovers { processes, grace_s })?.into_any()
        }
        engine::Event::Killing { workers, tier } => {
            let tier = match tier {
                KillTier::Cgroup => "cgroup",
                KillTier::Scan => "scan",
            };
            Py::new(py, Killing { workers, tier })?.into_any()
        }
        engine::Event::Log(notice) => Py::new(py, LogNotice::from(notice))?.into_any(),
        engine::Event::Called => Py::new(py, Called {})?.into_any(),
        engine::Event::ForkServerReady { server } => Py::new(py, ForkServerReady { server })?.into_any(),
        engine::Event::ForkServerSlow { server, pid, after } => {
            let import_s = after.as_secs_f64();
            Py::new(
                py,
                ForkServerSlow {
                    server,
                    pid,
                    import_s,
                },
            )?
            .into_any()
        }
        engine::Event::ForkServerLost {
            server,
            pid,
            signal,
            text,
            workers,
        } => Py::new(
            py,
            ForkServerLost {
                server,
                pid,
                signum: signal,
                text,
                workers,
            },
        )?
        .into_any(),
        engine::Event::Ended {
            first_failure,
            stop_signal,
            stragglers,
            survivors: left,
            oom_kills,
            tail,
            shown_since,
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
                    tail: PyBytes::new(py, &tail).into(),
                    shown_since,
                },
            )?
            .into_any()
        }
    })
}
