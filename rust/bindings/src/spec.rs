//! Launch specs: Python values in, plain engine data out.

use std::ffi::{CString, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dsl_engine::spec as engine;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::error::spec_error;

/// A string or path as the bytes that the kernel gets.
fn bytes_of(value: &Bound<'_, PyAny>) -> PyResult<Vec<u8>> {
    if let Ok(bytes) = value.cast::<PyBytes>() {
        return Ok(bytes.as_bytes().to_vec());
    }
    if let Ok(text) = value.extract::<OsString>() {
        return Ok(text.into_vec());
    }
    let path: PathBuf = value.extract()?;
    Ok(path.as_os_str().as_bytes().to_vec())
}

fn c_string(value: &Bound<'_, PyAny>, what: &str) -> PyResult<CString> {
    CString::new(bytes_of(value)?).map_err(|_| spec_error(engine::SpecError::Nul(what.to_owned())))
}

/// Pairs of a mapping.
pub(crate) fn items<'py>(mapping: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    match mapping.cast::<PyDict>() {
        Ok(dict) => Ok(dict.items()),
        Err(_) => mapping
            .call_method0("items")?
            .try_iter()?
            .collect::<PyResult<Vec<_>>>()
            .and_then(|items| PyList::new(mapping.py(), items)),
    }
}

fn environment(mapping: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<engine::EnvEntry>> {
    let Some(mapping) = mapping else {
        return Ok(Vec::new());
    };
    let items = items(mapping)?;
    let mut entries = Vec::with_capacity(items.len());
    for item in items {
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        entries.push(engine::EnvEntry::new(&bytes_of(&key)?, &bytes_of(&value)?).map_err(spec_error)?);
    }
    Ok(entries)
}

/// Where one standard stream of a worker goes.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Stdio(engine::Stdio);

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
    #[pyo3(signature = (path = None, *, console = None, terminal = false))]
    fn log(path: Option<&Bound<'_, PyAny>>, console: Option<u8>, terminal: bool) -> PyResult<Self> {
        Ok(Self(engine::Stdio::Log {
            path: path
                .map(|path| c_string(path, "path of a log file"))
                .transpose()?,
            console: console.map(stream).transpose()?,
            terminal,
        }))
    }

    fn __repr__(&self) -> String {
        format!("<Stdio {:?}>", self.0)
    }
}

/// One worker: what to execute and how.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct WorkerSpec(engine::WorkerSpec);

fn stream(number: u8) -> PyResult<engine::Console> {
    match number {
        1 => Ok(engine::Console::Stdout),
        2 => Ok(engine::Console::Stderr),
        other => Err(spec_error(format!(
            "a console is 1 (stdout) or 2 (stderr), not {other}"
        ))),
    }
}

fn line_files(given: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<engine::LineFile>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    let line_file = |item: PyResult<Bound<'_, PyAny>>| {
        let (number, path, words): (u8, Bound<'_, PyAny>, Vec<Bound<'_, PyAny>>) = item?.extract()?;
        Ok(engine::LineFile {
            stream: stream(number)?,
            path: c_string(&path, "path of a log file")?,
            words: words.iter().map(bytes_of).collect::<PyResult<_>>()?,
        })
    };
    given.try_iter()?.map(line_file).collect()
}

fn stdio(given: Option<&Bound<'_, Stdio>>, default: engine::Stdio) -> engine::Stdio {
    given.map_or(default, |given| given.get().0.clone())
}

fn memory(given: Option<(String, Vec<u32>)>) -> PyResult<Option<(engine::MemoryMode, Vec<u32>)>> {
    let Some((mode, nodes)) = given else {
        return Ok(None);
    };
    let mode = match mode.as_str() {
        "bind" => engine::MemoryMode::Bind,
        "preferred" => engine::MemoryMode::Preferred,
        "interleave" => engine::MemoryMode::Interleave,
        "local" => engine::MemoryMode::Local,
        other => {
            return Err(spec_error(format!(
                "memory policy {other:?} is not one of bind, preferred, interleave, local"
            )));
        }
    };
    Ok(Some((mode, nodes)))
}

