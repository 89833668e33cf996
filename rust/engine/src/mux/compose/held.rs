//! Joins equal tracebacks of interrupted workers into one, with the numbers of all workers.
//!
//! From the interrupt on, the first traceback of each tagged stream waits for those of the other streams, and so do
//! the lines after it. The wait ends when every stream has a traceback or has ended, after [`LONGEST`], or when too
//! many bytes wait. A worker that hears the terminal itself may show its traceback before we hear of the interrupt:
//! such a traceback begins the wait, too.

use std::time::{Duration, Instant};

use super::{Composer, Inline, TRACEBACK_BYTES, is_indented, is_plain, starts_traceback};
use crate::mux::stamp;

/// The longest time that a traceback waits for equal ones.
pub(super) const LONGEST: Duration = Duration::from_secs(1);

/// The waiting tracebacks.
#[derive(Debug, Default)]
pub(super) struct Held {
    since: Option<Instant>,
    /// Each text with its streams.
    tracebacks: Vec<(Vec<u8>, Vec<usize>)>,
}

impl Composer {
    /// Notes that the workers were interrupted. Most of their tracebacks will only report that.
    pub(in crate::mux) fn interrupt(&mut self) {
        self.held.get_or_insert_default();
    }

    /// Keeps a traceback for a while; false if it must be shown now.
    pub(super) fn hold_traceback(&mut self, stream: usize, text: &[u8], now: Instant) -> bool {
        if tells_of_interrupt(text) {
            self.interrupt();
        }
        let Some(held) = &mut self.held else { return false };
        let this = &self.streams[stream];
        let Some(tag) = this.tag.as_ref().filter(|_| this.behind.is_none()) else {
            return false;
        };
        if text.len() > TRACEBACK_BYTES {
            return false;
        }
        let (text, behind) = text.split_at(end_of_traceback(text));
        let is_like = |other: &usize| {
            let other = self.streams[*other].tag.as_ref();
            other.is_some_and(|other| other.is_like(tag))
        };
        let like = held
            .tracebacks
            .iter_mut()
            .find(|(known, streams)| known == text && streams.iter().all(is_like));
        match like {
            Some((_, streams)) => streams.push(stream),
            None => held.tracebacks.push((text.to_vec(), vec![stream])),
        }
        held.since.get_or_insert(now);
        self.streams[stream].behind = Some(behind.to_vec());
        self.list(stream);
        self.show_held_if_complete();
        true
    }

    /// Keeps a line that comes after the waiting traceback of its stream.
    pub(super) fn put_behind(&mut self, stream: usize, text: &[u8]) {
        let behind = self.streams[stream].behind.get_or_insert_default();
        behind.extend_from_slice(text);
        behind.push(b'\n');
        if behind.len() > TRACEBACK_BYTES {
            self.show_held();
        }
    }

    pub(super) fn held_due(&self) -> Option<Instant> {
        self.held.as_ref()?.since.map(|since| since + LONGEST)
    }

    /// Shows the waiting tracebacks if no other stream can bring an equal one any more.
    pub(super) fn show_held_if_complete(&mut self) {
        let waits = |held: &Held| !held.tracebacks.is_empty();
        if self.to_come > 0 || !self.held.as_ref().is_some_and(waits) {
            return; // most streams end like this, and there may be thousands
        }
        let may_come = self.streams.iter().any(|stream| {
            stream.style.grouped && stream.tag.is_some() && stream.behind.is_none() && !stream.closed
        });
        if !may_come {
            self.show_held();
        }
    }

    /// Shows a line of several workers under a common prefix.
    pub(super) fn show_of_many(&mut self, streams: &[usize], prefix: &[u8], text: &[u8]) {
        self.end_open();
        self.out.extend_from_slice(prefix);
        let is_tagged = |stream: &usize| !self.streams[*stream].style.prefix.is_empty();
        if streams.iter().any(is_tagged) && !is_plain(text) {
            let mut inline = Inline::default();
            inline.pass(text, prefix, &mut self.out);
            inline.end(&mut self.out);
        } else {
            self.out.extend_from_slice(text);
        }
        self.out.push(b'\n');
        self.lines += 1;
        for &stream in streams {
            self.streams[stream].last = self.lines;
        }
    }

    /// Shows the waiting tracebacks and the lines after them.
    pub(super) fn show_held(&mut self) {
        let Some(held) = &mut self.held else { return };
        held.since = None;
        for (text, streams) in std::mem::take(&mut held.tracebacks) {
            if let [stream] = streams[..] {
                self.show_lines(stream, &text);
            } else {
                let tags = streams
                    .iter()
                    .filter_map(|&stream| self.streams[stream].tag.as_ref());
                let mut numbers: Vec<u32> = tags.map(|tag| tag.number).collect();
                let tag = self.streams[streams[0]].tag.as_ref();
                let mut prefix = tag.map(|tag| tag.of_many(&mut numbers)).unwrap_or_default();
                let times = stamp::places(&prefix);
                stamp::put(self.time, &mut prefix, &times);
                for line in text.split_inclusive(|byte| *byte == b'\n') {
                    let line = line.strip_suffix(b"\n").unwrap_or(line);
                    self.show_of_many(&streams, &prefix, line);
                }
            }
        }
        for stream in 0..self.streams.len() {
            if let Some(behind) = self.streams[stream].behind.take() {
                self.show_lines(stream, &behind);
                self.list(stream);
            }
        }
    }
}

/// Whether a `KeyboardInterrupt` has caused this traceback.
fn tells_of_interrupt(text: &[u8]) -> bool {
    let raised = text[..end_of_traceback(text)].trim_ascii_end();
    let line = raised.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
    line.starts_with(b"KeyboardInterrupt")
}

/// The end of the line with the exception; of several tracebacks, that of the last one.
fn end_of_traceback(text: &[u8]) -> usize {
    let (mut at, mut end) = (0, 0);
    let mut is_inside = false;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        at += line.len();
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        if starts_traceback(line) {
            is_inside = true;
        } else if is_inside && !is_indented(line) {
            (is_inside, end) = (false, at);
        }
    }
    if is_inside { text.len() } else { end }
}
