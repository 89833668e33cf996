//! What one console shows, made from the bytes of many streams: whole lines with their prefixes, in the order
//! in which they became whole.
//!
//! Pure: bytes and the time in, bytes out. Three things delay a line: it is not finished, it belongs to a
//! traceback that is still being written, or equal lines of other workers are waited for.

use std::time::{Duration, Instant};

use memchr::{memchr_iter, memmem, memrchr};

use crate::mux::fold::Fold;
use crate::mux::screen::{Screen, Size};

/// An unfinished line is shown after this time without more of it.
const PARTIAL_PAUSE: Duration = Duration::from_millis(100);
/// How often a progress bar that is not on a terminal becomes a line.
const BAR_PAUSE: Duration = Duration::from_secs(10);
/// The next line of a traceback is waited for as long as this, and a chained one after its end.
const INSIDE_PAUSE: Duration = Duration::from_millis(500);
const AFTER_PAUSE: Duration = Duration::from_millis(50);
/// A traceback that goes on for longer than this, or grows beyond this, is shown as far as it is.
const TRACEBACK_TIME: Duration = Duration::from_secs(2);
const TRACEBACK_BYTES: usize = 256 * 1024;
/// A longer line is shown in pieces.
pub(super) const LINE_BYTES: usize = 16 << 20;
/// Marks the place where a line was cut.
const CUT: &[u8] = "\u{2026}".as_bytes();

const TRACEBACK: &[u8] = b"Traceback (most recent call last):";

/// How one stream is shown.
#[derive(Debug, Clone, Default)]
pub(super) struct Style {
    /// Put before each of its lines.
    pub(super) prefix: Vec<u8>,
    /// Somebody talks with this worker: its prompts are shown as they are.
    pub(super) interactive: bool,
    /// Its tracebacks are kept together.
    pub(super) grouped: bool,
}

/// A stream as it is shown.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a stream")]
struct Shown {
    style: Style,
    /// The unfinished line.
    carry: Vec<u8>,
    /// When its first byte came, and the last one.
    since: Option<Instant>,
    touched: Option<Instant>,
    traceback: Option<Traceback>,
    /// It has moved the cursor back to the begin of a line.
    has_bar: bool,
    /// The begin of the present line was dropped, so its rest is too.
    skipping: bool,
    /// It is in the list of streams that the clock matters to.
    listed: bool,
    closed: bool,
}

/// One that is still being written.
#[derive(Debug)]
struct Traceback {
    text: Vec<u8>,
    since: Instant,
    inside: bool,
}

/// Composes one console.
#[derive(Debug, Default)]
pub(super) struct Composer {
    streams: Vec<Shown>,
    out: Vec<u8>,
    /// The stream whose unfinished line stands at the end of the console.
    open: Option<usize>,
    screen: Option<Screen>,
    fold: Option<Fold>,
    listed: Vec<usize>,
    living: usize,
    /// Streams that are still to be added.
    to_come: usize,
}

impl Composer {
    /// `terminal`: the size of the screen, if there is one.
    pub(super) fn new(terminal: Option<Size>, fold: bool) -> Self {
        Self {
            screen: terminal.map(Screen::new),
            fold: fold.then(Fold::default),
            ..Self::default()
        }
    }

    /// More streams will be added.
    pub(super) fn expect(&mut self, streams: usize) {
        self.to_come += streams;
    }

    /// A new stream; its number.
    pub(super) fn add(&mut self, style: Style) -> usize {
        self.to_come = self.to_come.saturating_sub(1);
        self.streams.push(Shown {
            style,
            ..Shown::default()
        });
        self.living += 1;
        self.streams.len() - 1
    }

    pub(super) fn resize(&mut self, size: Size) {
        if let Some(screen) = &mut self.screen {
            screen.resize(size);
        }
    }

    /// Bytes that wait to be taken.
    pub(super) fn pending(&self) -> usize {
        self.out.len()
    }

