//! Warm fork servers: their socket, and the calls of commands.

use std::ffi::{CString, OsString};
use std::os::fd::IntoRawFd;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dsl_engine::Error;
use dsl_engine::forkserver::warm::{self, Call, Detail, Door, Marks, Purpose, Request};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{os_error, to_python};
use crate::fork::ForkLink;
use crate::spec::seconds;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In what a command and a warm server have to agree.
#[pyfunction]
pub(crate) fn warm_key(
    py: Python<'_>,
    words: Vec<Vec<u8>>,
    environ: Vec<Vec<u8>>,
) -> PyResult<Bound<'_, PyBytes>> {
    let texts = |list: Vec<Vec<u8>>| list.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>();
    Ok(PyBytes::new(py, &warm::key(&texts(words)?, &texts(environ)?)))
}

/// 32 hexadecimal digits for a key.
#[pyfunction]
pub(crate) fn warm_digest(key: &[u8]) -> String {
    warm::digest(key)
}

/// Why no warm server may fork the workers of this command; empty if one may.
#[pyfunction]
pub(crate) fn warm_obstacle() -> &'static str {
    warm::obstacle().unwrap_or_default()
}

/// Whether this process belongs to a job, which would end what it leaves behind.
#[pyfunction]
pub(crate) fn is_in_job() -> bool {
    warm::is_in_job()
}

/// Listen at a new socket, and return the number of its descriptor.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 makes it of any path")]
pub(crate) fn warm_listen(folder: PathBuf, name: &str) -> PyResult<i32> {
    warm::listen(&folder, name)
        .map(IntoRawFd::into_raw_fd)
        .map_err(os_error)
}

/// Call a warm server, and return the number of the connection's descriptor.
#[pyfunction]
#[pyo3(signature = (folder, name, purpose, *, key = None, stay_s = 0.0, memory = 0))]
#[expect(clippy::needless_pass_by_value, reason = "PyO3 makes it of any path")]
pub(crate) fn warm_call(
    folder: PathBuf,
    name: &str,
    purpose: &str,
    key: Option<&[u8]>,
    stay_s: f64,
    memory: u64,
) -> PyResult<i32> {
    let purpose = match purpose {
        "serve" => Purpose::Serve,
        "hold" => Purpose::Hold,
        "tell" => Purpose::Tell,
        "stop" => Purpose::Stop,
        other => return Err(PyValueError::new_err(format!("no such purpose: {other}"))),
    };
    let request = Request {
        purpose,
        key: key.unwrap_or_default().to_vec(),
        stay: seconds(stay_s)?,
        memory,
    };
    warm::join(&folder, name, &request)
        .map(IntoRawFd::into_raw_fd)
        .map_err(os_error)
}

