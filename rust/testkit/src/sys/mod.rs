//! System calls that neither std nor rustix offer safely. All `unsafe` of the test programs is in this module.

use std::ffi::CString;
use std::io;
use std::os::fd::RawFd;
use std::ptr;

pub use signal::{Disposition, block, caught, dispose, suspend_until, trace_to};

mod signal;

/// Ends the process at once, without exit handlers. [`_exit(2)`](https://man7.org/linux/man-pages/man2/_exit.2.html)
pub fn exit_now(code: i32) -> ! {
    // SAFETY: takes no pointer and does not return.
    unsafe { libc::_exit(code) }
}

/// Writes all of `bytes`, ignoring errors: a test program cannot report them.
pub fn write_all(fd: RawFd, bytes: &[u8]) {
    let mut rest = bytes;
    while !rest.is_empty() {
        // SAFETY: pointer and length come from one live slice.
        let written = unsafe { libc::write(fd, rest.as_ptr().cast(), rest.len()) };
        match usize::try_from(written) {
            Ok(count) => rest = &rest[count.min(rest.len())..],
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Duplicates this process; `None` in the child. [`fork(2)`](https://man7.org/linux/man-pages/man2/fork.2.html)
///
/// # Errors
/// What the kernel says, for instance `EAGAIN` at a process limit.
pub fn fork() -> io::Result<Option<i32>> {
    // SAFETY: every thread but the caller sleeps in a system call when a test program forks, and glibc
    // itself makes its allocator usable in the child.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(pid)),
    }
}

/// Sends a signal; true if it could be sent. [`kill(2)`](https://man7.org/linux/man-pages/man2/kill.2.html)
pub fn kill(pid: i32, signal: i32) -> bool {
    // SAFETY: takes no pointer.
    unsafe { libc::kill(pid, signal) == 0 }
}

/// Closes a descriptor. [`close(2)`](https://man7.org/linux/man-pages/man2/close.2.html)
pub fn close(fd: RawFd) {
    // SAFETY: the test programs keep no owner for the descriptors they are told to close.
    unsafe { libc::close(fd) };
}

/// Waits for one child: (pid, wait status), or `None` when there is none left.
pub fn wait_any() -> Option<(i32, i32)> {
    let mut status = 0;
    loop {
        // SAFETY: `status` is a live i32.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        if pid > 0 {
            return Some((pid, status));
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return None;
        }
    }
}

/// Waits for one given child.
pub fn wait_for(pid: i32) {
    // SAFETY: a null status pointer is allowed.
    while unsafe { libc::waitpid(pid, ptr::null_mut(), 0) } == -1 {
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// This process's id, from the kernel.
pub fn own_pid() -> i32 {
    // SAFETY: takes no argument and cannot fail.
    unsafe { libc::getpid() }
}

/// `CLOCK_MONOTONIC` in nanoseconds: the clock Python calls `time.monotonic_ns`.
pub fn monotonic_ns() -> i64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is a live timespec, and the clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Replaces this program and leaves signals, mask and descriptors untouched (std's `exec` resets some). Returns
/// only when it failed. [`execv(3)`](https://man7.org/linux/man-pages/man3/exec.3.html)
pub fn exec(words: &[String]) -> io::Error {
    let Ok(owned) = c_strings(words) else {
        return io::Error::from(io::ErrorKind::InvalidInput);
    };
    let pointers = c_pointers(&owned);
    // SAFETY: a null-terminated array of pointers to NUL-terminated strings, all alive here.
    unsafe { libc::execvp(pointers[0], pointers.as_ptr()) };
    io::Error::last_os_error()
}

/// Starts a program with `posix_spawn` and returns its pid once it has been executed.
///
/// # Errors
/// The errno of the failed step.
pub fn spawn(words: &[String]) -> io::Result<i32> {
    let owned = c_strings(words)?;
    let pointers = c_pointers(&owned);
    let mut pid = 0;
    // SAFETY: the arrays are null-terminated and alive during the call; null attributes mean the defaults.
    let code = unsafe {
        libc::posix_spawn(
            &raw mut pid,
            pointers[0],
            ptr::null(),
            ptr::null(),
            pointers.as_ptr().cast(),
            environment(),
        )
    };
    if code == 0 {
        Ok(pid)
    } else {
        Err(io::Error::from_raw_os_error(code))
    }
}

fn environment() -> *const *mut libc::c_char {
    unsafe extern "C" {
        static environ: *const *mut libc::c_char;
    }
    // SAFETY: glibc defines `environ`; the test programs never change their environment.
    unsafe { environ }
}

fn c_strings(words: &[String]) -> io::Result<Vec<CString>> {
    let owned: Result<Vec<_>, _> = words.iter().map(|word| CString::new(word.as_str())).collect();
    owned.map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn c_pointers(words: &[CString]) -> Vec<*const libc::c_char> {
    words
        .iter()
        .map(|word| word.as_ptr())
        .chain([ptr::null()])
        .collect()
}

/// Starts a child that borrows this process's memory and never gives it back: the caller is stuck in the
/// kernel, in state D but killable, as a program is between vfork and exec.
/// [`clone(2)`](https://man7.org/linux/man-pages/man2/clone.2.html)
pub fn vfork_and_block() {
    extern "C" fn sleep_forever(_argument: *mut libc::c_void) -> i32 {
        loop {
            // SAFETY: takes no argument.
            unsafe { libc::pause() };
        }
    }
    let mut stack = vec![0_u128; 4096];
    let top = stack.as_mut_ptr_range().end.cast();
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack is private, aligned and outlives the child, because this thread cannot go on before it.
    unsafe { libc::clone(sleep_forever, top, flags, ptr::null_mut()) };
}

/// Memory policy of this thread: (mode, node mask).
///
/// [`get_mempolicy(2)`](https://man7.org/linux/man-pages/man2/get_mempolicy.2.html)
pub fn memory_policy() -> Option<(i32, [u64; 16])> {
    let mut mode = 0_i32;
    let mut nodes = [0_u64; 16];
    let bits = (nodes.len() * 64) as libc::c_ulong;
    // SAFETY: both pointers are live and the mask holds the number of bits we say.
    let code = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            nodes.as_mut_ptr(),
            bits,
            0_usize,
            0_usize,
        )
    };
    (code == 0).then_some((mode, nodes))
}

/// Makes the listed system calls fail with `errno` (0: succeed, and do nothing) here and in every program executed
/// from here. [`seccomp(2)`](https://man7.org/linux/man-pages/man2/seccomp.2.html)
///
/// # Errors
/// What the kernel says when it refuses the filter.
pub fn deny(numbers: &[libc::c_long], errno: i32) -> io::Result<()> {
    let statement = |code: u32, k: u32, jt: u8| libc::sock_filter {
        code: code as u16,
        jt,
        jf: 0,
        k,
    };
    let load_number = statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0);
    let mut program = vec![load_number];
    for (index, &number) in numbers.iter().enumerate() {
        let to_the_end = (numbers.len() - index) as u8;
        program.push(statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            number as u32,
            to_the_end,
        ));
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0));
    program.push(statement(
        libc::BPF_RET | libc::BPF_K,
        libc::SECCOMP_RET_ERRNO | errno as u32,
        0,
    ));
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `filter` points into `program`, and both live until the call returns.
    let code = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const filter,
        )
    };
    if code == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
