"""How the other hosts of a job are reached: what only the host that launches needs to know."""

from __future__ import annotations

from dsl._record import record
from dsl.model.request import DEFAULT_HEARTBEAT_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    LauncherName: TypeAlias = Literal["ssh", "pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"]

LAUNCHERS: tuple[LauncherName, ...] = ("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi", "ssh")
"""Words of ``--launcher``, in any case. All but ``ssh`` are DeepSpeed's."""

RANK_LAUNCHERS: tuple[LauncherName, ...] = ("openmpi", "mvapich", "slurm", "mpich", "impi")
"""Launchers whose tasks are ranks, unless one agent a node is asked for."""

DEFAULT_FANOUT = 64

PDSH_SSH_ARGS = "PDSH_SSH_ARGS_APPEND"
"""Words that pdsh gives to its ssh, between blanks."""


@record
class Remote:
    """The launcher that starts an agent on every host, and what it is told."""

    launcher: LauncherName
    """Its word."""
    args: tuple[str, ...] = ()
    """More words for it (``--launcher_args``)."""
    ssh_port: int | None = None
    """Port of the hosts' ssh servers; None: the usual one."""
    venv_script: str | None = None
    """Script to source on each host before its agent starts."""
    cwd: str = ""
    """Directory in which the agents and their workers run: that of the launching command."""
    pythons: tuple[str, ...] = ()
    """The interpreter of each host, by node rank; empty: that of the launching command."""
    hostfile: str = ""
    """The file that named the hosts, if all of it takes part; empty: a part of it, or no file."""
    per_node: bool = True
    """One agent a node starts that node's workers; else each rank is a task of the launcher."""
    num_gpus: int | None = None
    """What ``--num_gpus`` says; None: nothing. Slurm, which hands out devices, is told."""
    fanout: int = DEFAULT_FANOUT
    """Hosts that ssh reaches at once. The agents of more hosts stay behind, and connect by themselves."""
    checks: bool = True
    """The hosts are checked before anything starts on them."""
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    """Seconds of silence after which the other side counts as lost."""
    least_nodes: int = 0
    """Of a job whose hosts come and go: it runs with so many of them; 0: all hosts take part, or none."""
    most_nodes: int = 0
    """It runs with so many of them at most. The others are spares."""
    wait_s: float = 0.0
    """It waits so long for hosts when there are too few."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of workers that it accepts; empty: any."""
    gives_up: bool = False
    """It ends when attempts fail over and over in their first seconds: nobody has counted restarts out."""

    @property
    def is_elastic(self) -> bool:
        """Whether hosts come and go."""
        return self.least_nodes > 0
