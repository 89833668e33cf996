use std::cell::Cell;
use std::io::Read;
use std::os::fd::BorrowedFd;

use super::*;

thread_local! {
    /// Whether no thread can be started by this test.
    pub(super) static HAS_NO_THREAD: Cell<bool> = const { Cell::new(false) };
}

fn writer() -> (Writer, std::fs::File) {
    let (read, write) = rustix::pipe::pipe().unwrap();
    let bell = Arc::new(Bell::new().unwrap());
    (Writer::new(write, bell), std::fs::File::from(read))
}

/// Waits until a console that nobody reads is full, and the writer has noted what it has taken of so many bytes.
fn fill(writer: &Writer, reader: impl AsFd, bytes: usize) {
    let taken = || rustix::io::ioctl_fionread(&reader).unwrap() as usize;
    while writer.outlet.is_ready() || taken() + writer.backlog().0 != bytes {
        std::thread::yield_now();
    }
}

fn wait(writer: &Writer, patience_ms: u64) -> bool {
    let until = Instant::now() + Duration::from_secs(10);
    writer.wait(Duration::from_millis(patience_ms), until, || false)
}

#[test]
fn blocks_come_out_in_order_and_whole() {
    let (writer, mut reader) = writer();
    writer.write(b"one\n".to_vec());
    writer.write(b"two\n".to_vec());
    assert!(wait(&writer, 5000));
    let mut text = [0; 8];
    reader.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"one\ntwo\n");
}

#[test]
fn a_block_without_bytes_is_given_back_and_not_queued() {
    let (writer, _reader) = writer();
    assert_eq!(writer.write(Vec::with_capacity(100)).capacity(), 100);
}

#[test]
fn every_line_is_either_read_or_counted_as_given_up() {
    let (writer, mut reader) = writer();
    // One block with more bytes than a pipe holds, so that only a part of it is written.
    let lines = 400_000;
    writer.write(b"ten bytes\n".repeat(lines));
    writer.write(b"a\nb\nc\n".to_vec());
    fill(&writer, &reader, 10 * lines + 6);
    assert!(!wait(&writer, 50));
    let given_up = writer.give_up();
    drop(writer);
    let mut text = Vec::new();
    reader.read_to_end(&mut text).unwrap();
    assert!(given_up > 3);
    assert_eq!(given_up + memchr::memchr_iter(b'\n', &text).count(), lines + 3);
}

#[test]
fn somebody_in_a_hurry_waits_a_moment_for_a_console_and_not_long() {
    let (writer, _reader) = writer();
    writer.write(b"ten bytes\n".repeat(10_000));
    let begun = Instant::now();
    let until = begun + Duration::from_secs(60);
    assert!(!writer.wait(Duration::from_secs(60), until, || true));
    assert!((HURRIED..Duration::from_secs(30)).contains(&begun.elapsed()));
}

#[test]
fn a_socket_is_counted_in_the_same_way() {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let writer = Writer::new(ours.into(), Arc::new(Bell::new().unwrap()));
    let lines = 400_000;
    writer.write(b"ten bytes\n".repeat(lines));
    fill(&writer, &theirs, 10 * lines);
    assert!(!wait(&writer, 50));
    let given_up = writer.give_up();
    theirs.set_nonblocking(true).unwrap();
    let mut text = vec![0; 8 << 20];
    let (mut shown, mut theirs) = (0, theirs);
    while let Ok(count @ 1..) = theirs.read(&mut text) {
        shown += memchr::memchr_iter(b'\n', &text[..count]).count();
    }
    assert_eq!(given_up + shown, lines);
}

