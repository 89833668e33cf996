//! One console, and the rule for what it does not take.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::termios::isatty;

use crate::bell::Bell;
use crate::mux::compose::Composer;
use crate::mux::consoles::{Consoles, Place, place, stream};
use crate::mux::terminal;
use crate::mux::writer::{LIMIT_BYTES, Writer};
use crate::spec::Console;

/// A console that takes nothing for so long is taken to be stopped.
const STALL: Duration = Duration::from_secs(1);
/// At the end: the longest time for what a terminal has not taken yet.
const LAST_TERMINAL: Duration = Duration::from_secs(2);
/// At the end: how long the events are delayed for a reader who gets everything anyway.
const COURTESY: Duration = Duration::from_secs(2);
/// A block of this size is handed to the console at once, while it is in the processor's cache.
const BLOCK_BYTES: usize = 256 * 1024;

/// One console with what is composed for it; stdout and stderr share one where they are the same file.
pub(super) struct Side {
    stream: BorrowedFd<'static>,
    place: Place,
    writer: Writer,
    pub(super) composer: Composer,
    /// Which of the reader's streams each of the composer's is.
    pub(super) tokens: Vec<usize>,
    spare: Vec<u8>,
    kind: Kind,
    dropping: bool,
    /// Lines dropped since the last word about it, and in all.
    dropped: usize,
    dropped_total: usize,
    closed: bool,
}

/// What a console is to its lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// They would scroll by.
    Terminal,
    /// All of them are in files, too.
    Copy,
    /// Some are nowhere else.
    Only,
}

/// What becomes of bytes for a console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// They are shown.
    Show,
    /// They are counted and thrown away.
    Drop,
    /// They stay where they are for now.
    Wait,
}

impl Side {
    /// `None` if that stream of ours is not open. Fails if no thread can be had for it.
    pub(super) fn open(
        console: Console,
        consoles: &Consoles,
        bell: Arc<Bell>,
        fold: bool,
    ) -> io::Result<Option<Self>> {
        let stream = stream(console);
        let (Ok(fd), Some(place)) = (fcntl_dupfd_cloexec(stream, 3), place(stream)) else {
            return Ok(None);
        };
        let is_terminal = isatty(&fd);
        let has_screen = is_terminal && terminal::can_move_cursor();
        let size = has_screen.then(|| terminal::size_of(fd.as_fd()));
        let left = consoles.take(place);
        let kind = match &left {
            _ if is_terminal => Kind::Terminal,
            Some(_) => Kind::Only,
            None => Kind::Copy,
        };
        let writer = match left {
            Some(writer) => {
                writer.adopt(bell, false);
                writer
            }
            None => Writer::new(fd, bell)?,
        };
        Ok(Some(Self {
            stream,
            place,
            writer,
            composer: Composer::new(size, fold),
            tokens: Vec::new(),
            spare: Vec::new(),
            kind,
            dropping: false,
            dropped: 0,
            dropped_total: 0,
            closed: false,
        }))
    }

    /// A stream is shown here that is in no file.
    pub(super) fn show_all(&mut self) {
        if self.kind == Kind::Copy {
            self.kind = Kind::Only;
        }
    }

    /// The terminal's size may have changed.
    pub(super) fn resize(&mut self) {
        if self.kind == Kind::Terminal {
            self.composer.resize(terminal::size_of(self.stream));
        }
    }

    /// What is to become of the next bytes of a stream.
    pub(super) fn fate(&mut self, kept_in_file: bool) -> Fate {
        if self.closed {
            return Fate::Show;
        }
        let (bytes, idle) = self.writer.backlog();
        let limit = if self.dropping {
            LIMIT_BYTES / 2
        } else {
            LIMIT_BYTES
        };
        if bytes + self.composer.pending() < limit {
            self.end_of_dropping();
            return Fate::Show;
        }
        if !kept_in_file && self.kind != Kind::Terminal {
            return Fate::Wait;
        }
        if self.dropping || idle >= STALL {
            self.dropping = true;
            return Fate::Drop;
        }
        Fate::Wait
    }

    fn end_of_dropping(&mut self) {
        self.dropping = false;
        if self.dropped > 0 {
            let text = format!("[dsl: {} lines were not shown, nobody read them]", self.dropped);
            self.composer.note(&text);
            self.dropped = 0;
        }
    }

    /// A stream that had to wait may be read again.
    pub(super) fn may_resume(&self, kept_in_file: bool) -> bool {
        let (bytes, idle) = self.writer.backlog();
        let droppable = kept_in_file || self.kind == Kind::Terminal;
        self.closed || bytes < LIMIT_BYTES / 2 || (droppable && idle >= STALL)
    }

    /// Takes bytes of a stream, whose fate is decided.
    pub(super) fn take(&mut self, stream: usize, data: &[u8], fate: Fate) {
        if fate == Fate::Drop {
            let lines = self.composer.skip(stream, data);
            self.dropped += lines;
            self.dropped_total += lines;
            return;
        }
        let now = Instant::now();
        self.composer.feed(stream, data, now);
        if self.composer.pending() >= BLOCK_BYTES {
            self.hand_over(now);
        }
    }

    /// Gives the console what there is to write.
    pub(super) fn hand_over(&mut self, now: Instant) {
        if self.composer.is_ready(now) {
            let spare = std::mem::take(&mut self.spare);
            let block = self.composer.take(spare, now);
            self.spare = self.writer.write(block);
        }
    }

    /// Nobody reads it any more, and that is news.
    pub(super) fn has_just_closed(&mut self) -> bool {
        let closed = self.writer.is_closed();
        closed && !std::mem::replace(&mut self.closed, closed)
    }

    /// At the end: waits for the console as long as that is reasonable. What it has not taken then is dropped,
    /// but for what is shown in a pipe, a socket or a file and nowhere else: that is left to `consoles`, unless
    /// the job `is_stopped` by a signal, whose sender waits. Returns how many lines were dropped in all.
    pub(super) fn settle(mut self, end: &LastWait, consoles: &Consoles, given_up: impl Fn() -> bool) -> u64 {
        let now = Instant::now();
        self.composer.finish(now);
        self.hand_over(now);
        let is_kept = self.kind == Kind::Only && !end.is_stopped;
        let longest = match self.kind {
            Kind::Terminal => now + LAST_TERMINAL,
            Kind::Only if is_kept => now + COURTESY,
            Kind::Copy | Kind::Only => end.until,
        };
        let patience = if self.dropping { Duration::ZERO } else { STALL };
        let is_done = self.writer.wait(patience, longest.min(end.until), given_up);
        if self.writer.is_closed() {
            return 0;
        }
        if !is_done && is_kept {
            consoles.keep(self.place, self.writer);
        } else if !is_done {
            self.dropped_total += self.writer.give_up();
        }
        self.dropped_total as u64
    }
}

/// How long consoles are waited for when all workers have ended.
pub(super) struct LastWait {
    /// Not longer than this, all of them together.
    pub(super) until: Instant,
    /// The job was ended by a signal.
    pub(super) is_stopped: bool,
}
