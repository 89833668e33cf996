//! System calls for the other crates of dsl: [`crate::sys`] is the only home of `unsafe`.

use std::io;
use std::thread::JoinHandle;

use crate::sys::signal::{self, SignalSet};

pub use crate::sys::{duplicate, limit_unsent, take_over};

const STACK_BYTES: usize = 512 * 1024;

/// Starts a thread with all signals blocked, so that it takes no signal of the host program.
pub fn spawn_quiet(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    spawn_quiet_with(name, |_| body())
}

/// As [`spawn_quiet`], and tells the thread the mask of the caller.
pub(crate) fn spawn_quiet_with(
    name: &str,
    body: impl FnOnce(SignalSet) + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    // The new thread inherits this mask.
    let mask = signal::set_mask(SignalSet::ALL);
    let spawned = std::thread::Builder::new()
        .name(name.into())
        .stack_size(STACK_BYTES)
        .spawn(move || body(mask));
    signal::set_mask(mask);
    spawned
}
