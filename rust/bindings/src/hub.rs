//! The link between hosts: messages as bytes. The thread that serves them is none of Python's.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsl_control::{
    Caller, ConnectError, Face, FdStream, Hub as Core, KEY_LEN, Loss, News, Sample, Settings, Stream as Wire,
};
use dsl_engine::os::{duplicate, take_over};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{Answer, own_error};
use crate::spec::seconds;
use crate::{lock, patiently};

/// How many agents may know the key of every place, unless their number is given.
const MANY: usize = 1 << 12;

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
pub(crate) fn fd_stream(read_fd: i32, write_fd: i32) -> Answer<Stream> {
    Ok(Stream::new(Wire::Plain(FdStream::new(read_fd, write_fd)?)))
}

/// Connect to the head of a job.
#[pyfunction]
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
    let class = match &connected {
        Err(ConnectError::Refused(..)) => "RefusedLinkError",
        _ => "ControlError",
    };
    let stream = connected.map_err(|error| own_error(class, &error))?;
    Ok(Stream::new(Wire::Secure(Box::new(stream))))
}

/// A connection of a hub.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Link {
    hub: Arc<Core>,
    face: Arc<Face>,
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
    fn send_now(&self, py: Python<'_>, message: &[u8], timeout_s: f64) -> Answer<()> {
        let timeout = seconds(timeout_s)?;
        let send =
            |pending: &mut dyn FnMut() -> bool| self.hub.send_now(&self.face, message, timeout, pending);
        Ok(patiently(py, send)??)
    }

    /// Wait for a message before the hub is started.
    fn receive<'py>(
        &self,
        py: Python<'py>,
        timeout_s: f64,
        while_heard: bool,
    ) -> Answer<Bound<'py, PyBytes>> {
        let timeout = seconds(timeout_s)?;
        let heard = patiently(py, |pending| {
            self.hub.receive(&self.face, timeout, while_heard, pending)
        })?;
        Ok(PyBytes::new(py, &heard?))
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
#[pyclass(frozen, subclass, module = "dsl._core")]
pub(crate) struct Hub(Arc<Core>);

type Heard<'py> = (Option<Link>, &'static str, Bound<'py, PyAny>);

impl Hub {
    fn link(&self, face: Arc<Face>) -> Link {
        Link {
            hub: Arc::clone(&self.0),
            face,
        }
    }

    fn heard<'py>(&self, py: Python<'py>, news: News) -> PyResult<Heard<'py>> {
        let link = |face| Some(self.link(face));
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
    fn new(heartbeat_s: f64, console: Option<(i32, i32)>, taken: Vec<u8>) -> Answer<Self> {
        let settings = Settings {
            heartbeat: seconds(heartbeat_s)?,
            console,
            taken,
        };
        Ok(Self(Arc::new(Core::new(settings)?)))
    }

    /// Serve a connection.
    fn serve(&self, stream: &Bound<'_, Stream>, name: String) -> PyResult<Link> {
        let wire = lock(&stream.get().0).take();
        let wire = wire.ok_or_else(|| own_error("ControlError", &"a hub has this connection already"))?;
        Ok(self.link(self.0.add(wire, name)))
    }

    /// Let agents connect by TCP.
    #[pyo3(signature = (address = "", port = 0, *, keyed = None))]
    fn listen(&self, address: &str, port: u16, keyed: Option<bool>) -> Answer<u16> {
        Ok(self.0.listen(address, port, keyed)?)
    }

    /// Close a port.
    fn unlisten(&self, py: Python<'_>, port: u16) {
        py.detach(|| self.0.unlisten(port));
    }

    /// Let in agents of a place that know a key; without one (empty) let them wait.
    #[pyo3(signature = (place, key, count = None))]
    fn expect(&self, place: Option<u32>, key: &[u8], count: Option<usize>) -> PyResult<()> {
        if ![0, KEY_LEN].contains(&key.len()) {
            let text = format!("a key has {KEY_LEN} bytes, not {}", key.len());
            return Err(own_error("ControlError", &text));
        }
        let usual = if place.is_none() { MANY } else { 1 };
        self.0.expect(place, key, count.unwrap_or(usual));
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
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Vec<Heard<'py>>> {
        let news = self.0.read();
        news.into_iter().map(|one| self.heard(py, one)).collect()
    }

    /// Send what comes out of two pipes to the head.
    fn pass_on(&self, link: &Bound<'_, Link>, stdout_fd: i32, stderr_fd: i32) -> Answer<()> {
        let (stdout, stderr) = (take_over(stdout_fd)?, take_over(stderr_fd)?);
        Ok(self.0.relay(&link.get().face, stdout, stderr)?)
    }

    /// Wait for output.
    #[pyo3(signature = (timeout_s = None))]
    fn drain(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let timeout: Option<Duration> = timeout_s.map(seconds).transpose()?;
        patiently(py, |pending| self.0.drain(timeout, pending))
    }

    /// The last output of agents that was shown where stderr is shown.
    fn recent<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.recent())
    }

    /// Let a socket, which stays the caller's, get the output of agents, too.
    fn tee(&self, fd: i32) -> Answer<()> {
        Ok(self.0.tee(duplicate(fd)?)?)
    }

    /// Begin to serve.
    fn start(&self) -> Answer<()> {
        Ok(self.0.start()?)
    }

    /// End all connections.
    fn close(&self, py: Python<'_>, timeout_s: f64) -> Answer<()> {
        let timeout = seconds(timeout_s)?;
        Ok(patiently(py, |pending| self.0.close(timeout, pending))??)
    }

    /// Close the descriptors in this process alone.
    fn disown(&self) {
        self.0.disown();
    }
}
