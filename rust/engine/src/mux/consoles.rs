//! Output of ended groups that is still to be written, because the reader of a console is slow.
//!
//! A later group of the same supervisor writes after it. At the very end, [`Consoles::flush`] waits until it is
//! written or a signal ends the wait.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::stdio::{stderr, stdout};

use crate::error::Error;
use crate::mux::tee::Tee;
use crate::mux::writer::{Wants, Writer};
use crate::poller::Bell;
use crate::poller::poll_once;
use crate::spec::Console;

/// A signal to the host program that comes between a check and the sleep is noticed after at most this time.
const SIGNAL_POLL: Duration = Duration::from_secs(1);

/// Identifies the file of a console: its device and inode, and the device number if it is a device file.
pub(super) type Place = (u64, u64, u64);

/// The result of [`Consoles::flush`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flushed {
    /// Lines that were dropped since the last result.
    pub dropped: u64,
    /// The signal that ended the wait, if one did.
    pub signal: Option<i32>,
}

#[derive(Default)]
struct Left {
    writers: Vec<(Place, Writer)>,
    /// Whether waiting has ended.
    is_over: bool,
    signal: Option<i32>,
    dropped: u64,
}

/// Output of all ended groups of a supervisor that is still to be written.
pub(crate) struct Consoles {
    left: Mutex<Left>,
    /// Rung when a writer has written everything, and when waiting ends.
    bell: Arc<Bell>,
    /// Copies of the output of all groups.
    pub(crate) tee: Arc<Tee>,
}

impl Consoles {
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Self {
            left: Mutex::default(),
            bell: Arc::new(Bell::new()?),
            tee: Arc::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Left> {
        // Each statement under the lock leaves the state consistent, so a panic does no harm.
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares for a new group: if no output is left, the end of waiting for the last group is forgotten.
    pub(crate) fn begin(&self) {
        let mut left = self.lock();
        if left.writers.is_empty() {
            left.is_over = false;
            left.signal = None;
        }
    }

    /// The writer of a console, if an earlier group has left one.
    pub(super) fn take(&self, place: Place) -> Option<Writer> {
        let mut left = self.lock();
        let index = left.writers.iter().position(|(known, _)| *known == place)?;
        Some(left.writers.swap_remove(index).1)
    }

    /// Keeps a writer that still has output.
    pub(super) fn keep(&self, place: Place, writer: Writer) {
        writer.adopt(Arc::clone(&self.bell), Wants::End);
        self.lock().writers.push((place, writer));
    }

    /// Ends the wait. `signal`: the signal that has asked for this.
    pub(crate) fn end_waiting(&self, signal: Option<i32>) {
        let mut left = self.lock();
        left.is_over = true;
        left.signal = left.signal.or(signal);
        drop(left);
        self.bell.ring();
    }

    /// Whether waiting has ended.
    pub(super) fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// Waits until the remaining output for a console (`None`: for all) is written, or waiting is ended. Calls
    /// `pending` before each sleep. If it returns true, the rest is dropped, and the result is `None`.
    pub(crate) fn flush(
        &self,
        console: Option<Console>,
        mut pending: impl FnMut() -> bool,
    ) -> Option<Flushed> {
        let mut left = self.lock();
        if left.writers.is_empty() {
            return Some(left.flushed());
        }
        drop(left);
        let of_place = console.and_then(|console| place(stream(console)));
        loop {
            self.bell.silence();
            let mut left = self.lock();
            if !left.sweep(of_place) {
                return Some(left.flushed());
            }
            drop(left);
            if pending() {
                self.end_waiting(None);
                // Drop the rest at once: [`Consoles::begin`] resets the state only if no output is left.
                self.lock().sweep(None);
                return None;
            }
            // No matter why the poll ends, the loop looks again.
            let _ = poll_once(&[self.bell.as_fd()], PollFlags::IN, Some(SIGNAL_POLL));
        }
    }
}

impl Left {
    /// Removes writers that are done, and gives up all others if waiting has ended. Returns whether output for the
    /// requested console is left.
    fn sweep(&mut self, of_place: Option<Place>) -> bool {
        let is_over = self.is_over;
        let mut waits = false;
        let mut dropped = 0;
        self.writers.retain(|(place, writer)| {
            let is_asked_for = of_place.is_none_or(|asked| asked == *place);
            if is_over && !writer.is_done() {
                dropped += writer.give_up() as u64;
                return false;
            }
            let is_left = !writer.is_done();
            dropped += writer.take_lost().lines;
            waits |= is_left && is_asked_for;
            is_left
        });
        self.dropped += dropped;
        waits
    }

    fn flushed(&mut self) -> Flushed {
        Flushed {
            dropped: std::mem::take(&mut self.dropped),
            signal: self.signal,
        }
    }
}

pub(super) fn stream(console: Console) -> BorrowedFd<'static> {
    match console {
        Console::Stdout => stdout(),
        Console::Stderr => stderr(),
    }
}

/// The file that a descriptor leads to.
pub(super) fn place(fd: impl AsFd) -> Option<Place> {
    let stat = rustix::fs::fstat(fd).ok()?;
    Some((stat.st_dev, stat.st_ino, stat.st_rdev))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    const PLACE: Place = (1, 2, 3);

    fn left_over(consoles: &Consoles) -> std::fs::File {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let writer = Writer::new(write, Arc::new(Bell::new().unwrap()));
        writer.write(b"ten bytes\n".repeat(200_000));
        consoles.keep(PLACE, writer);
        std::fs::File::from(read)
    }

    #[test]
    fn what_is_left_is_waited_for_until_its_reader_has_it() {
        let consoles = Consoles::new().unwrap();
        let mut read = left_over(&consoles);
        let reader = std::thread::spawn(move || {
            let mut text = vec![0; 2_000_000];
            read.read_exact(&mut text).unwrap();
        });
        let flushed = consoles.flush(None, || false);
        let expected = Flushed {
            dropped: 0,
            signal: None,
        };
        assert_eq!(flushed, Some(expected));
        reader.join().unwrap();
    }

    #[test]
    fn a_signal_ends_the_waiting_with_a_count() {
        let consoles = Consoles::new().unwrap();
        let _read = left_over(&consoles);
        consoles.end_waiting(Some(15));
        let flushed = consoles.flush(None, || false).unwrap();
        assert!(flushed.dropped > 100_000);
        assert_eq!(flushed.signal, Some(15));
        let again = consoles.flush(None, || false).unwrap();
        assert_eq!(again.dropped, 0, "they are counted once");
    }

    #[test]
    fn a_host_program_that_is_interrupted_waits_no_longer() {
        let consoles = Consoles::new().unwrap();
        let _read = left_over(&consoles);
        assert_eq!(consoles.flush(None, || true), None);
        assert!(consoles.flush(None, || false).unwrap().dropped > 100_000);
    }

    #[test]
    fn an_interrupted_wait_does_not_hold_for_the_next_group() {
        let consoles = Consoles::new().unwrap();
        let _read = left_over(&consoles);
        assert_eq!(consoles.flush(None, || true), None);
        consoles.begin();
        assert!(!consoles.is_over());
        assert!(consoles.flush(None, || false).unwrap().dropped > 100_000);
    }

    #[test]
    fn a_later_group_writes_behind_what_is_left() {
        let consoles = Consoles::new().unwrap();
        let _read = left_over(&consoles);
        assert!(consoles.take((0, 0, 0)).is_none());
        let writer = consoles.take(PLACE).unwrap();
        assert!(writer.backlog().0 > 0);
        assert!(consoles.take(PLACE).is_none());
        writer.give_up();
    }
}
