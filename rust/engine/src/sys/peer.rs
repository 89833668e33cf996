//! What the kernel says about the other end of a unix socket.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Newer than the libc crate, and the same number on the processors of `arch`.
const SO_PEERPIDFD: libc::c_int = 77;

/// Pid and user of the process that has connected the other end, or listens there. The pid is 0 for a process without
/// a number in this pid namespace, which rustix's function cannot express.
///
/// [unix(7)](https://man7.org/linux/man-pages/man7/unix.7.html)
pub(crate) fn credentials(socket: BorrowedFd<'_>) -> io::Result<(i32, u32)> {
    let mut found = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    option(socket, libc::SO_PEERCRED, &mut found)?;
    Ok((found.pid, found.uid))
}

/// A pidfd of that process. Fails with `ENOPROTOOPT` before Linux 6.5.
pub(crate) fn pidfd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut found: libc::c_int = -1;
    option(socket, SO_PEERPIDFD, &mut found)?;
    // SAFETY: the kernel has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(found) })
}

/// Reads an option whose value is plain integers.
fn option<T: Copy>(socket: BorrowedFd<'_>, name: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `value`, which lives as long as the call; each caller's type
    // holds any bytes.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            std::ptr::from_mut(value).cast(),
            &raw mut length,
        )
    };
    super::checked(result).map(drop)
}
