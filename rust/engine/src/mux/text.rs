//! The width of a text on a terminal.

use anstyle_parse::{Params, Parser, Perform, Utf8Parser};
use unicode_width::UnicodeWidthChar;

/// How many columns a text takes, without its escape sequences.
pub(super) fn width(text: &[u8]) -> usize {
    Clip::of(text, usize::MAX).used
}

/// Cuts a text to a width. Colours take no room; they are kept, and reset at the end of the text. All other control
/// characters and sequences are left out.
pub(super) fn clip(text: &[u8], width: usize) -> Vec<u8> {
    let mut clip = Clip::of(text, width);
    if clip.is_coloured {
        clip.kept.extend_from_slice(b"\x1b[0m");
    }
    clip.kept
}

struct Clip {
    width: usize,
    used: usize,
    is_full: bool,
    is_coloured: bool,
    kept: Vec<u8>,
}

impl Clip {
    fn of(text: &[u8], width: usize) -> Self {
        let mut clip = Self {
            width,
            used: 0,
            is_full: false,
            is_coloured: false,
            kept: Vec::with_capacity(text.len()),
        };
        let mut parser = Parser::<Utf8Parser>::new();
        for byte in String::from_utf8_lossy(text).bytes() {
            parser.advance(&mut clip, byte);
        }
        clip
    }
}

impl Perform for Clip {
    fn print(&mut self, letter: char) {
        let Some(columns) = letter.width() else { return };
        self.is_full |= self.width - self.used < columns;
        if !self.is_full {
            self.used += columns;
            self.kept
                .extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }

    fn csi_dispatch(&mut self, params: &Params, intermediates: &[u8], ignore: bool, action: u8) {
        if action != b'm' || !intermediates.is_empty() || ignore {
            return;
        }
        let parts: Vec<String> = params
            .iter()
            .map(|part| part.iter().map(u16::to_string).collect::<Vec<_>>().join(":"))
            .collect();
        self.is_coloured = parts.iter().any(|part| part != "0");
        self.kept
            .extend_from_slice(format!("\x1b[{}m", parts.join(";")).as_bytes());
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
        assert_eq!(clip(b"\x1b]0;title\x07a\x1b(Bb\x1b[2K\x1b[?25l", 9), b"ab");
        assert_eq!(clip(b"\x1b[1;38:5:1mred", 2), b"\x1b[1;38:5:1mre\x1b[0m");
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
