//! The workers of one group, and the facts about them.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::cgroup::Cgroup;
use crate::error::Error;
use crate::event::{Ending, Event, Exit, StartFailure, Survivor};
use crate::forkserver::Ordered;
use crate::group::{Group, Input};
use crate::mux::Outcome;
use crate::poller::Poller;
use crate::procfs::{self, Stat};
use crate::signals::{Reach, acts_on_groups};
use crate::spawn::{AttemptContext, EnvTable, Prepared, Shared};
use crate::spec::{LaunchSpec, SignalScope, WorkerSpec};
use crate::starting::Starting;
use crate::supervisor::death_queue::DeathQueue;
use crate::supervisor::intake::GuardLink;
use crate::sys::signal;
use crate::sys::wait::is_stopped;

pub(super) struct Worker {
    pub(super) state: State,
    /// Whether we have sent it a signal to end.
    pub(super) ending: bool,
    /// Whether its death is noted but not collected.
    pub(super) is_dead: bool,
    /// Read ends of stdout and stderr, if they are open pipes.
    pub(super) pipes: [Option<OwnedFd>; 2],
}

pub(super) enum State {
    Pending,
    Running {
        pid: i32,
        pidfd: Option<OwnedFd>,
        started: SystemTime,
        /// The fork server whose child it is; `None` if it is our child.
        origin: Option<Origin>,
    },
    Ended,
}

/// The fork server that has forked a worker, and the number of its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) server: usize,
    pub(super) order: u64,
}

/// A worker that was ordered, or whose order has failed.
pub(super) struct Awaited {
    pub(super) server: usize,
    pub(super) outcome: Result<(Ordered, Prepared), StartFailure>,
    /// Whether its gate is watched.
    pub(super) is_watched: bool,
}

pub(super) struct Job {
    pub(super) spec: Arc<LaunchSpec>,
    env: Arc<EnvTable>,
    pub(super) workers: Vec<Worker>,
    /// Pids of all workers that were started, including dead ones.
    pub(super) leaders: Vec<i32>,
    /// The workers of `leaders`, by index.
    started: Vec<usize>,
    /// Decides which worker may start next.
    pub(super) starting: Starting<Awaited>,
    pub(super) deaths: DeathQueue,
    /// Decides what follows from an input.
    pub(super) group: Group,
    /// The first worker that failed by itself.
    pub(super) first_failure: Option<Exit>,
    /// How many processes have outlived their workers and were asked to end.
    pub(super) stragglers: usize,
    pub(super) cgroup: Option<Arc<Cgroup>>,
    oom_kills: u64,
    /// Out-of-memory kills in our own cgroup before the first worker was started.
    oom_kills_before: u64,
    /// Workers that have ended so far.
    exits: usize,
}

impl Job {
    pub(super) fn new(
        spec: LaunchSpec,
        lingers: bool,
        env: EnvTable,
        cgroup: Option<Cgroup>,
        oom_kills_before: u64,
    ) -> Self {
        let forks = spec.workers.iter().map(|worker| worker.fork);
        let servers = forks.map(|fork| fork.map(|fork| fork.server)).collect();
        Self {
            workers: spec.workers.iter().map(|_| Worker::pending()).collect(),
            group: Group::new(&spec, lingers),
            starting: Starting::new(servers),
            spec: Arc::new(spec),
            env: Arc::new(env),
            leaders: Vec::new(),
            started: Vec::new(),
            deaths: DeathQueue::default(),
            first_failure: None,
            stragglers: 0,
            cgroup: cgroup.map(Arc::new),
            oom_kills: 0,
            oom_kills_before,
            exits: 0,
        }
    }

    /// Adds a worker if `check` accepts the spec with it. Returns its index.
    pub(super) fn add(
        &mut self,
        worker: WorkerSpec,
        check: impl FnOnce(&LaunchSpec) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        let server = worker.fork.map(|fork| fork.server);
        let spec = Arc::make_mut(&mut self.spec);
        spec.workers.push(worker);
        if let Err(error) = check(spec) {
            spec.workers.pop();
            return Err(error);
        }
        self.workers.push(Worker::pending());
        self.starting.add(server);
        self.group.step(Instant::now(), Input::Added);
        Ok(self.workers.len() - 1)
    }

