//! Landlock, which rustix does not have.
//!
//! [landlock(7)](https://man7.org/linux/man-pages/man7/landlock.7.html)

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// `LANDLOCK_ACCESS_FS_MAKE_SYM`: some right that the oldest version of Landlock knows.
const MAKE_SYMLINK: u64 = 1 << 12;

/// A set of rules by which nobody may make symbolic links.
pub(crate) fn ruleset() -> io::Result<OwnedFd> {
    let attributes = MAKE_SYMLINK;
    // SAFETY: the kernel reads as many bytes of `attributes` as we say, and it lives as long as the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            &raw const attributes,
            size_of::<u64>(),
            0,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Puts this thread under a set of rules, for good. It needs `no_new_privs`.
pub(crate) fn restrict_self(rules: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes numbers. What it forbids can make calls fail, and touches no memory.
    let result = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
