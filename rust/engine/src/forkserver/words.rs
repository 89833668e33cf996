//! What a fork server says in words, as text that may stand in a line of ours.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bytes looked at of a server's last words, and shown of them.
const LAST_WORDS_BYTES: usize = 4096;
const SHOWN_BYTES: usize = 300;

/// The last line of the file.
pub(super) fn last_line(file: &File) -> String {
    let length = file.metadata().map_or(0, |data| data.len());
    let start = length.saturating_sub(LAST_WORDS_BYTES as u64);
    let mut bytes = vec![0; LAST_WORDS_BYTES];
    let count = file.read_at(&mut bytes, start).unwrap_or(0);
    let text = bytes[..count].trim_ascii_end();
    let begin = text
        .iter()
        .rposition(|&byte| byte == b'\n')
        .map_or(0, |at| at + 1);
    one_line(&text[begin..])
}

/// Text of somebody else as one line of ours.
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
}
