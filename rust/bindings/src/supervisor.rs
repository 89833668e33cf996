//! The supervisor: every method converts its arguments, releases the interpreter, and calls the engine.

use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dsl_engine::forkserver::Patience;
use dsl_engine::spec::Console;
use dsl_engine::{Error, Flushed, Handle, Waited};
use pyo3::prelude::*;

use crate::error::{spec_error, to_python};
use crate::event;
use crate::guard::Guard;
use crate::spec::{Launch, Policy, Worker, fork_server, seconds};

/// Starts, watches and ends one worker group at a time.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Supervisor {
    handle: Mutex<Option<std::sync::Arc<Handle>>>,
}

impl Supervisor {
    fn slot(&self) -> MutexGuard<'_, Option<std::sync::Arc<Handle>>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn handle(&self) -> PyResult<std::sync::Arc<Handle>> {
        let handle = self.slot().clone().ok_or_else(|| to_python(Error::Closed))?;
        if handle.is_forked() {
            return Err(to_python(Error::Forked));
        }
        Ok(handle)
    }

    /// Takes the handle, if there is one of this process.
    fn take(&self) -> Option<std::sync::Arc<Handle>> {
        let handle = self.slot().take()?;
        if handle.is_forked() {
            std::mem::forget(handle);
            return None;
        }
        Some(handle)
    }
}

/// Ends the group of a supervisor that was never closed. That takes a while, and other threads go on meanwhile.
impl Drop for Supervisor {
    fn drop(&mut self) {
        if let Some(handle) = self.take() {
            // If we cannot attach to the interpreter, the handle is dropped all the same.
            let _ = Python::try_attach(|py| py.detach(move || drop(handle)));
        }
    }
}

#[pymethods]
impl Supervisor {
    #[new]
    #[pyo3(signature = (*, guard = None))]
    fn new(py: Python<'_>, guard: Option<&Bound<'_, Guard>>) -> PyResult<Self> {
        let agent = match guard {
            Some(guard) => Some(
                guard
                    .get()
                    .take_agent()
                    .ok_or_else(|| spec_error("call Guard.enter_agent first, and use it once"))?,
            ),
            None => None,
        };
        let handle = py.detach(|| Handle::new(agent)).map_err(to_python)?;
        Ok(Self {
            handle: Mutex::new(Some(std::sync::Arc::new(handle))),
        })
    }

    /// Execute a fork server.
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of the Python method")]
    #[pyo3(signature = (words, *, env = None, cwd = None, cpus = None, mempolicy = None, slow_s = 30.0))]
    fn start_fork_server(
        &self,
        py: Python<'_>,
        words: &Bound<'_, PyAny>,
        env: Option<&Bound<'_, PyAny>>,
        cwd: Option<&Bound<'_, PyAny>>,
        cpus: Option<Vec<u32>>,
        mempolicy: Option<Policy>,
        slow_s: f64,
    ) -> PyResult<usize> {
        let handle = self.handle()?;
        let spec = fork_server(py, words, env, cwd, cpus, mempolicy)?;
        let patience = Patience {
            slow: seconds(slow_s)?,
            ..Patience::default()
        };
        py.detach(|| handle.start_fork_server(spec, patience))
            .map_err(to_python)
    }

    /// Take the branch of a warm server, over the connection with this number, as fork server.
    fn join_fork_server(&self, py: Python<'_>, fd: i32, is_prepared: bool) -> PyResult<usize> {
        let handle = self.handle()?;
        let link = dsl_engine::os::take_over(fd)?;
        py.detach(|| handle.join_fork_server(link, is_prepared))
            .map_err(to_python)
    }

    /// Check limits, then begin to spawn.
    fn start(&self, py: Python<'_>, spec: Launch<'_>) -> PyResult<()> {
        let handle = self.handle()?;
        let spec = std::sync::Arc::new(spec.convert(py)?);
        py.detach(|| handle.start(spec)).map_err(to_python)
    }

    /// Add a worker to the running group.
    fn add(&self, py: Python<'_>, worker: Worker<'_>) -> PyResult<usize> {
        let handle = self.handle()?;
        let worker = worker.convert()?;
        py.detach(|| handle.add(worker)).map_err(to_python)
    }

