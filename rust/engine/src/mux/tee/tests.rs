use std::io::Read;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::*;

fn view(tee: &Tee) -> UnixStream {
    let (ours, theirs) = UnixStream::pair().unwrap();
    tee.add(ours.into()).unwrap();
    theirs.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    theirs
}

fn read(view: &mut UnixStream, count: usize) -> Vec<u8> {
    let mut text = vec![0; count];
    view.read_exact(&mut text).unwrap();
    text
}

#[test]
fn views_get_what_was_shown_last_and_what_comes_each_of_them_once() {
    let tee = Tee::default();
    tee.copy(b"one\n");
    let mut early = view(&tee);
    tee.copy(b"two\n");
    let mut late = view(&tee);
    tee.copy(b"three\n");
    for one in [&mut early, &mut late] {
        assert_eq!(read(one, 14), b"one\ntwo\nthree\n");
    }
    drop(tee);
    assert_eq!(early.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn of_much_output_the_end_comes_first_and_it_begins_with_a_whole_line() {
    let tee = Tee::default();
    for number in 0..100_000 {
        tee.copy(format!("line {number}\n").as_bytes());
    }
    let mut late = view(&tee);
    tee.copy(b"now\n");
    drop(tee);
    let mut text = String::new();
    late.read_to_string(&mut text).unwrap();
    assert!(
        (RECENT_BYTES - 100..RECENT_BYTES + 100).contains(&text.len()),
        "{}",
        text.len()
    );
    assert!(text.starts_with("line ") && text.ends_with("line 99999\nnow\n"));
}

#[test]
fn a_view_that_does_not_read_holds_up_nothing_and_is_told_what_it_has_missed() {
    let tee = Tee::default();
    let mut slow = view(&tee);
    let mut fast = view(&tee);
    let block = b"nine bytes\n".repeat(5000);
    let begin = Instant::now();
    let count = 200;
    for _ in 0..count {
        tee.copy(&block);
        read(&mut fast, block.len());
    }
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        slow.read_to_string(&mut text).unwrap();
        text
    });
    while tee.lock().views[0].writer.backlog().0 > 0 {
        assert!(begin.elapsed() < Duration::from_secs(20));
        std::thread::yield_now();
    }
    tee.copy(b"end\n");
    drop(tee);
    let text = reader.join().unwrap();
    let (notes, lines): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with("[dsl: "));
    assert_eq!(lines.last(), Some(&"end"));
    let counts = notes.iter().map(|note| note.split(' ').nth(1).unwrap());
    let missed: usize = counts.map(|count| count.parse::<usize>().unwrap()).sum();
    assert!(missed > 0);
    assert_eq!(lines.len() - 1 + missed, count * 5000);
    assert!(lines.len() * block.len() / 5000 > WAITING_BYTES / 2);
}

#[test]
fn a_view_that_has_gone_is_forgotten() {
    let tee = Tee::default();
    drop(view(&tee));
    let until = Instant::now() + Duration::from_secs(20);
    while !tee.lock().views.is_empty() {
        assert!(Instant::now() < until);
        tee.copy(b"line\n");
        std::thread::yield_now();
    }
}
