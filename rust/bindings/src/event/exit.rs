//! The end of one worker.

use std::ffi::OsString;
use std::hash::{Hash, Hasher};
use std::os::unix::ffi::OsStringExt;

use dsl_engine::event::{self as engine, Ending};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::nanoseconds;
use super::plain::{self, Record};

/// How one worker ended.
#[pyclass(frozen, eq, hash, module = "dsl._core")]
#[derive(PartialEq)]
pub(crate) struct Exit(pub(super) engine::Exit);

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
    /// The exit as plain data.
    fn to_dict<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        plain::fields(slf)
    }
    fn __repr__(slf: &Bound<'_, Self>) -> PyResult<String> {
        plain::repr(slf)
    }
}

impl Record for Exit {
    const FIELDS: &'static [&'static str] = &[
        "worker",
        "pid",
        "code",
        "signal",
        "core_dumped",
        "exec_stage",
        "exec_errno",
        "exec_path",
        "status",
        "order",
        "caused_by_stop",
        "cpu_user_s",
        "cpu_system_s",
        "max_rss_bytes",
        "started_ns",
        "ended_ns",
    ];
}

/// Equal exits have the same worker, process and time, so the hash needs no other fields.
impl Hash for Exit {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.0.worker, self.0.pid, self.0.order, self.0.ended).hash(state);
    }
}
