//! Signals to the job: what each means now, and how the supervisor reacts.

use std::time::{Duration, Instant};

use crate::error::Error;
use crate::event::{Event, SignalAction, StopReason};
use crate::group::Input;
use crate::mux::Mux;
use crate::signals::{Meaning, Moment, Reach, Verdict};
use crate::supervisor::guard_link::is_to_whole_step;
use crate::supervisor::job::Job;
use crate::supervisor::{ORPHAN_DELAY, Supervisor};
use crate::sys::session_leader;
use crate::sys::signal::Received;

/// The longest time that a guard needs to pass on a signal.
const KEY_PATIENCE: Duration = Duration::from_millis(200);

impl Supervisor {
    pub(super) fn take_signals(&mut self, inputs: &mut Vec<Input>) -> Result<(), Error> {
        loop {
            let Some(link) = &self.link else { return Ok(()) };
            let Some(received) = link.receive()? else {
                return Ok(());
            };
            if received.signal == libc::SIGCHLD {
                self.orphans_due.get_or_insert(Instant::now() + ORPHAN_DELAY);
                self.check_if_clearing();
            } else {
                // Workers that have died by now did not die of this signal.
                for input in std::mem::take(inputs) {
                    self.step(input);
                }
                self.take_signal(received);
            }
        }
    }

    /// A worker in the terminal's process group may die of a key such as Ctrl-C before our guard has passed the
    /// signal on, and any worker of the notice of a preemption that a scheduler sends to all processes. So wait for
    /// the signal: otherwise the worker would count as failed, and the others would get another signal.
    pub(super) fn await_key(&mut self, worker: usize, inputs: &mut Vec<Input>) -> Result<(), Error> {
        let Some((number, until)) = self
            .may_be_early(worker)
            .filter(|(_, until)| self.moment() < *until)
        else {
            return Ok(());
        };
        self.raise_the_dead(number);
        let deadline = Instant::now() + KEY_PATIENCE;
        loop {
            self.take_signals(inputs)?;
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(link) = self.link.as_ref().filter(|link| !link.has_lost_guard) else {
                return Ok(());
            };
            if left.is_zero() || self.moment() >= until {
                return Ok(());
            }
            link.await_signal(left)?;
        }
    }

    /// The signal of which a dead worker may have died before we hear of it, and what the job is at once we do.
    fn may_be_early(&mut self, worker: usize) -> Option<(i32, Moment)> {
        let table = self.link.as_ref()?.table;
        let is_foreground = self.is_foreground(worker);
        if !is_foreground && !table.has_preemption() {
            return None;
        }
        let number = self.deadly_signal(worker)?;
        match table.meaning(number)? {
            Meaning::Stop if is_foreground => Some((number, Moment::Ending)),
            Meaning::Preempt => Some((number, Moment::Preempted)),
            _ => None,
        }
    }

    fn take_signal(&mut self, received: Received) {
        let moment = self.moment();
        let Some(link) = &mut self.link else { return };
        if link.is_end_of_guard(received) {
            self.guard_lost();
            return;
        }
        if link.table.is_deaf_to(received) || link.is_copy(received, Instant::now()) {
            return;
        }
        if link.asks(received, Instant::now()) && moment != Moment::Ending {
            self.events.push(Event::SignalReceived {
                signal: received.signal,
                action: SignalAction::Explain,
                from_terminal: true,
            });
            return;
        }
        self.job_control.hear(received.signal);
        if link.table.is_reopening(received) && self.is_to_go_on() {
            self.reopen_logs(received);
            return;
        }
        let Some(link) = &mut self.link else { return };
        let verdict = link.decide(received.signal, moment);
        if self.is_to_end(received.signal) && self.is_only_writing() {
            self.consoles.end_waiting(Some(received.signal));
        }
        let is_for_nobody = verdict == Verdict::Forward && self.job.is_none();
        if verdict != Verdict::Ignore && !is_for_nobody {
            self.events.push(Event::SignalReceived {
                signal: received.signal,
                action: verdict.action(),
                from_terminal: received.from_terminal,
            });
        }
        match verdict {
            Verdict::Forward => self.forward(received),
            Verdict::Stop | Verdict::Preempt => self.stop_for(received, verdict),
            Verdict::Hurry => {
                if let Some(mux) = self.mux.as_ref().filter(|_| !self.only_tells()) {
                    mux.hurry();
                }
                self.stop_for(received, verdict);
            }
            Verdict::Note | Verdict::Ignore => self.remember(received.signal),
        }
    }

    /// Whether the job has log files and was not asked to end. Between two attempts the files may be closed.
    fn is_to_go_on(&self) -> bool {
        let is_asked = self.early_stop.is_some()
            || self
                .job
                .as_ref()
                .is_some_and(|job| job.group().wanted_end().is_some());
        !is_asked && self.has_log_files
    }

