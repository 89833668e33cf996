//! What the child does between its birth and its program, under the rules of [`super`].

use core::ffi::c_void;
use std::os::fd::AsRawFd;

use super::binding::bind;
use super::{Descriptors, Group, Shared, Source, Stage};
use crate::sys::arch;
use crate::sys::signal::SET_BYTES;

const CLOSE_RANGE_UNSHARE: usize = 2;

/// The child. Returns only on failure, after noting the stage and errno for the parent.
///
/// # Safety
/// `shared` must point to a [`Shared`] that nobody else uses while the child runs.
pub(super) unsafe extern "C" fn child_main(shared: *mut c_void) -> i32 {
    // SAFETY: the parent passes a live `Shared` and waits until this process is done with it.
    let shared = unsafe { &mut *shared.cast::<Shared<'_>>() };
    let (stage, result) = run_plan(shared);
    shared.stage = stage as i32;
    shared.errno = (-result) as i32;
    127
}

macro_rules! attempt {
    ($stage:expr, $call:expr) => {
        let result = $call;
        if result < 0 {
            return ($stage, result);
        }
    };
}

pub(super) fn call(number: libc::c_long, args: [usize; 6]) -> isize {
    // SAFETY: only called below and in `binding`, with arguments that the named call takes.
    unsafe { arch::syscall(number, args) }
}

fn run_plan(shared: &mut Shared<'_>) -> (Stage, isize) {
    let plan = shared.plan;
    watch_own_death(shared);
    if let Descriptors::Unshare(keep) = plan.descriptors {
        let all = u32::MAX as usize;
        attempt!(
            Stage::Descriptors,
            call(
                libc::SYS_close_range,
                [keep as usize, all, CLOSE_RANGE_UNSHARE, 0, 0, 0]
            )
        );
    }
    attempt!(Stage::Group, join_group(plan.group));
    reset_signals(shared.reset_handlers);
    for (target, source) in (0i32..).zip(plan.stdio) {
        attempt!(Stage::Stdio, place(target, source));
    }
    if let Some(cwd) = plan.cwd {
        attempt!(
            Stage::Chdir,
            call(libc::SYS_chdir, [cwd.as_ptr() as usize, 0, 0, 0, 0, 0])
        );
    }
    if let Some(signal) = plan.parent_death_signal {
        let option = libc::PR_SET_PDEATHSIG as usize;
        attempt!(
            Stage::ParentDeath,
            call(libc::SYS_prctl, [option, signal as usize, 0, 0, 0, 0])
        );
        // The parent may have died before the line above took effect.
        if call(libc::SYS_getppid, [0; 6]) != shared.parent as isize {
            return (Stage::ParentDeath, -(libc::ESRCH as isize));
        }
    }
    let (stage, result) = apply_resources(shared);
    if result < 0 {
        return (stage, result);
    }
    attempt!(Stage::Descriptors, close_rest(plan.descriptors));
    let how = libc::SIG_SETMASK as usize;
    let mask = (&raw const plan.mask.0) as usize;
    call(libc::SYS_rt_sigprocmask, [how, mask, 0, SET_BYTES, 0, 0]);
    let exec = [
        plan.path.as_ptr() as usize,
        plan.argv.as_ptr() as usize,
        plan.envp.as_ptr() as usize,
        0,
        0,
        0,
    ];
    // SAFETY: an aligned field of a live value.
    unsafe { (&raw mut shared.reached_exec).write_volatile(true) };
    (Stage::Exec, call(libc::SYS_execve, exec))
}

/// A failure is no reason not to run: the parent sees that it is not watched.
fn watch_own_death(shared: &mut Shared<'_>) {
    let (Some((epoll, token)), pidfd @ 0..) = (shared.plan.watch, shared.pidfd) else {
        return;
    };
    let event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: token,
    };
    let pointer = (&raw const event) as usize;
    let add = libc::EPOLL_CTL_ADD as usize;
    let args = [epoll.as_raw_fd() as usize, add, pidfd as usize, pointer, 0, 0];
    let watched = call(libc::SYS_epoll_ctl, args) == 0;
    // SAFETY: an aligned field of a live value.
    unsafe { (&raw mut shared.watched).write_volatile(watched) };
}

fn join_group(group: Group) -> isize {
    match group {
        Group::Own => call(libc::SYS_setpgid, [0, 0, 0, 0, 0, 0]),
        Group::Join(pgid) => call(libc::SYS_setpgid, [0, pgid as usize, 0, 0, 0, 0]),
        Group::Inherit => 0,
    }
}

/// The Python interpreter ignores SIGPIPE and SIGXFSZ, and ignored signals stay ignored across `execve`.
fn reset_signals(all_handlers: bool) {
    let default = [0usize; 4];
    let pointer = (&raw const default) as usize;
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        call(
            libc::SYS_rt_sigaction,
            [signal as usize, pointer, 0, SET_BYTES, 0, 0],
        );
    }
    if all_handlers {
        for signal in 1..=64usize {
            let mut old = [0usize; 4];
            let old_pointer = (&raw mut old) as usize;
            call(libc::SYS_rt_sigaction, [signal, 0, old_pointer, SET_BYTES, 0, 0]);
            // SAFETY: `old` is a live array of this frame that the kernel has written.
            let [handler, ..] = unsafe { (&raw const old).read_volatile() };
            if handler != libc::SIG_IGN && handler != libc::SIG_DFL {
                call(libc::SYS_rt_sigaction, [signal, pointer, 0, SET_BYTES, 0, 0]);
            }
        }
    }
}

fn place(target: i32, source: Source) -> isize {
    let target = target as usize;
    match source {
        // An inherited stream may be marked close-on-exec in the parent; the child's copy must not be.
        Source::Same => call(libc::SYS_fcntl, [target, libc::F_SETFD as usize, 0, 0, 0, 0]),
        Source::Stdout => call(libc::SYS_dup3, [1, target, 0, 0, 0, 0]),
        Source::Slot(fd) => call(libc::SYS_dup3, [fd as usize, target, 0, 0, 0, 0]),
    }
}

fn apply_resources(shared: &mut Shared<'_>) -> (Stage, isize) {
    let plan = shared.plan;
    if let Some((soft, hard)) = plan.open_files {
        let limit = [soft, hard];
        let resource = libc::RLIMIT_NOFILE as usize;
        let pointer = (&raw const limit) as usize;
        attempt!(
            Stage::Limit,
            call(libc::SYS_prlimit64, [0, resource, pointer, 0, 0, 0])
        );
    }
    if let Err((stage, result)) = bind(plan.cpus, plan.memory) {
        let is_required = match stage {
            Stage::Affinity | Stage::AffinityCheck => plan.binding.requires_cpus(),
            _ => plan.binding.requires_memory(),
        };
        if is_required {
            return (stage, result);
        }
        shared.unbound_stage = stage as i32;
        shared.unbound_errno = (-result) as i32;
    }
    (Stage::Exec, 0)
}

fn close_rest(descriptors: Descriptors<'_>) -> isize {
    match descriptors {
        Descriptors::Unshare(_) => call(libc::SYS_close_range, [3, u32::MAX as usize, 0, 0, 0, 0]),
        Descriptors::CloseListed(list) => {
            for fd in list {
                call(libc::SYS_close, [*fd as usize, 0, 0, 0, 0, 0]);
            }
            0
        }
    }
}
