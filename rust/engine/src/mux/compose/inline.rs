//! Filters a worker's bytes for a line that begins with a prefix. Allowed are text, colours, and cursor moves that
//! stay behind the prefix. Other bytes could erase the prefix, reach a line of another worker or change the terminal.
//!
//! A wrong guess of a character's width does no harm in moves to the left: if the cursor might reach the prefix, it
//! goes to the start of the line, and the prefix is written again.

use std::str::from_utf8;

use memchr::memchr_iter;
use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

/// Ends all colours.
const PLAIN: &[u8] = b"\x1b[0m";
/// Longer parameters cannot be a colour.
const LONGEST_PARAMETERS: usize = 64;
/// Maximum bytes of colour sequences that are kept for the next line. If there are more, only the last sequence is
/// kept.
const MOST_COLOURS: usize = 256;
const TAB: usize = 8;
/// How many bytes are checked together.
const BLOCK: usize = 256;
const RUN: usize = 128;

/// Whether text can be shown as it is: no control character but tabs, line feeds, and a carriage return at its end.
pub(super) fn is_plain(text: &[u8]) -> bool {
    let text = text.strip_suffix(b"\r").unwrap_or(text);
    if text.chunks(BLOCK).all(is_ascii_text) {
        return true;
    }
    let is_control = |byte: &u8| matches!(byte, 0..=8 | 0x0b..=0x1f | 0x7f);
    !text.iter().any(is_control)
        && from_utf8(text).is_ok()
        && memchr_iter(0xc2, text).all(|at| text[at + 1] >= 0xa0)
}

/// Printable characters at the beginning of the text, but not always all of them. Only a few bytes are checked at a
/// time, because bytes after an invalid byte are checked again.
fn letters(text: &[u8]) -> &str {
    let text = &text[..text.len().min(RUN)];
    let is_control = |byte: &u8| matches!(byte, 0..=0x1f | 0x7f);
    let text = &text[..text.iter().position(is_control).unwrap_or(text.len())];
    let valid = from_utf8(text).map_or_else(|error| error.valid_up_to(), str::len);
    let mut leads = memchr_iter(0xc2, &text[..valid]);
    let end = leads.find(|&at| text[at + 1] < 0xa0).unwrap_or(valid);
    from_utf8(&text[..end]).unwrap_or_default()
}

/// Written without a branch, so that the processor can check many bytes together: `matches!` of these bytes has some.
fn is_ascii_text(block: &[u8]) -> bool {
    let is_other = |byte: u8| {
        let is_printable = byte.wrapping_sub(b' ') <= b'~' - b' ';
        u8::from(!is_printable) & u8::from(byte != b'\t') & u8::from(byte != b'\n')
    };
    block.iter().fold(0, |others, &byte| others | is_other(byte)) == 0
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Text,
    /// Behind ESC.
    Escape,
    /// Behind ESC and an intermediate byte.
    EscapeRest,
    /// Behind ESC and `[`.
    Parameters,
    /// In a command string such as a title or a clipboard text.
    Command,
    /// Behind an ESC in a command string.
    CommandEscape,
}

/// The state of one stream in its present line.
#[derive(Debug, Default)]
pub(super) struct Inline {
    state: State,
    /// The beginning of a character, or the parameters of a sequence.
    begun: Vec<u8>,
    /// Sequences of the colours that are on now, and of those at the beginning of the line.
    colours: Vec<u8>,
    first_colours: Vec<u8>,
    /// Whether a carriage return was the last byte.
    returned: bool,
    /// How many columns the cursor is behind the prefix: the estimate, and the number that is certain.
    column: usize,
    certain: usize,
}

