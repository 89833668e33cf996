//! The guard: the process that the shell, Slurm or Kubernetes sees, and its link to the agent that does the work.
//!
//! The guard is the subreaper above all processes of the job. It passes signals on, keeps the exit code, and ends
//! leftover processes if the agent dies. The agent in turn ends its group if the guard dies. To use it: make a
//! [`Guard`] while the process has one thread, fork, call [`Guard::supervise`] in the parent and
//! [`Guard::enter_agent`] in the child.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::process::{Rlimit, getpid, set_child_subreaper, setpgid};
use rustix::stdio::stdin;
use rustix::termios::isatty;

use crate::cgroup::{self, Cgroup};
use crate::error::Error;
use crate::event::Survivor;
use crate::features::Features;
use crate::forkserver::estate;
use crate::limits::{MOST_WORKER_FDS, OWN_FDS};
use crate::orphans::{Orphans, reap, reap_orphans};
use crate::signals::{STALLING, Table};
use crate::spawn::{fill_standard_streams, open_files_limit, reserve_descriptors};
use crate::sys::signal::{self, Received, SignalSet};
use crate::token;
use crate::tree::Tree;

mod clear;
mod link;
mod watch;

use clear::{Leftovers, clear};
pub use link::Agent;
pub(crate) use link::is_parent;
use link::{AgentProcess, watch_guard};
use watch::{Watch, exit_code};

/// The state that guard and agent share, made before the fork.
pub struct Guard {
    pid: i32,
    group: i32,
    token: String,
    table: Table,
    preempt_grace: Option<Duration>,
    /// The caller's signal mask, which the workers get, too.
    mask: SignalSet,
    /// Signals that are blocked in guard and agent, so that the terminal does not stop them when they read from it or
    /// write to it.
    stalling: SignalSet,
    open_files: Rlimit,
    features: Features,
    cgroup: Option<Cgroup>,
    /// Whether this process had children before it became a guard, as after `monitor & exec dsl …`.
    has_strangers: bool,
    /// Pid of a child that was started for the job but is not a worker.
    helper: Option<i32>,
}

/// How the agent ended.
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
    /// Whether Ctrl-C at the terminal was among the signals.
    pub terminal_interrupt: bool,
}

impl Guard {
    /// Makes this process the guard of a job: subreaper, with the job's signals blocked and SIGCHLD reset.
    ///
    /// Call it while the process has a single thread. Signals that are ignored stay ignored, even if `table` names them:
    /// the user who started the job wanted that (`nohup`). SIGINT, SIGQUIT, SIGTERM, SIGUSR1 and SIGUSR2 are heard all the
    /// same, but not Ctrl-C and Ctrl-\ of a terminal if these were ignored. `preempt_grace`: time that the workers get at a
    /// preemption (`None`: the group's grace). `mask`: the signal mask for the workers, if the caller has blocked
    /// signals since (`None`: the present mask). Signals to the job that the caller blocked are pending now.
    pub fn new(
        features: Features,
        table: Table,
        preempt_grace: Option<Duration>,
        mask: Option<u64>,
    ) -> Result<Self, Error> {
        fill_standard_streams().map_err(Error::os("open /dev/null"))?;
        set_child_subreaper(Some(getpid())).map_err(Error::os("prctl"))?;
        signal::reset(libc::SIGCHLD).map_err(Error::os("sigaction"))?;
        let table = table.of_process(signal::is_ignored);
        let job_token = token::random();
        let pid = getpid().as_raw_nonzero().get();
        let cgroup = features.cgroup.then(|| {
            cgroup::sweep_stale();
            Cgroup::create(&cgroup::job_name(pid as u32, &job_token)).ok()
        });
        let stalling = stalling_signals();
        let own = with(table.taken(), libc::SIGCHLD).0 | stalling.0;
        let mask = if let Some(mask) = mask {
            signal::set_mask(SignalSet(mask | own));
            SignalSet(mask)
        } else {
            signal::block(SignalSet(own))
        };
        hear_stops(&table);
        Ok(Self {
            pid,
            group: crate::sys::process_group(),
            token: job_token,
            table,
            preempt_grace,
            mask,
            stalling,
            open_files: open_files_limit(),
            features,
            cgroup: cgroup.flatten(),
            has_strangers: reap_orphans(&[]) != Orphans::None,
            helper: None,
        })
    }

    /// Names a child of this process that helps the job, and so is no stranger. It ends by itself when the agent has
    /// ended. The guard waits some seconds for that, and then kills it.
    pub fn tend(&mut self, helper: i32) {
        self.helper = Some(helper);
        self.has_strangers = reap_orphans(&[helper]) != Orphans::None;
    }