#[pymethods]
impl WorkerSpec {
    #[new]
    #[pyo3(signature = (argv, *, env = None, cwd = None, stdin = None, stdout = None, stderr = None, cpus = None, mempolicy = None, foreground = false, prefix = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a Python constructor"
    )]
    fn new(
        argv: &Bound<'_, PyAny>,
        env: Option<&Bound<'_, PyAny>>,
        cwd: Option<&Bound<'_, PyAny>>,
        stdin: Option<&Bound<'_, Stdio>>,
        stdout: Option<&Bound<'_, Stdio>>,
        stderr: Option<&Bound<'_, Stdio>>,
        cpus: Option<Vec<u32>>,
        mempolicy: Option<(String, Vec<u32>)>,
        foreground: bool,
        prefix: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        if argv.extract::<OsString>().is_ok() || argv.is_instance_of::<PyBytes>() {
            return Err(PyTypeError::new_err(
                "argv must be a sequence of strings, not one string",
            ));
        }
        let argv = argv
            .try_iter()?
            .map(|word| c_string(&word?, "an argument"))
            .collect::<PyResult<Vec<_>>>()?;
        if argv.first().is_none_or(|program| program.is_empty()) {
            return Err(spec_error("a worker has an empty argv: name a program"));
        }
        Ok(Self(engine::WorkerSpec {
            argv,
            env: environment(env)?,
            cwd: cwd.map(|cwd| c_string(cwd, "cwd")).transpose()?,
            stdio: [
                stdio(stdin, engine::Stdio::Null),
                stdio(stdout, engine::Stdio::Inherit),
                stdio(stderr, engine::Stdio::Inherit),
            ],
            cpus: cpus.unwrap_or_default(),
            memory: memory(mempolicy)?,
            foreground,
            prefix: prefix.map(bytes_of).transpose()?.unwrap_or_default(),
        }))
    }

    #[getter]
    fn argv(&self) -> Vec<OsString> {
        self.0
            .argv
            .iter()
            .map(|word| OsString::from_vec(word.as_bytes().to_vec()))
            .collect()
    }
}

/// Everything the engine needs to start and end one worker group.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct LaunchSpec(pub(crate) Arc<engine::LaunchSpec>);

#[pymethods]
impl LaunchSpec {
    #[new]
    #[pyo3(signature = (workers, *, env = None, on_failure = "stop", grace_s = 30.0, binding = "required", log_max_bytes = None, collapse = false, line_files = None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a Python constructor"
    )]
    fn new(
        py: Python<'_>,
        workers: &Bound<'_, PyAny>,
        env: Option<&Bound<'_, PyAny>>,
        on_failure: &str,
        grace_s: f64,
        binding: &str,
        log_max_bytes: Option<u64>,
        collapse: bool,
        line_files: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let workers = workers
            .try_iter()?
            .map(|worker| Ok(worker?.cast::<WorkerSpec>()?.get().0.clone()))
            .collect::<PyResult<Vec<_>>>()?;
        let on_failure = match on_failure {
            "stop" => engine::OnFailure::Stop,
            "report" => engine::OnFailure::Report,
            other => {
                return Err(spec_error(format!(
                    "on_failure {other:?} is neither \"stop\" nor \"report\""
                )));
            }
        };
        let binding = match binding {
            "required" => engine::Strictness::Required,
            "cpus_required" => engine::Strictness::CpusRequired,
            "wanted" => engine::Strictness::Wanted,
            other => {
                return Err(spec_error(format!(
                    "binding {other:?} is not one of required, cpus_required, wanted"
                )));
            }
        };
        let env = match env {
            Some(env) => environment(Some(env))?,
            None => environment(Some(&py.import("os")?.getattr("environ")?))?,
        };
        let spec = engine::LaunchSpec {
            workers,
            env,
            on_failure,
            grace: seconds(grace_s)?,
            binding,
            logs: engine::LogOptions {
                max_bytes: log_max_bytes,
                collapse,
                line_files: self::line_files(line_files)?,
            },
        };
        spec.validate().map_err(spec_error)?;
        Ok(Self(Arc::new(spec)))
    }

    fn __len__(&self) -> usize {
        self.0.workers.len()
    }
}

/// A time from Python, refused when it is no time. A year stands for ever.
pub(crate) fn seconds(value: f64) -> PyResult<Duration> {
    if value.is_nan() || value < 0.0 {
        return Err(PyValueError::new_err(format!(
            "{value} is no length of time in seconds"
        )));
    }
    Ok(Duration::from_secs_f64(value.min(365.0 * 86400.0)))
}