impl Inline {
    /// Begins a line. Its prefix is already written.
    pub(super) fn begin(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.colours);
        self.first_colours.clone_from(&self.colours);
    }

    /// Ends a line that is over or cut. Unfinished sequences in it are left out.
    pub(super) fn end(&mut self, out: &mut Vec<u8>) {
        self.flush_character(out);
        self.state = State::Text;
        self.begun.clear();
        if !self.colours.is_empty() {
            out.extend_from_slice(PLAIN);
        }
        if std::mem::take(&mut self.returned) {
            out.push(b'\r');
        }
        (self.column, self.certain) = (0, 0);
    }

    /// Prepares to show the cut line again from its beginning.
    pub(super) fn rewind(&mut self) {
        self.colours.clone_from(&self.first_colours);
    }

    /// Whether no state of an earlier line is left.
    pub(super) fn is_fresh(&self) -> bool {
        !self.returned
            && self.column == 0
            && self.state == State::Text
            && self.colours.is_empty()
            && self.begun.is_empty()
    }

    /// Shows the next bytes of the line.
    pub(super) fn pass(&mut self, text: &[u8], prefix: &[u8], out: &mut Vec<u8>) {
        let mut rest = text;
        while let Some((&byte, behind)) = rest.split_first() {
            if self.state == State::Text && self.begun.is_empty() {
                let letters = letters(rest);
                if !letters.is_empty() {
                    self.settle(prefix, out);
                    out.extend_from_slice(letters.as_bytes());
                    self.column += letters.chars().filter_map(char::width).sum::<usize>();
                    self.certain += letters.bytes().filter(u8::is_ascii).count();
                    rest = &rest[letters.len()..];
                    continue;
                }
            }
            rest = behind;
            match (self.state, byte) {
                (State::Text, _) => self.text(byte, prefix, out),
                // The first two bytes abort any sequence.
                (_, 0x18 | 0x1a) | (State::Command, 0x07) | (State::CommandEscape, b'\\') => {
                    self.state = State::Text;
                }
                (State::Command, 0x1b) => self.state = State::CommandEscape,
                (State::Command, _) | (State::EscapeRest, 0x20..=0x2f) => {}
                (_, 0x1b) => self.state = State::Escape,
                (_, 0..=0x1f) => {}
                (State::Escape | State::CommandEscape, _) => self.escape(byte),
                (State::EscapeRest, _) => self.state = State::Text,
                (State::Parameters, 0x20..=0x3f) => {
                    if self.begun.len() <= LONGEST_PARAMETERS {
                        self.begun.push(byte);
                    }
                }
                (State::Parameters, _) => {
                    self.state = State::Text;
                    let parameters = std::mem::take(&mut self.begun);
                    self.sequence(&parameters, byte, prefix, out);
                }
            }
        }
    }

    fn text(&mut self, byte: u8, prefix: &[u8], out: &mut Vec<u8>) {
        if byte < 0x80 {
            self.flush_character(out);
        }
        match byte {
            0x1b => self.state = State::Escape,
            b'\r' => self.returned = true,
            0x08 => self.move_left(1, prefix, out),
            b'\t' => {
                self.settle(prefix, out);
                out.push(byte);
                self.column = (self.column / TAB + 1) * TAB;
            }
            0..=0x1f | 0x7f => {}
            0x20..=0x7e => {
                self.settle(prefix, out);
                out.push(byte);
                self.column += 1;
                self.certain += 1;
            }
            _ => {
                self.settle(prefix, out);
                // A byte that begins a character ends an unfinished character.
                if byte >= 0xc0 {
                    self.flush_character(out);
                }
                self.begun.push(byte);
                if byte < 0xa0 && self.begun.len() == 1 {
                    // A control character of one byte.
                    self.begun.clear();
                } else if self.begun.len() >= length(self.begun[0]) {
                    self.flush_character(out);
                }
            }
        }
    }

    /// Shows the collected character, or its single bytes if they are not a valid character.
    fn flush_character(&mut self, out: &mut Vec<u8>) {
        if self.state != State::Text || self.begun.is_empty() {
            return;
        }
        match from_utf8(&self.begun) {
            Ok(character) if !character.chars().any(char::is_control) => {
                self.column += character.width();
                out.extend_from_slice(&self.begun);
            }
            Ok(_) => {}
            Err(_) => out.extend(self.begun.iter().filter(|byte| **byte >= 0xa0)),
        }
        self.begun.clear();
    }

    fn escape(&mut self, byte: u8) {
        self.begun.clear();
        self.state = match byte {
            b'[' => State::Parameters,
            b']' | b'P' | b'X' | b'^' | b'_' => State::Command,
            0x20..=0x2f => State::EscapeRest,
            _ => State::Text,
        };
    }

    /// A whole control sequence.
    ///
    /// [ECMA-48](https://ecma-international.org/publications-and-standards/standards/ecma-48/)
    fn sequence(&mut self, parameters: &[u8], end: u8, prefix: &[u8], out: &mut Vec<u8>) {
        let are_colours = parameters.iter().all(|byte| matches!(byte, b'0'..=b':' | b';'));
        if end == b'm' && are_colours && parameters.len() <= LONGEST_PARAMETERS {
            self.settle(prefix, out);
            self.colour(parameters, out);
            return;
        }
        let Some(count) = number(parameters) else { return };
        let at_least_one = count.max(1);
        match end {
            b'C' | b'a' => {
                self.settle(prefix, out);
                move_right(at_least_one, out);
                self.column += at_least_one;
            }
            b'D' => self.move_left(at_least_one, prefix, out),
            b'G' | b'`' => {
                self.restart(prefix, out);
                move_right(at_least_one - 1, out);
                self.column = at_least_one - 1;
            }
            b'K' if count == 0 => {
                self.settle(prefix, out);
                out.extend_from_slice(b"\x1b[K");
            }
            b'K' if count == 2 => {
                let column = if self.returned { 0 } else { self.column };
                self.restart(prefix, out);
                out.extend_from_slice(b"\x1b[K");
                move_right(column, out);
                self.column = column;
            }
            // Insert, delete and rub out characters to the right: editors of lines use them.
            b'@' | b'P' | b'X' => {
                self.settle(prefix, out);
                out.extend_from_slice(format!("\x1b[{at_least_one}{}", char::from(end)).as_bytes());
            }
            _ => {}
        }
    }

    fn colour(&mut self, parameters: &[u8], out: &mut Vec<u8>) {
        let sequence = [b"\x1b[", parameters, b"m"].concat();
        out.extend_from_slice(&sequence);
        let first = parameters.split(|byte| *byte == b';').next().unwrap_or_default();
        let resets = first.iter().all(|byte| *byte == b'0');
        if resets || self.colours.len() + sequence.len() > MOST_COLOURS {
            self.colours.clear();
        }
        if !resets || parameters.len() > first.len() {
            self.colours.extend_from_slice(&sequence);
        }
    }

    fn move_left(&mut self, count: usize, prefix: &[u8], out: &mut Vec<u8>) {
        self.settle(prefix, out);
        let count = count.min(self.column);
        if count == 0 {
            return;
        }
        let target = self.column - count;
        if count <= self.certain {
            self.certain -= count;
            if count == 1 {
                out.push(0x08);
            } else {
                out.extend_from_slice(format!("\x1b[{count}D").as_bytes());
            }
        } else {
            self.restart(prefix, out);
            move_right(target, out);
        }
        self.column = target;
    }

    /// Carries out a carriage return when another byte follows it.
    fn settle(&mut self, prefix: &[u8], out: &mut Vec<u8>) {
        if std::mem::take(&mut self.returned) && self.column > 0 {
            self.restart(prefix, out);
        }
    }

    /// Goes to the beginning of the line, and writes the prefix again.
    fn restart(&mut self, prefix: &[u8], out: &mut Vec<u8>) {
        (self.column, self.certain, self.returned) = (0, 0, false);
        if !self.colours.is_empty() {
            out.extend_from_slice(PLAIN);
        }
        out.push(b'\r');
        out.extend_from_slice(prefix);
        out.extend_from_slice(&self.colours);
    }
}

fn move_right(count: usize, out: &mut Vec<u8>) {
    if count > 0 {
        out.extend_from_slice(format!("\x1b[{count}C").as_bytes());
    }
}

/// A single small number; 0 if there are no parameters.
fn number(parameters: &[u8]) -> Option<usize> {
    let text = from_utf8(parameters).ok()?;
    if text.is_empty() {
        return Some(0);
    }
    let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse::<u16>().ok().filter(|_| is_number).map(usize::from)
}

/// How many bytes a character has that begins with this byte.
fn length(first: u8) -> usize {
    match first {
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => 1,
    }
}

#[cfg(test)]
mod tests;