    /// Takes bytes of one stream.
    pub(super) fn feed(&mut self, stream: usize, data: &[u8], now: Instant) {
        let data = self.after_skip(stream, data);
        let Some(end) = memrchr(b'\n', data) else {
            self.carry(stream, data, now);
            return;
        };
        let (whole, rest) = data.split_at(end + 1);
        if self.is_plain(stream) && self.streams[stream].style.prefix.is_empty() {
            let this = &mut self.streams[stream];
            self.out.append(&mut this.carry);
            self.out.extend_from_slice(whole);
        } else {
            let mut begin = 0;
            for end in memchr_iter(b'\n', whole) {
                let piece = &whole[begin..end];
                begin = end + 1;
                if self.streams[stream].carry.is_empty() {
                    self.line(stream, piece, now);
                } else {
                    let mut line = std::mem::take(&mut self.streams[stream].carry);
                    line.extend_from_slice(piece);
                    self.line(stream, &line, now);
                }
            }
        }
        self.streams[stream].since = None;
        self.carry(stream, rest, now);
    }

    /// Nothing delays a line of this stream, and nothing stands on the last line of the console.
    fn is_plain(&self, stream: usize) -> bool {
        self.open.is_none()
            && self.fold.is_none()
            && self.screen.is_none()
            && !self.streams[stream].style.grouped
    }

    fn carry(&mut self, stream: usize, rest: &[u8], now: Instant) {
        let this = &mut self.streams[stream];
        this.touched = Some(now);
        if !rest.is_empty() {
            this.since.get_or_insert(now);
            this.carry.extend_from_slice(rest);
            this.has_bar |= memchr::memchr(b'\r', rest).is_some();
            if self.screen.is_some() && this.has_bar {
                keep_visible(&mut this.carry);
            }
            while self.streams[stream].carry.len() > LINE_BYTES {
                self.cut(stream, now);
            }
        }
        self.list(stream);
    }

    fn cut(&mut self, stream: usize, now: Instant) {
        let this = &mut self.streams[stream];
        let at = character_start(&this.carry, LINE_BYTES);
        let rest = this.carry.split_off(at);
        let mut piece = std::mem::replace(&mut this.carry, CUT.to_vec());
        this.carry.extend_from_slice(&rest);
        piece.extend_from_slice(CUT);
        self.line(stream, &piece, now);
    }

    /// Notes that the clock matters to this stream.
    fn list(&mut self, stream: usize) {
        if !self.streams[stream].listed && self.due(stream).is_some() {
            self.streams[stream].listed = true;
            self.listed.push(stream);
        }
    }

    fn line(&mut self, stream: usize, text: &[u8], now: Instant) {
        let this = &mut self.streams[stream];
        let text = if self.screen.is_some() {
            visible(text)
        } else {
            text
        };
        if this.style.grouped && (this.traceback.is_some() || starts_traceback(text)) {
            let traceback = this.traceback.get_or_insert_with(|| Traceback {
                text: Vec::new(),
                since: now,
                inside: true,
            });
            traceback.inside = starts_traceback(text) || is_indented(text);
            traceback.text.extend_from_slice(text);
            traceback.text.push(b'\n');
            if traceback.text.len() > TRACEBACK_BYTES {
                self.show_traceback(stream);
            } else {
                self.list(stream);
            }
            return;
        }
        if let Some(fold) = self.fold.as_mut().filter(|_| self.open != Some(stream)) {
            fold.add(stream, text, now, self.streams.len() + self.to_come);
            return;
        }
        self.show(stream, text);
    }

    fn show(&mut self, stream: usize, text: &[u8]) {
        self.begin_line(stream);
        self.out.extend_from_slice(text);
        self.out.push(b'\n');
        self.open = None;
    }

    fn begin_line(&mut self, stream: usize) {
        if self.open == Some(stream) {
            return;
        }
        if self.open.take().is_some() {
            self.out.push(b'\n');
        }
        self.out.extend_from_slice(&self.streams[stream].style.prefix);
    }

