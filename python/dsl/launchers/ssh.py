"""The commands of ssh: those of ``--launcher ssh``, one for each host, those of ``dsl-ssh``, and pdsh.

An agent talks to the head over the streams of its ssh. ``--launcher pdsh``, DeepSpeed's default, is one
program that starts an ssh for each host.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsl._record import replace
from dsl.errors import HostNameError, LauncherError
from dsl.launchers.base import (
    ENDED,
    PLACE,
    Agents,
    Start,
    agent_command,
    allowed,
    bare,
    host_names,
    pythons_of,
    shell_word,
    sourced,
)
from dsl.plan.remote import HOST, PDSH_SSH_ARGS, Remote

# No terminal, no forwarding, no password prompt. ssh may use an existing shared connection, but must not make
# one: it would outlive the job, or end with the job while others use it.
OPTIONS = (
    *("-T", "-x", "-a", "-e", "none"),
    *("-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes", "-o", "ControlMaster=no"),
)

CONNECT_TIMEOUT_S = 15

SSH_FAILED = 255
"""Exit code of ssh when the connection itself fails."""

GIVES_UP = (
    *("ssh: ", "Host key verification failed", "kex_exchange_identification: "),
    *("Connection closed by ", "Connection reset by ", "Connection timed out during banner exchange"),
)
DENIED = ": Permission denied ("
"""First words, and words after a host, of an ssh that fails. Hydra's mpirun shows them and waits for ever."""

SILENCES = 3
"""Unanswered keep-alive messages after which ssh gives up; all of them fit into the heartbeat."""

ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")

LONGEST_LINE = 131_071
"""Most bytes of the last word of `ssh_command`, here and on the host: the kernel's MAX_ARG_STRLEN - 1."""

# When a connection is gone, sshd only closes the input of the command. So a second process waits for the end
# of input, and then ends the session: a process group of its own, with this shell as its leader.
SCRIPT = (
    "exec 3<&0 </dev/null; "
    '(cat <&3; trap "" TERM; kill -s TERM -- "-$$"; sleep 3; kill -s KILL -- "-$$") >/dev/null 2>&1 & '
    'dsl_watch=$!; exec 3<&-; eval "$(printf %b "$1")"; dsl_code=$?; '
    "kill -s KILL $dsl_watch 2>/dev/null; exit $dsl_code"
)
"""Decodes its first argument with ``printf %b``, and runs the result as a line of shell."""

SHELL = '"${SHELL:-sh}" -c '


