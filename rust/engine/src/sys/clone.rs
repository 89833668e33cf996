//! `clone3` with shared memory: start a program at a cost that does not grow with the parent.
//!
//! The child borrows our address space until it executes its program, and we stand still meanwhile
//! (`CLONE_VM | CLONE_VFORK`). Its rules:
//!
//! * It runs on a stack of its own and touches nothing but that stack and the [`Plan`], which the caller keeps
//!   alive; every string and table in it was made before the clone.
//! * It makes raw system calls only, those of [`calls`]: libc's wrappers would write our `errno`.
//! * It neither allocates nor locks nor unwinds: [`child::child_main`] is `extern "C"`, free of indexing and formatting.
//! * All signals are blocked, so no handler of ours can run in it; handlers are reset before the mask is restored.
//! * Its first act is to put its own pidfd into our epoll set: put in by us, after it runs, a worker that dies at
//!   once could come behind one that died later.
//! * With `CLONE_FILES` its second act is to leave our descriptor table; on failure it ends before it changes it.

#![allow(unsafe_code)]

use core::ffi::{c_char, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::{null, null_mut};

use super::arch;
use super::signal::SignalSet;

mod binding;
mod calls;
mod child;

pub(crate) use binding::MemoryPolicy;
use child::child_main;

/// A step of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Clone,
    Descriptors,
    Group,
    Stdio,
    Chdir,
    ParentDeath,
    OpenFiles,
    Cpus,
    CpusCheck,
    Memory,
    MemoryCheck,
    Exec,
}

/// Where a standard stream of the child comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// The parent's descriptor of the same number.
    Same,
    /// The child's own stdout (for stderr).
    Stdout,
    /// A parked descriptor, 3 or above.
    Slot(i32),
}

/// How the child's descriptor table is kept free of ours.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Descriptors<'a> {
    /// Share the table and leave it in the first system call, keeping what lies below this number.
    Unshare(u32),
    /// Copy the table (kernels before 5.9); these are the descriptors that would survive `execve`.
    CloseListed(&'a [i32]),
}

/// Process group of the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// A new group with the child as leader.
    Own,
    /// This group.
    Join(i32),
    /// The parent's.
    Inherit,
}

/// Everything the child does, prepared before it exists. Pointers name memory of the borrowed owners.
pub(crate) struct Plan<'a> {
    pub(crate) path: &'a core::ffi::CStr,
    pub(crate) argv: &'a PointerArray<'a>,
    pub(crate) envp: &'a PointerArray<'a>,
    pub(crate) cwd: Option<&'a core::ffi::CStr>,
    pub(crate) stdio: [Source; 3],
    pub(crate) descriptors: Descriptors<'a>,
    pub(crate) group: Group,
    pub(crate) parent_death_signal: Option<i32>,
    pub(crate) open_files: Option<(u64, u64)>,
    pub(crate) cpus: &'a [u64],
    pub(crate) memory: Option<&'a MemoryPolicy>,
    /// The child is not to run without its CPUs.
    pub(crate) requires_cpus: bool,
    /// The child is not to run without its memory policy.
    pub(crate) requires_memory: bool,
    pub(crate) mask: SignalSet,
    /// Our epoll set, and the token of the child's death in it.
    pub(crate) watch: Option<(std::os::fd::BorrowedFd<'a>, u64)>,
}

/// A null-terminated array of C strings.
pub(crate) struct PointerArray<'a> {
    pointers: Vec<*const c_char>,
    owner: core::marker::PhantomData<&'a core::ffi::CStr>,
}

impl<'a> PointerArray<'a> {
    pub(crate) fn new(strings: impl Iterator<Item = &'a core::ffi::CStr>) -> Self {
        let pointers = strings
            .map(core::ffi::CStr::as_ptr)
            .chain(core::iter::once(null()))
            .collect();
        Self {
            pointers,
            owner: core::marker::PhantomData,
        }
    }

    fn as_ptr(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}

/// Which kernel interfaces to use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Interfaces {
    pub(crate) clone3: bool,
    pub(crate) pidfd: bool,
}

/// A child whose program has started.
#[derive(Debug)]
pub(crate) struct Spawned {
    pub(crate) pid: i32,
    pub(crate) pidfd: Option<OwnedFd>,
    /// Its pidfd is in the epoll set of the plan.
    pub(crate) watched: bool,
    /// Why it is not bound as the plan says, if that was not required.
    pub(crate) unbound: Option<Failure>,
}

/// Why a child did not start, of which nothing is left then, or was not bound.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failure {
    pub(crate) step: Step,
    pub(crate) errno: i32,
}

/// A stack for children, with a guard page below it. One per spawning thread: only one child uses it at a time.
pub(crate) struct ChildStack {
    base: *mut c_void,
}

// SAFETY: the mapping belongs to this value alone and may be used from whichever thread owns it.
unsafe impl Send for ChildStack {}

const STACK_BYTES: usize = 64 * 1024;
const GUARD_BYTES: usize = 64 * 1024; // one page of the largest page size in use