    /// Facts about the group that the start of each worker needs.
    pub(super) fn context<'a>(&'a self, poller: &'a Poller, link: Option<&GuardLink>) -> AttemptContext<'a> {
        AttemptContext {
            env: &self.env,
            cgroup: self.cgroup.as_deref(),
            foreground_group: link.map(|link| link.agent.foreground_group),
            poller,
        }
    }

    /// The same facts, for several threads.
    pub(super) fn shared(
        &self,
        poller: &Arc<Poller>,
        link: Option<&GuardLink>,
        token: fn(usize) -> u64,
    ) -> Shared {
        Shared {
            spec: Arc::clone(&self.spec),
            env: Arc::clone(&self.env),
            cgroup: self.cgroup.clone(),
            foreground_group: link.map(|link| link.agent.foreground_group),
            poller: Arc::clone(poller),
            token,
        }
    }

    /// The worker that has left a process with these groups and this environment, if one is more likely than any other.
    pub(super) fn worker_of(&self, stat: &Stat, environ: &[u8]) -> Option<usize> {
        let is_leader = |pid: &i32| [stat.pgrp, stat.session].contains(pid);
        if let Some(place) = self.leaders.iter().position(is_leader) {
            return Some(self.started[place]);
        }
        let entries: HashSet<&[u8]> = environ.split(|byte| *byte == 0).collect();
        let shared = |worker: &WorkerSpec| {
            let own = worker.env.iter().map(|entry| entry.text().to_bytes());
            own.filter(|entry| entries.contains(entry)).count()
        };
        let counts: Vec<usize> = self.spec.workers.iter().map(shared).collect();
        let most = counts.iter().max().filter(|most| **most > 0)?;
        let mut likely = (0..counts.len()).filter(|index| counts[*index] == *most);
        likely.next().filter(|_| likely.next().is_none())
    }

    /// Notes a worker that has started.
    pub(super) fn began(
        &mut self,
        index: usize,
        pid: i32,
        pidfd: Option<OwnedFd>,
        origin: Option<Origin>,
        now: SystemTime,
    ) {
        self.leaders.push(pid);
        self.started.push(index);
        self.workers[index].state = State::Running {
            pid,
            pidfd,
            started: now,
            origin,
        };
    }

    /// Open pipes of workers, as (worker, stream, pipe).
    pub(super) fn pipes(&self) -> impl Iterator<Item = (usize, usize, &OwnedFd)> {
        self.workers.iter().enumerate().flat_map(|(index, worker)| {
            let pipes = worker.pipes.iter().enumerate();
            pipes.filter_map(move |(stream, pipe)| Some((index, stream, pipe.as_ref()?)))
        })
    }

    /// The last event of the group.
    pub(super) fn into_ended(self, survivors: Vec<Survivor>, output: Outcome) -> Event {
        Event::Ended {
            first_failure: self.first_failure,
            stop_signal: self.group.stop_signal,
            stragglers: self.stragglers,
            survivors,
            oom_kills: self.oom_kills,
            tail: output.tail,
            shown_since: output.shown_since,
        }
    }

    /// Running workers, as (index, pid).
    pub(super) fn running(&self) -> impl Iterator<Item = (usize, i32)> {
        let workers = self.workers.iter().enumerate();
        workers.filter_map(|(index, worker)| Some((index, worker.pid()?)))
    }

    /// Notes the number of out-of-memory kills when the group has ended.
    ///
    /// The kernel also counts a kill in the cgroups above, so the counters are not added up.
    pub(super) fn count_oom_kills(&mut self, in_our_cgroup: u64) {
        let in_attempt = self.cgroup.as_deref().and_then(Cgroup::oom_kills);
        let in_ours = in_our_cgroup.saturating_sub(self.oom_kills_before);
        self.oom_kills = in_ours.max(in_attempt.unwrap_or(0));
    }

    /// Sends a signal to the worker of this index, if it runs.
    pub(super) fn signal(&self, number: i32, index: usize) {
        if let (Some(worker), Some(spec)) = (self.workers.get(index), self.spec.workers.get(index)) {
            worker.send(number, self.is_for_group(number, spec));
        }
    }

