//! The only home of `unsafe`: one safe function per system call.
//!
//! What makes these calls sound: descriptors come in as borrowed or owned types, so none is used after it was
//! closed; pids are signalled only while a descriptor or an unreaped child pins them; buffers are owned by the
//! caller for the whole call. The one delicate place is [`clone`], whose child shares our memory until it
//! executes its program; its rules stand at the top of that module.
//!
//! Calls that rustix has are taken from rustix. It lacks the calls here, or has them in a form that does not fit.

#![allow(unsafe_code)]

pub(crate) mod clone;
pub(crate) mod exit;
pub(crate) mod face;
pub(crate) mod peer;
pub(crate) mod signal;
pub(crate) mod wait;

mod arch;

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The result of a call of the C library, which is negative if the call has failed.
fn checked<T: Copy + Default + PartialOrd>(result: T) -> io::Result<T> {
    if result < T::default() {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Whether `clone3` exists and is not refused: a size of zero is answered with EINVAL. Rustix has no clone.
pub(crate) fn has_clone3() -> bool {
    // SAFETY: the kernel checks the size before it looks at the null pointer.
    let result = unsafe { arch::syscall(libc::SYS_clone3, [0; 6]) };
    result == -(libc::EINVAL as isize)
}

/// Whether `close_range` exists: an empty range above every descriptor closes nothing. Rustix does not have it.
pub(crate) fn has_close_range() -> bool {
    let last = u32::MAX as usize;
    // SAFETY: no descriptor has this number.
    let result = unsafe { arch::syscall(libc::SYS_close_range, [last, last, 0, 0, 0, 0]) };
    result == 0
}

/// A close-on-exec copy, 3 or above, of a descriptor known by its number only, which rustix does not take.
///
/// [fcntl(2)](https://man7.org/linux/man-pages/man2/fcntl.2.html)
pub fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: an invalid number is answered with EBADF.
    let copy = checked(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) })?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Takes over a descriptor that this process was started with, by the number it was given. The descriptor will not
/// survive another `execve`.
pub fn take_over(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: an invalid number is answered with EBADF.
    checked(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) })?;
    // SAFETY: it is open, and the caller, which was given its number, is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Lets the kernel hold at most so many unsent bytes of a TCP connection. Rustix does not have this option.
///
/// [tcp(7)](https://man7.org/linux/man-pages/man7/tcp.7.html)
pub fn limit_unsent(socket: impl AsFd, bytes: u32) -> io::Result<()> {
    // SAFETY: the kernel reads four bytes of `bytes`, which lives as long as the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_NOTSENT_LOWAT,
            (&raw const bytes).cast(),
            size_of::<u32>() as libc::socklen_t,
        )
    };
    checked(result).map(drop)
}

/// Hour, minute and second of the local time, so many seconds after the beginning of 1970 in UTC. Rustix has no time
/// zones. The zone is that of the first call in this process.
///
/// [localtime_r(3)](https://man7.org/linux/man-pages/man3/localtime_r.3.html)
pub(crate) fn local_time(second: u64) -> [i32; 3] {
    let second = second as libc::time_t;
    // SAFETY: integers and a pointer that nobody follows, for which zero is a valid value.
    let mut time: libc::tm = unsafe { core::mem::zeroed() };
    // SAFETY: both live as long as the call. A year that is out of range leaves zeros.
    let _ = unsafe { libc::localtime_r(&raw const second, &raw mut time) };
    [time.tm_hour, time.tm_min, time.tm_sec]
}

/// Proof that this process was forked by code that expects it: it has one thread, and a copy of all descriptors
/// that only this thread uses. Code with this proof may do to both what the start of a worker does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ForkedChild {
    /// The process that forked it.
    pub(crate) parent: i32,
}

impl ForkedChild {
    /// `None` in the process `parent` itself.
    pub(crate) fn of(parent: i32) -> Option<Self> {
        let own = own_pid();
        (own != parent).then_some(Self { parent })
    }
}

/// A set of rules of Landlock by which nobody may make symbolic links. Rustix does not have Landlock.
///
/// [landlock(7)](https://man7.org/linux/man-pages/man7/landlock.7.html)
pub(crate) fn landlock_ruleset() -> io::Result<OwnedFd> {
    /// `LANDLOCK_ACCESS_FS_MAKE_SYM`: some right that the oldest version of Landlock knows.
    const MAKE_SYMLINK: u64 = 1 << 12;
    let attributes = MAKE_SYMLINK;
    let (pointer, length) = (&raw const attributes, size_of::<u64>());
    // SAFETY: the kernel reads as many bytes of `attributes` as we say, and it lives as long as the call.
    let fd = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, pointer, length, 0) };
    let fd = checked(fd)?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Puts this thread under a set of rules of Landlock, for good. It needs `no_new_privs`.
pub(crate) fn restrict_self(rules: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: takes numbers. What it forbids can make calls fail, and touches no memory.
    checked(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) }).map(drop)
}

/// Puts memory into huge pages. Its contents stay the same. Linux 6.1; older kernels refuse.
///
/// [madvise(2)](https://man7.org/linux/man-pages/man2/madvise.2.html)
pub(crate) fn collapse(range: &Range<usize>) -> io::Result<()> {
    /// Not in every libc.
    const MADV_COLLAPSE: i32 = 25;
    let start = std::ptr::without_provenance_mut(range.start);
    // SAFETY: the kernel moves pages below their addresses, which no code can notice, and refuses unmapped
    // addresses.
    checked(unsafe { libc::madvise(start, range.len(), MADV_COLLAPSE) }).map(drop)
}

