"""What the launchers of MPICH, Intel MPI and MVAPICH share: all three are Hydra."""

from __future__ import annotations

from dsl._record import record
from dsl.launchers.words import agent_command, host_names, tasks_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.launchers.base import Agents
    from dsl.model.job import Pairs
    from dsl.model.remote import Remote

RANK = "${PMI_RANK:-$PMIX_RANK}"


@record
class Ranks:
    """The tasks of a job, as Hydra is told of them."""

    total: str
    """How many there are."""
    each: str | None
    """How many each host has; None: not all the same."""
    names: tuple[str, ...]
    """The hosts that have any."""
    places: tuple[str, ...]
    """``HOST:COUNT`` of each of them."""
    command: tuple[str, ...]
    """The command of a task."""


def ranks(remote: Remote, agents: Agents) -> Ranks:
    """Count the tasks.

    Raises:
        HostNameError: Hydra cannot be given the name of a host.
    """
    tasks = tasks_of(remote, agents)
    named = [
        pair for pair in zip(host_names(agents, "Hydra's mpirun", also="@"), tasks, strict=True) if pair[1]
    ]
    counts = {count for _, count in named}
    return Ranks(
        total=str(sum(tasks)),
        each=str(counts.pop()) if len(counts) == 1 else None,
        names=tuple(name for name, _ in named),
        places=tuple(f"{name}:{count}" for name, count in named),
        command=agent_command(remote, agents, place=RANK, tasks=tasks),
    )


def transport(remote: Remote, agents: Agents, kind: str, more: str) -> Pairs:
    """The variables of a Hydra that starts its proxies by ssh, unless the user has named another way.

    Inside an allocation of Slurm it would take srun, which numbers the hosts in an order of its own, and then
    Hydra puts the tasks on the wrong ones. ``kind`` and ``more`` are its variables for the way and for words
    to ssh.
    """
    environ = dict(agents.environ)
    variables = [] if environ.get(kind) else [(kind, "ssh")]
    if remote.ssh_port is not None:
        variables.append((more, f"{environ.get(more, '')} -p {remote.ssh_port}".strip()))
    return (*agents.variables, *variables)
