//! A log file that the engine writes. It gets all bytes even if a console is slow, may have a size limit, and can be
//! reopened.

use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, major, minor};
use rustix::io::Errno;

use crate::mux::cap::Cap;
use crate::mux::whole::write_all;

/// Mode of new log files, before the umask.
const MODE: Mode = Mode::from_raw_mode(0o640);
/// Linux's major number of memory devices, and the minor numbers of those that never block a writer: null, zero,
/// full.
const MEMORY_DEVICES: u32 = 1;
const SINKS: [u32; 3] = [3, 5, 7];

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
    path: CString,
    file: OwnedFd,
    cap: Option<Cap>,
    failed: bool,
    lost: u64,
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

    pub(super) fn path(&self) -> &CString {
        &self.path
    }

    /// How many bytes could not be written so far.
    pub(super) fn lost(&self) -> u64 {
        self.lost
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

#[cfg(test)]
pub(super) mod tests;
