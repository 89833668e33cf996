//! Descriptors of this process: which it has, and which a worker would inherit.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};

/// Opens /dev/null in place of every closed standard stream. Otherwise the next file opened would get the stream's
/// number, and workers would inherit it.
pub(crate) fn fill_standard_streams() -> io::Result<()> {
    loop {
        let flags = OFlags::RDWR | OFlags::NOCTTY;
        let fd = rustix::fs::open(c"/dev/null", flags, Mode::empty())?;
        if fd.as_raw_fd() > 2 {
            return Ok(());
        }
        std::mem::forget(fd);
    }
}

/// Descriptors above the standard streams that would stay open in a worker.
pub(super) fn inheritable_descriptors() -> io::Result<Vec<RawFd>> {
    let all = all_descriptors()?.into_iter();
    Ok(all.filter(|fd| !crate::sys::is_close_on_exec(*fd)).collect())
}

/// All descriptors above the standard streams.
pub(crate) fn all_descriptors() -> io::Result<Vec<RawFd>> {
    let directory = File::open("/proc/self/fd")?;
    let own = directory.as_raw_fd();
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let Some(fd) = entry
            .file_name()
            .to_str()
            .ok()
            .and_then(|name| name.parse::<RawFd>().ok())
        else {
            continue;
        };
        if fd > 2 && fd != own {
            found.push(fd);
        }
    }
    Ok(found)
}

/// The soft and hard limit of open files.
pub(crate) fn open_files_limit() -> Rlimit {
    rustix::process::getrlimit(Resource::Nofile)
}