    /// Next events, in order; an empty list after ``timeout_s``.
    #[pyo3(signature = (timeout_s = None, *, routine = true))]
    fn wait<'py>(
        &self,
        py: Python<'py>,
        timeout_s: Option<f64>,
        routine: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let handle = self.handle()?;
        let timeout: Option<Duration> = timeout_s.map(seconds).transpose()?;
        let mut raised: Option<PyErr> = None;
        let waited = py
            .detach(|| {
                handle.wait(timeout, routine, || {
                    Python::attach(|py| match py.check_signals() {
                        Ok(()) => false,
                        Err(error) => {
                            raised = Some(error);
                            true
                        }
                    })
                })
            })
            .map_err(to_python)?;
        match waited {
            Waited::Interrupted => Err(raised.unwrap_or_else(|| to_python(Error::Forked))),
            Waited::TimedOut | Waited::Woken => Ok(Vec::new()),
            Waited::Events(events) => events
                .into_iter()
                .map(|event| event::to_python(py, event))
                .collect(),
        }
    }

    /// Let views into the job call at a socket of this name, in a folder of this user alone.
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 makes it of any path")]
    fn listen(&self, py: Python<'_>, folder: PathBuf, name: &str) -> PyResult<()> {
        let handle = self.handle()?;
        py.detach(|| handle.listen(&folder, name)).map_err(to_python)
    }

    /// Take those who have called. The caller owns the descriptors.
    fn callers(&self, py: Python<'_>) -> PyResult<Vec<i32>> {
        let handle = self.handle()?;
        let taken = py.detach(|| handle.take_callers()).map_err(to_python)?;
        Ok(taken.into_iter().map(IntoRawFd::into_raw_fd).collect())
    }

    /// Remove the socket.
    fn unlisten(&self, py: Python<'_>) -> PyResult<()> {
        let handle = self.handle()?;
        py.detach(|| handle.unlisten()).map_err(to_python)
    }

    /// Pids of the group's workers, by index; 0 for a worker that does not run.
    fn pids(&self, py: Python<'_>) -> PyResult<Vec<i32>> {
        let handle = self.handle()?;
        py.detach(|| handle.pids()).map_err(to_python)
    }

    /// The last line of each worker whose output the engine passes on, by index.
    fn last_lines(&self, py: Python<'_>) -> PyResult<HashMap<usize, Cow<'static, [u8]>>> {
        let handle = self.handle()?;
        let lines = py.detach(|| handle.last_lines()).map_err(to_python)?;
        Ok(lines
            .into_iter()
            .map(|(worker, line)| (worker, Cow::Owned(line)))
            .collect())
    }

    /// Make the present or the next wait return an empty list.
    fn wake(&self) {
        // A signal handler may call this just after the supervisor was closed. Then no thread waits.
        if let Ok(handle) = self.handle() {
            handle.wake();
        }
    }

    /// A descriptor that is readable while `wait(0)` would return events.
    fn fileno(&self) -> PyResult<i32> {
        Ok(self.handle()?.as_fd().as_raw_fd())
    }

    /// Send a signal to one worker's process group, or to all. After SIGTSTP to all, workers that are not started
    /// yet wait for SIGCONT.
    #[pyo3(signature = (signum, worker = None))]
    fn signal(&self, signum: i32, worker: Option<usize>) -> PyResult<()> {
        self.handle()?.signal(signum, worker).map_err(to_python)
    }

    /// Begin to stop the group.
    #[pyo3(signature = (*, signum = 15, grace_s = None))]
    fn stop(&self, signum: i32, grace_s: Option<f64>) -> PyResult<()> {
        let grace = grace_s.map(seconds).transpose()?;
        self.handle()?.stop(signum, grace).map_err(to_python)
    }

    /// SIGKILL to every process of the group, now.
    fn kill(&self) -> PyResult<()> {
        self.handle()?.kill().map_err(to_python)
    }

    /// Let a socket, pipe or file, which stays the caller's, get what the consoles show, too.
    fn tee(&self, fd: i32) -> PyResult<()> {
        let handle = self.handle()?;
        let copy = dsl_engine::os::duplicate(fd)?;
        handle.tee(copy).map_err(to_python)
    }

    /// Wait until the console has taken the output that ended groups left.
    #[pyo3(signature = (stream = None))]
    fn flush(&self, py: Python<'_>, stream: Option<i32>) -> PyResult<(u64, Option<i32>)> {
        let console = match stream {
            None => None,
            Some(1) => Some(Console::Stdout),
            Some(2) => Some(Console::Stderr),
            Some(_) => return Err(spec_error("stream must be 1, 2 or None")),
        };
        let flushed = flush(py, &*self.handle()?, console)?;
        Ok((flushed.dropped, flushed.signal))
    }

    /// Wait for the console, kill what is left, wait for it, and end the engine thread.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let handle = self.take();
        let flushed = match &handle {
            Some(handle) => flush(py, handle, None).map(drop),
            None => Ok(()),
        };
        py.detach(|| {
            if let Some(handle) = handle {
                handle.close();
            }
        });
        flushed
    }

    /// The supervisor itself; the end of the block closes it.
    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().handle()?;
        Ok(slf)
    }

    /// Close; after an exception, without waiting for the console.
    #[pyo3(signature = (kind, error, trace, /))]
    #[expect(unused_variables, reason = "an exception goes on, whichever it is")]
    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        if let (false, Ok(handle)) = (kind.is_none(), self.handle()) {
            handle.give_up_output();
        }
        self.close(py)
    }
}

/// Waits for a console. Signal handlers of the program run meanwhile, and an exception in a handler ends the wait.
fn flush(py: Python<'_>, handle: &Handle, console: Option<Console>) -> PyResult<Flushed> {
    let mut raised: Option<PyErr> = None;
    let flushed = py.detach(|| {
        handle.flush(console, || {
            Python::attach(|py| match py.check_signals() {
                Ok(()) => false,
                Err(error) => {
                    raised = Some(error);
                    true
                }
            })
        })
    });
    flushed.ok_or_else(|| raised.unwrap_or_else(|| to_python(Error::Closed)))
}
