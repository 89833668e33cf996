"""What the launchers for MPICH, Intel MPI and MVAPICH share: all three use Hydra."""

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
    """The tasks of a job, as arguments for Hydra."""

    total: str
    """Number of tasks."""
    each: str | None
    """Number of tasks of each host; None: the hosts differ."""
    names: tuple[str, ...]
    """The hosts with tasks."""
    places: tuple[str, ...]
    """``HOST:COUNT`` of each of these hosts."""
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
    """Variables that make Hydra start its proxies by ssh, unless the user has chosen another way.

    In a Slurm allocation Hydra would use srun, which orders the hosts in its own way: then Hydra puts tasks
    on the wrong hosts. ``kind``: Hydra's variable for the way to start proxies. ``more``: its variable for
    more words to ssh.
    """
    environ = dict(agents.environ)
    variables = [] if environ.get(kind) else [(kind, "ssh")]
    if remote.ssh_port is not None:
        variables.append((more, f"{environ.get(more, '')} -p {remote.ssh_port}".strip()))
    return (*agents.variables, *variables)
