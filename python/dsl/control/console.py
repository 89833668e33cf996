"""Shows what the agents send of their workers' output: one thread that may wait for a slow terminal.

What one agent sends in one frame stays together. Frames of others wait while the rest of a line is on its
way. A line that stays unfinished is shown as far as it is. If another one has to come, it ends there with a
mark, and comes again, whole, when it goes on. Otherwise the bytes are those of the workers.
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
    """Whose, of which stream (1 or 2), bytes, whether the rest of the line follows."""
    Speaker: TypeAlias = tuple[object, int]
    """Somebody, and one of the two streams."""

CUT = "\u2026".encode()
"""Ends a line where another one has to come; it is the mark of a node's own console, too."""

LONGEST_BEGUN = 64 << 10
"""A longer line is not shown again from its begin."""

LONGEST_BEGUN_OF_ALL = 4 << 20
"""Where all of them together are longer, the line that goes on is not."""


class _Target:
    """One file, pipe or terminal; stdout and stderr may be the same one."""

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name
        self.is_gone = False
        self.holder: Speaker | None = None
        """Who is in the middle of a line whose rest follows at once."""
        self.waiting: deque[Piece] = deque()
        self._speaker: Speaker | None = None
        """Who has spoken last."""
        self._begun: dict[Speaker, bytes] = {}
        """Lines that are not finished, as far as they were shown; empty: it is not shown again."""
        self._begun_bytes = 0

    def begin(self, speaker: Speaker) -> bytes:
        """What comes before the next bytes of somebody: the end of another's line, the begin of their own."""
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
        """Note the line of somebody as far as it was shown; None: there is none."""
        self._begun_bytes -= len(self._begun.pop(speaker, b""))
        if begun is None:
            return
        all_bytes = self._begun_bytes + len(begun)
        if len(begun) > LONGEST_BEGUN or all_bytes > LONGEST_BEGUN_OF_ALL:
            begun = b""
        self._begun[speaker] = begun
        self._begun_bytes += len(begun)

    def forget(self, who: object) -> None:
        """Nobody goes on with the lines of somebody."""
        for speaker in [one for one in self._begun if one[0] is who]:
            self._keep(speaker, b"" if speaker == self._speaker else None)
        if self.holder is not None and self.holder[0] is who:
            self.holder = None


class Console:
    """Writes to two descriptors.

    ``taken(who, count)`` is called when bytes of somebody have been written or thrown away, ``tell`` with
    what the user should know. Both are called on the thread of the console.
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
        """Show bytes soon. Never waits: whoever sends them has leave for so many."""
        with self._lock:
            self._queue.append((who, fd, data, unfinished))
            self._unshown += 1
            self._changed.notify_all()

    def end(self, who: object) -> None:
        """Nothing more comes from somebody: an unfinished line of theirs holds up nobody."""
        with self._lock:
            self._queue.append((who,))
            self._unshown += 1
            self._changed.notify_all()

    def drain(self, timeout_s: float | None) -> bool:
        """Wait until all that was put is shown; False: it is not yet."""
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
        """Show what has waited, until somebody is in the middle of a line again."""
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
            except BlockingIOError:  # whoever shares it has made it so
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
    """Where each stream goes. Two names of one file or terminal are one place."""
    out = _Target(stdout_fd, "stdout")
    try:
        one, other = os.fstat(stdout_fd), os.fstat(stderr_fd)
        is_same = (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
    except OSError:  # one of them is closed
        is_same = False
    return {1: out, 2: out if is_same else _Target(stderr_fd, "stderr")}
