//! How a command calls a warm server.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::available_parallelism;
use std::time::Duration;

use rustix::net::SocketType;

use super::place;
use crate::folder::PrivateFolder;
use crate::forkserver::socket;
use crate::forkserver::wire::{Wire, wire};
use crate::peer::Peer;
use crate::poller::wait_readable;

/// Version of these messages.
pub(super) const VERSION: u32 = 5;
/// Calls that may wait. A server that imports takes none.
const WAITING: i32 = 64;
/// Environment variable with the number of branches that fork the workers of a job, for tests.
const FORKERS_VARIABLE: &str = "DSL_ENGINE_FORKERS";
/// The most branches of a job, unless the variable says otherwise.
const MOST_FORKERS: usize = 4;
/// Each branch pays only with so many workers, and with so many processors: the workers need the others.
const WORKERS_EACH: usize = 32;
const PROCESSORS_EACH: usize = 4;

/// What a call is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Fork workers of a job.
    Serve,
    /// A further connection of the call that is named: one for each branch.
    Part,
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
    /// Names the call among those of one process.
    pub number: u64,
}

wire!(Purpose {
    0 => Serve {},
    1 => Hold {},
    2 => Tell {},
    3 => Stop {},
    4 => Part {},
});
wire!(Request {
    purpose,
    key,
    stay,
    memory,
    number,
});

impl Request {
    /// A request that says nothing more.
    pub fn new(purpose: Purpose) -> Self {
        Self {
            purpose,
            key: Vec::new(),
            stay: Duration::ZERO,
            memory: 0,
            number: 0,
        }
    }

    /// The file with the request that a call brings.
    pub(super) fn receive(call: &OwnedFd) -> io::Result<File> {
        let (_, fds) = socket::receive(call)?.ok_or(io::ErrorKind::WouldBlock)?;
        Ok(File::from(
            fds.into_iter().next().ok_or(io::ErrorKind::InvalidData)?,
        ))
    }

    /// Reads a request that nobody can change any more.
    pub(super) fn unpack(file: &File) -> io::Result<Self> {
        if !socket::is_sealed(file) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        match <(u32, Self)>::decode(&socket::unpack(file)?) {
            Some((VERSION, request)) => Ok(request),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Makes a listening socket for the server that will give it this name, in a folder for this user alone, which is made
/// if it is missing.
pub fn listen(folder: &Path, name: &str) -> io::Result<OwnedFd> {
    let (_, listener) = PrivateFolder::listen_in(folder, SocketType::SEQPACKET, name, WAITING)?;
    Ok(listener)
}

/// Calls the server at a socket of this name. Fails with `ConnectionRefused` if it is gone, with `WouldBlock` if too many
/// calls wait there, and with `PermissionDenied` if a process listens there that is none of this user here, or that would
/// end with a job that this process does not belong to: it gets nothing.
pub fn join(folder: &Path, name: &str, request: &Request) -> io::Result<OwnedFd> {
    Ok(call(folder, name, request)?.0)
}

/// As [`join`], for a server that forks so many workers, if the call is for them. Returns a connection for each branch:
/// fewer than are of use if the server takes no more.
pub fn join_all(folder: &Path, name: &str, request: Request, workers: usize) -> io::Result<Vec<OwnedFd>> {
    static CALLS: AtomicU64 = AtomicU64::new(1);
    let number = CALLS.fetch_add(1, Ordering::Relaxed);
    let is_job = request.purpose == Purpose::Serve;
    let branches = if is_job { branches_for(workers) } else { 1 };
    let mut parts = Vec::new();
    // The server hears the call last, and then has all its parts.
    for _ in 1..branches {
        let part = Request {
            number,
            ..Request::new(Purpose::Part)
        };
        match call(folder, name, &part) {
            Ok(part) => parts.push(part),
            Err(_) => break,
        }
    }
    let (first, server) = call(folder, name, &Request { number, ..request })?;
    // Another server may have taken the place of the one that got a part.
    let parts = parts.into_iter().filter(|(_, pid)| *pid == server);
    Ok(std::iter::once(first)
        .chain(parts.map(|(part, _)| part))
        .collect())
}

/// How many branches shall fork so many workers.
fn branches_for(workers: usize) -> usize {
    let forced = std::env::var(FORKERS_VARIABLE).unwrap_or_default().parse().ok();
    let processors = available_parallelism().map_or(1, usize::from);
    let useful = (processors / PROCESSORS_EACH)
        .min(workers / WORKERS_EACH)
        .min(MOST_FORKERS);
    forced.unwrap_or(useful).clamp(1, workers.max(1))
}

/// The connection of a call, and the pid of the server.
fn call(folder: &Path, name: &str, request: &Request) -> io::Result<(OwnedFd, i32)> {
    let call = PrivateFolder::open_existing(folder)?.call(SocketType::SEQPACKET, name)?;
    rustix::io::ioctl_fionbio(&call, false)?;
    let server = Peer::of(&call)?;
    if matches!(request.purpose, Purpose::Serve | Purpose::Hold) && !place::is_safe(server.pid()) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let file = socket::pack(c"dsl-request", &[VERSION.encode(), request.encode()].concat())?;
    socket::seal(&file)?;
    socket::send(&call, b"request", &[file.as_fd()], false)?;
    Ok((call, server.pid()))
}

/// The answer to a call of another purpose than [`Purpose::Serve`]; `None` if there is none in this time.
pub fn ask(call: &OwnedFd, patience: Duration) -> Option<Vec<u8>> {
    if !wait_readable(&[call.as_fd()], patience) {
        return None;
    }
    socket::receive(call).ok().flatten().map(|(bytes, _)| bytes)
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
            number: 7,
        };
        let bytes = request.encode();
        assert_eq!(Request::decode(&bytes), Some(request));
        for end in 0..bytes.len() {
            assert_eq!(Request::decode(&bytes[..end]), None);
        }
    }
}
