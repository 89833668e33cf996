//! The workers of one group, and the facts about them.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crate::cgroup::AttemptCgroup;
use crate::error::Error;
use crate::event::{Ending, Event, Exit, StartFailure, Survivor};
use crate::forkserver::Ordered;
use crate::group::{Action, Group, Input};
use crate::mux::Outcome;
use crate::poller::{Poller, is_readable};
use crate::procfs::{self, Stat};
use crate::signals::{Reach, acts_on_groups};
use crate::spawn::{AttemptContext, EnvTable, Prepared};
use crate::spec::{LaunchSpec, SignalScope, WorkerSpec};
use crate::starting::Starting;
use crate::supervisor::death_queue::{DeathQueue, Overdue};
use crate::supervisor::guard_link::GuardLink;
use crate::sys::signal;
use crate::sys::wait::{Death, Target, is_stopped, try_wait};

struct Worker {
    state: State,
    /// Whether we have sent it a signal to end.
    ending: bool,
    /// Whether its death is noted but not collected.
    is_dead: bool,
    /// Read ends of stdout and stderr, if they are open pipes.
    pipes: [Option<OwnedFd>; 2],
}

enum State {
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
    spec: Arc<LaunchSpec>,
    env: EnvTable,
    workers: Vec<Worker>,
    /// Pids of all workers that were started, including dead ones.
    leaders: Vec<i32>,
    /// The workers of `leaders`, by index.
    started: Vec<usize>,
    /// Decides which worker may start next.
    starting: Starting<Awaited>,
    deaths: DeathQueue,
    group: Group,
    first_failure: Option<Exit>,
    stragglers: usize,
    cgroup: Option<AttemptCgroup>,
    oom_kills: u64,
    /// Out-of-memory kills in our own cgroup before the first worker was started.
    oom_kills_before: u64,
    /// Workers that have ended so far.
    exits: usize,
}

impl Job {
    pub(super) fn new(
        spec: Arc<LaunchSpec>,
        lingers: bool,
        env: EnvTable,
        cgroup: Option<AttemptCgroup>,
        oom_kills_before: u64,
    ) -> Self {
        let forks = spec.workers.iter().map(|worker| worker.fork);
        let servers = forks.map(|fork| fork.map(|fork| fork.server)).collect();
        Self {
            workers: spec.workers.iter().map(|_| Worker::pending()).collect(),
            group: Group::new(
                spec.workers.len(),
                spec.on_failure,
                spec.grace,
                spec.signal_scope,
                spec.tells_signals,
            )
            .lingering(lingers)
            .open(spec.stays_open, spec.at_once),
            starting: Starting::new(servers),
            spec,
            env,
            leaders: Vec::new(),
            started: Vec::new(),
            deaths: DeathQueue::default(),
            first_failure: None,
            stragglers: 0,
            cgroup,
            oom_kills: 0,
            oom_kills_before,
            exits: 0,
        }
    }

    pub(super) fn spec(&self) -> &LaunchSpec {
        &self.spec
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
        self.step(Instant::now(), Input::Added);
        Ok(self.workers.len() - 1)
    }

    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    /// Lets the group decide what follows from an input.
    pub(super) fn step(&mut self, now: Instant, input: Input) -> Vec<Action> {
        self.group.step(now, input)
    }

    pub(super) fn starting(&self) -> &Starting<Awaited> {
        &self.starting
    }

    pub(super) fn starting_mut(&mut self) -> &mut Starting<Awaited> {
        &mut self.starting
    }

    pub(super) fn deaths(&self) -> &DeathQueue {
        &self.deaths
    }

    pub(super) fn deaths_mut(&mut self) -> &mut DeathQueue {
        &mut self.deaths
    }

    pub(super) fn cgroup(&self) -> Option<&AttemptCgroup> {
        self.cgroup.as_ref()
    }

    pub(super) fn take_cgroup(&mut self) -> Option<AttemptCgroup> {
        self.cgroup.take()
    }

