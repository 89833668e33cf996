//! What is due after a time: unfinished lines, tracebacks after which no line comes, progress bars.

use std::time::{Duration, Instant};

use memchr::memrchr;

use super::{Composer, visible};
use crate::mux::fold::Fold;

/// On a terminal, and for an interactive worker, an unfinished line such as a prompt is shown when nothing was added
/// to it for this time.
pub(super) const PROMPT_PAUSE: Duration = Duration::from_millis(100);
/// A line that keeps growing, such as a progress bar, is shown after this many times the pause.
pub(super) const BUSY_FACTOR: u32 = 2;
/// A longer unfinished line is not repeated when it goes on. So it is not shown before it is finished, if other
/// workers may interrupt it.
pub(super) const REPEATED_BYTES: usize = 64 * 1024;
/// How long we wait for the next line of a traceback, and after its end for a chained traceback.
pub(super) const INSIDE_PAUSE: Duration = Duration::from_millis(500);
pub(super) const AFTER_PAUSE: Duration = Duration::from_millis(50);
/// A traceback that grows for longer than this is shown as far as it has come.
pub(super) const TRACEBACK_TIME: Duration = Duration::from_secs(2);

impl Composer {
    /// When something is due for a stream.
    pub(super) fn due(&self, stream: usize) -> Option<Instant> {
        let this = &self.streams[stream];
        if this.behind.is_some() {
            return self.held_due();
        }
        let touched = this.touched?;
        let traceback = this.traceback.as_ref().map(|traceback| {
            let pause = if traceback.inside {
                INSIDE_PAUSE
            } else {
                AFTER_PAUSE
            };
            (touched + pause).min(traceback.since + TRACEBACK_TIME)
        });
        let carry = if this.carry.len() <= this.told || this.closed || self.must_be_whole(stream) {
            None
        } else if self.is_prompt(stream) || (self.screen.is_some() && this.has_bar) {
            Some(touched)
        } else if self.screen.is_some() || this.style.interactive {
            Some(touched + PROMPT_PAUSE)
        } else {
            let pause = self.partial_after.map(|pause| self.pause(pause));
            pause.map(|pause| (touched + pause).min(this.since.unwrap_or(touched) + pause * BUSY_FACTOR))
        };
        // An unfinished line after a traceback is shown after it, so the traceback is due first.
        traceback.or(carry)
    }

    /// Whether its unfinished line is too long to be shown now and repeated when it is finished.
    fn must_be_whole(&self, stream: usize) -> bool {
        let this = &self.streams[stream];
        this.carry.len() > REPEATED_BYTES && !this.has_bar && self.screen.is_none() && !self.is_alone()
    }

    fn is_alone(&self) -> bool {
        self.living + self.to_come == 1 && !self.is_relayed
    }

    /// Notes that a stream is not read at the moment, so its silence does not count.
    pub(in crate::mux) fn hold(&mut self, stream: usize, now: Instant) {
        let this = &mut self.streams[stream];
        this.touched = this.touched.map(|_| now);
        this.since = this.since.map(|_| now);
    }

    /// The pause before an unfinished line is shown. It is shorter if there is only one stream, because no other line
    /// can interrupt it.
    fn pause(&self, pause: Duration) -> Duration {
        if self.is_alone() {
            pause.min(PROMPT_PAUSE)
        } else {
            pause
        }
    }

    /// Does what is due, and returns when something is due again. `has_more` says whether bytes of a stream wait to
    /// be read. They are read first, because their worker was not silent.
    pub(in crate::mux) fn tick(&mut self, now: Instant, has_more: impl Fn(usize) -> bool) -> Option<Instant> {
        self.show_folded(Some(now));
        let mut next: Option<Instant> = self.fold.as_ref().and_then(Fold::due);
        if let Some(wake) = self.wake.filter(|wake| now < *wake && self.screen.is_none()) {
            return Some(next.map_or(wake, |next| next.min(wake)));
        }
        let mut bars = Vec::new();
        let (mut wake, mut is_known) = (None, true);
        for stream in std::mem::take(&mut self.listed) {
            self.streams[stream].listed = false;
            let due = self.due(stream);
            if due.is_some_and(|due| due <= now && !(self.is_of_silence(stream, due) && has_more(stream))) {
                self.overdue(stream, now, &mut bars);
            }
            if let Some(due) = self.due(stream) {
                self.streams[stream].listed = true;
                self.listed.push(stream);
                is_known &= due > now;
                if due > now {
                    wake = Some(wake.map_or(due, |wake: Instant| wake.min(due)));
                }
            }
        }
        next = next.into_iter().chain(wake).min();
        self.wake = wake.filter(|_| is_known);
        if let Some(screen) = &mut self.screen {
            bars.sort_unstable();
            let streams = &self.streams;
            let texts = bars.iter().map(|stream| {
                let this = &streams[*stream];
                [&this.style.prefix[..], visible(&this.carry)].concat()
            });
            screen.set_bars(texts);
            if let Some(due) = screen.due(self.open.is_some(), now) {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        }
        next
    }

    /// Whether a stream is due because nothing was read since. If it was due before the last read, more bytes do not
    /// change that.
    fn is_of_silence(&self, stream: usize, due: Instant) -> bool {
        self.streams[stream].touched.is_some_and(|touched| touched < due)
    }

    fn overdue(&mut self, stream: usize, now: Instant, bars: &mut Vec<usize>) {
        if self.streams[stream].behind.is_some() {
            self.show_held();
            if self.due(stream).is_none_or(|due| due > now) {
                return;
            }
        }
        if self.streams[stream].traceback.is_some() {
            self.show_traceback(stream, now);
            if self.due(stream).is_none_or(|due| due > now) {
                return;
            }
        }
        let this = &self.streams[stream];
        let touched = this.touched.unwrap_or(now);
        let is_prompt = this.style.interactive || self.is_alone();
        if self.screen.is_some() && (this.has_bar || !is_prompt) {
            bars.push(stream);
        } else if is_prompt || self.partial_after.is_some_and(|pause| touched + pause <= now) {
            self.show_partial(stream);
        } else {
            self.show_bar(stream, now);
        }
    }

    /// Shows an unfinished line as far as it has come.
    pub(super) fn show_partial(&mut self, stream: usize) {
        self.show_folded(None);
        let told = self.begin_line(stream);
        let this = &mut self.streams[stream];
        if this.style.prefix.is_empty() {
            self.out.extend_from_slice(&this.carry[told..]);
        } else {
            this.inline
                .pass(&this.carry[told..], &this.style.prefix, &mut self.out);
        }
        this.told = this.carry.len();
        this.since = None;
        if this.told > REPEATED_BYTES {
            this.carry.clear();
            this.told = 0;
            this.is_long = true;
        }
        self.open = Some(stream);
    }

    /// Shows the past states of a progress bar as a line. Any other unfinished line is shown as far as it has come.
    fn show_bar(&mut self, stream: usize, now: Instant) {
        self.show_folded(None);
        let this = &mut self.streams[stream];
        match memrchr(b'\r', &this.carry) {
            Some(end) if end >= this.told => {
                let rest = this.carry.split_off(end + 1);
                let mut line = std::mem::replace(&mut this.carry, rest);
                line.pop();
                this.since = (!this.carry.is_empty()).then_some(now);
                self.show(stream, &line, false);
            }
            _ => self.show_partial(stream),
        }
    }
}
