"""``--launcher mpich``: Hydra's mpirun, which passes its own environment to every task."""

from __future__ import annotations

from dsl.launchers.base import Start
from dsl.launchers.hydra import ranks, transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.launchers.base import Agents
    from dsl.model.remote import Remote


def mpich(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The command that starts a task for each slot, or for each host.

    Raises:
        HostNameError: Hydra cannot be given the name of a host.
    """
    tasks = ranks(remote, agents)
    each = ("-ppn", tasks.each) if tasks.each else ()
    where = ("-hosts", ",".join(tasks.names if tasks.each else tasks.places))
    argv = ("mpirun", "-n", tasks.total, *each, *remote.args, *where, *tasks.command)
    env = transport(remote, agents, "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS")
    return (Start(argv=argv, env=env),)
