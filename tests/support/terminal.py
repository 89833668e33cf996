"""A terminal with a small job-control shell in it, to press Ctrl-C, Ctrl-\\ and Ctrl-Z at a command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence

from tests.kit.waiting import until

MODES = ("foreground", "tostop", "background")
"""How a terminal's command is started.

``tostop``: in the foreground of a terminal that stops whoever writes to it from the background. ``background``: on
such a terminal as a background job, which is brought to the foreground before a key is pressed.
"""

# The shell runs in a process of its own with as little state as possible: it starts the command as a job of the
# terminal, writes "stopped" or "ended CODE" to descriptor 3, and brings it to the foreground on any byte from 4,
# which it confirms by "foreground". Like bash it continues only what it knows to be stopped.
_SHELL = """
import os, signal, sys, termios, threading
mode = sys.argv[1]
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if mode != "foreground":
    settings = termios.tcgetattr(0)
    settings[3] |= termios.TOSTOP
    termios.tcsetattr(0, termios.TCSANOW, settings)
pid = os.fork()
if pid == 0:
    os.setpgid(0, 0)
    if mode != "background":
        os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.close(3)
    os.close(4)
    os.execv(sys.argv[2], sys.argv[2:])
is_stopped = False

def take_orders():
    global is_stopped
    while os.read(4, 1):
        os.tcsetpgrp(0, pid)
        was_stopped, is_stopped = is_stopped, False
        os.write(3, b"foreground\\n")
        if was_stopped:
            os.killpg(pid, signal.SIGCONT)
    if is_stopped:
        os.killpg(pid, signal.SIGKILL)

threading.Thread(target=take_orders, daemon=True).start()
while True:
    _, status = os.waitpid(pid, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    is_stopped = os.WIFSTOPPED(status)
    if not is_stopped:
        os.write(3, b"ended %d\\n" % os.waitstatus_to_exitcode(status))
        break
    os.write(3, b"stopped\\n")
"""


def _set_size(fd: int, columns: int, rows: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Terminal:
    """The keyboard and screen side of a terminal whose only job is one command."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        mode: str = "foreground",
        size: tuple[int, int] | None = None,
    ) -> None:
        report_read, report_write = os.pipe()
        order_read, order_write = os.pipe()
        shell, self._keyboard = pty.fork()
        if shell == 0:
            if size is not None:
                _set_size(0, *size)
            # To free numbers first, so that neither dup2 closes the other's source.
            copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 5) for fd in (report_write, order_read)]
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)
            os.closerange(5, max(64, *[copy + 1 for copy in copies]))
            os.execve(sys.executable, [sys.executable, "-c", _SHELL, mode, *command], dict(environ))
        os.close(report_write)
        os.close(order_read)
        os.set_blocking(report_read, False)
        os.set_blocking(self._keyboard, False)
        self.shell = shell
        self._report, self._order = report_read, order_write
        self._reports = b""
        self.is_in_background = mode == "background"
        self.screen = b""

    def set_size(self, columns: int, rows: int) -> None:
        _set_size(self._keyboard, columns, rows)

    def press(self, key: bytes) -> None:
        """Type a key, for instance ``b"\\x03"`` for Ctrl-C, at the job in the foreground."""
        if self.is_in_background:
            self.resume()
        os.write(self._keyboard, key)

    def resume(self) -> None:
        """What the shell's ``fg`` does."""
        self.is_in_background = False
        os.write(self._order, b"f")
        self.reported("foreground")

    def reported(self, text: str, timeout_s: float = 15.0) -> None:
        """Wait for the shell to report ``stopped`` or ``ended CODE``; it must be the next report."""

        def line() -> bytes:
            self._read()
            head, newline, _ = self._reports.partition(b"\n")
            return head if newline else b""

        found = until(line, timeout_s)
        assert found == text.encode(), self.screen.decode(errors="replace")
        self._reports = self._reports.partition(b"\n")[2]

    def shown(self) -> bytes:
        """All that the terminal has shown so far."""
        self._read()
        return self.screen

    def showed(self, text: str, timeout_s: float = 15.0) -> None:
        """Wait until the screen has shown ``text``, and forget what came before it and the text itself."""

        def place() -> int:
            self._read()
            return self.screen.find(text.encode()) + 1

        end = until(place, timeout_s)
        self.screen = self.screen[end - 1 + len(text.encode()) :]

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self.screen += os.read(self._keyboard, 1 << 16)
        with contextlib.suppress(BlockingIOError):
            self._reports += os.read(self._report, 1 << 12)

    def hang_up(self) -> None:
        """Close the terminal's window."""
        if self.is_in_background:
            self.resume()
        if self._keyboard >= 0:
            os.close(self._keyboard)
            self._keyboard = -1

    def close(self) -> None:
        """Hang up and end the shell."""
        self.is_in_background = False
        self.hang_up()
        os.close(self._report)
        os.close(self._order)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.shell, signal.SIGKILL)
        os.waitpid(self.shell, 0)

    @property
    def echo(self) -> bool:
        """The terminal still shows what is typed: nobody left it in a raw mode."""
        return bool(termios.tcgetattr(self._keyboard)[3] & termios.ECHO)


@contextlib.contextmanager
def terminal(
    command: Sequence[str],
    environ: Mapping[str, str] | None = None,
    mode: str = "foreground",
    size: tuple[int, int] | None = None,
) -> Iterator[Terminal]:
    """A `Terminal` for the time of a ``with`` block; ``mode`` is one of `MODES`, ``size`` columns and rows."""
    made = Terminal(command, {**os.environ, **(environ or {})}, mode, size)
    try:
        yield made
    finally:
        made.close()
