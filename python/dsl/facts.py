"""What a launch needs to know of the machine it is planned on, a room each: the only readers of the machine.

Importing this costs next to nothing, and a room is imported when somebody asks for something in it.
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
    """This machine, looked at where and when somebody asks. Tests give rooms of their own, by name."""

    environ: Mapping[str, str]
    """The environment of this process."""
    console: Console
    """What its own streams are."""
    names: Names
    """What the machine, the process and things that are made anew are called."""
    files: Files
    """Text of files, and where they lie."""
    cpus: Cpus
    """CPUs that we may use, and how they lie."""
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
            """Make a room that has not been asked for before."""
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