def ssh(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The commands that start an agent on every host.

    ssh uses the first value of an option, so the user's words come first.

    Raises:
        HostNameError: the name of a host means something else to ssh.
    """
    pythons = pythons_of(remote, agents)
    starts = []
    for node_rank, host in enumerate(agents.hosts):
        words = (pythons[node_rank], *agents.words, PLACE, str(node_rank))
        line = " ".join(map(shell_word, sourced(remote, words)))
        argv = (*way_to(remote, host.name), f"exec {line}")
        starts.append(Start(argv=argv, node_rank=node_rank, speaks=True))
    return tuple(starts)


def way_to(remote: Remote, name: str) -> tuple[str, ...]:
    """The words that reach a host, before a line for the shell there.

    Raises:
        HostNameError: the name means something else to ssh.
    """
    host = bare(allowed(name, "ssh", also="@:%[]+"))
    if remote.program:
        return tuple([word.replace(HOST, host) for word in remote.program])
    times = (
        *("-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"),
        *("-o", f"ServerAliveInterval={alive_s(remote.heartbeat_s)}"),
        *("-o", f"ServerAliveCountMax={SILENCES}"),
    )
    port = () if remote.ssh_port is None else ("-p", str(remote.ssh_port))
    args = remote.args if remote.launcher == "ssh" else ()
    return ("ssh", *args, *OPTIONS, *times, *port, host)


def alive_s(heartbeat_s: float) -> int:
    """Whole seconds between ssh's keep-alive messages; 0: it sends none."""
    return max(1, int(heartbeat_s / SILENCES)) if heartbeat_s > 0 else 0


def ssh_command(host: str, words: Sequence[str], port: int | None = None) -> tuple[str, ...]:
    """The words of an ssh that runs a command on a host, and ends it when the connection ends.

    A single word is a line for the user's shell on the host, as with ssh. Several words are a program and its
    arguments, which arrive byte for byte. In both cases stdin is ``/dev/null``.
    """
    line = SHELL + _quoted(words[0]) if len(words) == 1 else " ".join(map(_quoted, words))
    # Shells quote line breaks differently, so the login shell must not see any.
    coded = line.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    place = () if port is None else ("-p", str(port))
    options = (*OPTIONS, "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", *ALIVE, *place)
    remote = " ".join(map(shell_word, ("sh", "-c", SCRIPT, "dsl-ssh", coded)))
    return ("ssh", *options, "--", bare(host), f"exec {remote}")


def _quoted(word: str) -> str:
    """Write a word so that ``sh`` reads it back."""
    return "'" + word.replace("'", "'\\''") + "'"


PDSH_FANOUT = 1024
"""Hosts that pdsh reaches at once, or all hosts if there are more: no agent ends before all have started."""

PDSH_OPTIONS = ("-oBatchMode=yes", "-oClearAllForwardings=yes", "-oControlMaster=no")
"""`OPTIONS` as pdsh takes them."""

SSH_MODULE = "ssh:"
"""Prefix for an address with colons: pdsh reads the text before the first colon as the name of a module."""

_PLACE = "%n"

# pdsh reports nothing for an agent that ends with 0. And when the connection is gone, sshd only closes the
# input of the command. So a shell stays with the agent: it reports the agent's exit code. Until the agent has
# connected to the head, and has a process group of its own, the shell also ends both with the connection.
_WATCH = (
    "exec 3<&0 </dev/null; "
    '(while read -r dsl_word; do :; done; kill -s KILL -- "-$$") <&3 >/dev/null 2>&1 & '
    'dsl_watch=$!; exec 3<&-; "$@"; dsl_code=$?; '
    f'kill -s KILL "$dsl_watch" 2>/dev/null; echo "{ENDED} $0 $dsl_code"; exit "$dsl_code"'
)


def pdsh(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """The command that starts an agent on every host. In it pdsh writes a host's place for ``%n``.

    Raises:
        HostNameError: the name of a host means something else to pdsh.
        LauncherError: the user turns labels off.
    """
    if "-N" in remote.args:
        raise LauncherError(
            "-N lets pdsh leave out the names by which dsl tells the lines of hosts apart: "
            "take it out of the words for the launcher"
        )
    if agents.variables:
        raise ValueError("pdsh carries no variables")
    names = tuple(_host(name) for name in host_names(agents, "pdsh", also="@:%[]+"))
    port = () if remote.ssh_port is None else ("-p", str(remote.ssh_port))
    # The user's words come first, because ssh uses the first value of an option.
    ssh_args = (dict(agents.environ).get(PDSH_SSH_ARGS, "").strip(), *PDSH_OPTIONS, *port)
    fanout = str(max(PDSH_FANOUT, len(names)))
    argv = ("pdsh", "-S", "-f", fanout, "-w", ",".join(names), *remote.args, _line(remote, agents))
    env = (("PDSH_RCMD_TYPE", "ssh"), (PDSH_SSH_ARGS, " ".join(filter(None, ssh_args))))
    return (Start(argv=argv, env=env, labels=_labels(names)),)


def _labels(names: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """The labels of pdsh for each host: its name, or if all hosts have one domain, the name without it.

    A short name counts as a label only if no other host has it.
    """
    hosts = [name.removeprefix(SSH_MODULE).rpartition("@")[2] for name in names]
    shorts = [host if host[:1].isdigit() else host.partition(".")[0] for host in hosts]
    of_short: dict[str, set[int]] = {}
    for node_rank, both in enumerate(zip(hosts, shorts, strict=True)):
        for name in both:
            of_short.setdefault(name, set()).add(node_rank)
    labels = [(host, node_rank) for node_rank, host in enumerate(hosts)]
    more = [(short, node_rank) for node_rank, short in enumerate(shorts) if of_short[short] == {node_rank}]
    return tuple(dict.fromkeys((*labels, *more)))


def _host(given: str) -> str:
    """The name of a host as pdsh needs it: pdsh reads the text before a ``:`` as its module for the host."""
    name = bare(given)
    if name.count("@") > 1:
        raise HostNameError(
            f"host name {given!a} cannot be given to pdsh: write it into ~/.ssh/config under a plain name, "
            "or use --launcher ssh"
        )
    if "[" in name or "]" in name:
        raise HostNameError(f"host name {given!a} cannot be given to pdsh: it is no host, but a list")
    return f"{SSH_MODULE}{name}" if ":" in name else name


def _line(remote: Remote, agents: Agents) -> str:
    """The command for the login shell of each host, as one word."""
    agent = replace(agents, words=(*agents.words, PLACE, _PLACE))
    words = agent_command(remote, agent, place="$0", name=_PLACE)
    words = ("sh", "-c", _WATCH, _PLACE, *words)
    # pdsh writes % for %%.
    shown = (word if word == _PLACE else shell_word(word).replace("%", "%%") for word in words)
    return " ".join(("exec", *shown))