#[test]
fn an_owner_that_wants_it_hears_when_little_is_left_and_when_nothing_is() {
    const MARK: usize = 300_000;
    let (read, write) = rustix::pipe::pipe().unwrap();
    let bell = Arc::new(Bell::new().unwrap());
    let writer = Writer::new(write, Arc::clone(&bell));
    writer.adopt(Arc::clone(&bell), Wants::Below(MARK));
    writer.write(b"ten bytes\n".repeat(60_000));
    let mut reader = std::fs::File::from(read);
    let is_ready = |fd: BorrowedFd<'_>| poll_once(&[fd], PollFlags::IN, Some(Duration::ZERO)) == Ok(true);
    for most in [MARK, 1] {
        while !is_ready(bell.as_fd()) {
            let both = [bell.as_fd(), reader.as_fd()];
            assert_eq!(
                poll_once(&both, PollFlags::IN, Some(Duration::from_secs(20))),
                Ok(true)
            );
            if is_ready(reader.as_fd()) {
                let _ = reader.read(&mut [0; 10_000]).unwrap();
            }
        }
        assert!(writer.backlog().0 < most);
        bell.silence();
    }
}

#[test]
fn what_is_left_is_written_when_its_owner_has_gone() {
    let (writer, mut reader) = writer();
    let block = b"ten bytes\n".repeat(100_000);
    writer.write(block.clone());
    drop(writer);
    let mut text = Vec::new();
    reader.read_to_end(&mut text).unwrap();
    assert_eq!(text, block);
}

#[test]
fn a_closed_console_swallows_the_rest() {
    let (writer, reader) = writer();
    drop(reader);
    writer.write(b"one\n".to_vec());
    assert!(wait(&writer, 5000));
    assert!(writer.is_closed());
    writer.write(b"two\n".to_vec());
    assert_eq!(writer.backlog().0, 0);
}

#[test]
fn a_file_that_takes_nothing_is_told_once_and_tried_again() {
    let full = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = open(c"/dev/full", full, Mode::empty()).unwrap();
    let writer = Writer::new(file, Arc::new(Bell::new().unwrap()));
    for _ in 0..2 {
        writer.write(b"one\ntwo\n".to_vec());
        assert!(wait(&writer, 5000));
    }
    assert_eq!(writer.take_failure(), Some(Errno::NOSPC));
    assert_eq!(writer.take_failure(), None);
    assert!(!writer.is_closed());
    assert_eq!(writer.take_lost(), Lost { bytes: 16, lines: 4 });
    assert_eq!(writer.take_lost(), Lost::default());
}

#[test]
fn without_a_thread_the_console_gets_all_and_nobody_waits_for_it() {
    HAS_NO_THREAD.set(true);
    let (writer, mut reader) = writer();
    writer.write(b"one\n".to_vec());
    assert!(!writer.is_behind());
    // More than a pipe holds.
    let block = b"ten bytes\n".repeat(20_000);
    writer.write(block.clone());
    assert!(writer.is_behind());
    assert!(!wait(&writer, 50));
    let mut text = vec![0; block.len() + 4];
    let (begin, rest) = text.split_at_mut(1000);
    reader.read_exact(begin).unwrap();
    assert!(writer.backlog().0 > 0, "no reader, no progress");
    // As soon as there is a thread, it goes on where the others have stopped.
    HAS_NO_THREAD.set(false);
    assert!(writer.backlog().0 > 0);
    reader.read_exact(rest).unwrap();
    assert!(wait(&writer, 5000));
    assert_eq!(text, [b"one\n".to_vec(), block].concat());
}

#[test]
fn without_a_thread_a_file_that_is_full_and_a_closed_console_are_told() {
    HAS_NO_THREAD.set(true);
    let file = open(c"/dev/full", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let writer = Writer::new(file, Arc::new(Bell::new().unwrap()));
    writer.write(b"one\ntwo\n".to_vec());
    assert_eq!(writer.take_failure(), Some(Errno::NOSPC));
    assert_eq!(writer.take_lost(), Lost { bytes: 8, lines: 2 });
    let (writer, reader) = self::writer();
    drop(reader);
    writer.write(b"one\n".to_vec());
    assert!(writer.is_closed());
}
