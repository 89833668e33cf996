//! Identifies the process that speaks over a link, and the children that it reports. The kernel tells both, by the
//! descriptors that come with the messages. We take no pid from another process, because it may run in another pid
//! namespace.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::process::{getpid, getuid};

use crate::peer::Peer;
use crate::poller::is_readable;
use crate::procfs::ProcFs;

/// The process that must have said hello, or an ancestor of that one.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    /// Our child, not reaped.
    Executed(i32),
    /// The warm server that was called for a branch.
    Called(&'a Peer),
}

/// The process that has said hello over a link: the executed process, or a descendant of it or of a called server.
pub(super) struct Speaker {
    pid: i32,
    start_time: u64,
    pidfd: OwnedFd,
}

/// The state of a child that a speaker has forked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Child {
    /// It has this pid, and keeps it until its parent has reaped it.
    Known(i32),
    /// It has ended and was reaped.
    Gone,
}

/// Why we stop listening to a speaker. `None` if it has died, which is reported with a better reason.
pub(super) type Distrust = Option<String>;

impl Speaker {
    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Pid and start time.
    pub(super) fn identity(&self) -> (i32, u64) {
        (self.pid, self.start_time)
    }

    /// Identifies the process that has said hello, and checks that it belongs to the process that was executed or called.
    /// It is signalled later, so it must be neither this process nor one above it.
    pub(super) fn meet(procfs: &mut ProcFs, pidfd: OwnedFd, origin: Origin<'_>) -> Result<Self, Distrust> {
        let told = procfs.pid_of(pidfd.as_fd());
        let pid = match told {
            Ok(Some(pid)) => pid,
            Ok(None) => return Err(None),
            Err(error) => return Err(Some(of_whom(&error))),
        };
        let start_time = procfs.stat(pid).map_or(0, |stat| stat.start_time);
        let speaker = Self {
            pid,
            start_time,
            pidfd,
        };
        // Check its namespaces first: a process that enters other namespaces after a fork still descends from the
        // executed process, but does not run where we do.
        speaker.check_place(procfs)?;
        let own = getpid().as_raw_nonzero().get();
        let is_asked = match origin {
            Origin::Executed(executed) => procfs.descends(pid, executed).unwrap_or(false),
            Origin::Called(server) => {
                procfs.uid(pid).is_ok_and(|uid| uid == getuid().as_raw())
                    && procfs.descends(pid, server.pid()).unwrap_or(false)
                    && server.is_there(procfs)
                    && !procfs.descends(own, pid).unwrap_or(false)
            }
        };
        // What was read is about it only if it has not ended since.
        if is_asked && !is_readable(&speaker.pidfd) {
            return Ok(speaker);
        }
        Err(speaker.unless_dead("is another process than the one that was started".to_owned()))
    }

    /// Checks that it shares our namespaces and root directory. Otherwise its workers would differ from executed
    /// workers.
    pub(super) fn check_place(&self, procfs: &mut ProcFs) -> Result<(), Distrust> {
        match procfs.foreign_place(self.pid) {
            Ok(None) => Ok(()),
            Ok(Some(place)) => Err(self.unless_dead(format!("runs in another {place}"))),
            // It is about to end.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(None),
            Err(error) => Err(self.unless_dead(format!("cannot be told from other processes: {error}"))),
        }
    }

    /// Identifies a child that it has forked.
    pub(super) fn child(&self, procfs: &mut ProcFs, pidfd: &OwnedFd) -> Result<Child, Distrust> {
        let pid = match procfs.pid_of(pidfd.as_fd()) {
            Ok(Some(pid)) => pid,
            Ok(None) => return Ok(Child::Gone),
            Err(error) => return Err(self.unless_dead(format!("forked a worker that {}", of_whom(&error)))),
        };
        match procfs.stat(pid) {
            Ok(stat) if stat.ppid == self.pid => Ok(Child::Known(pid)),
            // The child was reaped at this moment, and its pid may belong to another process.
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
    /// This process as a speaker, for tests that use child processes as workers.
    pub(super) fn own() -> Self {
        use rustix::process::{PidfdFlags, pidfd_open};

        let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("a pidfd of this process");
        let pid = getpid().as_raw_pid();
        Self {
            pid,
            start_time: 0,
            pidfd,
        }
    }
}
