"""Takes the output of a node's workers out of two pipes and sends it to the head, as fast as that lets it.

The engine writes to the pipes, and tells in them which lines it shows before they are finished, because a
worker was silent in the middle of one. The rest of any other line follows, however long that takes: it may
stand in front of a full pipe, or wait for a processor.
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
"""A longer line is sent in pieces of this size, or of less where the head gives less leave."""

BACKLOG = 256 << 10
"""Bytes of frames that may wait for the connection. The rest waits in the pipe, and then the workers wait."""

SIGN, UNFINISHED, ITSELF = b"\x10", b"\x10.", b"\x10-"
"""What begins each sign of the engine (``mux/compose/relayed.rs``), and the signs: what stands before it is
shown before its line is finished; the byte that begins a sign.
"""


def reserve(credit: int) -> int:
    """Leave that is kept for what the frames of one reading cost, and the tails of both pipes."""
    return (4 + min(credit, READ) // PIECE) * frames.OUTPUT_COST


class Pipe:
    """One stream of the workers, and what has been read of a line that is not complete."""

    def __init__(self, fd: int, stream: int) -> None:
        self.fd, self.stream = fd, stream
        os.set_blocking(fd, False)
        self.tail = b""
        self.owed = 0
        """Bytes of it that somebody waits for."""
        self.is_ended = False
        """Nobody can write to it any more."""
        self.is_begun = False
        """The head has the begin of the line whose next bytes come, and shows nothing else before its end."""

    def owe(self) -> None:
        """Somebody waits for what is in it now."""
        count = array("i", [0])
        fcntl.ioctl(self.fd, termios.FIONREAD, count)
        self.owed = count[0]


class Relay:
    """The two pipes of a node and the link that takes what comes out of them. For the hub's thread alone."""

    def __init__(self, link: Link, stdout_fd: int, stderr_fd: int) -> None:
        self.link = link
        self.pipes = (Pipe(stdout_fd, frames.STDOUT), Pipe(stderr_fd, frames.STDERR))

    def room(self, pipe: Pipe) -> int:
        """Bytes that may be read now. Where the head waits for the rest of a line, all leave is for that."""
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
        """Whether beginnings of lines take up the leave: the head gives no more until it has one of them."""
        if pipe.tail in (b"", SIGN) or self.room(pipe) or self._is_behind(pipe):
            return False
        return 4 * self._held() >= self.link.credit

    def pump(self, pipe: Pipe) -> None:
        """Read once, and queue the whole lines of it; or the begin of a line that takes up the leave."""
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
        while len(rest) > PIECE:  # something is left for a last piece, which says that it is the last
            end = PIECE - rest.startswith(SIGN, PIECE - 1)
            self._send(pipe, rest[:end], begins=True)
            rest = rest[end:]
        pipe.tail = rest

    def is_done(self) -> bool:
        """Nothing of what somebody waits for is left here; or nobody takes it any more."""
        if self.link.is_lost:
            return True
        is_empty = not any(pipe.owed or pipe.tail for pipe in self.pipes)
        return is_empty and self.link.is_idle and not self.link.waits_to_write

    def flush(self, pipe: Pipe) -> None:
        """Send what there is of a line: nothing more of it comes, or nobody waits for it."""
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
