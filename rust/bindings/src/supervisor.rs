//! The supervisor: every method converts its arguments, releases the interpreter, and calls the engine.

use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dsl_engine::forkserver::Patience;
use dsl_engine::spec::Console;
use dsl_engine::{Error, Flushed, Handle, Waited};
use pyo3::prelude::*;

use crate::error::{Answer, spec_error};
use crate::event;
use crate::guard::Guard;
use crate::spec::{Launch, Policy, Worker, fork_server, seconds};
use crate::{lock, patiently};

/// Starts, watches and ends one worker group at a time.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Supervisor {
    handle: Mutex<Option<Arc<Handle>>>,
}

impl Supervisor {
    fn handle(&self) -> Result<Arc<Handle>, Error> {
        let handle = lock(&self.handle).clone().ok_or(Error::Closed)?;
        if handle.is_forked() {
            return Err(Error::Forked);
        }
        Ok(handle)
    }

    /// Asks the engine's thread for something, without the interpreter.
    fn ask<T: Send>(
        &self,
        py: Python<'_>,
        question: impl FnOnce(&Handle) -> Result<T, Error> + Send,
    ) -> Answer<T> {
        let handle = self.handle()?;
        Ok(py.detach(|| question(&handle))?)
    }

    /// Takes the handle, if there is one of this process.
    fn take(&self) -> Option<Arc<Handle>> {
        let handle = lock(&self.handle).take()?;
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
    fn new(py: Python<'_>, guard: Option<&Bound<'_, Guard>>) -> Answer<Self> {
        let unused = || spec_error("call Guard.enter_agent first, and use it once");
        let agent = guard.map(|guard| guard.get().take_agent().ok_or_else(unused));
        let agent = agent.transpose()?;
        let handle = py.detach(|| Handle::new(agent))?;
        Ok(Self {
            handle: Mutex::new(Some(Arc::new(handle))),
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
    ) -> Answer<usize> {
        let spec = fork_server(py, words, env, cwd, cpus, mempolicy)?;
        let patience = Patience {
            slow: seconds(slow_s)?,
            ..Patience::default()
        };
        self.ask(py, |handle| handle.start_fork_server(spec, patience))
    }

    /// Take the branch of a warm server, over the connection with this number, as fork server.
    fn join_fork_server(&self, py: Python<'_>, fd: i32, is_prepared: bool) -> Answer<usize> {
        let link = dsl_engine::os::take_over(fd)?;
        self.ask(py, |handle| handle.join_fork_server(link, is_prepared))
    }

    /// Check limits, then begin to spawn.
    fn start(&self, py: Python<'_>, spec: Launch<'_>) -> Answer<()> {
        let spec = spec.convert(py)?;
        self.ask(py, |handle| handle.start(spec))
    }

    /// Add a worker to the running group.
    fn add(&self, py: Python<'_>, worker: Worker<'_>) -> Answer<usize> {
        let worker = worker.convert()?;
        self.ask(py, |handle| handle.add(worker))
    }

    /// Next events, in order; an empty list after ``timeout_s``.
    #[pyo3(signature = (timeout_s = None, *, routine = true))]
    fn wait<'py>(
        &self,
        py: Python<'py>,
        timeout_s: Option<f64>,
        routine: bool,
    ) -> Answer<Vec<Bound<'py, PyAny>>> {
        let handle = self.handle()?;
        let timeout: Option<Duration> = timeout_s.map(seconds).transpose()?;
        match patiently(py, |pending| handle.wait(timeout, routine, pending))?? {
            Waited::Interrupted => Err(Error::Forked.into()),
            Waited::TimedOut | Waited::Woken => Ok(Vec::new()),
            Waited::Events(events) => {
                let events = events.into_iter().map(|event| event::to_python(py, event));
                Ok(events.collect::<PyResult<_>>()?)
            }
        }
    }

    /// Let views into the job call at a socket of this name, in a folder of this user alone.
    fn listen(&self, py: Python<'_>, folder: PathBuf, name: &str) -> Answer<()> {
        self.ask(py, |handle| handle.listen(&folder, name))
    }

    /// Take those who have called. The caller owns the descriptors.
    fn callers(&self, py: Python<'_>) -> Answer<Vec<i32>> {
        let taken = self.ask(py, Handle::take_callers)?;
        Ok(taken.into_iter().map(IntoRawFd::into_raw_fd).collect())
    }

    /// Remove the socket.
    fn unlisten(&self, py: Python<'_>) -> Answer<()> {
        self.ask(py, Handle::unlisten)
    }

    /// Pids of the group's workers, by index; 0 for a worker that does not run.
    fn pids(&self, py: Python<'_>) -> Answer<Vec<i32>> {
        self.ask(py, Handle::pids)
    }

    /// The last line of each worker whose output the engine passes on, by index.
    fn last_lines(&self, py: Python<'_>) -> Answer<HashMap<usize, Cow<'static, [u8]>>> {
        let lines = self.ask(py, Handle::last_lines)?.into_iter();
        Ok(lines.map(|(worker, line)| (worker, Cow::Owned(line))).collect())
    }

    /// Make the present or the next wait return an empty list.
    fn wake(&self) {
        // A signal handler may call this just after the supervisor was closed. Then no thread waits.
        if let Ok(handle) = self.handle() {
            handle.wake();
        }
    }

    /// A descriptor that is readable while `wait(0)` would return events.
    fn fileno(&self) -> Answer<i32> {
        Ok(self.handle()?.as_fd().as_raw_fd())
    }

    /// Send a signal to one worker's process group, or to all. After SIGTSTP to all, workers that are not started
    /// yet wait for SIGCONT.
    #[pyo3(signature = (signum, worker = None))]
    fn signal(&self, signum: i32, worker: Option<usize>) -> Answer<()> {
        Ok(self.handle()?.signal(signum, worker)?)
    }

    /// Begin to stop the group.
    #[pyo3(signature = (*, signum = 15, grace_s = None))]
    fn stop(&self, signum: i32, grace_s: Option<f64>) -> Answer<()> {
        let grace = grace_s.map(seconds).transpose()?;
        Ok(self.handle()?.stop(signum, grace)?)
    }

    /// SIGKILL to every process of the group, now.
    fn kill(&self) -> Answer<()> {
        Ok(self.handle()?.kill()?)
    }

    /// Let a socket, pipe or file, which stays the caller's, get what the consoles show, too.
    fn tee(&self, fd: i32) -> Answer<()> {
        Ok(self.handle()?.tee(dsl_engine::os::duplicate(fd)?)?)
    }

    /// Wait until the console has taken the output that ended groups left.
    #[pyo3(signature = (stream = None))]
    fn flush(&self, py: Python<'_>, stream: Option<i32>) -> Answer<(u64, Option<i32>)> {
        let console = match stream {
            None => None,
            Some(1) => Some(Console::Stdout),
            Some(2) => Some(Console::Stderr),
            Some(_) => return Err(spec_error("stream must be 1, 2 or None").into()),
        };
        let flushed = flush(py, &*self.handle()?, console)?;
        Ok((flushed.dropped, flushed.signal))
    }

    /// Wait for the console, kill what is left, wait for it, and end the engine thread.
    fn close(&self, py: Python<'_>) -> Answer<()> {
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
    fn __enter__(slf: Bound<'_, Self>) -> Answer<Bound<'_, Self>> {
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
    ) -> Answer<()> {
        if let (false, Ok(handle)) = (kind.is_none(), self.handle()) {
            handle.give_up_output();
        }
        self.close(py)
    }
}

/// Waits for a console. Signal handlers of the program run meanwhile, and an exception in a handler ends the wait.
fn flush(py: Python<'_>, handle: &Handle, console: Option<Console>) -> Answer<Flushed> {
    let flushed = patiently(py, |pending| handle.flush(console, pending))?;
    Ok(flushed.ok_or(Error::Closed)?)
}
