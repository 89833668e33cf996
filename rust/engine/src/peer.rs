//! Whether the process at the other end of a unix socket is a process of this user here, by the kernel's word alone.
//!
//! *Here* means: it shares all our namespaces and our root directory. A process of the same user in a container may
//! reach our sockets, because `/tmp` is often mounted there, and everything else that it says can be a lie.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};

use crate::poller::is_readable;
use crate::procfs::ProcFs;
use crate::sys;

/// The process that has connected the other end of a socket, or listens there: one of this user, here.
#[derive(Debug)]
pub struct Peer {
    pid: i32,
    start_time: u64,
    /// `None` without pidfds.
    pidfd: Option<OwnedFd>,
}

/// Why a process at the other end is not believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stranger {
    /// It has ended.
    Gone,
    /// It belongs to another user.
    OtherUser,
    /// It has another namespace of this kind, or another root directory.
    Elsewhere(&'static str),
    /// The kernel does not tell.
    Unknown(String),
}

impl fmt::Display for Stranger {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gone => out.write_str("has ended"),
            Self::OtherUser => out.write_str("belongs to another user"),
            Self::Elsewhere(place) => write!(out, "runs in another {place}"),
            Self::Unknown(why) => write!(out, "cannot be told from other processes: {why}"),
        }
    }
}

impl From<io::Error> for Stranger {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Gone,
            _ => Self::Unknown(error.to_string()),
        }
    }
}

impl From<Stranger> for io::Error {
    fn from(stranger: Stranger) -> Self {
        let kind = match stranger {
            Stranger::Gone => io::ErrorKind::ConnectionReset,
            _ => io::ErrorKind::PermissionDenied,
        };
        Self::new(kind, stranger.to_string())
    }
}

impl Peer {
    /// The process at the other end, if it is one of this user here. Ask before you send anything, and before you
    /// believe anything that comes.
    pub fn of(socket: impl AsFd) -> Result<Self, Stranger> {
        let procfs = ProcFs::open().map_err(|error| Stranger::Unknown(error.to_string()));
        Self::found(&mut procfs?, socket.as_fd(), pin)
    }

    fn found(
        procfs: &mut ProcFs,
        socket: BorrowedFd<'_>,
        pin: impl FnOnce(BorrowedFd<'_>, i32) -> io::Result<Option<OwnedFd>>,
    ) -> Result<Self, Stranger> {
        let (pid, uid) = sys::peer::credentials(socket)?;
        if uid != geteuid().as_raw() {
            return Err(Stranger::OtherUser);
        }
        if pid <= 0 {
            return Err(Stranger::Elsewhere("pid namespace"));
        }
        let pidfd = pin(socket, pid)?;
        let peer = Self {
            pid,
            start_time: procfs.stat(pid)?.start_time,
            pidfd,
        };
        if let Some(place) = procfs.foreign_place(pid)? {
            return Err(Stranger::Elsewhere(place));
        }
        // All that was read is about this process only if it is still there.
        if peer.is_there(procfs) {
            Ok(peer)
        } else {
            Err(Stranger::Gone)
        }
    }

    /// Its pid, which is its own as long as [`Peer::is_there`].
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether it has not ended since.
    pub(crate) fn is_there(&self, procfs: &mut ProcFs) -> bool {
        if let Some(pidfd) = &self.pidfd {
            let is_same = procfs
                .pid_of(pidfd.as_fd())
                .is_ok_and(|pid| pid == Some(self.pid));
            return is_same && !is_readable(pidfd);
        }
        procfs
            .stat(self.pid)
            .is_ok_and(|stat| stat.start_time == self.start_time && !stat.is_dead())
    }
}

/// A pidfd of the process at the other end; `None` without pidfds, where only its start time tells it from a later
/// process with its number.
fn pin(socket: BorrowedFd<'_>, pid: i32) -> io::Result<Option<OwnedFd>> {
    match sys::peer::pidfd(socket) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOPROTOOPT) => pin_by_number(pid),
            // It was reaped. The kernels since 6.5 say that in these ways.
            Some(libc::ESRCH | libc::EINVAL | libc::ENODATA) => Err(io::ErrorKind::NotFound.into()),
            _ => Err(error),
        },
    }
}

/// As [`pin`] before Linux 6.5.
fn pin_by_number(pid: i32) -> io::Result<Option<OwnedFd>> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(pidfd) => Ok(Some(pidfd)),
        Err(Errno::SRCH) => Err(io::ErrorKind::NotFound.into()),
        // An old kernel or a strict profile.
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests;
