"""``--launcher ssh``: one ssh for each host; its agent talks to the head over the streams of that ssh."""

from __future__ import annotations

from dsl.launchers.base import PLACE, Start
from dsl.launchers.words import HOST_FILE, bare, host_names, pythons_of, shell_word, sourced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.launchers.base import Agents
    from dsl.model.remote import Remote

# No terminal, no forwarding, no password prompt. ssh may use an existing shared connection, but must not make
# one: it would outlive the job, or end with the job while others use it.
OPTIONS = (
    *("-T", "-x", "-a", "-e", "none"),
    *("-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no"),
)

CONNECT_TIMEOUT_S = 15

SILENCES = 3
"""Unanswered keep-alive messages after which ssh gives up; all of them fit into the heartbeat."""


def ssh(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The commands that start an agent on every host.

    ssh uses the first value of an option, so the user's words come first.

    Agents with a key in `Agents.variables` connect by themselves, and their ssh ends. One program starts
    these agents, `Remote.fanout` at a time.

    Raises:
        HostNameError: the name of a host means something else to ssh.
    """
    stays_behind = bool(agents.variables)
    pythons = pythons_of(remote, agents)
    names = host_names(agents, "ssh", also="@:%[]+")
    times = (
        *("-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"),
        *("-o", f"ServerAliveInterval={alive_s(remote.heartbeat_s)}"),
        *("-o", f"ServerAliveCountMax={SILENCES}"),
    )
    port = () if remote.ssh_port is None else ("-p", str(remote.ssh_port))
    options = (*remote.args, *OPTIONS, *times, *port)
    starts = []
    for node_rank, name in enumerate(names):
        detach = ("--detach",) if stays_behind else ()
        words = (pythons[node_rank], *agents.words, PLACE, str(node_rank), *detach)
        line = " ".join(map(shell_word, sourced(remote, words)))
        argv = ("ssh", *options, bare(name), f"exec {line}")
        starts.append(Start(argv=argv, node_rank=node_rank, speaks=True))
    return (_fanned(remote, agents, starts),) if stays_behind else tuple(starts)


def _fanned(remote: Remote, agents: Agents, starts: Sequence[Start]) -> Start:
    """One program that runs these commands, and sends each the key."""
    from json import dumps

    path = f"{agents.folder}/{HOST_FILE}.json"
    text = dumps({"at_once": remote.fanout, "commands": [list(start.argv) for start in starts]})
    return Start(
        argv=(agents.python, "-m", "dsl.fanout", path),
        env=agents.variables,
        files=((path, text),),
        lingers=True,
    )


def alive_s(heartbeat_s: float) -> int:
    """Whole seconds between ssh's keep-alive messages; 0: it sends none."""
    return max(1, int(heartbeat_s / SILENCES)) if heartbeat_s > 0 else 0
