"""One program of the launcher for each host, so that one host can be reached alone.

A program that reaches all hosts at once may end when it loses the first host, as mpirun does. And no such
program starts an agent again on a lost host.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.launchers.base import FIRST_PLACE, Start
from dsl.launchers.table import TABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.launchers.base import Agents
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
        labels = tuple([(label, place) for label, _ in start.labels])
        starts.append(replace(start, node_rank=place, labels=labels))
    return tuple(starts)


def kept(starts: Sequence[Start], agents: Agents, at_once: int = 0) -> Start:
    """One command that runs these commands, one for each host: see `dsl.agent.keeper`.

    They inherit its environment. ``at_once``: so many run at a time, and end as soon as their agents run on
    by themselves; 0: all run at the same time, as long as their agents.
    """
    from json import dumps

    path = f"{agents.folder}/commands.json"
    text = dumps({"at_once": at_once, "commands": [list(start.argv) for start in starts]})
    return Start(
        argv=(agents.python, "-m", "dsl.fanout", path),
        env=starts[0].env,
        unset=starts[0].unset,
        files=((path, text), *[file for start in starts for file in start.files]),
        kept=tuple([replace(start, speaks=False, detaches=at_once > 0) for start in starts]),
    )
