//! Launch specs: Python values in, plain engine data out.

use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dsl_engine::spec as engine;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::error::spec_error;

mod call;
mod stdio;
mod worker;

use call::Call;
pub(crate) use stdio::Stdio;
use stdio::{number, stream};
pub(crate) use worker::WorkerSpec;
use worker::{are_equal, argv, memory};

const POLICIES: [(&str, engine::OnFailure); 2] = [
    ("stop", engine::OnFailure::Stop),
    ("report", engine::OnFailure::Report),
];
const SCOPES: [(&str, engine::SignalScope); 2] = [
    ("rank", engine::SignalScope::Rank),
    ("group", engine::SignalScope::Group),
];
const BINDINGS: [(&str, engine::Strictness); 3] = [
    ("required", engine::Strictness::Required),
    ("cpus_required", engine::Strictness::CpusRequired),
    ("wanted", engine::Strictness::Wanted),
];

fn name_of<T: PartialEq + Copy>(names: &[(&'static str, T)], value: T) -> &'static str {
    let found = names.iter().find(|(_, known)| *known == value);
    found.map_or("", |(name, _)| name)
}

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

/// Converts each item. Does not use `collect`, which asks Python's `operator` for the length: that import costs a
/// launch two milliseconds.
pub(crate) fn each<'py, T>(
    given: &Bound<'py, PyAny>,
    mut convert: impl FnMut(Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Vec<T>> {
    let mut items = Vec::new();
    for item in given.try_iter()? {
        items.push(convert(item?)?);
    }
    Ok(items)
}

/// Pairs of a mapping.
pub(crate) fn items<'py>(mapping: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
    match mapping.cast::<PyDict>() {
        Ok(dict) => Ok(dict.items()),
        Err(_) => PyList::new(mapping.py(), each(&mapping.call_method0("items")?, Ok)?),
    }
}

/// Bytes for the kernel, as Python writes them.
fn text(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

/// The variables that a program would find: among equal names the last wins.
fn effective(entries: &[engine::EnvEntry]) -> BTreeMap<&[u8], &[u8]> {
    entries.iter().map(|entry| (entry.key(), entry.value())).collect()
}

fn variables<'py>(py: Python<'py>, entries: &[engine::EnvEntry]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for entry in entries {
        dict.set_item(text(entry.key()), text(entry.value()))?;
    }
    Ok(dict)
}

/// The variables of a mapping. If the mapping was made from this process's environment, it may have an entry with
/// an empty name, which we skip.
fn inherited(mapping: &Bound<'_, PyAny>) -> PyResult<Vec<engine::EnvEntry>> {
    let mut entries = Vec::new();
    for item in items(mapping)? {
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let key = bytes_of(&key)?;
        if !key.is_empty() {
            entries.push(engine::EnvEntry::new(&key, &bytes_of(&value)?).map_err(spec_error)?);
        }
    }
    Ok(entries)
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

/// The environment of a group, and its entries that no mapping can hold. `None`: this process's environment.
fn base(
    py: Python<'_>,
    env: Option<&Bound<'_, PyAny>>,
    inherits: bool,
) -> PyResult<(Vec<engine::EnvEntry>, Vec<CString>)> {
    let env = match env {
        Some(env) if inherits => inherited(env)?,
        Some(env) => environment(Some(env))?,
        None => inherited(&py.import("os")?.getattr("environ")?)?,
    };
    // Python changes the environment only while it holds its lock, as we do.
    let block = inherits.then(engine::own_block).unwrap_or_default();
    let odd = engine::odd_entries(&block, &env);
    Ok((env, odd))
}

/// The spec of a fork server.
pub(crate) fn fork_server(
    py: Python<'_>,
    words: &Bound<'_, PyAny>,
    env: Option<&Bound<'_, PyAny>>,
    cwd: Option<&Bound<'_, PyAny>>,
    cpus: Option<Vec<u32>>,
    mempolicy: Option<(String, Vec<u32>)>,
) -> PyResult<engine::LaunchSpec> {
    let (env, odd) = base(py, env, env.is_none())?;
    let worker = engine::WorkerSpec {
        argv: argv(words)?,
        env: Vec::new(),
        cwd: cwd.map(|cwd| c_string(cwd, "cwd")).transpose()?,
        stdio: [engine::Stdio::Null, engine::Stdio::Null, engine::Stdio::Null],
        cpus: cpus.unwrap_or_default(),
        memory: memory(mempolicy)?,
        foreground: false,
        prefix: Vec::new(),
        keep_fds: Vec::new(),
        fork: None,
    };
    Ok(engine::LaunchSpec {
        workers: vec![worker],
        env,
        inherits: false,
        odd,
        on_failure: engine::OnFailure::Report,
        grace: Duration::ZERO,
        lingers: false,
        signal_scope: engine::SignalScope::default(),
        binding: engine::Strictness::Wanted,
        logs: engine::LogOptions::default(),
        tells_signals: false,
        import_throttle: None,
    })
}

fn line_files(given: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<engine::LineFile>> {
    let Some(given) = given else { return Ok(Vec::new()) };
    each(given, |item| {
        let (number, path, words): (u8, Bound<'_, PyAny>, Vec<Bound<'_, PyAny>>) = item.extract()?;
        Ok(engine::LineFile {
            stream: stream(number)?,
            path: c_string(&path, "path of a log file")?,
            words: words.iter().map(bytes_of).collect::<PyResult<_>>()?,
        })
    })
}

/// Everything the engine needs to start and end one worker group.
#[pyclass(frozen, eq, module = "dsl._core")]
pub(crate) struct LaunchSpec(pub(crate) Arc<engine::LaunchSpec>);

#[pymethods]
impl LaunchSpec {
    #[new]
    #[pyo3(signature = (workers, *, env = None, on_failure = "stop", grace_s = 30.0, signal_scope = "group", binding = "required", log_max_bytes = None, collapse = false, line_files = None, partial_after_s = 1.0, relayed = false, tells_first_output = false, inherits = false, tells_signals = false, import_throttle = None, lingers = false))]
    #[expect(
        clippy::too_many_arguments,
        clippy::fn_params_excessive_bools,
        reason = "keyword arguments of a Python constructor"
    )]
    fn new(
        py: Python<'_>,
        workers: &Bound<'_, PyAny>,
        env: Option<&Bound<'_, PyAny>>,
        on_failure: &str,
        grace_s: f64,
        signal_scope: &str,
        binding: &str,
        log_max_bytes: Option<u64>,
        collapse: bool,
        line_files: Option<&Bound<'_, PyAny>>,
        partial_after_s: Option<f64>,
        relayed: bool,
        tells_first_output: bool,
        inherits: bool,
        tells_signals: bool,
        import_throttle: Option<usize>,
        lingers: bool,
    ) -> PyResult<Self> {
        let workers = each(workers, |worker| Ok(worker.cast::<WorkerSpec>()?.get().0.clone()))?;
        let Some((_, on_failure)) = POLICIES.iter().find(|(name, _)| *name == on_failure) else {
            return Err(spec_error(format!(
                "on_failure {on_failure:?} is neither \"stop\" nor \"report\""
            )));
        };
        let Some((_, signal_scope)) = SCOPES.iter().find(|(name, _)| *name == signal_scope) else {
            return Err(spec_error(format!(
                "signal_scope {signal_scope:?} is neither \"rank\" nor \"group\""
            )));
        };
        let Some((_, binding)) = BINDINGS.iter().find(|(name, _)| *name == binding) else {
            return Err(spec_error(format!(
                "binding {binding:?} is not one of required, cpus_required, wanted"
            )));
        };
        let inherits = inherits || env.is_none();
        let (env, odd) = base(py, env, inherits)?;
        let spec = engine::LaunchSpec {
            workers,
            odd,
            env,
            inherits,
            on_failure: *on_failure,
            grace: seconds(grace_s)?,
            lingers,
            signal_scope: *signal_scope,
            binding: *binding,
            logs: engine::LogOptions {
                max_bytes: log_max_bytes,
                collapse,
                line_files: self::line_files(line_files)?,
                partial_after: partial_after_s.map(seconds).transpose()?,
                relayed,
                tells_first: tells_first_output,
            },
            tells_signals,
            import_throttle,
        };
        spec.validate().map_err(spec_error)?;
        Ok(Self(Arc::new(spec)))
    }

    fn __len__(&self) -> usize {
        self.0.workers.len()
    }

    #[getter]
    fn workers(&self) -> Vec<WorkerSpec> {
        self.0.workers.iter().cloned().map(WorkerSpec).collect()
    }

    #[getter]
    fn env<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        variables(py, &self.0.env)
    }

    #[getter]
    fn on_failure(&self) -> &'static str {
        name_of(&POLICIES, self.0.on_failure)
    }

    #[getter]
    fn grace_s(&self) -> f64 {
        self.0.grace.as_secs_f64()
    }

    #[getter]
    fn signal_scope(&self) -> &'static str {
        name_of(&SCOPES, self.0.signal_scope)
    }

    #[getter]
    fn binding(&self) -> &'static str {
        name_of(&BINDINGS, self.0.binding)
    }

    #[getter]
    fn log_max_bytes(&self) -> Option<u64> {
        self.0.logs.max_bytes
    }

    #[getter]
    fn collapse(&self) -> bool {
        self.0.logs.collapse
    }

    #[getter]
    fn line_files<'py>(&self, py: Python<'py>) -> Vec<(u8, OsString, Vec<Bound<'py, PyBytes>>)> {
        let words = |file: &engine::LineFile| file.words.iter().map(|word| PyBytes::new(py, word)).collect();
        let files = self.0.logs.line_files.iter();
        files
            .map(|file| (number(file.stream), text(file.path.as_bytes()), words(file)))
            .collect()
    }

    #[getter]
    fn partial_after_s(&self) -> Option<f64> {
        self.0.logs.partial_after.map(|pause| pause.as_secs_f64())
    }

    #[getter]
    fn relayed(&self) -> bool {
        self.0.logs.relayed
    }

    #[getter]
    fn tells_first_output(&self) -> bool {
        self.0.logs.tells_first
    }

    #[getter]
    fn inherits(&self) -> bool {
        self.0.inherits
    }

    #[getter]
    fn tells_signals(&self) -> bool {
        self.0.tells_signals
    }

    #[getter]
    fn lingers(&self) -> bool {
        self.0.lingers
    }

    #[getter]
    fn import_throttle(&self) -> Option<usize> {
        self.0.import_throttle
    }

    /// Leaves out the values of variables, which may be secret.
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let mut call = Call::new(py, "LaunchSpec".to_owned());
        call.value(self.workers())?;
        call.count("env", effective(&self.0.env).len());
        call.keyword("on_failure", self.on_failure(), "stop")?;
        call.keyword("grace_s", self.grace_s(), 30.0)?;
        call.keyword("signal_scope", self.signal_scope(), "group")?;
        call.keyword("binding", self.binding(), "required")?;
        call.keyword("log_max_bytes", self.log_max_bytes(), None)?;
        call.keyword("collapse", self.collapse(), false)?;
        call.keyword("line_files", self.line_files(py), Vec::new())?;
        call.keyword("partial_after_s", self.partial_after_s(), Some(1.0))?;
        call.keyword("relayed", self.relayed(), false)?;
        call.keyword("tells_first_output", self.tells_first_output(), false)?;
        call.keyword("inherits", self.inherits(), false)?;
        call.keyword("tells_signals", self.tells_signals(), false)?;
        call.keyword("import_throttle", self.import_throttle(), None)?;
        call.keyword("lingers", self.lingers(), false)?;
        Ok(call.finish())
    }
}

