//! The life of a worker group as a pure state machine: its input is what has happened, its output is what to do.
//!
//! The supervisor owns processes and descriptors. Every decision is made here, without system calls and with the time
//! as an argument, so that each rule can be tested with a table.

use std::time::{Duration, Instant};

use crate::event::StopReason;
use crate::signals::Moment;
use crate::spec::{LaunchSpec, OnFailure, SignalScope};

/// Time that processes which outlive their workers get before they are killed.
const STRAGGLER_GRACE: Duration = Duration::from_secs(2);
/// Processes that workers have started are told to end so long before the end of a grace period, if they do not hear
/// the workers' signals. Of a short grace period they get the second half.
const HELPER_GRACE: Duration = Duration::from_secs(1);
/// What workers have left running when all of them ended well is reported if it has not ended after this time.
const LEFTOVER_NOTICE: Duration = Duration::from_secs(2);
/// Time that the kernel gets to carry out SIGKILL. Processes that are left then are reported as survivors.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// How often a kill is repeated while processes are left.
pub(crate) const KILL_RETRY: Duration = Duration::from_millis(100);

/// Something that has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// The group has one more worker to start.
    Added,
    /// A worker's program runs.
    Started,
    /// A worker ended; `running` says whether it had started.
    WorkerEnded { running: bool, failed: bool },
    /// The group is to be stopped.
    Stop {
        reason: StopReason,
        signal: i32,
        grace: Duration,
    },
    /// The job will lose its machine: the workers get this signal, and this much time to end by themselves.
    Preempt { signal: i32, grace: Duration },
    /// The group is to be killed at once.
    Kill { reason: StopReason },
    /// Whether no process of the job is left: the answer to [`Action::CheckTree`].
    Tree { empty: bool },
    /// Time has passed.
    Tick,
}

/// Something that the supervisor must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send this signal to every running worker.
    Broadcast(i32),
    /// Report workers that have not been started as cancelled.
    CancelPending,
    /// Tell the owner that the group is being stopped.
    ReportStop {
        reason: StopReason,
        signal: i32,
        grace: Duration,
    },
    /// Look whether any process of the job is left, and answer with [`Input::Tree`].
    CheckTree,
    /// Tell the owner what the workers have left running, and how long it may still run.
    ReportLeftovers { grace: Duration },
    /// Ask processes that outlived their workers to end.
    TerminateTree,
    /// Ask all processes but the workers to end: the grace period of the workers is nearly over.
    TerminateHelpers,
    /// Send SIGKILL to every process of the job. If `first`, also tell the owner.
    KillTree { first: bool },
    /// Report the end of the group; `survivors` if some processes did not die.
    End { survivors: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// `helpers_due`: when the processes that the workers have started are told to end; `None` if they were told.
    /// `preempted`: the workers were only told of a preemption, not of a stop.
    Stopping {
        deadline: Instant,
        helpers_due: Option<Instant>,
        preempted: bool,
    },
    /// All workers have ended well. What they have left running has the grace period to end by itself.
    /// `notice`: when it is reported; `None` if it was. `asked`: when it is told to end.
    Lingering {
        deadline: Instant,
        notice: Option<Instant>,
        asked: Instant,
    },
    Sweeping {
        deadline: Instant,
    },
    Killing {
        deadline: Instant,
        retry: Instant,
    },
    Ended,
}

/// State of one worker group.
#[derive(Debug, Clone)]
pub(crate) struct Group {
    phase: Phase,
    on_failure: OnFailure,
    grace: Duration,
    scope: SignalScope,
    /// Whether processes that outlive their workers have the grace period, if all workers end well.
    lingers: bool,
    /// Whether the group goes on without workers, until it is stopped.
    stays_open: bool,
    /// How many workers may run at the same time.
    at_once: usize,
    has_failed: bool,
    pending: usize,
    running: usize,
    /// The signal by which the user ended the job.
    pub(crate) stop_signal: Option<i32>,
    /// What the owner was told; `None` if the group itself reacts to signals.
    told: Option<Told>,
}

