//! The main loop: owns the workers, the descriptors and the clock. All decisions are made in [`crate::group`].

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::getpid;

use crate::cgroup::{self, Cgroup, OomCounter};
use crate::error::Error;
use crate::event::{Event, StopReason, Survivor};
use crate::features::Features;
use crate::forkserver::Server;
use crate::group::{Action, Input};
use crate::guard::Agent;
use crate::mux::{Consoles, Mux};
use crate::orphans::reap;
use crate::poller::Bell;
use crate::poller::Poller;
use crate::signals::Reach;
use crate::spawn::{Helpers, Spawner, open_files_limit};
use crate::starting::Next;
use crate::sys::signal::{self, SignalSet};
use crate::token;

mod callers;
mod death_queue;
mod deaths;
mod ending;
mod forks;
mod intake;
mod job;
mod pipes;
mod remains;
mod start;

pub(crate) use callers::Callers;
use intake::{GuardLink, JobControl};
use job::Job;
use remains::Remains;

/// Orphans are reaped this long after the first sign of one, so that many are reaped at once.
const ORPHAN_DELAY: Duration = Duration::from_millis(50);
/// How often we look at a dying process tree when no event reports its end.
const CLEAR_POLL: Duration = Duration::from_millis(10);
/// The same while what is left has time to end by itself.
const LINGER_POLL: Duration = Duration::from_millis(100);
/// How often we look at the workers inside a user's program on a kernel without pidfds.
const SWEEP_POLL: Duration = Duration::from_millis(20);
/// Bytes read from a pipe at a time.
const READ_BYTES: usize = 64 * 1024;

/// Starts, watches and ends one worker group at a time. Must stay on one thread.
pub struct Supervisor {
    poller: Arc<Poller>,
    wake: Arc<Bell>,
    pub(crate) spawner: Spawner,
    /// Threads that start workers, too.
    helpers: Helpers,
    /// Some worker has no pidfd to report its death, so every turn looks at all workers.
    sweeps: bool,
    link: Option<GuardLink>,
    /// A signal to end the job that came before a group existed, or while a group ended for another reason.
    early_stop: Option<i32>,
    token: String,
    cgroup: Option<Cgroup>,
    oom: OomCounter,
    attempts: u32,
    remains: Remains,
    /// Fork servers by number; `None` for a server that could not be started.
    servers: Vec<Option<Server>>,
    job: Option<Job>,
    /// Reads the workers' output if it is passed on.
    mux: Option<Mux>,
    /// Output of ended groups that is still to be written.
    pub(crate) consoles: Arc<Consoles>,
    survivors: Vec<Survivor>,
    orphans_due: Option<Instant>,
    /// Which workers the signal that is handled now has reached by itself.
    reach: Reach,
    /// When callers are awaited again that could not be taken.
    callers_due: Option<Instant>,
    job_control: JobControl,
    /// Where views into the job call, if they may.
    callers: Option<Callers>,
    /// Whether output of the latest group goes to files.
    has_log_files: bool,
    reading: bool,
    events: Vec<Event>,
    buffer: Vec<u8>,
}

impl Supervisor {
    /// Makes a supervisor on the calling thread, which must outlive the workers. It takes signals and reaps orphans
    /// only with an `agent` link.
    pub fn new(agent: Option<Agent>) -> Result<Self, Error> {
        let poller = Arc::new(Poller::new()?);
        let wake = Bell::new()?;
        poller.watch(&wake, Watched::Wake.encode())?;
        let blocked = signal::set_mask(SignalSet::ALL);
        let embedded = agent.is_none();
        let (features, mask, open_files, token, cgroup) = if let Some(agent) = &agent {
            let cgroup = agent.cgroup.as_deref();
            let cgroup = cgroup.and_then(|path| Cgroup::open_existing(path).ok());
            let token = agent.token.clone();
            (agent.features, agent.mask, agent.open_files, token, cgroup)
        } else {
            let features = Features::from_environment();
            (features, blocked, open_files_limit(), token::random(), None)
        };
        let spawner = Spawner::new(features, mask, open_files).map_err(Error::os("set up spawning"))?;
        let link = agent.map(|agent| GuardLink::new(&poller, agent)).transpose()?;
        let mut supervisor = Self {
            poller,
            wake: Arc::new(wake),
            spawner,
            helpers: Helpers::default(),
            sweeps: !features.pidfd,
            link,
            early_stop: None,
            remains: Remains::new(!embedded, token.clone()),
            token,
            cgroup,
            oom: OomCounter::own(),
            attempts: 0,
            servers: Vec::new(),
            job: None,
            mux: None,
            consoles: Arc::new(Consoles::new()?),
            survivors: Vec::new(),
            orphans_due: None,
            reach: Reach::Nobody,
            callers_due: None,
            job_control: JobControl::default(),
            callers: None,
            has_log_files: false,
            reading: true,
            events: Vec::new(),
            buffer: vec![0; READ_BYTES],
        };
        // Made last, so that an earlier failure leaves no cgroup behind.
        if embedded && features.cgroup {
            let name = cgroup::job_name(getpid().as_raw_nonzero().get() as u32, &supervisor.token);
            supervisor.cgroup = Cgroup::create(&name).ok();
        }
        Ok(supervisor)
    }