/// As [`are_equal`] for workers.
impl PartialEq for LaunchSpec {
    fn eq(&self, other: &Self) -> bool {
        let engine::LaunchSpec {
            workers,
            env,
            inherits,
            odd,
            on_failure,
            grace,
            lingers,
            signal_scope,
            binding,
            logs,
            tells_signals,
            import_throttle,
        } = &*self.0;
        let other = &*other.0;
        workers.len() == other.workers.len()
            && workers
                .iter()
                .zip(&other.workers)
                .all(|(one, other)| are_equal(one, other))
            && effective(env) == effective(&other.env)
            && *inherits == other.inherits
            && *odd == other.odd
            && *on_failure == other.on_failure
            && *grace == other.grace
            && *lingers == other.lingers
            && *signal_scope == other.signal_scope
            && *binding == other.binding
            && *logs == other.logs
            && *tells_signals == other.tells_signals
            && *import_throttle == other.import_throttle
    }
}

/// A length of time from Python, refused when it is negative or NaN. A year stands for any longer time.
pub(crate) fn seconds(value: f64) -> PyResult<Duration> {
    if value.is_nan() || value < 0.0 {
        return Err(PyValueError::new_err(format!(
            "{value} is no length of time in seconds"
        )));
    }
    Ok(Duration::from_secs_f64(value.min(365.0 * 86400.0)))
}