/// Signals to the job that were only reported to the owner.
#[derive(Debug, Clone, Copy)]
struct Told {
    /// The moment that the group would have reached by these signals.
    moment: Moment,
    /// The first signal by which the user wants the job to end.
    signal: Option<i32>,
}

const UNTOLD: Told = Told {
    moment: Moment::Running,
    signal: None,
};

impl Group {
    /// `lingers`: processes that outlive their workers have the grace period, if all workers end well.
    pub(crate) fn new(launch: &LaunchSpec, lingers: bool) -> Self {
        Self {
            phase: Phase::Running,
            on_failure: launch.on_failure,
            grace: launch.grace,
            scope: launch.signal_scope,
            lingers,
            stays_open: launch.stays_open,
            at_once: launch.at_once.unwrap_or(usize::MAX),
            has_failed: false,
            pending: launch.workers.len(),
            running: 0,
            stop_signal: None,
            told: launch.tells_signals.then_some(UNTOLD),
        }
    }

    /// Whether what the workers have left running has time to end by itself.
    pub(crate) fn is_lingering(&self) -> bool {
        matches!(self.phase, Phase::Lingering { .. })
    }

    /// Whether workers may still be started.
    pub(crate) fn may_start(&self) -> bool {
        self.phase == Phase::Running && self.pending > 0
    }

    /// Whether the group takes further workers.
    pub(crate) fn may_add(&self) -> bool {
        self.phase == Phase::Running
    }

    /// Whether one more worker may run now, beside those that run and those that were ordered.
    pub(crate) fn has_room(&self, ordered: usize) -> bool {
        self.running + ordered < self.at_once
    }

    /// How many workers have not ended.
    pub(crate) fn left(&self) -> usize {
        self.running + self.pending
    }

    /// Whether the group waits for processes that outlived their workers, or for a kill.
    pub(crate) fn is_clearing(&self) -> bool {
        self.is_lingering() || matches!(self.phase, Phase::Sweeping { .. } | Phase::Killing { .. })
    }

    /// Whether the processes that a worker has started are told to end when it has ended: the group is being stopped,
    /// and they have not heard of it.
    pub(crate) fn owes_word_to_helpers(&self) -> bool {
        let owes = matches!(
            self.phase,
            Phase::Stopping {
                helpers_due: Some(_),
                ..
            }
        );
        owes
    }

    /// How far the group is from its end when a signal comes.
    pub(crate) fn moment(&self) -> Moment {
        let moment = match self.phase {
            Phase::Running => Moment::Running,
            Phase::Stopping { preempted: true, .. } | Phase::Lingering { .. } => Moment::Preempted,
            _ => Moment::Ending,
        };
        self.told.map_or(moment, |told| told.moment.max(moment))
    }

    /// The signal by which the user wants the job to end. The group stops by it, or its owner was told.
    pub(crate) fn wanted_end(&self) -> Option<i32> {
        self.stop_signal
            .or_else(|| self.told.and_then(|told| told.signal))
    }

    /// Whether signals to the job are only told to the owner.
    pub(crate) fn tells_signals(&self) -> bool {
        self.told.is_some()
    }

    /// When the next [`Input::Tick`] is due.
    pub(crate) fn next_tick(&self) -> Option<Instant> {
        match self.phase {
            Phase::Running | Phase::Ended => None,
            Phase::Stopping {
                deadline,
                helpers_due,
                ..
            } => Some(helpers_due.map_or(deadline, |due| due.min(deadline))),
            Phase::Lingering { notice, asked, .. } => Some(notice.map_or(asked, |notice| notice.min(asked))),
            Phase::Sweeping { deadline } => Some(deadline),
            Phase::Killing { deadline, retry } => Some(deadline.min(retry)),
        }
    }

