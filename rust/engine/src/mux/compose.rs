//! Composes the output of one console from the bytes of many streams: whole lines with prefixes, in the order in
//! which they were finished.
//!
//! Pure: its input is bytes and the time, its output is bytes. A line is delayed for four reasons: it is not
//! finished, it belongs to a traceback that is still being written, or it waits for equal lines or for equal
//! tracebacks ([`held`]) of other workers.
//!
//! A line that stays unfinished is shown as far as it has come. If another worker's line comes before it goes on, it
//! ends there with a mark ([`CUT`]), and is repeated as a whole when it is finished. A line counts as unfinished only
//! if its worker is silent: bytes that we have not read yet are read first.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use memchr::{memchr, memchr_iter, memmem, memrchr};

use crate::mux::fold::Fold;
use crate::mux::screen::{Screen, Size};
use crate::mux::stamp::Time;

mod clock;
mod held;
mod inline;
mod passing;
pub mod relayed;
mod tag;

use held::Held;
use inline::{Inline, is_plain};
use tag::Tag;

/// A traceback that grows beyond this is shown as far as it has come.
const TRACEBACK_BYTES: usize = 256 * 1024;
/// Limit for pauses: longer than any real wait.
const LONGEST_PAUSE: Duration = Duration::from_secs(365 * 24 * 3600);
/// A longer line is shown in pieces.
pub(super) const LINE_BYTES: usize = 16 << 20;
/// Marks the place where a line was cut.
const CUT: &[u8] = "\u{2026}".as_bytes();

/// Made once: to prepare a search takes longer than to search a line.
static TRACEBACK: LazyLock<memmem::Finder<'static>> =
    LazyLock::new(|| memmem::Finder::new(b"Traceback (most recent call last):"));

/// How one stream is shown.
#[derive(Debug, Clone, Default)]
pub(super) struct Style {
    /// Put before each of its lines.
    pub(super) prefix: Vec<u8>,
    /// Whether the user types input for this worker, so that its prompts are shown.
    pub(super) interactive: bool,
    /// Whether the lines of its tracebacks are kept together.
    pub(super) grouped: bool,
}

/// The state of a stream on the console.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "independent facts about a stream")]
struct Shown {
    style: Style,
    /// Filters its lines if they have a prefix.
    inline: Inline,
    /// The unfinished line.
    carry: Vec<u8>,
    /// How many bytes of it have been shown, on an earlier line or at the end of the console.
    told: usize,
    /// Whether the console's last line shows more of it than we keep.
    is_long: bool,
    /// When the first byte came that is not shown yet, and when the last byte came.
    since: Option<Instant>,
    touched: Option<Instant>,
    traceback: Option<Traceback>,
    /// Whether it has moved the cursor back to the beginning of the unfinished line.
    has_bar: bool,
    /// Whether the beginning of the present line was dropped, so that its rest must be dropped, too.
    skipping: bool,
    /// The parts of its prefix, if that has a number.
    tag: Option<Tag>,
    /// Lines after its waiting traceback; `None` if no traceback of it waits.
    behind: Option<Vec<u8>>,
    /// The number of its last line among those of the console; 0 if it has none.
    last: u64,
    /// Whether it is in [`Composer::listed`].
    listed: bool,
    closed: bool,
}

