//! Catching, counting, tracing and awaiting signals.

use super::{monotonic_ns, own_pid, write_all};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// How often each signal was caught, by number.
static COUNTS: [AtomicU32; 65] = [const { AtomicU32::new(0) }; 65];
/// Descriptor that receives one line per caught signal; negative without a trace.
static TRACE_FD: AtomicI32 = AtomicI32::new(-1);

/// What a signal does from now on.
#[derive(Clone, Copy, Debug)]
pub enum Disposition {
    /// The kernel's default.
    Default,
    /// Nothing.
    Ignore,
    /// Counted, and written to the trace if there is one.
    Catch,
}

/// Sets the disposition of each signal. [`sigaction(2)`](https://man7.org/linux/man-pages/man2/sigaction.2.html)
pub fn dispose(signals: &[i32], disposition: Disposition) {
    let handler: extern "C" fn(i32, *const libc::siginfo_t, *const libc::c_void) = on_signal;
    for &signal in signals {
        // SAFETY: an all-zero sigaction is a valid value (no flags, empty mask).
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = match disposition {
            Disposition::Default => libc::SIG_DFL,
            Disposition::Ignore => libc::SIG_IGN,
            Disposition::Catch => handler as usize,
        };
        action.sa_flags = if matches!(disposition, Disposition::Catch) {
            libc::SA_SIGINFO
        } else {
            0
        };
        // SAFETY: `action` is initialised, and the handler calls async-signal-safe functions only.
        unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) };
    }
}

extern "C" fn on_signal(signal: i32, info: *const libc::siginfo_t, _context: *const libc::c_void) {
    if let Some(count) = COUNTS.get(signal as usize) {
        count.fetch_add(1, Ordering::SeqCst);
    }
    let fd = TRACE_FD.load(Ordering::SeqCst);
    if fd < 0 {
        return;
    }
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let info = unsafe { &*info };
    // SAFETY: si_pid is meaningful for every signal that a process sends, and readable for all.
    let sender = unsafe { info.si_pid() };
    let mut line = [0_u8; 64];
    let mut length = 0;
    let numbers = [
        i64::from(signal),
        i64::from(own_pid()),
        i64::from(sender),
        monotonic_ns(),
    ];
    for (index, number) in numbers.into_iter().enumerate() {
        if index > 0 {
            line[length] = b' ';
            length += 1;
        }
        length += decimal(number, &mut line[length..]);
    }
    line[length] = b'\n';
    write_all(fd, &line[..=length]);
}

/// Writes `number` in decimal and returns the digits used. Async-signal-safe, unlike formatting.
fn decimal(number: i64, into: &mut [u8]) -> usize {
    let mut digits = [0_u8; 20];
    let mut rest = number.unsigned_abs();
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    let length = digits.len() - start;
    into[..length].copy_from_slice(&digits[start..]);
    length
}

/// Sends the trace of caught signals to `fd`.
pub fn trace_to(fd: RawFd) {
    TRACE_FD.store(fd, Ordering::SeqCst);
}

/// How often `signal` was caught.
pub fn caught(signal: i32) -> u32 {
    COUNTS
        .get(signal as usize)
        .map_or(0, |count| count.load(Ordering::SeqCst))
}

/// Adds signals to the mask of this thread.
///
/// [`pthread_sigmask(3)`](https://man7.org/linux/man-pages/man3/pthread_sigmask.3.html)
pub fn block(signals: &[i32]) {
    // SAFETY: a zeroed sigset is a valid, empty set on Linux.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    for &signal in signals {
        // SAFETY: `set` is live and the number is in range.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    // SAFETY: `set` is live; no old mask is asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) };
}

/// Sleeps until `ready` holds. Checks it again after each caught signal, and misses no signal.
pub fn suspend_until(ready: impl Fn() -> bool) {
    // SAFETY: a zeroed sigset is a valid set; both are filled before use.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `all` is live.
    unsafe { libc::sigfillset(&raw mut all) };
    let mut before = all;
    // SAFETY: both sets are live.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before) };
    while !ready() {
        // SAFETY: `before` is the mask this thread had, so it is valid.
        unsafe { libc::sigsuspend(&raw const before) };
    }
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
}
