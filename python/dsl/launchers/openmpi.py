"""``--launcher openmpi``: the mpirun of Open MPI 4 and 5."""

from __future__ import annotations

from dsl.launchers.agent_command import HOST_FILE, agent_command, host_names, tasks_of
from dsl.launchers.base import Agents, Start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsl.model.remote import Remote


def openmpi(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The command that starts a task for each slot, or for each host.

    By default Open MPI 4 puts the tasks of the launching host first, wherever it is in the hostfile. The
    mapper ``seq`` keeps the order of the hostfile, which then has one line for each task.

    Raises:
        HostNameError: a hostfile cannot contain the name of a host.
    """
    tasks = tasks_of(remote, agents)
    names = host_names(agents, "Open MPI's mpirun")
    path = f"{agents.folder}/{HOST_FILE}"
    text = "".join(f"{name}\n" * count for name, count in zip(names, tasks, strict=True))
    exports = [word for name, _ in agents.variables for word in ("-x", name)]
    command = agent_command(remote, agents, place="$OMPI_COMM_WORLD_RANK", tasks=tasks)
    words = (*_options(remote, agents), *remote.args, *exports, *command)
    argv = ("mpirun", "-n", str(sum(tasks)), "-hostfile", path, *words)
    return (Start(argv=argv, env=agents.variables, files=((path, text),)),)


def _options(remote: Remote, agents: Agents) -> Iterable[str]:
    """Our options, without those that the user gives: mpirun refuses an option that is given twice."""
    said = {word.lstrip("-") for word in remote.args}
    # Open MPI 4 warns about hardware for this component, although other components drive that today.
    if "btl" not in said:
        yield from ("--mca", "btl", "^openib")
    if remote.ssh_port is not None and not said & {"plm_rsh_args", "plm_ssh_args"}:
        yield from ("--mca", "plm_rsh_args", f"-p {remote.ssh_port}")
    if not said & {"map-by", "rankfile", "rf"}:
        yield from ("--map-by", "seq:OVERSUBSCRIBE")
    if "bind-to" not in said:
        yield from ("--bind-to", "none")
    if agents.is_root and "allow-run-as-root" not in said:
        yield "--allow-run-as-root"
