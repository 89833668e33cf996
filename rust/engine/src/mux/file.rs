//! A log file that the engine writes: never dropped for a slow console, capped if asked, reopened on demand.

use std::ffi::{CStr, CString};
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, major, minor};
use rustix::io::Errno;

use crate::mux::cap::Cap;
use crate::mux::whole::write_all;

/// Mode of new log files, less the umask.
const MODE: Mode = Mode::from_raw_mode(0o640);
/// Linux's number of its memory devices, and those of them that never make a writer wait: null, zero, full.
const MEMORY_DEVICES: u32 = 1;
const SINKS: [u32; 3] = [3, 5, 7];

/// Opens a log file for appending, which leaves `copytruncate` rotation whole.
///
/// Fails with ENXIO for anything that could make us wait, such as a FIFO or a terminal: only regular files and
/// sinks like `/dev/null` are log files.
pub(crate) fn open_log(path: &CStr) -> Result<OwnedFd, Errno> {
    open_output(path, OFlags::APPEND)
}

/// Opens a file for output as [`open_log`] does, with these flags besides.
///
/// The flag that keeps the opening from waiting stays; on what is opened here it means nothing.
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
        // Nothing stands beside a device.
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

    /// Opens the path anew, as after a rotation; the old file is completed, and a new one fills from its begin.
    /// A path that cannot be opened leaves the old file in use.
    pub(super) fn reopen(&mut self) -> Result<(), Errno> {
        let file = open_log(&self.path)?;
        let (old, new) = (fstat(&self.file)?, fstat(&file)?);
        // Nothing was moved away, or all of it was taken out of the file.
        let is_same = (old.st_dev, old.st_ino) == (new.st_dev, new.st_ino) && new.st_size > 0;
        if is_same {
            return Ok(());
        }
        let finished = self.finish();
        self.file = file;
        self.failed = false;
        finished
    }

    /// Puts the parts of a capped file together. What is written then begins anew.
    pub(super) fn finish(&mut self) -> Result<(), Errno> {
        self.cap.as_mut().map_or(Ok(()), |cap| cap.finish(&self.file))
    }
}

#[cfg(test)]
pub(super) mod tests;
