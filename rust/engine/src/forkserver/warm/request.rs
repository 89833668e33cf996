//! How a command calls a warm server.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::Mode;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::place;
use crate::folder::PrivateFolder;
use crate::forkserver::wire::{Wire, wire};
use crate::forkserver::{parcel, socket};
use crate::peer::Peer;
use crate::poller::wait_readable;

/// Version of these messages.
const VERSION: u32 = 4;
/// Calls that may wait. A server that imports takes none.
const WAITING: i32 = 64;

/// What a call is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Fork workers of a job.
    Serve,
    /// Answer once the modules are imported, and stay while the caller holds the connection.
    Hold,
    /// Say what the server is and has done.
    Tell,
    /// End, once all jobs have ended.
    Stop,
}

/// The first and only message of a caller that is not the engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What the call is for.
    pub purpose: Purpose,
    /// In what command and server must agree.
    pub key: Vec<u8>,
    /// How long the server stays after the last job. Zero: as long as earlier callers wanted.
    pub stay: Duration,
    /// How many bytes of memory all warm servers of this user may use.
    pub memory: u64,
}

wire!(Purpose {
    0 => Serve {},
    1 => Hold {},
    2 => Tell {},
    3 => Stop {},
});
wire!(Request {
    purpose,
    key,
    stay,
    memory,
});

impl Request {
    /// The file with the request that a call brings.
    pub(super) fn receive(call: &OwnedFd) -> io::Result<File> {
        let (_, fds) = socket::receive(call)?.ok_or(io::ErrorKind::WouldBlock)?;
        Ok(File::from(
            fds.into_iter().next().ok_or(io::ErrorKind::InvalidData)?,
        ))
    }

    /// Reads a request that nobody can change any more.
    pub(super) fn unpack(file: &File) -> io::Result<Self> {
        if !parcel::is_sealed(file) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        match <(u32, Self)>::decode(&parcel::unpack(file)?) {
            Some((VERSION, request)) => Ok(request),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Makes a listening socket for the server that will give it this name, in a folder for this user alone, which is made
/// if it is missing.
pub fn listen(folder: &Path, name: &str) -> io::Result<OwnedFd> {
    let listener = new_socket()?;
    rustix::fs::fchmod(&listener, Mode::RUSR | Mode::WUSR)?;
    rustix::io::ioctl_fionbio(&listener, true)?;
    PrivateFolder::listen_in(folder, &listener, name, WAITING)?;
    Ok(listener)
}

/// Calls the server at a socket of this name. Fails with `ConnectionRefused` if it is gone, with `WouldBlock` if too many
/// calls wait there, and with `PermissionDenied` if a process listens there that is none of this user here, or that would
/// end with a job that this process does not belong to: it gets nothing.
pub fn join(folder: &Path, name: &str, request: &Request) -> io::Result<OwnedFd> {
    let call = new_socket()?;
    let folder = PrivateFolder::open_existing(folder)?;
    rustix::io::ioctl_fionbio(&call, true)?;
    rustix::net::connect(&call, &SocketAddrUnix::new(folder.place(name))?)?;
    rustix::io::ioctl_fionbio(&call, false)?;
    let server = Peer::of(&call)?;
    if matches!(request.purpose, Purpose::Serve | Purpose::Hold) && !place::is_safe(server.pid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let file = parcel::pack(c"dsl-request", &[VERSION.encode(), request.encode()].concat())?;
    parcel::seal(&file)?;
    socket::send(&call, b"request", &[file.as_fd()], false)?;
    Ok(call)
}

/// The answer to a call of another purpose than [`Purpose::Serve`]; `None` if there is none in this time.
pub fn ask(call: &OwnedFd, patience: Duration) -> Option<Vec<u8>> {
    if !wait_readable(&[call.as_fd()], patience) {
        return None;
    }
    socket::receive(call).ok().flatten().map(|(bytes, _)| bytes)
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_as_it_was_written_and_never_in_part() {
        let request = Request {
            purpose: Purpose::Hold,
            key: b"a=1\n\xff".to_vec(),
            stay: Duration::from_millis(1500),
            memory: u64::MAX,
        };
        let bytes = request.encode();
        assert_eq!(Request::decode(&bytes), Some(request));
        for end in 0..bytes.len() {
            assert_eq!(Request::decode(&bytes[..end]), None);
        }
    }
}
