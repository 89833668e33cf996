//! A folder for sockets that no other user can enter.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;

/// How often we make a folder that vanishes.
const TRIES: usize = 64;

/// A folder of this user alone.
pub(crate) struct PrivateFolder(OwnedFd);

impl PrivateFolder {
    /// Opens the folder, and makes it if it is missing. Fails if another user owns it or could enter it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        Self::open_existing(path)
    }

    /// Opens the folder. Fails as [`PrivateFolder::open`] does, and if it is missing.
    pub(crate) fn open_existing(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        let about = rustix::fs::fstat(&folder)?;
        let mode = Mode::from_raw_mode(about.st_mode);
        let is_ours = about.st_uid == rustix::process::geteuid().as_raw();
        if !is_ours || mode.intersects(Mode::RWXG | Mode::RWXO) {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        Ok(Self(folder))
    }

    /// Opens or makes the folder and binds a socket of this name in it. The kernel gives the name the permissions of
    /// `socket`, less the umask.
    pub(crate) fn bind_in(path: &Path, socket: impl AsFd, name: &str) -> io::Result<Self> {
        let attempt = || -> io::Result<Self> {
            let folder = Self::open(path)?;
            rustix::net::bind(&socket, &SocketAddrUnix::new(folder.place(name))?)?;
            Ok(folder)
        };
        for _ in 1..TRIES {
            match attempt() {
                // Another process has removed the folder, because it was empty.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                made => return made,
            }
        }
        attempt()
    }

    /// A path of this name that is short enough for the address of a socket, however long that of the folder is.
    pub(crate) fn place(&self, name: &str) -> String {
        format!("/proc/self/fd/{}/{name}", self.0.as_raw_fd())
    }

    /// Removes a name. Fails only if somebody else has removed it.
    pub(crate) fn unlink(&self, name: &str) {
        let _ = rustix::fs::unlinkat(&self.0, name, AtFlags::empty());
    }

    /// Gives a name another one. False: it is gone.
    pub(crate) fn rename(&self, from: &str, to: &str) -> bool {
        rustix::fs::renameat(&self.0, from, &self.0, to).is_ok()
    }
}
