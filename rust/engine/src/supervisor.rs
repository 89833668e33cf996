//! The loop: owns the workers, the descriptors and the time; every decision is [`crate::group`]'s.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::process::{Pid, Resource, Rlimit, Signal, getpid, kill_process, kill_process_group, setrlimit};

use crate::affinity::{Allowed, validate, validate_nodes};
use crate::cgroup::{self, Attempt, JobCgroup};
use crate::error::Error;
use crate::event::{Ending, Event, Exit, KillTier, SignalAction, StopReason};
use crate::features::Features;
use crate::group::{Action, Group, Input};
use crate::guard::{Agent, reap_orphans};
use crate::limits::{Need, preflight};
use crate::signals::{Verdict, decide};
use crate::spawn::{EnvTable, Shared, Spawner, open_files_limit};
use crate::spec::{EnvEntry, LaunchSpec, Stdio};
use crate::sys::signal::{self, Received, SignalSet};
use crate::sys::wait::{Death, Target, is_stopped, try_wait};
use crate::token;
use crate::tree::{Scope, TOKEN_VARIABLE, Tree};

/// Workers started between two looks at what has happened meanwhile.
const SPAWN_SLICE: usize = 16;
/// Orphans are reaped this long after the first sign of one, many at a time.
const ORPHAN_DELAY: Duration = Duration::from_millis(50);
/// How often a dying tree is looked at when nothing tells of its end.
const CLEAR_POLL: Duration = Duration::from_millis(10);
/// How often workers are looked at on a kernel without pidfds, inside somebody's program.
const SWEEP_POLL: Duration = Duration::from_millis(20);
/// The same signal again within this time is the same request: `timeout` signals its child and then the group.
const SAME_REQUEST: Duration = Duration::from_millis(1);
/// Bytes read from a pipe at a time.
const READ_BYTES: usize = 64 * 1024;

const TOKEN_WORKER: u64 = 1 << 56;
const TOKEN_PIPE: u64 = 2 << 56;
const TOKEN_INTAKE: u64 = 3 << 56;
const TOKEN_GUARD: u64 = 4 << 56;
const TOKEN_WAKE: u64 = 5 << 56;
const TOKEN_CGROUP: u64 = 6 << 56;
const TOKEN_KIND: u64 = 0xff << 56;

/// What an agent has and a supervisor inside somebody's program has not.
struct AgentHost {
    intake: OwnedFd,
    guard: Option<OwnedFd>,
    foreground_group: i32,
    stops: usize,
    last_stop: Option<(i32, Instant)>,
    /// A stop signal that came before there was a group.
    early_stop: Option<i32>,
}

struct Worker {
    state: State,
    /// We have sent it a signal that ends.
    ending: bool,
    pipes: [Option<OwnedFd>; 2],
}

enum State {
    Pending,
    Running {
        pid: i32,
        pidfd: Option<OwnedFd>,
        started: SystemTime,
    },
    Ended,
}

struct Job {
    spec: Arc<LaunchSpec>,
    env: EnvTable,
    workers: Vec<Worker>,
    next: usize,
    group: Group,
    deaths: usize,
    first_failure: Option<Exit>,
    stragglers: usize,
    attempt: Option<Attempt>,
}

/// Starts, watches and ends one worker group at a time. Must stay on one thread.
pub struct Supervisor {
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    spawner: Spawner,
    features: Features,
    agent: Option<AgentHost>,
    token: String,
    cgroup: Option<JobCgroup>,
    owns_cgroup: bool,
    attempts: u32,
    tree: Option<Tree>,
    job: Option<Job>,
    orphans_due: Option<Instant>,
    from_terminal: bool,
    reading: bool,
    events: Vec<Event>,
    buffer: Vec<u8>,
}

