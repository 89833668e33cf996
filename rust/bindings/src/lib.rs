//! The extension module `dsl._core`: converts values, releases the interpreter, calls the engine, maps errors.

#![allow(
    clippy::needless_pass_by_value,
    reason = "PyO3 makes the arguments, of any sequence and any path"
)]

mod error;
mod event;
mod fork;
mod guard;
mod hub;
mod program;
mod spec;
mod supervisor;
mod warm;

use std::sync::{Mutex, MutexGuard, PoisonError};

use error::Answer;
use pyo3::prelude::*;
use pyo3::types::PyDict;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Version, target and profile of the extension.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    info.set_item("version", env!("CARGO_PKG_VERSION"))?;
    info.set_item("target", format!("{}-linux", std::env::consts::ARCH))?;
    let is_debug = cfg!(debug_assertions);
    info.set_item("profile", if is_debug { "debug" } else { "release" })?;
    Ok(info)
}

/// Kernel interfaces that the engine uses if it can, by name. The value is empty, or says why the engine does
/// without.
#[pyfunction]
fn kernel_interfaces(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let info = PyDict::new(py);
    for (name, why) in dsl_engine::Features::from_environment().account() {
        info.set_item(name, why)?;
    }
    Ok(info)
}

/// State letter, milliseconds of processor time, bytes of resident memory and number of threads.
type Vitals = (char, u64, u64, u32);

/// What each of these processes uses; None for a process that has ended or cannot be seen.
#[pyfunction]
fn vitals(py: Python<'_>, pids: Vec<i32>) -> Vec<Option<Vitals>> {
    let found = py.detach(|| dsl_engine::procfs::vitals(&pids));
    let plain =
        |one: dsl_engine::procfs::Vitals| (char::from(one.state), one.cpu_ms, one.rss_bytes, one.threads);
    found.into_iter().map(|one| one.map(plain)).collect()
}

/// Listens on a TCP port for an instant; see [`dsl_engine::ports::probe`].
#[pyfunction]
fn probe_port(port: u16) -> Answer<u16> {
    Ok(dsl_engine::ports::probe(port)?)
}

/// Pid of the process at the other end of a unix socket; see [`dsl_engine::peer::Peer`].
#[pyfunction]
fn peer_pid(fd: i32) -> Answer<i32> {
    let socket = dsl_engine::os::duplicate(fd)?;
    let peer = dsl_engine::peer::Peer::of(&socket).map_err(std::io::Error::from)?;
    Ok(peer.pid())
}

/// Whether our terminal can redraw a line; see [`dsl_engine::can_move_cursor`].
#[pyfunction]
fn can_move_cursor() -> bool {
    dsl_engine::can_move_cursor()
}

/// Supervision engine of dsl.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::error::{BindingError, EngineError, LimitError, SpecError};
    #[pymodule_export]
    use super::fork::{ForkLink, ForkOrder};
    #[pymodule_export]
    use super::guard::Guard;
    #[pymodule_export]
    use super::hub::{Hub, Link, Stream, connect, fd_stream};
    #[pymodule_export]
    use super::program::ForkedProgram;
    #[pymodule_export]
    use super::supervisor::Supervisor;
    #[pymodule_export]
    use super::warm::{
        FileMarks, WarmCall, WarmDoor, is_in_job, warm_answer, warm_call, warm_digest, warm_join, warm_key,
        warm_listen, warm_obstacle,
    };
    #[pymodule_export]
    use super::{build_info, can_move_cursor, kernel_interfaces, peer_pid, probe_port, vitals};

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
