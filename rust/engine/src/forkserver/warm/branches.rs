//! The branches of a warm server, and the end of what dead branches have left.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::clearing::{Clearing, Left, Next};
use crate::error::Error;
use crate::forkserver::message::Report;
use crate::forkserver::socket;
use crate::forkserver::wire::Wire as _;
use crate::orphans::{Orphans, reap_orphans};
use crate::poller::{Poller, is_readable};
use crate::sys::wait::{Target, try_wait};
use crate::tree::{Scope, Tree};

/// Time that a branch has to end when the engine has hung up.
const BRANCH_PATIENCE: Duration = Duration::from_secs(2);

pub(super) struct Branch {
    number: u64,
    /// Number of the job, which may have several branches.
    job: u64,
    pid: i32,
    pidfd: OwnedFd,
    /// Our copy of the job's connection: it shows when the engine has hung up.
    call: OwnedFd,
    /// When a branch that goes on without an engine is killed.
    due: Option<Instant>,
}

/// The branches that live, and what others have left.
#[derive(Default)]
pub(super) struct Branches {
    pub(super) living: Vec<Branch>,
    /// The end of what dead branches have left, and when to go on with it.
    clearing: Option<(Clearing, Instant)>,
    /// Connections with the engines of dead branches, which wait for that end.
    bereaved: Vec<OwnedFd>,
}

impl Branches {
    /// Watches a branch that was forked for a call. The poller reports its end by `number`, and that of its job by the
    /// number after it.
    pub(super) fn add(
        &mut self,
        number: u64,
        job: u64,
        pid: i32,
        call: OwnedFd,
        poller: &Poller,
    ) -> Result<(), Error> {
        let process = Pid::from_raw(pid).ok_or(Error::Closed)?;
        let pidfd = pidfd_open(process, PidfdFlags::empty()).map_err(Error::os("watch a branch"))?;
        poller.watch(&pidfd, number)?;
        poller.watch_end(&call, number + 1)?;
        self.living.push(Branch {
            number,
            job,
            pid,
            pidfd,
            call,
            due: None,
        });
        Ok(())
    }

    /// Whether none lives, and nothing is left of others.
    pub(super) fn are_over(&self) -> bool {
        self.living.is_empty() && self.clearing.is_none()
    }

    /// How many jobs have branches.
    pub(super) fn jobs(&self) -> usize {
        let jobs: BTreeSet<u64> = self.living.iter().map(|branch| branch.job).collect();
        jobs.len()
    }

    pub(super) fn pids(&self) -> Vec<i32> {
        self.living.iter().map(|branch| branch.pid).collect()
    }

    /// When there is something to do though nothing has happened.
    pub(super) fn due(&self) -> Option<Instant> {
        let branches = self.living.iter().filter_map(|branch| branch.due);
        let clearing = self.clearing.as_ref().map(|(_, due)| *due);
        branches.chain(clearing).min()
    }

    /// Kills branches that go on for too long without an engine.
    pub(super) fn kill_late(&mut self, now: Instant) {
        for branch in &mut self.living {
            if branch.due.take_if(|due| *due <= now).is_some() {
                let _ = pidfd_send_signal(&branch.pidfd, Signal::KILL);
            }
        }
    }

    /// Reacts to the end of a branch or of its job. Returns whether a branch has ended.
    pub(super) fn attend(&mut self, token: u64, poller: &Poller) -> bool {
        let mut branches = self.living.iter();
        let Some(place) = branches.position(|branch| branch.number == token & !1) else {
            return false;
        };
        let branch = &mut self.living[place];
        if is_readable(&branch.pidfd) {
            let branch = self.living.remove(place);
            self.bury(branch, poller);
            return true;
        }
        if token != branch.number {
            poller.forget(&branch.call);
            branch.due = Some(Instant::now() + BRANCH_PATIENCE);
        }
        false
    }

    /// Reaps a dead branch, tells its engine how it ended, and begins to end what it has left. That is nothing unless
    /// the branch was killed.
    fn bury(&mut self, branch: Branch, poller: &Poller) {
        poller.forget(&branch.pidfd);
        poller.forget(&branch.call);
        // It is our child and dead. Until it is reaped, others see for themselves how it has ended.
        if let Ok(Some(death)) = try_wait(Target::Pid(branch.pid), false) {
            let _ = socket::send(&branch.call, &Report::Died { death }.encode(), &[], false);
        }
        let _ = try_wait(Target::Pid(branch.pid), true);
        self.bereaved.push(branch.call);
        self.begin_to_clear();
    }

    fn begin_to_clear(&mut self) {
        let clearing = Clearing::begin(Tree::open(), Left::default());
        self.clearing = Some((clearing, Instant::now()));
    }

    /// Reaps dead children, and goes on with the end of what is left. `spared`: children that stay.
    pub(super) fn reap(&mut self, spared: &[i32]) {
        let is_left = reap_orphans(spared) == Orphans::Alive;
        match &mut self.clearing {
            Some((_, due)) => *due = Instant::now(),
            None if is_left => self.begin_to_clear(),
            None => {}
        }
    }

    /// Goes on with the end of what is left, if it is time.
    pub(super) fn clear_some(&mut self, spared: &[i32], now: Instant) {
        let Some((clearing, due)) = &mut self.clearing else {
            return;
        };
        if *due > now {
            return;
        }
        match clearing.look(Scope::below_us(spared), false) {
            Next::LookAgain(pause) => *due = Instant::now() + pause,
            end => {
                self.clearing = None;
                for call in self.bereaved.drain(..) {
                    if end == Next::Done {
                        let _ = socket::send(&call, &Report::Cleared.encode(), &[], false);
                    }
                }
            }
        }
    }
}
