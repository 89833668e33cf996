"""What a launch needs to know about its machine, by rooms: all reads of the machine go through a room.

Importing this module costs next to nothing: each room is imported on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from dsl.devices.facts import DeviceFacts
    from dsl.machine.cpus import Cpus
    from dsl.machine.network import Network
    from dsl.machine.ports import Ports
    from dsl.machine.process import Console, Files, Names


class Facts:
    """This machine, read only on demand. Tests pass rooms of their own, by name."""

    environ: Mapping[str, str]
    """The environment of this process."""
    console: Console
    """What the standard streams of this process are."""
    names: Names
    """Names of the machine and the process, and new names for a run."""
    files: Files
    """Files, programs and directories."""
    cpus: Cpus
    """The CPUs that this process may use, and their topology."""
    devices: DeviceFacts
    """Accelerators."""
    ports: Ports
    """TCP ports."""
    network: Network
    """Addresses, names and routes."""

    def __init__(self, **rooms: Any) -> None:
        for name, room in rooms.items():
            if name not in _ROOMS:
                raise TypeError(f"{name} is no room of Facts, which has {', '.join(_ROOMS)}")
            setattr(self, name, room)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Make a room on first use."""
            if name not in _ROOMS:
                raise AttributeError(f"Facts has no room {name}")
            room = _ROOMS[name]()
            setattr(self, name, room)
            return room


def this_machine() -> Facts:
    """The machine we run on. Nothing is looked up yet."""
    return Facts()


def _environ() -> Mapping[str, str]:
    from os import environ

    return environ


def _console() -> Console:
    from dsl.machine.process import this_console

    return this_console()


def _names() -> Names:
    from dsl.machine.process import Names

    return Names()


def _files() -> Files:
    from dsl.machine.process import Files

    return Files()


def _cpus() -> Cpus:
    from dsl.machine.cpus import Cpus

    return Cpus()


def _devices() -> DeviceFacts:
    from dsl.devices.facts import DeviceFacts

    return DeviceFacts()


def _ports() -> Ports:
    from dsl.machine.ports import Ports

    return Ports()


def _network() -> Network:
    from dsl.machine.network import Network

    return Network()


_ROOMS: dict[str, Callable[[], object]] = {
    "environ": _environ,
    "console": _console,
    "names": _names,
    "files": _files,
    "cpus": _cpus,
    "devices": _devices,
    "ports": _ports,
    "network": _network,
}
