"""Reads the output of a node's workers from two pipes and sends it to the head, as fast as the head allows.

The engine writes to the pipes. If a worker is silent in the middle of a line, the engine shows the line
before it is finished, and says so with a sign in the pipe. The rest of every other line follows, however long
that takes: the engine may wait for room in the pipe, or for a processor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
from array import array

from dsl.control import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.control.link import Link

READ = 64 << 10
"""Most bytes that are read at once."""

PIECE = 16 << 10
"""A longer line is sent in pieces of this size, or smaller ones if the head allows less."""

BACKLOG = 256 << 10
"""Bytes of frames that may wait for the connection. The rest waits in the pipe, and then the workers wait."""

SIGN, UNFINISHED, ITSELF = b"\x10", b"\x10.", b"\x10-"
"""The signs of the engine (``mux/compose/relayed.rs``). Each begins with the byte `SIGN`. `UNFINISHED`: the
bytes before it are shown before their line is finished. `ITSELF`: stands for the byte `SIGN` in the output.
"""


def reserve(credit: int) -> int:
    """Leave to keep for the cost of the frames of one reading, and of the tails of both pipes."""
    return (4 + min(credit, READ) // PIECE) * frames.OUTPUT_COST


class Pipe:
    """One stream of the workers, and the part of an incomplete line that has been read."""

    def __init__(self, fd: int, stream: int) -> None:
        self.fd, self.stream = fd, stream
        os.set_blocking(fd, False)
        self.tail = b""
        self.owed = 0
        """Bytes in the pipe that `Hub.drain` waits for."""
        self.is_ended = False
        """Whether its last write end is closed."""
        self.is_begun = False
        """Whether the head has the start of this pipe's line, and shows nothing else before its end."""

    def owe(self) -> None:
        """Note how many bytes are in the pipe now: `Hub.drain` waits for these."""
        count = array("i", [0])
        fcntl.ioctl(self.fd, termios.FIONREAD, count)
        self.owed = count[0]


class Relay:
    """The two pipes of a node and the link that takes what comes out of them. For the hub's thread alone."""

    def __init__(self, link: Link, stdout_fd: int, stderr_fd: int) -> None:
        self.link = link
        self.pipes = (Pipe(stdout_fd, frames.STDOUT), Pipe(stderr_fd, frames.STDERR))

    def room(self, pipe: Pipe) -> int:
        """Bytes that may be read now; 0 while the head waits for the rest of a line of the other pipe."""
        if self.link.is_lost:
            return READ
        if self._is_behind(pipe):
            return 0
        credit = self.link.credit
        return max(min(credit - self._held() - reserve(credit), BACKLOG - self.link.output_bytes), 0)

    def _held(self) -> int:
        return sum(len(pipe.tail) for pipe in self.pipes)

    def _is_behind(self, pipe: Pipe) -> bool:
        """Whether the head waits for the rest of a line of the other pipe."""
        return any(other.is_begun and not other.is_ended for other in self.pipes if other is not pipe)

    def is_full(self, pipe: Pipe) -> bool:
        """Whether incomplete lines use up the leave: the head gives no more until it gets one of them."""
        if pipe.tail in (b"", SIGN) or self.room(pipe) or self._is_behind(pipe):
            return False
        return 4 * self._held() >= self.link.credit

    def pump(self, pipe: Pipe) -> None:
        """Read once and queue the whole lines, or queue the start of a line that uses up the leave."""
        if self.is_full(pipe):
            end = len(pipe.tail) - pipe.tail.endswith(SIGN)
            self._send(pipe, pipe.tail[:end], begins=True)
            pipe.tail = pipe.tail[end:]
            return
        room = min(self.room(pipe), READ)
        if not room:
            return
        try:
            data = os.read(pipe.fd, room)
        except BlockingIOError:
            pipe.owed = 0
            return
        if not data:
            pipe.owed, pipe.is_ended = 0, True
            self.flush(pipe)
            return
        pipe.owed = max(pipe.owed - len(data), 0)
        if self.link.is_lost:
            return
        data = pipe.tail + data
        cut = data.rfind(b"\n") + 1
        mark = data.rfind(UNFINISHED, cut)
        if mark >= 0:
            cut = mark + len(UNFINISHED)
        if cut:
            self._send(pipe, data[:cut])
        rest = data[cut:]
        while len(rest) > PIECE:  # leave bytes for a last piece, which tells the head that it is the last
            end = PIECE - rest.startswith(SIGN, PIECE - 1)
            self._send(pipe, rest[:end], begins=True)
            rest = rest[end:]
        pipe.tail = rest

    def is_done(self) -> bool:
        """Whether all bytes that `Hub.drain` waits for are sent, or the head is gone."""
        if self.link.is_lost:
            return True
        is_empty = not any(pipe.owed or pipe.tail for pipe in self.pipes)
        return is_empty and self.link.is_idle and not self.link.waits_to_write

    def flush(self, pipe: Pipe) -> None:
        """Send an incomplete line as it is: its rest never comes, or we do not wait for the rest."""
        if not self.link.is_lost:
            self._send(pipe, pipe.tail)
        pipe.tail = b""

    def _send(self, pipe: Pipe, data: bytes, *, begins: bool = False) -> None:
        """``begins``: the rest of the line follows in the next frames."""
        if SIGN in data:
            data = data.replace(UNFINISHED, b"").replace(ITSELF, SIGN)
        if data or pipe.is_begun:
            self.link.queue_output(frames.output(pipe.stream, data, unfinished=begins), len(data))
            pipe.is_begun = begins

    def close(self) -> None:
        """Close both pipes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                os.close(pipe.fd)
