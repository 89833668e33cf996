//! Memory on which children run until they execute their programs.

use core::ffi::c_void;
use core::ptr::null_mut;
use std::io;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

pub(super) const STACK_BYTES: usize = 64 * 1024;
const GUARD_BYTES: usize = 64 * 1024; // one page of the largest page size in use

/// A stack for children, with a guard page below it. One per spawning thread: only one child uses it at a time.
pub(crate) struct ChildStack {
    base: *mut c_void,
}

// SAFETY: the mapping belongs to this value alone and may be used from whichever thread owns it.
unsafe impl Send for ChildStack {}

impl ChildStack {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::STACK;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches nothing of ours.
        let base =
            unsafe { mmap_anonymous(null_mut(), STACK_BYTES + GUARD_BYTES, ProtFlags::empty(), flags)? };
        let stack = Self { base };
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range lies within the mapping just made.
        unsafe { mprotect(stack.bottom(), STACK_BYTES, access)? };
        Ok(stack)
    }

    /// The lowest address that a child may use.
    pub(super) fn bottom(&self) -> *mut c_void {
        self.base.wrapping_byte_add(GUARD_BYTES)
    }
}

impl Drop for ChildStack {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no child runs on it: `spawn` returns after the child left it.
        // There is nothing to do about a failure.
        let _ = unsafe { munmap(self.base, STACK_BYTES + GUARD_BYTES) };
    }
}
