//! How much room a text takes on a terminal.

use anstyle_parse::{Params, Parser, Perform, Utf8Parser};
use unicode_width::UnicodeWidthChar;

/// Columns that a text takes, without its escape sequences.
pub(super) fn width(text: &[u8]) -> usize {
    Clip::of(text, usize::MAX).used
}

/// Cuts a text to a width. Escape sequences take no room and are kept, so that colours end where they should; one
/// that is not finished is left out, as is every other control character.
pub(super) fn clip(text: &[u8], width: usize) -> Vec<u8> {
    Clip::of(text, width).kept
}

struct Clip {
    width: usize,
    used: usize,
    is_full: bool,
    kept: Vec<u8>,
    /// What has come since the last character or the last whole sequence.
    pending: Vec<u8>,
}

impl Clip {
    fn of(text: &[u8], width: usize) -> Self {
        let mut clip = Self {
            width,
            used: 0,
            is_full: false,
            kept: Vec::with_capacity(text.len()),
            pending: Vec::new(),
        };
        let mut parser = Parser::<Utf8Parser>::new();
        for byte in String::from_utf8_lossy(text).bytes() {
            clip.pending.push(byte);
            parser.advance(&mut clip, byte);
        }
        clip
    }

    fn keep_sequence(&mut self) {
        self.kept.append(&mut self.pending);
    }
}

impl Perform for Clip {
    fn print(&mut self, letter: char) {
        self.pending.clear();
        let Some(columns) = letter.width() else { return };
        self.is_full |= self.width - self.used < columns;
        if !self.is_full {
            self.used += columns;
            self.kept
                .extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }

    fn execute(&mut self, _byte: u8) {
        self.pending.pop();
    }

    fn unhook(&mut self) {
        self.keep_sequence();
    }

    fn osc_dispatch(&mut self, _params: &[&[u8]], _bell_terminated: bool) {
        self.keep_sequence();
    }

    fn csi_dispatch(&mut self, _params: &Params, _intermediates: &[u8], _ignore: bool, _action: u8) {
        self.keep_sequence();
    }

    fn esc_dispatch(&mut self, _intermediates: &[u8], _ignore: bool, _byte: u8) {
        self.keep_sequence();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_cut_text_ends_its_colours() {
        assert_eq!(clip(b"0123456789", 4), b"0123");
        assert_eq!(clip(b"\x1b[31mred\x1b[0m", 2), b"\x1b[31mre\x1b[0m");
        assert_eq!(clip(b"a\x07b\xff", 9), "ab\u{fffd}".as_bytes());
        assert_eq!(clip(b"\x1b]0;title\x07a\x1b(Bb", 1), b"\x1b]0;title\x07a\x1b(B");
        assert_eq!(clip(b"a\x1b[3", 9), b"a", "or it would swallow what follows");
    }

    #[test]
    fn characters_take_the_columns_of_their_kind() {
        let wide = "\u{4e2d}\u{6587}";
        assert_eq!(clip(wide.as_bytes(), 3), "\u{4e2d}".as_bytes());
        assert_eq!(
            clip(format!("a{wide}b").as_bytes(), 2),
            b"a",
            "nothing behind what is cut off"
        );
        assert_eq!(width("\x1b[1;31m\u{4e2d}b\x1b[0m".as_bytes()), 3);
        assert_eq!(width("e\u{301} \u{1f680}".as_bytes()), 4);
        assert_eq!(clip("e\u{301}f".as_bytes(), 1), "e\u{301}".as_bytes());
        assert_eq!(width("\u{9b}1m\x7f".as_bytes()), 2);
    }

    proptest! {
        #[test]
        fn no_text_is_wider_than_its_clip(text in proptest::collection::vec(
            prop_oneof![Just(b'\x1b'), Just(b'['), Just(b'm'), Just(b'\xe4'), Just(b'\xb8'), Just(b'\xad'), any::<u8>()],
            0..60,
        ), room in 0usize..20) {
            let clipped = clip(&text, room);
            prop_assert!(width(&clipped) <= room);
            prop_assert_eq!(clip(&clipped, room), clipped);
            prop_assert!(width(&text) <= text.len());
        }
    }
}