    /// The bell that another thread rings to make [`Supervisor::turn`] return.
    pub fn waker(&self) -> Arc<Bell> {
        Arc::clone(&self.wake)
    }

    /// Whether a group is running.
    pub fn is_running(&self) -> bool {
        self.job.is_some()
    }

    /// Sends a signal to one worker, or to all. After SIGTSTP to all, workers that have not started wait for SIGCONT.
    pub fn signal(&mut self, number: i32, worker: Option<usize>) {
        let Some(job) = &self.job else { return };
        if let Some(index) = worker {
            job.signal(number, index);
        } else {
            job.broadcast(number, Reach::Nobody);
            self.job_control.send(number);
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

    /// Starts some workers if any are due, waits until something happens, and handles it.
    pub fn turn(&mut self) -> Result<(), Error> {
        self.start_some();
        let ready = self.poller.wait(self.timeout())?;
        let ready: Vec<Watched> = ready.into_iter().map(Watched::decode).collect();
        let now = SystemTime::now();
        // Deaths come first, in the kernel's order. All are noted before we act on the first.
        let mut inputs = Vec::new();
        if let Some(job) = &mut self.job {
            job.deaths.retry_traced(Instant::now());
            for watched in &ready {
                if let Watched::Worker(index) = *watched {
                    job.note_death(index, now);
                }
            }
        }
        self.collect_deaths(&mut inputs)?;
        for watched in ready {
            match watched {
                Watched::Worker(_) => {}
                Watched::Intake => self.take_signals(&mut inputs)?,
                Watched::Guard => self.guard_lost(),
                Watched::Pipe(index, stream) => {
                    self.read_pipe(index, stream);
                }
                Watched::Wake => {
                    self.wake.silence();
                    self.listen_to_mux();
                }
                Watched::Cgroup => self.cgroup_changed(),
                Watched::ForkServer(number) => self.listen_to_server(number),
                Watched::Caller => self.somebody_calls(),
            }
        }
        if self.sweeps {
            let count = self.job.as_ref().map_or(0, |job| job.workers.len());
            for index in 0..count {
                self.await_key(index, &mut inputs)?;
                inputs.extend(self.reap(index, now));
            }
        }
        self.act_on_heard();
        // Deaths that a fork server has just reported.
        self.collect_deaths(&mut inputs)?;
        self.let_the_dead_wait();
        for input in inputs {
            self.step(input);
        }
        self.tick();
        Ok(())
    }

    /// Takes the events since the last call.
    pub fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Whether more workers are to be started, so that the next turn will not wait.
    pub fn is_starting(&self) -> bool {
        match self.next_start() {
            Next::Execute(_) => true,
            Next::Order { .. } => self
                .job
                .as_ref()
                .is_some_and(|job| job.starting.orders.is_empty()),
            Next::Nothing | Next::Later(_) => false,
        }
    }

    /// When the lead of the first worker is over, if the next one waits for that.
    fn starts_due(&self) -> Option<Instant> {
        match self.next_start() {
            Next::Later(due) => Some(due),
            _ => None,
        }
    }

    /// Time until something is due; `None` if nothing is.
    fn timeout(&self) -> Option<Duration> {
        if self.is_starting()
            || !self.events.is_empty()
            || self.servers.iter().flatten().any(|server| server.has_heard)
        {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let job = self.job.as_ref();
        let polling = job.filter(|_| self.polls_the_end());
        let due = [
            job.and_then(|job| job.group.next_tick()),
            job.and_then(|job| job.starting.order_due),
            job.and_then(|job| job.deaths.due()),
            self.starts_due(),
            self.orphans_due,
            self.callers_due,
            self.imports_due(),
            polling.filter(|job| job.group.is_clearing()).map(|job| {
                now + if job.group.is_lingering() {
                    LINGER_POLL
                } else {
                    CLEAR_POLL
                }
            }),
            polling.filter(|_| self.sweeps).map(|_| now + SWEEP_POLL),
        ];
        let due = due.into_iter().flatten().min();
        due.map(|due| due.saturating_duration_since(now))
    }

    fn tick(&mut self) {
        let now = Instant::now();
        if self.orphans_due.is_some_and(|due| due <= now) {
            self.orphans_due = None;
            let spared = [self.running_pids(), self.server_pids()].concat();
            if self.link.is_some() {
                reap(&spared);
            }
        }
        if self.callers_due.is_some_and(|due| due <= now) {
            self.await_callers();
        }
        if self.imports_due().is_some_and(|due| due <= now) {
            self.look_at_imports(now);
        }
        if self.starts_due().is_some_and(|due| due <= now)
            && let Some(job) = &mut self.job
        {
            job.starting.end_lead(now);
        }
        let is_late = self.job.as_ref().and_then(|job| job.starting.order_due);
        if is_late.is_some_and(|due| due <= now) {
            self.take_delivered(true);
        }
        let due = self.job.as_ref().and_then(|job| job.group.next_tick());
        if due.is_some_and(|due| due <= now) {
            self.step(Input::Tick);
        }
        if self.polls_the_end() {
            self.check_if_clearing();
        }
    }

    /// Whether no event tells when the last process of a group has ended: the kernel may not hand to us what workers leave.
    fn polls_the_end(&self) -> bool {
        self.link.is_none() || self.servers.iter().flatten().any(Server::is_branch)
    }

    fn step(&mut self, input: Input) {
        let Some(job) = &mut self.job else { return };
        for action in job.group.step(Instant::now(), input) {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Broadcast(signal) => self.tell_to_end(signal),
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
            Action::CheckTree => self.check_tree(),
            Action::ReportLeftovers { grace } => self.report_leftovers(grace),
            Action::TerminateTree => self.terminate_tree(),
            Action::TerminateHelpers => drop(self.with_remains(Remains::terminate)),
            Action::KillTree { first } => self.kill_tree(first),
            Action::End { survivors } => self.end(survivors),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // The kernel sends SIGKILL to the workers when this thread ends; their process trees are killed here. The
        // rest of the group's output is not waited for.
        self.early_stop.get_or_insert(libc::SIGKILL);
        if self.is_running() {
            self.kill();
            while self.is_running() && self.turn().is_ok() {
                // No caller takes the events any more, and a turn does not wait while events are left.
                self.events.clear();
            }
        }
        self.end_servers();
        // The guard removes the cgroup of an agent.
        if let (None, Some(cgroup)) = (&self.link, &self.cgroup) {
            cgroup.remove();
        }
    }
}

/// What an event of the poller is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watched {
    /// This worker has died.
    Worker(usize),
    /// This worker's stdout (0) or stderr (1) is readable.
    Pipe(usize, usize),
    /// A signal has come.
    Intake,
    /// The guard is gone.
    Guard,
    /// Another thread has rung the bell.
    Wake,
    /// The attempt's cgroup has become empty, or was removed.
    Cgroup,
    /// This fork server has sent or written something, or has died.
    ForkServer(usize),
    /// Somebody calls at the job's socket.
    Caller,
}

impl Watched {
    fn encode(self) -> u64 {
        let (kind, number) = match self {
            Self::Worker(worker) => (0, worker),
            Self::Pipe(worker, stream) => (1, worker << 1 | stream),
            Self::Intake => (2, 0),
            Self::Guard => (3, 0),
            Self::Wake => (4, 0),
            Self::Cgroup => (5, 0),
            Self::ForkServer(server) => (6, server),
            Self::Caller => (7, 0),
        };
        (number as u64) << 3 | kind
    }

    fn decode(data: u64) -> Self {
        let number = (data >> 3) as usize;
        match data & 7 {
            0 => Self::Worker(number),
            1 => Self::Pipe(number >> 1, number & 1),
            2 => Self::Intake,
            3 => Self::Guard,
            4 => Self::Wake,
            5 => Self::Cgroup,
            6 => Self::ForkServer(number),
            _ => Self::Caller,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_watched_survives_the_kernel() {
        let all = [
            Watched::Worker(0),
            Watched::Worker(100_000),
            Watched::Pipe(0, 1),
            Watched::Pipe(100_000, 0),
            Watched::Intake,
            Watched::Guard,
            Watched::Wake,
            Watched::Cgroup,
            Watched::ForkServer(3),
            Watched::Caller,
        ];
        for watched in all {
            assert_eq!(Watched::decode(watched.encode()), watched);
        }
    }
}
