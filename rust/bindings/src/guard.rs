//! Guard and agent.

use dsl_engine::os::take_over;
use dsl_engine::{Agent, Features, Guard as Engine, Meaning, Table};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use std::sync::Mutex;

use crate::error::{Answer, spec_error};
use crate::event::{record, survivors};
use crate::lock;
use crate::spec::{items, seconds};

/// The process that the shell sees.
#[pyclass(frozen, module = "dsl._core")]
pub(crate) struct Guard {
    engine: Engine,
    agent: Mutex<Option<Agent>>,
}

impl Guard {
    pub(crate) fn take_agent(&self) -> Option<Agent> {
        lock(&self.agent).take()
    }
}

const SIGINT: i32 = 2;

fn table(signals: &Bound<'_, PyAny>) -> Answer<Table> {
    let mut entries = Vec::new();
    for item in items(signals)? {
        let (key, value): (Bound<'_, PyAny>, String) = item.extract()?;
        let signal = key.extract::<i32>().map_err(|error| {
            if error.is_instance_of::<PyOverflowError>(key.py()) {
                no_such_signal(&key)
            } else {
                error
            }
        })?;
        let meaning = match value.as_str() {
            "stop" => Meaning::Stop,
            "forward" => Meaning::Forward,
            "preempt" => Meaning::Preempt,
            other => {
                return Err(spec_error(format!(
                    "signal {signal} can mean \"stop\", \"forward\" or \"preempt\", got {other:?}"
                ))
                .into());
            }
        };
        entries.push((signal, meaning));
    }
    Ok(Table::new(entries)?)
}

fn no_such_signal(signal: impl std::fmt::Display) -> PyErr {
    spec_error(format!(
        "there is no signal {signal}: signals have the numbers 1 to 64"
    ))
}

/// The signal mask of these signals, in the kernel's form.
fn mask_of(signals: &Bound<'_, PyAny>) -> PyResult<u64> {
    let mut mask = 0;
    for signal in signals.try_iter()? {
        let signal: u32 = signal?.extract()?;
        let bit = signal.checked_sub(1).and_then(|place| 1_u64.checked_shl(place));
        mask |= bit.ok_or_else(|| no_such_signal(signal))?;
    }
    Ok(mask)
}

/// Gives SIGINT its default action again. Python's own handler would record a SIGINT that is not meant for us, and
/// the record would never be read.
fn give_back_interrupt(py: Python<'_>) -> PyResult<()> {
    let signal = py.import("signal")?;
    let handler = signal.call_method1("getsignal", (SIGINT,))?;
    if handler.is(&signal.getattr("default_int_handler")?) {
        signal.call_method1("signal", (SIGINT, signal.getattr("SIG_DFL")?))?;
    }
    Ok(())
}

#[pymethods]
impl Guard {
    #[new]
    #[pyo3(signature = (signals = None, *, preempt_grace_s = None, helper = None, mask = None))]
    fn new(
        py: Python<'_>,
        signals: Option<&Bound<'_, PyAny>>,
        preempt_grace_s: Option<f64>,
        helper: Option<i32>,
        mask: Option<&Bound<'_, PyAny>>,
    ) -> Answer<Self> {
        let table = signals.map(table).transpose()?.unwrap_or_default();
        let preempt_grace = preempt_grace_s.map(seconds).transpose()?;
        if table.meaning(SIGINT).is_none() {
            give_back_interrupt(py)?;
        }
        let features = Features::from_environment();
        let mask = mask.map(mask_of).transpose()?;
        let mut engine = Engine::new(features, table, preempt_grace, mask)?;
        if let Some(helper) = helper {
            engine.tend(helper);
        }
        Ok(Self {
            engine,
            agent: Mutex::new(None),
        })
    }

    /// In the parent of the fork: wait for the agent, forwarding signals.
    #[pyo3(signature = (agent_pid, grace_s, *, reopens = false, links = None))]
    fn supervise<'py>(
        &self,
        py: Python<'py>,
        agent_pid: i32,
        grace_s: f64,
        reopens: bool,
        links: Option<Vec<i32>>,
    ) -> Answer<Bound<'py, PyAny>> {
        let grace = seconds(grace_s)?;
        let links = links.into_iter().flatten().map(take_over);
        let links = links.collect::<Result<Vec<_>, _>>()?;
        let outcome = py.detach(|| self.engine.supervise(agent_pid, grace, reopens, &links))?;
        let left = survivors(py, outcome.survivors)?;
        let interrupted = outcome.terminal_interrupt;
        let (code, signal, ended) = (outcome.code, outcome.agent_signal, outcome.ended);
        Ok(record(
            py,
            "GuardOutcome",
            (code, signal, ended, left, interrupted),
        )?)
    }

    /// Remove what the guard has made, if it gets no agent.
    fn discard(&self) {
        self.engine.discard();
    }

    /// In the child of the fork: own process group, subreaper, room for descriptors, watch the guard.
    #[pyo3(signature = (workers = 0))]
    fn enter_agent(&self, workers: usize) -> Answer<()> {
        let agent = self.engine.enter_agent(workers)?;
        *lock(&self.agent) = Some(agent);
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
