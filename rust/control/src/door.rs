//! The ports of a head: they let in only agents that know their key.
//!
//! A connection shows that it knows the key with its first message. Until we have that message, the connection counts
//! as a stranger's: it may send little, it has some seconds, and the number of such connections is limited.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dsl_engine::poller::Poller;
use dsl_engine::ports::listen_at;
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{Resource, getrlimit};

use crate::connect::why_refused;
use crate::face::Origin;
use crate::frame::{Frame, LONGEST_OF_STRANGERS, Parser};
use crate::inbox::News;
use crate::link::{CALLER, LISTENER, Shared, token};
use crate::loss::{Fault, words};
use crate::strangers::{Strangers, most_callers};
use crate::stream::{
    FEW, HAS_KEY, MAGIC, MANY, OPENING_LEN, PREAMBLE_LEN, Scratch, SecureStream, Stream, TURNED_AWAY, Taken,
    is_transient,
};

/// Seconds that a connection has to show that it knows the key.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How many different refusals the user hears of.
const MOST_WARNINGS: usize = 8;
/// First bytes that a client of torch's store sends.
const TORCH_STORE: &[u8] = b"\x00\xce\xf7\x85\x3c";
/// Connections that are accepted before others are served.
const ACCEPTS: usize = 64;
const PAUSE: Duration = Duration::from_secs(1);
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// A connection that has not shown yet that it knows the key.
struct Caller {
    origin: Origin,
    /// Bytes in clear.
    data: Vec<u8>,
    place: u32,
    state: State,
}

enum State {
    Clear(TcpStream),
    /// The handshake is done; with the bytes that have come since.
    Secure(Stream, Vec<u8>),
}

impl Caller {
    fn socket(&self) -> &TcpStream {
        match &self.state {
            State::Clear(socket) => socket,
            State::Secure(Stream::Secure(stream), _) => &stream.socket,
            State::Secure(Stream::Plain(_), _) => unreachable!("callers come by TCP"),
        }
    }
}

/// A caller that has shown that it knows the key.
pub(crate) struct Admitted {
    pub(crate) id: u64,
    pub(crate) stream: Stream,
    pub(crate) origin: Origin,
    pub(crate) place: u32,
    /// What it has sent.
    pub(crate) data: Vec<u8>,
}

/// What to do with a caller.
enum Next {
    Wait,
    /// End the connection: it does no harm.
    Drop,
    Refuse,
    /// Refuse a caller with another key, for this reason.
    TurnAway(u8),
    Admit,
}

/// The keys, the ports and the callers.
pub(crate) struct Door {
    shared: Arc<Shared>,
    poller: Arc<Poller>,
    listeners: Vec<Listener>,
    callers: HashMap<u64, Caller>,
    strangers: Strangers,
    keys: HashMap<Option<u32>, (Vec<u8>, usize)>,
    warnings: HashSet<String>,
    /// Whether a stranger was refused.
    has_refused: bool,
    paused_until: Option<Instant>,
}

impl Door {
    pub(crate) fn new(shared: Arc<Shared>, poller: Arc<Poller>) -> Self {
        Self {
            shared,
            poller,
            listeners: Vec::new(),
            callers: HashMap::new(),
            strangers: Strangers::new(HANDSHAKE),
            keys: HashMap::new(),
            warnings: HashSet::new(),
            has_refused: false,
            paused_until: None,
        }
    }

    /// Begins to accept connections.
    pub(crate) fn open(&mut self, listener: Listener) {
        // Fails only without memory. Then no agent can connect, and each agent says so.
        let _ = self.poller.watch(&listener.socket, token(listener.id, LISTENER));
        self.listeners.push(listener);
    }

    /// Closes a port, with the connections of its callers.
    pub(crate) fn shut(&mut self, port: u16) {
        let theirs: Vec<u64> = self
            .callers
            .iter()
            .filter(|(_, caller)| caller.origin.port == port)
            .map(|(id, _)| *id)
            .collect();
        for id in theirs {
            self.drop(id);
        }
        self.listeners.retain(|one| {
            if one.port == port {
                self.poller.forget(&one.socket);
            }
            one.port != port
        });
    }

