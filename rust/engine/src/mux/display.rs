//! Shows output of other hosts, each piece as the mux there has composed it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::io::Errno;

use crate::mux::compose::Composer;
use crate::mux::consoles::place;
use crate::mux::ring::Ring;
use crate::mux::tee::{RECENT_BYTES, Tee};
use crate::mux::writer::{Wants, Writer};
use crate::poller::Bell;
use crate::spec::Console;

/// Pieces are composed while fewer bytes than this wait to be written. Unfinished lines may be repeated in what is
/// composed, so this bounds it.
const COMPOSED_BYTES: usize = 1 << 20;
/// A block of this size is handed over immediately, while it is in the processor's cache. While as much waits to be
/// written, smaller blocks are not handed over: what comes meanwhile is added to them.
const BLOCK_BYTES: usize = 256 << 10;
/// The stream to which the unfinished lines of sources that have ended belong.
const NOBODY: usize = 0;

/// A source and one of its streams.
type Speaker = (u64, bool);

/// The last bytes that were shown.
#[derive(Debug, Clone)]
pub struct Recent(Arc<Mutex<Ring>>);

impl Recent {
    fn lock(&self) -> MutexGuard<'_, Ring> {
        // Each statement under the lock leaves the bytes consistent, so a panic does no harm.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        self.lock().to_vec()
    }
}

/// Bytes of a speaker; without bytes to come (`None`), its source has ended.
struct Piece {
    speaker: Speaker,
    data: Option<Vec<u8>>,
    /// The rest of the last line follows at once.
    goes_on: bool,
}

/// What has happened since the last turn.
#[derive(Debug, Default)]
pub struct Progress {
    /// The pieces that were written or thrown away: their sources and lengths.
    pub taken: Vec<(u64, usize)>,
    /// The streams that could not be written, why, and whether they are gone: a file gets later output all the same.
    pub failed: Vec<(Console, i32, bool)>,
}

/// Composes the output of many sources, and writes it to two descriptors.
pub struct Display {
    sides: Vec<Side>,
    tee: Arc<Tee>,
}

/// One file, pipe or terminal.
struct Side {
    console: Console,
    writer: Result<Writer, Errno>,
    is_gone: bool,
    composer: Composer,
    streams: HashMap<Speaker, usize>,
    free: Vec<usize>,
    queue: VecDeque<Piece>,
    /// The speaker in the middle of a line whose rest follows at once. The others wait.
    holder: Option<Speaker>,
    waiting: VecDeque<Piece>,
    /// Bytes that the writer was given, and how many of them it has written, as far as we know.
    handed: u64,
    written: u64,
    /// Composed pieces: the number of bytes after which they are written, their sources and lengths.
    composed: VecDeque<(u64, u64, usize)>,
    spare: Vec<u8>,
    recent: Recent,
}

impl Display {
    /// Shows the streams on two descriptors, or on one if both are the same file. `bell` is rung when there is reason for a turn.
    pub fn new(stdout: std::io::Result<OwnedFd>, stderr: std::io::Result<OwnedFd>, bell: &Arc<Bell>) -> Self {
        let is_same = match (&stdout, &stderr) {
            (Ok(one), Ok(other)) => place(one).is_some() && place(one) == place(other),
            _ => false,
        };
        let mut sides = vec![Side::new(Console::Stdout, stdout, bell)];
        if !is_same {
            sides.push(Side::new(Console::Stderr, stderr, bell));
        }
        let tee = Arc::default();
        Self { sides, tee }
    }

    /// Takes bytes of a source. `goes_on`: the rest of the last line follows at once.
    pub fn put(&mut self, source: u64, console: Console, data: &[u8], goes_on: bool) {
        let is_error = console == Console::Stderr;
        let last = self.sides.len() - 1;
        self.sides[usize::from(is_error).min(last)].put((source, is_error), data, goes_on, &self.tee);
    }

    /// Notes that a source has ended, so that its unfinished line does not hold up the others.
    pub fn end(&mut self, source: u64) {
        for side in &mut self.sides {
            for is_error in [false, true] {
                side.queue.push_back(Piece {
                    speaker: (source, is_error),
                    data: None,
                    goes_on: false,
                });
            }
        }
    }

    /// The last bytes that were shown where stderr is shown, for another thread.
    pub fn recent(&self) -> Recent {
        self.sides[self.sides.len() - 1].recent.clone()
    }

    /// Copies what is shown.
    pub fn tee(&self) -> Arc<Tee> {
        Arc::clone(&self.tee)
    }

    /// Hands over what the writers have room for.
    pub fn turn(&mut self) -> Progress {
        let mut progress = Progress::default();
        for side in &mut self.sides {
            side.turn(&self.tee, &mut progress);
        }
        progress
    }
}

