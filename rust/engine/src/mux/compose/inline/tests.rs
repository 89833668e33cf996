use proptest::prelude::*;

use super::*;

const PREFIX: &[u8] = b"[0] ";

/// The output for these pieces of one line, without the prefix and the line feed.
fn line(pieces: &[&[u8]]) -> String {
    lines(&[pieces]).remove(0)
}

fn lines(lines: &[&[&[u8]]]) -> Vec<String> {
    let mut inline = Inline::default();
    let show = |pieces: &&[&[u8]]| {
        let mut out = Vec::new();
        inline.begin(&mut out);
        for piece in *pieces {
            inline.pass(piece, PREFIX, &mut out);
        }
        inline.end(&mut out);
        String::from_utf8_lossy(&out).into_owned()
    };
    lines.iter().map(show).collect()
}

#[test]
fn text_and_colours_pass() {
    assert_eq!(line(&[b"a\tb \xc3\xa9\xe4\xb8\xad"]), "a\tb \u{e9}\u{4e2d}");
    assert_eq!(line(&[b"\x1b[1;38:5:0mred\x1b[m"]), "\x1b[1;38:5:0mred\x1b[m");
    assert_eq!(line(&[b"end\r"]), "end\r", "a line end of Windows");
}

#[test]
fn colours_end_with_their_line_and_go_on_in_the_next() {
    let both = lines(&[&[b"\x1b[31mred"], &[b"more\x1b[0m"], &[b"plain"]]);
    assert_eq!(both, ["\x1b[31mred\x1b[0m", "\x1b[31mmore\x1b[0m", "plain"]);
}

#[test]
fn what_reaches_beyond_the_line_is_left_out() {
    for attack in [
        &b"\x1b[2J"[..],
        b"\x1b[H",
        b"\x1b[3;4H",
        b"\x1b[1K",
        b"\x1b[A",
        b"\x1b[99B",
        b"\x1b[2F",
        b"\x1b[1S",
        b"\x1b[4L",
        b"\x1b[2;5r",
        b"\x1b[s",
        b"\x1b[u",
        b"\x1b[6n",
        b"\x1b[?1049h",
        b"\x1b[?25l",
        b"\x1b[>4;1m",
        b"\x1b[!p",
        b"\x1b7",
        b"\x1b8",
        b"\x1bc",
        b"\x1bM",
        b"\x1b#8",
        b"\x1b(0",
        b"\x1b]0;title\x07",
        b"\x1b]52;c;aGk=\x1b\\",
        b"\x1bPq#0~\x1b\\",
        b"\x1b_G\x1b\\",
        b"\x1b^pm\x1b\\",
        b"\x0b",
        b"\x0c",
        b"\x0e",
        b"\x05",
        b"\x07",
        b"\x7f",
        b"\xc2\x85",
        b"\x85",
    ] {
        let text = [b"a", attack, b"b"].concat();
        assert_eq!(line(&[&text]), "ab", "{}", attack.escape_ascii());
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(line(&bytes), "ab", "{} byte by byte", attack.escape_ascii());
    }
}

#[test]
fn control_characters_of_eight_bits_lose_their_meaning() {
    assert_eq!(line(&[b"a\xc2\x9b2Jb"]), "a2Jb");
    assert_eq!(line(&[b"a\x9b2Jb"]), "a2Jb");
    assert_eq!(
        line(&[b"a\xe0\x82\x9b2Jb"]),
        "a\u{fffd}2Jb",
        "nor in a character that is none"
    );
}

#[test]
fn what_is_unfinished_at_the_end_of_a_line_is_over() {
    assert_eq!(lines(&[&[b"a\x1b[2"], &[b"Jb"]]), ["a", "Jb"]);
    assert_eq!(lines(&[&[b"a\x1b]52;c;"], &[b"b\x07"]]), ["a", "b"]);
    assert_eq!(lines(&[&[b"a\x1b"], &[b"cb"]]), ["a", "cb"]);
}

#[test]
fn a_return_goes_to_the_prefix_and_not_before_it() {
    assert_eq!(line(&[b"a\rb"]), "a\r[0] b");
    assert_eq!(
        line(&[b"\r 1%\r 2%"]),
        " 1%\r[0]  2%",
        "nothing to go back over at first"
    );
    assert_eq!(
        line(&[b"\r\x1b[2Kx"]),
        "\r[0] \x1b[Kx",
        "rich's way to begin a line anew"
    );
    assert_eq!(line(&[b"ab\x1b[2Kc"]), "ab\r[0] \x1b[K\x1b[2Cc");
    assert_eq!(line(&[b"abc\x1b[Gx\x1b[3Gy"]), "abc\r[0] x\r[0] \x1b[2Cy");
    assert_eq!(
        line(&[b"\x1b[31mab\rc"]),
        "\x1b[31mab\x1b[0m\r[0] \x1b[31mc\x1b[0m",
        "the prefix has its own colours"
    );
}

