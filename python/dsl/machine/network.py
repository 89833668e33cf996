"""The network as this machine sees it: its own addresses, the addresses of names, and the routes of packets.

No packet is sent to find a route: a UDP socket is connected, but nothing is written to it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from dsl.model.health import Interface

ANY_PORT = 9
LOOPBACK = "127.0.0.1"
LONGEST_LOOK_S = 5.0
"""Longest time for looking up names: a name server that does not answer takes seconds for each name."""
INNER = ("docker", "br-", "virbr", "cni", "flannel", "veth", "lxc", "lxd", "podman", "cali")
"""Prefixes of the interfaces of container software, whose addresses other machines may have, too."""


def own_addresses() -> tuple[str, ...]:
    """Addresses of this machine's active interfaces; those that other machines most likely reach come first.

    Loopback is left out. IPv4 comes before IPv6, then come interfaces of container software, and link-local
    addresses last. Empty if psutil is not installed.
    """
    found = [face for face in interfaces() if face.is_up]
    return sort_addresses([(face.name, address) for face in found for address in face.addresses])


def interfaces() -> tuple[Interface, ...]:
    """The network interfaces of this machine; none if psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return ()
    import socket

    from dsl.model.health import Interface

    families = (socket.AF_INET, socket.AF_INET6)
    try:
        states, entries = psutil.net_if_stats(), psutil.net_if_addrs()
    except OSError:
        return ()
    found = []
    for name, entry in entries.items():
        addresses = tuple([one.address for one in entry if one.family in families])
        mtu, is_up = (states[name].mtu, states[name].isup) if name in states else (0, True)
        found.append(Interface(name, mtu, is_up, addresses))
    return tuple(found)


def sort_addresses(found: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Sort pairs of interface and address as `own_addresses` describes; return each address once."""
    outer = [pair for pair in found if not is_loopback(pair[1])]
    outer.sort(key=lambda pair: (_is_link_local(pair[1]), pair[0].startswith(INNER), ":" in pair[1]))
    return tuple(dict.fromkeys([address for _, address in outer]))


def is_loopback(address: str) -> bool:
    """Whether an address always means the local machine."""
    return address.startswith(("127.", "::ffff:127.")) or address in ("::1", "localhost")


def _is_link_local(address: str) -> bool:
    return address.lower().startswith(("fe80:", "169.254."))


def resolve(name: str) -> tuple[str, ...]:
    """The addresses of a name, in the order of the resolver; empty if it has none."""
    import socket

    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys([str(address[0]) for *_, address in found]))


def is_own_address(address: str) -> bool:
    """Whether an address is one of this machine."""
    return _try_socket(address, "bind")[1] == ""


def why_unreachable(address: str) -> str:
    """The kernel's reason why no packet can go to an address; empty if there is a route."""
    return _try_socket(address, "connect")[1]


def source_address(address: str) -> str:
    """The address of this machine from which packets to an address would go; empty if there is no way."""
    return _try_socket(address, "connect")[0]


def _try_socket(address: str, method: Literal["bind", "connect"]) -> tuple[str, str]:
    """Our end of a UDP socket that takes this address, or empty; and why it cannot take it, or empty."""
    import socket

    port = 0 if method == "bind" else ANY_PORT
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        family, kind, _, _, target = found[0]
        with socket.socket(family, kind) as probe:
            getattr(probe, method)(target)
            return str(probe.getsockname()[0]), ""
    except (socket.gaierror, UnicodeError):
        return "", "it is no address"
    except OSError as error:
        return "", os.strerror(error.errno or 0).lower()


def addresses_toward(names: Sequence[str], master_address: str = "") -> tuple[str, ...]:
    """The addresses by which these hosts can reach this machine, the best first, each once.

    First come the addresses from which packets to the hosts would go; the one for most hosts is the first.
    All other addresses of this machine follow if the name of a host is unknown here (an alias of ssh), or if
    there is no route to a host. If all hosts are this machine, loopback comes last. ``master_address``: the
    user's address for the first host; it comes before all others if that host is this machine. After
    `LONGEST_LOOK_S` no more names are looked up.
    """
    from time import monotonic

    end_s = monotonic() + LONGEST_LOOK_S
    counts: dict[str, int] = {}
    unknown = others = 0
    is_first_own = False
    for place, name in enumerate(names):
        found = resolve(name.rpartition("@")[2]) if monotonic() < end_s else ()
        if any(is_own_address(address) for address in found):
            is_first_own = is_first_own or place == 0
            continue
        others += 1
        source = next(filter(None, map(source_address, found)), "")
        if source and not is_loopback(source):
            counts[source] = counts.get(source, 0) + 1
        else:
            unknown += 1
    best = sorted(counts, key=lambda address: -counts[address])
    if unknown or not best:
        best += own_addresses()
    if not others:
        best.append(LOOPBACK)
    if master_address and is_first_own and (not others or not is_loopback(master_address)):
        best.insert(0, master_address)
    return tuple(dict.fromkeys(best))


def machine_identity() -> str:
    """A text that is equal for two agents only if they run on the same machine, or in the same container.

    It consists of the kernel's boot id, the network namespace and the name of the machine: containers have
    names and networks of their own. Empty if the kernel does not tell.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return ""
    return f"{boot} {network} {os.uname().nodename}"


class Network:
    """The network as this machine sees it."""

    addresses = staticmethod(own_addresses)
    resolve = staticmethod(resolve)
    is_own = staticmethod(is_own_address)
    why_unreachable = staticmethod(why_unreachable)
    addresses_toward = staticmethod(addresses_toward)
    identity = staticmethod(machine_identity)
