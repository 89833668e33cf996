//! Whether callers still find a socket: its name or its folder may be removed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{CreateFlags, Reader, WatchFlags, add_watch, init};
use rustix::fs::lstat;

/// Watches the name of a socket and its folder.
pub(super) struct Reach {
    folder: PathBuf,
    /// Device and inode of the socket's name.
    socket: (u64, u64),
    /// Readable when something has happened to them.
    news: OwnedFd,
}

impl Reach {
    /// Watches a socket that has this name; `None` if the kernel has no more watches for us.
    pub(super) fn watch(folder: &Path, name: &str) -> Option<Self> {
        let news = init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok()?;
        // A socket whose name is removed lives on, with a link less.
        add_watch(
            &news,
            folder.join(name),
            WatchFlags::ATTRIB | WatchFlags::MOVE_SELF,
        )
        .ok()?;
        add_watch(&news, folder, WatchFlags::MOVE_SELF | WatchFlags::ONLYDIR).ok()?;
        Some(Self {
            folder: folder.to_owned(),
            socket: identity(&folder.join(name))?,
            news,
        })
    }

    /// Takes the news, and tells whether callers find the socket, which has this name now.
    pub(super) fn holds(&self, name: &str) -> bool {
        let mut space = [std::mem::MaybeUninit::uninit(); 1024];
        let mut reader = Reader::new(&self.news, &mut space);
        while reader.next().is_ok() {}
        identity(&self.folder.join(name)) == Some(self.socket)
    }
}

impl AsFd for Reach {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    lstat(path).ok().map(|about| (about.st_dev, about.st_ino))
}
