//! The link between hosts: messages as bytes. The thread that serves them is none of Python's.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dsl_control::{
    Caller, ConnectError, Face, FdStream, Hub as Core, KEY_LEN, Loss, News, Sample, Settings, Stream as Wire,
    TalkError,
};
use dsl_engine::os::{duplicate, take_over};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::to_python;
use crate::spec::seconds;

/// One of the errors of the package, which users see as one line.
fn error_of(py: Python<'_>, class: &str, text: String) -> PyErr {
    let made = py
        .import("dsl.errors")
        .and_then(|module| module.getattr(class)?.call1((text,)));
    made.map_or_else(|error| error, PyErr::from_value)
}

fn control_error(py: Python<'_>, error: impl std::fmt::Display) -> PyErr {
    error_of(py, "ControlError", error.to_string())
}

/// With an errno, Python makes this the subclass that fits.
fn os_error(error: std::io::Error) -> PyErr {
    match error.raw_os_error() {
        Some(errno) => PyOSError::new_err((errno, std::io::Error::from_raw_os_error(errno).to_string())),
        None => PyErr::from(error),
    }
}

/// Calls `wait` without the interpreter, with a function by which it learns that a signal handler has raised.
fn patiently<T: Send>(
    py: Python<'_>,
    wait: impl FnOnce(&mut dyn FnMut() -> bool) -> T + Send,
) -> PyResult<T> {
    let mut raised: Option<PyErr> = None;
    let result = py.detach(|| {
        wait(&mut || {
            raised = raised
                .take()
                .or_else(|| Python::attach(|py| py.check_signals().err()));
            raised.is_some()
        })
    });
    raised.map_or(Ok(result), Err)
}

/// A connection that no hub has taken yet.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Stream(Mutex<Option<Wire>>);

impl Stream {
    fn new(wire: Wire) -> Self {
        Self(Mutex::new(Some(wire)))
    }
}

/// Carry a link by two descriptors, which may be the same one.
#[pyfunction]
#[pyo3(name = "FdStream")]
pub(crate) fn fd_stream(py: Python<'_>, read_fd: i32, write_fd: i32) -> PyResult<Stream> {
    let stream = FdStream::new(read_fd, write_fd).map_err(|error| control_error(py, error))?;
    Ok(Stream::new(Wire::Plain(stream)))
}

/// Connect to the head of a job.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "the shape that Python gives")]
#[pyo3(signature = (addresses, key, place, timeout_s, *, keyed = false))]
pub(crate) fn connect(
    py: Python<'_>,
    addresses: Vec<String>,
    key: &[u8],
    place: u32,
    timeout_s: f64,
    keyed: bool,
) -> PyResult<Stream> {
    let timeout = seconds(timeout_s)?;
    let caller = Caller { key, place, keyed };
    let connected = patiently(py, |pending| {
        dsl_control::connect(&addresses, caller, timeout, pending)
    })?;
    match connected {
        Ok(stream) => Ok(Stream::new(Wire::Secure(Box::new(stream)))),
        Err(error @ ConnectError::Refused(..)) => Err(error_of(py, "RefusedLinkError", error.to_string())),
        Err(error) => Err(control_error(py, error)),
    }
}

/// A connection of a hub.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Link {
    hub: Arc<Core>,
    face: Arc<Face>,
}

fn talk_error(py: Python<'_>, error: &TalkError) -> PyErr {
    control_error(py, error)
}

#[pymethods]
impl Link {
    /// A number that no other link of this process has.
    #[getter]
    fn id(&self) -> usize {
        Arc::as_ptr(&self.face) as usize
    }

    #[getter]
    fn name(&self) -> &str {
        &self.face.name
    }

    #[getter]
    fn port(&self) -> u16 {
        self.face.port()
    }

    #[getter]
    fn place(&self) -> i64 {
        self.face.place()
    }

    #[setter]
    fn set_place(&self, place: i64) {
        self.face.set_place(place);
    }

    #[getter]
    fn own_address(&self) -> &str {
        &self.face.own_address
    }

    #[getter]
    fn is_lost(&self) -> bool {
        self.face.is_lost()
    }

    /// Queue a message.
    fn send(&self, message: &[u8]) {
        self.hub.send(&self.face, message);
    }

    /// Send what is queued, then end the connection.
    fn close(&self) {
        self.hub.close_link(&self.face);
    }

    /// End the connection at once.
    fn drop(&self, is_stranger: bool) {
        self.hub.drop_link(&self.face, is_stranger);
    }

    /// Send a message before the hub is started.
    fn send_now(&self, py: Python<'_>, message: &[u8], timeout_s: f64) -> PyResult<()> {
        let timeout = seconds(timeout_s)?;
        let sent = patiently(py, |pending| {
            self.hub.send_now(&self.face, message, timeout, pending)
        })?;
        sent.map_err(|error| talk_error(py, &error))
    }

