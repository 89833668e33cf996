//! Between guard and agent: how each sees the other die, and the way of signals from one to the other.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Rlimit, Signal, getpid, getppid, kill_current_process_group, kill_process, pidfd_open,
};

use crate::error::Error;
use crate::features::Features;
use crate::guard::wait_for;
use crate::procfs::ProcFs;
use crate::signals::{GUARD_DEATH, Passage, Table};
use crate::sys::signal::{self, Received, SignalSet};
use crate::sys::wait::{Death, Target, is_stopped, try_wait};

/// The agent's side of the link.
#[derive(Debug)]
pub struct Agent {
    /// Readable once the guard is gone. `None`: that is told by [`GUARD_DEATH`].
    pub(crate) guard: Option<OwnedFd>,
    pub(crate) guard_pid: i32,
    /// The guard's process group, which has the terminal, or may get it. 0: it has no number in our pid
    /// namespace, so nobody can go back to it, and the agent has stayed in it.
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

/// Lets the agent hear of its guard's death: by the descriptor, or without one by [`GUARD_DEATH`].
pub(super) fn watch_guard(guard_pid: i32, features: Features) -> Result<Option<OwnedFd>, Error> {
    let guard = open_pidfd(guard_pid, features);
    if guard.is_none() {
        signal::block(SignalSet::of(&[GUARD_DEATH]));
        signal::die_with_parent(GUARD_DEATH).map_err(Error::os("prctl"))?;
    }
    // What was asked for above is about the guard only if the guard was alive still after that.
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

    /// Waits until there is a signal or the agent has died; not every kernel tells of the latter.
    pub(super) fn wait(&self, intake: BorrowedFd<'_>, timeout: Option<Duration>) -> Result<(), Error> {
        let pidfd = self.pidfd.as_ref().map(AsFd::as_fd);
        wait_for([Some(intake), pidfd], timeout).map_err(Error::os("poll"))
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
            // No program stops then, but the kernel takes a worker of ours in our group for looked after. We pass on
            // the signal of our group as any other.
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

    /// A stopped agent must be able to carry out the signal it was sent. It reads signals in the order of their
    /// numbers: behind its own, this one is heard by no worker.
    fn resume(&self, sent: i32) {
        if sent < libc::SIGCONT || is_stopped(self.pid) {
            self.send(Received::own(libc::SIGCONT));
        }
    }
}

/// Whether a shell is there that could continue our process group: an ancestor in another one of our session.
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

/// Stops this process by a signal that it blocks, and has no handler for, until somebody continues it.
///
/// The kernel knows that nobody could: it stops no group that no shell looks after.
fn stop_by(number: i32) {
    let _ = signal::send(getpid().as_raw_nonzero().get(), number);
    let blocked = signal::unblock(SignalSet::of(&[number]));
    signal::set_mask(blocked);
}
