//! What the guard decides while the agent works: values in, values out.

use std::time::{Duration, Instant};

use crate::mux::LAST_OUTPUT;
use crate::signals::{Passage, Requests, Table, decide_passage};
use crate::sys::signal::Received;
use crate::sys::wait::Death;

/// Time beyond the grace period after which a living agent counts as stuck. It covers killing the workers,
/// reporting that, and waiting for a console.
const AGENT_PATIENCE: Duration = Duration::from_secs(10).saturating_add(LAST_OUTPUT);

/// Signals seen while watching the agent, and the deadline for its end.
pub(super) struct Watch {
    table: Table,
    grace: Duration,
    preempt_grace: Duration,
    /// The job has log files.
    reopens: bool,
    requests: Requests,
    deadline: Option<Instant>,
    /// Whether the terminal's Ctrl-C was among the signals.
    pub(super) terminal_interrupt: bool,
}

impl Watch {
    /// `preempt_grace`: time that a preemption leaves (`None`: the grace).
    pub(super) fn new(table: Table, grace: Duration, preempt_grace: Option<Duration>, reopens: bool) -> Self {
        Self {
            table,
            grace,
            preempt_grace: preempt_grace.unwrap_or(grace),
            reopens,
            requests: Requests::default(),
            deadline: None,
            terminal_interrupt: false,
        }
    }

    /// Notes a signal that has just come. Returns what to do about it.
    pub(super) fn hear(&mut self, received: Received, now: Instant) -> Passage {
        if self.table.is_deaf_to(received) {
            return Passage::Repeated;
        }
        let is_copy = self.requests.is_copy(&self.table, received, now);
        if !is_copy && self.requests.asks(&self.table, received, now) {
            return Passage::Plain;
        }
        let passage = decide_passage(&self.table, received, is_copy, self.reopens);
        match passage {
            Passage::Stop => {
                self.terminal_interrupt |= received.signal == libc::SIGINT && received.from_terminal;
                let deadline = now + self.grace + AGENT_PATIENCE;
                // A stop can shorten the time that a preemption leaves.
                self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
            }
            Passage::Preempt => {
                self.deadline
                    .get_or_insert(now + self.preempt_grace + AGENT_PATIENCE);
            }
            Passage::Repeated | Passage::Plain | Passage::Suspend | Passage::Stall => {}
        }
        passage
    }

    /// Time until the deadline; `None` without one.
    pub(super) fn timeout(&self, now: Instant) -> Option<Duration> {
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(now))
    }

    /// Whether to kill the agent. True once per deadline.
    pub(super) fn is_overdue(&mut self, now: Instant) -> bool {
        self.deadline.take_if(|deadline| now >= *deadline).is_some()
    }
}

/// The command's exit code after this end of the agent.
pub(super) fn exit_code(death: &Death) -> u8 {
    let status = death.status as u8;
    if death.signaled {
        128u8.saturating_add(status)
    } else {
        status
    }
}

#[cfg(test)]
mod tests;
