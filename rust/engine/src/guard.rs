//! The process that the shell, Slurm or Kubernetes sees, and its link to the agent that does the work.
//!
//! The guard is subreaper above everything. It passes signals on, keeps the exit code, and if the agent dies it
//! ends what the agent left. The agent in turn ends its group if the guard dies. To use it: make a [`Guard`] while
//! the process has one thread, fork, call [`Guard::supervise`] in the parent and [`Guard::enter_agent`] in the
//! child.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Rlimit, Signal, getpid, getppid, kill_process, pidfd_open, set_child_subreaper, setpgid,
};

use crate::cgroup::{self, JobCgroup};
use crate::error::Error;
use crate::event::Survivor;
use crate::features::Features;
use crate::orphans::{Orphans, reap_orphans};
use crate::signals::{GUARD_DEATH, Meaning, Table};
use crate::spawn::{fill_standard_streams, open_files_limit};
use crate::sys::signal::{self, Received, SignalSet};
use crate::sys::wait::{Death, Target, is_stopped, try_wait};
use crate::token;
use crate::tree::{Scope, Tree};

/// Time the guard gives the kernel to end what a dead agent left.
const CLEAR_PATIENCE: Duration = Duration::from_secs(10);
/// Time beyond the grace period after which an agent that does not end is taken to be stuck.
const AGENT_PATIENCE: Duration = Duration::from_secs(10);
/// How often a kill is repeated while something is left.
const KILL_RETRY: Duration = Duration::from_millis(20);
/// Looks that find nothing, after which children that we had before are taken to be all that is left.
const QUIET_LOOKS: u32 = 5;
/// The same signal of the same process again within this time is the same request: `timeout` signals its child
/// and then the group that both are in.
const SAME_REQUEST: Duration = Duration::from_millis(50);

/// The state shared by guard and agent, made before the fork.
pub struct Guard {
    pid: i32,
    group: i32,
    token: String,
    table: Table,
    preempt_grace: Option<Duration>,
    mask: SignalSet,
    open_files: Rlimit,
    features: Features,
    cgroup: Option<JobCgroup>,
    /// Children that this process had before it became a guard: (pid, start time).
    strangers: Vec<(i32, u64)>,
}

/// What became of the agent.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code for the command.
    pub code: u8,
    /// The signal that ended the agent, if one did.
    pub agent_signal: Option<i32>,
    /// Processes of the job that the guard had to kill.
    pub ended: usize,
    /// Processes that would not die.
    pub survivors: Vec<Survivor>,
    /// The terminal's Ctrl-C was among the signals.
    pub terminal_interrupt: bool,
}

/// The agent's side of the link.
#[derive(Debug)]
pub struct Agent {
    /// Readable once the guard is gone. `None`: that is told by [`GUARD_DEATH`].
    pub(crate) guard: Option<OwnedFd>,
    pub(crate) guard_pid: i32,
    pub(crate) foreground_group: i32,
    pub(crate) token: String,
    pub(crate) table: Table,
    /// Time that a preemption leaves; `None` for the group's grace.
    pub(crate) preempt_grace: Option<Duration>,
    pub(crate) mask: SignalSet,
    pub(crate) open_files: Rlimit,
    pub(crate) features: Features,
    pub(crate) cgroup: Option<PathBuf>,
}

impl Guard {
    /// Makes this process the guard of a job: subreaper, with the job's signals blocked and SIGCHLD reset.
    ///
    /// Call it while the process has a single thread. Signals that are ignored (as by `nohup`) stay so, also those
    /// that `table` names: whoever started the job wanted it. `preempt_grace`: time that a preemption leaves the
    /// workers (`None`: the group's grace).
    pub fn new(features: Features, table: Table, preempt_grace: Option<Duration>) -> Result<Self, Error> {
        fill_standard_streams().map_err(Error::os("open /dev/null"))?;
        set_child_subreaper(Some(getpid()))
            .map_err(io::Error::from)
            .map_err(Error::os("prctl"))?;
        signal::reset_child_signal().map_err(Error::os("sigaction"))?;
        let table = table.without_those(signal::is_ignored);
        let job_token = token::random();
        let pid = getpid().as_raw_nonzero().get();
        let cgroup = features.cgroup.then(|| job_cgroup(pid, &job_token)).flatten();
        let mask = signal::block(with(table.taken(), libc::SIGCHLD));
        Ok(Self {
            pid,
            group: crate::sys::process_group(),
            token: job_token,
            table,
            preempt_grace,
            mask,
            open_files: open_files_limit(),
            features,
            cgroup,
            strangers: own_children(),
        })
    }

