//! The link between guard and agent: how each notices the other's death, and how the guard passes signals on.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Rlimit, Signal, getpid, getppid, kill_current_process_group, kill_process, pidfd_open,
};

use crate::error::Error;
use crate::features::Features;
use crate::poller::poll_once;
use crate::procfs::ProcFs;
use crate::signals::{GUARD_DEATH, Passage, Table};
use crate::sys::signal::{self, Received, SignalSet};
use crate::sys::wait::{Death, Target, is_stopped, try_wait};

/// The agent's side of the link.
#[derive(Debug)]
pub struct Agent {
    /// Readable once the guard is gone. `None`: [`GUARD_DEATH`] reports it instead.
    pub(crate) guard: Option<OwnedFd>,
    pub(crate) guard_pid: i32,
    /// The guard's process group, which has the terminal, or may get it. 0: the group has no number in our pid
    /// namespace. No process could rejoin it, so the agent has stayed in it.
    pub(crate) foreground_group: i32,
    pub(crate) token: String,
    pub(crate) table: Table,
    /// Time that a preemption leaves the workers; `None` for the group's grace.
    pub(crate) preempt_grace: Option<Duration>,
    pub(crate) mask: SignalSet,
    pub(crate) open_files: Rlimit,
    pub(crate) features: Features,
    pub(crate) cgroup: Option<PathBuf>,
}

/// Lets the agent hear of its guard's death: by the descriptor, or without one by [`GUARD_DEATH`].
pub(super) fn watch_guard(guard_pid: i32, features: Features) -> Result<Option<OwnedFd>, Error> {
    let guard = open_pidfd(guard_pid, features);
    if guard.is_none() {
        signal::block(SignalSet::of(&[GUARD_DEATH]));
        signal::die_with_parent(GUARD_DEATH).map_err(Error::os("prctl"))?;
    }
    // Both ways above watch the guard only if it was still alive afterwards.
    if !is_parent(guard_pid) {
        return Err(Error::os("the guard process is gone")(Errno::SRCH));
    }
    Ok(guard)
}

pub(crate) fn is_parent(pid: i32) -> bool {
    getppid().is_some_and(|parent| parent.as_raw_nonzero().get() == pid)
}

fn open_pidfd(pid: i32, features: Features) -> Option<OwnedFd> {
    let pid = Pid::from_raw(pid).filter(|_| features.pidfd)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// The guard's side of the link.
pub(super) struct AgentProcess {
    pid: i32,
    pidfd: Option<OwnedFd>,
}

impl AgentProcess {
    /// The agent is our child and not reaped, so its pid is its own.
    pub(super) fn open(pid: i32, features: Features) -> Self {
        let pidfd = open_pidfd(pid, features);
        Self { pid, pidfd }
    }

    /// Waits for a signal or for the agent's death. Without a pidfd, only the signal SIGCHLD reports the death.
    pub(super) fn wait(&self, intake: BorrowedFd<'_>, timeout: Option<Duration>) -> Result<(), Error> {
        let fds: Vec<BorrowedFd<'_>> = self.pidfd.iter().map(AsFd::as_fd).chain([intake]).collect();
        poll_once(&fds, PollFlags::IN, timeout)
            .map(drop)
            .map_err(Error::os("poll"))
    }

    pub(super) fn try_wait(&self) -> Option<Death> {
        try_wait(Target::Pid(self.pid), true).ok().flatten()
    }

    pub(super) fn kill(&self) {
        self.send(Received::own(libc::SIGKILL));
    }

    /// Carries out what was decided about a signal.
    pub(super) fn pass_on(&self, received: Received, passage: Passage) {
        if !matches!(passage, Passage::Repeated | Passage::Stall) {
            self.send(received);
        }
        match passage {
            Passage::Repeated | Passage::Plain => {}
            Passage::Stall => stop_by(received.signal),
            Passage::Stop | Passage::Preempt => self.resume(received.signal),
            // Without a shell Ctrl-Z stops no program. But a worker of ours in our group has its parent in another
            // group, so the kernel takes our group for looked after. The guard gets this SIGCONT too, and passes it
            // on like any other signal.
            Passage::Suspend if received.from_terminal && !is_looked_after() => {
                let _ = kill_current_process_group(Signal::CONT);
            }
            Passage::Suspend => {
                // Nothing is left to do if that fails.
                let _ = kill_process(getpid(), Signal::STOP);
            }
        }
    }

    fn send(&self, received: Received) {
        // A failure means that the agent has just died, which is noticed next.
        let _ = signal::forward(self.pid, received);
    }

    /// Continues a stopped agent, so that it can carry out the signal it was sent. The agent reads signals in the
    /// order of their numbers: a SIGCONT that it reads after the other signal reaches no worker.
    fn resume(&self, sent: i32) {
        if sent < libc::SIGCONT || is_stopped(self.pid) {
            self.send(Received::own(libc::SIGCONT));
        }
    }
}

/// Whether there is a shell that could continue our process group: an ancestor in another group of our session.
fn is_looked_after() -> bool {
    let Ok(mut procfs) = ProcFs::open() else {
        return true;
    };
    let Ok(own) = procfs.stat(getpid().as_raw_nonzero().get()) else {
        return true;
    };
    let mut parent = own.ppid;
    while let Ok(stat) = procfs.stat(parent) {
        if stat.session != own.session {
            return false;
        }
        if stat.pgrp != own.pgrp {
            return true;
        }
        parent = stat.ppid;
    }
    false
}

/// Stops this process, until a SIGCONT, by a signal that it blocks and has no handler for.
///
/// The kernel ignores such a signal in a group without a shell, because no process could continue the group.
fn stop_by(number: i32) {
    let _ = signal::send(getpid().as_raw_nonzero().get(), number);
    let blocked = signal::unblock(SignalSet::of(&[number]));
    signal::set_mask(blocked);
}