    /// Closes all ports.
    pub(crate) fn close(&mut self) {
        let ports: Vec<u16> = self.listeners.iter().map(|one| one.port).collect();
        for port in ports {
            self.shut(port);
        }
    }

    /// Takes the key of a place, or of all, and goes on with the callers that waited for it. Without a key (empty)
    /// callers wait: those of an agent that is started again would be judged by the key of the last one.
    pub(crate) fn expect(&mut self, place: Option<u32>, key: Vec<u8>, count: usize) {
        if key.is_empty() {
            self.keys.remove(&place);
            return;
        }
        self.keys.insert(place, (key, count));
        let waiting: Vec<u64> = self
            .callers
            .iter()
            .filter(|(_, caller)| matches!(caller.state, State::Clear(_)) && caller.data.len() == OPENING_LEN)
            .map(|(id, _)| *id)
            .collect();
        for id in waiting {
            let next = self.answer(id);
            self.obey(id, &next);
        }
    }

    /// When `expire` has something to do.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.paused_until.into_iter().chain(self.strangers.due()).min()
    }

    /// Refuses the callers that have taken too long, and accepts again after a pause.
    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some(id) = self.strangers.expired(now) {
            self.obey(id, &Next::Refuse);
        }
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
            for one in &self.listeners {
                let _ = self.poller.watch(&one.socket, token(one.id, LISTENER));
            }
        }
    }

    /// Accepts connections at a port; returns those that have something to say at once.
    pub(crate) fn accept(&mut self, listener: u64) -> Vec<u64> {
        let mut accepted = Vec::new();
        for _ in 0..ACCEPTS {
            let Some(one) = self.listeners.iter().find(|one| one.id == listener) else {
                break;
            };
            match one.accept() {
                Ok((socket, origin)) => {
                    let id = self.shared.new_id();
                    if self.poller.watch(&socket, token(id, CALLER)).is_err() {
                        continue;
                    }
                    let caller = Caller {
                        origin,
                        data: Vec::new(),
                        place: 0,
                        state: State::Clear(socket),
                    };
                    self.callers.insert(id, caller);
                    self.strangers.arrive(id, origin.ip(), Instant::now());
                    accepted.push(id);
                }
                Err(error) => {
                    let errno = Errno::from_io_error(&error);
                    if let Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) = errno {
                        self.make_room(&error);
                    }
                    break;
                }
            }
        }
        accepted
    }

    /// Refuses callers that are too many.
    pub(crate) fn thin_out(&mut self) {
        while let Some(id) = self.strangers.too_many(self.most()) {
            self.obey(id, &Next::Refuse);
        }
    }

    fn most(&self) -> usize {
        let expected = self.keys.values().map(|(_, count)| count).sum();
        most_callers(expected, getrlimit(Resource::Nofile).current)
    }

    /// Frees a descriptor for the next caller, or pauses: no descriptor is left to accept it.
    fn make_room(&mut self, error: &std::io::Error) {
        if let Some(id) = self.strangers.least_welcome() {
            self.obey(id, &Next::Refuse);
            return;
        }
        let why = words(error);
        self.shared.inbox.put(News::Warning(format!(
            "an agent that connects cannot be served ({why}): raise the limit of open files (ulimit -n)"
        )));
        for one in &self.listeners {
            self.poller.forget(&one.socket);
        }
        self.paused_until = Some(Instant::now() + PAUSE);
    }

    /// Reads from a caller. Returns the caller when it has shown that it knows the key.
    pub(crate) fn read(&mut self, id: u64, scratch: &mut Scratch) -> Option<Admitted> {
        let next = match self.callers.get_mut(&id)? {
            Caller {
                state: State::Secure(stream, data),
                ..
            } => read_first(stream, data, scratch),
            caller => match read_opening(caller) {
                Next::Admit => self.answer(id),
                next => next,
            },
        };
        if !matches!(next, Next::Admit) {
            self.obey(id, &next);
            return None;
        }
        self.strangers.leave(id);
        let caller = self.callers.remove(&id)?;
        self.poller.forget(caller.socket());
        let State::Secure(mut stream, data) = caller.state else {
            return None;
        };
        if let Stream::Secure(stream) = &mut stream {
            stream.chunk = MANY;
        }
        Some(Admitted {
            id,
            stream,
            origin: caller.origin,
            place: caller.place,
            data,
        })
    }

    /// Answers the first message of the handshake, if a key is known for the place.
    fn answer(&mut self, id: u64) -> Next {
        let Some(caller) = self.callers.get_mut(&id) else {
            return Next::Wait;
        };
        let Some((preamble, _)) = caller.data.split_first_chunk::<PREAMBLE_LEN>() else {
            return Next::Refuse;
        };
        let [.., a, b, c, d] = *preamble;
        let place = u32::from_be_bytes([a, b, c, d]);
        let has_key = place & HAS_KEY != 0;
        caller.place = place & !HAS_KEY;
        let Some((key, _)) = self
            .keys
            .get(&Some(caller.place))
            .or_else(|| self.keys.get(&None))
        else {
            return Next::Wait;
        };
        if caller.origin.keyed.is_some_and(|keyed| keyed != has_key) {
            return Next::TurnAway(if has_key { 1 } else { 2 });
        }
        let State::Clear(socket) = &caller.state else {
            return Next::Wait;
        };
        let Ok(socket) = socket.try_clone() else {
            return Next::Refuse;
        };
        match SecureStream::answer(socket, key, &caller.data) {
            Ok(mut stream) => {
                stream.chunk = FEW;
                let stream = Stream::Secure(Box::new(stream));
                let before = std::mem::replace(&mut caller.state, State::Secure(stream, Vec::new()));
                drop(before);
                self.strangers.answer(id);
                Next::Wait
            }
            Err(Fault::Said(_)) => Next::TurnAway(3),
            Err(Fault::Os(_)) => Next::Refuse,
        }
    }

    fn obey(&mut self, id: u64, next: &Next) {
        match next {
            Next::Wait | Next::Admit => {}
            Next::Drop => {
                self.drop(id);
            }
            Next::Refuse => {
                if let Some(caller) = self.drop(id) {
                    let is_torch = caller.data.starts_with(TORCH_STORE);
                    let (host, port) = (caller.origin.ip(), caller.origin.port);
                    let text = is_torch.then(|| {
                        format!(
                            "{host} was sent away from port {port}, where the nodes meet: it is a torchrun, or \
                             a worker of torch"
                        )
                    });
                    self.warn_of(&caller.origin, text);
                }
            }
            Next::TurnAway(reason) => {
                let Some(caller) = self.callers.get(&id) else {
                    return;
                };
                let origin = caller.origin;
                let mut text = None;
                if origin.keyed.is_some() {
                    // If that fails, the caller does not learn why.
                    let _ = caller.socket().write(&[&TURNED_AWAY[..], &[*reason]].concat());
                    let (host, why) = (origin.ip(), why_refused(*reason).0);
                    text = Some(format!("a node at {host} was refused: {why}"));
                }
                self.drop(id);
                self.warn_of(&origin, text);
            }
        }
    }

    /// Ends a connection so that the kernel keeps nothing of it: a worker may need the port soon.
    fn drop(&mut self, id: u64) -> Option<Caller> {
        self.strangers.leave(id);
        let caller = self.callers.remove(&id)?;
        self.poller.forget(caller.socket());
        let _ = sockopt::set_socket_linger(caller.socket(), Some(Duration::ZERO));
        Some(caller)
    }

    /// Warns the user of a stranger, of strangers of one kind only once.
    pub(crate) fn warn_of(&mut self, origin: &Origin, text: Option<String>) {
        let is_first = !std::mem::replace(&mut self.has_refused, true);
        if text.is_none() && origin.has_fixed_places() && !is_first {
            return;
        }
        let text = text.unwrap_or_else(|| {
            let port = origin.port;
            let from = if origin.has_fixed_places() {
                origin.address()
            } else {
                origin.ip().to_string()
            };
            format!("a stranger at {from} connected to port {port} of this job and was refused")
        });
        if self.warnings.len() < MOST_WARNINGS && self.warnings.insert(text.clone()) {
            self.shared.inbox.put(News::Warning(text));
        }
    }
}

