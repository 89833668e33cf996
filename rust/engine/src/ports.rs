//! TCP ports: checks whether a process can listen on a port now.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with, sockopt};

/// Listens on the port for an instant, on all addresses as a `TCPStore` does. Port 0 means any free port.
///
/// Returns the port. An error comes from the kernel: the port is taken, not permitted, or there is no network.
pub fn probe(port: u16) -> io::Result<u16> {
    let six = SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, port, 0, 0));
    let four = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port));
    match listen_at(six) {
        Err(errno) if is_missing(errno) => Ok(listen_at(four)?),
        found => Ok(found?),
    }
}

/// Whether the machine has no addresses of this family.
fn is_missing(errno: Errno) -> bool {
    matches!(errno, Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL)
}

fn listen_at(address: SocketAddr) -> Result<u16, Errno> {
    let family = if address.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let listener = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&listener, true)?;
    if address.is_ipv6() {
        // Accepts IPv4 connections as well.
        sockopt::set_ipv6_v6only(&listener, false)?;
    }
    bind(&listener, &address)?;
    listen(&listener, 1)?;
    let bound = SocketAddr::try_from(getsockname(&listener)?)?;
    Ok(bound.port())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

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
        let four = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
        assert!(listen_at(four).unwrap() >= 1024);
    }
}
