//! A log file that the engine writes. It gets all bytes even if a console is slow, may have a size limit, and can be
//! reopened.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, ftruncate, major, minor, unlink};
use rustix::io::{Errno, pread, pwrite, retry_on_intr};

use crate::token;

/// Mode of new log files, before the umask.
const MODE: Mode = Mode::from_raw_mode(0o640);
/// Linux's major number of memory devices, and the minor numbers of those that never block a writer: null, zero,
/// full.
const MEMORY_DEVICES: u32 = 1;
const SINKS: [u32; 3] = [3, 5, 7];
/// Bytes of one copy step.
const COPY_BYTES: usize = 64 * 1024;

/// Opens a log file for appending, so that `copytruncate` rotation works.
///
/// Fails with ENXIO for a file that could block us, such as a FIFO or a terminal: only regular files and sinks like
/// `/dev/null` can be log files.
pub(crate) fn open_log(path: &CStr) -> Result<OwnedFd, Errno> {
    open_output(path, OFlags::APPEND)
}

/// Opens a file for output like [`open_log`], with additional flags.
///
/// `O_NONBLOCK` keeps the open from blocking. It stays set, but has no effect on the files that are accepted here.
pub(crate) fn open_output(path: &CStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, MODE)?;
    if never_waits(&fstat(&file)?) {
        Ok(file)
    } else {
        Err(Errno::NXIO)
    }
}

fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

fn never_waits(stat: &Stat) -> bool {
    let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    let is_memory = is_device && major(stat.st_rdev) == MEMORY_DEVICES;
    is_regular(stat) || (is_memory && SINKS.contains(&minor(stat.st_rdev)))
}

/// One log file.
pub(super) struct LogFile {
    pub(super) path: CString,
    file: OwnedFd,
    cap: Option<Cap>,
    failed: bool,
    /// How many bytes could not be written so far.
    pub(super) lost: u64,
}

impl LogFile {
    pub(super) fn new(path: CString, file: OwnedFd, max_bytes: Option<u64>) -> Self {
        // A device has no segments beside it.
        let has_end = fstat(&file).is_ok_and(|stat| is_regular(&stat));
        Self {
            path,
            file,
            cap: max_bytes.filter(|_| has_end).map(Cap::new),
            failed: false,
            lost: 0,
        }
    }

    /// Writes all of `data`. Returns the first failure of the file; bytes of later failures are only counted.
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

    /// Reopens the path, as after a rotation. The old file is completed, and the new file is filled from its
    /// beginning. If the path cannot be opened, the old file stays in use.
    pub(super) fn reopen(&mut self) -> Result<(), Errno> {
        let file = open_log(&self.path)?;
        let (old, new) = (fstat(&self.file)?, fstat(&file)?);
        // The same file with content was not rotated. If the same file is empty, a rotation has truncated it.
        let is_same = (old.st_dev, old.st_ino) == (new.st_dev, new.st_ino) && new.st_size > 0;
        if is_same {
            return Ok(());
        }
        let finished = self.finish();
        self.file = file;
        self.failed = false;
        finished
    }

    /// Puts the parts of a file with a limit together. Later output begins a new first half.
    pub(super) fn finish(&mut self) -> Result<(), Errno> {
        self.cap.as_mut().map_or(Ok(()), |cap| cap.finish(&self.file))
    }
}

/// A size limit for a log file. It keeps the first half of the output, and two segments take turns to keep the end.
///
/// A segment is a file beside the log, which we make under a unique name. It has a name so that the user finds the
/// end of the output even if we are killed.
struct Cap {
    max: u64,
    head_left: u64,
    segments: [Option<Segment>; 2],
    /// Which of the two segments is being written.
    current: usize,
    /// Number of bytes written to segments so far.
    total: u64,
}

struct Segment {
    file: OwnedFd,
    path: CString,
    used: u64,
}

impl Cap {
    fn new(max: u64) -> Self {
        Self {
            max,
            head_left: max / 2,
            segments: [None, None],
            current: 1,
            total: 0,
        }
    }

