//! Engine errors as Python exceptions: the one place where they meet.

use dsl_control::{FdError, TalkError};
use dsl_engine::spec::SpecError as Unusable;
use dsl_engine::{Error, Refusal};
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

/// Why a call has failed, on its way to Python.
pub(crate) struct Failure(PyErr);

/// The result of a call from Python.
pub(crate) type Answer<T> = Result<T, Failure>;

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

impl From<PyErr> for Failure {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
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
        Self(error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self(match error.raw_os_error() {
            // With an errno, Python makes this the subclass that fits.
            Some(errno) => PyOSError::new_err((errno, std::io::Error::from_raw_os_error(errno).to_string())),
            None => PyErr::from(error),
        })
    }
}

macro_rules! failures {
    ($($error:ty => $made:expr;)*) => {$(
        impl From<$error> for Failure {
            fn from(error: $error) -> Self {
                Self($made(&error))
            }
        }
    )*};
}
failures! {
    Unusable => spec_error;
    Refusal => spec_error;
    TalkError => |error| own_error("ControlError", error);
    FdError => |error| own_error("ControlError", error);
}

/// One of the errors of the package, which users see as one line.
pub(crate) fn own_error(class: &str, text: &dyn std::fmt::Display) -> PyErr {
    Python::attach(|py| {
        let module = py.import("dsl.errors")?;
        Ok(PyErr::from_value(
            module.getattr(class)?.call1((text.to_string(),))?,
        ))
    })
    .unwrap_or_else(|error: PyErr| error)
}

pub(crate) fn spec_error(error: impl std::fmt::Display) -> PyErr {
    SpecError::new_err(error.to_string())
}
