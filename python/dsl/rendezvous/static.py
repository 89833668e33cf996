"""Nodes that know beforehand their places, and the address and port where rank 0 listens.

The default port 29500 is used if it is free, and replaced if not. A port that the user names is used, or
refused with the name of its holder.
"""

from __future__ import annotations

from dsl.errors import PortError
from dsl.lists import LAST_PORT
from dsl.model.job import Job, Meeting, Notice
from dsl.model.request import DEFAULT_MASTER_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from dsl.machine.this_process import Ports

    class Rendezvous(Protocol):
        """How the nodes of a job meet."""

        def meet(self, attempt: int, local_world_size: int) -> Meeting:
            """Meet the other nodes for an attempt, counted from 0, as a node with that many workers.

            Raises:
                DslError: the nodes do not meet.
            """


class Static:
    """A job whose nodes never change. It may have only one node.

    Named hosts say how many workers each has. Without them no node can ask another node, so each assumes that
    all have as many workers as itself, as torchrun's static rendezvous does.
    """

    def __init__(self, job: Job, node_rank: int, ports: Ports) -> None:
        self._job = job
        self._node_rank = node_rank
        self._ports = ports

    def meet(self, attempt: int, local_world_size: int) -> Meeting:
        """The meeting of one attempt.

        Raises:
            PortError: the port that the user named is taken, or no port is free.
        """
        job = self._job
        sizes = tuple([len(host.slots) for host in job.hosts]) or (local_world_size,) * job.node_count
        port, stands_in = self._port(attempt)
        notices: tuple[Notice, ...] = ()
        if stands_in:
            notices = (Notice("info", f"master port {DEFAULT_MASTER_PORT} is taken, using {port}"),)
        return Meeting(
            attempt=attempt,
            node_rank=self._node_rank,
            local_world_sizes=sizes,
            address=job.meeting.address,
            port=port,
            round=attempt,
            restarts=attempt,
            notices=notices,
        )

    def _port(self, attempt: int) -> tuple[int, bool]:
        """The port of one attempt, and whether it replaces the default port."""
        asked, shared = self._job.meeting.port, self._job.node_count > 1
        if attempt and asked and not shared and not self._ports.is_free(asked):
            # The job has used this port before. It does not end because another process has taken the port
            # since.
            return self._ports.pick(), False
        return choose_port(asked, shared=shared, ports=self._ports, here=self._node_rank == 0)


def choose_port(asked: int | None, *, shared: bool, ports: Ports, here: bool = True) -> tuple[int, bool]:
    """Return the master port, and whether it replaces the default port because that is taken.

    ``asked`` is the user's port (None: not given; 0: any free one). ``shared``: other nodes must find the
    same port by themselves, so we cannot choose another. ``here``: rank 0 listens on this node; on other
    nodes the port may be in use.

    Raises:
        PortError: not a port, taken, not permitted, or 0 though it is shared.
    """
    if asked is not None and not 0 <= asked <= LAST_PORT:
        raise PortError(f"master port {asked} is none, expected 1 to {LAST_PORT}, or 0 for any free one")
    if asked == 0 and shared:
        raise PortError("master port 0: a job on several nodes needs the same port on each, name one")
    if asked == 0:
        return ports.pick(), False
    port = DEFAULT_MASTER_PORT if asked is None else asked
    if not here or ports.is_free(port):
        return port, False
    if asked is None and not shared:
        return ports.pick(), True
    advice = "choose another, the same on every node" if shared else "choose another, or 0 for any free one"
    raise PortError(f"master port {port} is taken by {ports.holder(port)}; {advice}")
