use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use super::*;
use crate::mux::tee::RECENT_BYTES;

/// Pieces by number of source; `None`: the end of the source; true: the rest of the line follows.
type Turn = (u64, Console, Option<Vec<u8>>, bool);

fn says(source: u64, text: &str) -> Turn {
    (source, Console::Stdout, Some(text.into()), false)
}

fn begins(source: u64, text: &str) -> Turn {
    (source, Console::Stdout, Some(text.into()), true)
}

fn errs(source: u64, text: &str) -> Turn {
    (source, Console::Stderr, Some(text.into()), false)
}

fn ends(source: u64) -> Turn {
    (source, Console::Stdout, None, false)
}

/// Takes turns until all is written; returns the sources and lengths of the pieces.
fn settle(display: &mut Display, bell: &Bell, pieces: usize) -> Vec<(u64, usize)> {
    let mut taken = Vec::new();
    loop {
        bell.silence();
        taken.extend(display.turn().taken);
        if taken.len() == pieces {
            return taken;
        }
        assert!(crate::poller::wait_readable(
            &[bell.as_fd()],
            Duration::from_secs(20)
        ));
    }
}

use std::os::fd::AsFd;

/// What a file shows of these pieces, which is both stdout and stderr.
fn shown(turns: Vec<Turn>) -> String {
    let file = File::from(rustix::fs::memfd_create("console", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let bell = Arc::new(Bell::new().unwrap());
    let copy = || file.try_clone().map(OwnedFd::from);
    let mut display = Display::new(copy(), copy(), &bell);
    let count = turns.iter().filter(|turn| turn.2.is_some()).count();
    for (source, console, data, goes_on) in turns {
        match data {
            Some(data) => display.put(source, console, &data, goes_on),
            None => display.end(source),
        }
    }
    settle(&mut display, &bell, count);
    let mut text = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut text, 0).unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn an_unfinished_line_is_marked_where_another_comes_and_shown_again_whole() {
    let found = shown(vec![
        says(1, "loading"),
        says(2, "hello\n"),
        says(1, " done\nnext\n"),
    ]);
    assert_eq!(found, "loading\u{2026}\nhello\nloading done\nnext\n");
}

#[test]
fn streams_that_share_a_console_share_the_rule() {
    let found = shown(vec![
        says(1, "out"),
        errs(1, "err"),
        errs(2, "other\n"),
        begins(1, "long"),
        errs(1, "after\n"),
        says(2, "last\n"),
        says(1, " line\n"),
    ]);
    assert_eq!(
        found,
        "out\u{2026}\nerr\u{2026}\nother\noutlong line\nerrafter\nlast\n"
    );
}

#[test]
fn states_of_a_bar_are_not_repeated_and_have_no_mark() {
    let found = shown(vec![
        says(1, "\r10%"),
        says(1, "\r20%"),
        says(2, "hello\n"),
        says(1, "\r30%"),
        says(2, "bye\n"),
    ]);
    assert_eq!(found, "\r10%\r20%\nhello\n\r30%\nbye\n");
}

#[test]
fn a_line_that_ends_with_its_source_stays_as_it_was_shown() {
    let found = shown(vec![says(1, "half"), ends(1), says(2, "hello\n")]);
    assert_eq!(found, "half\nhello\n");
    let found = shown(vec![
        says(1, "half"),
        says(2, "hello\n"),
        ends(1),
        says(2, "bye\n"),
    ]);
    assert_eq!(found, "half\u{2026}\nhello\nbye\n");
    let again = shown(vec![says(1, "half"), ends(1), says(1, "new\n")]);
    assert_eq!(
        again, "half\nnew\n",
        "a number that comes again is another source"
    );
}

#[test]
fn a_source_that_ends_in_the_middle_of_a_line_holds_up_nobody() {
    let found = shown(vec![
        begins(1, "half"),
        says(2, "hello\n"),
        begins(3, "x"),
        ends(3),
        ends(1),
    ]);
    assert_eq!(found, "half\nhello\nx");
    let found = shown(vec![
        begins(1, "half"),
        begins(2, "a"),
        ends(2),
        ends(1),
        says(3, "b\n"),
    ]);
    assert_eq!(
        found, "half\na\nb\n",
        "what waits when its source ends holds up nobody either"
    );
}

#[test]
fn a_line_that_is_too_long_to_keep_is_not_shown_again() {
    let long = "x".repeat(70_000);
    let found = shown(vec![says(1, &long), says(2, "hello\n"), says(1, "end\n")]);
    assert_eq!(found, format!("{long}\u{2026}\nhello\n\u{2026}end\n"));
}

#[test]
fn unfinished_lines_of_many_sources_are_kept_up_to_a_bound() {
    const EACH: usize = 60_000;
    const BOUND: usize = 4 << 20;
    let text = "x".repeat(EACH);
    let begun = (0..200).map(|source| says(source, &text));
    let ended = (0..200).map(|source| says(source, "end\n"));
    let size = shown(begun.chain(ended).collect()).len();
    let again = BOUND / EACH * EACH;
    assert!(
        (200 * EACH + again..200 * (EACH + 100) + again + EACH).contains(&size),
        "{size}"
    );
}

#[test]
fn a_console_that_is_gone_is_told_once_and_takes_everything() {
    let bell = Arc::new(Bell::new().unwrap());
    let (read, write) = rustix::pipe::pipe().unwrap();
    let (_kept, other) = rustix::pipe::pipe().unwrap();
    drop(read);
    let mut display = Display::new(Ok(write), Ok(other), &bell);
    let mut failed = Vec::new();
    let mut taken = 0;
    display.put(1, Console::Stdout, b"one\n", false);
    while failed.is_empty() || taken < 2 {
        bell.silence();
        let progress = display.turn();
        taken += progress.taken.len();
        if !progress.failed.is_empty() {
            display.put(1, Console::Stdout, b"two\n", false);
            bell.ring();
        }
        failed.extend(progress.failed);
        assert!(taken == 2 || crate::poller::wait_readable(&[bell.as_fd()], Duration::from_secs(20)));
    }
    assert_eq!(failed, [(Console::Stdout, Errno::PIPE.raw_os_error(), true)]);
}

#[test]
fn no_more_is_composed_than_a_slow_console_takes() {
    let bell = Arc::new(Bell::new().unwrap());
    let (_read, write) = rustix::pipe::pipe().unwrap();
    let (_kept, other) = rustix::pipe::pipe().unwrap();
    let mut display = Display::new(Ok(write), Ok(other), &bell);
    let long = vec![b'x'; 60_000];
    display.put(1, Console::Stdout, &long, false);
    // Each word repeats the other source's line.
    for turn in 0..10_000 {
        display.put(turn % 2, Console::Stdout, b"y", false);
    }
    display.turn();
    let side = &display.sides[0];
    assert!(side.handed < (COMPOSED_BYTES + 200_000) as u64, "{}", side.handed);
    assert!(!side.queue.is_empty());
}

#[test]
fn the_last_bytes_that_were_shown_are_kept() {
    let file = File::from(rustix::fs::memfd_create("console", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let bell = Arc::new(Bell::new().unwrap());
    let copy = || file.try_clone().map(OwnedFd::from);
    let mut display = Display::new(copy(), copy(), &bell);
    let recent = display.recent();
    let line = format!("{}\n", "x".repeat(999));
    for _ in 0..300 {
        display.put(1, Console::Stdout, line.as_bytes(), false);
    }
    display.put(2, Console::Stderr, b"the end\n", false);
    settle(&mut display, &bell, 301);
    let kept = recent.to_vec();
    assert_eq!(kept.len(), RECENT_BYTES);
    assert!(kept.ends_with(format!("{line}the end\n").as_bytes()));
}
