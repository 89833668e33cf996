//! A folder for sockets that no other user can enter.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

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

    /// Opens or makes the folder and listens there, at a socket that does not block. Callers find it once
    /// [`PrivateFolder::show`] has given it this name: others remove names at which nobody listens. Up to `waiting` callers
    /// may wait.
    pub(crate) fn listen_in(
        path: &Path,
        kind: SocketType,
        name: &str,
        waiting: i32,
    ) -> io::Result<(Self, OwnedFd)> {
        let socket = new_socket(kind)?;
        // The kernel gives the name these permissions, less the umask.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        let attempt = || -> io::Result<Self> {
            let folder = Self::open(path)?;
            rustix::net::bind(&socket, &SocketAddrUnix::new(folder.place(&hidden(name)))?)?;
            Ok(folder)
        };
        // Another process may have removed the folder, because it was empty.
        let is_gone =
            |made: &io::Result<Self>| matches!(made, Err(error) if error.kind() == io::ErrorKind::NotFound);
        let mut made = attempt();
        for _ in 1..TRIES {
            if is_gone(&made) {
                made = attempt();
            }
        }
        let folder = made?;
        let listens = rustix::net::listen(&socket, waiting);
        listens.inspect_err(|_| folder.unlink(&hidden(name)))?;
        Ok((folder, socket))
    }

    /// Calls the socket of this name, without waiting. Returns a connection that does not block.
    pub(crate) fn call(&self, kind: SocketType, name: &str) -> io::Result<OwnedFd> {
        let socket = new_socket(kind)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(self.place(name))?)?;
        Ok(socket)
    }

    /// Gives a socket of [`PrivateFolder::listen_in`] its name. False: it is gone.
    pub(crate) fn show(&self, name: &str) -> bool {
        self.rename(&hidden(name), name)
    }

    /// A path of this name that is short enough for the address of a socket, however long that of the folder is.
    fn place(&self, name: &str) -> String {
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

fn new_socket(kind: SocketType) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
}

/// The name of a socket that callers do not find yet.
fn hidden(name: &str) -> String {
    format!(".{name}")
}

#[cfg(test)]
mod tests {
    use rustix::fs::inotify::{CreateFlags, ReadFlags, Reader, WatchFlags, add_watch, init};

    use super::*;
    use crate::procfs::fake_root::FakeRoot;

    #[test]
    fn a_socket_gets_its_name_once_it_listens() {
        let root = FakeRoot::new();
        let path = root.path().join("sockets");
        let folder = PrivateFolder::open(&path).unwrap();
        let news = init(CreateFlags::NONBLOCK).unwrap();
        add_watch(&news, &path, WatchFlags::CREATE | WatchFlags::MOVED_TO).unwrap();
        let (_, _listener) = PrivateFolder::listen_in(&path, SocketType::STREAM, "name", 4).unwrap();
        assert!(folder.show("name"));
        folder.call(SocketType::STREAM, "name").unwrap();
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
