//! The job's signals and its guard. An agent has both; a supervisor inside a user's program has neither.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::event::SignalAction;
use crate::guard::{Agent, is_parent};
use crate::kernel_file;
use crate::poller::Poller;
use crate::signals::{GUARD_DEATH, Moment, Requests, Table, Verdict, decide};
use crate::supervisor::watched::Watched;
use crate::sys::signal::{self, Received, SignalSet};

pub(super) struct GuardLink {
    intake: OwnedFd,
    guard: Option<OwnedFd>,
    guard_pid: i32,
    /// The guard is gone.
    pub(super) has_lost_guard: bool,
    pub(super) table: Table,
    /// Time that a preemption leaves; `None` for the group's grace.
    pub(super) preempt_grace: Option<Duration>,
    /// Process group of a foreground worker.
    pub(super) foreground_group: i32,
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
            guard: agent.guard,
            guard_pid: agent.guard_pid,
            has_lost_guard: false,
            table: agent.table,
            preempt_grace: agent.preempt_grace,
            foreground_group: agent.foreground_group,
            requests: Requests::default(),
            stops: 0,
        })
    }

    /// The next signal, if one is waiting.
    pub(super) fn receive(&self) -> Result<Option<Received>, Error> {
        let received = signal::read_intake(self.intake.as_fd()).map_err(Error::os("read signals"))?;
        Ok(received.map(|received| Received {
            // A seccomp profile may have kept the guard from marking the signal.
            passed_on: received.passed_on || received.sender == self.guard_pid,
            ..received
        }))
    }

    /// Waits until a signal has come or the time is over.
    pub(super) fn await_signal(&self, timeout: Duration) -> Result<(), Error> {
        let waited = signal::wait_readable(self.intake.as_fd(), Some(timeout), SignalSet::ALL);
        waited.map(drop).map_err(Error::os("poll"))
    }

    /// Whether the signal only repeats a request of a moment ago.
    pub(super) fn is_copy(&mut self, received: Received, now: Instant) -> bool {
        self.requests.is_copy(&self.table, received, now)
    }

    /// Whether the signal, which is no copy, asks what the workers do.
    pub(super) fn asks(&mut self, received: Received, now: Instant) -> bool {
        self.requests.asks(&self.table, received, now)
    }

    /// Whether the signal has also reached the other processes of the terminal's foreground group, as a key does.
    ///
    /// A terminal that hangs up tells only the leader of its session. If that is our guard, nobody else has heard. If it
    /// is another process, the kernel tells the group when the leader ends. If the leader tells us itself, it may have
    /// told the guard alone: a shell tells the group, and `tini` its child. A worker had better hear of it twice than
    /// never.
    pub(super) fn has_reached_foreground(&self, received: Received, session_leader: i32) -> bool {
        let is_by_kernel = received.sender == 0 && session_leader != self.guard_pid;
        received.from_terminal && (received.signal != libc::SIGHUP || is_by_kernel)
    }

    /// Whether the signal says that the guard is dead.
    pub(super) fn is_end_of_guard(&self, received: Received) -> bool {
        received.signal == GUARD_DEATH && self.guard.is_none() && !is_parent(self.guard_pid)
    }

    /// What a signal means now.
    pub(super) fn decide(&mut self, number: i32, moment: Moment) -> Verdict {
        let verdict = decide(self.table.meaning(number), self.stops, moment);
        if matches!(verdict, Verdict::Stop | Verdict::Hurry | Verdict::Note) {
            self.stops += 1;
        }
        verdict
    }

    /// Notes that the guard is gone, and closes its descriptor, which would stay readable for ever.
    pub(super) fn drop_guard(&mut self, poller: &Poller) {
        self.has_lost_guard = true;
        if let Some(guard) = self.guard.take() {
            poller.forget(&guard);
        }
    }
}

/// Whether a signal has reached all processes of our step by itself: some configurations let slurmstepd signal every
/// process, the agent as well as the workers, and others only the guard, which passes the signal on.
pub(super) fn is_to_whole_step(received: Received) -> bool {
    let is_direct = !received.passed_on && received.sender > 0;
    let name = || kernel_file::read(format!("/proc/{}/comm", received.sender));
    is_direct && name().is_ok_and(|name| name.trim_ascii_end() == b"slurmstepd")
}

impl Verdict {
    /// The action that events report for this verdict.
    pub(super) fn action(self) -> SignalAction {
        match self {
            Self::Forward => SignalAction::Forward,
            Self::Stop | Self::Hurry => SignalAction::Stop,
            Self::Preempt => SignalAction::Preempt,
            Self::Note | Self::Ignore => SignalAction::Ignore,
        }
    }
}
