//! One console, and the rule for output that it does not take in time.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::termios::isatty;

use crate::event::LogNotice;
use crate::mux::compose::Composer;
use crate::mux::consoles::{Consoles, Place, place, stream};
use crate::mux::tee::Tee;
use crate::mux::terminal;
use crate::mux::writer::{LIMIT_BYTES, Wants, Writer};
use crate::poller::Bell;
use crate::spec::Console;

/// A console that takes nothing for this long counts as stopped.
const STALL: Duration = Duration::from_secs(1);
/// At the end: the longest wait for a terminal.
const LAST_TERMINAL: Duration = Duration::from_secs(2);
/// At the end: the longest wait for a console whose remaining output is kept and written later anyway.
const COURTESY: Duration = Duration::from_secs(2);
/// A block of this size is handed over immediately, while it is in the processor's cache.
const BLOCK_BYTES: usize = 256 * 1024;

/// One console with its composer. stdout and stderr share a side if they are the same file.
pub(super) struct Side {
    console: Console,
    stream: BorrowedFd<'static>,
    place: Place,
    writer: Writer,
    tee: Arc<Tee>,
    pub(super) composer: Composer,
    /// The reader's number of each stream of the composer.
    pub(super) tokens: Vec<usize>,
    spare: Vec<u8>,
    kind: Kind,
    dropping: bool,
    /// Lines dropped since the last note about it, and in total.
    dropped: usize,
    dropped_total: usize,
    closed: bool,
}

/// How important a console is for the lines on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A terminal: old lines scroll away anyway.
    Terminal,
    /// Every line is also in a file.
    Copy,
    /// Some lines are in no file.
    Only,
}

/// What to do with bytes for a console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// Show them.
    Show,
    /// Count them and drop them.
    Drop,
    /// Leave them in their stream for now.
    Wait,
}

impl Side {
    /// Opens the side of our stdout or stderr; `None` if that stream is not open.
    pub(super) fn open(console: Console, consoles: &Consoles, bell: Arc<Bell>, fold: bool) -> Option<Self> {
        let stream = stream(console);
        let (Ok(fd), Some(place)) = (fcntl_dupfd_cloexec(stream, 3), place(stream)) else {
            return None;
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
                writer.adopt(bell, Wants::Room);
                writer
            }
            None => Writer::new(fd, bell),
        };
        Some(Self {
            console,
            stream,
            place,
            writer,
            tee: Arc::clone(&consoles.tee),
            composer: Composer::new(size, fold),
            tokens: Vec::new(),
            spare: Vec::new(),
            kind,
            dropping: false,
            dropped: 0,
            dropped_total: 0,
            closed: false,
        })
    }

    /// Notes that a stream on this console is in no file.
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

    /// Whether nobody writes what is left, unless somebody asks.
    pub(super) fn is_behind(&self) -> bool {
        self.writer.is_behind()
    }

    /// Decides what to do with the next bytes of a stream.
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

    /// Whether a paused stream may be read again.
    pub(super) fn may_resume(&self, kept_in_file: bool) -> bool {
        let (bytes, idle) = self.writer.backlog();
        let droppable = kept_in_file || self.kind == Kind::Terminal;
        self.closed || bytes < LIMIT_BYTES / 2 || (droppable && idle >= STALL)
    }

    /// Takes bytes of a stream, with the decision about them.
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

    /// Hands composed output to the writer.
    pub(super) fn hand_over(&mut self, now: Instant) {
        if self.composer.is_ready(now) {
            let spare = std::mem::take(&mut self.spare);
            let block = self.composer.take(spare, now);
            self.tee.copy(&block);
            self.spare = self.writer.write(block);
        }
    }

    /// What is wrong with the console, once.
    pub(super) fn failure(&mut self) -> Option<LogNotice> {
        let errno = self.writer.take_failure()?;
        self.closed = self.writer.is_closed();
        Some(if self.closed {
            LogNotice::ConsoleClosed
        } else {
            LogNotice::FileFailed {
                worker: None,
                path: Some(self.name()),
                errno: errno.raw_os_error(),
            }
        })
    }

    fn name(&self) -> CString {
        match self.console {
            Console::Stdout => c"stdout",
            Console::Stderr => c"stderr",
        }
        .to_owned()
    }

    /// At the end: waits for the console for a reasonable time. After that the rest of its output is dropped, with
    /// one exception: if the console is no terminal and some of its lines are in no file, the rest goes to
    /// `consoles`. The exception does not apply if the job `is_stopped` by a signal, because the sender waits.
    /// Returns what the user should know about it.
    pub(super) fn settle(
        mut self,
        end: &LastWait,
        consoles: &Consoles,
        is_hurried: impl Fn() -> bool,
    ) -> Vec<LogNotice> {
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
        let is_done = self.writer.wait(patience, longest.min(end.until), is_hurried);
        let failure = self.failure();
        if self.closed {
            return Vec::new();
        }
        let mut notices = Vec::from_iter(failure);
        let lost = self.writer.take_lost().bytes;
        if lost > 0 {
            notices.push(LogNotice::BytesLost {
                worker: None,
                path: Some(self.name()),
                count: lost,
            });
        }
        if !is_done && is_kept {
            consoles.keep(self.place, self.writer);
        } else if !is_done {
            self.dropped_total += self.writer.give_up();
        }
        if self.dropped_total > 0 {
            let count = self.dropped_total as u64;
            notices.push(LogNotice::LinesDropped { count });
        }
        notices
    }
}

/// How long to wait for consoles when all workers have ended.
pub(super) struct LastWait {
    /// The end of the wait for all consoles together.
    pub(super) until: Instant,
    /// Whether a signal has ended the job.
    pub(super) is_stopped: bool,
}
