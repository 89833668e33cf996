//! Writers whose output can be checked line by line, and the check.
//!
//! A numbered line is `RANK SEQ filler end`: the check sees what is lost, torn or given to another rank.

use crate::sys;
use std::collections::HashMap;
use std::io::Write as _;

/// How numbered lines reach the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// One write per line.
    One,
    /// The text and its line feed apart, as an unbuffered `print` does.
    Two,
    /// Many lines in one write, cut anywhere.
    Block,
    /// Two writes; the first ends within a character.
    Split,
}

impl Style {
    /// The style of that name.
    pub fn parse(word: &str) -> Option<Self> {
        match word {
            "one" => Some(Self::One),
            "two" => Some(Self::Two),
            "block" => Some(Self::Block),
            "split" => Some(Self::Split),
            _ => None,
        }
    }
}

/// Writes `count` numbered lines of about `bytes` bytes each to `fd`.
pub fn numbered(fd: i32, rank: &str, count: u64, bytes: usize, style: Style) {
    // Characters of two bytes, and a NUL if there is room for it.
    let filler = "\u{e9}".repeat(bytes.saturating_sub(24) / 2);
    let nul = if bytes > 40 { "\0" } else { "" };
    let mut block = Vec::new();
    for seq in 0..count {
        // Writing to a Vec cannot fail.
        let _ = writeln!(block, "{rank} {seq} {nul}{filler} end");
        match style {
            Style::One => flush(fd, &mut block),
            Style::Two => {
                block.pop();
                flush(fd, &mut block);
                sys::write_all(fd, b"\n");
            }
            Style::Split => {
                let middle = (block.len() / 2) | 1;
                sys::write_all(fd, &block[..middle]);
                sys::write_all(fd, &block[middle..]);
                block.clear();
            }
            Style::Block => {
                if block.len() >= 4096 {
                    sys::write_all(fd, &block[..4096]);
                    block.drain(..4096);
                }
            }
        }
    }
    flush(fd, &mut block);
}

fn flush(fd: i32, block: &mut Vec<u8>) {
    sys::write_all(fd, block);
    block.clear();
}

/// Writes `mib` MiB as fast as the reader takes them: lines of `line` bytes, in writes of `write` bytes.
pub fn flood(mib: u64, line: usize, write: usize) {
    let text = [&vec![b'x'; line.max(1) - 1][..], b"\n"].concat();
    let lines = write.div_ceil(text.len()).max(1);
    let block = text.repeat(lines);
    let block = &block[..write / text.len() * text.len()];
    let block = if block.is_empty() { &text[..] } else { block };
    let mut left = mib << 20;
    while left > 0 {
        sys::write_all(1, block);
        left = left.saturating_sub(block.len() as u64);
    }
}

/// What a check has found.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Found {
    /// Good lines.
    pub lines: u64,
    /// Parts of a line, and lines that hold more than one.
    pub torn: u64,
    /// Lines whose prefix names another rank.
    pub misattributed: u64,
    /// Lines out of their rank's order: an earlier line is missing or came late.
    pub gaps: u64,
    /// Lines of other shape.
    pub foreign: u64,
}

/// Checks lines one after another.
#[derive(Debug, Default)]
pub struct Check {
    next: HashMap<Vec<u8>, u64>,
    /// What was found so far.
    pub found: Found,
}

impl Check {
    /// Takes a line without its line feed. With a prefix `[rank N] ` the rank is compared.
    pub fn line(&mut self, line: &[u8]) {
        let (prefix, text) = match line.strip_prefix(b"[rank ") {
            Some(rest) => match rest.iter().position(|byte| *byte == b']') {
                Some(end) => (
                    Some(rest[..end].trim_ascii()),
                    rest[end + 1..].strip_prefix(b" ").unwrap_or(&rest[end + 1..]),
                ),
                None => return self.found.foreign += 1,
            },
            None => (None, line),
        };
        let mut words = text.splitn(3, |byte| *byte == b' ');
        let (Some(rank), Some(seq), Some(rest)) = (words.next(), words.next(), words.next()) else {
            return self.found.foreign += 1;
        };
        let seq = std::str::from_utf8(seq)
            .ok()
            .and_then(|seq| seq.parse::<u64>().ok());
        let (Some(seq), true) = (seq, rank.iter().all(u8::is_ascii_digit)) else {
            return self.found.foreign += 1;
        };
        let ends = rest.windows(4).filter(|window| window == b" end").count() + usize::from(rest == b"end");
        if ends != 1 || !rest.ends_with(b"end") {
            return self.found.torn += 1;
        }
        if prefix.is_some_and(|prefix| prefix != rank) {
            return self.found.misattributed += 1;
        }
        if let Some(next) = self.next.get_mut(rank) {
            self.found.gaps += u64::from(*next != seq);
            *next = seq + 1;
        } else {
            self.found.gaps += u64::from(seq != 0);
            self.next.insert(rank.to_vec(), seq + 1);
        }
        self.found.lines += 1;
    }
}