    /// The guard's pid.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The job's token.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// In the child of the fork: leaves the terminal's foreground group, becomes subreaper and watches the guard.
    pub fn enter_agent(&self) -> Result<Agent, Error> {
        setpgid(None, None)
            .map_err(io::Error::from)
            .map_err(Error::os("setpgid"))?;
        set_child_subreaper(Some(getpid()))
            .map_err(io::Error::from)
            .map_err(Error::os("prctl"))?;
        let guard = Pid::from_raw(self.pid)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
            .filter(|_| self.features.pidfd);
        if guard.is_none() {
            signal::block(SignalSet::of(&[GUARD_DEATH]));
            signal::die_with_parent(GUARD_DEATH).map_err(Error::os("prctl"))?;
        }
        // What was asked for above is about the guard only if the guard was alive still after that.
        if !is_parent(self.pid) {
            return Err(Error::os("the guard process is gone")(
                io::Error::from_raw_os_error(libc::ESRCH),
            ));
        }
        Ok(Agent {
            guard,
            guard_pid: self.pid,
            foreground_group: self.group,
            token: self.token.clone(),
            table: self.table,
            preempt_grace: self.preempt_grace,
            mask: self.mask,
            open_files: self.open_files,
            features: self.features,
            cgroup: self.cgroup.as_ref().map(|job| job.path().to_path_buf()),
        })
    }

    /// In the parent of the fork: waits for the agent, passing signals on, then ends whatever it left.
    ///
    /// `grace` is the job's; an agent that does not end long after it (or after the time of a preemption) is
    /// killed. `reopens`: the job has log files, so a SIGHUP that is no hang-up does not end it.
    pub fn supervise(&self, agent_pid: i32, grace: Duration, reopens: bool) -> Result<Outcome, Error> {
        let set = with(self.table.taken(), libc::SIGCHLD);
        let intake = signal::intake(set).map_err(Error::os("signalfd"))?;
        let agent = AgentProcess::open(agent_pid, self.features);
        let mut watch = Watch {
            deadline: None,
            terminal_interrupt: false,
            table: self.table,
            grace,
            preempt_grace: self.preempt_grace.unwrap_or(grace),
            reopens,
            last: None,
        };
        let death = loop {
            let timeout = watch
                .deadline
                .map(|deadline| deadline.saturating_duration_since(Instant::now()));
            wait_for(
                [Some(intake.as_fd()), agent.pidfd.as_ref().map(AsFd::as_fd)],
                timeout,
            )
            .map_err(Error::os("poll"))?;
            while let Some(received) = signal::read_intake(intake.as_fd()).map_err(Error::os("read"))? {
                if received.signal != libc::SIGCHLD {
                    watch.pass_on(&agent, received, Instant::now());
                }
            }
            if let Some(death) = agent.try_wait() {
                break death;
            }
            reap_orphans(&[agent_pid]);
            if watch.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                agent.send(Received::own(libc::SIGKILL));
                watch.deadline = None;
            }
        };
        let abnormal = death.signaled;
        let (ended, survivors) = self.clear(abnormal, intake.as_fd());
        Ok(Outcome {
            code: if abnormal {
                128u8.saturating_add(death.status as u8)
            } else {
                death.status as u8
            },
            agent_signal: abnormal.then_some(death.status),
            ended,
            survivors,
            terminal_interrupt: watch.terminal_interrupt,
        })
    }

    /// Ends every process of the job that is left. Returns how many were killed and what would not die.
    fn clear(&self, abnormal: bool, intake: BorrowedFd<'_>) -> (usize, Vec<Survivor>) {
        let job = self.cgroup.as_ref();
        let token = abnormal.then_some(self.token.as_str());
        let scope = Scope {
            own_descendants: true,
            roots: &[],
            token,
            strangers: &self.strangers,
        };
        let mut ended = 0;
        let mut quiet = 0;
        let mut survivors = Vec::new();
        let mut tree = None;
        let deadline = Instant::now() + CLEAR_PATIENCE;
        loop {
            let childless = reap_orphans(&[]) == Orphans::None;
            let populated = job.is_some_and(|job| job.populated().unwrap_or(false));
            if let (true, Some(job)) = (populated, job) {
                // A failure leaves the work to the passes over the process table.
                let _ = job.kill();
            }
            if childless && !populated && !abnormal {
                break;
            }
            if tree.is_none() {
                tree = Tree::open().ok();
            }
            let Some(tree) = tree.as_mut() else { break };
            let killed = tree.kill_all(scope).unwrap_or(0);
            ended += killed;
            quiet = if killed == 0 && !populated { quiet + 1 } else { 0 };
            // All that is left of the job descends from a child of ours. With a child alive and none found, one
            // that keeps changing its pid has slipped through.
            if quiet > 0 && (childless || (quiet == QUIET_LOOKS && !self.strangers.is_empty())) {
                break;
            }
            if Instant::now() >= deadline {
                survivors = tree.survivors(scope);
                break;
            }
            // Woken by SIGCHLD; the bound is for processes that are not our children.
            let pause = if quiet > 0 { Duration::ZERO } else { KILL_RETRY };
            let _ = wait_for([Some(intake), None], Some(pause));
            while let Ok(Some(_)) = signal::read_intake(intake) {}
        }
        if let Some(job) = job {
            remove_cgroup(job);
        }
        (ended, survivors)
    }
}

