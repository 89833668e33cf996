//! Carries the bytes of a link: by existing descriptors, or by TCP with an encrypted session.
//!
//! An encrypted session begins in clear with [`MAGIC`] and the place of the agent, by which the head finds the key.
//! The top bit of the place says whether the agent's user has given it a key. Two bytes of length come before each of
//! the two messages of the handshake, and before each later message. After the handshake, only a side that knows the
//! key can go on.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use dsl_engine::os::{duplicate, limit_unsent, take_over};
use dsl_engine::poller::{Interest, Poller};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::pipe::fcntl_setpipe_size;

use crate::frame::Damaged;
use crate::loss::Fault;
use crate::secure::{MAX_MESSAGE, MAX_PLAIN, Role, Session};

/// The first bytes of a call.
pub const MAGIC: &[u8; 4] = b"dsl\x01";
/// `MAGIC` and the place.
pub const PREAMBLE_LEN: usize = 8;
/// Bytes of each of the two messages of the handshake, with their length.
pub(crate) const HANDSHAKE_LEN: usize = 2 + 48;
/// All that an agent sends before the head answers.
pub const OPENING_LEN: usize = PREAMBLE_LEN + HANDSHAKE_LEN;
/// Added to the place by an agent whose user has given it a key for the job.
pub(crate) const HAS_KEY: u32 = 1 << 31;
/// What a head says to a caller with another key, before a byte with the reason.
pub(crate) const TURNED_AWAY: &[u8; 4] = b"dsl\0";
/// What each side writes first on descriptors. Text of any length before it, as from a login shell, is skipped.
pub const MARK: &[u8] = b"\0dsl\x01link\n";

/// Bytes that are read at once, from strangers and from others.
pub(crate) const FEW: usize = 16 << 10;
pub(crate) const MANY: usize = 256 << 10;
/// Bytes of the text before the mark that are kept, to say what came instead of an agent.
const NOISE: usize = 4 << 10;
/// Bytes that a pipe shall hold, so that neither side waits for the other after each write.
pub(crate) const PIPE_BYTES: usize = 256 << 10;
/// Bytes of a connection that the kernel may hold and has not sent.
const UNSENT: u32 = 128 << 10;

/// Buffers for one reading. All links share them.
pub(crate) struct Scratch {
    raw: Vec<u8>,
    /// What was read.
    pub(crate) plain: Vec<u8>,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self {
            raw: vec![0; MANY + 2 + MAX_MESSAGE],
            plain: Vec::new(),
        }
    }

    /// Stands in for buffers that are in use.
    pub(crate) fn empty() -> Self {
        Self {
            raw: Vec::new(),
            plain: Vec::new(),
        }
    }
}

/// The result of a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    Bytes,
    Nothing,
    End,
}

/// A connection.
pub enum Stream {
    /// Existing descriptors.
    Plain(FdStream),
    /// TCP.
    Secure(Box<SecureStream>),
}

impl Stream {
    /// Our address at this end; empty: another program has made the connection.
    pub(crate) fn own_address(&self) -> String {
        match self {
            Self::Plain(_) => String::new(),
            Self::Secure(stream) => stream.own_address.clone(),
        }
    }

    /// Whether another program carries the bytes, such as ssh.
    pub(crate) fn is_carried(&self) -> bool {
        matches!(self, Self::Plain(_))
    }

