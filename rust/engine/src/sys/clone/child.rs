//! What the child does between its birth and its program, under the rules of [`super`].

#![allow(unsafe_code)]

use core::ffi::c_void;

use super::binding::bind;
use super::calls::{self, Errno, OwnTable};
use super::{Descriptors, Failure, Group, Shared, Source, Step};

/// The last of the kernel's signals.
const LAST_SIGNAL: i32 = 64;

/// The child. Returns only on failure, after noting the step and errno for the parent.
///
/// # Safety
/// `shared` must point to a [`Shared`] that nobody else uses while the child runs.
pub(super) unsafe extern "C" fn child_main(shared: *mut c_void) -> i32 {
    // SAFETY: the parent passes a live `Shared` and waits until this process is done with it.
    let shared = unsafe { &mut *shared.cast::<Shared<'_>>() };
    let failure = match prepare(shared) {
        Ok(()) => execute(shared),
        Err(failure) => failure,
    };
    shared.step = failure.step;
    shared.errno = failure.errno;
    127
}

/// Names the step of a call that was refused.
pub(super) fn at(step: Step) -> impl FnOnce(Errno) -> Failure {
    move |errno| Failure { step, errno }
}

fn prepare(shared: &mut Shared<'_>) -> Result<(), Failure> {
    let plan = shared.plan;
    watch_own_death(shared);
    // SAFETY: `spawn` cloned this process by the same plan, which keeps all that is used below.
    let table = unsafe { OwnTable::take(plan.descriptors) }.map_err(at(Step::Descriptors))?;
    join_group(plan.group).map_err(at(Step::Group))?;
    reset_signals(shared.reset_handlers);
    for (target, source) in (0i32..).zip(plan.stdio) {
        place(&table, target, source).map_err(at(Step::Stdio))?;
    }
    if let Some(cwd) = plan.cwd {
        calls::change_directory(cwd).map_err(at(Step::Chdir))?;
    }
    if let Some(signal) = plan.parent_death_signal {
        calls::die_with_parent(signal).map_err(at(Step::ParentDeath))?;
        // The parent may have died before the line above took effect.
        if calls::parent() != shared.parent {
            return Err(at(Step::ParentDeath)(libc::ESRCH));
        }
    }
    if let Some((soft, hard)) = plan.open_files {
        calls::limit_open_files(soft, hard).map_err(at(Step::OpenFiles))?;
    }
    bind_if_possible(shared)?;
    close_rest(&table, plan.descriptors).map_err(at(Step::Descriptors))
}

fn execute(shared: &mut Shared<'_>) -> Failure {
    let plan = shared.plan;
    // Fails only on a bad address or size.
    let _ = calls::set_signal_mask(plan.mask);
    // SAFETY: an aligned field of a live value.
    unsafe { (&raw mut shared.reached_exec).write_volatile(true) };
    at(Step::Exec)(calls::execute(plan.path, plan.argv, plan.envp))
}

/// A failure is no reason not to run: the parent sees that it is not watched.
fn watch_own_death(shared: &mut Shared<'_>) {
    let (Some((epoll, token)), pidfd @ 0..) = (shared.plan.watch, shared.pidfd) else {
        return;
    };
    let watched = calls::watch(epoll, pidfd, token).is_ok();
    // SAFETY: an aligned field of a live value.
    unsafe { (&raw mut shared.watched).write_volatile(watched) };
}

fn join_group(group: Group) -> Result<(), Errno> {
    match group {
        Group::Own => calls::set_process_group(0),
        Group::Join(group) => calls::set_process_group(group),
        Group::Inherit => Ok(()),
    }
}

/// The Python interpreter ignores SIGPIPE and SIGXFSZ, and ignored signals stay ignored across `execve`.
fn reset_signals(all_handlers: bool) {
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        // Fails only for what is no signal, or cannot be caught.
        let _ = calls::reset_action(signal);
    }
    if all_handlers {
        for signal in 1..=LAST_SIGNAL {
            let handler = calls::handler(signal).unwrap_or(libc::SIG_DFL);
            if handler != libc::SIG_IGN && handler != libc::SIG_DFL {
                // As above.
                let _ = calls::reset_action(signal);
            }
        }
    }
}

/// Puts a standard stream in place.
fn place(table: &OwnTable, target: i32, source: Source) -> Result<(), Errno> {
    let fd = match source {
        // An inherited stream may be marked close-on-exec in the parent; the child's copy must not be.
        Source::Same => return calls::keep_across_exec(target),
        Source::Stdout => 1,
        Source::Slot(fd) => fd,
    };
    table.replace(target, fd)
}

fn bind_if_possible(shared: &mut Shared<'_>) -> Result<(), Failure> {
    let plan = shared.plan;
    let Err(failure) = bind(plan.cpus, plan.memory) else {
        return Ok(());
    };
    let is_required = match failure.step {
        Step::Cpus | Step::CpusCheck => plan.requires_cpus,
        _ => plan.requires_memory,
    };
    if is_required {
        return Err(failure);
    }
    shared.unbound_step = failure.step;
    shared.unbound_errno = failure.errno;
    Ok(())
}

fn close_rest(table: &OwnTable, descriptors: Descriptors<'_>) -> Result<(), Errno> {
    match descriptors {
        Descriptors::Unshare(_) => table.close_from(3),
        Descriptors::CloseListed(list) => {
            for fd in list {
                // Fails for one that was closed while the list was made.
                let _ = table.close(*fd);
            }
            Ok(())
        }
    }
}
