"""What a launcher function gets and returns, how that becomes a plan, and what the launchers share.

They share the agent's command, names of hosts, and words that all shells read alike. Nothing is started here.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.engine import LaunchSpec
from dsl.errors import HostNameError, UsageError
from dsl.model.job import Meeting, NodePlan, Route, WorkerPlan
from dsl.words import has_odd_colon

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from dsl.model.job import Host, Job, Pairs
    from dsl.plan.remote import Remote

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
    job: Job,
    starts: Sequence[Start],
    hosts: Sequence[str],
    fds: Sequence[int | None],
    environ: Mapping[str, str],
    *,
    is_shown: bool = False,
    at_once: int | None = None,
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
        job,
        Meeting(0, 0, (len(workers),), "", 0),
        host="",
        workers=tuple(workers),
        env=environ,
        group=LaunchSpec((), on_failure="report", grace_s=job.signals.grace_s, at_once=at_once),
    )


HOST_FILE = "hosts"
"""Name of the file in `Agents.folder` that lists hosts or tasks."""

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:,@+-")
# A sourced script sees the arguments of the shell, so these are saved elsewhere first. The script must
# neither write to the agent's stdout nor read the agent's stdin.
_SOURCE = (
    'dsl_script=$1; shift; dsl_words=("$@"); set --; '
    'case $dsl_script in "~/"*) dsl_script=$HOME/${dsl_script:2};; esac; '
    '. "$dsl_script" >&2 </dev/null || [ -r "$dsl_script" ] || exit 126; '
    'exec "${dsl_words[@]}"'
)


def tasks_of(remote: Remote, agents: Agents) -> tuple[int, ...]:
    """The number of tasks that a launcher of ranks starts on each host, by node rank."""
    return tuple(1 if remote.per_node else len(host.slots) for host in agents.hosts)


def agent_command(
    remote: Remote, agents: Agents, *, place: str, name: str = "dsl", tasks: Sequence[int] = ()
) -> tuple[str, ...]:
    """The command of an agent, the same for all hosts.

    If the hosts' interpreters differ, a line of ``sh`` chooses one on the host. ``place``: the text that this
    shell expands to the number of the task. ``name``: the shell's own name (``$0``). ``tasks``: the number of
    tasks of each host (empty: one each).
    """
    pythons = pythons_of(remote, agents)
    words = (*pythons[:1], *agents.words)
    if any(python != pythons[0] for python in pythons):
        script = _choice(pythons, tasks or (1,) * len(pythons), place)
        words = ("sh", "-c", script, name, *agents.words)
    return sourced(remote, words)


def pythons_of(remote: Remote, agents: Agents) -> tuple[str, ...]:
    """The interpreter of each host, by node rank."""
    return remote.pythons or (agents.python,) * len(agents.hosts)


def sourced(remote: Remote, words: tuple[str, ...]) -> tuple[str, ...]:
    """Let a shell source ``--venv_script`` before a command. A relative path starts in `Remote.cwd`."""
    script = remote.venv_script
    if not script:
        return words
    if not script.startswith(("/", "~/")):
        script = f"{remote.cwd}/{script}"
    return ("bash", "-c", _SOURCE, "dsl", script, *words)


def _choice(pythons: Sequence[str], tasks: Sequence[int], place: str) -> str:
    """A line of ``sh`` that executes the interpreter of the host on which it runs."""
    end = 0
    script = ""
    for python, count, following in zip(pythons, tasks, (*pythons[1:], None), strict=True):
        end += count
        test = f'[ "{place}" -ge {end} ] || ' if following is not None else ""
        if python != following:
            script += f'{test}exec {shell_word(python)} "$@"; '
    return script.rstrip("; ")


def shell_word(word: str) -> str:
    """Write a word so that sh, bash, zsh, csh and fish read it back.

    Single quotes mean the same in all of them, except for ``'``, ``!`` (csh's history) and a backslash
    (fish).

    Raises:
        UsageError: the word contains a line break, which these shells quote differently.
    """
    if word and _PLAIN.issuperset(word):
        return word
    if "\n" in word or "\r" in word:
        raise UsageError(f"{word!a} cannot be passed to another host: it holds a line break")
    quoted = "".join(f"'\\{mark}'" if mark in "'!\\" else mark for mark in word)
    return f"'{quoted}'"


def host_names(agents: Agents, launcher: str, *, also: str = "") -> tuple[str, ...]:
    """The hosts' names, after a check that none of them means something else to the launcher.

    A name consists of letters, digits, dots, hyphens and underscores, and does not begin with a hyphen.
    ``also``: other characters that the launcher allows: ``@`` after the name of a user, ``:`` and ``%`` in an
    IPv6 address.

    Raises:
        HostNameError: a name is not allowed.
    """
    return tuple([allowed(host.name, launcher, also) for host in agents.hosts])


def allowed(name: str, launcher: str, also: str = "") -> str:
    """The name of a host that means nothing else to the launcher (`host_names`). Raises HostNameError."""
    if why := _why_odd(name, also):
        raise HostNameError(f"host name {name!a} cannot be given to {launcher}: {why}")
    return name


def _why_odd(name: str, also: str) -> str:
    parts = name.split("@")
    odd = next((mark for mark in name if not (mark.isalnum() or mark in "-._" or mark in also)), "")
    user, _, host = bare(name).rpartition("@")
    if any(part.startswith("-") for part in parts):
        return "it begins with '-'"
    if odd:
        means = "means something else to it, give a name without it"
        return f"{odd!r} {means}" if odd in "@:" else f"{odd!a} is no part of a name"
    if ":" in user or has_odd_colon(host):
        return "':' stands in IPv6 addresses alone, and a port has an option of its own"
    return "" if all(parts) else "a part of it is empty"


def bare(name: str) -> str:
    """An address without the brackets of a URL."""
    user, at, host = name.rpartition("@")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return f"{user}{at}{host}"
