"""What launchers are given in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsl.launchers.base import Agents
from dsl.launchers.table import TABLE
from dsl.model.job import Host
from dsl.plan.remote import Remote

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.launchers.base import Start
    from dsl.plan.remote import LauncherName

WORDS = ("-m", "dsl_launcher.node", "--connect", "10.0.0.1:7")
FOLDER = "/run/user/0/dsl"


def make_agents(slots: Mapping[str, int], **fields: Any) -> Agents:
    """Hosts by name with so many slots."""
    hosts = tuple(Host(name, tuple(range(count))) for name, count in slots.items())
    return Agents(**{"words": WORDS, "python": "/opt/py", "hosts": hosts, "folder": FOLDER, **fields})


def starts(launcher: LauncherName, slots: Mapping[str, int], /, **fields: Any) -> tuple[Start, ...]:
    """What a launcher starts. Fields of `Remote` and of `Agents` by their names; one task a slot."""
    of_remote = {name: fields.pop(name) for name in Remote.__match_args__ if name in fields}
    remote = Remote(launcher, **{"per_node": False, "cwd": "/data", **of_remote})
    return TABLE[launcher](remote, make_agents(slots, **fields))


def start(launcher: LauncherName, slots: Mapping[str, int], /, **fields: Any) -> Start:
    """The one command of a launcher that has one."""
    (one,) = starts(launcher, slots, **fields)
    return one