    pub(crate) fn read_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(stream) => stream.read.fd.as_fd(),
            Self::Secure(stream) => stream.socket.as_fd(),
        }
    }

    /// The descriptor to write to, if it is another one.
    pub(crate) fn write_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Plain(stream) => stream.write.as_ref().map(|end| end.fd.as_fd()),
            Self::Secure(_) => None,
        }
    }

    /// Lets the kernel give up on the other side some time after we do.
    pub(crate) fn tune(&self, silence: Duration) {
        if let Self::Secure(stream) = self {
            stream.tune(silence);
        }
    }

    /// Reads what has arrived into `scratch.plain`.
    pub(crate) fn read(&mut self, scratch: &mut Scratch) -> Result<Taken, Fault> {
        scratch.plain.clear();
        match self {
            Self::Plain(stream) => stream.read(scratch),
            Self::Secure(stream) => stream.read(scratch),
        }
    }

    /// Writes as many of these bytes as there is room for; returns how many.
    pub(crate) fn write(&mut self, data: &[u8]) -> Result<usize, Fault> {
        match self {
            Self::Plain(stream) => stream.write(data),
            Self::Secure(stream) => stream.write(data),
        }
    }

    /// Passes on what `write` has kept back; returns whether the kernel has it all.
    pub(crate) fn is_written(&mut self) -> Result<bool, Fault> {
        match self {
            Self::Plain(stream) => stream.is_written(),
            Self::Secure(stream) => stream.is_written(),
        }
    }

    /// Tells the other side that no more bytes come; returns whether to wait for its end. A close of a TCP connection
    /// with unread bytes would make the kernel throw away what is on its way.
    pub(crate) fn finish(&mut self) -> bool {
        match self {
            Self::Plain(stream) => {
                stream.finish();
                false
            }
            Self::Secure(stream) => stream.socket.shutdown(Shutdown::Write).is_ok(),
        }
    }

    /// Closes the descriptors in this process alone: another process goes on with them.
    pub(crate) fn disown(self) {
        if let Self::Plain(mut stream) = self {
            stream.read.is_ours = false;
            if let Some(end) = &mut stream.write {
                end.is_ours = false;
            }
        }
    }
}

/// A descriptor that other processes may share, so its mode is restored at the end.
struct End {
    fd: OwnedFd,
    was_blocking: bool,
    is_ours: bool,
}

impl End {
    fn new(fd: OwnedFd) -> Result<Self, Errno> {
        let flags = fcntl_getfl(&fd)?;
        fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        Ok(Self {
            fd,
            was_blocking: !flags.contains(OFlags::NONBLOCK),
            is_ours: true,
        })
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if self.is_ours
            && self.was_blocking
            && let Ok(flags) = fcntl_getfl(&self.fd)
        {
            // Fails only for a descriptor that is not open.
            let _ = fcntl_setfl(&self.fd, flags - OFlags::NONBLOCK);
        }
    }
}

/// Two descriptors, or one for both directions.
pub struct FdStream {
    read: End,
    write: Option<End>,
    /// Bytes of the mark that are not written yet.
    owed: &'static [u8],
    has_begun: bool,
    noise: Option<Vec<u8>>,
}

/// Why descriptors cannot carry a link.
#[derive(Debug, thiserror::Error)]
pub enum FdError {
    /// A file has no other side.
    #[error("descriptor {0} is a file: a link needs a pipe or a socket")]
    File(i32),
    /// The kernel refuses.
    #[error("descriptor {0} cannot be used: {1}")]
    Os(i32, std::io::Error),
}

impl FdStream {
    /// Takes over two descriptors, which may be the same one.
    pub fn new(read: i32, write: i32) -> Result<Self, FdError> {
        // After an error they are still the caller's.
        for fd in [read, write] {
            check(fd).map_err(|error| match Errno::from_io_error(&error) {
                Some(Errno::PERM) => FdError::File(fd),
                _ => FdError::Os(fd, error),
            })?;
        }
        let open = |fd: i32| -> Result<End, FdError> {
            let owned = take_over(fd).map_err(|error| FdError::Os(fd, error))?;
            End::new(owned).map_err(|error| FdError::Os(fd, error.into()))
        };
        let read_end = open(read)?;
        let write_end = if read == write { None } else { Some(open(write)?) };
        if let Some(end) = &write_end {
            // Fails if it is no pipe, or the user has too many.
            let _ = fcntl_setpipe_size(&end.fd, PIPE_BYTES);
        }
        Ok(Self {
            read: read_end,
            write: write_end,
            owed: MARK,
            has_begun: false,
            noise: Some(Vec::new()),
        })
    }

