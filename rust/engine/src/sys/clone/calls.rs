//! The system calls of the child, one per function, under the rules of [`super`].
//!
//! Libc and rustix have all of them, but libc's would write our `errno`, and neither promises what a child in our
//! memory needs. Types rule out what a caller could get wrong.

use core::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::{Descriptors, PointerArray};
use crate::sys::arch::syscall;
use crate::sys::signal::{SET_BYTES, SignalSet};

/// The errno of a call that was refused.
pub(super) type Errno = i32;

fn done(result: isize) -> Result<(), Errno> {
    if result < 0 { Err(-result as Errno) } else { Ok(()) }
}

/// Adds a descriptor to an epoll set, which tells when it is readable.
///
/// [epoll_ctl(2)](https://man7.org/linux/man-pages/man2/epoll_ctl.2.html)
pub(super) fn watch(epoll: BorrowedFd<'_>, fd: i32, token: u64) -> Result<(), Errno> {
    let event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: token,
    };
    let pointer = (&raw const event) as usize;
    let add = libc::EPOLL_CTL_ADD as usize;
    let args = [epoll.as_raw_fd() as usize, add, fd as usize, pointer, 0, 0];
    // SAFETY: the event outlives the call; an invalid number is answered with EBADF.
    done(unsafe { syscall(libc::SYS_epoll_ctl, args) })
}

/// A descriptor table that the child shares with no other process. Code that holds this value may close and replace
/// descriptors.
pub(super) struct OwnTable(());

impl OwnTable {
    /// Leaves the parent's table, if the child shares it, for a copy of what the plan keeps.
    ///
    /// # Safety
    /// Only in a child that was cloned as `descriptors` says, and that uses no other descriptor than those that
    /// are kept.
    pub(super) unsafe fn take(descriptors: Descriptors<'_>) -> Result<Self, Errno> {
        let table = Self(());
        if let Descriptors::Unshare(keep) = descriptors {
            table.close_range(keep, u32::MAX, libc::CLOSE_RANGE_UNSHARE)?;
        }
        Ok(table)
    }

    /// Closes all descriptors from `first` on.
    pub(super) fn close_from(&self, first: u32) -> Result<(), Errno> {
        self.close_range(first, u32::MAX, 0)
    }

    /// Closes all descriptors from `first` to `last`.
    pub(super) fn close_between(&self, first: u32, last: u32) -> Result<(), Errno> {
        self.close_range(first, last, 0)
    }

    /// [close_range(2)](https://man7.org/linux/man-pages/man2/close_range.2.html)
    #[expect(clippy::unused_self, reason = "to have it is to be allowed to")]
    fn close_range(&self, first: u32, last: u32, flags: u32) -> Result<(), Errno> {
        let args = [first as usize, last as usize, flags as usize, 0, 0, 0];
        // SAFETY: takes numbers only, and no other code uses the descriptors of this table.
        done(unsafe { syscall(libc::SYS_close_range, args) })
    }

    /// [close(2)](https://man7.org/linux/man-pages/man2/close.2.html)
    #[expect(clippy::unused_self, reason = "to have it is to be allowed to")]
    pub(super) fn close(&self, fd: i32) -> Result<(), Errno> {
        // SAFETY: takes a number only, and no other code uses the descriptors of this table.
        done(unsafe { syscall(libc::SYS_close, [fd as usize, 0, 0, 0, 0, 0]) })
    }

    /// Puts a copy of a descriptor in the place of another, open across `execve`.
    ///
    /// [dup3(2)](https://man7.org/linux/man-pages/man2/dup.2.html)
    #[expect(clippy::unused_self, reason = "to have it is to be allowed to")]
    pub(super) fn replace(&self, target: i32, source: i32) -> Result<(), Errno> {
        let args = [source as usize, target as usize, 0, 0, 0, 0];
        // SAFETY: takes numbers only, and no other code uses the descriptors of this table.
        done(unsafe { syscall(libc::SYS_dup3, args) })
    }
}

