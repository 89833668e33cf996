"""The ssh command by which ``dsl-ssh`` runs a command of the user on a host."""

from __future__ import annotations

from dsl.launchers.ssh import CONNECT_TIMEOUT_S, OPTIONS
from dsl.launchers.words import bare, shell_word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

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