    fn read(&mut self, scratch: &mut Scratch) -> Result<Taken, Fault> {
        scratch.plain.reserve(MANY);
        let count = match rustix::io::read(&self.read.fd, rustix::buffer::spare_capacity(&mut scratch.plain))
        {
            Ok(count) => count,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Taken::Nothing),
            Err(error) => return Err(error.into()),
        };
        if let Some(noise) = &mut self.noise {
            noise.extend_from_slice(&scratch.plain);
            // The bytes before were searched when they came.
            let begin = noise.len().saturating_sub(count + MARK.len());
            let mut windows = noise[begin..].windows(MARK.len());
            let Some(at) = windows.position(|window| window == MARK) else {
                if count == 0 {
                    return Err(closed_after(noise));
                }
                noise.drain(..noise.len().saturating_sub(NOISE));
                return Ok(Taken::Nothing);
            };
            scratch.plain.clear();
            scratch.plain.extend_from_slice(&noise[begin + at + MARK.len()..]);
            self.noise = None;
            return Ok(Taken::Bytes);
        }
        Ok(if count == 0 { Taken::End } else { Taken::Bytes })
    }

    fn write(&mut self, data: &[u8]) -> Result<usize, Fault> {
        self.has_begun = true;
        if !self.is_written()? {
            return Ok(0);
        }
        put(self.write.as_ref().unwrap_or(&self.read), data)
    }

    /// Writes the mark before the first bytes: nothing else is ever kept back.
    fn is_written(&mut self) -> Result<bool, Fault> {
        while self.has_begun && !self.owed.is_empty() {
            let count = put(self.write.as_ref().unwrap_or(&self.read), self.owed)?;
            if count == 0 {
                return Ok(false);
            }
            self.owed = &self.owed[count..];
        }
        Ok(true)
    }

    fn finish(&mut self) {
        if self.write.take().is_none() {
            // Fails if it is no socket, or the other side has gone.
            let _ = rustix::net::shutdown(&self.read.fd, rustix::net::Shutdown::Write);
        }
    }
}

fn put(end: &End, data: &[u8]) -> Result<usize, Fault> {
    match rustix::io::write(&end.fd, data) {
        Ok(count) => Ok(count),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(error) => Err(error.into()),
    }
}

/// Whether a descriptor can be waited for.
fn check(fd: i32) -> std::io::Result<()> {
    let copy = duplicate(fd)?;
    let as_io = |error: dsl_engine::Error| match error {
        dsl_engine::Error::Os { source, .. } => source,
        other => std::io::Error::other(other),
    };
    let poller = Poller::new().map_err(as_io)?;
    poller.watch_for(&copy, 0, Interest::default()).map_err(as_io)
}

fn closed_after(noise: &[u8]) -> Fault {
    let text = String::from_utf8_lossy(noise);
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let skip = words.chars().count().saturating_sub(200);
    let last: String = words.chars().skip(skip).collect();
    let said = if last.is_empty() {
        String::new()
    } else {
        format!(
            ": '{}'",
            last.escape_debug()
                .to_string()
                .replace("\\'", "'")
                .replace("\\\"", "\"")
        )
    };
    Damaged(format!("has closed the connection before an agent spoke{said}")).into()
}

/// A TCP connection whose handshake is done.
pub struct SecureStream {
    pub(crate) socket: TcpStream,
    session: Session,
    /// Bytes to read at once.
    pub(crate) chunk: usize,
    own_address: String,
    /// The beginning of a message.
    arrived: Vec<u8>,
    sealed: Vec<u8>,
    sent: usize,
}

impl SecureStream {
    pub(crate) fn new(socket: TcpStream, session: Session) -> std::io::Result<Self> {
        socket.set_nonblocking(true)?;
        let own_address = socket.local_addr()?.ip().to_canonical().to_string();
        Ok(Self {
            socket,
            session,
            chunk: MANY,
            own_address,
            arrived: Vec::new(),
            sealed: Vec::new(),
            sent: 0,
        })
    }