/// Reads the bytes in clear; `Next::Admit` when they are complete.
fn read_opening(caller: &mut Caller) -> Next {
    let State::Clear(socket) = &caller.state else {
        return Next::Wait;
    };
    let mut buffer = [0; OPENING_LEN];
    let is_waiting = caller.data.len() == OPENING_LEN;
    // While its key is not known, an agent sends nothing before our answer.
    let room = if is_waiting {
        1
    } else {
        OPENING_LEN - caller.data.len()
    };
    let count = match (&mut &*socket).read(&mut buffer[..room]) {
        Ok(count) => count,
        Err(error) if is_transient(&error) => return Next::Wait,
        Err(_) => return Next::Refuse,
    };
    if is_waiting {
        return if count == 0 { Next::Drop } else { Next::Refuse };
    }
    caller.data.extend_from_slice(&buffer[..count]);
    let length = caller.data.len();
    if !MAGIC.starts_with(&caller.data[..length.min(MAGIC.len())]) {
        return Next::Refuse;
    }
    match count {
        // An agent that has also reached us at another address ends this connection after its first bytes.
        0 if length >= PREAMBLE_LEN => Next::Drop,
        0 => Next::Refuse,
        _ if length == OPENING_LEN => Next::Admit,
        _ => Next::Wait,
    }
}

