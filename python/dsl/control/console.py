"""Shows the workers' output that the agents send, on one thread that may wait for a slow terminal.

The bytes of one frame stay together. While the rest of a line is on its way, the frames of other agents wait.
A line that stays unfinished is shown as far as it has come. If another line must be shown then, the
unfinished line ends with a mark, and is shown again from its start when it goes on. Otherwise the bytes are
exactly those of the workers.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque

from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    Piece: TypeAlias = tuple[object, int, bytes, bool]
    """Source, stream (1 or 2), bytes, whether the rest of the line follows."""
    Speaker: TypeAlias = tuple[object, int]
    """A source, such as an agent's link, and one of its two streams."""

CUT = "\u2026".encode()
"""Ends an unfinished line before another line; a node's own console has the same mark."""

LONGEST_BEGUN = 64 << 10
"""A longer unfinished line is not shown again from its start."""

LONGEST_BEGUN_OF_ALL = 4 << 20
"""If all unfinished lines together are longer, the line that goes on is not shown again either."""


class _Target:
    """One file, pipe or terminal; stdout and stderr may be the same one."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name
        self.is_gone = False
        self.holder: Speaker | None = None
        """The speaker in the middle of a line whose rest follows at once."""
        self.waiting: deque[Piece] = deque()
        self._speaker: Speaker | None = None
        """The speaker of the last bytes."""
        self._begun: dict[Speaker, bytes] = {}
        """The unfinished lines, as far as they were shown; an empty one is not shown again."""
        self._begun_bytes = 0

    def begin(self, speaker: Speaker) -> bytes:
        """What to show before a speaker's next bytes: the end of another's line, the start of its own."""
        if speaker == self._speaker:
            return b""
        before = b""
        if self._speaker is not None and (theirs := self._begun.get(self._speaker)) is not None:
            is_bar = b"\r" in theirs
            if is_bar or not theirs:
                self._keep(self._speaker, b"")
                before = b"\n"
            else:
                before = CUT + b"\n"
        self._speaker = speaker
        return before + self._begun.get(speaker, b"")

    def went_on(self, speaker: Speaker, data: bytes) -> None:
        """Note what was written."""
        cut = data.rfind(b"\n") + 1
        if cut == len(data):
            self._keep(speaker, None)
        elif cut or speaker not in self._begun:
            self._keep(speaker, data[cut:])
        elif before := self._begun[speaker]:
            self._keep(speaker, before + data)

    def _keep(self, speaker: Speaker, begun: bytes | None) -> None:
        """Note the unfinished line of a speaker, as far as it was shown; None: there is none."""
        self._begun_bytes -= len(self._begun.pop(speaker, b""))
        if begun is None:
            return
        all_bytes = self._begun_bytes + len(begun)
        if len(begun) > LONGEST_BEGUN or all_bytes > LONGEST_BEGUN_OF_ALL:
            begun = b""
        self._begun[speaker] = begun
        self._begun_bytes += len(begun)

    def forget(self, who: object) -> None:
        """Forget the unfinished lines of a source that has ended."""
        for speaker in [one for one in self._begun if one[0] is who]:
            self._keep(speaker, b"" if speaker == self._speaker else None)
        if self.holder is not None and self.holder[0] is who:
            self.holder = None


class Console:
    """Writes to two descriptors.

    ``taken(who, count)`` is called when ``count`` bytes of the source ``who`` have been written or thrown
    away, and ``tell`` with notices for the user. Both are called on the thread of the console.
    """

    def __init__(
        self,
        stdout_fd: int,
        stderr_fd: int,
        taken: Callable[[object, int], None],
        tell: Callable[[Notice], None],
    ) -> None:
        self._taken, self._tell = taken, tell
        self._targets = _targets(stdout_fd, stderr_fd)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Piece | tuple[object]] = deque()
        self._unshown = 0
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name="dsl-console", daemon=True)

    def put(self, who: object, fd: int, data: bytes, *, unfinished: bool) -> None:
        """Show bytes soon. Never waits: the hub limits the bytes that an agent may send."""
        with self._lock:
            self._queue.append((who, fd, data, unfinished))
            self._unshown += 1
            self._changed.notify_all()

    def end(self, who: object) -> None:
        """Note that a source has ended, so that its unfinished line does not hold up the others."""
        with self._lock:
            self._queue.append((who,))
            self._unshown += 1
            self._changed.notify_all()

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until all bytes are shown; False: the time was over first."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._unshown, timeout_s)

    def close(self) -> None:
        """Let the thread end when it has shown what is there."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if not self._queue:
                    return
                batch, self._queue = self._queue, deque()
            for piece in batch:
                if len(piece) == 1:
                    self._let_go(piece[0])
                else:
                    self._place(piece)

    def _done(self, count: int = 1) -> None:
        with self._lock:
            self._unshown -= count
            if not self._unshown:
                self._changed.notify_all()

    def _place(self, piece: Piece) -> None:
        target = self._targets[piece[1]]
        if target.holder not in (None, piece[:2]):
            target.waiting.append(piece)
            return
        self._show(target, piece)
        self._show_waiting(target)

    def _show_waiting(self, target: _Target) -> None:
        """Show the pieces that waited, until a speaker is in the middle of a line again."""
        while target.waiting:
            kept: deque[Piece] = deque()
            for piece in target.waiting:
                if target.holder in (None, piece[:2]):
                    self._show(target, piece)
                else:
                    kept.append(piece)
            is_stuck = len(kept) == len(target.waiting)
            target.waiting = kept
            if is_stuck:
                return

    def _let_go(self, who: object) -> None:
        for target in set(self._targets.values()):
            target.forget(who)
            self._show_waiting(target)
        self._done()

    def _show(self, target: _Target, piece: Piece) -> None:
        who, fd, data, unfinished = piece
        if data:
            self._write(target, target.begin((who, fd)) + data)
            target.went_on((who, fd), data)
        target.holder = (who, fd) if unfinished else None
        self._taken(who, len(data))
        self._done()

    def _write(self, target: _Target, data: bytes) -> None:
        left = memoryview(data)
        while left and not target.is_gone:
            try:
                left = left[os.write(target.fd, left) :]
            except BlockingIOError:  # a process that shares it has made it non-blocking
                poller = select.poll()
                poller.register(target.fd, select.POLLOUT)
                poller.poll()
            except OSError as error:
                target.is_gone = True
                self._tell(
                    Notice(
                        "warning",
                        f"{target.name} cannot be written ({error.strerror}): nothing more of the workers' "
                        "output is shown there",
                    )
                )


def _targets(stdout_fd: int, stderr_fd: int) -> dict[int, _Target]:
    """The target of each stream. If both go to the same file or terminal, there is one target."""
    out = _Target(stdout_fd, "stdout")
    try:
        one, other = os.fstat(stdout_fd), os.fstat(stderr_fd)
        is_same = (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
    except OSError:  # one of them is closed
        is_same = False
    return {1: out, 2: out if is_same else _Target(stderr_fd, "stderr")}
