"""The commands of ssh: those of ``--launcher ssh``, one for each host, and those of ``dsl-ssh``.

An agent talks to the head over the streams of its ssh.
"""

from __future__ import annotations

from dsl.launchers.base import PLACE, Agents, Start, bare, host_names, pythons_of, shell_word, sourced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.model.remote import Remote

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
    names = host_names(agents, "ssh", also="@:%[]+")
    times = (
        *("-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}"),
        *("-o", f"ServerAliveInterval={alive_s(remote.heartbeat_s)}"),
        *("-o", f"ServerAliveCountMax={SILENCES}"),
    )
    port = () if remote.ssh_port is None else ("-p", str(remote.ssh_port))
    options = (*remote.args, *OPTIONS, *times, *port)
    starts = []
    for node_rank, name in enumerate(names):
        words = (pythons[node_rank], *agents.words, PLACE, str(node_rank))
        line = " ".join(map(shell_word, sourced(remote, words)))
        argv = ("ssh", *options, bare(name), f"exec {line}")
        starts.append(Start(argv=argv, node_rank=node_rank, speaks=True))
    return tuple(starts)


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
