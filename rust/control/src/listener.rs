//! A port at which agents connect.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 4096;

/// Where a connection has come from, and to which of our ports.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Origin {
    from: SocketAddr,
    pub(crate) port: u16,
    /// Whether callers must have a job key of the user; `None`: it is not checked.
    pub(crate) keyed: Option<bool>,
}

impl Origin {
    /// The caller's address without its port.
    pub(crate) fn ip(&self) -> IpAddr {
        self.from.ip().to_canonical()
    }

    /// `HOST:PORT`, with an IPv6 address in brackets.
    pub(crate) fn address(&self) -> String {
        SocketAddr::new(self.ip(), self.from.port()).to_string()
    }

    /// Whether only one agent may come for a place. Where members come by themselves, the owner of the hub decides.
    pub(crate) fn has_fixed_places(&self) -> bool {
        self.keyed.is_none()
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
            match listen(SocketAddr::new(place, port)) {
                Ok(socket) => {
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

fn listen(address: SocketAddr) -> Result<TcpListener, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if family == AddressFamily::INET6 {
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}