/// Reads what comes after the handshake; `Next::Admit` when the first message is complete.
fn read_first(stream: &mut Stream, data: &mut Vec<u8>, scratch: &mut Scratch) -> Next {
    match stream.read(scratch) {
        Ok(Taken::Bytes) => data.extend_from_slice(&scratch.plain),
        Ok(Taken::Nothing) => return Next::Wait,
        Ok(Taken::End) => return Next::Drop,
        Err(_) => return Next::Refuse,
    }
    match Parser::new(LONGEST_OF_STRANGERS).next(data) {
        Ok(Some((Frame::Message(_), _))) => Next::Admit,
        Ok(None) => Next::Wait,
        Ok(Some(_)) | Err(_) => Next::Refuse,
    }
}

/// A listening socket.
pub(crate) struct Listener {
    pub(crate) id: u64,
    pub(crate) socket: TcpListener,
    pub(crate) port: u16,
    keyed: Option<bool>,
}

impl Listener {
    /// Listens at an address; at an empty one on IPv6 and IPv4, as far as there are both.
    pub(crate) fn new(id: u64, address: &str, port: u16, keyed: Option<bool>) -> std::io::Result<Self> {
        let places: Vec<IpAddr> = if address.is_empty() {
            vec![Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()]
        } else {
            vec![address.parse().map_err(|_| Errno::INVAL)?]
        };
        let mut problem: Option<Errno> = None;
        for place in places {
            match listen_at(SocketAddr::new(place, port), BACKLOG) {
                Ok(socket) => {
                    socket.set_nonblocking(true)?;
                    let port = socket.local_addr()?.port();
                    return Ok(Self {
                        id,
                        socket,
                        port,
                        keyed,
                    });
                }
                Err(Errno::ADDRINUSE) => return Err(Errno::ADDRINUSE.into()),
                Err(error) => problem = problem.or(Some(error)),
            }
        }
        Err(problem.unwrap_or(Errno::INVAL).into())
    }

    pub(crate) fn accept(&self) -> std::io::Result<(TcpStream, Origin)> {
        let (socket, from) = self.socket.accept()?;
        socket.set_nonblocking(true)?;
        let origin = Origin {
            from,
            port: self.port,
            keyed: self.keyed,
        };
        Ok((socket, origin))
    }
}