/// Keeps a descriptor open across `execve`.
///
/// [F_SETFD(2const)](https://man7.org/linux/man-pages/man2/F_GETFD.2const.html)
pub(super) fn keep_across_exec(fd: i32) -> Result<(), Errno> {
    let set = libc::F_SETFD as usize;
    // SAFETY: takes numbers only; an invalid one is answered with EBADF.
    done(unsafe { syscall(libc::SYS_fcntl, [fd as usize, set, 0, 0, 0, 0]) })
}

/// Puts the calling process into a process group; 0 for a new one that it leads.
///
/// [setpgid(2)](https://man7.org/linux/man-pages/man2/setpgid.2.html)
pub(super) fn set_process_group(group: i32) -> Result<(), Errno> {
    // SAFETY: takes numbers only.
    done(unsafe { syscall(libc::SYS_setpgid, [0, group as usize, 0, 0, 0, 0]) })
}

/// [chdir(2)](https://man7.org/linux/man-pages/man2/chdir.2.html)
pub(super) fn change_directory(path: &CStr) -> Result<(), Errno> {
    // SAFETY: the string ends in a zero byte and outlives the call.
    done(unsafe { syscall(libc::SYS_chdir, [path.as_ptr() as usize, 0, 0, 0, 0, 0]) })
}

/// Asks for a signal when the thread that made this process ends.
///
/// [PR_SET_PDEATHSIG(2const)](https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html)
pub(super) fn die_with_parent(signal: i32) -> Result<(), Errno> {
    let option = libc::PR_SET_PDEATHSIG as usize;
    // SAFETY: this option takes a signal number and touches no memory.
    done(unsafe { syscall(libc::SYS_prctl, [option, signal as usize, 0, 0, 0, 0]) })
}

/// Lets another process and its descendants trace this one where Yama's `ptrace_scope` is 1. It lasts across
/// `execve`.
///
/// [PR_SET_PTRACER(2const)](https://man7.org/linux/man-pages/man2/PR_SET_PTRACER.2const.html)
pub(super) fn let_look(observer: i32) -> Result<(), Errno> {
    let option = libc::PR_SET_PTRACER as usize;
    // SAFETY: this option takes a pid and touches no memory.
    done(unsafe { syscall(libc::SYS_prctl, [option, observer as usize, 0, 0, 0, 0]) })
}

/// [getppid(2)](https://man7.org/linux/man-pages/man2/getppid.2.html)
pub(super) fn parent() -> i32 {
    // SAFETY: takes no argument and cannot fail.
    unsafe { syscall(libc::SYS_getppid, [0; 6]) as i32 }
}

/// Sets the soft and the hard limit of open files.
///
/// [prlimit(2)](https://man7.org/linux/man-pages/man2/getrlimit.2.html)
pub(super) fn limit_open_files(soft: u64, hard: u64) -> Result<(), Errno> {
    let limit = [soft, hard];
    let pointer = (&raw const limit) as usize;
    let resource = libc::RLIMIT_NOFILE as usize;
    // SAFETY: two words are the kernel's rlimit64, and they outlive the call.
    done(unsafe { syscall(libc::SYS_prlimit64, [0, resource, pointer, 0, 0, 0]) })
}

/// Sets the CPUs of the calling thread.
///
/// [sched_setaffinity(2)](https://man7.org/linux/man-pages/man2/sched_setaffinity.2.html)
pub(super) fn set_cpus(mask: &[u64]) -> Result<(), Errno> {
    let args = [0, size_of_val(mask), mask.as_ptr() as usize, 0, 0, 0];
    // SAFETY: reads as many bytes as the slice has.
    done(unsafe { syscall(libc::SYS_sched_setaffinity, args) })
}

/// The CPUs of the calling thread. What the kernel does not write stays as it is.
///
/// [sched_getaffinity(2)](https://man7.org/linux/man-pages/man2/sched_setaffinity.2.html)
pub(super) fn read_cpus(mask: &mut [u64]) -> Result<(), Errno> {
    let args = [0, size_of_val(mask), mask.as_mut_ptr() as usize, 0, 0, 0];
    // SAFETY: writes at most as many bytes as the slice has, and every value of them is valid.
    done(unsafe { syscall(libc::SYS_sched_getaffinity, args) })
}