/// Signals seen while watching the agent.
struct Watch {
    deadline: Option<Instant>,
    terminal_interrupt: bool,
    table: Table,
    grace: Duration,
    preempt_grace: Duration,
    reopens: bool,
    /// The last signal and when it came.
    last: Option<(Received, Instant)>,
}

impl Watch {
    fn pass_on(&mut self, agent: &AgentProcess, received: Received, now: Instant) {
        let last = self.last.replace((received, now));
        let repeated = last.is_some_and(|(last, at)| last == received && now - at < SAME_REQUEST);
        let meaning = self.table.meaning(received.signal);
        if repeated && received.sender != 0 && meaning != Some(Meaning::Forward) {
            return;
        }
        agent.send(received);
        if self.reopens && self.table.is_reopening(received) {
            return;
        }
        match meaning {
            Some(Meaning::Stop) => {
                self.terminal_interrupt |= received.signal == libc::SIGINT && received.from_terminal;
                let deadline = now + self.grace + AGENT_PATIENCE;
                // It can shorten the time that a preemption leaves.
                self.deadline = Some(self.deadline.map_or(deadline, |earlier| earlier.min(deadline)));
                agent.resume(received.signal);
            }
            Some(Meaning::Preempt) => {
                self.deadline
                    .get_or_insert(now + self.preempt_grace + AGENT_PATIENCE);
                agent.resume(received.signal);
            }
            Some(Meaning::Forward) if received.signal == libc::SIGTSTP => {
                // The shell waits for its own child to stop. Nothing is left to do if that fails.
                let _ = kill_process(getpid(), Signal::STOP);
            }
            Some(Meaning::Forward) | None => {}
        }
    }
}

struct AgentProcess {
    pid: i32,
    pidfd: Option<OwnedFd>,
}

impl AgentProcess {
    /// The agent is our child and not reaped, so its pid is its own.
    fn open(pid: i32, features: Features) -> Self {
        let raw = Pid::from_raw(pid);
        let pidfd = raw
            .filter(|_| features.pidfd)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { pid, pidfd }
    }

    fn try_wait(&self) -> Option<Death> {
        try_wait(Target::Pid(self.pid), true).ok().flatten()
    }

    fn send(&self, received: Received) {
        // A failure means that the agent has just died, which is noticed next.
        let _ = signal::forward(self.pid, received);
    }

    /// A stopped agent must be able to carry out the signal it was sent. It reads signals in the order of their
    /// numbers: behind its own, this one is heard by no worker.
    fn resume(&self, sent: i32) {
        if sent < libc::SIGCONT || is_stopped(self.pid) {
            self.send(Received::own(libc::SIGCONT));
        }
    }
}

fn wait_for(fds: [Option<BorrowedFd<'_>>; 2], timeout: Option<Duration>) -> io::Result<()> {
    let mut polled: Vec<PollFd<'_>> = fds
        .iter()
        .flatten()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN))
        .collect();
    let spec = timeout.map(|timeout| Timespec {
        tv_sec: timeout.as_secs() as i64,
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    match poll(&mut polled, spec.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The set with one signal more.
fn with(set: SignalSet, signal: i32) -> SignalSet {
    SignalSet(set.0 | SignalSet::of(&[signal]).0)
}

pub(crate) fn is_parent(pid: i32) -> bool {
    getppid().is_some_and(|parent| parent.as_raw_nonzero().get() == pid)
}

fn job_cgroup(pid: i32, token: &str) -> Option<JobCgroup> {
    cgroup::sweep_stale();
    JobCgroup::create(&cgroup::job_name(pid as u32, token)).ok()
}

/// Children of this process, as after `monitor & exec dsl …`. Usually there is none, which costs one call.
fn own_children() -> Vec<(i32, u64)> {
    if reap_orphans(&[]) == Orphans::None {
        return Vec::new();
    }
    let scope = Scope {
        own_descendants: true,
        roots: &[],
        token: None,
        strangers: &[],
    };
    let members = Tree::open()
        .and_then(|mut tree| tree.members(scope))
        .unwrap_or_default();
    members.iter().map(|stat| (stat.pid, stat.start_time)).collect()
}

/// Removes the job's cgroup; processes that have just died may hold it for a moment.
fn remove_cgroup(job: &JobCgroup) {
    for _ in 0..20 {
        if job.remove() {
            return;
        }
        let _ = wait_for([None, None], Some(Duration::from_millis(5)));
    }
}

#[cfg(test)]
mod tests;
