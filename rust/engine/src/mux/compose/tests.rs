use proptest::prelude::*;

use super::clock::{BUSY_FACTOR, PROMPT_PAUSE, REPEATED_BYTES};
use super::*;

mod clock;

const PAUSE: Duration = Duration::from_secs(1);

fn style(prefix: &str) -> Style {
    Style {
        prefix: prefix.as_bytes().to_vec(),
        ..Style::default()
    }
}

/// A composer with streams of these prefixes.
fn composer(prefixes: &[&str]) -> Composer {
    let mut composer = Composer::new(None, false);
    composer.show_partial_after(Some(PAUSE));
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
fn an_unfinished_line_is_shown_after_a_pause_and_nothing_is_due_then() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"loading", now);
    assert_eq!(composer.tick(now, |_| false), Some(now + PAUSE));
    assert!(!composer.is_ready(now));
    let later = now + PAUSE;
    assert_eq!(
        composer.tick(later, |_| false),
        None,
        "no clock runs for what has been shown"
    );
    assert_eq!(shown(&mut composer, later), "[0] loading");
    composer.feed(0, b" more", later);
    composer.tick(later + PAUSE, |_| false);
    composer.feed(0, b" done\nnext\n", later + PAUSE);
    assert_eq!(
        shown(&mut composer, later),
        " more done\n[0] next\n",
        "it goes on where it stands"
    );
}

#[test]
fn an_unfinished_line_that_is_interrupted_comes_again_whole() {
    for prefix in ["", "[0] "] {
        let mut composer = composer(&[prefix, "[1] "]);
        let now = Instant::now();
        composer.feed(0, b"loading", now);
        composer.tick(now + PAUSE, |_| false);
        composer.feed(1, b"other\n", now + PAUSE);
        assert_eq!(
            shown(&mut composer, now),
            format!("{prefix}loading\u{2026}\n[1] other\n")
        );
        assert_eq!(composer.tick(now + 9 * PAUSE, |_| false), None);
        composer.feed(0, b" done\n", now + 9 * PAUSE);
        assert_eq!(shown(&mut composer, now), format!("{prefix}loading done\n"));
    }
}

#[test]
fn an_unfinished_line_that_has_been_shown_is_not_said_again_at_its_end() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"last words", now);
    composer.feed(1, b"mine", now);
    composer.tick(now + PAUSE, |_| false);
    assert_eq!(shown(&mut composer, now), "[0] last words\u{2026}\n[1] mine");
    composer.close(0, now + PAUSE);
    composer.close(1, now + PAUSE);
    assert_eq!(shown(&mut composer, now), "\n");
}

#[test]
fn a_line_that_grows_and_grows_is_shown_although_there_is_no_pause() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let begin = Instant::now();
    let mut now = begin;
    while now <= begin + PAUSE * BUSY_FACTOR {
        composer.feed(0, b".", now);
        composer.tick(now, |_| false);
        now += PAUSE / 2;
    }
    assert_eq!(shown(&mut composer, now), "[0] .....");
}

#[test]
fn a_pause_of_ages_is_never_over() {
    let mut composer = composer(&["", ""]);
    composer.show_partial_after(Some(Duration::MAX));
    let now = Instant::now();
    composer.feed(0, b"half", now);
    assert!(composer.tick(now, |_| false).is_some());
    assert!(!composer.is_ready(now + 1000 * PAUSE));
}

#[test]
fn whoever_wants_whole_lines_gets_whole_lines() {
    let mut composer = composer(&["[0] ", "[1] "]);
    composer.show_partial_after(None);
    let now = Instant::now();
    composer.feed(0, b"half\r50%", now);
    assert_eq!(composer.tick(now + 100 * PAUSE, |_| false), None);
    assert!(!composer.is_ready(now + 100 * PAUSE));
    composer.close(1, now);
    assert_eq!(composer.tick(now + 100 * PAUSE, |_| false), None);
}

#[test]
fn a_line_that_is_too_long_to_be_repeated_is_shown_when_it_is_whole() {
    for interactive in [false, true] {
        let mut composer = composer(&["[0] "]);
        composer.add(Style {
            interactive,
            ..style("")
        });
        let now = Instant::now();
        let long = "x".repeat(REPEATED_BYTES + 1);
        composer.feed(1, long.as_bytes(), now);
        assert_eq!(composer.tick(now + 100 * PAUSE, |_| false), None);
        composer.feed(0, b"other\n", now + PAUSE);
        composer.feed(1, b"yy\n", now + PAUSE);
        assert_eq!(shown(&mut composer, now), format!("[0] other\n{long}yy\n"));
    }
}