    fn show_traceback(&mut self, stream: usize) {
        self.show_folded(None);
        if let Some(traceback) = self.streams[stream].traceback.take() {
            for line in traceback.text.split_inclusive(|byte| *byte == b'\n') {
                self.show(stream, line.strip_suffix(b"\n").unwrap_or(line));
            }
        }
    }

    fn show_folded(&mut self, now: Option<Instant>) {
        let Some(fold) = &mut self.fold else { return };
        for folded in fold.take(now) {
            if let [stream] = folded.streams[..] {
                self.show(stream, &folded.text);
            } else {
                if self.open.take().is_some() {
                    self.out.push(b'\n');
                }
                let count = folded.streams.len();
                self.out
                    .extend_from_slice(format!("[{count} workers] ").as_bytes());
                self.out.extend_from_slice(&folded.text);
                self.out.push(b'\n');
            }
        }
    }

    /// Drops bytes of a stream; how many lines are lost by it.
    pub(super) fn skip(&mut self, stream: usize, data: &[u8]) -> usize {
        let this = &mut self.streams[stream];
        this.carry.clear();
        this.since = None;
        this.skipping = !data.ends_with(b"\n");
        memchr_iter(b'\n', data).count()
    }

    fn after_skip<'data>(&mut self, stream: usize, data: &'data [u8]) -> &'data [u8] {
        let this = &mut self.streams[stream];
        if !this.skipping {
            return data;
        }
        match memchr::memchr(b'\n', data) {
            Some(end) => {
                this.skipping = false;
                &data[end + 1..]
            }
            None => &[],
        }
    }

    /// The stream has ended; an unfinished line is finished for it.
    pub(super) fn close(&mut self, stream: usize, now: Instant) {
        let carry = std::mem::take(&mut self.streams[stream].carry);
        if !carry.is_empty() {
            self.line(stream, &carry, now);
        }
        if self.streams[stream].traceback.is_some() {
            self.show_traceback(stream);
        }
        let this = &mut self.streams[stream];
        if !std::mem::replace(&mut this.closed, true) {
            self.living -= 1;
        }
        if self.open == Some(stream) {
            self.out.push(b'\n');
            self.open = None;
        }
    }

    /// A line of our own.
    pub(super) fn note(&mut self, text: &str) {
        if self.open.take().is_some() {
            self.out.push(b'\n');
        }
        self.out.extend_from_slice(text.as_bytes());
        self.out.push(b'\n');
    }

    /// When the clock has something to do for a stream.
    fn due(&self, stream: usize) -> Option<Instant> {
        let this = &self.streams[stream];
        let touched = this.touched?;
        let traceback = this.traceback.as_ref().map(|traceback| {
            let pause = if traceback.inside {
                INSIDE_PAUSE
            } else {
                AFTER_PAUSE
            };
            (touched + pause).min(traceback.since + TRACEBACK_TIME)
        });
        let carry = if this.carry.is_empty() || this.closed {
            None
        } else if this.style.interactive || self.living + self.to_come == 1 {
            Some(touched + PARTIAL_PAUSE)
        } else if self.screen.is_some() {
            let pause = if this.has_bar {
                Duration::ZERO
            } else {
                PARTIAL_PAUSE
            };
            Some(touched + pause)
        } else {
            this.since.filter(|_| this.has_bar).map(|since| since + BAR_PAUSE)
        };
        match (traceback, carry) {
            (Some(traceback), Some(carry)) => Some(traceback.min(carry)),
            (traceback, carry) => traceback.or(carry),
        }
    }

    /// Does what is due; when there is something to do again.
    pub(super) fn tick(&mut self, now: Instant) -> Option<Instant> {
        self.show_folded(Some(now));
        let mut next: Option<Instant> = self.fold.as_ref().and_then(Fold::due);
        let mut bars = Vec::new();
        for stream in std::mem::take(&mut self.listed) {
            self.streams[stream].listed = false;
            let due = self.due(stream);
            if due.is_some_and(|due| due <= now) {
                self.overdue(stream, now, &mut bars);
            }
            if let Some(due) = self.due(stream) {
                self.streams[stream].listed = true;
                self.listed.push(stream);
                if due > now {
                    next = Some(next.map_or(due, |next| next.min(due)));
                }
            }
        }
        if let Some(screen) = &mut self.screen {
            bars.sort_unstable();
            let streams = &self.streams;
            let texts = bars.iter().map(|stream| {
                let this = &streams[*stream];
                [&this.style.prefix[..], visible(&this.carry)].concat()
            });
            screen.set_bars(texts);
            if let Some(due) = screen.due(now) {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        }
        next
    }

    fn overdue(&mut self, stream: usize, now: Instant, bars: &mut Vec<usize>) {
        let this = &self.streams[stream];
        let touched = this.touched.unwrap_or(now);
        if let Some(traceback) = &this.traceback {
            let pause = if traceback.inside {
                INSIDE_PAUSE
            } else {
                AFTER_PAUSE
            };
            if touched + pause <= now || traceback.since + TRACEBACK_TIME <= now {
                self.show_traceback(stream);
            }
            return;
        }
        let this = &mut self.streams[stream];
        if this.style.interactive
            || (self.living + self.to_come == 1 && !(self.screen.is_some() && this.has_bar))
        {
            let carry = std::mem::take(&mut this.carry);
            this.since = None;
            self.show_folded(None);
            self.begin_line(stream);
            self.out.extend_from_slice(&carry);
            self.open = Some(stream);
        } else if self.screen.is_some() {
            bars.push(stream);
        } else if let Some(end) = memrchr(b'\r', &this.carry) {
            let rest = this.carry.split_off(end + 1);
            let mut line = std::mem::replace(&mut this.carry, rest);
            line.pop();
            this.since = (!this.carry.is_empty()).then_some(now);
            self.show(stream, &line);
        }
    }

    /// What is to be written now; `spare` becomes the next buffer.
    pub(super) fn take(&mut self, spare: Vec<u8>, now: Instant) -> Vec<u8> {
        let out = std::mem::replace(&mut self.out, spare);
        match &mut self.screen {
            None => out,
            Some(screen) => screen.frame(out, self.open.is_some(), now),
        }
    }

    /// There is something to write.
    pub(super) fn is_ready(&self, now: Instant) -> bool {
        !self.out.is_empty() || self.screen.as_ref().is_some_and(|screen| screen.is_due(now))
    }

    /// All streams have ended: nothing waits any more.
    pub(super) fn finish(&mut self, now: Instant) {
        for stream in 0..self.streams.len() {
            self.close(stream, now);
        }
        self.show_folded(None);
        self.tick(now);
    }
}

