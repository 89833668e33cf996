//! Guard and agent.

use dsl_engine::{Agent, Features, Guard as Engine};
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

use crate::error::to_python;
use crate::event::survivors;
use crate::spec::seconds;

/// The process that the shell sees.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Guard {
    engine: Engine,
    agent: Mutex<Option<Agent>>,
}

impl Guard {
    pub(crate) fn take_agent(&self) -> Option<Agent> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// What became of the agent.
#[pyclass(frozen, get_all, module = "dsl._core")]
pub(crate) struct GuardOutcome {
    code: u8,
    agent_signal: Option<i32>,
    ended: usize,
    survivors: Vec<(i32, String, String)>,
    terminal_interrupt: bool,
}

#[pymethods]
impl Guard {
    #[new]
    fn new() -> PyResult<Self> {
        let features = Features::from_environment();
        let engine = Engine::new(features).map_err(to_python)?;
        Ok(Self {
            engine,
            agent: Mutex::new(None),
        })
    }

    /// In the parent of the fork: wait for the agent, forwarding signals.
    #[pyo3(signature = (agent_pid, grace_s, *, reopens = false))]
    fn supervise(
        &self,
        py: Python<'_>,
        agent_pid: i32,
        grace_s: f64,
        reopens: bool,
    ) -> PyResult<GuardOutcome> {
        let grace = seconds(grace_s)?;
        let outcome = py
            .detach(|| self.engine.supervise(agent_pid, grace, reopens))
            .map_err(to_python)?;
        Ok(GuardOutcome {
            code: outcome.code,
            agent_signal: outcome.agent_signal,
            ended: outcome.ended,
            survivors: survivors(outcome.survivors),
            terminal_interrupt: outcome.terminal_interrupt,
        })
    }

    /// In the child of the fork: own process group, subreaper, watch the guard.
    fn enter_agent(&self) -> PyResult<()> {
        let agent = self.engine.enter_agent().map_err(to_python)?;
        *self.agent.lock().unwrap_or_else(PoisonError::into_inner) = Some(agent);
        Ok(())
    }

    /// Random token that every process of the job carries in ``DSL_JOB_ID``.
    #[getter]
    fn job_id(&self) -> &str {
        self.engine.token()
    }

    /// The guard's pid.
    #[getter]
    fn pid(&self) -> i32 {
        self.engine.pid()
    }
}