impl Supervisor {
    /// A supervisor on the calling thread, which must outlive the workers. It takes signals and reaps orphans
    /// only with an `agent` link.
    pub fn new(agent: Option<Agent>) -> Result<Self, Error> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(io::Error::from)
            .map_err(Error::os("epoll"))?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = eventfd(0, flags)
            .map_err(io::Error::from)
            .map_err(Error::os("eventfd"))?;
        watch(&epoll, &wake, TOKEN_WAKE, epoll::EventFlags::IN)?;
        let features = agent.as_ref().map_or_else(
            || Features::probe(&std::env::var(crate::features::DISABLE_VARIABLE).unwrap_or_default()),
            |agent| agent.features,
        );
        let blocked = signal::set_mask(SignalSet::ALL);
        let mask = agent.as_ref().map_or(blocked, |agent| agent.mask);
        let open_files = agent
            .as_ref()
            .map_or_else(open_files_limit, |agent| agent.open_files);
        let spawner = Spawner::new(features, mask, open_files).map_err(Error::os("set up spawning"))?;
        let token = agent
            .as_ref()
            .map_or_else(token::random, |agent| agent.token.clone());
        let (cgroup, owns_cgroup) = match &agent {
            Some(agent) => (
                agent
                    .cgroup
                    .as_deref()
                    .and_then(|path| JobCgroup::open_existing(path).ok()),
                false,
            ),
            None if features.cgroup => {
                let name = cgroup::job_name(getpid().as_raw_nonzero().get() as u32, &token);
                (JobCgroup::create(&name).ok(), true)
            }
            None => (None, false),
        };
        let agent = agent.map(|agent| host(&epoll, agent)).transpose()?;
        Ok(Self {
            epoll,
            wake: Arc::new(wake),
            spawner,
            features,
            agent,
            token,
            cgroup,
            owns_cgroup,
            attempts: 0,
            tree: None,
            job: None,
            orphans_due: None,
            from_terminal: false,
            reading: true,
            events: Vec::new(),
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Signal mask that the workers get.
    pub fn set_worker_mask(&mut self, mask: u64) {
        self.spawner.set_mask(SignalSet(mask));
    }

    /// A descriptor to write to (as an eventfd) from another thread to make [`Supervisor::turn`] return.
    pub fn waker(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.wake)
    }

    /// Whether a group is being run.
    pub fn is_running(&self) -> bool {
        self.job.is_some()
    }

    /// Checks the limits and takes the group; the workers are started by the turns that follow.
    pub fn start(&mut self, spec: Arc<LaunchSpec>) -> Result<(), Error> {
        if self.job.is_some() {
            return Err(Error::Busy);
        }
        if self.agent.is_none() && signal::is_ignored(libc::SIGCHLD) {
            return Err(Error::ChildSignalIgnored);
        }
        spec.validate()?;
        check_binding(&spec)?;
        Self::raise_limits(&spec)?;
        self.spawner.prepare().map_err(Error::os("list descriptors"))?;
        let outer = spec
            .env
            .iter()
            .rev()
            .find(|entry| entry.key() == TOKEN_VARIABLE.as_bytes());
        let tokens = match outer {
            Some(outer) if !outer.value().is_empty() => [outer.value(), b":", self.token.as_bytes()].concat(),
            _ => self.token.clone().into_bytes(),
        };
        let env = EnvTable::new(&spec.env, EnvEntry::new(TOKEN_VARIABLE.as_bytes(), &tokens)?);
        let number = self.attempts;
        self.attempts += 1;
        let attempt = self.cgroup.as_ref().and_then(|job| job.attempt(number).ok());
        if let Some(attempt) = &attempt {
            let token = TOKEN_CGROUP;
            epoll::add(
                &self.epoll,
                attempt.events(),
                epoll::EventData::new_u64(token),
                epoll::EventFlags::PRI,
            )
            .map_err(io::Error::from)
            .map_err(Error::os("watch the cgroup"))?;
        }
        let pending = || Worker {
            state: State::Pending,
            ending: false,
            pipes: [None, None],
        };
        self.job = Some(Job {
            workers: spec.workers.iter().map(|_| pending()).collect(),
            group: Group::new(spec.workers.len(), spec.on_failure, spec.grace),
            spec,
            env,
            next: 0,
            deaths: 0,
            first_failure: None,
            stragglers: 0,
            attempt,
        });
        if let Some(signal) = self.agent.as_mut().and_then(|agent| agent.early_stop.take()) {
            let grace = Duration::ZERO;
            self.step(Input::Stop {
                reason: StopReason::Signal(signal),
                signal,
                grace,
            });
        }
        Ok(())
    }

    fn raise_limits(spec: &LaunchSpec) -> Result<(), Error> {
        let pipes = |worker: &crate::spec::WorkerSpec| {
            worker.stdio.iter().filter(|stdio| **stdio == Stdio::Pipe).count()
        };
        let need = Need {
            workers: spec.workers.len(),
            fds_per_worker: 1 + spec.workers.iter().map(pipes).max().unwrap_or(0),
            fds_base: 64,
        };
        let adjust = preflight(&need)?;
        if let Some(files) = adjust.nofile {
            let limit = Rlimit {
                current: Some(files),
                maximum: open_files_limit().maximum,
            };
            setrlimit(Resource::Nofile, limit)
                .map_err(io::Error::from)
                .map_err(Error::os("raise the limit of open files"))?;
        }
        Ok(())
    }

    /// Sends a signal to one worker, or to all.
    pub fn signal(&mut self, number: i32, worker: Option<usize>) {
        let Some(job) = &self.job else { return };
        match worker {
            Some(index) => {
                if let Some(worker) = job.workers.get(index) {
                    worker.send(number, job.spec.workers[index].foreground);
                }
            }
            None => self.broadcast(number),
        }
    }

    /// Begins to stop the group.
    pub fn stop(&mut self, signal: i32, grace: Option<Duration>) {
        let Some(job) = &self.job else { return };
        let grace = grace.unwrap_or(job.spec.grace);
        self.step(Input::Stop {
            reason: StopReason::Request,
            signal,
            grace,
        });
    }

    /// Kills the group.
    pub fn kill(&mut self) {
        self.step(Input::Kill {
            reason: StopReason::Request,
        });
    }

    /// Stops or resumes reading piped streams; the workers wait meanwhile.
    pub fn set_reading(&mut self, reading: bool) {
        if self.reading == reading {
            return;
        }
        self.reading = reading;
        let Some(job) = &self.job else { return };
        let flags = if reading {
            epoll::EventFlags::IN
        } else {
            epoll::EventFlags::empty()
        };
        for (index, worker) in job.workers.iter().enumerate() {
            for (stream, pipe) in worker.pipes.iter().enumerate() {
                if let Some(pipe) = pipe {
                    let data = epoll::EventData::new_u64(TOKEN_PIPE | (index as u64) << 1 | stream as u64);
                    // A pipe that cannot be modified is read on; that costs memory, not correctness.
                    let _ = epoll::modify(&self.epoll, pipe, data, flags);
                }
            }
        }
    }

    /// Starts some workers if any are due, waits until something happens, and handles it.
    pub fn turn(&mut self) -> Result<(), Error> {
        self.start_some();
        let mut list = [MaybeUninit::<epoll::Event>::uninit(); 512];
        let timeout = self.timeout();
        let ready = match epoll::wait(&self.epoll, &mut list, timeout.as_ref()) {
            Ok((ready, _)) => ready,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(Error::os("epoll_wait")(error.into())),
        };
        let now = SystemTime::now();
        // Deaths first, in the kernel's order, and all of them before anything is done about the first.
        let mut inputs = Vec::new();
        let mut later: Vec<u64> = Vec::new();
        for event in ready.iter() {
            let data = event.data.u64();
            if data & TOKEN_KIND == TOKEN_WORKER {
                inputs.extend(self.reap((data & !TOKEN_KIND) as usize, now));
            } else {
                later.push(data);
            }
        }
        for data in later {
            match data & TOKEN_KIND {
                TOKEN_INTAKE => self.take_signals(&mut inputs)?,
                TOKEN_GUARD => self.guard_lost(),
                TOKEN_PIPE => self.read_pipe(data & !TOKEN_KIND),
                TOKEN_WAKE => drain(&self.wake),
                TOKEN_CGROUP => self.check_if_clearing(),
                _ => {}
            }
        }
        if !self.features.pidfd {
            self.sweep(now, &mut inputs);
        }
        for input in inputs {
            self.step(input);
        }
        self.tick();
        Ok(())
    }

    /// The events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// More workers are to be started, so the next turn will not wait.
    pub fn is_starting(&self) -> bool {
        self.job.as_ref().is_some_and(|job| job.group.may_start())
    }

    fn timeout(&self) -> Option<Timespec> {
        if self.is_starting() || !self.events.is_empty() {
            return Some(Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            });
        }
        let now = Instant::now();
        let mut due = self.job.as_ref().and_then(|job| job.group.next_tick());
        let mut at = |moment: Option<Instant>| {
            due = match (due, moment) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        };
        at(self.orphans_due);
        if let Some(job) = &self.job {
            if job.group.is_clearing() && self.agent.is_none() {
                at(Some(now + CLEAR_POLL));
            }
            if !self.features.pidfd && self.agent.is_none() {
                at(Some(now + SWEEP_POLL));
            }
        }
        due.map(|due| {
            let left = due.saturating_duration_since(now);
            Timespec {
                tv_sec: left.as_secs() as i64,
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        })
    }

    fn start_some(&mut self) {
        for _ in 0..SPAWN_SLICE {
            let Some(job) = &mut self.job else { return };
            if !job.group.may_start() {
                return;
            }
            let index = job.next;
            job.next += 1;
            let shared = Shared {
                env: &job.env,
                attempt: job.attempt.as_ref(),
                foreground_group: self.agent.as_ref().map(|agent| agent.foreground_group),
            };
            let result = self.spawner.start(&job.spec, index, &shared);
            let time = SystemTime::now();
            match result {
                Ok(started) => {
                    if let Some(pidfd) = &started.pidfd {
                        let token = TOKEN_WORKER | index as u64;
                        // Fails only when memory is short; the sweep of dead workers finds it then.
                        let _ = watch(&self.epoll, pidfd, token, epoll::EventFlags::IN);
                    }
                    for (stream, pipe) in started.pipes.iter().enumerate() {
                        if let Some(pipe) = pipe {
                            let token = TOKEN_PIPE | (index as u64) << 1 | stream as u64;
                            let _ = watch(&self.epoll, pipe, token, epoll::EventFlags::IN);
                        }
                    }
                    job.workers[index].pipes = started.pipes;
                    job.workers[index].state = State::Running {
                        pid: started.pid,
                        pidfd: started.pidfd,
                        started: time,
                    };
                    self.events.push(Event::Started {
                        worker: index,
                        pid: started.pid,
                        time,
                    });
                    self.step(Input::Started);
                }
                Err(failure) => {
                    let input = self.never_ran(index, Ending::NotStarted(failure), time);
                    self.step(input);
                }
            }
        }
    }

    fn never_ran(&mut self, index: usize, ending: Ending, now: SystemTime) -> Input {
        let exit = Exit {
            worker: index,
            pid: 0,
            caused_by_stop: ending == Ending::Cancelled,
            ending,
            order: 0,
            user: Duration::ZERO,
            system: Duration::ZERO,
            max_rss: 0,
            started: None,
            ended: now,
        };
        self.note_exit(exit, false)
    }

    fn note_exit(&mut self, mut exit: Exit, running: bool) -> Input {
        let failed = exit.failed();
        if let Some(job) = &mut self.job {
            exit.order = job.deaths;
            job.deaths += 1;
            job.workers[exit.worker].state = State::Ended;
            if failed && !exit.caused_by_stop && job.first_failure.is_none() {
                job.first_failure = Some(exit.clone());
            }
        }
        self.events.push(Event::Exited(exit));
        Input::WorkerEnded { running, failed }
    }

    /// Collects a dead worker; `None` when it is alive or was collected before.
    fn reap(&mut self, index: usize, now: SystemTime) -> Option<Input> {
        let job = self.job.as_mut()?;
        let worker = job.workers.get_mut(index)?;
        let State::Running { pid, pidfd, started } = &worker.state else {
            return None;
        };
        let target = pidfd
            .as_ref()
            .map_or(Target::Pid(*pid), |pidfd| Target::PidFd(pidfd.as_fd()));
        let (ending, death) = match try_wait(target, true) {
            Ok(None) => return None,
            Ok(Some(death)) => (ending(&death), Some(death)),
            // Somebody else in this program has waited for it; its status is lost.
            Err(_) => (Ending::Lost, None),
        };
        if let Some(pidfd) = pidfd {
            // Before it is closed: a forked helper may hold a copy that would keep the entry alive.
            let _ = epoll::delete(&self.epoll, pidfd);
        }
        let exit = Exit {
            worker: index,
            pid: *pid,
            ending,
            order: 0,
            caused_by_stop: worker.ending,
            user: death.map_or(Duration::ZERO, |death| death.user),
            system: death.map_or(Duration::ZERO, |death| death.system),
            max_rss: death.map_or(0, |death| death.max_rss),
            started: Some(*started),
            ended: now,
        };
        Some(self.note_exit(exit, true))
    }

    /// Looks at every worker: for kernels without pidfds.
    fn sweep(&mut self, now: SystemTime, inputs: &mut Vec<Input>) {
        let count = self.job.as_ref().map_or(0, |job| job.workers.len());
        for index in 0..count {
            inputs.extend(self.reap(index, now));
        }
    }

    fn take_signals(&mut self, inputs: &mut Vec<Input>) -> Result<(), Error> {
        loop {
            let Some(agent) = &self.agent else { return Ok(()) };
            let received = signal::read_intake(agent.intake.as_fd()).map_err(Error::os("read signals"))?;
            let Some(received) = received else { return Ok(()) };
            if received.signal == libc::SIGCHLD {
                self.orphans_due.get_or_insert(Instant::now() + ORPHAN_DELAY);
                self.check_if_clearing();
            } else {
                // What has died by now has not died of this signal.
                for input in std::mem::take(inputs) {
                    self.step(input);
                }
                self.take_signal(received);
            }
        }
    }

    fn take_signal(&mut self, received: Received) {
        let Some(agent) = &mut self.agent else { return };
        let now = Instant::now();
        let ending = self.job.as_ref().is_some_and(|job| job.group.is_ending());
        let mut verdict = decide(received.signal, agent.stops, ending);
        if matches!(verdict, Verdict::Stop | Verdict::Hurry | Verdict::Note) {
            let repeated = agent
                .last_stop
                .is_some_and(|(signal, at)| signal == received.signal && now - at < SAME_REQUEST);
            agent.last_stop = Some((received.signal, now));
            if repeated {
                verdict = Verdict::Ignore;
            } else {
                agent.stops += 1;
            }
        }
        let action = match verdict {
            Verdict::Forward => SignalAction::Forward,
            Verdict::Stop | Verdict::Hurry => SignalAction::Stop,
            Verdict::Note | Verdict::Ignore => SignalAction::Ignore,
        };
        if verdict != Verdict::Ignore {
            self.events.push(Event::SignalReceived {
                signal: received.signal,
                action,
                from_terminal: received.from_terminal,
            });
        }
        self.from_terminal = received.from_terminal;
        let reason = StopReason::Signal(received.signal);
        match verdict {
            Verdict::Forward => self.broadcast(received.signal),
            Verdict::Stop | Verdict::Hurry if self.job.is_none() => {
                agent.early_stop.get_or_insert(received.signal);
            }
            Verdict::Stop => {
                let grace = self.job.as_ref().map_or(Duration::ZERO, |job| job.spec.grace);
                self.step(Input::Stop {
                    reason,
                    signal: received.signal,
                    grace,
                });
            }
            Verdict::Hurry => {
                self.step(Input::Stop {
                    reason,
                    signal: received.signal,
                    grace: Duration::ZERO,
                });
            }
            Verdict::Note | Verdict::Ignore => {}
        }
        self.from_terminal = false;
    }

    fn guard_lost(&mut self) {
        if let Some(guard) = self.agent.as_mut().and_then(|agent| agent.guard.take()) {
            let _ = epoll::delete(&self.epoll, &guard);
        }
        self.step(Input::Kill {
            reason: StopReason::GuardLost,
        });
    }

    fn tick(&mut self) {
        let now = Instant::now();
        if self.orphans_due.is_some_and(|due| due <= now) {
            self.orphans_due = None;
            if self.agent.is_some() {
                self.reap_strays();
            }
        }
        let due = self.job.as_ref().and_then(|job| job.group.next_tick());
        if due.is_some_and(|due| due <= now) {
            self.step(Input::Tick);
        }
        if self.agent.is_none() {
            self.check_if_clearing();
        }
    }

    fn check_if_clearing(&mut self) {
        if self.job.as_ref().is_some_and(|job| job.group.is_clearing()) {
            self.act(Action::CheckTree);
        }
    }

    fn step(&mut self, input: Input) {
        let Some(job) = &mut self.job else { return };
        let actions = job.group.step(Instant::now(), input);
        for action in actions {
            self.act(action);
        }
        if self.job.as_ref().is_some_and(|job| job.group.has_ended()) {
            self.job = None;
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Broadcast(signal) => {
                self.mark_ending();
                self.broadcast(signal);
                if signal != libc::SIGKILL {
                    self.resume_stopped();
                }
            }
            Action::CancelPending => self.cancel_pending(),
            Action::ReportStop {
                reason,
                signal,
                grace,
            } => {
                self.events.push(Event::Stopping {
                    reason,
                    signal,
                    grace,
                });
            }
            Action::CheckTree => {
                let empty = self.is_tree_empty();
                self.step(Input::Tree { empty });
            }
            Action::TerminateTree => {
                let count = self.signal_tree(Signal::TERM);
                self.signal_tree(Signal::CONT);
                if let Some(job) = &mut self.job {
                    job.stragglers = job.stragglers.max(count);
                }
                self.orphans_due = Some(Instant::now());
            }
            Action::KillTree { first } => self.kill_tree(first),
            Action::End { survivors } => self.end(survivors),
        }
    }

    fn mark_ending(&mut self) {
        for worker in self.job.iter_mut().flat_map(|job| &mut job.workers) {
            worker.ending |= matches!(worker.state, State::Running { .. });
        }
    }

    fn broadcast(&mut self, number: i32) {
        let Some(job) = &self.job else { return };
        for (worker, spec) in job.workers.iter().zip(&job.spec.workers) {
            // The terminal has signalled its whole foreground group already.
            if !(spec.foreground && self.from_terminal) {
                worker.send(number, spec.foreground);
            }
        }
    }

    /// A stopped worker would not see a signal before the deadline.
    fn resume_stopped(&self) {
        let Some(job) = &self.job else { return };
        for (worker, spec) in job.workers.iter().zip(&job.spec.workers) {
            if let State::Running { pid, .. } = worker.state
                && is_stopped(pid)
            {
                worker.send(libc::SIGCONT, spec.foreground);
            }
        }
    }

    fn cancel_pending(&mut self) {
        let now = SystemTime::now();
        let Some(job) = &mut self.job else { return };
        let pending = job.next..job.workers.len();
        job.next = job.workers.len();
        for index in pending {
            let input = self.never_ran(index, Ending::Cancelled, now);
            self.step(input);
        }
    }

    /// Pids of running workers: roots of the job's tree where we are not subreaper.
    fn roots(&self) -> Vec<i32> {
        let workers = self.job.iter().flat_map(|job| &job.workers);
        workers
            .filter_map(|worker| match worker.state {
                State::Running { pid, .. } => Some(pid),
                State::Pending | State::Ended => None,
            })
            .collect()
    }

    fn with_tree<T>(&mut self, work: impl FnOnce(&mut Tree, Scope<'_>) -> T) -> Option<T> {
        let embedded = self.agent.is_none();
        let roots = if embedded { self.roots() } else { Vec::new() };
        if self.tree.is_none() {
            self.tree = Tree::open().ok();
        }
        let scope = Scope {
            own_descendants: !embedded,
            roots: &roots,
            token: embedded.then_some(self.token.as_str()),
            strangers: &[],
        };
        self.tree.as_mut().map(|tree| work(tree, scope))
    }

    fn signal_tree(&mut self, signal: Signal) -> usize {
        self.with_tree(|tree, scope| tree.signal_all(scope, signal).unwrap_or(0))
            .unwrap_or(0)
    }

    fn is_tree_empty(&mut self) -> bool {
        if self.agent.is_some() {
            // As subreaper we are the parent of whatever outlived its own.
            return self.reap_strays();
        }
        let populated = self
            .job
            .as_ref()
            .and_then(|job| job.attempt.as_ref())
            .and_then(|attempt| attempt.populated().ok());
        match populated {
            Some(populated) => !populated,
            None => self
                .with_tree(|tree, scope| tree.members(scope).is_ok_and(|members| members.is_empty()))
                .unwrap_or(true),
        }
    }

    /// Reaps adopted orphans, but no worker; says whether no child is left.
    fn reap_strays(&mut self) -> bool {
        let known = self.roots();
        if known.is_empty() {
            return reap_orphans(None);
        }
        loop {
            match try_wait(Target::Any, false) {
                // A dead worker hides what is behind it; its own event comes next.
                Ok(Some(death)) if known.contains(&death.pid) => {
                    self.orphans_due = Some(Instant::now() + ORPHAN_DELAY);
                    return false;
                }
                Ok(Some(death)) => {
                    let _ = try_wait(Target::Pid(death.pid), true);
                }
                Ok(None) => return false,
                Err(_) => return true,
            }
        }
    }

    fn kill_tree(&mut self, first: bool) {
        self.mark_ending();
        let running: Vec<usize> = self
            .job
            .iter()
            .flat_map(|job| job.workers.iter().enumerate())
            .filter(|(_, worker)| matches!(worker.state, State::Running { .. }))
            .map(|(index, _)| index)
            .collect();
        self.broadcast(libc::SIGKILL);
        let attempt = self.job.as_ref().and_then(|job| job.attempt.as_ref());
        let by_cgroup = attempt.is_some_and(|attempt| attempt.kill().is_ok());
        if first {
            let tier = if by_cgroup {
                KillTier::Cgroup
            } else {
                KillTier::Scan
            };
            self.events.push(Event::Killing {
                workers: running,
                tier,
            });
        }
        if !by_cgroup || !first {
            self.with_tree(|tree, scope| tree.kill_all(scope).unwrap_or(0));
        }
        self.orphans_due = Some(Instant::now());
    }

    fn end(&mut self, leftovers: bool) {
        let survivors = if leftovers {
            self.with_tree(Tree::survivors).unwrap_or_default()
        } else {
            Vec::new()
        };
        let now = SystemTime::now();
        let count = self.job.as_ref().map_or(0, |job| job.workers.len());
        for index in 0..count {
            self.close_pipes(index);
            // A worker that would not die is reported as what it is: killed by us, and still there.
            let State::Running { pid, .. } = self.worker_state(index) else {
                continue;
            };
            let exit = Exit {
                worker: index,
                pid,
                ending: Ending::Signal {
                    number: libc::SIGKILL,
                    core: false,
                },
                order: 0,
                caused_by_stop: true,
                user: Duration::ZERO,
                system: Duration::ZERO,
                max_rss: 0,
                started: None,
                ended: now,
            };
            self.note_exit(exit, true);
        }
        let Some(job) = &mut self.job else { return };
        if let Some(attempt) = job.attempt.take() {
            let _ = epoll::delete(&self.epoll, attempt.events());
            attempt.remove();
        }
        self.events.push(Event::Ended {
            first_failure: job.first_failure.take(),
            stop_signal: job.group.stop_signal(),
            stragglers: job.stragglers,
            survivors,
        });
    }

    fn worker_state(&self, index: usize) -> State {
        match self.job.as_ref().map(|job| &job.workers[index].state) {
            Some(State::Running { pid, started, .. }) => State::Running {
                pid: *pid,
                pidfd: None,
                started: *started,
            },
            Some(State::Pending) => State::Pending,
            Some(State::Ended) | None => State::Ended,
        }
    }

    fn read_pipe(&mut self, token: u64) {
        let (index, stream) = ((token >> 1) as usize, (token & 1) as usize);
        let Some(job) = &mut self.job else { return };
        let Some(slot) = job.workers.get_mut(index).map(|worker| &mut worker.pipes[stream]) else {
            return;
        };
        let Some(pipe) = slot.as_ref() else { return };
        match rustix::io::read(pipe, &mut self.buffer[..]) {
            Ok(0) | Err(rustix::io::Errno::IO | rustix::io::Errno::BADF) => {
                let _ = epoll::delete(&self.epoll, pipe);
                *slot = None;
                let data = Vec::new();
                self.events.push(Event::Output {
                    worker: index,
                    stream: stream as u8 + 1,
                    data,
                });
            }
            Ok(count) => {
                let data = self.buffer[..count].to_vec();
                self.events.push(Event::Output {
                    worker: index,
                    stream: stream as u8 + 1,
                    data,
                });
            }
            Err(_) => {}
        }
    }

    /// Takes what a worker's pipes hold still and closes them.
    fn close_pipes(&mut self, index: usize) {
        for stream in 0..2u64 {
            loop {
                let before = self.events.len();
                self.read_pipe((index as u64) << 1 | stream);
                let open = self
                    .job
                    .as_ref()
                    .is_some_and(|job| job.workers[index].pipes[stream as usize].is_some());
                if !open {
                    break;
                }
                if self.events.len() == before {
                    // Held open by a process that is not of the job.
                    if let Some(pipe) = self
                        .job
                        .as_mut()
                        .and_then(|job| job.workers[index].pipes[stream as usize].take())
                    {
                        let _ = epoll::delete(&self.epoll, &pipe);
                    }
                    let (worker, stream) = (index, stream as u8 + 1);
                    self.events.push(Event::Output {
                        worker,
                        stream,
                        data: Vec::new(),
                    });
                    break;
                }
            }
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // Workers get SIGKILL by parent death when this thread ends; their trees are ended here.
        if self.job.is_some() {
            self.kill();
            while self.job.is_some() && self.turn().is_ok() {}
        }
        if let (true, Some(job)) = (self.owns_cgroup, &self.cgroup) {
            job.remove();
        }
    }
}

impl Worker {
    fn send(&self, number: i32, foreground: bool) {
        let State::Running { pid, .. } = &self.state else {
            return;
        };
        let (Some(pid), Some(signal)) = (Pid::from_raw(*pid), Signal::from_named_raw(number)) else {
            return;
        };
        // The unreaped worker pins its pid and with it the group's. A failure means that it has just died.
        let _ = if foreground {
            kill_process(pid, signal)
        } else {
            kill_process_group(pid, signal)
        };
    }
}

fn ending(death: &Death) -> Ending {
    if death.signaled {
        Ending::Signal {
            number: death.status,
            core: death.core,
        }
    } else {
        Ending::Code(death.status as u8)
    }
}

fn host(epoll: &OwnedFd, agent: Agent) -> Result<AgentHost, Error> {
    let set = SignalSet(agent.taken.0 | SignalSet::of(&[libc::SIGCHLD]).0);
    let intake = signal::intake(set).map_err(Error::os("signalfd"))?;
    watch(epoll, &intake, TOKEN_INTAKE, epoll::EventFlags::IN)?;
    if let Some(guard) = &agent.guard {
        watch(epoll, guard, TOKEN_GUARD, epoll::EventFlags::IN)?;
    }
    Ok(AgentHost {
        intake,
        guard: agent.guard,
        foreground_group: agent.foreground_group,
        stops: 0,
        last_stop: None,
        early_stop: None,
    })
}

fn watch(epoll: &OwnedFd, fd: &OwnedFd, token: u64, flags: epoll::EventFlags) -> Result<(), Error> {
    epoll::add(epoll, fd, epoll::EventData::new_u64(token), flags)
        .map_err(io::Error::from)
        .map_err(Error::os("epoll_ctl"))
}

fn drain(wake: &OwnedFd) {
    let mut counter = [0u8; 8];
    let _ = rustix::io::read(wake, &mut counter);
}

fn check_binding(spec: &LaunchSpec) -> Result<(), Error> {
    if spec
        .workers
        .iter()
        .all(|worker| worker.cpus.is_empty() && worker.memory.is_none())
    {
        return Ok(());
    }
    let allowed = Allowed::read(Path::new("/")).map_err(Error::os("read the CPU topology"))?;
    for (index, worker) in spec.workers.iter().enumerate() {
        let refused = |error: &dyn std::fmt::Display| Error::Binding(format!("worker {index}: {error}"));
        if !worker.cpus.is_empty() {
            validate(&worker.cpus, &allowed.cpus).map_err(|error| refused(&error))?;
        }
        if let Some((_, nodes)) = &worker.memory
            && !nodes.is_empty()
        {
            validate_nodes(nodes, &allowed.nodes).map_err(|error| refused(&error))?;
        }
    }
    Ok(())
}
