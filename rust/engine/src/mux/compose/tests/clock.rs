//! Output that is shown because time has passed: tracebacks, and progress bars beside a prompt.

use super::super::clock::{AFTER_PAUSE, INSIDE_PAUSE, PROMPT_PAUSE, TRACEBACK_TIME};
use super::*;

const SIZE: Size = Size {
    columns: 40,
    rows: 10,
};

/// A composer with one stream, whose tracebacks are kept together.
fn grouped(terminal: Option<Size>) -> Composer {
    let mut composer = Composer::new(terminal, false);
    composer.show_partial_after(Some(PAUSE));
    composer.add(Style {
        grouped: true,
        ..style("")
    });
    composer
}

/// A composer with a prompt of stream 0 and a progress bar of stream 1.
fn prompt_beside_a_bar(now: Instant) -> Composer {
    let mut composer = Composer::new(Some(SIZE), false);
    composer.add(Style {
        interactive: true,
        ..style("")
    });
    composer.add(style("[1] "));
    composer.feed(1, b"\r 10%", now);
    composer.tick(now, |_| false);
    assert_eq!(shown(&mut composer, now), "[1]  10%");
    composer.feed(0, b"(Pdb) ", now);
    composer.tick(now + PROMPT_PAUSE, |_| false);
    assert_eq!(shown(&mut composer, now + PROMPT_PAUSE), "\r\x1b[J(Pdb) ");
    composer
}

#[test]
fn nothing_is_to_be_drawn_while_a_prompt_has_the_last_line() {
    let now = Instant::now();
    let mut composer = prompt_beside_a_bar(now);
    let later = now + PAUSE;
    assert!(!composer.is_ready(later));
    assert!(composer.tick(later, |_| false).is_none_or(|next| next > later));
    composer.feed(1, b"\r 20%", later);
    assert!(composer.tick(later, |_| false).is_none_or(|next| next > later));
    assert!(!composer.is_ready(later));
}

#[test]
fn bars_come_back_when_the_prompt_is_answered() {
    let now = Instant::now();
    let mut composer = prompt_beside_a_bar(now);
    let later = now + PAUSE;
    composer.feed(1, b"\r 20%", later);
    composer.tick(later, |_| false);
    composer.feed(0, b"c\n", later);
    composer.tick(later, |_| false);
    assert!(composer.is_ready(later));
    assert_eq!(shown(&mut composer, later), "c\n[1]  20%");
    assert_eq!(composer.tick(later, |_| false), None);
    assert!(!composer.is_ready(later + PAUSE));
}

#[test]
fn bars_come_back_when_whoever_was_at_the_prompt_ends() {
    let now = Instant::now();
    let mut composer = prompt_beside_a_bar(now);
    let later = now + PAUSE;
    composer.close(0, later);
    composer.tick(later, |_| false);
    assert!(composer.is_ready(later));
    assert_eq!(shown(&mut composer, later), "\n[1]  10%");
}

#[test]
fn an_unfinished_line_behind_a_traceback_is_shown_right_after_it() {
    let traceback = "Traceback (most recent call last):\n  File\nValueError: x\n";
    let indented = "Traceback (most recent call last):\n  File\n";
    for (terminal, text, rest, pause) in [
        (Some(SIZE), traceback, "\r 38%", AFTER_PAUSE),
        (Some(SIZE), indented, "name? ", INSIDE_PAUSE),
        (None, indented, "name? ", INSIDE_PAUSE),
    ] {
        let mut composer = grouped(terminal);
        let now = Instant::now();
        composer.feed(0, format!("{text}{rest}").as_bytes(), now);
        assert_eq!(composer.tick(now, |_| false), Some(now + pause));
        let before = now + pause / 2;
        assert_eq!(composer.tick(before, |_| false), Some(now + pause));
        assert!(!composer.is_ready(before));
        composer.tick(now + pause, |_| false);
        let expected = format!("{text}{}", rest.trim_start_matches('\r'));
        assert_eq!(shown(&mut composer, now + pause), expected);
        assert_eq!(composer.tick(now + pause, |_| false), None);
    }
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
    assert!(
        composer.tick(after, |_| false).is_some(),
        "the other one is inside still"
    );
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
        composer.tick(now, |_| false);
    }
    assert!(shown(&mut composer, now).starts_with("Traceback"));
}
