"""``--launcher slurm``: srun, inside an allocation or with one of its own."""

from __future__ import annotations

from dsl.launchers.base import HOST_FILE, Agents, Start, agent_command, host_names, tasks_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.remote import Remote

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
    files = ((path, "".join(f"{node}\n" for node in nodes)),) if is_long else ()
    return (Start(argv=argv, env=agents.variables, unset=UNSET, files=files),)
