//! How this process ends when its program has ended.

#![allow(unsafe_code)]

use core::ffi::{c_int, c_void};
use core::ptr::null_mut;

use super::ForkedChild;

/// A stream of the C library.
type Stream = *mut c_void;

unsafe extern "C" {
    /// Glibc's own, which libc does not have.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    fn ftrylockfile(stream: Stream) -> c_int;
    fn funlockfile(stream: Stream);
    fn fflush(stream: Stream) -> c_int;
    static stdin: Stream;
    static stdout: Stream;
    static stderr: Stream;
}

/// From now on an `exit` of this process, and of those that it forks, calls what is asked for from now on, writes
/// what streams hold, and ends: what was asked for before is not called.
///
/// [on_exit(3)](https://man7.org/linux/man-pages/man3/on_exit.3.html)
pub(crate) fn forget_exit_functions(_child: ForkedChild) {
    // SAFETY: the function is there as long as this library, which nobody unloads.
    let _ = unsafe { on_exit(end, null_mut()) };
}

/// The last of the exit functions that were asked for since; the others come behind it.
extern "C" fn end(status: c_int, _: *mut c_void) {
    // SAFETY: the C library has set them, and nobody changes them now.
    let standard = unsafe { [stdin, stdout, stderr] };
    // A thread that waits for input holds its stream for ever. Then the process ends as it would have.
    if standard.into_iter().all(is_free) {
        // SAFETY: null stands for all streams.
        let _ = unsafe { fflush(null_mut()) };
        super::exit_now(status);
    }
}

fn is_free(stream: Stream) -> bool {
    // SAFETY: it is one of the standard streams, which are never freed.
    let is_free = unsafe { ftrylockfile(stream) } == 0;
    if is_free {
        // SAFETY: as above, and it was locked just now.
        unsafe { funlockfile(stream) };
    }
    is_free
}
