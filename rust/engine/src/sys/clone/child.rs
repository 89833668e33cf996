//! What a child does between its birth and its program, under the rules of [`super`].
//!
//! A forked child, which already has its program, takes the same steps: [`enter`].

use core::ffi::c_void;

use super::binding::bind;
use super::calls::{self, Errno, OwnTable};
use super::{Descriptors, Entry, Exchange, Failure, ProcessGroup, Rest, Stage, StdioSource};
use crate::sys::ForkedChild;
use crate::sys::signal::{LAST_SIGNAL, SignalSet};

/// The child. Returns only on failure, after noting the step and errno for the parent.
///
/// # Safety
/// `exchange` must point to an [`Exchange`] that no other code uses while the child runs.
pub(super) unsafe extern "C" fn child_main(exchange: *mut c_void) -> i32 {
    // SAFETY: the parent passes a live `Exchange` and waits until this process is done with it.
    let exchange = unsafe { &mut *exchange.cast::<Exchange<'_>>() };
    let failure = match prepare(exchange) {
        Ok(()) => execute(exchange),
        Err(failure) => failure,
    };
    exchange.step = failure.step;
    exchange.errno = failure.errno;
    127
}

fn prepare(exchange: &mut Exchange<'_>) -> Result<(), Failure> {
    let plan = exchange.plan;
    watch_own_death(exchange);
    // SAFETY: `spawn` cloned this process by the same plan, which keeps all that is used below.
    let table = unsafe { OwnTable::take(plan.descriptors) }.map_err(Failure::at(Stage::Descriptors))?;
    let rest = plan.descriptors.rest();
    let handlers = if exchange.reset_handlers {
        SignalSet::EVERY
    } else {
        SignalSet::NONE
    };
    let unbound = take_steps(&table, &plan.entry, exchange.parent, handlers, rest)?;
    if let Some(failure) = unbound {
        exchange.unbound_step = failure.step;
        exchange.unbound_errno = failure.errno;
    }
    Ok(())
}

/// Turns a forked child into a worker. Puts the descriptors of `places` under their numbers, and keeps only the
/// standard streams and what the entry keeps. Returns why the worker is not bound, if binding is not required.
pub(crate) fn enter(
    child: ForkedChild,
    entry: &Entry<'_>,
    places: &[(i32, i32)],
    rest: Rest<'_>,
) -> Result<Option<Failure>, Failure> {
    // SAFETY: the table of a forked child is a copy, which only its one thread uses: this one.
    let table = unsafe { OwnTable::take(Descriptors::CloseListed(&[])) };
    let table = table.map_err(Failure::at(Stage::Descriptors))?;
    for (target, source) in places {
        table
            .replace(*target, *source)
            .map_err(Failure::at(Stage::Stdio))?;
    }
    // The child keeps the handlers of its C library, which installs them only once.
    let unbound = take_steps(&table, entry, child.parent, SignalSet::ALL, rest)?;
    // Fails only on a bad address or size.
    let _ = calls::set_signal_mask(entry.mask);
    Ok(unbound)
}

/// The steps of every worker, in order. Returns why the worker is not bound, if binding is not required.
fn take_steps(
    table: &OwnTable,
    entry: &Entry<'_>,
    parent: i32,
    handlers: SignalSet,
    rest: Rest<'_>,
) -> Result<Option<Failure>, Failure> {
    join_group(entry.group).map_err(Failure::at(Stage::Group))?;
    reset_signals(handlers);
    if entry.ignores_quit {
        // Fails only for an invalid number.
        let _ = calls::ignore(libc::SIGQUIT);
    }
    for (target, source) in (0i32..).zip(entry.stdio) {
        place(table, target, source).map_err(Failure::at(Stage::Stdio))?;
    }
    for fd in entry.kept {
        calls::keep_across_exec(*fd).map_err(Failure::at(Stage::Stdio))?;
    }
    if let Some(cwd) = entry.cwd {
        calls::change_directory(cwd).map_err(Failure::at(Stage::Chdir))?;
    }
    if let Some(signal) = entry.parent_death_signal {
        calls::die_with_parent(signal).map_err(Failure::at(Stage::ParentDeath))?;
        // The parent may have died before the line above took effect.
        if calls::parent() != parent {
            return Err(Failure::at(Stage::ParentDeath)(libc::ESRCH));
        }
    }
    // Fails where there is no Yama, and then nothing is needed.
    let _ = calls::let_look(entry.observer);
    if let Some((soft, hard)) = entry.open_files {
        calls::limit_open_files(soft, hard).map_err(Failure::at(Stage::Limit))?;
    }
    let unbound = bind_if_possible(entry)?;
    close_rest(table, rest, entry.kept).map_err(Failure::at(Stage::Descriptors))?;
    Ok(unbound)
}

fn execute(exchange: &mut Exchange<'_>) -> Failure {
    let plan = exchange.plan;
    // Fails only on a bad address or size.
    let _ = calls::set_signal_mask(plan.entry.mask);
    // SAFETY: an aligned field of a live value.
    unsafe { (&raw mut exchange.reached_exec).write_volatile(true) };
    Failure::at(Stage::Exec)(calls::execute(plan.path, plan.argv, plan.envp))
}

/// The child runs even if this fails: the parent sees that the child is not watched.
fn watch_own_death(exchange: &mut Exchange<'_>) {
    let (Some((epoll, token)), pidfd @ 0..) = (exchange.plan.watch, exchange.pidfd) else {
        return;
    };
    let watched = calls::watch(epoll, pidfd, token).is_ok();
    // SAFETY: an aligned field of a live value.
    unsafe { (&raw mut exchange.watched).write_volatile(watched) };
}

fn join_group(group: ProcessGroup) -> Result<(), Errno> {
    match group {
        ProcessGroup::Own => calls::set_process_group(0),
        ProcessGroup::Join(group) => calls::set_process_group(group),
        ProcessGroup::Inherit => Ok(()),
    }
}

/// The Python interpreter ignores SIGPIPE and SIGXFSZ, and ignored signals stay ignored across `execve`.
fn reset_signals(handlers: SignalSet) {
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        // Fails only for an invalid number, or for a signal that cannot be caught.
        let _ = calls::reset_action(signal);
    }
    for signal in (1..=LAST_SIGNAL).filter(|signal| handlers.has(*signal)) {
        let handler = calls::handler(signal).unwrap_or(libc::SIG_DFL);
        if handler != libc::SIG_IGN && handler != libc::SIG_DFL {
            // As above.
            let _ = calls::reset_action(signal);
        }
    }
}