    /// The guard's pid.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The job's token.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Removes the job's cgroup. For a guard without an agent, because the fork has failed.
    pub fn discard(&self) {
        if let Some(cgroup) = &self.cgroup {
            cgroup.remove();
        }
    }

    /// In the child of the fork: leaves the terminal's foreground group, becomes subreaper and watches the guard.
    ///
    /// `workers`: how many the agent will start. Their descriptors get room while the process has one thread.
    pub fn enter_agent(&self, workers: usize) -> Result<Agent, Error> {
        reserve_descriptors(workers.saturating_mul(MOST_WORKER_FDS).saturating_add(OWN_FDS));
        if self.group != 0 {
            setpgid(None, None).map_err(Error::os("setpgid"))?;
        }
        set_child_subreaper(Some(getpid())).map_err(Error::os("prctl"))?;
        let guard = watch_guard(self.pid, self.features)?;
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

    /// In the parent of the fork: waits for the agent, passes signals on, and then ends the processes that the agent
    /// left.
    ///
    /// `grace` is the grace period of the job. An agent that has not ended long after it (or after the time of a
    /// preemption) is killed. `reopens`: the job has log files, so a SIGHUP that does not come from a terminal does
    /// not end it. `links`: copies of the agent's connections with warm servers.
    pub fn supervise(
        &self,
        agent_pid: i32,
        grace: Duration,
        reopens: bool,
        links: &[OwnedFd],
    ) -> Result<Outcome, Error> {
        let set = SignalSet(with(self.table.taken(), libc::SIGCHLD).0 | self.stalling.0);
        let intake = signal::intake(set).map_err(Error::os("signalfd"))?;
        let agent = AgentProcess::open(agent_pid, self.features);
        // Opened now, before /proc can change. The agent opens its own: guard and agent each keep a read position in
        // the directory.
        let mut tree = Tree::open();
        let mut helper = self.helper;
        let mut is_excused = false;
        let mut watch = Watch::new(self.table, grace, self.preempt_grace, reopens);
        let death = loop {
            agent.wait(intake.as_fd(), watch.timeout(Instant::now()))?;
            while let Some(received) = signal::read_intake(intake.as_fd()).map_err(Error::os("read"))? {
                if received.signal != libc::SIGCHLD {
                    agent.pass_on(received, watch.hear(received, Instant::now()));
                }
            }
            if let Some(death) = agent.try_wait() {
                break death;
            }
            helper.take_if(|pid| clear::has_ended(*pid));
            reap(&[agent_pid, helper.unwrap_or(agent_pid)]);
            if watch.is_overdue(Instant::now()) {
                // The agent may still be waiting for the helper. It is killed when the deadline of a later stop
                // signal has passed as well.
                if helper.is_none() || is_excused {
                    agent.kill();
                }
                is_excused = true;
            }
        };
        links.iter().for_each(estate::hang_up);
        let left = Leftovers {
            links,
            cgroup: self.cgroup.as_ref(),
            token: &self.token,
            agent_killed: death.signaled,
            has_strangers: self.has_strangers,
            helper,
        };
        clear::resume_branches(&left, tree.as_mut().ok());
        clear::see_off(&left, tree.as_mut().ok(), intake.as_fd());
        let (ended, survivors) = clear(&left, tree, intake.as_fd());
        Ok(Outcome {
            code: exit_code(&death),
            agent_signal: death.signaled.then_some(death.status),
            ended,
            survivors,
            terminal_interrupt: watch.terminal_interrupt,
        })
    }
}

/// Signals by which a terminal would stop us. Ignored ones are left out: they stop no process, and if they were
/// blocked, they would become pending.
fn stalling_signals() -> SignalSet {
    let stalling = STALLING.into_iter().filter(|number| !signal::is_ignored(*number));
    stalling.fold(SignalSet::default(), with)
}

/// Gives signals that stop the job their default action, which workers inherit: one that ignores the signal would be
/// killed at the end of the grace period. At a terminal, a worker may be among the processes to which the keys go.
fn hear_stops(table: &Table) {
    let has_keys = isatty(stdin());
    let is_spared = |number: &i32| has_keys && table.is_deaf_to(Received::key(*number));
    for number in table
        .stopping()
        .filter(|number| signal::is_ignored(*number) && !is_spared(number))
    {
        // Fails for no valid signal.
        let _ = signal::reset(number);
    }
}

/// The set with one more signal.
fn with(set: SignalSet, signal: i32) -> SignalSet {
    SignalSet(set.0 | SignalSet::of(&[signal]).0)
}
