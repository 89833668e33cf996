//! Engine errors as Python exceptions: the one place where they meet.

use dsl_engine::Error;
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyOSError};
use pyo3::prelude::*;

create_exception!(
    dsl._core,
    EngineError,
    PyException,
    "Base of every error that the engine raises."
);
create_exception!(
    dsl._core,
    SpecError,
    EngineError,
    "The launch spec cannot be started as written."
);
create_exception!(
    dsl._core,
    LimitError,
    EngineError,
    "A limit of this machine is too low for the group."
);
create_exception!(
    dsl._core,
    BindingError,
    EngineError,
    "A worker cannot be bound as asked on this machine."
);

#[expect(clippy::needless_pass_by_value, reason = "the shape that map_err wants")]
pub(crate) fn to_python(error: Error) -> PyErr {
    let message = error.to_string();
    let errno = match &error {
        Error::Os { source, .. } => source.raw_os_error(),
        _ => None,
    };
    let error = match error {
        Error::Spec(_) => SpecError::new_err(message),
        Error::Limit(_) | Error::NoThread(_) => LimitError::new_err(message),
        Error::Binding(_) => BindingError::new_err(message),
        Error::Busy
        | Error::Ending
        | Error::ChildSignalIgnored
        | Error::Idle
        | Error::Forked
        | Error::Closed
        | Error::Os { .. } => EngineError::new_err(message),
    };
    if let Some(errno) = errno {
        // Fails only if memory is short: then the message has it.
        let _ = Python::attach(|py| error.value(py).setattr("errno", errno));
    }
    error
}

pub(crate) fn os_error(error: std::io::Error) -> PyErr {
    match error.raw_os_error() {
        // With an errno, Python makes this the subclass that fits.
        Some(errno) => PyOSError::new_err((errno, std::io::Error::from_raw_os_error(errno).to_string())),
        None => PyErr::from(error),
    }
}

pub(crate) fn spec_error(error: impl std::fmt::Display) -> PyErr {
    SpecError::new_err(error.to_string())
}
