//! Waiting for children, with their resource usage.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

/// Which child to wait for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Target<'a> {
    /// The child behind this pidfd.
    PidFd(BorrowedFd<'a>),
    /// The child with this pid.
    Pid(i32),
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Death {
    /// Exit code, or the signal's number.
    pub(crate) status: i32,
    /// Ended by a signal.
    pub(crate) signaled: bool,
    /// Dumped core.
    pub(crate) core: bool,
    /// Processor time in user mode.
    pub(crate) user: Duration,
    /// Processor time in kernel mode.
    pub(crate) system: Duration,
    /// Peak resident memory, bytes.
    pub(crate) max_rss: u64,
}

impl Death {
    /// Reads a status in the form of wait(2), which tells nothing about usage.
    pub(crate) fn of(status: i32) -> Self {
        let signal = status & 0x7f;
        Self {
            status: if signal == 0 { status >> 8 & 0xff } else { signal },
            signaled: signal != 0,
            core: signal != 0 && status & 0x80 != 0,
            user: Duration::ZERO,
            system: Duration::ZERO,
            max_rss: 0,
        }
    }
}

/// Looks for one dead child without blocking. `None`: children exist, none has died. `ECHILD`: there are no
/// children.
///
/// With `reap` false the child stays unreaped.
///
/// [waitid(2)](https://man7.org/linux/man-pages/man2/waitid.2.html)
pub(crate) fn try_wait(target: Target<'_>, reap: bool) -> io::Result<Option<Death>> {
    let target = match target {
        Target::PidFd(fd) => (libc::P_PIDFD, fd.as_raw_fd() as u32),
        Target::Pid(pid) => (libc::P_PID, pid as u32),
    };
    Ok(wait(target, reap)?.map(|(_, death)| death))
}

/// The pid of a dead child, which stays unreaped: only for a process that owns all its children. `None`: children
/// exist, none has died. `ECHILD`: there are no children.
pub(crate) fn find_dead() -> io::Result<Option<i32>> {
    Ok(wait((libc::P_ALL, 0), false)?.map(|(pid, _)| pid))
}

fn wait((kind, id): (libc::idtype_t, u32), reap: bool) -> io::Result<Option<(i32, Death)>> {
    let mut options = libc::WEXITED | libc::WNOHANG | libc::__WALL;
    if !reap {
        options |= libc::WNOWAIT;
    }
    // SAFETY: both types are plain integers, for which zero is a valid value.
    let mut info: libc::siginfo_t = unsafe { core::mem::zeroed() };
    // SAFETY: as above.
    let mut usage: libc::rusage = unsafe { core::mem::zeroed() };
    // Rustix's waitid and libc's drop the fifth argument, which carries the usage.
    // SAFETY: both buffers outlive the call and have the kernel's layout.
    let result = unsafe { libc::syscall(libc::SYS_waitid, kind, id, &raw mut info, options, &raw mut usage) };
    super::checked(result)?;
    // SAFETY: waitid filled the child fields, or left them zero.
    let pid = unsafe { info.si_pid() };
    if pid == 0 {
        return Ok(None);
    }
    // SAFETY: as above.
    let status = unsafe { info.si_status() };
    let death = Death {
        status,
        signaled: info.si_code != libc::CLD_EXITED,
        core: info.si_code == libc::CLD_DUMPED,
        user: duration(usage.ru_utime),
        system: duration(usage.ru_stime),
        max_rss: usage.ru_maxrss as u64 * 1024,
    };
    Ok(Some((pid, death)))
}

fn duration(time: libc::timeval) -> Duration {
    Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000)
}

/// Whether a child is stopped by a signal now. Leaves that report for other waiters.
pub(crate) fn is_stopped(pid: i32) -> bool {
    let options = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(pid)
        .is_some_and(|pid| waitid(WaitId::Pid(pid), options).is_ok_and(|status| status.is_some()))
}

/// Whether a child, living or dead and not yet reaped, is in this process group.
pub(crate) fn has_child_in_group(group: i32) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Pid::from_raw(group).is_some_and(|group| waitid(WaitId::Pgid(Some(group)), options).is_ok())
}

/// Whether `waitid` takes pidfds (kernel 5.4). We ask with our own pidfd: only such a kernel answers that it is not
/// our child.
pub(crate) fn can_wait_for_pidfd(own: &std::os::fd::OwnedFd) -> bool {
    use std::os::fd::AsFd;
    let answer = try_wait(Target::PidFd(own.as_fd()), false);
    answer.is_err_and(|error| error.raw_os_error() == Some(libc::ECHILD))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_tells_code_signal_and_core() {
        for (status, expected) in [
            (0, (0, false, false)),
            (3 << 8, (3, false, false)),
            (255 << 8, (255, false, false)),
            (9, (9, true, false)),
            (139, (11, true, true)),
        ] {
            let death = Death::of(status);
            assert_eq!((death.status, death.signaled, death.core), expected, "{status}");
        }
    }
}
