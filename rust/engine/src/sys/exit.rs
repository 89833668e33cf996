//! How this process ends when its program has ended.

use core::ffi::{c_int, c_void};

use super::ForkedChild;

/// A stream of the C library.
type Stream = *mut c_void;

unsafe extern "C" {
    /// Functions that the libc crate lacks.
    fn ftrylockfile(stream: Stream) -> c_int;
    fn funlockfile(stream: Stream);
    fn fflush(stream: Stream) -> c_int;
    fn __fpending(stream: Stream) -> usize;
}

#[cfg(not(target_env = "musl"))]
unsafe extern "C" {
    /// The same, of glibc alone.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    fn _IO_list_lock();
    fn _IO_list_unlock();
    fn _IO_iter_begin() -> Stream;
    fn _IO_iter_next(at: Stream) -> Stream;
    fn _IO_iter_file(at: Stream) -> Stream;
}

#[cfg(target_env = "musl")]
unsafe extern "C" {
    static stdout: Stream;
    static stderr: Stream;
}

/// From now on `exit`, in this process and in its forks, calls the exit functions registered after this call,
/// writes what streams hold, and ends. It does not call functions registered earlier.
///
/// musl has no such function: there `exit` calls the earlier functions, too.
///
/// [on_exit(3)](https://man7.org/linux/man-pages/man3/on_exit.3.html)
pub(crate) fn forget_exit_functions(_child: ForkedChild) {
    // SAFETY: the function is there as long as this library, which is never unloaded.
    #[cfg(not(target_env = "musl"))]
    let _ = unsafe { on_exit(end, core::ptr::null_mut()) };
}

/// Calls the exit functions that are left, writes what streams hold, and ends this process.
///
/// [exit(3)](https://man7.org/linux/man-pages/man3/exit.3.html)
pub(crate) fn exit(_child: ForkedChild, code: c_int) -> ! {
    // SAFETY: takes a number; other threads may go on until the process has ended, as at the end of any program.
    unsafe { libc::exit(code) }
}

/// Runs after the exit functions that were registered later, and before the earlier ones.
#[cfg(not(target_env = "musl"))]
extern "C" fn end(status: c_int, _: *mut c_void) {
    // A thread that waits for input holds its stream forever. Then the process ends as it would have without us.
    if write_free_streams() {
        super::exit_now(status);
    }
}

/// Writes what streams hold, except streams in use. Returns whether none was in use. `fflush` of all streams would
/// wait for those in use; `exit` does not wait. Call it before a fork, else the forked process would write it again.
#[cfg(not(target_env = "musl"))]
pub(crate) fn write_free_streams() -> bool {
    let mut are_all = true;
    // SAFETY: takes no argument. It is held while the list is walked, as the C library does itself.
    unsafe { _IO_list_lock() };
    // SAFETY: the list is locked.
    let mut at = unsafe { _IO_iter_begin() };
    while !at.is_null() {
        // SAFETY: the list is locked, and the end has not been passed.
        are_all &= write_if_free(unsafe { _IO_iter_file(at) });
        // SAFETY: as above.
        at = unsafe { _IO_iter_next(at) };
    }
    // SAFETY: it was locked above.
    unsafe { _IO_list_unlock() };
    are_all
}

/// musl hides its list of streams, so these are the two that programs write to by default.
#[cfg(target_env = "musl")]
pub(crate) fn write_free_streams() -> bool {
    // SAFETY: musl sets both before the program starts, and never changes them.
    let streams = unsafe { [stdout, stderr] };
    streams.map(write_if_free) == [true; 2]
}

fn write_if_free(stream: Stream) -> bool {
    // SAFETY: it stays open: it is in the list, which is locked, or a standard stream of musl.
    let is_free = unsafe { ftrylockfile(stream) } == 0;
    if is_free {
        // SAFETY: as above, and this thread has it.
        if unsafe { __fpending(stream) } > 0 {
            // SAFETY: as above. A failure to write the file cannot be reported any more.
            let _ = unsafe { fflush(stream) };
        }
        // SAFETY: as above.
        unsafe { funlockfile(stream) };
    }
    is_free
}
