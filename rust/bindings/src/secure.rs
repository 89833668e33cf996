//! Encrypted sessions between hosts.

use std::sync::{Mutex, MutexGuard, PoisonError};

use dsl_control::{Error, MAX_PLAIN, Role, Session};
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

create_exception!(
    dsl._core,
    SecureError,
    PyException,
    "A session cannot do what it was asked for."
);

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err wants")]
fn to_python(error: Error) -> PyErr {
    SecureError::new_err(error.to_string())
}

/// One side of an encrypted connection between two sides with the same key.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct SecureSession(Mutex<Session>);

impl SecureSession {
    fn session(&self) -> MutexGuard<'_, Session> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl SecureSession {
    #[classattr]
    #[pyo3(name = "MAX_PLAIN")]
    const MAX_PLAIN: usize = MAX_PLAIN;

    #[new]
    #[pyo3(signature = (key, *, initiator))]
    fn new(key: &[u8], initiator: bool) -> PyResult<Self> {
        let role = if initiator {
            Role::Initiator
        } else {
            Role::Responder
        };
        Session::new(key, role)
            .map(|session| Self(Mutex::new(session)))
            .map_err(to_python)
    }

    /// The next message of the handshake, for the other side.
    fn handshake<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let message = self.session().handshake().map_err(to_python)?;
        Ok(PyBytes::new(py, &message))
    }

    /// Take the other side's next message of the handshake.
    fn read_handshake(&self, data: &[u8]) -> PyResult<()> {
        self.session().read_handshake(data).map_err(to_python)
    }

    /// Whether the handshake is over and no message was refused.
    #[getter]
    fn is_ready(&self) -> bool {
        self.session().is_ready()
    }

    /// The message that holds these bytes.
    fn seal<'py>(&self, py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let length = Session::sealed_len(data.len()).map_err(to_python)?;
        PyBytes::new_with(py, length, |message| {
            self.session().seal(data, message).map_err(to_python)
        })
    }

    /// The bytes in the other side's next message.
    fn open<'py>(&self, py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, Session::opened_len(data.len()), |plain| {
            self.session().open(data, plain).map_err(to_python)
        })
    }
}