    /// Handles one input. Carry out the actions in order.
    pub(crate) fn step(&mut self, now: Instant, input: Input) -> Vec<Action> {
        if let Some(told) = &mut self.told {
            let heard = match input {
                Input::Stop {
                    reason: StopReason::Signal(number),
                    ..
                } => Some((number, Moment::Ending)),
                Input::Preempt { signal, .. } => Some((signal, Moment::Preempted)),
                _ => None,
            };
            if let Some((number, moment)) = heard {
                told.moment = told.moment.max(moment);
                told.signal.get_or_insert(number);
                return Vec::new();
            }
        }
        match input {
            Input::Added => {
                self.pending += 1;
                Vec::new()
            }
            Input::Started => {
                self.pending -= 1;
                self.running += 1;
                Vec::new()
            }
            Input::WorkerEnded { running, failed } => self.worker_ended(now, running, failed),
            Input::Stop {
                reason,
                signal,
                grace,
            } => self.stop(now, reason, signal, grace),
            Input::Preempt { signal, grace } => self.preempt(now, signal, grace),
            Input::Kill { reason } => self.kill(now, reason),
            Input::Tree { empty } => self.tree(now, empty),
            Input::Tick => self.tick(now),
        }
    }

    fn worker_ended(&mut self, now: Instant, running: bool, failed: bool) -> Vec<Action> {
        if running {
            self.running -= 1;
        } else {
            self.pending -= 1;
        }
        self.has_failed |= failed;
        if self.phase == Phase::Ended {
            return Vec::new();
        }
        if failed && self.phase == Phase::Running && self.on_failure == OnFailure::Stop {
            let mut actions = Vec::new();
            if self.left() > 0 {
                actions = self.stop(now, StopReason::Failure, libc::SIGTERM, self.grace);
            }
            if self.running == 0 {
                actions.push(Action::CheckTree);
            }
            return actions;
        }
        if self.stays_open && self.phase == Phase::Running {
            return Vec::new();
        }
        self.check_if_none_left().into_iter().collect()
    }

    fn check_if_none_left(&self) -> Option<Action> {
        (self.left() == 0).then_some(Action::CheckTree)
    }

    fn stop(&mut self, now: Instant, reason: StopReason, signal: i32, grace: Duration) -> Vec<Action> {
        if let StopReason::Signal(number) = reason {
            self.stop_signal.get_or_insert(number);
        }
        let wanted = now + grace;
        let helpers_wanted = now + time_of_helpers(grace);
        // Processes that outlive the workers get no more time than the workers.
        self.grace = self.grace.min(grace);
        match &mut self.phase {
            Phase::Running => {
                self.phase = Phase::Stopping {
                    deadline: wanted,
                    helpers_due: (self.scope == SignalScope::Rank).then_some(helpers_wanted),
                    preempted: false,
                };
                let report = Action::ReportStop {
                    reason,
                    signal,
                    grace,
                };
                let mut actions = vec![report, Action::Broadcast(signal)];
                actions.extend(self.cancel_pending());
                actions.extend(self.check_if_none_left());
                actions
            }
            Phase::Stopping {
                deadline,
                helpers_due,
                preempted,
            } => {
                let was_preempted = std::mem::take(preempted);
                *deadline = wanted.min(*deadline);
                *helpers_due = helpers_due.map(|due| due.min(helpers_wanted));
                if was_preempted {
                    vec![Action::Broadcast(signal)]
                } else {
                    self.kill_if_due(now)
                }
            }
            Phase::Lingering { deadline, .. } => {
                let deadline = wanted.min(*deadline).min(now + STRAGGLER_GRACE);
                let report = Action::ReportStop {
                    reason,
                    signal,
                    grace,
                };
                let mut actions = vec![report];
                actions.extend(self.sweep(deadline));
                actions.extend(self.kill_if_due(now));
                actions
            }
            Phase::Sweeping { deadline } => {
                *deadline = wanted.min(*deadline);
                self.kill_if_due(now)
            }
            Phase::Killing { .. } | Phase::Ended => Vec::new(),
        }
    }

    /// Ends what the workers have left running, whose time is over.
    fn sweep(&mut self, deadline: Instant) -> [Action; 2] {
        self.phase = Phase::Sweeping { deadline };
        let grace = Duration::ZERO;
        [Action::ReportLeftovers { grace }, Action::TerminateTree]
    }

    /// Changes nothing for a group that is being stopped already.
    fn preempt(&mut self, now: Instant, signal: i32, grace: Duration) -> Vec<Action> {
        if self.phase != Phase::Running {
            return Vec::new();
        }
        let actions = self.stop(now, StopReason::Signal(signal), signal, grace);
        if let Phase::Stopping { preempted, .. } = &mut self.phase {
            *preempted = true;
        }
        actions
    }