/// [set_mempolicy(2)](https://man7.org/linux/man-pages/man2/set_mempolicy.2.html)
pub(super) fn set_memory_policy(mode: i32, nodes: &[u64]) -> Result<(), Errno> {
    let (pointer, bits) = if nodes.is_empty() {
        (0, 0)
    } else {
        // The kernel reads one bit less than it is told.
        (nodes.as_ptr() as usize, nodes.len() * 64 + 1)
    };
    // SAFETY: reads as many bits as the slice has; a null pointer of no bits is "no nodes".
    done(unsafe { syscall(libc::SYS_set_mempolicy, [mode as usize, pointer, bits, 0, 0, 0]) })
}

/// The mode of the memory policy of the calling thread, and its nodes.
///
/// [get_mempolicy(2)](https://man7.org/linux/man-pages/man2/get_mempolicy.2.html)
pub(super) fn read_memory_policy(nodes: &mut [u64]) -> Result<i32, Errno> {
    let mut mode = 0i32;
    let mode_pointer = (&raw mut mode) as usize;
    let bits = nodes.len() * 64;
    let args = [mode_pointer, nodes.as_mut_ptr() as usize, bits, 0, 0, 0];
    // SAFETY: writes one int and at most as many bits as the slice has, and every value of them is valid.
    done(unsafe { syscall(libc::SYS_get_mempolicy, args) })?;
    Ok(mode)
}

/// The kernel's sigaction: handler, flags, restorer and mask.
type Action = [usize; 4];

/// Gives a signal its default action.
pub(super) fn reset_action(signal: i32) -> Result<(), Errno> {
    set_action(signal, libc::SIG_DFL)
}

/// Ignores a signal.
pub(super) fn ignore(signal: i32) -> Result<(), Errno> {
    set_action(signal, libc::SIG_IGN)
}

/// [sigaction(2)](https://man7.org/linux/man-pages/man2/sigaction.2.html)
fn set_action(signal: i32, without_handler: libc::sighandler_t) -> Result<(), Errno> {
    let action: Action = [without_handler, 0, 0, 0];
    let args = [signal as usize, (&raw const action) as usize, 0, SET_BYTES, 0, 0];
    // SAFETY: installs no handler; the action has the kernel's layout and outlives the call.
    done(unsafe { syscall(libc::SYS_rt_sigaction, args) })
}

/// The handler of a signal, or `SIG_DFL` or `SIG_IGN`.
///
/// [sigaction(2)](https://man7.org/linux/man-pages/man2/sigaction.2.html)
pub(super) fn handler(signal: i32) -> Result<libc::sighandler_t, Errno> {
    let mut action: Action = [0; 4];
    let args = [signal as usize, 0, (&raw mut action) as usize, SET_BYTES, 0, 0];
    // SAFETY: only reads the disposition, into a buffer of the kernel's layout that outlives the call.
    done(unsafe { syscall(libc::SYS_rt_sigaction, args) })?;
    let [handler, ..] = action;
    Ok(handler)
}

/// Replaces the signal mask of the calling thread.
///
/// [sigprocmask(2)](https://man7.org/linux/man-pages/man2/sigprocmask.2.html)
pub(super) fn set_signal_mask(mask: SignalSet) -> Result<(), Errno> {
    let how = libc::SIG_SETMASK as usize;
    let args = [how, (&raw const mask.0) as usize, 0, SET_BYTES, 0, 0];
    // SAFETY: the set has the kernel's size and outlives the call.
    done(unsafe { syscall(libc::SYS_rt_sigprocmask, args) })
}

/// Executes a program; returns only on failure.
///
/// [execve(2)](https://man7.org/linux/man-pages/man2/execve.2.html)
pub(super) fn execute(path: &CStr, argv: &PointerArray<'_>, envp: &PointerArray<'_>) -> Errno {
    let (argv, envp) = (argv.as_ptr() as usize, envp.as_ptr() as usize);
    // SAFETY: both arrays end in a null pointer, every string in a zero byte, and all outlive the call.
    let result = unsafe { syscall(libc::SYS_execve, [path.as_ptr() as usize, argv, envp, 0, 0, 0]) };
    -result as Errno
}