/// Puts a standard stream in place.
fn place(table: &OwnTable, target: i32, source: StdioSource) -> Result<(), Errno> {
    let fd = match source {
        // An inherited stream may be marked close-on-exec in the parent; the child's copy must not be.
        StdioSource::Same => return calls::keep_across_exec(target),
        StdioSource::Stdout => 1,
        StdioSource::Slot(fd) => fd,
    };
    table.replace(target, fd)
}

fn bind_if_possible(entry: &Entry<'_>) -> Result<Option<Failure>, Failure> {
    let Err(failure) = bind(entry.cpus, entry.memory) else {
        return Ok(None);
    };
    let is_required = match failure.step {
        Stage::Affinity | Stage::AffinityCheck => entry.requires_cpus,
        _ => entry.requires_memory,
    };
    if is_required {
        Err(failure)
    } else {
        Ok(Some(failure))
    }
}

fn close_rest(table: &OwnTable, rest: Rest<'_>, kept: &[i32]) -> Result<(), Errno> {
    match rest {
        Rest::All => {
            let mut first = 3;
            for fd in kept {
                let fd = *fd as u32;
                if first < fd {
                    table.close_between(first, fd - 1)?;
                }
                first = fd + 1;
            }
            table.close_from(first)
        }
        Rest::Listed(list) => {
            for fd in list.iter().filter(|fd| !kept.contains(fd)) {
                // Fails for a descriptor that was closed while the list was made.
                let _ = table.close(*fd);
            }
            Ok(())
        }
    }
}
