//! Runs a command as if the kernel (or a seccomp profile) lacked some system calls.
//!
//! `dsl-deny ENOSYS|EPERM|NOTHING CALL[,CALL…] PROGRAM…`, with CALL one of `clone3`, `pidfd_open`,
//! `pidfd_send_signal`, `close_range`, `sched_setaffinity`, `set_mempolicy`, `rt_sigqueueinfo`, `epoll_pwait2`.
//! With `NOTHING` the calls succeed and do nothing.
#![no_main]

use dsl_testkit::{fail, sys};

/// Entry point called by the C library.
#[unsafe(no_mangle)]
pub extern "C" fn main(_argc: i32, _argv: *const *const u8) -> i32 {
    let words = dsl_testkit::arguments();
    let [errno, calls, program @ ..] = words.as_slice() else {
        fail("usage: dsl-deny ERRNO CALLS PROGRAM…")
    };
    let errno = match errno.as_str() {
        "ENOSYS" => libc::ENOSYS,
        "EPERM" => libc::EPERM,
        "NOTHING" => 0,
        _ => fail("ERRNO must be ENOSYS, EPERM or NOTHING"),
    };
    let numbers: Vec<_> = calls.split(',').map(number).collect();
    if let Err(error) = sys::deny(&numbers, errno) {
        fail(&format!("cannot install the filter: {error}"));
    }
    let error = sys::exec(program);
    fail(&format!("cannot execute {:?}: {error}", program.first()))
}

fn number(call: &str) -> libc::c_long {
    match call {
        "clone3" => libc::SYS_clone3,
        "epoll_pwait2" => libc::SYS_epoll_pwait2,
        "pidfd_open" => libc::SYS_pidfd_open,
        "pidfd_send_signal" => libc::SYS_pidfd_send_signal,
        "close_range" => libc::SYS_close_range,
        "sched_setaffinity" => libc::SYS_sched_setaffinity,
        "set_mempolicy" => libc::SYS_set_mempolicy,
        "rt_sigqueueinfo" => libc::SYS_rt_sigqueueinfo,
        _ => fail(&format!("unknown system call {call:?}")),
    }
}