    /// Each cancelled worker comes back as [`Input::WorkerEnded`]. If none is running, the tree is checked then.
    fn cancel_pending(&self) -> Option<Action> {
        (self.pending > 0).then_some(Action::CancelPending)
    }

    fn kill(&mut self, now: Instant, reason: StopReason) -> Vec<Action> {
        match self.phase {
            Phase::Killing { .. } | Phase::Ended => Vec::new(),
            Phase::Running => {
                let report = Action::ReportStop {
                    reason,
                    signal: libc::SIGKILL,
                    grace: Duration::ZERO,
                };
                let mut actions = vec![report];
                actions.extend(self.start_killing(now));
                actions.extend(self.cancel_pending());
                actions.extend(self.check_if_none_left());
                actions
            }
            Phase::Stopping { .. } | Phase::Lingering { .. } | Phase::Sweeping { .. } => {
                self.start_killing(now)
            }
        }
    }

    fn kill_if_due(&mut self, now: Instant) -> Vec<Action> {
        match self.phase {
            Phase::Stopping { deadline, .. } | Phase::Sweeping { deadline } if deadline <= now => {
                self.start_killing(now)
            }
            _ => Vec::new(),
        }
    }

    fn start_killing(&mut self, now: Instant) -> Vec<Action> {
        self.phase = Phase::Killing {
            deadline: now + KILL_PATIENCE,
            retry: now + KILL_RETRY,
        };
        vec![Action::KillTree { first: true }]
    }

    fn tree(&mut self, now: Instant, empty: bool) -> Vec<Action> {
        if self.left() > 0 {
            return Vec::new();
        }
        match self.phase {
            Phase::Ended => Vec::new(),
            _ if empty => self.end(false),
            Phase::Running if self.lingers && !self.has_failed => {
                let asked = now + time_of_helpers(self.grace);
                self.phase = Phase::Lingering {
                    deadline: now + self.grace,
                    notice: Some(now + LEFTOVER_NOTICE).filter(|notice| *notice < asked),
                    asked,
                };
                Vec::new()
            }
            Phase::Running | Phase::Stopping { .. } => {
                self.phase = Phase::Sweeping {
                    deadline: now + self.grace.min(STRAGGLER_GRACE),
                };
                vec![Action::TerminateTree]
            }
            Phase::Lingering { .. } | Phase::Sweeping { .. } | Phase::Killing { .. } => Vec::new(),
        }
    }

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        match &mut self.phase {
            Phase::Running | Phase::Ended => Vec::new(),
            Phase::Stopping {
                deadline,
                helpers_due,
                ..
            } if *deadline > now => {
                let due = helpers_due.take_if(|due| *due <= now);
                due.map(|_| Action::TerminateHelpers).into_iter().collect()
            }
            Phase::Stopping { .. } | Phase::Sweeping { .. } => self.kill_if_due(now),
            Phase::Lingering { deadline, asked, .. } if *asked <= now => {
                let deadline = *deadline;
                self.sweep(deadline).to_vec()
            }
            Phase::Lingering { deadline, notice, .. } => {
                let grace = *deadline - now;
                let due = notice.take_if(|notice| *notice <= now);
                due.map(|_| Action::ReportLeftovers { grace })
                    .into_iter()
                    .collect()
            }
            Phase::Killing { deadline, retry } => {
                if *deadline <= now {
                    return self.end(true);
                }
                if *retry <= now {
                    *retry = now + KILL_RETRY;
                    return vec![Action::KillTree { first: false }, Action::CheckTree];
                }
                Vec::new()
            }
        }
    }

    fn end(&mut self, survivors: bool) -> Vec<Action> {
        self.phase = Phase::Ended;
        vec![Action::End { survivors }]
    }
}

/// The part of a grace period after which processes that workers have started are told to end.
fn time_of_helpers(grace: Duration) -> Duration {
    grace.saturating_sub(HELPER_GRACE).max(grace / 2)
}

#[cfg(test)]
mod tests;
