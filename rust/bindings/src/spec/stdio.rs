//! Standard streams of a worker.

use std::ffi::OsString;

use dsl_engine::spec as engine;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::call::Call;
use super::{bytes_of, c_string, text};
use crate::error::spec_error;

/// Where one standard stream of a worker goes.
#[pyclass(frozen, eq, module = "dsl._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct Stdio(pub(super) engine::Stdio);

#[pymethods]
impl Stdio {
    /// The same stream of this process.
    #[staticmethod]
    fn inherit() -> Self {
        Self(engine::Stdio::Inherit)
    }

    /// ``/dev/null``.
    #[staticmethod]
    fn null() -> Self {
        Self(engine::Stdio::Null)
    }

    /// For stdin only: a terminal of the size of ours from which nothing can be read.
    #[staticmethod]
    fn unreadable() -> Self {
        Self(engine::Stdio::Unreadable)
    }

    /// A file that the worker writes directly.
    #[staticmethod]
    #[pyo3(signature = (path, *, append = false))]
    fn file(path: &Bound<'_, PyAny>, append: bool) -> PyResult<Self> {
        Ok(Self(engine::Stdio::File {
            path: c_string(path, "path of a stream")?,
            append,
        }))
    }

    /// A descriptor of this process.
    #[staticmethod]
    fn fd(fd: i32) -> Self {
        Self(engine::Stdio::Fd(fd))
    }

    /// A pipe read by the engine.
    #[staticmethod]
    fn pipe() -> Self {
        Self(engine::Stdio::Pipe)
    }

    /// For stderr only: the worker's stdout.
    #[staticmethod]
    fn stdout() -> Self {
        Self(engine::Stdio::Stdout)
    }

    /// A stream that the engine reads and passes on.
    #[staticmethod]
    #[pyo3(signature = (path = None, *, console = None, terminal = false, prefix = None))]
    fn log(
        path: Option<&Bound<'_, PyAny>>,
        console: Option<u8>,
        terminal: bool,
        prefix: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        Ok(Self(engine::Stdio::Log {
            path: path
                .map(|path| c_string(path, "path of a log file"))
                .transpose()?,
            console: console.map(stream).transpose()?,
            terminal,
            prefix: prefix.map(bytes_of).transpose()?,
        }))
    }

    /// The method that made this value.
    #[getter]
    fn kind(&self) -> &'static str {
        match self.0 {
            engine::Stdio::Inherit => "inherit",
            engine::Stdio::Null => "null",
            engine::Stdio::Unreadable => "unreadable",
            engine::Stdio::File { .. } => "file",
            engine::Stdio::Fd(_) => "fd",
            engine::Stdio::Pipe => "pipe",
            engine::Stdio::Stdout => "stdout",
            engine::Stdio::Log { .. } => "log",
        }
    }

    #[getter]
    fn path(&self) -> Option<OsString> {
        match &self.0 {
            engine::Stdio::File { path, .. } => Some(text(path.as_bytes())),
            engine::Stdio::Log { path, .. } => path.as_ref().map(|path| text(path.as_bytes())),
            _ => None,
        }
    }

    #[getter]
    fn append(&self) -> bool {
        matches!(self.0, engine::Stdio::File { append: true, .. })
    }

    #[getter]
    fn descriptor(&self) -> Option<i32> {
        match self.0 {
            engine::Stdio::Fd(fd) => Some(fd),
            _ => None,
        }
    }

    #[getter]
    fn console(&self) -> Option<u8> {
        match self.0 {
            engine::Stdio::Log { console, .. } => console.map(number),
            _ => None,
        }
    }

    #[getter]
    fn terminal(&self) -> bool {
        matches!(self.0, engine::Stdio::Log { terminal: true, .. })
    }

    #[getter]
    fn prefix<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        match &self.0 {
            engine::Stdio::Log { prefix, .. } => prefix.as_ref().map(|prefix| PyBytes::new(py, prefix)),
            _ => None,
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let mut call = Call::new(py, format!("Stdio.{}", self.kind()));
        match &self.0 {
            engine::Stdio::File { append, .. } => {
                call.value(self.path())?;
                call.keyword("append", *append, false)?;
            }
            engine::Stdio::Fd(fd) => call.value(*fd)?,
            engine::Stdio::Log { terminal, .. } => {
                call.value(self.path())?;
                call.keyword("console", self.console(), None)?;
                call.keyword("terminal", *terminal, false)?;
                call.keyword("prefix", self.prefix(py), None)?;
            }
            _ => {}
        }
        Ok(call.finish())
    }
}

/// A console that Python names by its number.
pub(super) fn stream(number: u8) -> PyResult<engine::Console> {
    match number {
        1 => Ok(engine::Console::Stdout),
        2 => Ok(engine::Console::Stderr),
        other => Err(spec_error(format!(
            "a console is 1 (stdout) or 2 (stderr), not {other}"
        ))),
    }
}

pub(super) fn number(console: engine::Console) -> u8 {
    match console {
        engine::Console::Stdout => 1,
        engine::Console::Stderr => 2,
    }
}
