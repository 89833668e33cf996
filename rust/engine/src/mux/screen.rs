//! The bottom of a terminal: one line for each worker with a progress bar, redrawn below the scrolling lines.

use std::time::{Duration, Instant};

use anstyle_parse::{Params, Parser, Perform, Utf8Parser};
use unicode_width::UnicodeWidthChar;

/// The shortest time between two redraws of the bars.
const FRAME: Duration = Duration::from_millis(50);
/// Maximum number of bar lines, if the screen has room for them.
const MOST_BARS: usize = 16;

/// Size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) columns: u16,
    pub(super) rows: u16,
}

#[derive(Debug)]
pub(super) struct Screen {
    size: Size,
    bars: Vec<Vec<u8>>,
    drawn: Vec<Vec<u8>>,
    last: Option<Instant>,
}

impl Screen {
    pub(super) fn new(size: Size) -> Self {
        Self {
            size,
            bars: Vec::new(),
            drawn: Vec::new(),
            last: None,
        }
    }

    pub(super) fn resize(&mut self, size: Size) {
        self.size = size;
    }

    pub(super) fn set_bars(&mut self, texts: impl ExactSizeIterator<Item = Vec<u8>>) {
        let room = usize::from(self.size.rows).saturating_sub(2).clamp(1, MOST_BARS);
        let width = usize::from(self.size.columns).saturating_sub(1).max(1);
        let count = texts.len();
        let shown = if count > room { room - 1 } else { count };
        self.bars.clear();
        self.bars.extend(texts.take(shown).map(|text| clip(&text, width)));
        if shown < count {
            self.bars
                .push(format!("... and {} more", count - shown).into_bytes());
        }
    }

    /// Whether the bars have changed and may be drawn now; `open` as in [`Screen::frame`].
    pub(super) fn is_due(&self, open: bool, now: Instant) -> bool {
        self.due(open, now).is_some_and(|due| due <= now)
    }

    /// When changed bars may be drawn; `None` if nothing has changed, or while `open` prevents bars.
    pub(super) fn due(&self, open: bool, now: Instant) -> Option<Instant> {
        let is_kept_away = open && self.drawn.is_empty();
        (self.bars != self.drawn && !is_kept_away).then(|| self.last.map_or(now, |last| last + FRAME))
    }

    /// The bytes that remove the old bars, write the lines, and draw the bars again. With `open` the cursor is behind
    /// an unfinished line, where no bar may be drawn.
    pub(super) fn frame(&mut self, lines: Vec<u8>, open: bool, now: Instant) -> Vec<u8> {
        if self.drawn.is_empty() && (self.bars.is_empty() || open) {
            return lines;
        }
        let mut frame = Vec::with_capacity(lines.len() + 256);
        if !self.drawn.is_empty() {
            frame.push(b'\r');
            if self.drawn.len() > 1 {
                frame.extend_from_slice(format!("\x1b[{}A", self.drawn.len() - 1).as_bytes());
            }
            frame.extend_from_slice(b"\x1b[J");
        }
        frame.extend_from_slice(&lines);
        self.drawn.clear();
        if !open {
            self.drawn.clone_from(&self.bars);
            frame.extend_from_slice(&self.bars.join(&b'\n'));
            self.last = Some(now);
        }
        frame
    }
}

/// How many columns a text takes, without its escape sequences.
pub(super) fn width(text: &[u8]) -> usize {
    Clip::of(text, usize::MAX).used
}

/// Cuts a text to a width. Colours take no room; they are kept, and reset at the end of the text. All other control
/// characters and sequences are left out.
fn clip(text: &[u8], width: usize) -> Vec<u8> {
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

    const SIZE: Size = Size { columns: 20, rows: 6 };

    fn bars(screen: &mut Screen, texts: &[&str]) {
        let texts: Vec<Vec<u8>> = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
        screen.set_bars(texts.into_iter());
    }

    #[test]
    fn lines_scroll_above_the_bars() {
        let mut screen = Screen::new(SIZE);
        let now = Instant::now();
        bars(&mut screen, &["a 1%", "b 1%"]);
        assert_eq!(screen.frame(b"line\n".to_vec(), false, now), b"line\na 1%\nb 1%");
        bars(&mut screen, &["a 2%"]);
        assert!(!screen.is_due(false, now), "not twice within a frame");
        assert!(screen.is_due(false, now + FRAME));
        assert_eq!(
            screen.frame(b"next\n".to_vec(), false, now),
            b"\r\x1b[1A\x1b[Jnext\na 2%"
        );
        bars(&mut screen, &[]);
        assert_eq!(screen.frame(b"end\n".to_vec(), false, now), b"\r\x1b[Jend\n");
        assert_eq!(screen.frame(b"plain\n".to_vec(), false, now), b"plain\n");
    }

    #[test]
    fn a_prompt_has_the_last_line_for_itself() {
        let mut screen = Screen::new(SIZE);
        let now = Instant::now();
        bars(&mut screen, &["a 1%"]);
        screen.frame(Vec::new(), false, now);
        assert_eq!(screen.frame(b"(Pdb) ".to_vec(), true, now), b"\r\x1b[J(Pdb) ");
        assert_eq!(screen.frame(b"x\n".to_vec(), true, now), b"x\n");
        assert_eq!(screen.due(true, now), None);
        assert!(!screen.is_due(true, now + FRAME));
        assert!(screen.is_due(false, now + FRAME), "the prompt is answered");
    }

    #[test]
    fn more_bars_than_rows_are_counted() {
        let mut screen = Screen::new(SIZE);
        bars(&mut screen, &["a", "b", "c", "d", "e", "f"]);
        let frame = screen.frame(Vec::new(), false, Instant::now());
        assert_eq!(frame, b"a\nb\nc\n... and 3 more");
    }

    #[test]
    fn a_bar_never_wraps() {
        let mut screen = Screen::new(SIZE);
        bars(&mut screen, &["0123456789012345678901234567890"]);
        assert_eq!(
            screen.frame(Vec::new(), false, Instant::now()),
            b"0123456789012345678"
        );
    }

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
