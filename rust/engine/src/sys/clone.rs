//! `clone3` with shared memory: start a program at a cost that does not grow with the parent.
//!
//! The child borrows our address space until it executes its program. Our thread stands still meanwhile
//! (`CLONE_VM | CLONE_VFORK`). The child's rules:
//!
//! * It runs on a stack of its own and touches nothing but that stack and the [`Exchange`] with its plan, which
//!   the caller keeps alive; every string and table in it was made before the clone.
//! * It makes raw system calls only, those of [`calls`]: libc's wrappers would write our `errno`.
//! * It neither allocates nor locks nor unwinds: [`child::child_main`] is `extern "C"`, free of indexing and
//!   formatting.
//! * All signals are blocked, so no handler of ours can run in it; handlers are reset before the mask is restored.
//! * Its first act is to put its own pidfd into our epoll set. If we did that once it runs, a worker that dies at
//!   once could be reported after one that died later.
//! * With `CLONE_FILES` its second act is to leave our descriptor table. If that fails, the child ends and leaves
//!   the table unchanged.

use core::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;

use super::arch;
use crate::features::Features;
use crate::stage::Stage;

mod binding;
mod calls;
mod child;
mod plan;
mod stack;

pub(crate) use binding::MemoryPolicy;
pub(crate) use child::enter;
pub(crate) use plan::{ChildPlan, Descriptors, Entry, PointerArray, ProcessGroup, Rest, StdioSource};
pub(crate) use stack::ChildStack;

/// Signals that glibc uses itself. It lets a program that `posix_spawn` starts ignore them.
const OF_THE_LIBRARY: [i32; 2] = [32, 33];

/// Gives the C library's own signals their default actions, as in a program that we execute.
pub(crate) fn reset_library_signals() {
    for signal in OF_THE_LIBRARY {
        // Fails only for an invalid number.
        let _ = calls::reset_action(signal);
    }
}

use child::child_main;
use stack::STACK_BYTES;

/// A child whose program has started.
#[derive(Debug)]
pub(crate) struct Spawned {
    pub(crate) pid: i32,
    pub(crate) pidfd: Option<OwnedFd>,
    /// Its pidfd is in the epoll set of the plan.
    pub(crate) watched: bool,
    /// Why the child is not bound as the plan says, if the plan does not require that.
    pub(crate) unbound: Option<Failure>,
}

/// Why a child did not start (then nothing is left of it), or why it was not bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) step: Stage,
    pub(crate) errno: i32,
}

impl Failure {
    /// Names the step of a call that was refused.
    fn at(step: Stage) -> impl FnOnce(i32) -> Self {
        move |errno| Self { step, errno }
    }
}

// Libc has both as a `c_int`, which cannot hold them.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// What the kernel, the parent and the child tell each other.
struct Exchange<'a> {
    plan: &'a ChildPlan<'a>,
    parent: i32,
    reset_handlers: bool,
    /// Written by the kernel before the child runs.
    pidfd: i32,
    watched: bool,
    reached_exec: bool,
    /// What failed, unless `errno` is 0. Two fields, each written in one go: the child may be killed between the
    /// two writes.
    step: Stage,
    errno: i32,
    unbound_step: Stage,
    unbound_errno: i32,
}

impl<'a> Exchange<'a> {
    fn new(plan: &'a ChildPlan<'a>, features: Features) -> Self {
        Self {
            plan,
            parent: rustix::process::getpid().as_raw_nonzero().get(),
            reset_handlers: !features.clone3,
            pidfd: -1,
            watched: false,
            reached_exec: false,
            step: Stage::Spawn,
            errno: 0,
            unbound_step: Stage::Spawn,
            unbound_errno: 0,
        }
    }

    fn unbound(&self) -> Option<Failure> {
        let errno = written(&self.unbound_errno);
        let step = written(&self.unbound_step);
        (errno != 0).then_some(Failure { step, errno })
    }
}

