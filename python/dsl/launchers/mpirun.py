"""Launchers that start a task for each rank: the mpiruns of Open MPI 4 and 5 and of Hydra, and Slurm's srun.

``mpich``, ``impi`` and ``mvapich`` are mpiruns of Hydra, which differ in details.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsl.errors import HostNameError
from dsl.launchers.base import HOST_FILE, Agents, Start, agent_command, host_names, tasks_of
from dsl.model.job import Pairs
from dsl.plan.remote import Remote


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
    lines = [name for name, count in zip(names, tasks, strict=True) for _ in range(count)]
    exports = [word for name, _ in agents.variables for word in ("-x", name)]
    command = agent_command(remote, agents, place="$OMPI_COMM_WORLD_RANK", tasks=tasks)
    words = (*_options(remote, agents), *remote.args, *exports, *command)
    argv = ("mpirun", "-n", str(sum(tasks)), "-hostfile", path, *words)
    return (Start(argv=argv, env=agents.variables, files=_hosts_file(path, lines)),)


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


def _ranks(remote: Remote, agents: Agents) -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """What Hydra needs: number of tasks, that of each host, the hosts, and the command of a task.

    If the hosts differ in their number of tasks, the second is empty, and the hosts are ``HOST:COUNT``.
    """
    tasks = tasks_of(remote, agents)
    names = host_names(agents, "Hydra's mpirun", also="@")
    named = [pair for pair in zip(names, tasks, strict=True) if pair[1]]
    command = agent_command(remote, agents, place=RANK, tasks=tasks)
    if len({count for _, count in named}) == 1:
        return str(sum(tasks)), ("-ppn", str(max(tasks))), tuple([name for name, _ in named]), command
    return str(sum(tasks)), (), tuple([f"{name}:{count}" for name, count in named]), command


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
    total, each, hosts, command = _ranks(remote, agents)
    argv = ("mpirun", "-n", total, *each, *remote.args, "-hosts", ",".join(hosts), *command)
    env = _transport(remote, agents, "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS")
    return (Start(argv=argv, env=env),)


def impi(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """Intel MPI: it binds, and reads counts only from a file. Otherwise as `mpich`."""
    total, each, hosts, command = _ranks(remote, agents)
    path = f"{agents.folder}/{HOST_FILE}"
    pin = () if any(word.partition("=")[0] == PIN for word in remote.args) else ("-genv", PIN, "0")
    where = ("-hosts", ",".join(hosts)) if each else ("-machinefile", path)
    argv = ("mpirun", *each, *remote.args, *pin, *where, "-n", total, *command)
    env = _transport(remote, agents, "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS")
    return (Start(argv=argv, env=env, files=() if each else _hosts_file(path, hosts)),)


def mvapich(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """MVAPICH2: as `mpich`, with DeepSpeed's settings for its library. The user's own settings are kept."""
    total, each, hosts, command = _ranks(remote, agents)
    path = f"{agents.folder}/{HOST_FILE}"
    made = dict(agents.environ)
    settings = [*SETTINGS, *([CUDA_SETTING] if agents.is_cuda else [])]
    words = [word for name, value in settings if name not in made for word in ("-env", f"{name}={value}")]
    argv = ("mpirun", "-np", total, *each, "--hostfile", path, *remote.args, *words, *command)
    env = _transport(remote, agents, "HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXTRA_ARGS")
    return (Start(argv=argv, env=env, files=_hosts_file(path, hosts)),)


def _hosts_file(path: str, lines: Iterable[str]) -> Pairs:
    return ((path, "".join(f"{line}\n" for line in lines)),)


LONGEST_WORD = 100_000
"""Most characters of a list of nodes in one word of the command line (Linux allows 128 KiB)."""

UNSET = (
    *("SLURM_HOSTFILE", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_GPUS_PER_TASK"),
    *("SLURM_TRES_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND"),
)
"""Variables of an allocation that contradict our list of nodes, or hide devices of a node from its tasks."""


def slurm(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The command that starts a task for each slot, or for each host.

    srun sorts the nodes, and fills them in its own way. It keeps our order and counts only if the list of
    nodes has an entry for each task.

    Raises:
        HostNameError: the name of a host is no valid node name for Slurm.
    """
    tasks = tasks_of(remote, agents)
    names = host_names(agents, "srun")
    nodes = [name for name, count in zip(names, tasks, strict=True) for _ in range(count)]
    nodelist, path = ",".join(nodes), f"{agents.folder}/{HOST_FILE}"
    is_long = len(nodelist) > LONGEST_WORD
    where = ("--nodelist", path if is_long else nodelist, "--nodes", str(sum(1 for count in tasks if count)))
    habits = ("--distribution=arbitrary", "--cpu-bind=none", "--kill-on-bad-exit=1", "--wait=0")
    said = {word.partition("=")[0].replace("_", "-") for word in remote.args}
    if not remote.devices or said & {"--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gres"}:
        gpus: tuple[str, ...] = ()
    elif len(set(remote.devices)) == 1:
        gpus = ("--gpus-per-node", str(remote.devices[0]))
    else:  # as they are in the allocation: there are no words for another number on each node
        gpus = ("--gpus", str(sum(remote.devices)))
    ours = [word for word in habits if word.partition("=")[0] not in said]
    export = ",".join(("--export=ALL", *(name for name, _ in agents.variables)))
    command = agent_command(remote, agents, place="$SLURM_PROCID", tasks=tasks)
    argv = ("srun", "-n", str(len(nodes)), *remote.args, *where, *gpus, *ours, export, *command)
    files = _hosts_file(path, nodes) if is_long else ()
    return (Start(argv=argv, env=agents.variables, unset=UNSET, files=files),)
