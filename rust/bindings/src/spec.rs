//! What to start: reads the records of `dsl.engine`, whose fields have the names that are used here.

use std::ffi::{CString, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use dsl_engine::spec as engine;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::error::spec_error;

/// A group, as `dsl.engine.LaunchSpec`.
#[derive(FromPyObject)]
#[expect(clippy::struct_excessive_bools, reason = "the fields of the Python record")]
pub(crate) struct Launch<'py> {
    workers: Vec<Worker<'py>>,
    env: Option<Bound<'py, PyAny>>,
    on_failure: String,
    grace_s: f64,
    stays_open: bool,
    at_once: Option<usize>,
    signal_scope: String,
    binding: String,
    log_max_bytes: Option<u64>,
    collapse: bool,
    line_files: Vec<(u8, Bound<'py, PyAny>, Vec<Bound<'py, PyAny>>)>,
    partial_after_s: Option<f64>,
    relayed: bool,
    tells_first_output: bool,
    inherits: bool,
    tells_signals: bool,
    lingers: bool,
}

/// One worker, as `dsl.engine.WorkerSpec`.
#[derive(FromPyObject)]
pub(crate) struct Worker<'py> {
    argv: Bound<'py, PyAny>,
    env: Option<Bound<'py, PyAny>>,
    cwd: Option<Bound<'py, PyAny>>,
    stdin: Stream<'py>,
    stdout: Stream<'py>,
    stderr: Stream<'py>,
    cpus: Vec<u32>,
    mempolicy: Option<Policy>,
    foreground: bool,
    prefix: Bound<'py, PyAny>,
    keep_fds: Vec<i32>,
    fork_server: Option<usize>,
    fork_entry: usize,
}

/// A standard stream, as `dsl.engine.Stdio`.
#[derive(FromPyObject)]
struct Stream<'py> {
    kind: String,
    path: Option<Bound<'py, PyAny>>,
    append: bool,
    descriptor: Option<i32>,
    console: Option<u8>,
    terminal: bool,
    prefix: Option<Bound<'py, PyAny>>,
}

/// A memory policy and its nodes.
pub(crate) type Policy = (String, Vec<u32>);

/// The value of one of a few words.
pub(crate) fn named<T: Copy>(what: &str, word: &str, known: &[(&str, T)]) -> PyResult<T> {
    if let Some((_, value)) = known.iter().find(|(name, _)| *name == word) {
        return Ok(*value);
    }
    let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
    let names = names.join(", ");
    Err(spec_error(format!("{what} {word:?} is not one of {names}")))
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

fn c_path(value: Option<&Bound<'_, PyAny>>, what: &str) -> PyResult<Option<CString>> {
    value.map(|path| c_string(path, what)).transpose()
}

/// Converts each item. Does not use `collect`, which asks Python's `operator` for the length: that import costs a
/// launch two milliseconds.
fn each<'py, T>(
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

/// The variables of a mapping. If the mapping was made from this process's environment (`inherits`), it may have an
/// entry with an empty name, which we skip.
fn environment(mapping: &Bound<'_, PyAny>, inherits: bool) -> PyResult<Vec<engine::EnvEntry>> {
    let items = items(mapping)?;
    let mut entries = Vec::with_capacity(items.len());
    for item in items {
        let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        let key = bytes_of(&key)?;
        if !(inherits && key.is_empty()) {
            entries.push(engine::EnvEntry::new(&key, &bytes_of(&value)?).map_err(spec_error)?);
        }
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
        Some(env) => environment(env, inherits)?,
        None => environment(&py.import("os")?.getattr("environ")?, true)?,
    };
    // Python changes the environment only while it holds its lock, as we do.
    let block = inherits.then(engine::own_block).unwrap_or_default();
    let odd = engine::odd_entries(&block, &env);
    Ok((env, odd))
}

fn memory(policy: Option<Policy>) -> PyResult<Option<(engine::MemoryMode, Vec<u32>)>> {
    const MODES: [(&str, engine::MemoryMode); 4] = [
        ("bind", engine::MemoryMode::Bind),
        ("preferred", engine::MemoryMode::Preferred),
        ("interleave", engine::MemoryMode::Interleave),
        ("local", engine::MemoryMode::Local),
    ];
    let convert = |(mode, nodes): Policy| Ok((named("memory policy", &mode, &MODES)?, nodes));
    policy.map(convert).transpose()
}

/// The words of a command, at least one.
fn argv(given: &Bound<'_, PyAny>) -> PyResult<Vec<CString>> {
    if given.extract::<OsString>().is_ok() || given.is_instance_of::<PyBytes>() {
        return Err(PyTypeError::new_err(
            "argv must be a sequence of strings, not one string",
        ));
    }
    let argv = each(given, |word| c_string(&word, "an argument"))?;
    if argv.first().is_none_or(|program| program.is_empty()) {
        return Err(spec_error("a worker has an empty argv: name a program"));
    }
    Ok(argv)
}

/// A console that Python names by its number.
fn console(number: u8) -> PyResult<engine::Console> {
    match number {
        1 => Ok(engine::Console::Stdout),
        2 => Ok(engine::Console::Stderr),
        other => Err(spec_error(format!(
            "a console is 1 (stdout) or 2 (stderr), not {other}"
        ))),
    }
}

impl Stream<'_> {
    fn convert(self) -> PyResult<engine::Stdio> {
        let path = c_path(self.path.as_ref(), "path of a stream")?;
        Ok(match (self.kind.as_str(), path, self.descriptor) {
            ("inherit", ..) => engine::Stdio::Inherit,
            ("null", ..) => engine::Stdio::Null,
            ("unreadable", ..) => engine::Stdio::Unreadable,
            ("pipe", ..) => engine::Stdio::Pipe,
            ("stdout", ..) => engine::Stdio::Stdout,
            ("fd", _, Some(fd)) => engine::Stdio::Fd(fd),
            ("file", Some(path), _) => engine::Stdio::File {
                path,
                append: self.append,
            },
            ("log", path, _) => engine::Stdio::Log {
                path,
                console: self.console.map(console).transpose()?,
                terminal: self.terminal,
                prefix: self.prefix.as_ref().map(bytes_of).transpose()?,
            },
            (kind, ..) => return Err(spec_error(format!("there is no such Stdio as {kind:?}"))),
        })
    }
}

