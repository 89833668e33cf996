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
            return Err(Errno::ACCESS.into());
        }
        Ok(Self(folder))
    }

    /// Opens or makes the folder and listens there. Callers find the socket once [`PrivateFolder::show`] has given it this
    /// name: others remove names at which nobody listens. The kernel gives the name the permissions of `socket`, less the
    /// umask. Up to `waiting` callers may wait.
    pub(crate) fn listen_in(path: &Path, socket: impl AsFd, name: &str, waiting: i32) -> io::Result<Self> {
        let attempt = || -> io::Result<Self> {
            let folder = Self::open(path)?;
            rustix::net::bind(&socket, &SocketAddrUnix::new(folder.place(&hidden(name)))?)?;
            Ok(folder)
        };
        let listen = |folder: Self| {
            let listens = rustix::net::listen(&socket, waiting);
            listens.inspect_err(|_| folder.unlink(&hidden(name)))?;
            Ok(folder)
        };
        for _ in 1..TRIES {
            match attempt() {
                // Another process has removed the folder, because it was empty.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                made => return made.and_then(listen),
            }
        }
        attempt().and_then(listen)
    }

    /// Gives a socket of [`PrivateFolder::listen_in`] its name. False: it is gone.
    pub(crate) fn show(&self, name: &str) -> bool {
        self.rename(&hidden(name), name)
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

/// The name of a socket that callers do not find yet.
fn hidden(name: &str) -> String {
    format!(".{name}")
}

#[cfg(test)]
mod tests {
    use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init};
    use rustix::net::{AddressFamily, SocketType, socket};

    use super::*;
    use crate::procfs::fake_root::FakeRoot;

    #[test]
    fn a_socket_gets_its_name_once_it_listens() {
        let root = FakeRoot::new();
        let path = root.path().join("sockets");
        let folder = PrivateFolder::open(&path).unwrap();
        let news = init(CreateFlags::NONBLOCK).unwrap();
        add_watch(&news, &path, WatchFlags::CREATE | WatchFlags::MOVED_TO).unwrap();
        let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        PrivateFolder::listen_in(&path, &listener, "name", 4).unwrap();
        assert!(folder.show("name"));
        let caller = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::connect(&caller, &SocketAddrUnix::new(folder.place("name")).unwrap()).unwrap();
        let mut space = [std::mem::MaybeUninit::uninit(); 1024];
        let mut reader = Reader::new(&news, &mut space);
        let mut seen = Vec::new();
        while let Ok(event) = reader.next() {
            let name = event.file_name().unwrap().to_string_lossy().into_owned();
            seen.push((event.events().contains(ReadFlags::MOVED_TO), name));
        }
        assert_eq!(seen, [(false, ".name".to_owned()), (true, "name".to_owned())]);
        assert_eq!(std::fs::read_dir(&path).unwrap().count(), 1);
    }
}
