"""How the other hosts of a job are reached: what only the host that launches needs to know."""

from __future__ import annotations

from dsl._record import Record
from dsl.model.request import DEFAULT_HEARTBEAT_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    LauncherName: TypeAlias = Literal["ssh", "pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"]

LAUNCHERS: tuple[LauncherName, ...] = ("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi", "ssh")
"""Words of ``--launcher``, in any case. All but ``ssh`` are DeepSpeed's."""

RANK_LAUNCHERS: tuple[LauncherName, ...] = ("openmpi", "mvapich", "slurm", "mpich", "impi")
"""Launchers that start one task for each rank, unless the user asks for one agent per node."""

DEFAULT_FANOUT = 64

PDSH_SSH_ARGS = "PDSH_SSH_ARGS_APPEND"
"""Variable with the words that pdsh passes to ssh, separated by blanks."""


class Remote(Record):
    """The launcher that starts an agent on every host, and its settings."""

    launcher: LauncherName
    """Its name."""
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
    per_node: bool = True
    """One agent per node starts that node's workers; False: each rank is a task of the launcher."""
    devices: tuple[int, ...] = ()
    """The devices that Slurm has to hand out on each host, by node rank; empty: it decides."""
    fanout: int = DEFAULT_FANOUT
    """Hosts that ssh reaches at once. With more hosts, agents run on without ssh and connect to the head."""
    checks: bool = True
    """The hosts are checked before anything starts on them."""
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    """Seconds of silence after which the other side counts as lost."""
    least_nodes: int = 0
    """The least hosts of a job whose hosts come and go; 0: the job needs all of its hosts."""
    most_nodes: int = 0
    """The most hosts that such a job runs with. The others are spares."""
    wait_s: float = 0.0
    """Seconds that the job waits for hosts when there are too few."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of workers that the job accepts; empty: any."""
    gives_up: bool = False
    """The job ends if attempts fail over and over in their first seconds, as the user set no limit."""

    @property
    def is_elastic(self) -> bool:
        """Whether hosts come and go."""
        return self.least_nodes > 0
