//! Who speaks over a link, and about whom. The kernel says both, about descriptors that come with the messages: no
//! number of a process is taken from another, who may count in a pid namespace of its own.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use crate::poller::is_readable;
use crate::procfs::ProcFs;

/// The process that has said hello over a link: the one that was executed for it, or one that descends from that.
pub(super) struct Speaker {
    pid: i32,
    pidfd: OwnedFd,
}

/// What has become of a child that a speaker has forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Child {
    /// It has this pid, and keeps it until its parent has reaped it.
    Known(i32),
    /// It has ended and was reaped.
    Gone,
}

/// Why nobody listens to a speaker any more. `None`: it has died, of which there are better words.
pub(super) type Distrust = Option<String>;

impl Speaker {
    /// Who has said hello, in the name of the process that was executed.
    pub(super) fn meet(procfs: &mut ProcFs, pidfd: OwnedFd, executed: i32) -> Result<Self, Distrust> {
        let told = procfs.pid_of(pidfd.as_fd());
        let pid = match told {
            Ok(Some(pid)) => pid,
            Ok(None) => return Err(None),
            Err(error) => return Err(Some(of_whom(&error))),
        };
        let speaker = Self { pid, pidfd };
        // First what its namespaces are: one that forks before it enters them is no stranger, and is not as we are.
        speaker.check_place(procfs)?;
        match procfs.descends(pid, executed) {
            Ok(true) => Ok(speaker),
            _ => Err(speaker.unless_dead("is another process than the one that was started".to_owned())),
        }
    }

    /// Whether it is where this process is. Workers that it forks elsewhere would not be as executed ones are.
    pub(super) fn check_place(&self, procfs: &mut ProcFs) -> Result<(), Distrust> {
        match procfs.foreign_place(self.pid) {
            Ok(None) => Ok(()),
            Ok(Some(place)) => Err(self.unless_dead(format!("runs in another {place}"))),
            Err(error) => Err(self.unless_dead(format!("cannot be told from other processes: {error}"))),
        }
    }

    /// Which process it has forked.
    pub(super) fn child(&self, procfs: &mut ProcFs, pidfd: &OwnedFd) -> Result<Child, Distrust> {
        let pid = match procfs.pid_of(pidfd.as_fd()) {
            Ok(Some(pid)) => pid,
            Ok(None) => return Ok(Child::Gone),
            Err(error) => return Err(self.unless_dead(format!("forked a worker that {}", of_whom(&error)))),
        };
        match procfs.stat(pid) {
            Ok(stat) if stat.ppid == self.pid => Ok(Child::Known(pid)),
            // It was reaped in this instant, and the number may be another's.
            _ if procfs.pid_of(pidfd.as_fd()).is_ok_and(|now| now.is_none()) => Ok(Child::Gone),
            _ => Err(self.unless_dead("named a process that it has not forked".to_owned())),
        }
    }

    fn unless_dead(&self, why: String) -> Distrust {
        (!is_readable(&self.pidfd)).then_some(why)
    }
}

fn of_whom(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::Unsupported => "runs in another pid namespace".to_owned(),
        _ => format!("cannot be told from other processes: {error}"),
    }
}

#[cfg(test)]
impl Speaker {
    /// This process, for tests whose children stand for workers.
    pub(super) fn own() -> Self {
        use rustix::process::{PidfdFlags, getpid, pidfd_open};

        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("a pidfd of this process");
        let pid = getpid().as_raw_pid();
        Self { pid, pidfd }
    }
}