    /// Facts about the group that the start of each worker needs.
    pub(super) fn context<'a>(&'a self, poller: &'a Poller, link: Option<&GuardLink>) -> AttemptContext<'a> {
        AttemptContext {
            env: &self.env,
            cgroup: self.cgroup(),
            foreground_group: link.map(|link| link.foreground_group),
            poller,
        }
    }

    /// Number of workers, including those that have ended.
    pub(super) fn size(&self) -> usize {
        self.workers.len()
    }

    /// Pids of all workers that were started, including dead ones.
    pub(super) fn leaders(&self) -> &[i32] {
        &self.leaders
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

    /// The first worker that failed by itself.
    pub(super) fn first_failure(&self) -> Option<&Exit> {
        self.first_failure.as_ref()
    }

    /// Notes how many processes have outlived their workers and were asked to end.
    pub(super) fn note_stragglers(&mut self, count: usize) {
        self.stragglers = self.stragglers.max(count);
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

    /// Notes that a worker has died. Further calls for the same worker do nothing.
    pub(super) fn note_death(&mut self, worker: usize, time: SystemTime) {
        if let Some(state) = self.workers.get_mut(worker).filter(|state| !state.is_dead) {
            state.is_dead = true;
            self.deaths.push(worker, time, Instant::now());
        }
    }

    /// Sets whether a worker's death is noted but not collected.
    pub(super) fn set_dead(&mut self, worker: usize, is_dead: bool) {
        if let Some(state) = self.workers.get_mut(worker) {
            state.is_dead = is_dead;
        }
    }

    /// What to do about the first death, which a fork server has not reported.
    pub(super) fn look_at_first_death(&mut self, now: Instant) -> Option<Overdue> {
        let workers = &self.workers;
        let is_traced = |index: usize| workers.get(index).is_some_and(Worker::is_traced);
        self.deaths.look_at_first(now, is_traced)
    }

    /// Open pipes of workers, as (worker, stream, pipe).
    pub(super) fn pipes(&self) -> impl Iterator<Item = (usize, usize, &OwnedFd)> {
        self.workers.iter().enumerate().flat_map(|(index, worker)| {
            let pipes = worker.pipes.iter().enumerate();
            pipes.filter_map(move |(stream, pipe)| Some((index, stream, pipe.as_ref()?)))
        })
    }

    pub(super) fn pipe(&self, worker: usize, stream: usize) -> Option<&OwnedFd> {
        self.workers.get(worker)?.pipes[stream].as_ref()
    }

    pub(super) fn keep_pipe(&mut self, worker: usize, stream: usize, pipe: OwnedFd) {
        self.workers[worker].pipes[stream] = Some(pipe);
    }

    pub(super) fn take_pipe(&mut self, worker: usize, stream: usize) -> Option<OwnedFd> {
        self.workers.get_mut(worker)?.pipes[stream].take()
    }

    /// The last event of the group.
    pub(super) fn into_ended(self, survivors: Vec<Survivor>, output: Outcome) -> Event {
        Event::Ended {
            first_failure: self.first_failure,
            stop_signal: self.group.stop_signal(),
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
        let in_attempt = self.cgroup.as_ref().and_then(AttemptCgroup::oom_kills);
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

    /// How a child of ours has ended that is not collected yet.
    pub(super) fn death_of(&self, index: usize) -> Option<Death> {
        let State::Running {
            pid, origin: None, ..
        } = self.workers.get(index)?.state
        else {
            return None;
        };
        try_wait(Target::Pid(pid), false).ok()?
    }

    /// Collects a dead child; `None` if it is alive, was collected before, or is not our child.
    pub(super) fn reap(&mut self, index: usize, now: SystemTime, poller: &Poller) -> Option<(Exit, Input)> {
        let State::Running {
            pid,
            pidfd,
            origin: None,
            ..
        } = &self.workers.get(index)?.state
        else {
            return None;
        };
        let target = pidfd
            .as_ref()
            .map_or(Target::Pid(*pid), |pidfd| Target::PidFd(pidfd.as_fd()));
        match try_wait(target, true) {
            Ok(None) => None,
            Ok(Some(death)) => self.bury(index, Ending::from(&death), Some(death), now, poller),
            // Other code in this program has already waited for the child, so its status is lost.
            Err(_) => self.bury(index, Ending::Lost, None, now, poller),
        }
    }

    /// Whether a worker was started and is not buried yet.
    pub(super) fn is_running(&self, index: usize) -> bool {
        let worker = self.workers.get(index);
        worker.is_some_and(|worker| worker.pid().is_some())
    }

    /// The fork server of a worker that has died, with its pidfd.
    pub(super) fn dead_forked(&self, index: usize) -> Option<(Origin, BorrowedFd<'_>)> {
        let State::Running {
            pidfd: Some(pidfd),
            origin: Some(origin),
            ..
        } = &self.workers.get(index)?.state
        else {
            return None;
        };
        is_readable(pidfd).then(|| (*origin, pidfd.as_fd()))
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

    /// How a zombie has ended whose parent is alive, from `/proc`. Without resource usage.
    pub(super) fn death_in_procfs(&self, index: usize) -> Option<Death> {
        let pid = self.workers.get(index)?.pid()?;
        let status = procfs::exit_status(pid)?;
        // Its parent may have reaped it meanwhile, and the pid may belong to another process.
        self.workers[index].is_pinned().then(|| Death::of(status))
    }

    /// Notes how a worker has ended.
    pub(super) fn bury(
        &mut self,
        index: usize,
        ending: Ending,
        death: Option<Death>,
        now: SystemTime,
        poller: &Poller,
    ) -> Option<(Exit, Input)> {
        let worker = self.workers.get(index)?;
        let State::Running {
            pid, pidfd, started, ..
        } = &worker.state
        else {
            return None;
        };
        if let Some(pidfd) = pidfd {
            poller.forget(pidfd);
        }
        let exit = Exit {
            pid: *pid,
            caused_by_stop: worker.ending,
            user: death.map_or(Duration::ZERO, |death| death.user),
            system: death.map_or(Duration::ZERO, |death| death.system),
            max_rss: death.map_or(0, |death| death.max_rss),
            started: Some(*started),
            ..without_process(index, ending, now)
        };
        Some(self.record(exit, true))
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

    fn record(&mut self, mut exit: Exit, running: bool) -> (Exit, Input) {
        let failed = exit.failed();
        exit.order = self.exits;
        self.exits += 1;
        self.workers[exit.worker].state = State::Ended;
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

    fn pid(&self) -> Option<i32> {
        match self.state {
            State::Running { pid, .. } => Some(pid),
            State::Pending | State::Ended => None,
        }
    }

    /// Whether another process traces it. The kernel tells the tracer of its end before its parent.
    fn is_traced(&self) -> bool {
        self.pid().is_some_and(procfs::is_traced)
    }

    fn is_stopped(&self) -> bool {
        match self.state {
            State::Running {
                pid, origin: None, ..
            } => is_stopped(pid),
            // Only a parent can wait for a stop.
            State::Running { pid, .. } => procfs::is_stopped(pid),
            State::Pending | State::Ended => false,
        }
    }

    /// Whether its pid cannot belong to another process. A child of ours is unreaped; a forked worker is checked by
    /// its pidfd.
    fn is_pinned(&self) -> bool {
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

impl From<&Death> for Ending {
    fn from(death: &Death) -> Self {
        if death.signaled {
            Self::Signal {
                number: death.status,
                core: death.core,
            }
        } else {
            Self::Code(death.status as u8)
        }
    }
}

fn without_process(worker: usize, ending: Ending, now: SystemTime) -> Exit {
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
