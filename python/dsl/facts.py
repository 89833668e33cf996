"""What a launch needs to know about its machine, by rooms: all reads of the machine go through a room.

Importing this module costs next to nothing: each room is imported on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from dsl.devices.offered import DeviceFacts
    from dsl.machine.cpus import Cpus
    from dsl.machine.network import Network
    from dsl.machine.this_process import Console, Files, Names, Ports


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
            module, maker = _ROOMS[name]
            made = getattr(__import__(module, fromlist=[maker]), maker)
            room = made() if callable(made) else made
            setattr(self, name, room)
            return room


def this_machine() -> Facts:
    """The machine we run on. Nothing is looked up yet."""
    return Facts()


_ROOMS = {
    "environ": ("os", "environ"),
    "console": ("dsl.machine.this_process", "this_console"),
    "names": ("dsl.machine.this_process", "Names"),
    "files": ("dsl.machine.this_process", "Files"),
    "cpus": ("dsl.machine.cpus", "Cpus"),
    "devices": ("dsl.devices.offered", "DeviceFacts"),
    "ports": ("dsl.machine.this_process", "Ports"),
    "network": ("dsl.machine.network", "Network"),
}
"""Module and name of what makes each room; the environment is there already."""
