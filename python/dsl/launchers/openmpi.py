"""``--launcher openmpi``: the mpirun of Open MPI 4 and 5."""

from __future__ import annotations

from dsl.errors import HostNameError
from dsl.launchers.base import HOST_FILE, Agents, Start, agent_command, host_names, tasks_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsl.model.remote import Remote


def openmpi(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The command that starts a task for each slot, or for each host.

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