/// A traceback that is still being written.
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
    /// The stream whose unfinished line is at the end of the console.
    open: Option<usize>,
    screen: Option<Screen>,
    fold: Option<Fold>,
    /// Streams for which something is due at some time.
    listed: Vec<usize>,
    /// No listed stream is due before this time; `None` if that is unknown.
    wake: Option<Instant>,
    living: usize,
    /// Streams that are still to be added.
    to_come: usize,
    /// How many lines were shown. Only counted in full if there is a screen.
    lines: u64,
    /// Tracebacks that wait for equal ones; `None` until the workers are interrupted.
    held: Option<Held>,
    /// An unfinished line is shown when nothing was added to it for this time; `None`: only when it is finished.
    partial_after: Option<Duration>,
    /// Whether another part of dsl passes the output on, among other lines.
    is_relayed: bool,
    /// When bytes for prefixes with a time were last read.
    time: Time,
    /// Bytes of all unfinished lines that [`Composer::pass`] keeps.
    begun: usize,
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

    /// Sets when unfinished lines are shown without a terminal; `None`: never.
    pub(super) fn show_partial_after(&mut self, pause: Option<Duration>) {
        self.partial_after = pause.map(|pause| pause.min(LONGEST_PAUSE));
    }

    /// Marks lines that are shown before they are finished ([`relayed`]), for the part of dsl that passes the output
    /// on.
    pub(super) fn tell_unfinished(&mut self) {
        self.is_relayed = true;
    }

    /// Announces more streams.
    pub(super) fn expect(&mut self, streams: usize) {
        self.to_come += streams;
    }

    /// Adds a stream, and returns its number.
    pub(super) fn add(&mut self, style: Style) -> usize {
        self.to_come = self.to_come.saturating_sub(1);
        self.streams.push(Shown {
            tag: Tag::read(&style.prefix),
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

    /// How many bytes wait to be taken.
    pub(super) fn pending(&self) -> usize {
        self.out.len()
    }

    /// Gives a stream its prefix with the time at which its next bytes were read.
    pub(super) fn stamp(&mut self, stream: usize, prefix: &[u8], time: Time) {
        self.streams[stream].style.prefix.copy_from_slice(prefix);
        self.time = time;
    }

    /// Takes bytes of one stream.
    pub(super) fn feed(&mut self, stream: usize, data: &[u8], now: Instant) {
        let data = self.after_skip(stream, data);
        let Some(end) = memrchr(b'\n', data) else {
            self.carry(stream, data, now);
            return;
        };
        let (mut whole, rest) = data.split_at(end + 1);
        if !self.streams[stream].carry.is_empty() && !self.is_plain(stream, whole) {
            let (first, others) = whole.split_at(memchr(b'\n', whole).unwrap_or(end));
            let mut line = std::mem::take(&mut self.streams[stream].carry);
            line.extend_from_slice(first);
            self.line(stream, &line, false, now);
            whole = &others[1..];
        }
        if self.is_plain(stream, whole) {
            let this = &mut self.streams[stream];
            this.told = 0;
            self.out.append(&mut this.carry);
            self.out.extend_from_slice(whole);
        } else {
            let mut begin = 0;
            let all_plain = is_plain(whole);
            for end in memchr_iter(b'\n', whole) {
                self.line(stream, &whole[begin..end], all_plain, now);
                begin = end + 1;
            }
        }
        self.streams[stream].since = None;
        self.streams[stream].has_bar = false;
        self.carry(stream, rest, now);
    }

    /// Whether these lines of a stream are shown as they are, without delay, and the console has no unfinished line.
    fn is_plain(&self, stream: usize, whole: &[u8]) -> bool {
        let this = &self.streams[stream];
        let has_no_traceback = || {
            let is_idle = this.traceback.is_none() && this.behind.is_none() && this.carry.is_empty();
            is_idle && TRACEBACK.find(whole).is_none()
        };
        this.style.prefix.is_empty()
            && self.open.is_none()
            && self.fold.is_none()
            && self.screen.is_none()
            && (!this.style.grouped || has_no_traceback())
    }

    fn carry(&mut self, stream: usize, rest: &[u8], now: Instant) {
        let is_prompt = self.is_prompt(stream);
        let this = &mut self.streams[stream];
        this.touched = Some(now);
        if !rest.is_empty() {
            this.since.get_or_insert(now);
            this.carry.extend_from_slice(rest);
            // Behind a prompt, a carriage return comes from a line editor, not from a progress bar.
            this.has_bar |= !is_prompt && memchr::memchr(b'\r', rest).is_some();
            if self.screen.is_some() && this.has_bar {
                keep_visible(&mut this.carry);
                this.told = 0;
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
        self.line(stream, &piece, false, now);
    }

    /// Lists this stream, if something is due for it at some time.
    fn list(&mut self, stream: usize) {
        let Some(due) = self.due(stream) else { return };
        if self.listed.is_empty() {
            self.wake = Some(due);
        } else {
            self.wake = self.wake.map(|wake| wake.min(due));
        }
        if !std::mem::replace(&mut self.streams[stream].listed, true) {
            self.listed.push(stream);
        }
    }

    /// Whether its unfinished line is at the end of a terminal.
    fn is_prompt(&self, stream: usize) -> bool {
        self.screen.is_some() && self.open == Some(stream)
    }

    /// Takes a whole line. `known_plain`: it contains nothing that must be left out.
    fn line(&mut self, stream: usize, text: &[u8], known_plain: bool, now: Instant) {
        if self.open == Some(stream) {
            self.show(stream, text, known_plain);
            return;
        }
        let this = &mut self.streams[stream];
        this.told = 0;
        let mut text = if self.screen.is_some() {
            visible(text)
        } else {
            text
        };
        if this.style.grouped {
            text = this.tag.as_ref().map_or(text, |tag| tag.without_mark(text));
        }
        if this.behind.is_some() {
            self.put_behind(stream, text);
            return;
        }
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
                self.show_traceback(stream, now);
            } else {
                self.list(stream);
            }
            return;
        }
        if let Some(fold) = &mut self.fold {
            fold.add(stream, text, now, self.streams.len() + self.to_come);
            return;
        }
        self.show(stream, text, known_plain);
    }

    /// Shows a line, or the rest of a line that is partly shown.
    fn show(&mut self, stream: usize, text: &[u8], known_plain: bool) {
        let text = &text[self.begin_line(stream).min(text.len())..];
        let this = &mut self.streams[stream];
        if this.style.prefix.is_empty() || (this.inline.is_fresh() && (known_plain || is_plain(text))) {
            self.out.extend_from_slice(text);
        } else {
            this.inline.pass(text, &this.style.prefix, &mut self.out);
            this.inline.end(&mut self.out);
        }
        self.out.push(b'\n');
        self.lines += 1;
        this.last = self.lines;
        this.told = 0;
        this.is_long = false;
        self.open = None;
    }

    /// Makes the last line of the console that of this stream. Returns how many bytes of its unfinished line are
    /// there already.
    fn begin_line(&mut self, stream: usize) -> usize {
        if self.open == Some(stream) {
            return self.streams[stream].told;
        }
        self.end_open();
        let this = &mut self.streams[stream];
        if !this.style.prefix.is_empty() {
            self.out.extend_from_slice(&this.style.prefix);
            this.inline.begin(&mut self.out);
        }
        0
    }

    /// Ends the unfinished line at the end of the console.
    fn end_open(&mut self) {
        let Some(stream) = self.open.take() else { return };
        let this = &mut self.streams[stream];
        if !this.style.prefix.is_empty() {
            this.inline.end(&mut self.out);
        }
        if std::mem::take(&mut this.is_long) {
            self.out.extend_from_slice(CUT);
            this.carry.splice(..0, CUT.iter().copied());
            this.told += CUT.len();
        } else if this.has_bar {
            // The shown state of a progress bar is replaced by its next state, and not repeated.
            this.carry.drain(..this.told);
            this.told = 0;
        } else if this.told > 0 {
            self.out.extend_from_slice(CUT);
            this.inline.rewind();
        }
        self.out.push(b'\n');
        self.lines += 1;
    }

    fn show_traceback(&mut self, stream: usize, now: Instant) {
        self.show_folded(None);
        if let Some(traceback) = self.streams[stream].traceback.take()
            && !self.hold_traceback(stream, &traceback.text, now)
        {
            self.show_lines(stream, &traceback.text);
        }
    }

    fn show_lines(&mut self, stream: usize, text: &[u8]) {
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            self.show(stream, line.strip_suffix(b"\n").unwrap_or(line), false);
        }
    }

    /// How many lines a screen has shown since the last line of this stream; `None` without a screen, or if the
    /// stream has no line.
    pub(super) fn shown_since(&self, stream: usize) -> Option<u64> {
        let last = self.streams[stream].last;
        (self.screen.is_some() && last > 0).then(|| self.lines - last)
    }

    fn show_folded(&mut self, now: Option<Instant>) {
        let Some(fold) = &mut self.fold else { return };
        for folded in fold.take(now) {
            if let [stream] = folded.streams[..] {
                self.show(stream, &folded.text, false);
            } else {
                let prefix = format!("[{} workers] ", folded.streams.len());
                self.show_of_many(&folded.streams, prefix.as_bytes(), &folded.text);
            }
        }
    }

    /// Drops bytes of a stream. Returns how many lines are lost; a line counts when its beginning is dropped.
    pub(super) fn skip(&mut self, stream: usize, data: &[u8]) -> usize {
        if self.open == Some(stream) {
            self.end_open();
        }
        let this = &mut self.streams[stream];
        this.carry.clear();
        this.told = 0;
        this.since = None;
        let was_skipping = std::mem::replace(&mut this.skipping, !data.ends_with(b"\n"));
        memchr_iter(b'\n', data).count() + usize::from(this.skipping) - usize::from(was_skipping)
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

    /// Notes that a stream has ended, and finishes its unfinished line.
    pub(super) fn close(&mut self, stream: usize, now: Instant) {
        let this = &mut self.streams[stream];
        let carry = std::mem::take(&mut this.carry);
        if carry.len() > this.told {
            self.line(stream, &carry, false, now);
        }
        let this = &mut self.streams[stream];
        (this.told, this.is_long) = (0, false);
        if self.streams[stream].traceback.is_some() {
            self.show_traceback(stream, now);
        }
        let this = &mut self.streams[stream];
        if !std::mem::replace(&mut this.closed, true) {
            self.living -= 1;
            self.wake = None; // a stream that is alone now waits for less
        }
        self.show_held_if_complete();
        if self.open == Some(stream) {
            self.end_open();
        }
    }

    /// Shows a line of our own.
    pub(super) fn note(&mut self, text: &str) {
        self.end_open();
        self.out.extend_from_slice(text.as_bytes());
        self.out.push(b'\n');
        self.lines += 1;
    }

    /// Takes the bytes to write now; `spare` becomes the next buffer.
    pub(super) fn take(&mut self, spare: Vec<u8>, now: Instant) -> Vec<u8> {
        let out = std::mem::replace(&mut self.out, spare);
        match &mut self.screen {
            None if self.is_relayed => relayed::marked(out, self.open.is_some()),
            None => out,
            Some(screen) => screen.frame(out, self.open.is_some(), now),
        }
    }

    /// Whether there is something to write.
    pub(super) fn is_ready(&self, now: Instant) -> bool {
        let open = self.open.is_some();
        !self.out.is_empty()
            || self
                .screen
                .as_ref()
                .is_some_and(|screen| screen.is_due(open, now))
    }

    /// Closes all streams, and shows everything that waits.
    pub(super) fn finish(&mut self, now: Instant) {
        for stream in 0..self.streams.len() {
            self.close(stream, now);
        }
        self.show_held();
        self.show_folded(None);
        self.tick(now, |_| false);
    }
}

/// The text that a terminal shows after these bytes: the text after the last carriage return that is followed by
/// text.
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

/// The first byte of the character at `at`.
fn character_start(text: &[u8], at: usize) -> usize {
    let is_continuation = |index: &usize| text[*index] & 0xc0 == 0x80;
    (at.saturating_sub(3)..=at)
        .rev()
        .find(|index| !is_continuation(index))
        .unwrap_or(at)
}

/// torch puts `[rank0]: ` in front of each line of a traceback.
fn starts_traceback(line: &[u8]) -> bool {
    TRACEBACK.find(&line[..line.len().min(96)]).is_some()
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