    /// Writes to the file while its first half has room, then to the segments. An error comes with the number of
    /// bytes that were not written.
    fn write(&mut self, head: &OwnedFd, path: &CStr, data: &[u8]) -> Result<(), (Errno, usize)> {
        let first = data
            .len()
            .min(usize::try_from(self.head_left).unwrap_or(usize::MAX));
        let (begin, mut rest) = data.split_at(first);
        self.head_left -= first as u64;
        write_all(head, begin).map_err(|(errno, left)| (errno, left + rest.len()))?;
        let limit = (self.max / 4).max(1);
        while !rest.is_empty() {
            let segment = self.segment(path, limit).map_err(|errno| (errno, rest.len()))?;
            let count = rest.len().min((limit - segment.used) as usize);
            let written = retry_on_intr(|| pwrite(&segment.file, &rest[..count], segment.used));
            let written = match written {
                Ok(0) => Err(Errno::IO),
                other => other,
            };
            let written = written.map_err(|errno| (errno, rest.len()))?;
            segment.used += written as u64;
            self.total += written as u64;
            rest = &rest[written..];
        }
        Ok(())
    }

    /// A segment with room. When one is full, the older one is emptied and used.
    fn segment(&mut self, path: &CStr, limit: u64) -> Result<&mut Segment, Errno> {
        let is_full =
            |segment: &Option<Segment>| segment.as_ref().is_none_or(|segment| segment.used >= limit);
        if is_full(&self.segments[self.current]) {
            let next = 1 - self.current;
            match &mut self.segments[next] {
                Some(segment) => {
                    ftruncate(&segment.file, 0)?;
                    segment.used = 0;
                }
                none => *none = Some(Segment::create(path)?),
            }
            self.current = next;
        }
        self.segments[self.current].as_mut().ok_or(Errno::IO)
    }

    /// Appends the end to the beginning, with a note about the bytes left out between them. Later output begins a new
    /// first half. After a failure the segments stay where they are.
    fn finish(&mut self, head: &OwnedFd) -> Result<(), Errno> {
        let done = std::mem::replace(self, Self::new(self.max));
        let [first, second] = done.segments;
        let in_order = if done.current == 0 {
            [second, first]
        } else {
            [first, second]
        };
        let kept: u64 = in_order.iter().flatten().map(|segment| segment.used).sum();
        let left_out = done.total.saturating_sub(kept);
        if left_out > 0 {
            let note = format!("\n[dsl: {left_out} bytes left out]\n");
            write_all(head, note.as_bytes()).map_err(|(errno, _)| errno)?;
        }
        for segment in in_order.into_iter().flatten() {
            segment.append_to(head)?;
        }
        Ok(())
    }
}

impl Segment {
    fn create(path: &CStr) -> Result<Self, Errno> {
        let name = [path.to_bytes(), b".part-", token::random().as_bytes()].concat();
        let path = CString::new(name).map_err(|_| Errno::INVAL)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o640))?;
        Ok(Self { file, path, used: 0 })
    }

    fn append_to(&self, head: &OwnedFd) -> Result<(), Errno> {
        let mut buffer = vec![0; COPY_BYTES];
        let mut at = 0;
        while at < self.used {
            let count = retry_on_intr(|| pread(&self.file, &mut buffer[..], at))?;
            if count == 0 {
                return Err(Errno::IO);
            }
            write_all(head, &buffer[..count]).map_err(|(errno, _)| errno)?;
            at += count as u64;
        }
        // The file now has all bytes of the segment.
        let _ = unlink(&self.path);
        Ok(())
    }
}

/// Writes all of `data`. An error comes with the number of bytes that were not written.
fn write_all(file: impl AsFd, mut data: &[u8]) -> Result<(), (Errno, usize)> {
    while !data.is_empty() {
        match rustix::io::retry_on_intr(|| rustix::io::write(&file, data)) {
            Ok(0) => return Err((Errno::IO, data.len())),
            Ok(count) => data = &data[count..],
            Err(errno) => return Err((errno, data.len())),
        }
    }
    Ok(())
}

#[cfg(test)]
pub(super) mod tests;
