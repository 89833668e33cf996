//! TCP ports: checks whether a process can listen on a port now.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with, sockopt};

/// Listens on the port for an instant, on all addresses as a `TCPStore` does. Port 0 means any free port.
///
/// Returns the port. An error comes from the kernel: the port is taken, not permitted, or there is no network.
pub fn probe(port: u16) -> io::Result<u16> {
    let at = |address: IpAddr| listen_at(SocketAddr::new(address, port), 1);
    let listener = match at(Ipv6Addr::UNSPECIFIED.into()) {
        Err(errno) if is_missing(errno) => at(Ipv4Addr::UNSPECIFIED.into()),
        found => found,
    }?;
    Ok(listener.local_addr()?.port())
}

/// Whether the machine has no addresses of this family.
fn is_missing(errno: Errno) -> bool {
    matches!(errno, Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL)
}

/// Listens at an address, at an unspecified one of IPv6 for connections by IPv4, too. Up to `backlog` of them may wait.
pub fn listen_at(address: SocketAddr, backlog: i32) -> Result<TcpListener, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    bind(&socket, &address)?;
    listen(&socket, backlog)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_refused_while_somebody_listens_there_on_one_address_or_all() {
        for address in ["127.0.0.1", "0.0.0.0"] {
            let listener = TcpListener::bind((address, 0)).unwrap();
            let port = listener.local_addr().unwrap().port();
            assert_eq!(probe(port).unwrap_err().kind(), io::ErrorKind::AddrInUse);
            drop(listener);
            assert_eq!(probe(port).unwrap(), port);
        }
    }

    #[test]
    fn zero_gives_a_port_that_is_free() {
        let port = probe(0).unwrap();
        assert!(port >= 1024);
        assert_eq!(probe(port).unwrap(), port);
    }

    #[test]
    fn a_machine_without_one_family_is_asked_for_the_other() {
        assert!(is_missing(Errno::AFNOSUPPORT));
        assert!(!is_missing(Errno::ADDRINUSE));
        let four = listen_at((Ipv4Addr::UNSPECIFIED, 0).into(), 1).unwrap();
        assert!(four.local_addr().unwrap().port() >= 1024);
    }
}