impl Worker<'_> {
    pub(crate) fn convert(self) -> PyResult<engine::WorkerSpec> {
        Ok(engine::WorkerSpec {
            argv: argv(&self.argv)?,
            env: match &self.env {
                Some(env) => environment(env, false)?,
                None => Vec::new(),
            },
            cwd: c_path(self.cwd.as_ref(), "cwd")?,
            stdio: [
                self.stdin.convert()?,
                self.stdout.convert()?,
                self.stderr.convert()?,
            ],
            cpus: self.cpus,
            memory: memory(self.mempolicy)?,
            foreground: self.foreground,
            prefix: bytes_of(&self.prefix)?,
            keep_fds: self.keep_fds,
            fork: self.fork_server.map(|server| engine::Fork {
                server,
                entry: self.fork_entry,
            }),
        })
    }
}

impl Launch<'_> {
    pub(crate) fn convert(self, py: Python<'_>) -> PyResult<engine::LaunchSpec> {
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
        let inherits = self.inherits || self.env.is_none();
        let (env, odd) = base(py, self.env.as_ref(), inherits)?;
        let workers = self.workers.into_iter().map(Worker::convert);
        let mut line_files = Vec::new();
        for (number, path, words) in self.line_files {
            line_files.push(engine::LineFile {
                stream: console(number)?,
                path: c_string(&path, "path of a log file")?,
                words: words.iter().map(bytes_of).collect::<PyResult<_>>()?,
            });
        }
        let spec = engine::LaunchSpec {
            workers: workers.collect::<PyResult<_>>()?,
            env,
            inherits,
            odd,
            on_failure: named("on_failure", &self.on_failure, &POLICIES)?,
            grace: seconds(self.grace_s)?,
            lingers: self.lingers,
            stays_open: self.stays_open,
            at_once: self.at_once,
            signal_scope: named("signal_scope", &self.signal_scope, &SCOPES)?,
            binding: named("binding", &self.binding, &BINDINGS)?,
            logs: engine::LogOptions {
                max_bytes: self.log_max_bytes,
                collapse: self.collapse,
                line_files,
                partial_after: self.partial_after_s.map(seconds).transpose()?,
                relayed: self.relayed,
                tells_first: self.tells_first_output,
            },
            tells_signals: self.tells_signals,
        };
        spec.validate().map_err(spec_error)?;
        Ok(spec)
    }
}

/// The spec of a fork server.
pub(crate) fn fork_server(
    py: Python<'_>,
    words: &Bound<'_, PyAny>,
    env: Option<&Bound<'_, PyAny>>,
    cwd: Option<&Bound<'_, PyAny>>,
    cpus: Option<Vec<u32>>,
    mempolicy: Option<Policy>,
) -> PyResult<engine::LaunchSpec> {
    let (env, odd) = base(py, env, env.is_none())?;
    let worker = engine::WorkerSpec {
        argv: argv(words)?,
        cwd: c_path(cwd, "cwd")?,
        cpus: cpus.unwrap_or_default(),
        memory: memory(mempolicy)?,
        ..engine::WorkerSpec::default()
    };
    Ok(engine::LaunchSpec {
        workers: vec![worker],
        env,
        odd,
        on_failure: engine::OnFailure::Report,
        binding: engine::Strictness::Wanted,
        ..engine::LaunchSpec::default()
    })
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
