"""Takes the output of a node's workers out of two pipes and sends it to the head, as fast as that lets it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import termios
import time
from array import array

from dsl.control import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.control.link import Link

READ = 64 << 10
"""Most bytes that are read at once."""

PIECE = 32 << 10
"""A longer line is sent in pieces of this size. It is half of the least that the head gives leave for."""

BACKLOG = 256 << 10
"""Bytes of frames that may wait for the connection. The rest waits in the pipe, and then the workers wait."""

PATIENCE_S = 0.05
"""So long the rest of a line is waited for before its beginning is sent."""

FLOOD_PATIENCE_S = 1.0
"""The same where so much was read at once that the writer has waited for it, and goes on when it can."""


class Pipe:
    """One stream of the workers, and what has been read of a line that is not complete."""

    def __init__(self, fd: int, stream: int) -> None:
        self.fd, self.stream = fd, stream
        os.set_blocking(fd, False)
        self.tail = b""
        self.due_s: float | None = None
        """When the tail is sent even without a newline; None: there is none."""
        self.owed = 0
        """Bytes of it that somebody waits for."""
        self.is_ended = False
        """Nobody can write to it any more."""

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

    def room(self) -> int:
        """Bytes that may be read now."""
        if self.link.is_lost:
            return READ
        held = sum(len(pipe.tail) for pipe in self.pipes)
        return max(min(self.link.credit - held, BACKLOG - self.link.output_bytes), 0)

    def pump(self, pipe: Pipe) -> None:
        """Read once, and queue the whole lines of it."""
        room = min(self.room(), READ)
        if not room:
            return
        try:
            data = os.read(pipe.fd, room)
        except BlockingIOError:
            pipe.owed = 0
            return
        if not data:
            pipe.owed, pipe.is_ended = 0, True
            self._flush(pipe)
            return
        pipe.owed = max(pipe.owed - len(data), 0)
        if self.link.is_lost:
            return
        data = pipe.tail + data
        cut = data.rfind(b"\n") + 1
        rest = data[cut:]
        if cut:
            self.link.queue_output(frames.output(pipe.stream, data[:cut]), cut)
        while len(rest) > PIECE:  # something is left for a last piece, which says that it is the last
            piece, rest = rest[:PIECE], rest[PIECE:]
            self.link.queue_output(frames.output(pipe.stream, piece, unfinished=True), PIECE)
        pipe.tail = rest
        patience_s = PATIENCE_S if len(data) < READ // 2 else FLOOD_PATIENCE_S
        pipe.due_s = time.monotonic() + patience_s if rest else None

    def flush_due(self, now_s: float, *, emptied: bool = False) -> None:
        """Send the beginnings of lines that have waited long enough; ``emptied``: or are all there is."""
        for pipe in self.pipes:
            if pipe.due_s is not None and (pipe.due_s <= now_s or (emptied and not pipe.owed)):
                self._flush(pipe)

    def is_done(self) -> bool:
        """Nothing of what somebody waits for is left here; or nobody takes it any more."""
        if self.link.is_lost:
            return True
        is_empty = not any(pipe.owed or pipe.tail for pipe in self.pipes)
        return is_empty and self.link.is_idle and not self.link.waits_to_write

    def _flush(self, pipe: Pipe) -> None:
        if pipe.tail and not self.link.is_lost:
            # More of the line lies there, and will be sent when the head has leave for it.
            unfinished = not self.room() and _holds_bytes(pipe.fd)
            self.link.queue_output(
                frames.output(pipe.stream, pipe.tail, unfinished=unfinished), len(pipe.tail)
            )
        pipe.tail, pipe.due_s = b"", None

    def due_s(self) -> float | None:
        """When something has to be sent at the latest."""
        return min([pipe.due_s for pipe in self.pipes if pipe.due_s is not None], default=None)

    def close(self) -> None:
        """Close both pipes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                os.close(pipe.fd)


def _holds_bytes(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return any(mask & select.POLLIN for _, mask in poller.poll(0))
