//! Signals to the job: what each means now, and how the supervisor reacts.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::event::{Event, SignalAction, StopReason};
use crate::group::Input;
use crate::guard::{Agent, is_parent};
use crate::kernel_file;
use crate::mux::{Mux, Order};
use crate::poller::Poller;
use crate::signals::{GUARD_DEATH, Meaning, Moment, Reach, Requests, Verdict, decide};
use crate::supervisor::Watched;
use crate::supervisor::{ORPHAN_DELAY, Supervisor};
use crate::sys::session_leader;
use crate::sys::signal::{self, Received, SignalSet};

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
        let table = self.link.as_ref()?.agent.table;
        let spec = self.job.as_ref().and_then(|job| job.spec.workers.get(worker));
        let is_foreground = spec.is_some_and(|spec| spec.foreground);
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
        let (moment, now) = (self.moment(), Instant::now());
        let Some(link) = &mut self.link else { return };
        if link.is_end_of_guard(received) {
            self.guard_lost();
            return;
        }
        if link.agent.table.is_deaf_to(received) || link.requests.is_copy(&link.agent.table, received, now) {
            return;
        }
        if link.requests.asks(&link.agent.table, received, now) && moment != Moment::Ending {
            self.events.push(Event::SignalReceived {
                signal: received.signal,
                action: SignalAction::Explain,
                from_terminal: true,
            });
            return;
        }
        self.job_control.hear(received.signal);
        if link.agent.table.is_reopening(received) && self.is_to_go_on() {
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
                .is_some_and(|job| job.group.wanted_end().is_some());
        !is_asked && self.has_log_files
    }

    fn is_to_end(&self, signal: i32) -> bool {
        let meaning = self
            .link
            .as_ref()
            .and_then(|link| link.agent.table.meaning(signal));
        matches!(meaning, Some(Meaning::Stop | Meaning::Preempt))
    }

    /// Whether the group's owner decides what a signal does.
    fn only_tells(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.group.tells_signals())
    }

    /// Whether nothing of the job is left but output to write.
    fn is_only_writing(&self) -> bool {
        self.job.is_none() || self.mux.as_ref().is_some_and(Mux::is_finishing)
    }

    /// How far the job is from its end when a signal comes. A job that is to end before its next group counts as
    /// ending.
    fn moment(&self) -> Moment {
        match &self.job {
            Some(job) => job.group.moment(),
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
        let preempt_grace = self.link.as_ref().and_then(|link| link.agent.preempt_grace);
        let input = match verdict {
            Verdict::Preempt => Input::Preempt {
                signal,
                grace: preempt_grace.unwrap_or(job.spec.grace),
            },
            _ => Input::Stop {
                reason: StopReason::Signal(signal),
                signal,
                grace: if verdict == Verdict::Hurry {
                    Duration::ZERO
                } else {
                    job.spec.grace
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
        let group = self.job.as_ref().map(|job| &job.group);
        if self.is_to_end(signal)
            && !self.only_tells()
            && group.is_none_or(|group| group.stop_signal.is_none())
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
            mux.order(Order::Reopen);
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
            mux.order(Order::Resize {
                from_terminal: received.from_terminal,
            });
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

pub(super) struct GuardLink {
    intake: OwnedFd,
    pub(super) agent: Agent,
    /// The guard is gone.
    has_lost_guard: bool,
    requests: Requests,
    stops: usize,
}

impl GuardLink {
    pub(super) fn new(poller: &Poller, agent: Agent) -> Result<Self, Error> {
        let own = SignalSet::of(&[libc::SIGCHLD, GUARD_DEATH]);
        let set = SignalSet(agent.table.taken().0 | own.0);
        let intake = signal::intake(set).map_err(Error::os("signalfd"))?;
        poller.watch(&intake, Watched::Intake.encode())?;
        if let Some(guard) = &agent.guard {
            poller.watch(guard, Watched::Guard.encode())?;
        }
        Ok(Self {
            intake,
            agent,
            has_lost_guard: false,
            requests: Requests::default(),
            stops: 0,
        })
    }

    /// The next signal, if one is waiting.
    fn receive(&self) -> Result<Option<Received>, Error> {
        let received = signal::read_intake(self.intake.as_fd()).map_err(Error::os("read signals"))?;
        Ok(received.map(|received| Received {
            // A seccomp profile may have kept the guard from marking the signal.
            passed_on: received.passed_on || received.sender == self.agent.guard_pid,
            ..received
        }))
    }

    /// Waits until a signal has come or the time is over.
    fn await_signal(&self, timeout: Duration) -> Result<(), Error> {
        let waited = signal::wait_readable(self.intake.as_fd(), Some(timeout), SignalSet::ALL);
        waited.map(drop).map_err(Error::os("poll"))
    }

    /// Whether the signal has also reached the other processes of the terminal's foreground group, as a key does.
    ///
    /// A terminal that hangs up tells only the leader of its session. If that is our guard, nobody else has heard. If it
    /// is another process, the kernel tells the group when the leader ends. If the leader tells us itself, it may have
    /// told the guard alone: a shell tells the group, and `tini` its child. A worker had better hear of it twice than
    /// never.
    fn has_reached_foreground(&self, received: Received, session_leader: i32) -> bool {
        let is_by_kernel = received.sender == 0 && session_leader != self.agent.guard_pid;
        received.from_terminal && (received.signal != libc::SIGHUP || is_by_kernel)
    }

    /// Whether the signal says that the guard is dead.
    fn is_end_of_guard(&self, received: Received) -> bool {
        received.signal == GUARD_DEATH && self.agent.guard.is_none() && !is_parent(self.agent.guard_pid)
    }

    /// What a signal means now.
    fn decide(&mut self, number: i32, moment: Moment) -> Verdict {
        let verdict = decide(self.agent.table.meaning(number), self.stops, moment);
        if matches!(verdict, Verdict::Stop | Verdict::Hurry | Verdict::Note) {
            self.stops += 1;
        }
        verdict
    }

    /// Notes that the guard is gone, and closes its descriptor, which would stay readable for ever.
    fn drop_guard(&mut self, poller: &Poller) {
        self.has_lost_guard = true;
        if let Some(guard) = self.agent.guard.take() {
            poller.forget(&guard);
        }
    }
}

/// Whether a signal has reached all processes of our step by itself: some configurations let slurmstepd signal every
/// process, the agent as well as the workers, and others only the guard, which passes the signal on.
fn is_to_whole_step(received: Received) -> bool {
    let is_direct = !received.passed_on && received.sender > 0;
    let name = || kernel_file::read(format!("/proc/{}/comm", received.sender));
    is_direct && name().is_ok_and(|name| name.trim_ascii_end() == b"slurmstepd")
}

impl Verdict {
    /// The action that events report for this verdict.
    fn action(self) -> SignalAction {
        match self {
            Self::Forward => SignalAction::Forward,
            Self::Stop | Self::Hurry => SignalAction::Stop,
            Self::Preempt => SignalAction::Preempt,
            Self::Note | Self::Ignore => SignalAction::Ignore,
        }
    }
}

/// What has suspended the job.
#[derive(Debug, Default)]
pub(super) struct JobControl {
    /// A signal to the job, such as by Ctrl-Z. The suspension holds for the next attempts, too.
    by_signal: bool,
    /// The owner of this group.
    by_owner: bool,
}

impl JobControl {
    /// Notes a signal to the job, whatever else it means now.
    fn hear(&mut self, signal: i32) {
        self.by_signal = stands_after(signal).unwrap_or(self.by_signal);
    }

    /// Notes a signal that the owner sends to all workers of the group.
    pub(super) fn send(&mut self, signal: i32) {
        self.by_owner = stands_after(signal).unwrap_or(self.by_owner);
    }

    /// Notes that another group begins.
    pub(super) fn begin(&mut self) {
        self.by_owner = false;
    }

    pub(super) fn stands_still(&self) -> bool {
        self.by_signal || self.by_owner
    }
}

/// Whether the job is suspended after this signal; `None` if the signal changes nothing.
fn stands_after(signal: i32) -> Option<bool> {
    match signal {
        libc::SIGTSTP => Some(true),
        libc::SIGCONT => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
