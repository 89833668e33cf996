"""TCP ports of this machine: which are free, and who holds one.

The probe listens the way a TCPStore does, for an instant.
"""

from __future__ import annotations

import _socket
import os

from dsl.errors import PortError


class Ports:
    """TCP ports of this machine."""

    def is_free(self, port: int) -> bool:
        """See `port_is_free`."""
        return port_is_free(port)

    def pick(self) -> int:
        """See `pick_free_port`."""
        return pick_free_port()

    def holder(self, port: int) -> str:
        """See `name_port_holder`."""
        return name_port_holder(port)


def _listen(port: int) -> _socket.socket:
    """A socket listening on all addresses: IPv6 and IPv4 together, IPv4 alone where there is no IPv6."""
    try:
        return _listen_on(_socket.AF_INET6, "::", port)
    except OSError as error:
        import errno

        if error.errno not in {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}:
            raise
    return _listen_on(_socket.AF_INET, "0.0.0.0", port)  # noqa: S104  as the store will


def _listen_on(family: int, address: str, port: int) -> _socket.socket:
    listener = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        if family == _socket.AF_INET6:
            listener.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def port_is_free(port: int) -> bool:
    """Whether a store could listen on the port now.

    Raises:
        PortError: this user may not listen on it (ports below 1024), or the machine has no network at all.
    """
    try:
        _listen(port).close()
    except OSError as error:
        import errno

        if error.errno == errno.EADDRINUSE:
            return False
        hint = ", choose one above 1023" if error.errno == errno.EACCES else ""
        raise PortError(f"cannot listen on master port {port}: {_reason(error)}{hint}") from None
    return True


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or 0).lower()


def pick_free_port() -> int:
    """A port that the kernel says is free.

    Raises:
        PortError: there is none.
    """
    try:
        listener = _listen(0)
    except OSError as error:
        raise PortError(f"no free master port: {_reason(error)}") from None
    port: int = listener.getsockname()[1]
    listener.close()
    return port


def name_port_holder(port: int) -> str:
    """The process that listens on the port: ``pid 12 (python train.py)``, or what can be said of it."""
    try:
        import psutil
    except ImportError:
        return "another process (psutil, which would name it, is not installed)"
    try:
        listeners = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        pid = next((one.pid for one in listeners if one.laddr and one.laddr.port == port and one.pid), None)
        if pid is None:
            return "a process of another user or container"
        process = psutil.Process(pid)
        command = " ".join(process.cmdline()) or process.name()
    except (psutil.Error, OSError):
        return "another process"
    return f"pid {pid} ({command[:80]})"
