//! Copies lines that contain certain words into files.

use memchr::{memchr_iter, memmem};
use rustix::io::Errno;

use crate::mux::compose::LINE_BYTES;
use crate::mux::file::{LogFile, open_log};
use crate::spec::{Console as Kind, LineFile};

/// One file with lines of one kind of stream.
pub(super) struct Search {
    kind: Kind,
    words: Vec<memmem::Finder<'static>>,
    pub(super) file: LogFile,
    /// The first failure of the file, until somebody takes it.
    pub(super) failure: Option<Errno>,
}

impl Search {
    pub(super) fn open(line_file: LineFile, max_bytes: Option<u64>) -> Result<Self, Errno> {
        let words = line_file.words.iter();
        let words = words.map(|word| memmem::Finder::new(word).into_owned());
        let file = open_log(&line_file.path)?;
        Ok(Self {
            kind: line_file.stream,
            words: words.collect(),
            file: LogFile::new(line_file.path, file, max_bytes),
            failure: None,
        })
    }

    fn take(&mut self, kind: Kind, prefix: &[u8], line: &[u8]) {
        if self.kind == kind && self.words.iter().any(|word| word.find(line).is_some()) {
            self.failure = self.file.write(&[prefix, line].concat()).or(self.failure);
        }
    }
}

/// Assembles the lines of one stream, if a search needs them.
#[derive(Default)]
pub(super) struct Lines(Vec<u8>);

impl Lines {
    pub(super) fn search(&mut self, searches: &mut [Search], kind: Kind, prefix: &[u8], data: &[u8]) {
        if !searches.iter().any(|search| search.kind == kind) {
            return;
        }
        let mut begin = 0;
        for end in memchr_iter(b'\n', data) {
            self.0.extend_from_slice(&data[begin..=end]);
            begin = end + 1;
            for search in &mut *searches {
                search.take(kind, prefix, &self.0);
            }
            self.0.clear();
        }
        self.0.extend_from_slice(&data[begin..]);
        if self.0.len() > LINE_BYTES {
            // A progress bar, or not text at all: treat the bytes so far as a line.
            self.finish(searches, kind, prefix);
        }
    }

    /// Ends the last line, because the stream has ended.
    pub(super) fn finish(&mut self, searches: &mut [Search], kind: Kind, prefix: &[u8]) {
        if !self.0.is_empty() {
            self.search(searches, kind, prefix, b"\n");
        }
    }
}

#[cfg(test)]
mod tests;