#[test]
fn a_long_unfinished_line_of_the_only_stream_is_shown() {
    let mut composer = composer(&[""]);
    let now = Instant::now();
    let long = "x".repeat(REPEATED_BYTES + 1);
    composer.feed(0, long.as_bytes(), now);
    composer.tick(now + PAUSE, |_| false);
    composer.feed(0, b"yy\n", now + PAUSE);
    assert_eq!(shown(&mut composer, now), format!("{long}yy\n"));
}

#[test]
fn the_silence_of_a_stream_that_is_not_read_does_not_count() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"half", now);
    for second in 1..10 {
        composer.hold(0, now + second * PAUSE);
        composer.tick(now + second * PAUSE, |_| false);
    }
    assert_eq!(shown(&mut composer, now), "");
    composer.tick(now + 10 * PAUSE, |_| false);
    assert_eq!(shown(&mut composer, now), "[0] half");
}

#[test]
fn what_waits_to_be_read_is_read_before_a_line_counts_as_unfinished() {
    let mut composer = composer(&["[0] ", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"ha", now);
    let later = now + 10 * PAUSE;
    let has_more = |stream| stream == 0;
    composer.tick(later, has_more);
    assert_eq!(
        shown(&mut composer, later),
        "",
        "we did not read, it was not silent"
    );
    composer.feed(0, b"lf\n", later);
    assert_eq!(shown(&mut composer, later), "[0] half\n");

    composer.feed(0, b".", now);
    composer.feed(0, b".", later);
    composer.tick(later, has_more);
    assert_eq!(
        shown(&mut composer, later),
        "[0] ..",
        "it goes on and on, and was read"
    );
}

#[test]
fn who_passes_a_console_on_is_told_which_lines_are_shown_unfinished() {
    let mut composer = composer(&["", ""]);
    composer.tell_unfinished();
    let now = Instant::now();
    composer.feed(0, b"a \x10 b\nhalf", now);
    assert_eq!(shown(&mut composer, now), "a \x10- b\n");
    composer.tick(now + PAUSE, |_| false);
    assert_eq!(shown(&mut composer, now), "half\x10.");
    composer.feed(0, b" done\n", now + PAUSE);
    assert_eq!(shown(&mut composer, now), " done\n");
}

#[test]
fn the_only_stream_of_a_console_that_is_passed_on_is_not_alone() {
    let mut composer = composer(&[""]);
    composer.tell_unfinished();
    let now = Instant::now();
    composer.feed(0, b"half", now);
    assert_eq!(composer.tick(now + PROMPT_PAUSE, |_| false), Some(now + PAUSE));
}

#[test]
fn what_is_dropped_ends_an_unfinished_line_with_a_mark() {
    let mut composer = composer(&["", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"begin", now);
    composer.tick(now + PAUSE, |_| false);
    composer.skip(0, b" of it\n");
    composer.feed(0, b"next\n", now);
    assert_eq!(shown(&mut composer, now), "begin\u{2026}\nnext\n");
}

#[test]
fn the_only_stream_shows_its_prompt_after_a_pause() {
    let mut composer = composer(&["[0] "]);
    let now = Instant::now();
    composer.feed(0, b"name? ", now);
    assert_eq!(composer.tick(now, |_| false), Some(now + PROMPT_PAUSE));
    assert_eq!(shown(&mut composer, now), "");
    let later = now + PROMPT_PAUSE;
    assert_eq!(composer.tick(later, |_| false), None);
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
    let later = now + PROMPT_PAUSE;
    composer.tick(later, |_| false);
    composer.feed(1, b"busy\n", later);
    composer.feed(0, b"x = 1\n", later);
    assert_eq!(
        shown(&mut composer, later),
        "[0] (Pdb) \u{2026}\n[1] busy\n[0] (Pdb) x = 1\n"
    );
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
    composer.tick(now, |_| false);
    assert_eq!(shown(&mut composer, now), "[3 workers] loading\n");
    assert!(composer.tick(now, |_| false).is_some());
    composer.finish(now);
    assert_eq!(shown(&mut composer, now), "[1] mine\n");
}

#[test]
fn nothing_that_is_shown_with_a_tag_reaches_beyond_its_line() {
    let attack = b"\x1b[2J\x1b]0;x\x07red\x1b[31m\rb";
    let mut folding = Composer::new(None, true);
    let size = Size {
        columns: 40,
        rows: 10,
    };
    let mut on_screen = Composer::new(Some(size), false);
    for prefix in ["[0] ", "[1] "] {
        folding.add(style(prefix));
        on_screen.add(Style {
            grouped: true,
            ..style(prefix)
        });
    }
    let now = Instant::now();
    for stream in 0..2 {
        folding.feed(stream, &[attack, &b"\n"[..]].concat(), now);
    }
    folding.tick(now, |_| false);
    assert_eq!(
        shown(&mut folding, now),
        "[2 workers] red\x1b[31m\x1b[0m\r[2 workers] \x1b[31mb\x1b[0m\n"
    );
    on_screen.feed(0, b"\r\x1b[2K\x1b]0;x\x07\x1b[31m50%", now);
    on_screen.tick(now, |_| false);
    assert_eq!(shown(&mut on_screen, now), "[0] \x1b[31m50%\x1b[0m", "a bar");
    on_screen.feed(
        1,
        b"Traceback (most recent call last):\n\x1b[2J  File\nE\x1b[H\n",
        now,
    );
    on_screen.close(1, now);
    assert!(shown(&mut on_screen, now).contains("\n[1]   File\n[1] E\n"));
}

#[test]
fn a_progress_bar_in_a_pipe_becomes_a_line_every_second_or_two() {
    let mut composer = composer(&["", ""]);
    let begin = Instant::now();
    let mut now = begin;
    let mut out = String::new();
    for percent in 0..10 {
        composer.feed(0, format!("\r {percent}%").as_bytes(), now);
        composer.tick(now, |_| false);
        out += &shown(&mut composer, now);
        now += PAUSE / 2;
    }
    assert_eq!(out, "\r 0%\r 1%\r 2%\r 3%\n 4%\r 5%\r 6%\r 7%\n");
    composer.feed(0, b"\r100%\n", now);
    assert_eq!(shown(&mut composer, now), " 8%\r 9%\r100%\n");
}

#[test]
fn a_progress_bar_that_rests_is_shown_and_never_repeated() {
    let mut composer = composer(&["", "[1] "]);
    let now = Instant::now();
    composer.feed(0, b"\r 1%\r 2%", now);
    composer.tick(now + PAUSE, |_| false);
    composer.feed(1, b"other\n", now + PAUSE);
    composer.feed(0, b"\r 3%", now + PAUSE);
    composer.tick(now + 2 * PAUSE, |_| false);
    assert_eq!(shown(&mut composer, now), "\r 1%\r 2%\n[1] other\n\r 3%");
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
    composer.tick(now, |_| false);
    assert_eq!(shown(&mut composer, now), "[1] line\n[0]  1%\n[1]  8%");
    let later = now + Duration::from_secs(1);
    composer.feed(0, b"\r 2%", later);
    composer.feed(1, b"\rdone\n", later);
    composer.tick(later, |_| false);
    assert_eq!(shown(&mut composer, later), "\r\x1b[1A\x1b[J[1] done\n[0]  2%");
    composer.finish(later);
    assert_eq!(shown(&mut composer, later), "\r\x1b[J[0]  2%\n");
}

#[test]
fn what_is_skipped_never_tears_the_next_line() {
    let mut composer = composer(&["", ""]);
    let now = Instant::now();
    composer.feed(0, b"begin of", now);
    assert_eq!(
        composer.skip(0, b" a line\nsecond\nhalf"),
        3,
        "the rest of the third is lost, too"
    );
    composer.feed(0, b" of the third\nfourth\n", now);
    assert_eq!(shown(&mut composer, now), "fourth\n");
}

#[test]
fn a_line_that_is_skipped_in_pieces_counts_once() {
    let mut composer = composer(&["", ""]);
    let now = Instant::now();
    assert_eq!(composer.skip(0, b"begin"), 1);
    assert_eq!(composer.skip(0, b" middle"), 0);
    composer.feed(0, b" more", now);
    assert_eq!(composer.skip(0, b" end\n"), 0);
    assert_eq!(composer.skip(0, b"second\n"), 1);
    composer.feed(0, b"third\n", now);
    assert_eq!(shown(&mut composer, now), "third\n");
}

#[test]
fn a_last_line_that_is_skipped_without_its_end_is_counted() {
    let mut composer = composer(&["", ""]);
    let now = Instant::now();
    assert_eq!(composer.skip(0, b"tail"), 1);
    composer.close(0, now);
    assert_eq!(shown(&mut composer, now), "");
}

#[test]
fn a_line_of_ours_stands_alone() {
    let mut composer = composer(&["[0] "]);
    let now = Instant::now();
    composer.feed(0, b"prompt", now);
    composer.tick(now + PROMPT_PAUSE, |_| false);
    composer.note("note");
    assert_eq!(shown(&mut composer, now), "[0] prompt\u{2026}\nnote\n");
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
    /// For any pieces of bytes in any mix: every stream's lines come out whole, once and in order.
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

    /// G6: the same while time passes. A line that was shown unfinished ends with a mark, goes on, or is repeated as
    /// a whole.
    #[test]
    fn time_that_passes_tears_no_line(
        texts in proptest::collection::vec("[a-c\n]{0,40}", 1..4),
        cuts in proptest::collection::vec((any::<prop::sample::Index>(), 1usize..5, 0u32..3), 0..60),
        tagged in any::<bool>(),
    ) {
        let prefixes: Vec<String> = (0..texts.len()).map(|stream| format!("<{stream}>")).collect();
        let given = |prefix: &String| if tagged { prefix.clone() } else { String::new() };
        let mut composer = composer(&prefixes.iter().map(given).collect::<Vec<_>>().iter().map(String::as_str).collect::<Vec<_>>());
        let mut now = Instant::now();
        let mut rest: Vec<&[u8]> = texts.iter().map(String::as_bytes).collect();
        for (which, count, halves) in cuts {
            let stream = which.index(rest.len());
            let (piece, later) = rest[stream].split_at(count.min(rest[stream].len()));
            rest[stream] = later;
            composer.feed(stream, piece, now);
            now += halves * PAUSE / 2;
            composer.tick(now, |_| false);
        }
        for (stream, piece) in rest.into_iter().enumerate() {
            composer.feed(stream, piece, now);
            composer.feed(stream, b"end\n", now);
            composer.close(stream, now);
        }
        let out = shown(&mut composer, now);
        let whole: Vec<&str> = out.lines().filter(|line| !line.ends_with('\u{2026}')).collect();
        let mut found = Vec::new();
        for (prefix, text) in prefixes.iter().zip(&texts) {
            let expected: Vec<String> = format!("{text}end").lines().map(str::to_owned).collect();
            if tagged {
                let own: Vec<&str> = whole.iter().filter_map(|line| line.strip_prefix(prefix.as_str())).collect();
                prop_assert_eq!(own, expected);
            } else {
                found.extend(expected);
            }
        }
        if !tagged {
            let mut whole = whole;
            whole.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(whole, found);
        }
    }
}

const INTERRUPTED: &str = "Traceback (most recent call last):\n  File \"t.py\", line 3\nKeyboardInterrupt\n";

/// A composer with tagged streams of stderr.
fn tagged(count: usize) -> Composer {
    let mut composer = Composer::new(None, false);
    for rank in 0..count {
        composer.add(Style {
            prefix: format!("\x1b[3{rank}m[rank {rank}]\x1b[0m ").into_bytes(),
            grouped: true,
            ..Style::default()
        });
    }
    composer
}

fn lines(composer: &mut Composer, now: Instant) -> Vec<String> {
    let text = shown(composer, now);
    text.lines().map(str::to_owned).collect()
}

#[test]
fn equal_tracebacks_of_an_interrupt_become_one_with_their_ranks() {
    let (mut composer, now) = (tagged(4), Instant::now());
    composer.interrupt();
    for rank in [2, 0, 3, 1] {
        let text = INTERRUPTED.replace("Traceback", &format!("[rank{rank}]: Traceback"));
        let text = text.replace("  File", &format!("[rank{rank}]:   File"));
        let text = text.replace("Keyb", &format!("[rank{rank}]: Keyb"));
        let text = if rank == 3 {
            text.replace("line 3", "line 4")
        } else {
            text
        };
        composer.feed(rank, text.as_bytes(), now);
        composer.feed(rank, format!("{rank} goes\n").as_bytes(), now);
        composer.close(rank, now);
    }
    assert_eq!(
        lines(&mut composer, now),
        [
            "[rank 0-2] Traceback (most recent call last):",
            "[rank 0-2]   File \"t.py\", line 3",
            "[rank 0-2] KeyboardInterrupt",
            "\u{1b}[33m[rank 3]\u{1b}[0m Traceback (most recent call last):",
            "\u{1b}[33m[rank 3]\u{1b}[0m   File \"t.py\", line 4",
            "\u{1b}[33m[rank 3]\u{1b}[0m KeyboardInterrupt",
            "\u{1b}[30m[rank 0]\u{1b}[0m 0 goes",
            "\u{1b}[31m[rank 1]\u{1b}[0m 1 goes",
            "\u{1b}[32m[rank 2]\u{1b}[0m 2 goes",
            "\u{1b}[33m[rank 3]\u{1b}[0m 3 goes",
        ]
    );
}

#[test]
fn a_line_has_the_time_at_which_it_was_read_and_a_line_of_many_the_last_time() {
    let now = Instant::now();
    let mut composer = Composer::new(None, false);
    for rank in 0..2 {
        let prefix = format!("HH:MM:SS.mmm [{rank}] ").into_bytes();
        composer.add(Style {
            prefix,
            grouped: true,
            ..Style::default()
        });
    }
    let read = |composer: &mut Composer, rank: usize, time: &[u8; 12], data: &str| {
        composer.stamp(
            rank,
            &[&time[..], format!(" [{rank}] ").as_bytes()].concat(),
            *time,
        );
        composer.feed(rank, data.as_bytes(), now);
    };
    read(&mut composer, 0, b"00:00:00.001", "beg");
    read(&mut composer, 1, b"00:00:00.002", "whole\n");
    read(&mut composer, 0, b"00:00:00.003", "un\rover\n");
    composer.interrupt();
    read(&mut composer, 0, b"00:00:00.004", INTERRUPTED);
    read(&mut composer, 1, b"00:00:00.005", INTERRUPTED);
    composer.finish(now);
    let lines = lines(&mut composer, now);
    assert_eq!(lines[0], "00:00:00.002 [1] whole");
    assert_eq!(lines[1], "00:00:00.003 [0] begun\r00:00:00.003 [0] over");
    assert_eq!(lines[2], "00:00:00.005 [0-1] Traceback (most recent call last):");
    assert_eq!(lines.len(), 5);
}

#[test]
fn a_worker_that_hears_the_terminal_before_us_is_among_those_that_were_interrupted() {
    let (mut composer, now) = (tagged(3), Instant::now());
    composer.feed(0, INTERRUPTED.as_bytes(), now);
    composer.close(0, now);
    assert_eq!(lines(&mut composer, now), Vec::<String>::new());
    composer.interrupt();
    for rank in [1, 2] {
        composer.feed(rank, INTERRUPTED.as_bytes(), now);
        composer.close(rank, now);
    }
    assert_eq!(lines(&mut composer, now)[2], "[rank 0-2] KeyboardInterrupt");
}

#[test]
fn a_traceback_waits_for_its_like_for_a_bounded_time() {
    let (mut composer, now) = (tagged(3), Instant::now());
    composer.interrupt();
    composer.feed(0, INTERRUPTED.as_bytes(), now);
    composer.feed(1, INTERRUPTED.as_bytes(), now);
    let due = composer.tick(now, |_| false).unwrap();
    assert!(due < now + held::LONGEST);
    let due = composer.tick(due, |_| false).unwrap();
    assert_eq!(lines(&mut composer, due), Vec::<String>::new());
    composer.feed(0, b"more\n", due);
    composer.tick(due, |_| false);
    assert_eq!(lines(&mut composer, due).len(), 4);
    composer.feed(2, INTERRUPTED.as_bytes(), due);
    composer.finish(due);
    assert_eq!(lines(&mut composer, due).len(), 3);
}

#[test]
fn tracebacks_are_not_folded_unless_somebody_has_interrupted_the_workers() {
    let (mut composer, now) = (tagged(2), Instant::now());
    let failed = INTERRUPTED.replace("KeyboardInterrupt", "ValueError: no");
    for rank in 0..2 {
        composer.feed(rank, failed.as_bytes(), now);
        composer.close(rank, now);
    }
    assert_eq!(lines(&mut composer, now).len(), 6);
}

#[test]
fn a_screen_counts_the_lines_since_the_last_one_of_a_stream() {
    let size = Size {
        rows: 24,
        columns: 80,
    };
    let mut composer = Composer::new(Some(size), false);
    composer.add(style("[0] "));
    composer.add(style("[1] "));
    let now = Instant::now();
    assert_eq!(composer.shown_since(0), None);
    composer.feed(0, b"one\n", now);
    composer.feed(1, b"two\nthree\nfour", now);
    composer.close(1, now);
    assert_eq!(
        (composer.shown_since(0), composer.shown_since(1)),
        (Some(3), Some(0))
    );
}
