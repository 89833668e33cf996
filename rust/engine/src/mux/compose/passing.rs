//! Output that another composer has composed: its bytes are shown at once, with an unfinished line as far as it has
//! come.

use memchr::memrchr;

use super::{Composer, Shown, Style};

/// If all unfinished lines together are longer, the line that goes on is not repeated.
const BEGUN_BYTES: usize = 4 << 20;
/// A longer buffer is not kept for the next line.
const KEPT_BYTES: usize = 4 << 10;

impl Composer {
    /// Adds a stream for [`Composer::pass`]. `free`: the number of a stream that has [left](Composer::leave); the new
    /// stream takes this number.
    pub(in crate::mux) fn add_passing(&mut self, free: Option<usize>) -> usize {
        match free {
            Some(stream) => {
                self.streams[stream] = Shown::default();
                stream
            }
            None => self.add(Style::default()),
        }
    }

    /// Shows bytes of a stream up to the last one.
    pub(in crate::mux) fn pass(&mut self, stream: usize, data: &[u8]) {
        let other = self.open.filter(|other| *other != stream);
        let kept = |this: &Self| {
            let theirs = other.map_or(0, |other| this.streams[other].carry.len());
            this.streams[stream].carry.len() + theirs
        };
        let before = kept(self);
        let begin = memrchr(b'\n', data).map_or(0, |end| end + 1);
        let (whole, rest) = data.split_at(begin);
        if !whole.is_empty() {
            let told = self.begin_line(stream);
            let this = &mut self.streams[stream];
            self.out.extend_from_slice(&this.carry[told..]);
            self.out.extend_from_slice(whole);
            this.forget_line();
            self.open = None;
        }
        if !rest.is_empty() {
            let this = &mut self.streams[stream];
            this.carry.extend_from_slice(rest);
            this.has_bar |= memchr::memchr(b'\r', rest).is_some();
            self.show_partial(stream);
        }
        self.begun = self.begun + kept(self) - before;
        let this = &mut self.streams[stream];
        if self.begun > BEGUN_BYTES && !this.carry.is_empty() {
            self.begun -= this.carry.len();
            this.forget_line();
            this.is_long = true;
        }
    }

    /// Forgets the unfinished line of a stream that has ended. If it is at the end of the console, it becomes that of
    /// the stream `nobody`.
    pub(in crate::mux) fn leave(&mut self, stream: usize, nobody: usize) {
        self.begun -= self.streams[stream].carry.len();
        self.streams[stream].forget_line();
        if self.open == Some(stream) {
            self.open = Some(nobody);
        }
    }
}

impl Shown {
    fn forget_line(&mut self) {
        self.carry.clear();
        if self.carry.capacity() > KEPT_BYTES {
            self.carry = Vec::new();
        }
        (self.told, self.has_bar, self.is_long) = (0, false, false);
    }
}
