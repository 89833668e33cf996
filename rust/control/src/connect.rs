//! Connects an agent to the head of its job.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use thiserror::Error;

use crate::loss::{seconds, words};
use crate::secure::{Role, Session};
use crate::stream::{HANDSHAKE_LEN, HAS_KEY, MAGIC, SecureStream, TURNED_AWAY, is_transient, with_length};

const NEXT_AFTER: Duration = Duration::from_millis(250);
const AGAIN_AFTER: Duration = Duration::from_millis(250);
const AGAIN_AT_MOST: Duration = Duration::from_secs(2);
/// How often a caller may look for signals.
const SLICE: Duration = Duration::from_millis(200);

/// Why a head was not reached.
#[derive(Debug, Error, PartialEq)]
#[expect(missing_docs, reason = "each message says what it is about")]
pub enum ConnectError {
    #[error("{0:?} is no address: HOST:PORT, and an IPv6 address in brackets")]
    Address(String),
    #[error("the head of the job has no address")]
    NoAddress,
    #[error("the head of the job cannot be reached within {time}: {1}", time = seconds(*.0))]
    Timeout(Duration, String),
    #[error("{0} refuses this node: {1}")]
    Refused(String, &'static str),
    #[error("{0}")]
    Session(String),
    #[error("interrupted")]
    Interrupted,
}

/// Why keys do not fit: for the user of the side that refuses, and for the user of the side that calls.
pub(crate) fn why_refused(reason: u8) -> (&'static str, &'static str) {
    match reason {
        1 => (
            "it has a DSL_JOB_KEY, and this node has none",
            "this node has a DSL_JOB_KEY, and the other side has none: give all nodes the same one, or none",
        ),
        2 => (
            "it has no DSL_JOB_KEY, and this node has one",
            "this node has no DSL_JOB_KEY, and the other side has one: give all nodes the same one",
        ),
        3 => (
            "it has another DSL_JOB_KEY or --rdzv-id than this node",
            "the other side has another DSL_JOB_KEY or --rdzv-id: give all nodes the same ones",
        ),
        _ => ("unknown", "unknown"),
    }
}

/// How an agent shows who it is.
#[derive(Debug, Clone, Copy)]
pub struct Caller<'key> {
    /// The key that the head expects of the place.
    pub key: &'key [u8],
    /// The place.
    pub place: u32,
    /// Whether the user has given the key.
    pub keyed: bool,
}

/// One address of the head, tried again and again.
struct Attempt<'key> {
    address: String,
    host: String,
    port: u16,
    caller: Caller<'key>,
    due: Instant,
    pause: Duration,
    has_begun: bool,
    problem: String,
    socket: Option<TcpStream>,
    session: Option<Session>,
    answer: Vec<u8>,
}

impl Attempt<'_> {
    fn begin(&mut self) {
        self.has_begun = true;
        self.answer.clear();
        self.session = None;
        match self.open() {
            Ok(socket) => self.socket = Some(socket),
            Err(error) => self.fail(words(&error)),
        }
    }

    fn open(&self) -> std::io::Result<TcpStream> {
        let found = (self.host.as_str(), self.port).to_socket_addrs()?.next();
        let address = found.ok_or(Errno::ADDRNOTAVAIL)?;
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        sockopt::set_tcp_nodelay(&socket, true)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket.into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Gives up until later.
    fn fail(&mut self, problem: String) {
        self.socket = None;
        self.problem = problem;
        self.due = Instant::now() + self.pause;
        self.pause = (2 * self.pause).min(AGAIN_AT_MOST);
    }

    /// Does what can be done now; returns the stream when it is ready.
    fn go_on(&mut self) -> Result<Option<SecureStream>, ConnectError> {
        let Some(socket) = self.socket.take() else {
            return Ok(None);
        };
        let result = if self.session.is_none() {
            self.speak(&socket)
        } else {
            self.hear(&socket)
        };
        match result {
            Ok(Heard::NotYet) => self.socket = Some(socket),
            Ok(Heard::All) => {
                let Some(mut session) = self.session.take() else {
                    return Ok(None);
                };
                if session.read_handshake(&self.answer[2..]).is_err() {
                    self.fail("the program there does not know the key of this job".into());
                } else {
                    match SecureStream::new(socket, session) {
                        Ok(stream) => return Ok(Some(stream)),
                        Err(error) => self.fail(words(&error)),
                    }
                }
            }
            Ok(Heard::Refusal(reason)) => {
                let why = why_refused(reason).1;
                return Err(ConnectError::Refused(self.address.clone(), why));
            }
            Err(error) if is_transient(&error) => self.socket = Some(socket),
            Err(error) if has_closed(&error) && self.session.is_some() => {
                self.fail("it has closed the connection".into());
            }
            Err(error) => self.fail(words(&error)),
        }
        Ok(None)
    }

    fn speak(&mut self, socket: &TcpStream) -> std::io::Result<Heard> {
        if let Some(error) = socket.take_error()? {
            return Err(error);
        }
        // The kernel may choose the port that we call for our own end.
        if socket.local_addr()? == socket.peer_addr()? {
            return Err(Errno::CONNREFUSED.into());
        }
        let mut session = Session::new(self.caller.key, Role::Initiator).map_err(std::io::Error::other)?;
        let first = session.handshake().map_err(std::io::Error::other)?;
        let place = self.caller.place | if self.caller.keyed { HAS_KEY } else { 0 };
        let opening = [MAGIC, &place.to_be_bytes()[..], &with_length(&first)].concat();
        (&mut &*socket).write_all(&opening)?;
        self.session = Some(session);
        self.problem = "it does not answer".into();
        Ok(Heard::NotYet)
    }

    fn hear(&mut self, socket: &TcpStream) -> std::io::Result<Heard> {
        let mut buffer = [0; HANDSHAKE_LEN];
        let room = HANDSHAKE_LEN - self.answer.len();
        let count = (&mut &*socket).read(&mut buffer[..room])?;
        self.answer.extend_from_slice(&buffer[..count]);
        if let Some([reason, ..]) = self.answer.strip_prefix(TURNED_AWAY) {
            return Ok(Heard::Refusal(*reason));
        }
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        Ok(if self.answer.len() == HANDSHAKE_LEN {
            Heard::All
        } else {
            Heard::NotYet
        })
    }
}

