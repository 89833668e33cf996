"""What a launcher function gets and returns, and how that becomes a plan. Nothing is started here."""

from __future__ import annotations

from dsl._record import Record
from dsl.model.node import NodePlan, Route, WorkerPlan
from dsl.spec import LaunchSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from dsl.model.job import Host, Pairs
    from dsl.model.remote import Remote

    Launcher: TypeAlias = Callable[[Remote, "Agents"], "tuple[Start, ...]"]

PLACE = "--place"
"""Option with an agent's node rank, if the launcher can give each agent its own options."""

ENDED = "dsl-agent-ended"
"""First word of a line with the place and exit code of an agent, if its launcher does not report them."""

FIRST_PLACE = "--first-place"
"""Option with the place of the first host that the agent's launcher knows."""


class Agents(Record):
    """What a launcher has to start."""

    words: tuple[str, ...]
    """The words of an agent's command after its interpreter. None of them comes from the user."""
    python: str
    """The interpreter of hosts, if `Remote.pythons` is empty."""
    hosts: tuple[Host, ...]
    """The hosts, by node rank. A launcher of ranks starts a task for each slot of a host."""
    variables: Pairs = ()
    """Variables that the agents need. Their values may be secret, so they never appear on a command line."""
    folder: str = ""
    """Directory for `Start.files`; the caller makes it, for this user alone."""
    own_name: str = ""
    """Name of the launching host."""
    environ: Pairs = ()
    """The environment of the launching command, which may have the user's settings for the launcher."""
    is_root: bool = False
    """The caller is root, for which Open MPI needs an option."""
    is_cuda: bool = False
    """The launching host has CUDA devices, for which MVAPICH2 needs a setting."""


class Start(Record):
    """A command to start on the launching host."""

    argv: tuple[str, ...]
    """The words of the command."""
    env: Pairs = ()
    """Variables to add to the environment of the launching command."""
    unset: tuple[str, ...] = ()
    """Variables to remove from that environment."""
    files: Pairs = ()
    """Path and text of each file that must be written first, readable for this user alone."""
    node_rank: int | None = None
    """The only host that the command serves; None: all hosts."""
    detaches: bool = False
    """The command ends with 0 as soon as its agent runs on without it."""
    speaks: bool = False
    """Its stdin and stdout are the connection to the agent (ssh); else the agents connect by themselves."""
    labels: tuple[tuple[str, int], ...] = ()
    """Labels that the command writes before ``: `` and a line of a host, each with the host's node rank. An
    agent can send its key only in a labelled line."""


def plan_starts(
    starts: Sequence[Start],
    hosts: Sequence[str],
    fds: Sequence[int | None],
    environ: Mapping[str, str],
    *,
    is_shown: bool = False,
    command: str,
    name: str,
    grace_s: float,
    at_once: int | None = None,
    log_level: str = "warning",
) -> NodePlan:
    """The plan of commands that the launching host starts. Reports say ``host NAME`` or ``launcher PROGRAM``.

    ``hosts``: their names, by node rank. ``fds``: our descriptor that each command gets as stdin, and if it
    speaks, as stdout. ``environ``: the environment of the commands. ``is_shown``: their output goes to the
    console, each line behind the name of its host; else we read it from pipes. ``at_once``: how many run at
    the same time; None: all.
    """
    workers = []
    for index, (start, fd) in enumerate(zip(starts, fds, strict=True)):
        host = "" if start.node_rank is None else hosts[start.node_rank]
        out = Route(fd=fd) if start.speaks else Route(pipe=True)
        workers.append(
            WorkerPlan(
                rank=index,
                local_rank=index,
                argv=start.argv,
                env=dict(start.env),
                stdin_fd=fd,
                stdout=Route(console=1) if is_shown else out,
                stderr=Route(console=2) if is_shown else Route(pipe=True),
                prefix=f"{host}: " if is_shown else "",
                noun="host" if host else "launcher",
                name=host or start.argv[0].rpartition("/")[2],
            )
        )
    return NodePlan(
        host="",
        node_rank=0,
        workers=tuple(workers),
        env=environ,
        master_addr="",
        master_port=0,
        world_size=len(workers),
        group=LaunchSpec((), on_failure="report", grace_s=grace_s, at_once=at_once),
        log_level=log_level,
        command=command,
        name=name,
    )
