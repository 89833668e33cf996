"""``--launcher impi``: Intel MPI's mpirun, a Hydra that binds, and reads counts only from a file."""

from __future__ import annotations

from dsl.launchers.base import Start
from dsl.launchers.hydra import ranks, transport
from dsl.launchers.words import HOST_FILE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.launchers.base import Agents
    from dsl.model.remote import Remote

PIN = "I_MPI_PIN"


def impi(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The command that starts a task for each slot, or for each host.

    Raises:
        HostNameError: Hydra cannot be given the name of a host.
    """
    tasks = ranks(remote, agents)
    path = f"{agents.folder}/{HOST_FILE}"
    pin = () if any(word.partition("=")[0] == PIN for word in remote.args) else ("-genv", PIN, "0")
    count = ("-n", tasks.total, *tasks.command)
    env = transport(remote, agents, "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
    if tasks.each:
        where = ("-hosts", ",".join(tasks.names))
        return (Start(argv=("mpirun", "-ppn", tasks.each, *remote.args, *pin, *where, *count), env=env),)
    argv = ("mpirun", *remote.args, *pin, "-machinefile", path, *count)
    return (Start(argv=argv, env=env, files=((path, "".join(f"{place}\n" for place in tasks.places)),)),)
