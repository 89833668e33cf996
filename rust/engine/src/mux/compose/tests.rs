use proptest::prelude::*;

use super::*;

fn style(prefix: &str) -> Style {
    Style {
        prefix: prefix.as_bytes().to_vec(),
        ..Style::default()
    }
}

/// A composer with streams of these prefixes.
fn composer(prefixes: &[&str]) -> Composer {
    let mut composer = Composer::new(None, false);
    for prefix in prefixes {
        composer.add(style(prefix));
    }
    composer
}

fn shown(composer: &mut Composer, now: Instant) -> String {
    String::from_utf8(composer.take(Vec::new(), now)).unwrap()
}

#[test]
fn a_line_comes_when_it_is_whole_and_with_its_prefix() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"one", now);
    composer.feed(1, b"uno\ndue", now);
    assert_eq!(shown(&mut composer, now), "[1] uno\n");
    composer.feed(0, b" more\n", now);
    composer.feed(1, b"\n", now);
    assert_eq!(shown(&mut composer, now), "[0] one more\n[1] due\n");
}

#[test]
fn without_a_prefix_bytes_are_what_they_were() {
    let mut composer = composer(&["", ""]);
    let now = Instant::now();
    composer.feed(0, b"a\0b\r\n\xff\n", now);
    assert_eq!(composer.take(Vec::new(), now), b"a\0b\r\n\xff\n");
}

#[test]
fn the_end_of_a_stream_finishes_its_line() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"last words", now);
    composer.close(0, now);
    composer.close(0, now);
    assert_eq!(shown(&mut composer, now), "[0] last words\n");
}

#[test]
fn an_unfinished_line_waits_while_others_write_too() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"half", now);
    assert_eq!(composer.tick(now + PARTIAL_PAUSE), None);
    assert!(!composer.is_ready(now + PARTIAL_PAUSE));
}

#[test]
fn the_only_stream_shows_its_prompt_after_a_pause() {
    let mut composer = composer(&["[0] "]);
    let now = Instant::now();
    composer.feed(0, b"name? ", now);
    assert_eq!(composer.tick(now), Some(now + PARTIAL_PAUSE));
    assert_eq!(shown(&mut composer, now), "");
    let later = now + PARTIAL_PAUSE;
    assert_eq!(composer.tick(later), None);
    assert_eq!(shown(&mut composer, later), "[0] name? ");
    composer.feed(0, b"hello\nnext\n", later);
    assert_eq!(
        shown(&mut composer, later),
        "hello\n[0] next\n",
        "one prefix a line"
    );
}

#[test]
fn somebody_elses_line_does_not_continue_a_prompt() {
    let mut composer = Composer::new(None, false);
    composer.add(Style {
        interactive: true,
        ..style("[0] ")
    });
    composer.add(style("[1] "));
    let now = Instant::now();
    composer.feed(0, b"(Pdb) ", now);
    let later = now + PARTIAL_PAUSE;
    composer.tick(later);
    composer.feed(1, b"busy\n", later);
    composer.feed(0, b"x = 1\n", later);
    assert_eq!(shown(&mut composer, later), "[0] (Pdb) \n[1] busy\n[0] x = 1\n");
}

#[test]
fn a_traceback_stays_together() {
    let mut composer = Composer::new(None, false);
    for prefix in ["[0] ", "[1] "] {
        composer.add(Style {
            grouped: true,
            ..style(prefix)
        });
    }
    let now = Instant::now();
    composer.feed(0, b"before\nTraceback (most recent call last):\n", now);
    composer.feed(1, b"other\n", now);
    composer.feed(0, b"  File \"train.py\", line 3, in f\n", now);
    composer.feed(
        1,
        b"[rank1]: Traceback (most recent call last):\n[rank1]:   File\n",
        now,
    );
    composer.feed(0, b"ValueError: bad\n", now);
    assert_eq!(shown(&mut composer, now), "[0] before\n[1] other\n");
    let after = now + AFTER_PAUSE;
    assert!(composer.tick(after).is_some(), "the other one is inside still");
    assert_eq!(
        shown(&mut composer, after),
        "[0] Traceback (most recent call last):\n[0]   File \"train.py\", line 3, in f\n[0] ValueError: bad\n"
    );
    composer.feed(1, b"[rank1]: KeyError: 7", after);
    composer.close(1, after);
    assert_eq!(
        shown(&mut composer, after),
        "[1] [rank1]: Traceback (most recent call last):\n[1] [rank1]:   File\n[1] [rank1]: KeyError: 7\n"
    );
}

#[test]
fn a_traceback_without_end_is_shown_as_far_as_it_is() {
    let mut composer = Composer::new(None, false);
    composer.add(Style {
        grouped: true,
        ..style("")
    });
    let mut now = Instant::now();
    let begin = now;
    composer.feed(0, b"Traceback (most recent call last):\n", now);
    while now < begin + TRACEBACK_TIME {
        now += Duration::from_millis(100);
        composer.feed(0, b"  File\n", now);
        composer.tick(now);
    }
    assert!(shown(&mut composer, now).starts_with("Traceback"));
}

