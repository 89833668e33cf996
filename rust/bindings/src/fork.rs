//! The link of a fork server, in the server's process and in the workers that it forks.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Mutex;

use dsl_engine::forkserver::{Link, Order};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::error::Answer;
use crate::lock;

/// A fork server's connection with the engine.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct ForkLink(Mutex<Link>);

impl ForkLink {
    pub(crate) fn of(link: Link) -> Self {
        Self(Mutex::new(link))
    }
}

#[pymethods]
impl ForkLink {
    #[new]
    fn new(fd: i32) -> Answer<Self> {
        Ok(Self::of(Link::new(fd)?))
    }

    /// Note the state that imports have left.
    fn settle(&self) -> Answer<()> {
        Ok(lock(&self.0).settle()?)
    }

    /// The environment as the C library has it.
    #[staticmethod]
    fn environ(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
        let entry = |(name, value): (OsString, OsString)| [name.as_bytes(), b"=", value.as_bytes()].concat();
        PyList::new(py, std::env::vars_os().map(|pair| PyBytes::new(py, &entry(pair))))
    }

    /// Tell the engine that orders may come.
    fn ready(&self) -> Answer<()> {
        Ok(lock(&self.0).ready()?)
    }

    /// Tell the engine why no orders may come.
    fn refuse(&self, text: &str) -> Answer<()> {
        Ok(lock(&self.0).refuse(text.as_bytes())?)
    }

    /// Wait for an order.
    fn next(&self, py: Python<'_>) -> Answer<Option<ForkOrder>> {
        let order = py.detach(|| lock(&self.0).next_order())?;
        Ok(order.map(|order| ForkOrder(Mutex::new(order))))
    }

    /// Tell the engine which process was forked for an order.
    fn forked(&self, order: &Bound<'_, ForkOrder>, pid: i32) -> Answer<()> {
        let mut order = lock(&order.get().0);
        Ok(lock(&self.0).forked(&mut order, pid)?)
    }

    /// Tell the engine that no process could be forked for an order.
    fn not_forked(&self, order: &Bound<'_, ForkOrder>, errno: i32) -> Answer<()> {
        let mut order = lock(&order.get().0);
        Ok(lock(&self.0).not_forked(&mut order, errno)?)
    }

    /// End what is left below the branch of a warm server.
    fn clear(&self, py: Python<'_>) {
        py.detach(|| lock(&self.0).clear());
    }

    /// The descriptor.
    fn fileno(&self) -> i32 {
        lock(&self.0).as_fd().as_raw_fd()
    }
}

/// One worker to be forked.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct ForkOrder(Mutex<Order>);

fn words<'py>(py: Python<'py>, list: &[std::ffi::CString]) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, list.iter().map(|text| PyBytes::new(py, text.as_bytes())))
}

#[pymethods]
impl ForkOrder {
    #[getter]
    fn argv<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        words(py, lock(&self.0).argv())
    }

    #[getter]
    fn entry(&self) -> usize {
        lock(&self.0).entry()
    }

    #[getter]
    fn environ<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        words(py, lock(&self.0).environ())
    }

    #[getter]
    fn ignores_quit(&self) -> bool {
        lock(&self.0).ignores_quit()
    }

    /// Turn this process into the worker.
    fn enter(&self) {
        lock(&self.0).enter();
    }

    /// Give this process the state that imports have left in the server.
    fn take_trace(&self) {
        lock(&self.0).take_trace();
    }

    /// Make the worker's command and environment those of this process.
    fn show_command(&self, words: usize) {
        lock(&self.0).show_command(words);
    }

    /// Keep this process from calling the C exit functions of the server.
    fn forget_exit_functions(&self) {
        lock(&self.0).forget_exit_functions();
    }

    /// End this process as C's `exit` does.
    fn exit(&self, code: i64) {
        lock(&self.0).exit(code as i32);
    }
}