impl ChildStack {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::STACK;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                null_mut(),
                STACK_BYTES + GUARD_BYTES,
                rustix::mm::ProtFlags::empty(),
                flags,
            )?
        };
        let stack = Self { base };
        let access = rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE;
        // SAFETY: the range lies within the mapping just made.
        unsafe { rustix::mm::mprotect(stack.bottom(), STACK_BYTES, access)? };
        Ok(stack)
    }

    fn bottom(&self) -> *mut c_void {
        self.base.wrapping_byte_add(GUARD_BYTES)
    }
}

impl Drop for ChildStack {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no child runs on it: `spawn` returns after the child left it.
        // There is nothing to do about a failure.
        let _ = unsafe { rustix::mm::munmap(self.base, STACK_BYTES + GUARD_BYTES) };
    }
}

const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

struct Shared<'a> {
    plan: &'a Plan<'a>,
    parent: i32,
    reset_handlers: bool,
    /// Written by the kernel before the child runs.
    pidfd: i32,
    watched: bool,
    reached_exec: bool,
    /// What failed, if `errno` says that something did. Two fields, each written in one go: the child may be
    /// killed between them.
    step: Step,
    errno: i32,
    unbound_step: Step,
    unbound_errno: i32,
}

impl<'a> Shared<'a> {
    fn new(plan: &'a Plan<'a>, interfaces: Interfaces) -> Self {
        Self {
            plan,
            parent: rustix::process::getpid().as_raw_nonzero().get(),
            reset_handlers: !interfaces.clone3,
            pidfd: -1,
            watched: false,
            reached_exec: false,
            step: Step::Clone,
            errno: 0,
            unbound_step: Step::Clone,
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
    plan: &Plan<'_>,
    stack: &mut ChildStack,
    interfaces: Interfaces,
    cgroup: Option<std::os::fd::BorrowedFd<'_>>,
) -> Result<Spawned, Failure> {
    let mut shared = Shared::new(plan, interfaces);
    let mut flags = (libc::CLONE_VM | libc::CLONE_VFORK) as u64;
    if interfaces.pidfd {
        flags |= libc::CLONE_PIDFD as u64;
    }
    if matches!(plan.descriptors, Descriptors::Unshare(_)) {
        flags |= libc::CLONE_FILES as u64;
    }
    let pidfd_pointer = &raw mut shared.pidfd;
    let shared_pointer = (&raw mut shared).cast::<c_void>();
    let pid = if interfaces.clone3 {
        clone3(
            flags | CLONE_CLEAR_SIGHAND,
            pidfd_pointer,
            stack,
            cgroup,
            shared_pointer,
        )
    } else {
        legacy_clone(flags, pidfd_pointer, stack, shared_pointer)
    };
    if pid < 0 {
        return Err(Failure {
            step: Step::Clone,
            errno: -pid as i32,
        });
    }
    let pid = pid as i32;
    let pidfd = (written(&shared.pidfd) >= 0).then(|| {
        // SAFETY: CLONE_PIDFD has just made this descriptor, and nothing else owns it.
        unsafe { OwnedFd::from_raw_fd(written(&shared.pidfd)) }
    });
    let errno = written(&shared.errno);
    if errno == 0 && written(&shared.reached_exec) {
        return Ok(Spawned {
            pid,
            pidfd,
            watched: written(&shared.watched),
            unbound: shared.unbound(),
        });
    }
    let step = written(&shared.step);
    // The child has called exit already; its death may not be visible yet, so this wait blocks.
    // SAFETY: waits for a pid that we made and have not reaped; no status is asked for.
    unsafe { libc::waitpid(pid, null_mut(), libc::__WALL) };
    if errno == 0 {
        // Killed before it could act: a cgroup that was ever killed does this to its newborns.
        return Err(Failure {
            step: Step::Clone,
            errno: libc::EINTR,
        });
    }
    Err(Failure { step, errno })
}

/// A field that the kernel or the child has written behind the compiler's back.
fn written<T: Copy>(field: &T) -> T {
    // SAFETY: a reference is valid for reads, and nobody writes any more.
    unsafe { core::ptr::from_ref(field).read_volatile() }
}

fn clone3(
    flags: u64,
    pidfd: *mut i32,
    stack: &ChildStack,
    cgroup: Option<std::os::fd::BorrowedFd<'_>>,
    shared: *mut c_void,
) -> isize {
    let mut args = CloneArgs {
        flags,
        pidfd: pidfd as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.bottom() as u64,
        stack_size: STACK_BYTES as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: `args` is a valid clone_args, the stack is mapped and unused, and `shared` outlives the child's
    // use of it because CLONE_VFORK keeps this thread waiting.
    unsafe { arch::dsl_clone3((&raw mut args).cast(), size_of::<CloneArgs>(), child_main, shared) }
}

fn legacy_clone(flags: u64, pidfd: *mut i32, stack: &ChildStack, shared: *mut c_void) -> isize {
    extern "C" fn entry(shared: *mut c_void) -> i32 {
        // SAFETY: clone passes on the pointer that `legacy_clone` was given.
        unsafe { child_main(shared) }
    }
    let top = stack.bottom().wrapping_byte_add(STACK_BYTES);
    let flags = flags as i32 | libc::SIGCHLD;
    // SAFETY: as in `clone3`; libc's clone takes the top of the stack.
    let pid = unsafe { libc::clone(entry, top, flags, shared, pidfd) };
    if pid < 0 {
        return -(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EAGAIN) as isize);
    }
    pid as isize
}
