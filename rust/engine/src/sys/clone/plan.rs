//! What the child is to do, prepared before it exists.

use core::ffi::{CStr, c_char};
use core::marker::PhantomData;
use core::ptr::null;
use std::os::fd::BorrowedFd;

use super::MemoryPolicy;
use crate::sys::signal::SignalSet;

/// Where a standard stream of the child comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StdioSource {
    /// The parent's descriptor of the same number.
    Same,
    /// The child's own stdout (for stderr).
    Stdout,
    /// A parked descriptor, 3 or above.
    Slot(i32),
}

/// How to keep our descriptors out of the child's table.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Descriptors<'a> {
    /// Share the table and leave it in the first system call, keeping what lies below this number.
    Unshare(u32),
    /// Copy the table (kernels before 5.9); these are the descriptors that would survive `execve`.
    CloseListed(&'a [i32]),
}

impl<'a> Descriptors<'a> {
    /// The descriptors to close last.
    pub(super) fn rest(self) -> Rest<'a> {
        match self {
            Self::Unshare(_) => Rest::All,
            Self::CloseListed(list) => Rest::Listed(list),
        }
    }
}

/// Descriptors from 3 on to close, except those that the worker keeps.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rest<'a> {
    /// All of them.
    All,
    /// These (kernels before 5.9).
    Listed(&'a [i32]),
}

/// Process group of the child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessGroup {
    /// A new group with the child as leader.
    Own,
    /// This group.
    Join(i32),
    /// The parent's.
    Inherit,
}

/// Everything the child does, prepared before it exists. Pointers name memory of the borrowed owners.
pub(crate) struct ChildPlan<'a> {
    pub(crate) path: &'a CStr,
    pub(crate) argv: &'a PointerArray<'a>,
    pub(crate) envp: &'a PointerArray<'a>,
    pub(crate) descriptors: Descriptors<'a>,
    pub(crate) entry: Entry<'a>,
    /// Our epoll set, and the token of the child's death in it.
    pub(crate) watch: Option<(BorrowedFd<'a>, u64)>,
}

/// What turns a child into a worker, whether we cloned it to execute a program or a fork server forked it.
pub(crate) struct Entry<'a> {
    pub(crate) cwd: Option<&'a CStr>,
    pub(crate) stdio: [StdioSource; 3],
    /// Descriptors from 3 on that stay open in the child's program, in ascending order and each once.
    pub(crate) kept: &'a [i32],
    pub(crate) group: ProcessGroup,
    pub(crate) parent_death_signal: Option<i32>,
    /// Ignore Ctrl-\, which the terminal sends to this process, too.
    pub(crate) ignores_quit: bool,
    /// The process that may look into this one, itself and by its descendants, where Yama allows only ancestors.
    pub(crate) observer: i32,
    pub(crate) open_files: Option<(u64, u64)>,
    pub(crate) cpus: &'a [u64],
    pub(crate) memory: Option<&'a MemoryPolicy>,
    /// The child must not run without its CPUs.
    pub(crate) requires_cpus: bool,
    /// The child must not run without its memory policy.
    pub(crate) requires_memory: bool,
    pub(crate) mask: SignalSet,
}

/// A null-terminated array of C strings.
pub(crate) struct PointerArray<'a> {
    pointers: Vec<*const c_char>,
    owner: PhantomData<&'a CStr>,
}

impl<'a> PointerArray<'a> {
    pub(crate) fn new(strings: impl Iterator<Item = &'a CStr>) -> Self {
        let pointers = strings
            .map(CStr::as_ptr)
            .chain(core::iter::once(null()))
            .collect();
        Self {
            pointers,
            owner: PhantomData,
        }
    }

    pub(super) fn as_ptr(&self) -> *const *const c_char {
        self.pointers.as_ptr()
    }
}
