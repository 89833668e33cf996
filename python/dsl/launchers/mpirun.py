"""``--launcher openmpi``: the mpirun of Open MPI 4 and 5; ``mpich``, ``impi`` and ``mvapich``: that of Hydra.

The three mpiruns of Hydra differ in details.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.errors import HostNameError
from dsl.launchers.base import HOST_FILE, Agents, Start, agent_command, host_names, tasks_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsl.model.job import Pairs
    from dsl.model.remote import Remote


def openmpi(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """Open MPI: the command that starts a task for each slot, or for each host.

    By default Open MPI 4 puts the tasks of the launching host first, wherever it is in the hostfile. The
    mapper ``seq`` keeps the order of the hostfile, which then has one line for each task.

    Raises:
        HostNameError: a hostfile cannot contain the name of a host, or the hosts have different users.
    """
    tasks = tasks_of(remote, agents)
    names = [name.rpartition("@")[2] for name in host_names(agents, "Open MPI's mpirun", also="@")]
    path = f"{agents.folder}/{HOST_FILE}"
    text = "".join(f"{name}\n" * count for name, count in zip(names, tasks, strict=True))
    exports = [word for name, _ in agents.variables for word in ("-x", name)]
    command = agent_command(remote, agents, place="$OMPI_COMM_WORLD_RANK", tasks=tasks)
    words = (*_options(remote, agents), *remote.args, *exports, *command)
    argv = ("mpirun", "-n", str(sum(tasks)), "-hostfile", path, *words)
    return (Start(argv=argv, env=agents.variables, files=((path, text),)),)


def _ssh_args(remote: Remote, agents: Agents) -> str:
    """Words for mpirun's ssh. It has one for all hosts, and its mapper finds no host behind ``user@``."""
    pairs = [host.name.rpartition("@") for host in agents.hosts]
    users = {user for user, _, name in pairs if user or name != agents.own_name}
    if len(users) > 1:
        raise HostNameError(
            "host names with different users: Open MPI's mpirun has one ssh for all hosts, write the users "
            "into ~/.ssh/config"
        )
    port = "" if remote.ssh_port is None else f"-p {remote.ssh_port}"
    return " ".join([*[f"-l {user}" for user in users if user], *([port] if port else [])])


def _options(remote: Remote, agents: Agents) -> Iterable[str]:
    """Our options, without those that the user gives: mpirun refuses an option that is given twice."""
    said = {word.lstrip("-") for word in remote.args}
    # Open MPI 4 warns about hardware for this component, although other components drive that today.
    if "btl" not in said:
        yield from ("--mca", "btl", "^openib")
    ssh_args = _ssh_args(remote, agents)
    if ssh_args and not said & {"plm_rsh_args", "plm_ssh_args"}:
        yield from ("--mca", "plm_rsh_args", ssh_args)
    if not said & {"map-by", "rankfile", "rf"}:
        yield from ("--map-by", "seq:OVERSUBSCRIBE")
    if "bind-to" not in said:
        yield from ("--bind-to", "none")
    if agents.is_root and "allow-run-as-root" not in said:
        yield "--allow-run-as-root"


PIN = "I_MPI_PIN"
"""Intel MPI's setting for the binding of tasks."""

SETTINGS = (
    ("MV2_SMP_USE_CMA", "0"),
    ("MV2_DEBUG_SHOW_BACKTRACE", "1"),
    ("MV2_SUPPORT_DL", "1"),
    ("MV2_ENABLE_AFFINITY", "0"),
    ("MV2_INTER_ALLGATHER_TUNING", "5"),
    ("MV2_CUDA_USE_NAIVE", "0"),
)
"""DeepSpeed's settings for MVAPICH2: among others, use no kernel module, allow threads, do not bind."""

CUDA_SETTING = ("MV2_USE_CUDA", "1")

RANK = "${PMI_RANK:-$PMIX_RANK}"


class _Ranks(Record):
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


def _ranks(remote: Remote, agents: Agents) -> _Ranks:
    """Count the tasks."""
    tasks = tasks_of(remote, agents)
    named = [
        pair for pair in zip(host_names(agents, "Hydra's mpirun", also="@"), tasks, strict=True) if pair[1]
    ]
    counts = {count for _, count in named}
    return _Ranks(
        total=str(sum(tasks)),
        each=str(counts.pop()) if len(counts) == 1 else None,
        names=tuple(name for name, _ in named),
        places=tuple(f"{name}:{count}" for name, count in named),
        command=agent_command(remote, agents, place=RANK, tasks=tasks),
    )


def _transport(remote: Remote, agents: Agents, kind: str, more: str) -> Pairs:
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


def mpich(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """MPICH: the command that starts a task for each slot, or for each host. Tasks inherit its environment.

    Raises:
        HostNameError: Hydra cannot be given the name of a host.
    """
    tasks = _ranks(remote, agents)
    each = ("-ppn", tasks.each) if tasks.each else ()
    where = ("-hosts", ",".join(tasks.names if tasks.each else tasks.places))
    argv = ("mpirun", "-n", tasks.total, *each, *remote.args, *where, *tasks.command)
    env = _transport(remote, agents, "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS")
    return (Start(argv=argv, env=env),)


def impi(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """Intel MPI: it binds, and reads counts only from a file. Otherwise as `mpich`."""
    tasks = _ranks(remote, agents)
    path = f"{agents.folder}/{HOST_FILE}"
    pin = () if any(word.partition("=")[0] == PIN for word in remote.args) else ("-genv", PIN, "0")
    count = ("-n", tasks.total, *tasks.command)
    env = _transport(remote, agents, "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
    if tasks.each:
        where = ("-hosts", ",".join(tasks.names))
        return (Start(argv=("mpirun", "-ppn", tasks.each, *remote.args, *pin, *where, *count), env=env),)
    argv = ("mpirun", *remote.args, *pin, "-machinefile", path, *count)
    return (Start(argv=argv, env=env, files=((path, "".join(f"{place}\n" for place in tasks.places)),)),)


def mvapich(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """MVAPICH2: as `mpich`, with DeepSpeed's settings for its library. The user's own settings are kept."""
    tasks = _ranks(remote, agents)
    path = f"{agents.folder}/{HOST_FILE}"
    text = "".join(f"{line}\n" for line in (tasks.names if tasks.each else tasks.places))
    each = ("-ppn", tasks.each) if tasks.each else ()
    made = dict(agents.environ)
    settings = [*SETTINGS, *([CUDA_SETTING] if agents.is_cuda else [])]
    words = [word for name, value in settings if name not in made for word in ("-env", f"{name}={value}")]
    argv = ("mpirun", "-np", tasks.total, *each, "--hostfile", path, *remote.args, *words, *tasks.command)
    env = _transport(remote, agents, "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS")
    return (Start(argv=argv, env=env, files=((path, text),)),)
