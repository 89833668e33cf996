//! Text that a fork server writes, made safe for one line of our output.

use std::os::fd::OwnedFd;

/// How many bytes of a server's output are kept, and how many of its last line are shown.
const KEPT_BYTES: usize = 4096;
const SHOWN_BYTES: usize = 300;
/// Bytes of one read, and the maximum number of reads before the last line is quoted: another process may write for
/// ever.
const READ_BYTES: usize = 64 * 1024;
const LAST_READS: usize = 64;

/// The end of the output that a server has written to stdout and stderr.
pub(super) struct Words {
    /// The pipe of stdout and stderr; `None` once we no longer read it, and writes to it fail.
    pub(super) pipe: Option<OwnedFd>,
    tail: Vec<u8>,
    /// Number of bytes before `tail`, which are not kept.
    dropped: u64,
}

impl Words {
    /// `pipe` must be non-blocking.
    pub(super) fn new(pipe: Option<OwnedFd>) -> Self {
        Self {
            pipe,
            tail: Vec::new(),
            dropped: 0,
        }
    }

    /// Reads a piece of the output, and returns how many bytes. 0: all writers have closed the pipe. `None`: there
    /// was nothing to read.
    pub(super) fn read(&mut self) -> Option<usize> {
        let mut piece = vec![0; READ_BYTES];
        let count = rustix::io::read(self.pipe.as_ref()?, &mut piece[..]).ok()?;
        self.tail.extend(&piece[..count]);
        let excess = self.tail.len().saturating_sub(KEPT_BYTES);
        self.tail.drain(..excess);
        self.dropped += excess as u64;
        Some(count)
    }

    /// The last line; empty if there is none. If the whole output is 1 MiB or longer, its size is added.
    pub(super) fn last_line(&mut self) -> String {
        let _ = (0..LAST_READS).all(|_| self.read().is_some_and(|count| count > 0));
        let text = self.tail.trim_ascii_end();
        let begin = text.iter().rposition(|&byte| byte == b'\n');
        let line = one_line(&text[begin.map_or(0, |at| at + 1)..]);
        match (self.dropped + self.tail.len() as u64) >> 20 {
            0 => line,
            written => format!("{line} (the end of {written} MiB of output)"),
        }
    }
}

/// Text of another process as one line without control characters.
pub(super) fn one_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let words: Vec<&str> = text
        .split(|letter: char| letter.is_control())
        .map(str::trim)
        .collect();
    let mut line = words
        .into_iter()
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    let end = (0..=SHOWN_BYTES.min(line.len())).rfind(|&at| line.is_char_boundary(at));
    line.truncate(end.unwrap_or(0));
    line
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[test]
    fn what_others_say_is_one_line_without_controls() {
        for (text, line) in [
            (&b""[..], ""),
            (b"no module named x\n", "no module named x"),
            (b"one\r\n  two\x1b[31m\0three\n", "one two [31m three"),
            (b"\xff\xfe", "\u{fffd}\u{fffd}"),
        ] {
            assert_eq!(one_line(text), line);
        }
        assert_eq!(one_line("\u{20ac}".repeat(200).as_bytes()).len(), 300);
        assert_eq!(one_line("x\u{20ac}".repeat(200).as_bytes()).len(), 300);
    }

    #[test]
    fn the_end_of_what_is_written_without_end_is_kept_in_bounded_memory() {
        let (read, write) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        let mut words = Words::new(Some(read));
        assert_eq!(words.last_line(), "");
        let piece = [&[b'x'; 1023][..], b"\n"].concat();
        for _ in 0..5 << 10 {
            assert_eq!(rustix::io::write(&write, &piece), Ok(1024));
            assert_eq!(words.read(), Some(1024));
            assert!(words.tail.len() <= KEPT_BYTES);
        }
        rustix::io::write(&write, b"SomeError: at last\n").unwrap();
        assert_eq!(
            words.last_line(),
            "SomeError: at last (the end of 5 MiB of output)"
        );
        assert_eq!(words.read(), None);
        drop(write);
        assert_eq!(words.read(), Some(0));
    }
}
