//! A log file that the engine writes: never dropped for a slow console, capped if asked, reopened on demand.

use std::ffi::CString;
use std::fmt::Write as _;
use std::io;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Opens a log file for appending, which leaves `copytruncate` rotation whole.
pub(crate) fn open_log(path: &std::ffi::CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o640))
}

/// One log file.
pub(super) struct LogFile {
    path: CString,
    file: OwnedFd,
    cap: Option<Cap>,
    failed: bool,
    lost: u64,
}

/// What a file with a limit keeps: its first half, and two segments that take turns for its end.
struct Cap {
    head_left: u64,
    segment_bytes: u64,
    /// The segment being written, and how full it is.
    current: Option<(OwnedFd, u64)>,
    turns: u64,
    total_after_head: u64,
}

impl LogFile {
    pub(super) fn new(path: CString, file: OwnedFd, max_bytes: Option<u64>) -> Self {
        let cap = max_bytes.map(|max| Cap {
            head_left: max / 2,
            segment_bytes: (max / 4).max(1),
            current: None,
            turns: 0,
            total_after_head: 0,
        });
        Self {
            path,
            file,
            cap,
            failed: false,
            lost: 0,
        }
    }

    pub(super) fn path(&self) -> &CString {
        &self.path
    }

    /// Bytes that could not be written so far.
    pub(super) fn lost(&self) -> u64 {
        self.lost
    }

    /// Writes all of it; the first failure of the file comes back, later ones are only counted.
    pub(super) fn write(&mut self, data: &[u8]) -> Option<Errno> {
        let result = match &mut self.cap {
            None => write_all(&self.file, data),
            Some(cap) => cap.write(&self.file, &self.path, data),
        };
        match result {
            Ok(()) => None,
            Err((errno, left)) => {
                self.lost += left as u64;
                (!std::mem::replace(&mut self.failed, true)).then_some(errno)
            }
        }
    }

    /// Opens the path anew, as after a rotation. A path that cannot be opened leaves the old file in use.
    pub(super) fn reopen(&mut self) {
        if let Ok(file) = open_log(&self.path) {
            self.file = file;
        }
    }

    /// Puts the parts of a capped file together.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        let Some(cap) = &mut self.cap else { return Ok(()) };
        let Some((_, newest)) = cap.current.take() else {
            return Ok(());
        };
        let kept = newest + if cap.turns > 1 { cap.segment_bytes } else { 0 };
        let left_out = cap.total_after_head - kept;
        if left_out > 0 {
            let note = format!("\n[dsl: {left_out} bytes left out]\n");
            write_all(&self.file, note.as_bytes()).map_err(|(errno, _)| errno)?;
        }
        let turns = cap.turns;
        for turn in turns.saturating_sub(2)..turns {
            let segment = segment_path(&self.path, turn);
            let mut from = std::fs::File::open(&segment)?;
            let mut to = std::fs::File::from(self.file.try_clone()?);
            io::copy(&mut from, &mut to)?;
            std::fs::remove_file(&segment)?;
        }
        Ok(())
    }
}

impl Cap {
    fn write(&mut self, head: &OwnedFd, path: &CString, data: &[u8]) -> Result<(), (Errno, usize)> {
        let first = data.len().min(self.head_left as usize);
        let (begin, mut rest) = data.split_at(first);
        self.head_left -= first as u64;
        write_all(head, begin).map_err(|(errno, left)| (errno, left + rest.len()))?;
        while !rest.is_empty() {
            let full = self
                .current
                .as_ref()
                .is_none_or(|(_, used)| *used >= self.segment_bytes);
            if full {
                self.current = Some((self.next_segment(path).map_err(|errno| (errno, rest.len()))?, 0));
            }
            let Some((file, used)) = &mut self.current else {
                break;
            };
            let count = rest.len().min((self.segment_bytes - *used) as usize);
            let (now, later) = rest.split_at(count);
            write_all(file, now).map_err(|(errno, left)| (errno, left + later.len()))?;
            *used += count as u64;
            self.total_after_head += count as u64;
            rest = later;
        }
        Ok(())
    }

    fn next_segment(&mut self, path: &CString) -> Result<OwnedFd, Errno> {
        let segment = segment_path(path, self.turns);
        self.turns += 1;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::open(&segment, flags, Mode::from_raw_mode(0o640))
    }
}

/// The two segments take turns: `PATH.0` and `PATH.1`.
fn segment_path(path: &CString, turn: u64) -> std::path::PathBuf {
    use std::os::unix::ffi::OsStrExt;
    let mut name = String::new();
    // Writing to a String cannot fail.
    let _ = write!(name, ".{}", turn % 2);
    let mut segment = std::ffi::OsStr::from_bytes(path.as_bytes()).to_owned();
    segment.push(name);
    segment.into()
}

/// Writes all of it; on failure also how much is left.
fn write_all(file: &OwnedFd, mut data: &[u8]) -> Result<(), (Errno, usize)> {
    while !data.is_empty() {
        match rustix::io::retry_on_intr(|| rustix::io::write(file, data)) {
            Ok(0) => return Err((Errno::IO, data.len())),
            Ok(count) => data = &data[count..],
            Err(errno) => return Err((errno, data.len())),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::path::PathBuf;

    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new() -> Self {
            let path = std::env::temp_dir().join(format!("dsl-log-{}", crate::token::random()));
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }

        fn file(&self, max_bytes: Option<u64>) -> LogFile {
            let path = CString::new(self.0.join("out").as_os_str().as_bytes()).unwrap();
            let file = open_log(&path).unwrap();
            LogFile::new(path, file, max_bytes)
        }

        fn read(&self) -> Vec<u8> {
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
        file.reopen();
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
        assert_eq!(file.lost(), 8);
    }
}