    /// Wait for a message before the hub is started.
    fn receive<'py>(
        &self,
        py: Python<'py>,
        timeout_s: f64,
        while_heard: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let timeout = seconds(timeout_s)?;
        let heard = patiently(py, |pending| {
            self.hub.receive(&self.face, timeout, while_heard, pending)
        })?;
        let payload = heard.map_err(|error| talk_error(py, &error))?;
        Ok(PyBytes::new(py, &payload))
    }

    /// The heartbeats that were answered since the last call: six times each, in nanoseconds.
    fn take_samples(&self) -> Vec<(u64, u64, u64, u64, u64, u64)> {
        let times = |one: Sample| {
            let asked = one.pong.ping;
            (
                asked.real,
                one.pong.heard,
                one.pong.now,
                one.back_real,
                asked.sent,
                one.back,
            )
        };
        self.face.take_samples().into_iter().map(times).collect()
    }
}

/// The connections of this process.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Hub(Arc<Core>);

type Heard<'py> = (Option<Link>, &'static str, Bound<'py, PyAny>);

impl Hub {
    fn heard<'py>(&self, py: Python<'py>, news: News) -> PyResult<Heard<'py>> {
        let link = |face| {
            Some(Link {
                hub: Arc::clone(&self.0),
                face,
            })
        };
        Ok(match news {
            News::Message(face, payload) => (link(face), "message", PyBytes::new(py, &payload).into_any()),
            News::Gone(face, None) => (link(face), "", py.None().into_bound(py)),
            News::Gone(face, Some(Loss { kind, reason })) => {
                (link(face), kind, reason.into_pyobject(py)?.into_any())
            }
            News::Warning(text) => (None, "warning", text.into_pyobject(py)?.into_any()),
            News::Lost(text) => (None, "lost", text.into_pyobject(py)?.into_any()),
        })
    }
}

#[pymethods]
impl Hub {
    #[new]
    fn new(heartbeat_s: f64, console: Option<(i32, i32)>, taken: Vec<u8>) -> PyResult<Self> {
        let settings = Settings {
            heartbeat: seconds(heartbeat_s)?,
            console,
            taken,
        };
        Core::new(settings)
            .map(|hub| Self(Arc::new(hub)))
            .map_err(to_python)
    }

    /// Serve a connection.
    fn add(&self, py: Python<'_>, stream: &Bound<'_, Stream>, name: String) -> PyResult<Link> {
        let slot = stream.get();
        let wire = slot.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let wire = wire.ok_or_else(|| control_error(py, "a hub has this connection already"))?;
        Ok(Link {
            hub: Arc::clone(&self.0),
            face: self.0.add(wire, name),
        })
    }

    /// Let agents connect by TCP.
    fn listen(&self, address: &str, port: u16, keyed: Option<bool>) -> PyResult<u16> {
        self.0.listen(address, port, keyed).map_err(os_error)
    }

    /// Close a port.
    fn unlisten(&self, py: Python<'_>, port: u16) {
        py.detach(|| self.0.unlisten(port));
    }

    /// Let in agents of a place that know a key.
    fn expect(&self, py: Python<'_>, place: Option<u32>, key: &[u8], count: usize) -> PyResult<()> {
        if key.len() != KEY_LEN {
            let text = format!("a key has {KEY_LEN} bytes, not {}", key.len());
            return Err(control_error(py, text));
        }
        self.0.expect(place, key, count);
        Ok(())
    }

    /// Let so many agents share the memory for output.
    fn share_output(&self, agents: usize) {
        self.0.share_output(agents);
    }

    /// A descriptor that is readable while `read` returns something.
    fn fileno(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// Take what has arrived.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<Vec<Heard<'py>>> {
        let news = self.0.read();
        news.into_iter().map(|one| self.heard(py, one)).collect()
    }

    /// Send what comes out of two pipes to the head.
    fn relay(&self, link: &Bound<'_, Link>, stdout_fd: i32, stderr_fd: i32) -> PyResult<()> {
        let stdout = take_over(stdout_fd).map_err(os_error)?;
        let stderr = take_over(stderr_fd).map_err(os_error)?;
        self.0.relay(&link.get().face, stdout, stderr).map_err(os_error)
    }

    /// Wait for output.
    fn drain(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let timeout: Option<Duration> = timeout_s.map(seconds).transpose()?;
        patiently(py, |pending| self.0.drain(timeout, pending))
    }

    /// The last output of agents that was shown where stderr is shown.
    fn recent<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.recent())
    }

    /// Let a socket, which stays the caller's, get the output of agents, too.
    fn tee(&self, fd: i32) -> PyResult<()> {
        let copy = duplicate(fd).map_err(os_error)?;
        self.0.tee(copy).map_err(to_python)
    }

    /// Begin to serve.
    fn start(&self) -> PyResult<()> {
        self.0.start().map_err(os_error)
    }

    /// End all connections.
    fn close(&self, py: Python<'_>, timeout_s: f64) -> PyResult<()> {
        let timeout = seconds(timeout_s)?;
        patiently(py, |pending| self.0.close(timeout, pending))?.map_err(os_error)
    }

    /// Close the descriptors in this process alone.
    fn disown(&self) {
        self.0.disown();
    }
}
