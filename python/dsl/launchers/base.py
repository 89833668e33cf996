"""What a launcher function gets and returns. These functions are pure: they start nothing."""

from __future__ import annotations

from dsl._record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from dsl.model.job import Host, Pairs
    from dsl.model.remote import Remote

PLACE = "--place"
"""Option with an agent's node rank, if the launcher can give each agent its own options."""

ENDED = "dsl-agent-ended"
"""First word of a line with the place and exit code of an agent, if its launcher does not report them."""

FIRST_PLACE = "--first-place"
"""Option with the place of the first host that the agent's launcher knows."""


@record
class Agents:
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
    environ: Pairs = ()
    """The environment of the launching command, which may have the user's settings for the launcher."""
    is_root: bool = False
    """The caller is root, for which Open MPI needs an option."""
    is_cuda: bool = False
    """The launching host has CUDA devices, for which MVAPICH2 needs a setting."""


@record
class Start:
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
    lingers: bool = False
    """The command does not end by itself when all agents have ended, so the head stops it."""
    speaks: bool = False
    """Its stdin and stdout are the connection to the agent (ssh); else the agents connect by themselves."""
    labels: tuple[tuple[str, int], ...] = ()
    """Labels that the command writes before ``: `` and a line of a host, each with the host's node rank. An
    agent can send its key only in a labelled line."""


if TYPE_CHECKING:
    Launcher: TypeAlias = Callable[[Remote, Agents], tuple[Start, ...]]