/// Wait for the answer to a call, and close the connection.
#[pyfunction]
pub(crate) fn warm_answer(py: Python<'_>, fd: i32, timeout_s: f64) -> PyResult<Option<Bound<'_, PyBytes>>> {
    let call = dsl_engine::os::take_over(fd).map_err(os_error)?;
    let patience: Duration = seconds(timeout_s)?;
    let answer = py.detach(|| warm::ask(&call, patience));
    Ok(answer.map(|bytes| PyBytes::new(py, &bytes)))
}

/// Files as they were when they were marked.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct FileMarks(Mutex<Marks>);

#[pymethods]
impl FileMarks {
    #[new]
    #[pyo3(signature = (paths, *, kinds_only = false))]
    fn new(paths: Vec<PathBuf>, kinds_only: bool) -> Self {
        let detail = if kinds_only { Detail::Kind } else { Detail::State };
        Self(Mutex::new(Marks::new(paths, detail)))
    }

    /// The paths that do not lead to what they led to.
    fn changed(&self) -> Vec<OsString> {
        lock(&self.0).changed().into_iter().map(Into::into).collect()
    }

    /// The files whose state had changed at this time or later when they were marked.
    fn since(&self, time_ns: i64) -> Vec<OsString> {
        lock(&self.0).since(time_ns).into_iter().map(Into::into).collect()
    }

    /// Mark these files as they are now.
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 makes it of any list")]
    fn renew(&self, paths: Vec<PathBuf>) {
        lock(&self.0).renew(&paths);
    }
}

/// The socket of a warm server, in the server.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct WarmDoor(Mutex<Door>);

#[pymethods]
impl WarmDoor {
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 makes it of any path")]
    fn new(fd: i32, folder: PathBuf, name: &str, key: &[u8]) -> PyResult<Self> {
        let door = Door::new(fd, &folder, name, key.to_vec()).map_err(to_python)?;
        Ok(Self(Mutex::new(door)))
    }

    /// Note the state that imports have left.
    fn settle(&self) -> PyResult<()> {
        lock(&self.0).settle().map_err(to_python)
    }

    /// Take calls at once from now on, under this name; `about` says what the server is.
    fn ready(&self, name: &str, about: &[u8]) {
        let mut door = lock(&self.0);
        door.set_about(about.to_vec());
        door.rename(name);
    }

    /// Take over a call, by the numbers of its descriptors.
    fn adopt(&self, call: i32, request: i32, release: i32) -> PyResult<Option<WarmCall>> {
        let call = lock(&self.0).adopt([call, request, release]).map_err(to_python)?;
        Ok(call.map(WarmCall::new))
    }

    /// Stay until the program that has called hangs up.
    fn hold(&self, call: &Bound<'_, WarmCall>) -> PyResult<()> {
        let call = call.get().take()?;
        lock(&self.0).hold(call).map_err(to_python)
    }

    /// Stay until the program at the other end of a connection hangs up.
    fn add_holder(&self, fd: i32) -> PyResult<()> {
        let call = dsl_engine::os::take_over(fd).map_err(os_error)?;
        lock(&self.0).add_holder(call).map_err(to_python)
    }

    /// Descriptors of copies of the connections with programs that want this server to stay.
    fn holders(&self) -> PyResult<Vec<i32>> {
        lock(&self.0).holders().map_err(to_python)
    }

    /// Wait for a call; None: the server has to end.
    fn next(&self, py: Python<'_>) -> PyResult<Option<WarmCall>> {
        let call = py.detach(|| lock(&self.0).next_call()).map_err(to_python)?;
        Ok(call.map(WarmCall::new))
    }

    /// Watch the branch that was forked for a call.
    fn forked(&self, call: &Bound<'_, WarmCall>, pid: i32) -> PyResult<()> {
        let call = call.get().take()?;
        lock(&self.0).forked(call, pid).map_err(to_python)
    }

    /// In a forked child: become the branch of a job.
    fn enter(&self, call: &Bound<'_, WarmCall>) -> PyResult<ForkLink> {
        let call = call.get().take()?;
        lock(&self.0).enter(call).map(ForkLink::of).map_err(to_python)
    }

    /// In a forked child that becomes another server: take on the limits that this server was started with.
    fn restore(&self) -> PyResult<()> {
        lock(&self.0).restore().map_err(to_python)
    }

    /// Take no more calls: another server takes the place of this one, and goes on with this call.
    fn succeed(&self, pid: i32, call: &Bound<'_, WarmCall>) -> PyResult<()> {
        let call = call.get().take()?;
        lock(&self.0).succeed(pid, call).map_err(to_python)
    }

    /// Take no more calls.
    fn close(&self) {
        lock(&self.0).close();
    }
}

/// A call that a warm server has to answer.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct WarmCall(Mutex<Option<Call>>);

impl WarmCall {
    fn new(call: Call) -> Self {
        Self(Mutex::new(Some(call)))
    }

    fn take(&self) -> PyResult<Call> {
        lock(&self.0).take().ok_or_else(|| to_python(Error::Closed))
    }

    fn with<T>(&self, ask: impl FnOnce(&mut Call) -> T) -> PyResult<T> {
        lock(&self.0)
            .as_mut()
            .map(ask)
            .ok_or_else(|| to_python(Error::Closed))
    }
}

#[pymethods]
impl WarmCall {
    /// Whether a job wants workers; else the caller only wants the server to stay.
    #[getter]
    fn is_job(&self) -> PyResult<bool> {
        self.with(|call| call.request.purpose == Purpose::Serve)
    }

    /// How many bytes of memory all warm servers of the user may use.
    #[getter]
    fn memory(&self) -> PyResult<u64> {
        self.with(|call| call.request.memory)
    }

    /// Tell the caller why it gets nothing.
    fn refuse(&self, why: &str) -> PyResult<()> {
        self.with(|call| call.refuse(why))
    }

    /// Tell the engine that the imports begin anew.
    fn defer(&self) -> PyResult<()> {
        self.with(|call| call.defer())
    }

    /// Descriptors of copies of the connection and of the request, and of what ends the wait of this server.
    fn pass_on(&self) -> PyResult<[i32; 3]> {
        self.with(Call::pass_on)?.map_err(to_python)
    }
}
