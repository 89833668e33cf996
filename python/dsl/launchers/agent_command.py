"""What the launchers share: the agent's command, names of hosts, and words that all shells read alike."""

from __future__ import annotations

from dsl.errors import HostNameError, UsageError
from dsl.lists import has_odd_colon

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.launchers.base import Agents
    from dsl.model.remote import Remote

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
    for host in agents.hosts:
        _check(host.name, launcher, also)
    return tuple(host.name for host in agents.hosts)


def _check(name: str, launcher: str, also: str) -> None:
    parts = name.split("@")
    odd = next((mark for mark in name if not (mark.isalnum() or mark in "-._" or mark in also)), "")
    user, _, host = bare(name).rpartition("@")
    if any(part.startswith("-") for part in parts):
        why = "it begins with '-'"
    elif odd:
        means = "means something else to it, give a name without it"
        why = f"{odd!r} {means}" if odd in "@:" else f"{odd!a} is no part of a name"
    elif ":" in user or has_odd_colon(host):
        why = "':' stands in IPv6 addresses alone, and a port has an option of its own"
    elif not all(parts):
        why = "a part of it is empty"
    else:
        return
    raise HostNameError(f"host name {name!a} cannot be given to {launcher}: {why}")


def bare(name: str) -> str:
    """An address without the brackets of a URL."""
    user, at, host = name.rpartition("@")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return f"{user}{at}{host}"