/// Ends this process at once, and skips everything that its program does at exit.
///
/// [_exit(2)](https://man7.org/linux/man-pages/man2/_exit.2.html)
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: takes a number, and nothing of this process is used any more.
    unsafe { libc::_exit(code) }
}

/// Whether a descriptor is closed by `execve`; true for a number that is not open. Rustix does not take bare
/// numbers.
pub(crate) fn is_close_on_exec(fd: RawFd) -> bool {
    // SAFETY: an invalid number is answered with EBADF.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    flags < 0 || flags & libc::FD_CLOEXEC != 0
}

/// Pid of this process.
pub(crate) fn own_pid() -> i32 {
    rustix::process::getpid().as_raw_pid()
}

/// Process group of this process; 0 when its leader is outside the pid namespace, which rustix's function cannot
/// express.
///
/// [getpgrp(2)](https://man7.org/linux/man-pages/man2/getpgrp.2.html)
pub(crate) fn process_group() -> i32 {
    // SAFETY: takes no argument and cannot fail.
    unsafe { libc::getpgrp() }
}

/// Process group of a process, -1 when there is none; 0 when its leader is outside the pid namespace, which
/// rustix's function cannot express.
///
/// [getpgid(2)](https://man7.org/linux/man-pages/man2/getpgid.2.html)
pub(crate) fn group_of(pid: i32) -> i32 {
    // SAFETY: takes a number.
    unsafe { libc::getpgid(pid) }
}

/// What this process passes on to its children and rustix does not show: class and level of I/O, the memory policy with
/// the first 64 of its nodes, the key ring of the session, and what prctl(2) sets. -1 for what this kernel does not
/// tell.
///
/// [ioprio_get(2)](https://man7.org/linux/man-pages/man2/ioprio_set.2.html),
/// [get_mempolicy(2)](https://man7.org/linux/man-pages/man2/get_mempolicy.2.html),
/// [prctl(2)](https://man7.org/linux/man-pages/man2/prctl.2.html)
pub(crate) fn inherited() -> Vec<i64> {
    /// Get: secure bits, huge pages, I/O flusher, memory that is never written and executed, merging of pages. The last
    /// three are newer than the oldest C library.
    // The libc crate has it for some processors only.
    const GET_SPECULATION: libc::c_int = 52;
    const OPTIONS: [libc::c_int; 5] = [libc::PR_GET_SECUREBITS, libc::PR_GET_THP_DISABLE, 58, 66, 68];
    /// Kinds of misspeculation.
    const SPECULATION: std::ops::Range<libc::c_ulong> = 0..3;
    const SESSION_KEYRING: libc::c_int = -3;
    const OWN_PROCESS: libc::c_int = 1;
    const MOST_NODES: usize = 1 << 16;
    // SAFETY: takes numbers.
    let io = unsafe { libc::syscall(libc::SYS_ioprio_get, OWN_PROCESS, 0) };
    let mut mode: libc::c_int = -1;
    let mut nodes = vec![0u64; MOST_NODES / 64];
    // SAFETY: `mode` and `nodes` live as long as the call, which writes an int and at most `MOST_NODES` bits.
    let told = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            nodes.as_mut_ptr(),
            MOST_NODES,
            0usize,
            0,
        )
    };
    let policy = if told == 0 { i64::from(mode) } else { -1 };
    // SAFETY: takes numbers.
    let keys = unsafe { libc::syscall(libc::SYS_keyctl, 0, SESSION_KEYRING, 0) };
    let mut found = vec![io, policy, nodes[0] as i64, keys];
    // SAFETY: these options take no argument, and return what is set.
    found.extend(OPTIONS.map(|option| i64::from(unsafe { libc::prctl(option, 0, 0, 0, 0) })));
    for kind in SPECULATION {
        // SAFETY: takes numbers.
        let told = unsafe { libc::prctl(GET_SPECULATION, kind, 0, 0, 0) };
        found.push(i64::from(told));
    }
    found
}

/// Leader of this process's session; 0 when it is outside the pid namespace, which rustix's function cannot
/// express.
///
/// [getsid(2)](https://man7.org/linux/man-pages/man2/getsid.2.html)
pub(crate) fn session_leader() -> i32 {
    // SAFETY: takes a number; about ourselves it cannot fail.
    unsafe { libc::getsid(0) }
}

unsafe extern "C" {
    /// The environment block. The libc crate has it for glibc only.
    ///
    /// [environ(7)](https://man7.org/linux/man-pages/man7/environ.7.html)
    static mut environ: *const *const c_char;
}

/// The environment block of this process as it is. The standard library's version drops entries without a name or a
/// value. Do not change the environment during the call.
pub fn environment() -> Vec<CString> {
    let mut block = Vec::new();
    // SAFETY: the pointer is read, not kept. As with `std::env::vars`, no thread may change the environment
    // meanwhile.
    let mut next = unsafe { environ };
    while !next.is_null() {
        // SAFETY: the array ends in a null pointer, which has not been passed yet.
        let entry = unsafe { *next };
        if entry.is_null() {
            break;
        }
        // SAFETY: every entry is a string that ends in a zero byte.
        block.push(unsafe { CStr::from_ptr(entry) }.to_owned());
        next = next.wrapping_add(1);
    }
    block
}
