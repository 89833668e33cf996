"""What a launcher is given, and what it answers. Launchers are pure: they start nothing."""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from dsl.model.job import Host, Pairs
    from dsl.model.remote import Remote

PLACE = "--place"
"""Option by which an agent is told its node rank, where the launcher can tell it apart."""

ENDED = "dsl-agent-ended"
"""First word of the line that tells place and exit code of an agent, where its launcher does not."""

FIRST_PLACE = "--first-place"
"""Option by which it is told the place of the first host that its launcher knows."""


@record
class Agents:
    """What a launcher has to start."""

    words: tuple[str, ...]
    """The command of an agent behind its interpreter. Nothing of it is the user's."""
    python: str
    """The interpreter of a host for which `Remote.pythons` has none."""
    hosts: tuple[Host, ...]
    """Where, by node rank. A launcher of ranks starts one task for each of their slots."""
    variables: Pairs = ()
    """Variables that the agents need. They may be secret, so no value of them stands on a command line."""
    folder: str = ""
    """Directory for `Start.files`, which the caller makes, for this user alone."""
    environ: Pairs = ()
    """The environment of the launching command, for what the user says there to the launcher's program."""
    is_root: bool = False
    """The caller is root, which Open MPI wants confirmed."""
    is_cuda: bool = False
    """The launching host has CUDA devices, which MVAPICH2 has to be told."""


@record
class Start:
    """A command that has to be started on the launching host."""

    argv: tuple[str, ...]
    """Its words."""
    env: Pairs = ()
    """Variables over the environment of the launching command."""
    unset: tuple[str, ...] = ()
    """Variables that it must not see."""
    files: Pairs = ()
    """Path and text of each file that has to lie there first, readable for this user alone."""
    node_rank: int | None = None
    """The one host that it serves; None: all."""
    lingers: bool = False
    """It does not end by itself when all agents have ended: it is stopped then."""
    speaks: bool = False
    """Its stdin and stdout are the connection to the agent (ssh); else the agents connect by themselves."""
    labels: tuple[tuple[str, int], ...] = ()
    """What it writes before ``: `` and a line of a host, with the node rank of that. Only by such a line an
    agent can tell its key."""


if TYPE_CHECKING:
    Launcher: TypeAlias = Callable[[Remote, Agents], tuple[Start, ...]]