impl Side {
    fn new(console: Console, fd: std::io::Result<OwnedFd>, bell: &Arc<Bell>) -> Self {
        let writer = fd
            .map(|fd| Writer::new(fd, Arc::clone(bell)))
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
        if let Ok(writer) = &writer {
            writer.adopt(Arc::clone(bell), Wants::Below(BLOCK_BYTES));
        }
        let mut composer = Composer::new(None, false);
        composer.add_passing(None); // `NOBODY`
        Self {
            console,
            writer,
            is_gone: false,
            composer,
            streams: HashMap::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            holder: None,
            waiting: VecDeque::new(),
            handed: 0,
            written: 0,
            composed: VecDeque::new(),
            spare: Vec::new(),
            recent: Recent(Arc::new(Mutex::new(Ring::new(RECENT_BYTES)))),
        }
    }

    /// Shows bytes at once if there is room for them and nothing has to come before them.
    fn put(&mut self, speaker: Speaker, data: &[u8], goes_on: bool, tee: &Tee) {
        if self.queue.is_empty() && self.has_room() && !self.is_held_up(speaker) {
            self.show(speaker, Some(data), goes_on);
            self.show_waiting();
            if self.composer.pending() >= BLOCK_BYTES {
                self.hand_over(tee);
            }
        } else {
            self.queue.push_back(Piece {
                speaker,
                data: Some(data.to_vec()),
                goes_on,
            });
        }
    }

    /// Bytes that the writer has, as far as we know.
    fn unwritten(&self) -> usize {
        (self.handed - self.written) as usize
    }

    fn has_room(&self) -> bool {
        self.unwritten() + self.composer.pending() < COMPOSED_BYTES
    }

    fn hand_over(&mut self, tee: &Tee) {
        let mut spare = std::mem::take(&mut self.spare);
        if self.composer.pending() >= BLOCK_BYTES {
            spare.reserve_exact(2 * BLOCK_BYTES); // the next block will be as long: let it not grow step by step
        }
        let block = self.composer.take(spare, Instant::now());
        self.handed += block.len() as u64;
        self.recent.lock().push(&block);
        tee.copy(&block);
        self.spare = match &self.writer {
            Ok(writer) => writer.write(block),
            Err(_) => Vec::new(),
        };
    }

    fn note_written(&mut self) {
        let left = self.writer.as_ref().map_or(0, |writer| writer.backlog().0) as u64;
        self.written = self.handed - left;
    }

    fn turn(&mut self, tee: &Tee, progress: &mut Progress) {
        self.note_written();
        while self.has_room() {
            let Some(piece) = self.queue.pop_front() else {
                break;
            };
            self.place(piece);
        }
        let pending = self.composer.pending();
        if pending >= BLOCK_BYTES || (pending > 0 && self.unwritten() < BLOCK_BYTES) {
            self.hand_over(tee);
        }
        // Before the failure, so that nothing counts as taken whose failure is not told.
        self.note_written();
        let failure = match &self.writer {
            Ok(writer) => writer.take_failure(),
            Err(error) => (self.handed > 0 && !self.is_gone).then_some(*error),
        };
        if let Some(error) = failure {
            self.is_gone = self.writer.as_ref().map_or(true, Writer::is_closed);
            progress
                .failed
                .push((self.console, error.raw_os_error(), self.is_gone));
        }
        while let Some((end, source, count)) = self.composed.front().copied() {
            if end > self.written {
                break;
            }
            self.composed.pop_front();
            progress.taken.push((source, count));
        }
    }

    fn place(&mut self, piece: Piece) {
        if self.is_held_up(piece.speaker) {
            self.waiting.push_back(piece);
        } else {
            self.show(piece.speaker, piece.data.as_deref(), piece.goes_on);
            self.show_waiting();
        }
    }

    fn is_held_up(&self, speaker: Speaker) -> bool {
        self.holder.is_some_and(|holder| holder != speaker)
    }

    /// Shows the pieces that waited, until a speaker is in the middle of a line again.
    fn show_waiting(&mut self) {
        let mut is_stuck = self.holder.is_some();
        while !is_stuck && !self.waiting.is_empty() {
            is_stuck = true;
            for piece in std::mem::take(&mut self.waiting) {
                if self.is_held_up(piece.speaker) {
                    self.waiting.push_back(piece);
                } else {
                    self.show(piece.speaker, piece.data.as_deref(), piece.goes_on);
                    is_stuck = false;
                }
            }
        }
    }

    /// Forgets a speaker that has ended.
    fn let_go(&mut self, speaker: Speaker) {
        self.holder = None;
        if let Some(stream) = self.streams.remove(&speaker) {
            self.composer.leave(stream, NOBODY);
            self.free.push(stream);
        }
    }

    /// Shows bytes; without bytes (`None`), the source has ended.
    fn show(&mut self, speaker: Speaker, data: Option<&[u8]>, goes_on: bool) {
        let Some(data) = data else {
            self.let_go(speaker);
            return;
        };
        if !data.is_empty() && !self.is_gone {
            let (composer, free) = (&mut self.composer, &mut self.free);
            let made = || composer.add_passing(free.pop());
            let stream = *self.streams.entry(speaker).or_insert_with(made);
            self.composer.pass(stream, data);
        }
        self.holder = goes_on.then_some(speaker);
        let end = self.handed + self.composer.pending() as u64;
        self.composed.push_back((end, speaker.0, data.len()));
    }
}

#[cfg(test)]
mod tests;