/// Starts a program. Returns after `execve` has succeeded or the child has failed and was reaped.
///
/// The calling thread must have all signals blocked and must outlive the child if the plan names a
/// parent-death signal, which follows the thread.
///
/// [clone3(2)](https://man7.org/linux/man-pages/man2/clone.2.html)
pub(crate) fn spawn(
    plan: &ChildPlan<'_>,
    stack: &mut ChildStack,
    features: Features,
    cgroup: Option<std::os::fd::BorrowedFd<'_>>,
) -> Result<Spawned, Failure> {
    let mut exchange = Exchange::new(plan, features);
    let mut flags = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    if features.pidfd {
        flags |= libc::CLONE_PIDFD as u64;
    }
    if matches!(plan.descriptors, Descriptors::Unshare(_)) {
        flags |= libc::CLONE_FILES as u64;
    }
    let pidfd_pointer = &raw mut exchange.pidfd;
    let exchange_pointer = (&raw mut exchange).cast::<c_void>();
    let pid = if features.clone3 {
        clone3(
            flags | CLONE_CLEAR_SIGHAND,
            pidfd_pointer,
            stack,
            cgroup,
            exchange_pointer,
        )
    } else {
        legacy_clone(flags, pidfd_pointer, stack, exchange_pointer)
    };
    if pid < 0 {
        return Err(Failure {
            step: Stage::Spawn,
            errno: -pid as i32,
        });
    }
    let pid = pid as i32;
    let pidfd = (written(&exchange.pidfd) >= 0).then(|| {
        // SAFETY: CLONE_PIDFD has just made this descriptor, and nothing else owns it.
        unsafe { OwnedFd::from_raw_fd(written(&exchange.pidfd)) }
    });
    let errno = written(&exchange.errno);
    if errno == 0 && written(&exchange.reached_exec) {
        return Ok(Spawned {
            pid,
            pidfd,
            watched: written(&exchange.watched),
            unbound: exchange.unbound(),
        });
    }
    let step = written(&exchange.step);
    if let (Some((epoll, _)), Some(pidfd)) = (plan.watch, &pidfd) {
        // Closing the pidfd is not enough: processes that the host program has forked meanwhile have copies. Fails
        // if the child ended before it put the pidfd in.
        let _ = rustix::event::epoll::delete(epoll, pidfd);
    }
    // The child has called exit already; its death may not be visible yet, so this wait blocks.
    // SAFETY: waits for a pid that we made and have not reaped; no status is asked for.
    unsafe { libc::waitpid(pid, null_mut(), libc::__WALL) };
    if errno == 0 {
        // The child was killed before it could act: a cgroup that was ever killed kills the children born into it.
        return Err(Failure {
            step: Stage::Spawn,
            errno: libc::EINTR,
        });
    }
    Err(Failure { step, errno })
}

/// A field that the kernel or the child has written behind the compiler's back.
fn written<T: Copy>(field: &T) -> T {
    // SAFETY: a reference is valid for reads, and no process writes any more.
    unsafe { core::ptr::from_ref(field).read_volatile() }
}

fn clone3(
    flags: u64,
    pidfd: *mut i32,
    stack: &ChildStack,
    cgroup: Option<std::os::fd::BorrowedFd<'_>>,
    exchange: *mut c_void,
) -> isize {
    let mut args = libc::clone_args {
        flags,
        pidfd: pidfd as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.bottom() as u64,
        stack_size: STACK_BYTES as u64,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: 0,
    };
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: `args` is a valid clone_args, the stack is mapped and unused, and `exchange` outlives the child's
    // use of it because CLONE_VFORK keeps this thread waiting.
    unsafe {
        arch::dsl_clone3(
            (&raw mut args).cast(),
            size_of::<libc::clone_args>(),
            child_main,
            exchange,
        )
    }
}

fn legacy_clone(flags: u64, pidfd: *mut i32, stack: &ChildStack, exchange: *mut c_void) -> isize {
    extern "C" fn entry(exchange: *mut c_void) -> i32 {
        // SAFETY: clone passes on the pointer that `legacy_clone` was given.
        unsafe { child_main(exchange) }
    }
    let top = stack.bottom().wrapping_byte_add(STACK_BYTES);
    let flags = flags as i32 | libc::SIGCHLD;
    // SAFETY: as in `clone3`; libc's clone takes the top of the stack.
    let pid = unsafe { libc::clone(entry, top, flags, exchange, pidfd) };
    if pid < 0 {
        return -(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EAGAIN) as isize);
    }
    pid as isize
}
