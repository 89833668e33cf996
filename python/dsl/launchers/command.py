"""One command of the user's on a host, by ssh: what ``dsl-ssh`` starts there."""

from __future__ import annotations

from dsl.launchers.ssh import CONNECT_TIMEOUT_S, OPTIONS
from dsl.launchers.words import bare, shell_word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3")

LONGEST_LINE = 131_071
"""Bytes that the last of `ssh_command` may have, here and there: the kernel's MAX_ARG_STRLEN, less a NUL."""

# sshd tells a command that the connection is gone by nothing but the end of its input. So a second process
# waits for that, and then ends the session: a process group of its own, with this shell as its leader.
SCRIPT = (
    "exec 3<&0 </dev/null; "
    '(cat <&3; trap "" TERM; kill -s TERM -- "-$$"; sleep 3; kill -s KILL -- "-$$") >/dev/null 2>&1 & '
    'dsl_watch=$!; exec 3<&-; eval "$(printf %b "$1")"; dsl_code=$?; '
    "kill -s KILL $dsl_watch 2>/dev/null; exit $dsl_code"
)
"""Runs the line that its first word becomes when ``printf %b`` has read it."""

SHELL = '"${SHELL:-sh}" -c '


def ssh_command(host: str, words: Sequence[str], port: int | None = None) -> tuple[str, ...]:
    """The words that run a command on a host and end it when its connection ends.

    One word is a line for the user's shell there, as with ssh; several are a program and its arguments, which
    arrive byte for byte. Either reads nothing: its input is ``/dev/null``.
    """
    line = SHELL + _quoted(words[0]) if len(words) == 1 else " ".join(map(_quoted, words))
    # Line breaks are what shells spell differently, so none may come to the login shell.
    coded = line.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    place = () if port is None else ("-p", str(port))
    options = (*OPTIONS, "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}", *ALIVE, *place)
    remote = " ".join(map(shell_word, ("sh", "-c", SCRIPT, "dsl-ssh", coded)))
    return ("ssh", *options, "--", bare(host), f"exec {remote}")


def _quoted(word: str) -> str:
    """Write a word so that ``sh`` reads it back."""
    return "'" + word.replace("'", "'\\''") + "'"