    /// Whether a signal goes to a worker's whole process group. A foreground worker is in our guard's.
    fn is_for_group(&self, number: i32, worker: &WorkerSpec) -> bool {
        let is_heard_by_group = self.spec.signal_scope == SignalScope::Group || acts_on_groups(number);
        is_heard_by_group && !worker.foreground
    }

    /// Sends a signal to all workers that it has not reached. A foreground worker is left out if the signal has already reached the terminal's
    /// foreground group. It is also left out of a SIGCONT if it is not stopped, because then the shell has
    /// continued it already. An exception is SIGWINCH for a worker with a terminal that we made: the signal reached
    /// it before that terminal had the new size.
    pub(super) fn broadcast(&self, number: i32, reach: Reach) {
        if reach == Reach::Everybody {
            return;
        }
        for (worker, spec) in self.workers.iter().zip(&self.spec.workers) {
            let continues = number == libc::SIGCONT && !worker.is_stopped();
            let is_early = number == libc::SIGWINCH && spec.sees_own_terminal();
            // A foreground worker ignores Ctrl-\, which asks us what the workers do.
            let is_deaf = spec.foreground && number == libc::SIGQUIT;
            let has_heard = (reach == Reach::Foreground && !is_early && !is_deaf) || continues;
            if !(spec.foreground && has_heard) {
                let number = if is_deaf { libc::SIGTERM } else { number };
                worker.send(number, self.is_for_group(number, spec));
            }
        }
    }

    /// Continues stopped workers: otherwise they would not handle the stop signal before the deadline.
    pub(super) fn resume_stopped(&self) {
        for (worker, spec) in self.workers.iter().zip(&self.spec.workers) {
            if worker.is_stopped() {
                worker.send(libc::SIGCONT, self.is_for_group(libc::SIGCONT, spec));
            }
        }
    }

    /// Asks what a dead worker has left in its process group to end, if that has not heard of the stop. Call it before
    /// the worker is reaped: until then its pid, which is the number of the group, is its own.
    pub(super) fn end_helpers_of(&self, index: usize) {
        let has_own_group = self.spec.workers.get(index).is_some_and(|spec| !spec.foreground);
        if has_own_group
            && self.group.owes_word_to_helpers()
            && (self.death_of(index).is_some() || self.dead_forked(index).is_some())
        {
            self.workers[index].send(libc::SIGTERM, true);
        }
    }

    /// Notes that from now on the death of a running worker is caused by us.
    pub(super) fn mark_ending(&mut self) {
        for worker in &mut self.workers {
            worker.ending |= worker.pid().is_some() && !worker.is_dead;
        }
    }

    /// Whether a worker was started and is not buried yet.
    pub(super) fn is_running(&self, index: usize) -> bool {
        let worker = self.workers.get(index);
        worker.is_some_and(|worker| worker.pid().is_some())
    }

    /// The fork server of a worker that runs, or has died but is not buried.
    pub(super) fn origin_of(&self, index: usize) -> Option<Origin> {
        match self.workers.get(index)?.state {
            State::Running { origin, .. } => origin,
            State::Pending | State::Ended => None,
        }
    }

    /// Workers that this fork server has forked and that are not buried.
    pub(super) fn forked_by(&self, server: usize) -> impl Iterator<Item = usize> {
        let of = move |index| {
            self.origin_of(index)
                .is_some_and(|origin| origin.server == server)
        };
        (0..self.workers.len()).filter(move |index| of(*index))
    }