    fn is_to_end(&self, signal: i32) -> bool {
        let meaning = self.link.as_ref().and_then(|link| link.table.meaning(signal));
        matches!(meaning, Some(Meaning::Stop | Meaning::Preempt))
    }

    /// Whether the group's owner decides what a signal does.
    fn only_tells(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.group().tells_signals())
    }

    /// Whether nothing of the job is left but output to write.
    fn is_only_writing(&self) -> bool {
        self.job.is_none() || self.mux.as_ref().is_some_and(Mux::is_finishing)
    }

    /// How far the job is from its end when a signal comes. A job that is to end before its next group counts as
    /// ending.
    fn moment(&self) -> Moment {
        match &self.job {
            Some(job) => job.group().moment(),
            None if self.early_stop.is_some() => Moment::Ending,
            None => Moment::Running,
        }
    }

    fn stop_for(&mut self, received: Received, verdict: Verdict) {
        let signal = received.signal;
        let Some(job) = &self.job else {
            self.remember(signal);
            return;
        };
        let preempt_grace = self.link.as_ref().and_then(|link| link.preempt_grace);
        let input = match verdict {
            Verdict::Preempt => Input::Preempt {
                signal,
                grace: preempt_grace.unwrap_or(job.spec().grace),
            },
            _ => Input::Stop {
                reason: StopReason::Signal(signal),
                signal,
                grace: if verdict == Verdict::Hurry {
                    Duration::ZERO
                } else {
                    job.spec().grace
                },
            },
        };
        self.reach = self.reach_of(received);
        self.step(input);
        self.reach = Reach::Nobody;
    }

    /// Remembers a signal to end the job. A group that ends for another reason might be followed by another attempt,
    /// and the signal must prevent that.
    fn remember(&mut self, signal: i32) {
        let group = self.job.as_ref().map(Job::group);
        if self.is_to_end(signal)
            && !self.only_tells()
            && group.is_none_or(|group| group.stop_signal().is_none())
        {
            self.early_stop.get_or_insert(signal);
        }
    }

    /// Applies to a new group what happened while there was no group.
    pub(super) fn catch_up(&mut self) {
        if self.link.as_ref().is_some_and(|link| link.has_lost_guard) {
            self.step(Input::Kill {
                reason: StopReason::GuardLost,
            });
        }
        if let Some(signal) = self.early_stop.take() {
            self.step(Input::Stop {
                reason: StopReason::Signal(signal),
                signal,
                grace: Duration::ZERO,
            });
        }
    }

    /// Reopens the log files that the engine writes. Workers must reopen the files that they write themselves.
    fn reopen_logs(&mut self, received: Received) {
        if let Some(mux) = &self.mux {
            mux.reopen();
        }
        self.events.push(Event::SignalReceived {
            signal: received.signal,
            action: SignalAction::Reopen,
            from_terminal: false,
        });
    }

    fn forward(&self, received: Received) {
        if self.only_tells() {
            return;
        }
        if received.signal == libc::SIGWINCH {
            self.spawner.resize();
        }
        if let Some(mux) = self.mux.as_ref().filter(|_| received.signal == libc::SIGWINCH) {
            // The workers get the signal once their terminals have the new size.
            mux.resize(received.from_terminal);
        } else if let Some(job) = &self.job {
            job.broadcast(received.signal, self.reach_of(received));
        }
    }

    fn reach_of(&self, received: Received) -> Reach {
        match &self.link {
            Some(link) if link.has_reached_foreground(received, session_leader()) => Reach::Foreground,
            Some(_) if is_to_whole_step(received) && !self.is_below_step() => Reach::Everybody,
            _ => Reach::Nobody,
        }
    }

    /// Whether the workers are in a control group of their own below that of a Slurm step. slurmstepd looks only at
    /// its own group for whom to signal.
    fn is_below_step(&self) -> bool {
        let path = self.cgroup.as_ref().map(|cgroup| cgroup.path().to_string_lossy());
        path.is_some_and(|path| path.contains("/step_"))
    }

    pub(super) fn guard_lost(&mut self) {
        if let Some(link) = &mut self.link {
            link.drop_guard(&self.poller);
        }
        self.consoles.end_waiting(None);
        if self.job.is_none() {
            // There is nothing to kill, but an owner that waits to start another group must learn that the job ends.
            self.events.push(Event::Stopping {
                reason: StopReason::GuardLost,
                signal: libc::SIGKILL,
                grace: Duration::ZERO,
            });
        }
        self.step(Input::Kill {
            reason: StopReason::GuardLost,
        });
    }
}

#[cfg(test)]
mod tests;
