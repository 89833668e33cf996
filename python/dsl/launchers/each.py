"""Elastic jobs: one program of the launcher for each host, so that a lost host can be reached again alone.

A program that reaches all hosts at once may end when it loses the first host, as mpirun does. And no such
program starts an agent again on a lost host.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.launchers.base import FIRST_PLACE
from dsl.launchers.table import TABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.launchers.base import Agents, Start
    from dsl.model.remote import Remote


def each_host(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The commands that start an agent on every host: one for each host, in the order of the hosts.

    Raises:
        HostNameError: the launcher cannot be given the name of a host.
    """
    starts = []
    for place, host in enumerate(agents.hosts):
        mine = replace(
            agents,
            hosts=(host,),
            words=(*agents.words, FIRST_PLACE, str(place)),
            folder=f"{agents.folder}/{place}",
        )
        pythons = remote.pythons[place : place + 1]
        (start,) = TABLE[remote.launcher](replace(remote, pythons=pythons, hostfile=""), mine)
        starts.append(replace(start, node_rank=place, speaks=False))
    return tuple(starts)
