use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::*;

pub(in crate::mux) struct Scratch(PathBuf);

impl Scratch {
    pub(in crate::mux) fn new() -> Self {
        let path = std::env::temp_dir().join(format!("dsl-log-{}", crate::token::random()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(in crate::mux) fn file(&self, max_bytes: Option<u64>) -> LogFile {
        let path = CString::new(self.0.join("out").as_os_str().as_bytes()).unwrap();
        let file = open_log(&path).unwrap();
        LogFile::new(path, file, max_bytes)
    }

    pub(in crate::mux) fn read(&self) -> Vec<u8> {
        std::fs::read(self.0.join("out")).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

#[test]
fn a_file_without_a_limit_holds_what_was_written() {
    let scratch = Scratch::new();
    let mut file = scratch.file(None);
    assert_eq!(file.write(b"one\n"), None);
    assert_eq!(file.write(b"\0two"), None);
    file.finish().unwrap();
    assert_eq!(scratch.read(), b"one\n\0two");
}

#[test]
fn a_capped_file_keeps_its_first_and_its_last_part() {
    let scratch = Scratch::new();
    let mut file = scratch.file(Some(400));
    let all: Vec<u8> = (0..1000)
        .flat_map(|number| format!("{number:03}\n").into_bytes())
        .collect();
    for piece in all.chunks(37) {
        assert_eq!(file.write(piece), None);
    }
    file.finish().unwrap();
    let kept = scratch.read();
    assert!(kept.starts_with(&all[..200]));
    let note = kept[200..].split(|byte| *byte == b']').next().unwrap();
    let note = String::from_utf8(note.to_vec()).unwrap();
    assert!(
        note.starts_with("\n[dsl: ") && note.ends_with("bytes left out"),
        "{note}"
    );
    let end = &kept[200 + note.len() + 2..];
    assert!(end.len() > 100 && end.len() <= 200, "{}", end.len());
    assert!(all.ends_with(end));
    assert_eq!(
        std::fs::read_dir(&scratch.0).unwrap().count(),
        1,
        "segments are removed"
    );
}

#[test]
fn a_capped_file_that_stays_small_is_whole() {
    for length in [0, 199, 200, 201, 300, 400] {
        let scratch = Scratch::new();
        let mut file = scratch.file(Some(400));
        let all = vec![b'x'; length];
        assert_eq!(file.write(&all), None);
        file.finish().unwrap();
        assert_eq!(scratch.read(), all, "{length} bytes");
    }
}

#[test]
fn a_reopened_file_is_the_one_at_the_path() {
    let scratch = Scratch::new();
    let mut file = scratch.file(None);
    file.write(b"old");
    std::fs::rename(scratch.0.join("out"), scratch.0.join("out.1")).unwrap();
    file.write(b"er");
    file.reopen().unwrap();
    file.write(b"new");
    assert_eq!(std::fs::read(scratch.0.join("out.1")).unwrap(), b"older");
    assert_eq!(scratch.read(), b"new");
}

#[test]
fn a_full_disk_is_told_once_and_counted() {
    let full = rustix::fs::open(c"/dev/full", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let mut file = LogFile::new(c"/dev/full".to_owned(), full, None);
    assert_eq!(file.write(b"four"), Some(Errno::NOSPC));
    assert_eq!(file.write(b"four"), None);
    assert_eq!(file.lost, 8);
}

fn log(scratch: &Scratch, name: &str) -> CString {
    CString::new(scratch.0.join(name).as_os_str().as_bytes()).unwrap()
}

#[test]
fn only_regular_files_and_sinks_are_log_files() {
    let scratch = Scratch::new();
    let fifo = log(&scratch, "fifo");
    rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, MODE).unwrap();
    assert_eq!(open_log(&fifo).unwrap_err(), Errno::NXIO);
    let reader = rustix::fs::open(&fifo, OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty()).unwrap();
    assert_eq!(open_log(&fifo).unwrap_err(), Errno::NXIO, "it has a reader");
    drop(reader);
    assert_eq!(open_log(c"/dev/ptmx").unwrap_err(), Errno::NXIO);
    open_log(c"/dev/null").unwrap();
}

#[test]
fn a_path_that_has_become_a_fifo_leaves_the_old_file_in_use() {
    let scratch = Scratch::new();
    let mut file = scratch.file(None);
    file.write(b"old");
    std::fs::rename(scratch.0.join("out"), scratch.0.join("out.1")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, log(&scratch, "out"), MODE).unwrap();
    assert_eq!(file.reopen(), Err(Errno::NXIO));
    file.write(b"er");
    assert_eq!(std::fs::read(scratch.0.join("out.1")).unwrap(), b"older");
}

#[test]
fn segments_that_cannot_be_made_are_counted_as_lost_and_as_nothing_else() {
    let scratch = Scratch::new();
    let inner = scratch.0.join("inner");
    std::fs::create_dir(&inner).unwrap();
    let path = CString::new(inner.join("out").as_os_str().as_bytes()).unwrap();
    let head = open_log(&path).unwrap();
    let mut file = LogFile::new(path.clone(), head, Some(400));
    std::fs::rename(&inner, scratch.0.join("moved")).unwrap();
    assert_eq!(file.write(&[b'x'; 250]), Some(Errno::NOENT));
    assert_eq!(file.write(&[b'y'; 50]), None, "told once");
    assert_eq!(file.lost, 100);
    std::fs::rename(scratch.0.join("moved"), &inner).unwrap();
    assert_eq!(file.write(b"end"), None);
    file.finish().unwrap();
    let kept = std::fs::read(inner.join("out")).unwrap();
    assert_eq!(kept, [&[b'x'; 200][..], b"end"].concat());
}

#[test]
fn a_reopened_capped_file_fills_at_once_and_the_old_one_is_whole() {
    let scratch = Scratch::new();
    let mut file = scratch.file(Some(400));
    file.write(&[b'a'; 250]);
    std::fs::rename(scratch.0.join("out"), scratch.0.join("out.1")).unwrap();
    file.reopen().unwrap();
    file.write(b"new");
    assert_eq!(scratch.read(), b"new");
    assert_eq!(std::fs::read(scratch.0.join("out.1")).unwrap(), [b'a'; 250]);
    file.finish().unwrap();
    assert_eq!(std::fs::read_dir(&scratch.0).unwrap().count(), 2);
}

#[test]
fn a_hang_up_without_a_rotation_does_not_lengthen_a_capped_file() {
    let scratch = Scratch::new();
    let mut file = scratch.file(Some(400));
    for _ in 0..20 {
        file.write(&[b'a'; 100]);
        file.reopen().unwrap();
    }
    file.finish().unwrap();
    assert!(scratch.read().len() < 500, "{}", scratch.read().len());
}

#[test]
fn files_with_the_names_of_a_rotation_are_not_touched() {
    let scratch = Scratch::new();
    for name in ["out.0", "out.1"] {
        std::fs::write(scratch.0.join(name), name).unwrap();
    }
    let mut file = scratch.file(Some(400));
    file.write(&[b'a'; 1000]);
    file.finish().unwrap();
    for name in ["out.0", "out.1"] {
        assert_eq!(std::fs::read(scratch.0.join(name)).unwrap(), name.as_bytes());
    }
}

#[test]
fn a_capped_device_has_nothing_beside_it() {
    let mut file = LogFile::new(c"/dev/null".to_owned(), open_log(c"/dev/null").unwrap(), Some(4));
    assert_eq!(file.write(&[b'a'; 1000]), None);
    file.finish().unwrap();
    assert_eq!(file.lost, 0);
}