fn has_closed(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset)
}

enum Heard {
    NotYet,
    All,
    Refusal(u8),
}

/// Connects to the head at the first of its addresses that answers. All are tried again and again; names are looked up
/// last. `pending` is called now and then; if it returns true, the call ends.
pub fn connect(
    addresses: &[String],
    caller: Caller<'_>,
    timeout: Duration,
    mut pending: impl FnMut() -> bool,
) -> Result<SecureStream, ConnectError> {
    // A wrong key is not the other side's fault.
    Session::new(caller.key, Role::Initiator).map_err(|error| ConnectError::Session(error.to_string()))?;
    let begin = Instant::now();
    let deadline = begin + timeout;
    let mut attempts = Vec::new();
    for address in addresses {
        let (host, port) = split_address(address)?;
        attempts.push(Attempt {
            address: address.clone(),
            host,
            port,
            caller,
            due: deadline,
            pause: AGAIN_AFTER,
            has_begun: false,
            problem: "no answer".into(),
            socket: None,
            session: None,
            answer: Vec::new(),
        });
    }
    attempts.sort_by_key(|one| one.host.parse::<std::net::IpAddr>().is_err());
    attempts.first_mut().ok_or(ConnectError::NoAddress)?.due = begin;
    loop {
        let now = Instant::now();
        if now >= deadline {
            let problems: Vec<String> = attempts
                .iter()
                .map(|one| format!("{} ({})", one.address, one.problem))
                .collect();
            return Err(ConnectError::Timeout(timeout, problems.join(", ")));
        }
        if pending() {
            return Err(ConnectError::Interrupted);
        }
        for at in 0..attempts.len() {
            let one = &mut attempts[at];
            if one.socket.is_none() && one.due <= now {
                let is_first_time = !one.has_begun;
                one.begin();
                let pause = if one.socket.is_some() {
                    NEXT_AFTER
                } else {
                    Duration::ZERO
                };
                if is_first_time && let Some(next) = attempts.get_mut(at + 1) {
                    next.due = now + pause;
                }
            }
        }
        if let Some(stream) = wait(&mut attempts, deadline)? {
            return Ok(stream);
        }
    }
}

/// Waits until something can be done, and does it.
fn wait(attempts: &mut [Attempt<'_>], deadline: Instant) -> Result<Option<SecureStream>, ConnectError> {
    let now = Instant::now();
    let idle = attempts.iter().filter(|one| one.socket.is_none());
    let next = idle.map(|one| one.due).min().unwrap_or(deadline).min(deadline);
    let left = next.saturating_duration_since(now).min(SLICE) + Duration::from_millis(1);
    let mut polled = Vec::new();
    let mut whose = Vec::new();
    for (at, one) in attempts.iter().enumerate() {
        if let Some(socket) = &one.socket {
            let flags = if one.session.is_some() {
                PollFlags::IN
            } else {
                PollFlags::OUT
            };
            polled.push(PollFd::new(socket, flags));
            whose.push(at);
        }
    }
    // Interrupted or not, the loop looks again.
    let _ = poll(&mut polled, Timespec::try_from(left).ok().as_ref());
    let ready: Vec<usize> = whose
        .iter()
        .zip(&polled)
        .filter(|(_, polled)| !polled.revents().is_empty())
        .map(|(at, _)| *at)
        .collect();
    drop(polled);
    for at in ready {
        if let Some(stream) = attempts[at].go_on()? {
            return Ok(Some(stream));
        }
        if attempts[at].socket.is_none()
            && let Some(other) = attempts.iter_mut().find(|one| !one.has_begun)
        {
            other.due = now;
        }
    }
    Ok(None)
}

fn split_address(text: &str) -> Result<(String, u16), ConnectError> {
    let parts = text.rsplit_once(':').and_then(|(host, port)| {
        let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
        let port = port.parse().ok().filter(|port| is_number && *port > 0)?;
        let host = host.strip_prefix('[').unwrap_or(host);
        let host = host.strip_suffix(']').unwrap_or(host);
        (!host.is_empty()).then(|| (host.to_owned(), port))
    });
    parts.ok_or_else(|| ConnectError::Address(text.to_owned()))
}
