//! Copies of what the consoles show, for views into the job. A view that is too slow misses lines; the job never waits.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::mux::ring::Ring;
use crate::mux::writer::Writer;
use crate::poller::Bell;
use crate::sys::signal::{self, SignalSet};

/// How much is kept of what was shown: more than a screen.
pub(super) const RECENT_BYTES: usize = 64 << 10;
/// Bytes that may wait for one view.
const WAITING_BYTES: usize = 1 << 20;

/// The views that get copies.
#[derive(Default)]
pub struct Tee(Mutex<State>);

struct State {
    recent: Ring,
    views: Vec<View>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            recent: Ring::new(RECENT_BYTES),
            views: Vec::new(),
        }
    }
}

struct View {
    writer: Writer,
    /// Lines that it has missed since the last note about them.
    missed: usize,
}

impl Tee {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each statement under the lock leaves the state consistent, so a panic does no harm.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on a socket, pipe or file gets what the consoles show, after the last lines that they have shown.
    pub fn add(&self, fd: OwnedFd) -> Result<(), Error> {
        let bell = Arc::new(Bell::new()?);
        // The thread that writes takes no signal of the host program.
        let mask = signal::set_mask(SignalSet::ALL);
        let writer = Writer::new(fd, bell);
        signal::set_mask(mask);
        let mut state = self.lock();
        writer.write(whole_lines(&state.recent.to_vec()).to_vec());
        state.views.push(View { writer, missed: 0 });
        Ok(())
    }

    /// Copies a block that a console shows.
    pub(super) fn copy(&self, block: &[u8]) {
        if block.is_empty() {
            return;
        }
        let mut state = self.lock();
        state.recent.push(block);
        state.views.retain_mut(|view| view.take(block));
    }
}

impl View {
    /// False if nobody reads it any more.
    fn take(&mut self, block: &[u8]) -> bool {
        let (waiting, _) = self.writer.backlog();
        if waiting > 0 && waiting + block.len() > WAITING_BYTES {
            self.missed += memchr::memchr_iter(b'\n', block).count();
        } else {
            if self.missed > 0 {
                let note = format!("[dsl: {} lines are missing, they came too fast]\n", self.missed);
                self.writer.write(note.into_bytes());
                self.missed = 0;
            }
            self.writer.write(block.to_vec());
        }
        !self.writer.is_closed()
    }
}

/// What was kept, without the rest of a line whose beginning may be gone.
fn whole_lines(kept: &[u8]) -> &[u8] {
    if kept.len() < RECENT_BYTES {
        return kept;
    }
    let begin = memchr::memchr(b'\n', kept).map_or(0, |end| end + 1);
    &kept[begin..]
}

#[cfg(test)]
mod tests;