    pub(super) fn pidfd_of(&self, index: usize) -> Option<BorrowedFd<'_>> {
        match &self.workers.get(index)?.state {
            State::Running { pidfd, .. } => pidfd.as_ref().map(AsFd::as_fd),
            State::Pending | State::Ended => None,
        }
    }

    /// Notes that a worker was not started.
    pub(super) fn never_ran(&mut self, index: usize, ending: Ending, now: SystemTime) -> (Exit, Input) {
        self.record(without_process(index, ending, now), false)
    }

    /// Gives up on workers that SIGKILL has not ended. They are reported as killed by us.
    pub(super) fn abandon(&mut self, now: SystemTime, poller: &Poller) -> Vec<Exit> {
        let killed = Ending::Signal {
            number: libc::SIGKILL,
            core: false,
        };
        for worker in &self.workers {
            if let State::Running {
                pidfd: Some(pidfd), ..
            } = &worker.state
            {
                poller.forget(pidfd);
            }
        }
        let left: Vec<(usize, i32)> = self.running().collect();
        let exit = |(index, pid)| Exit {
            pid,
            caused_by_stop: true,
            ..without_process(index, killed.clone(), now)
        };
        left.into_iter()
            .map(|worker| self.record(exit(worker), true).0)
            .collect()
    }

    pub(super) fn record(&mut self, mut exit: Exit, running: bool) -> (Exit, Input) {
        let failed = exit.failed();
        exit.order = self.exits;
        self.exits += 1;
        self.workers[exit.worker].state = State::Ended;
        if self.spec.stays_open {
            // Such a group may see any number of workers.
            Arc::make_mut(&mut self.spec).workers[exit.worker].forget();
        }
        if failed && !exit.caused_by_stop && self.first_failure.is_none() {
            self.first_failure = Some(exit.clone());
        }
        (exit, Input::WorkerEnded { running, failed })
    }
}

impl Worker {
    fn pending() -> Self {
        Self {
            state: State::Pending,
            ending: false,
            is_dead: false,
            pipes: [None, None],
        }
    }

    pub(super) fn pid(&self) -> Option<i32> {
        match self.state {
            State::Running { pid, .. } => Some(pid),
            State::Pending | State::Ended => None,
        }
    }

    /// Whether another process traces it. The kernel tells the tracer of its end before its parent.
    pub(super) fn is_traced(&self) -> bool {
        self.pid().is_some_and(procfs::is_traced)
    }

    fn is_stopped(&self) -> bool {
        match self.state {
            State::Running {
                pid, origin: None, ..
            } => is_stopped(pid),
            // Only a parent can wait for a stop.
            State::Running { pid, .. } => matches!(procfs::state(pid), Some(b'T' | b't')),
            State::Pending | State::Ended => false,
        }
    }

    /// Whether its pid cannot belong to another process. A child of ours is unreaped; a forked worker is checked by
    /// its pidfd.
    pub(super) fn is_pinned(&self) -> bool {
        match &self.state {
            State::Running {
                origin: Some(_),
                pidfd: Some(pidfd),
                ..
            } => signal::can_signal_pidfd(pidfd),
            _ => true,
        }
    }

    fn send(&self, number: i32, to_group: bool) {
        let Some(pid) = self.pid().filter(|_| self.is_pinned()) else {
            return;
        };
        // The unreaped worker reserves its pid, and with it the number of its process group. A failure means that it
        // has just died.
        if to_group {
            let _ = signal::send(-pid, number);
        }
        // It may have joined another process group, whose other members are not signalled.
        if !to_group || !leads_its_group(pid) {
            let _ = signal::send(pid, number);
        }
    }
}

fn leads_its_group(pid: i32) -> bool {
    crate::sys::group_of(pid) == pid
}

pub(super) fn without_process(worker: usize, ending: Ending, now: SystemTime) -> Exit {
    Exit {
        worker,
        pid: 0,
        caused_by_stop: ending == Ending::Cancelled,
        ending,
        order: 0,
        user: Duration::ZERO,
        system: Duration::ZERO,
        max_rss: 0,
        started: None,
        ended: now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::EnvEntry;

    #[test]
    fn a_group_that_may_see_any_number_of_workers_keeps_nothing_of_those_that_have_ended() {
        let token = || EnvEntry::new(b"T", b"t").unwrap();
        let worker = WorkerSpec {
            argv: vec![c"true".into()],
            env: vec![token()],
            foreground: true,
            ..WorkerSpec::default()
        };
        for stays_open in [false, true] {
            let spec = LaunchSpec {
                workers: vec![worker.clone()],
                stays_open,
                ..LaunchSpec::default()
            };
            let env = EnvTable::new(&[], &[], token());
            let mut job = Job::new(spec, false, env, None, 0);
            job.never_ran(0, Ending::Cancelled, SystemTime::now());
            let left = &job.spec.workers[0];
            assert_eq!(
                (left.argv.is_empty(), left.env.is_empty()),
                (stays_open, stays_open)
            );
            assert!(left.foreground);
            let second = job.add(WorkerSpec::default(), |_| Ok(()));
            assert_eq!(second.unwrap(), 1);
        }
    }
}
