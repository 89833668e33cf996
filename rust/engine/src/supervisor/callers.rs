//! The socket of a job, at which views into the job call. Nothing runs for it while nobody calls.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{SendFlags, SocketFlags, SocketType};

use crate::error::Error;
use crate::event::Event;
use crate::folder::PrivateFolder;
use crate::peer::{Peer, Stranger};
use crate::supervisor::Supervisor;
use crate::supervisor::Watched;

/// Callers that may wait. The kernel refuses further ones.
const WAITING: i32 = 16;
/// How long callers wait who could not be taken, because too many files are open.
const PATIENCE: Duration = Duration::from_secs(1);

/// A listening socket, which is removed with this value.
pub(crate) struct Callers {
    path: PathBuf,
    folder: PrivateFolder,
    name: String,
    listener: OwnedFd,
}

impl Callers {
    /// Listens at a new socket of this name. Makes the folder for this user alone if it is missing.
    ///
    /// Fails if another user owns the folder or could enter it.
    pub(crate) fn new(path: &Path, name: &str) -> Result<Self, Error> {
        let failed = |error| Error::os("listen at the socket of the job")(error);
        let listening = PrivateFolder::listen_in(path, SocketType::STREAM, name, WAITING);
        let (folder, listener) = listening.map_err(failed)?;
        if !folder.show(name) {
            return Err(failed(io::ErrorKind::NotFound.into()));
        }
        Ok(Self {
            folder,
            path: path.to_owned(),
            name: name.to_owned(),
            listener,
        })
    }

    /// Takes the callers that wait. All but processes of this user here are turned away, and told why. Fails if there is
    /// one who cannot be taken.
    fn take(&self) -> io::Result<Vec<OwnedFd>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let mut taken = Vec::new();
        for _ in 0..WAITING {
            match rustix::net::accept_with(&self.listener, flags) {
                Ok(caller) => match Peer::of(&caller) {
                    Ok(_) => taken.push(caller),
                    Err(stranger) => turn_away(&caller, &stranger),
                },
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) if taken.is_empty() => return Err(error.into()),
                Err(_) => break,
            }
        }
        Ok(taken)
    }

    /// Removes the sockets of jobs that were killed, all their processes at once. In another pid namespace a process
    /// may be missing that listens, so the socket has to say the same.
    fn remove_left(&self) {
        let entries = std::fs::read_dir(&self.path).into_iter().flatten().flatten();
        for name in entries.filter_map(|entry| entry.file_name().into_string().ok()) {
            let pid = name.split('-').next().unwrap_or_default();
            let is_gone = pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists();
            let is_refused = || {
                let called = self.folder.call(SocketType::STREAM, &name);
                called.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
            };
            if is_gone && is_refused() {
                self.folder.unlink(&name);
            }
        }
        let _ = rustix::fs::rmdir(&self.path);
    }
}

impl Drop for Callers {
    fn drop(&mut self) {
        self.folder.unlink(&self.name);
        // Fails while other jobs have sockets there.
        if rustix::fs::rmdir(&self.path) == Err(Errno::NOTEMPTY) {
            self.remove_left();
        }
    }
}

/// Tells a caller that it may not look. The text has neither quotes nor backslashes.
fn turn_away(caller: &OwnedFd, stranger: &Stranger) {
    let line = format!("{{\"NoAnswer\":{{\"why\":\"{stranger}\"}}}}\n");
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // If this fails, the caller sees only that we hang up.
    let _ = rustix::net::send(caller, line.as_bytes(), flags);
}

impl Supervisor {
    /// Reports [`Event::Called`] when somebody calls at this socket.
    pub(crate) fn listen(&mut self, callers: Callers) -> Result<(), Error> {
        self.poller.watch(&callers.listener, Watched::Caller.encode())?;
        self.callers = Some(callers);
        Ok(())
    }

    /// Takes those who have called, and reports the next call; after a failure not at once.
    pub(crate) fn take_callers(&mut self) -> Result<Vec<OwnedFd>, Error> {
        let Some(callers) = &self.callers else {
            return Ok(Vec::new());
        };
        let taken = callers.take();
        match &taken {
            Ok(_) => self.await_callers(),
            Err(_) => self.callers_due = Some(Instant::now() + PATIENCE),
        }
        taken.map_err(Error::os("take a view into the job"))
    }

    /// Reports the next call.
    pub(super) fn await_callers(&mut self) {
        self.callers_due = None;
        if let Some(callers) = &self.callers {
            // Fails if nobody has called: the socket is watched still.
            let _ = self.poller.watch(&callers.listener, Watched::Caller.encode());
        }
    }

    /// Removes the socket.
    pub(crate) fn unlisten(&mut self) {
        if let Some(callers) = self.callers.take() {
            self.poller.forget(&callers.listener);
        }
    }

    /// Not watched again before the owner has taken the callers, so that a crowd of them costs nothing.
    pub(super) fn somebody_calls(&mut self) {
        if let Some(callers) = &self.callers {
            self.poller.forget(&callers.listener);
            self.events.push(Event::Called);
        }
    }
}

#[cfg(test)]
mod tests;