    /// Answers the opening of an agent. The result says whether the bytes were made with the key.
    pub(crate) fn answer(socket: TcpStream, key: &[u8], opening: &[u8]) -> Result<Self, Fault> {
        let unknown = |_| Damaged("does not know the key of this job".into());
        let mut session = Session::new(key, Role::Responder).map_err(unknown)?;
        session
            .read_handshake(&opening[PREAMBLE_LEN + 2..])
            .map_err(unknown)?;
        let message = session.handshake().map_err(unknown)?;
        (&socket).write_all(&with_length(&message))?;
        Ok(Self::new(socket, session)?)
    }

    fn tune(&self, silence: Duration) {
        let socket = &self.socket;
        let ms = (silence.as_millis() as u32).saturating_mul(2).max(1);
        let part = |divisor: u32| Duration::from_secs(u64::from((ms / divisor).max(1)));
        // A kernel without one of these options does without.
        let _ = socket.set_nodelay(true);
        let _ = sockopt::set_tcp_user_timeout(socket, ms);
        let _ = sockopt::set_socket_keepalive(socket, true);
        let _ = sockopt::set_tcp_keepidle(socket, part(2000));
        let _ = sockopt::set_tcp_keepintvl(socket, part(6000));
        let _ = sockopt::set_tcp_keepcnt(socket, 3);
        let _ = limit_unsent(socket, UNSENT);
    }

    fn read(&mut self, scratch: &mut Scratch) -> Result<Taken, Fault> {
        let begin = self.arrived.len();
        scratch.raw[..begin].copy_from_slice(&self.arrived);
        let room = &mut scratch.raw[begin..begin + self.chunk];
        let count = match self.socket.read(room) {
            Ok(0) => return Ok(Taken::End),
            Ok(count) => count,
            Err(error) if is_transient(&error) => return Ok(Taken::Nothing),
            Err(error) => return Err(error.into()),
        };
        let mut rest = &scratch.raw[..begin + count];
        while let Some((length, after)) = rest.split_first_chunk::<2>() {
            let Some((message, after)) = after.split_at_checked(u16::from_be_bytes(*length).into()) else {
                break;
            };
            let at = scratch.plain.len();
            scratch.plain.resize(at + Session::opened_len(message.len()), 0);
            self.session
                .open(message, &mut scratch.plain[at..])
                .map_err(|_| {
                    Damaged("has sent something that was not made with the key of this job".into())
                })?;
            rest = after;
        }
        if rest.is_empty() {
            self.arrived = Vec::new();
        } else {
            self.arrived.clear();
            self.arrived.extend_from_slice(rest);
        }
        Ok(if scratch.plain.is_empty() {
            Taken::Nothing
        } else {
            Taken::Bytes
        })
    }

    /// Encrypts and sends up to one message, if the one before has gone.
    fn write(&mut self, data: &[u8]) -> Result<usize, Fault> {
        if !self.is_written()? {
            return Ok(0);
        }
        let piece = &data[..data.len().min(MAX_PLAIN)];
        let broken = |error: crate::secure::Error| Damaged(format!("cannot be sent anything: {error}"));
        let length = Session::sealed_len(piece.len()).map_err(broken)?;
        self.sealed.resize(2 + length, 0);
        self.sent = 0;
        self.sealed[..2].copy_from_slice(&(length as u16).to_be_bytes());
        self.session.seal(piece, &mut self.sealed[2..]).map_err(broken)?;
        self.is_written()?;
        Ok(piece.len())
    }

    fn is_written(&mut self) -> Result<bool, Fault> {
        while self.sent < self.sealed.len() {
            match self.socket.write(&self.sealed[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if is_transient(&error) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        self.sealed.clear();
        if self.sealed.capacity() > FEW {
            self.sealed = Vec::new();
        }
        self.sent = 0;
        Ok(true)
    }
}

pub(crate) fn with_length(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u16).to_be_bytes(), message].concat()
}

pub(crate) fn is_transient(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted
    )
}
