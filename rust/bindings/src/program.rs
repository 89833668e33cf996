//! The program of a forked worker, run with no frame of Python below it.

use pyo3::exceptions::{PyBaseException, PyKeyboardInterrupt, PySystemExit};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyTuple};

/// Runs a program where the interpreter calls `sys.excepthook`: there the stack is empty.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct ForkedProgram {
    prepare: Py<PyAny>,
    settle: Py<PyAny>,
    finish: Py<PyAny>,
}

#[pymethods]
impl ForkedProgram {
    #[new]
    fn new(prepare: Py<PyAny>, settle: Py<PyAny>, finish: Py<PyAny>) -> Self {
        Self {
            prepare,
            settle,
            finish,
        }
    }

    /// Takes the arguments of `sys.excepthook`. Raises the program's exit, which the interpreter handles, and
    /// prints its errors.
    #[pyo3(signature = (kind, value, traceback, /))]
    fn __call__(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        kind: Bound<'_, PyAny>,
        value: Bound<'_, PyBaseException>,
        traceback: Bound<'_, PyAny>,
    ) -> PyResult<()> {
        // The interpreter owns no reference to the hook that it calls, and `prepare` replaces that hook: keep it
        // alive.
        std::mem::forget(slf.clone());
        let this = slf.get();
        let (program, arguments) = this
            .prepare
            .call1(py, (kind, value, traceback))?
            .extract::<(Py<PyAny>, Py<PyTuple>)>(py)?;
        let result = program.call1(py, arguments.bind(py));
        drop((program, arguments));
        this.settle.call1(py, (exit_code(py, &result),))?;
        match result {
            Ok(_) => {
                this.finish.call0(py)?;
                Err(PySystemExit::new_err(0))
            }
            // The interpreter releases the exception before it ends, and with it everything that its frames hold.
            Err(error) if error.is_instance_of::<PySystemExit>(py) => Err(error),
            Err(error) => {
                error.print_and_set_sys_last_vars(py);
                drop(error);
                this.finish.call0(py).map(drop)
            }
        }
    }
}

/// The exit code with which the interpreter ends after this result. `None`: a signal ends it.
fn exit_code(py: Python<'_>, result: &PyResult<Py<PyAny>>) -> Option<i64> {
    let Err(error) = result else {
        return Some(0);
    };
    // Only `KeyboardInterrupt` itself: the interpreter treats its subclasses like any other exception.
    if error.get_type(py).is(py.get_type::<PyKeyboardInterrupt>()) {
        return None;
    }
    if !error.is_instance_of::<PySystemExit>(py) {
        return Some(1);
    }
    let Ok(code) = error.value(py).getattr("code") else {
        return Some(1);
    };
    if code.is_none() {
        Some(0)
    } else if code.is_instance_of::<PyInt>() {
        // The interpreter's own answer for a number that C cannot hold.
        Some(code.extract().unwrap_or(-1))
    } else {
        Some(1)
    }
}
