"""TCP ports of this machine: which ports are free, and which process holds a port.

To test a port, the extension listens on it for an instant, as a TCPStore does. Importing Python's `socket`
would take half a millisecond.
"""

from __future__ import annotations

import os

from dsl._core import probe_port
from dsl.errors import PortError

OWN_PORTS = range(20000, 29000)
TRIES = 100


def port_is_free(port: int) -> bool:
    """Whether a store could listen on the port now.

    Raises:
        PortError: this user may not listen on it (ports below 1024), or the machine has no network at all.
    """
    try:
        probe_port(port)
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
    """A free port, if possible below the range from which the kernel gives ports to connections.

    A script may import for seconds before it listens. Meanwhile a connection of any program could take a
    port of the kernel's range.

    Raises:
        PortError: there is no free port.
    """
    for _ in range(TRIES):
        port = OWN_PORTS[int.from_bytes(os.urandom(4), "big") % len(OWN_PORTS)]
        if port_is_free(port):
            return port
    try:
        return probe_port(0)
    except OSError as error:
        raise PortError(f"no free master port: {_reason(error)}") from None


def name_port_holder(port: int) -> str:
    """The process that listens on the port: ``pid 12 (python train.py)``, or a vaguer description."""
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


class Ports:
    """TCP ports of this machine."""

    is_free = staticmethod(port_is_free)
    pick = staticmethod(pick_free_port)
    holder = staticmethod(name_port_holder)
