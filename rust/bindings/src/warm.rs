//! Warm fork servers: their socket, and the calls of commands.

use std::ffi::{CString, OsString};
use std::os::fd::IntoRawFd;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use dsl_engine::Error;
use dsl_engine::forkserver::warm::{self, Call, Detail, Door, Marks, Purpose, Request};
use dsl_engine::os::take_over;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::Answer;
use crate::fork::ForkLink;
use crate::lock;
use crate::spec::{named, seconds};

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
pub(crate) fn warm_listen(folder: PathBuf, name: &str) -> Answer<i32> {
    Ok(warm::listen(&folder, name)?.into_raw_fd())
}

/// Call a warm server, and return the number of the connection's descriptor.
#[pyfunction]
pub(crate) fn warm_call(folder: PathBuf, name: &str, purpose: &str) -> Answer<i32> {
    const PURPOSES: [(&str, Purpose); 2] = [("tell", Purpose::Tell), ("stop", Purpose::Stop)];
    let request = Request::new(named("purpose", purpose, &PURPOSES)?);
    Ok(warm::join(&folder, name, &request)?.into_raw_fd())
}

/// Ask a warm server to work or to stay, and return the numbers of the connections' descriptors.
#[pyfunction]
pub(crate) fn warm_join(
    folder: PathBuf,
    name: &str,
    purpose: &str,
    key: &[u8],
    stay_s: f64,
    memory: u64,
    workers: usize,
) -> Answer<Vec<i32>> {
    const PURPOSES: [(&str, Purpose); 2] = [("serve", Purpose::Serve), ("hold", Purpose::Hold)];
    let request = Request {
        key: key.to_vec(),
        stay: seconds(stay_s)?,
        memory,
        ..Request::new(named("purpose", purpose, &PURPOSES)?)
    };
    let calls = warm::join_all(&folder, name, request, workers)?;
    Ok(calls.into_iter().map(IntoRawFd::into_raw_fd).collect())
}

/// Wait for the answer to a call, and close the connection.
#[pyfunction]
pub(crate) fn warm_answer(py: Python<'_>, fd: i32, timeout_s: f64) -> Answer<Option<Bound<'_, PyBytes>>> {
    let call = take_over(fd)?;
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
    fn renew(&self, paths: Vec<PathBuf>) {
        lock(&self.0).renew(&paths);
    }
}

/// The socket of a warm server, in the server.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct WarmDoor(Mutex<Option<Door>>);

impl WarmDoor {
    /// The door, unless this process is a branch, which has none.
    fn with<T>(&self, ask: impl FnOnce(&mut Door) -> Result<T, Error>) -> Answer<T> {
        Ok(lock(&self.0).as_mut().ok_or(Error::Forked).and_then(ask)?)
    }
}

#[pymethods]
impl WarmDoor {
    #[new]
    fn new(fd: i32, folder: PathBuf, name: &str, key: &[u8]) -> Answer<Self> {
        let door = Door::new(fd, &folder, name, key.to_vec())?;
        Ok(Self(Mutex::new(Some(door))))
    }

    /// Note the state that imports have left.
    fn settle(&self) -> Answer<()> {
        self.with(Door::settle)
    }

    /// Take calls at once from now on, under this name; `about` says what the server is.
    fn ready(&self, name: &str, about: &[u8]) -> Answer<()> {
        self.with(|door| {
            door.ready(name, about.to_vec());
            Ok(())
        })
    }

    /// Take over a call, by the numbers of its descriptors.
    fn adopt(&self, fds: Vec<i32>) -> Answer<Option<WarmCall>> {
        let call = self.with(|door| door.adopt(&fds))?;
        Ok(call.map(WarmCall::new))
    }

    /// Stay until the program that has called hangs up.
    fn hold(&self, call: &Bound<'_, WarmCall>) -> Answer<()> {
        let call = call.get().take()?;
        self.with(|door| door.hold(call))
    }

    /// Stay until the program at the other end of a connection hangs up.
    fn add_holder(&self, fd: i32) -> Answer<()> {
        let call = take_over(fd)?;
        self.with(|door| door.add_holder(call))
    }

    /// Descriptors of copies of the connections with programs that want this server to stay.
    fn holders(&self) -> Answer<Vec<i32>> {
        self.with(|door| door.holders())
    }

    /// Wait for a call; None: the server has to end.
    fn next(&self, py: Python<'_>) -> Answer<Option<WarmCall>> {
        let call = py.detach(|| self.with(Door::next_call))?;
        Ok(call.map(WarmCall::new))
    }

    /// Watch the branch that was forked for a call.
    fn forked(&self, call: &Bound<'_, WarmCall>, pid: i32) -> Answer<()> {
        let mut call = lock(&call.get().0);
        let forked = self.with(|door| door.forked(call.as_mut().ok_or(Error::Closed)?, pid));
        // The server before this one waits until nobody holds a call that has its branches.
        call.take_if(|call| !call.wants_branch());
        forked
    }

    /// In a forked child: become the branch of a job.
    fn enter(&self, call: &Bound<'_, WarmCall>) -> Answer<ForkLink> {
        let call = call.get().take()?;
        let door = lock(&self.0)
            .take_if(|door| door.is_copy())
            .ok_or(Error::Forked)?;
        Ok(ForkLink::of(door.enter(call)?))
    }

    /// In a forked child that becomes another server: take on the limits that this server was started with.
    fn restore(&self) -> Answer<()> {
        self.with(|door| door.restore())
    }

    /// Take no more calls: another server takes the place of this one, and goes on with this call.
    fn succeed(&self, pid: i32, call: &Bound<'_, WarmCall>) -> Answer<()> {
        let call = call.get().take()?;
        self.with(|door| door.succeed(pid, call))
    }

    /// Take no more calls.
    fn close(&self) -> Answer<()> {
        self.with(|door| {
            door.close();
            Ok(())
        })
    }
}

/// A call that a warm server has to answer.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct WarmCall(Mutex<Option<Call>>);

impl WarmCall {
    fn new(call: Call) -> Self {
        Self(Mutex::new(Some(call)))
    }

    fn take(&self) -> Answer<Call> {
        Ok(lock(&self.0).take().ok_or(Error::Closed)?)
    }

    fn with<T>(&self, ask: impl FnOnce(&mut Call) -> T) -> Answer<T> {
        Ok(lock(&self.0).as_mut().map(ask).ok_or(Error::Closed)?)
    }
}

#[pymethods]
impl WarmCall {
    /// Whether a branch is still to be forked for it; never if the caller only wants the server to stay.
    #[getter]
    fn wants_branch(&self) -> bool {
        lock(&self.0).as_ref().is_some_and(Call::wants_branch)
    }

    /// How many bytes of memory all warm servers of the user may use.
    #[getter]
    fn memory(&self) -> Answer<u64> {
        self.with(|call| call.request.memory)
    }

    /// Tell the caller why it gets nothing.
    fn refuse(&self, why: &str) -> Answer<()> {
        self.with(|call| call.refuse(why))
    }

    /// Tell the engine that the imports begin anew.
    fn defer(&self) -> Answer<()> {
        self.with(|call| call.defer())
    }

    /// Descriptors for another server: of the request, of what ends the wait of this server, and of the connections.
    fn pass_on(&self) -> Answer<Vec<i32>> {
        Ok(self.with(Call::pass_on)??)
    }
}