#[test]
fn equal_lines_of_all_workers_become_one() {
    let mut composer = Composer::new(None, true);
    for prefix in ["[0] ", "[1] ", "[2] "] {
        composer.add(style(prefix));
    }
    let now = Instant::now();
    for stream in 0..3 {
        composer.feed(stream, b"loading\n", now);
    }
    composer.feed(1, b"mine\n", now);
    composer.tick(now);
    assert_eq!(shown(&mut composer, now), "[3 workers] loading\n");
    assert!(composer.tick(now).is_some());
    composer.finish(now);
    assert_eq!(shown(&mut composer, now), "[1] mine\n");
}

#[test]
fn a_progress_bar_in_a_pipe_becomes_a_line_now_and_then() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"\r 1%\r 2%\r 3%", now);
    assert_eq!(composer.tick(now), Some(now + BAR_PAUSE));
    let later = now + BAR_PAUSE;
    composer.tick(later);
    assert_eq!(shown(&mut composer, later), "[0] \r 1%\r 2%\n");
    composer.feed(0, b"\r100%\n", later);
    assert_eq!(shown(&mut composer, later), "[0]  3%\r100%\n");
}

#[test]
fn bars_of_several_workers_stand_below_the_lines_of_a_terminal() {
    let size = Size {
        columns: 40,
        rows: 10,
    };
    let mut composer = Composer::new(Some(size), false);
    composer.add(style("[0] "));
    composer.add(style("[1] "));
    let now = Instant::now();
    composer.feed(0, b"\r 1%", now);
    composer.feed(1, b"\r 7%\rline\r\n 8%\r", now);
    composer.tick(now);
    assert_eq!(shown(&mut composer, now), "[1] line\n[0]  1%\n[1]  8%");
    let later = now + Duration::from_secs(1);
    composer.feed(0, b"\r 2%", later);
    composer.feed(1, b"\rdone\n", later);
    composer.tick(later);
    assert_eq!(shown(&mut composer, later), "\r\x1b[1A\x1b[J[1] done\n[0]  2%");
    composer.finish(later);
    assert_eq!(shown(&mut composer, later), "\r\x1b[J[0]  2%\n");
}

#[test]
fn what_is_skipped_never_tears_the_next_line() {
    let mut composer = composer(&["", ""]);
    let now = Instant::now();
    composer.feed(0, b"begin of", now);
    assert_eq!(composer.skip(0, b" a line\nsecond\nhalf"), 2);
    composer.feed(0, b" of the third\nfourth\n", now);
    assert_eq!(shown(&mut composer, now), "fourth\n");
}

#[test]
fn a_line_of_ours_stands_alone() {
    let mut composer = composer(&["[0] "]);
    let now = Instant::now();
    composer.feed(0, b"prompt", now);
    composer.tick(now + PARTIAL_PAUSE);
    composer.note("note");
    assert_eq!(shown(&mut composer, now), "[0] prompt\nnote\n");
}

#[test]
fn a_line_that_never_ends_is_cut_between_characters() {
    let mut composer = composer(&["", ""]);
    let now = Instant::now();
    let text = "\u{20ac}".repeat(LINE_BYTES / 3 + 10);
    composer.feed(0, text.as_bytes(), now);
    composer.close(0, now);
    let lines = shown(&mut composer, now);
    let pieces: Vec<&str> = lines.lines().collect();
    assert_eq!(pieces.len(), 2);
    assert!(pieces[0].ends_with('\u{2026}') && pieces[1].starts_with('\u{2026}'));
    assert_eq!(lines.matches('\u{20ac}').count(), LINE_BYTES / 3 + 10);
}

proptest! {
    /// However the bytes are cut up and mixed: every stream's lines come out whole, once and in order.
    #[test]
    fn nothing_is_lost_torn_or_given_to_another(
        texts in proptest::collection::vec("[a-c\n]{0,60}", 1..4),
        cuts in proptest::collection::vec((any::<prop::sample::Index>(), 1usize..9), 0..60),
    ) {
        let prefixes: Vec<String> = (0..texts.len()).map(|stream| format!("<{stream}>")).collect();
        let mut composer = composer(&prefixes.iter().map(String::as_str).collect::<Vec<_>>());
        let now = Instant::now();
        let mut rest: Vec<&[u8]> = texts.iter().map(String::as_bytes).collect();
        for (which, count) in cuts {
            let stream = which.index(rest.len());
            let (piece, later) = rest[stream].split_at(count.min(rest[stream].len()));
            rest[stream] = later;
            composer.feed(stream, piece, now);
        }
        for (stream, piece) in rest.into_iter().enumerate() {
            composer.feed(stream, piece, now);
            composer.close(stream, now);
        }
        let out = shown(&mut composer, now);
        for (prefix, text) in prefixes.iter().zip(&texts) {
            let own: Vec<&str> = out.lines().filter_map(|line| line.strip_prefix(prefix.as_str())).collect();
            prop_assert_eq!(own, text.lines().collect::<Vec<_>>());
        }
    }
}