/// What stands on a terminal after these bytes: the text behind the last carriage return that has any.
fn visible(line: &[u8]) -> &[u8] {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    match memrchr(b'\r', line) {
        Some(at) => &line[at + 1..],
        None => line,
    }
}

fn keep_visible(carry: &mut Vec<u8>) {
    let ends = carry.last() == Some(&b'\r');
    let keep = visible(carry).len() + usize::from(ends);
    carry.drain(..carry.len() - keep);
}

/// The begin of the character at or before `at`.
fn character_start(text: &[u8], at: usize) -> usize {
    let is_continuation = |index: &usize| text[*index] & 0xc0 == 0x80;
    (at.saturating_sub(3)..=at)
        .rev()
        .find(|index| !is_continuation(index))
        .unwrap_or(at)
}

/// torch puts `[rank0]: ` in front of each line of a traceback.
fn starts_traceback(line: &[u8]) -> bool {
    memmem::find(&line[..line.len().min(96)], TRACEBACK).is_some()
}

fn is_indented(line: &[u8]) -> bool {
    let text = match memmem::find(&line[..line.len().min(32)], b"]: ") {
        Some(at) if line.starts_with(b"[rank") => &line[at + 3..],
        _ => line,
    };
    text.is_empty() || text[0] == b' ' || text[0] == b'\t'
}

#[cfg(test)]
mod tests;
