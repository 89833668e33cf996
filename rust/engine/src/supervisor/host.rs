//! What an agent has and a supervisor inside somebody's program has not: the job's signals and its guard.

use std::os::fd::{AsFd, OwnedFd};

use crate::error::Error;
use crate::event::SignalAction;
use crate::guard::Agent;
use crate::poller::Poller;
use crate::signals::{Verdict, decide};
use crate::supervisor::source::Source;
use crate::sys::signal::{self, Received, SignalSet};

pub(super) struct Host {
    intake: OwnedFd,
    guard: Option<OwnedFd>,
    /// Process group of a foreground worker.
    pub(super) foreground_group: i32,
    stops: usize,
}

impl Host {
    pub(super) fn new(poller: &Poller, agent: Agent) -> Result<Self, Error> {
        let set = SignalSet(agent.taken.0 | SignalSet::of(&[libc::SIGCHLD]).0);
        let intake = signal::intake(set).map_err(Error::os("signalfd"))?;
        poller.watch(&intake, Source::Intake.encode())?;
        if let Some(guard) = &agent.guard {
            poller.watch(guard, Source::Guard.encode())?;
        }
        Ok(Self {
            intake,
            guard: agent.guard,
            foreground_group: agent.foreground_group,
            stops: 0,
        })
    }

    /// The next signal, if one is waiting.
    pub(super) fn receive(&self) -> Result<Option<Received>, Error> {
        signal::read_intake(self.intake.as_fd()).map_err(Error::os("read signals"))
    }

    /// What a signal means now; `ending` says that the group is being ended already.
    pub(super) fn decide(&mut self, number: i32, ending: bool) -> Verdict {
        let verdict = decide(number, self.stops, ending);
        if matches!(verdict, Verdict::Stop | Verdict::Hurry | Verdict::Note) {
            self.stops += 1;
        }
        verdict
    }

    /// The guard is gone; its descriptor would be readable for ever.
    pub(super) fn drop_guard(&mut self, poller: &Poller) {
        if let Some(guard) = self.guard.take() {
            poller.forget(&guard);
        }
    }
}

impl Verdict {
    /// The word for it in events.
    pub(super) fn action(self) -> SignalAction {
        match self {
            Self::Forward => SignalAction::Forward,
            Self::Stop | Self::Hurry => SignalAction::Stop,
            Self::Note | Self::Ignore => SignalAction::Ignore,
        }
    }
}
