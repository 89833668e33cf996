"""``--launcher ssh``: one ssh for each host, over whose own stream its agent talks."""

from __future__ import annotations

from dsl.launchers.base import PLACE, Start
from dsl.launchers.words import bare, host_names, pythons_of, shell_word, sourced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.launchers.base import Agents
    from dsl.model.remote import Remote

# No terminal, no forwarding of anything, nobody to type a password. A connection that others share may be
# used, but none is left behind: it would outlive the job, or the end of the job would end theirs.
OPTIONS = (
    *("-T", "-x", "-a", "-e", "none"),
    *("-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no"),
)

CONNECT_TIMEOUT_S = 15

SILENCES = 3
"""Unanswered questions after which ssh gives up; all of them fit into the heartbeat."""


def ssh(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """Ask for an agent on every host. ssh keeps the first of two settings: the user's words come first.

    Raises:
        HostNameError: the name of a host means something else to ssh.
    """
    if agents.variables:
        raise ValueError("ssh carries no variables: they go over its stream")
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
        words = (pythons[node_rank], *agents.words, PLACE, str(node_rank))
        line = " ".join(map(shell_word, sourced(remote, words)))
        argv = ("ssh", *options, bare(name), f"exec {line}")
        starts.append(Start(argv=argv, node_rank=node_rank, speaks=True))
    return tuple(starts)


def alive_s(heartbeat_s: float) -> int:
    """Whole seconds between ssh's own questions; 0: it asks none."""
    return max(1, int(heartbeat_s / SILENCES)) if heartbeat_s > 0 else 0
