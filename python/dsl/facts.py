"""What a launch needs to know about its machine, by rooms: all reads of the machine go through a room.

Importing this module costs next to nothing: each room is imported on first use.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from dsl.devices.offered import DeviceFacts
    from dsl.machine import Console, Files, Names, Ports
    from dsl.machine.kernel import Cpus
    from dsl.machine.network import Network


class Facts:
    """This machine, read only on demand. Tests pass rooms of their own, by name."""

    environ: Mapping[str, str]
    """The environment of this process, without what ``--stand-in`` has put into it."""
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
            module, maker = _ROOMS[name]
            made = getattr(__import__(module, fromlist=[maker]), maker)
            room = made() if callable(made) else made
            setattr(self, name, room)
            return room


def own_environ() -> Mapping[str, str]:
    """The environment of this process, without what ``--stand-in`` has put into it."""
    if (folder := os.environ.get("DSL_STAND_IN")) is None:
        return os.environ
    found = {name: value for name, value in os.environ.items() if not name.startswith("DSL_STAND_IN")}
    for name in ("PATH", "PYTHONPATH"):
        rest = [place for place in found.pop(name, "").split(os.pathsep) if place != folder]
        if any(rest):
            found[name] = os.pathsep.join(rest)
    return found


def this_machine() -> Facts:
    """The machine we run on. Nothing is looked up yet."""
    return Facts()


_ROOMS = {
    "environ": ("dsl.facts", "own_environ"),
    "console": ("dsl.machine", "this_console"),
    "names": ("dsl.machine", "Names"),
    "files": ("dsl.machine", "Files"),
    "cpus": ("dsl.machine.kernel", "Cpus"),
    "devices": ("dsl.devices.offered", "DeviceFacts"),
    "ports": ("dsl.machine", "Ports"),
    "network": ("dsl.machine.network", "Network"),
}
"""Module and name of what makes each room."""
