"""``--launcher slurm``: srun, inside an allocation or with one of its own."""

from __future__ import annotations

from dsl.launchers.base import Start
from dsl.launchers.words import HOST_FILE, agent_command, host_names, tasks_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.launchers.base import Agents
    from dsl.model.remote import Remote

LONGEST_WORD = 100_000
"""Characters of a list of nodes that still fits into one word of a command line (Linux: 128 KiB)."""

UNSET = ("SLURM_HOSTFILE", "SLURM_NTASKS_PER_NODE")
"""What an allocation says about the tasks of its steps, against our list of nodes."""


def slurm(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """Ask for a task a slot, or a host.

    srun sorts the nodes and fills them as it likes; it keeps to order and counts only if each task names its
    node.

    Raises:
        HostNameError: Slurm cannot have a node of this name.
    """
    tasks = tasks_of(remote, agents)
    names = host_names(agents, "srun")
    nodes = [name for name, count in zip(names, tasks, strict=True) for _ in range(count)]
    nodelist, path = ",".join(nodes), f"{agents.folder}/{HOST_FILE}"
    is_long = len(nodelist) > LONGEST_WORD
    where = ("--nodelist", path if is_long else nodelist, "--nodes", str(sum(1 for count in tasks if count)))
    gpus = () if remote.num_gpus is None else ("--gpus-per-node", str(remote.num_gpus))
    habits = ("--distribution=arbitrary", "--cpu-bind=none", "--kill-on-bad-exit=1", "--wait=0")
    said = {word.partition("=")[0].replace("_", "-") for word in remote.args}
    ours = [word for word in habits if word.partition("=")[0] not in said]
    export = ",".join(("--export=ALL", *(name for name, _ in agents.variables)))
    command = agent_command(remote, agents, place="$SLURM_PROCID", tasks=tasks)
    argv = ("srun", "-n", str(len(nodes)), *remote.args, *where, *gpus, *ours, export, *command)
    files = ((path, "".join(f"{node}\n" for node in nodes)),) if is_long else ()
    return (Start(argv=argv, env=agents.variables, unset=UNSET, files=files),)
