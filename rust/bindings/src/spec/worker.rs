//! One worker of a launch spec.

use std::ffi::{CString, OsString};

use dsl_engine::spec as engine;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::call::Call;
use super::stdio::Stdio;
use super::{bytes_of, c_string, each, effective, environment, name_of, text, variables};
use crate::error::spec_error;

/// One worker: what to execute and how.
#[pyclass(frozen, eq, module = "dsl._core")]
pub(crate) struct WorkerSpec(pub(super) engine::WorkerSpec);

fn stdio(given: Option<&Bound<'_, Stdio>>, default: engine::Stdio) -> engine::Stdio {
    given.map_or(default, |given| given.get().0.clone())
}

const MODES: [(&str, engine::MemoryMode); 4] = [
    ("bind", engine::MemoryMode::Bind),
    ("preferred", engine::MemoryMode::Preferred),
    ("interleave", engine::MemoryMode::Interleave),
    ("local", engine::MemoryMode::Local),
];

pub(super) fn memory(given: Option<(String, Vec<u32>)>) -> PyResult<Option<(engine::MemoryMode, Vec<u32>)>> {
    let Some((mode, nodes)) = given else {
        return Ok(None);
    };
    let Some((_, mode)) = MODES.iter().find(|(name, _)| *name == mode) else {
        return Err(spec_error(format!(
            "memory policy {mode:?} is not one of bind, preferred, interleave, local"
        )));
    };
    Ok(Some((*mode, nodes)))
}

/// The words of a command, at least one.
pub(super) fn argv(given: &Bound<'_, PyAny>) -> PyResult<Vec<CString>> {
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

#[pymethods]
impl WorkerSpec {
    #[new]
    #[pyo3(signature = (argv, *, env = None, cwd = None, stdin = None, stdout = None, stderr = None, cpus = None, mempolicy = None, foreground = false, prefix = None, keep_fds = None, fork_server = None, fork_entry = 0))]
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
        keep_fds: Option<Vec<i32>>,
        fork_server: Option<usize>,
        fork_entry: usize,
    ) -> PyResult<Self> {
        Ok(Self(engine::WorkerSpec {
            argv: self::argv(argv)?,
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
            keep_fds: keep_fds.unwrap_or_default(),
            fork: fork_server.map(|server| engine::Fork {
                server,
                entry: fork_entry,
            }),
        }))
    }

    #[getter]
    fn argv(&self) -> Vec<OsString> {
        self.0.argv.iter().map(|word| text(word.as_bytes())).collect()
    }

    #[getter]
    fn env<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        variables(py, &self.0.env)
    }

    #[getter]
    fn cwd(&self) -> Option<OsString> {
        self.0.cwd.as_ref().map(|path| text(path.as_bytes()))
    }

    #[getter]
    fn stdin(&self) -> Stdio {
        Stdio(self.0.stdio[0].clone())
    }

    #[getter]
    fn stdout(&self) -> Stdio {
        Stdio(self.0.stdio[1].clone())
    }

    #[getter]
    fn stderr(&self) -> Stdio {
        Stdio(self.0.stdio[2].clone())
    }

    #[getter]
    fn cpus(&self) -> Vec<u32> {
        self.0.cpus.clone()
    }

    #[getter]
    fn mempolicy(&self) -> Option<(&'static str, Vec<u32>)> {
        let (mode, nodes) = self.0.memory.as_ref()?;
        Some((name_of(&MODES, *mode), nodes.clone()))
    }

    #[getter]
    fn foreground(&self) -> bool {
        self.0.foreground
    }

    #[getter]
    fn prefix<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.prefix)
    }

    #[getter]
    fn keep_fds(&self) -> Vec<i32> {
        self.0.keep_fds.clone()
    }

    #[getter]
    fn fork_server(&self) -> Option<usize> {
        self.0.fork.map(|fork| fork.server)
    }

    #[getter]
    fn fork_entry(&self) -> usize {
        self.0.fork.map_or(0, |fork| fork.entry)
    }

    /// Leaves out the values of variables, which may be secret.
    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let mut call = Call::new(py, "WorkerSpec".to_owned());
        call.value(self.argv())?;
        call.count("env", effective(&self.0.env).len());
        call.keyword("cwd", self.cwd(), None)?;
        call.keyword("stdin", self.stdin(), Stdio(engine::Stdio::Null))?;
        call.keyword("stdout", self.stdout(), Stdio(engine::Stdio::Inherit))?;
        call.keyword("stderr", self.stderr(), Stdio(engine::Stdio::Inherit))?;
        call.keyword("cpus", self.cpus(), Vec::new())?;
        call.keyword("mempolicy", self.mempolicy(), None)?;
        call.keyword("foreground", self.foreground(), false)?;
        if !self.0.prefix.is_empty() {
            call.keyword(
                "prefix",
                Some(self.prefix(py).unbind().into_any()),
                None::<Py<PyAny>>,
            )?;
        }
        call.keyword("keep_fds", self.keep_fds(), Vec::new())?;
        call.keyword("fork_server", self.fork_server(), None)?;
        call.keyword("fork_entry", self.fork_entry(), 0)?;
        Ok(call.finish())
    }
}

impl PartialEq for WorkerSpec {
    fn eq(&self, other: &Self) -> bool {
        are_equal(&self.0, &other.0)
    }
}

/// Whether the engine would do the same for both. The order of an environment and of kept descriptors does not
/// matter.
pub(super) fn are_equal(one: &engine::WorkerSpec, other: &engine::WorkerSpec) -> bool {
    let engine::WorkerSpec {
        argv,
        env,
        cwd,
        stdio,
        cpus,
        memory,
        foreground,
        prefix,
        keep_fds,
        fork,
    } = one;
    *argv == other.argv
        && effective(env) == effective(&other.env)
        && *cwd == other.cwd
        && *stdio == other.stdio
        && *cpus == other.cpus
        && *memory == other.memory
        && *foreground == other.foreground
        && *prefix == other.prefix
        && sorted(keep_fds) == sorted(&other.keep_fds)
        && *fork == other.fork
}

fn sorted(fds: &[i32]) -> Vec<i32> {
    let mut fds = fds.to_vec();
    fds.sort_unstable();
    fds
}