#[test]
fn moves_to_the_left_end_at_the_prefix() {
    assert_eq!(line(&[b"|\x08/\x08-"]), "|\x08/\x08-");
    assert_eq!(line(&[b"\x08\x08a\x08\x08\x08b"]), "a\x08b");
    assert_eq!(line(&[b"abc\x1b[2Dx"]), "abc\x1b[2Dx");
    assert_eq!(line(&[b"abc\x1b[99Dx"]), "abc\x1b[3Dx");
    assert_eq!(
        line(&[b"\xe4\xb8\xad\x08x"]),
        "\u{4e2d}\r[0] \x1b[1Cx",
        "its width may be two"
    );
    assert_eq!(line(&[b"a\x1b[50C\x1b[50Dx"]), "a\x1b[50C\r[0] \x1b[1Cx");
}

#[test]
fn bytes_that_are_no_characters_pass_as_they_are() {
    let mut out = Vec::new();
    let mut inline = Inline::default();
    inline.pass(b"\xe9t\xe9 \xff\x1b[1m", PREFIX, &mut out);
    assert_eq!(out, b"\xe9t\xe9 \xff\x1b[1m");
}

#[test]
fn plain_lines_are_told_from_others() {
    for text in [&b""[..], b"a b\tc", b"end\r", "\u{e9}\u{4e2d}\u{a0}".as_bytes()] {
        assert!(is_plain(text), "{}", text.escape_ascii());
    }
    for text in [
        &b"\x1b"[..],
        b"a\rb",
        b"\x08",
        b"\x7f",
        b"\xff",
        b"\x9b",
        b"\xc2\x9b",
        b"\0",
    ] {
        assert!(!is_plain(text), "{}", text.escape_ascii());
    }
}

proptest! {
    /// G6: for any bytes of a worker, in any pieces.
    #[test]
    fn nothing_but_text_colours_and_moves_behind_the_prefix_passes(
        pieces in proptest::collection::vec(proptest::collection::vec(
            prop_oneof![
                Just(0x1b), Just(b'['), Just(b']'), Just(b'm'), Just(b'2'), Just(b';'), Just(b'K'), Just(b'D'),
                Just(b'\r'), Just(8u8), Just(0xc2), Just(0x9b), any::<u8>().prop_filter("no line feed", |byte| *byte != b'\n'),
            ],
            0..12,
        ), 0..8),
    ) {
        let mut inline = Inline::default();
        let mut out = Vec::new();
        inline.begin(&mut out);
        for piece in &pieces {
            inline.pass(piece, PREFIX, &mut out);
        }
        inline.end(&mut out);
        let mut rest = &out[..];
        while let Some((&first, behind)) = rest.split_first() {
            rest = match first {
                b'\r' if !behind.is_empty() => {
                    let behind = behind.strip_prefix(b"\x1b[0m").unwrap_or(behind);
                    prop_assert!(behind.starts_with(PREFIX), "{}", out.escape_ascii());
                    &behind[PREFIX.len()..]
                }
                0x1b => {
                    prop_assert_eq!(behind[0], b'[');
                    let end = behind.iter().skip(1).position(|byte| (0x40..0x7f).contains(byte)).unwrap() + 1;
                    prop_assert!(b"mCDK@PX".contains(&behind[end]), "{}", out.escape_ascii());
                    &behind[end + 1..]
                }
                byte => {
                    let is_control = byte < 0x20 && byte != b'\t' && byte != 8 && byte != b'\r';
                    prop_assert!(!is_control && byte != 0x7f, "{}", out.escape_ascii());
                    behind
                }
            };
        }
    }

    #[test]
    fn what_is_plain_passes_as_it_is(text in proptest::collection::vec(prop_oneof![Just(0xc2), Just(0xa0), any::<u8>()], 0..40)) {
        let text: Vec<u8> = text.into_iter().filter(|byte| *byte != b'\n').collect();
        if is_plain(&text) {
            let mut inline = Inline::default();
            let mut out = Vec::new();
            inline.pass(&text, PREFIX, &mut out);
            inline.end(&mut out);
            prop_assert_eq!(out, text);
        }
    }
}
