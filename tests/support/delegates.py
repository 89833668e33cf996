"""Delegates of the rendezvous, driven by a test as their agents do."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, TypeVar

from dsl._record import replace
from dsl.rendezvous.words import Lines, Meet, Met, Open, answer_from_line, order_to_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dsl.rendezvous.words import Answer, Order

    _A = TypeVar("_A", bound=Answer)

QUICK = (("last_call_timeout", "1"), ("join_timeout", "20"), ("close_timeout", "3"))
"""Settings for rounds that need not wait for more nodes."""


class GoneError(AssertionError):
    """The delegate has closed its end."""


class Driven:
    """One delegate, and what it has said."""

    def __init__(self, host: str, command: Sequence[str] = ("-m", "dsl.rendezvous.delegate")) -> None:
        ours, theirs = socket.socketpair()
        self.host = host
        self._socket = ours
        self._lines = Lines()
        self.heard: list[Answer] = []
        """All that it has said."""
        self._next = 0
        self.process = subprocess.Popen(
            [sys.executable, *command, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()

    def tell(self, order: Order) -> None:
        """Give an order."""
        self._socket.sendall(order_to_line(order))

    def wait(self, kind: type[_A], timeout_s: float = 20.0) -> _A:
        """The next answer of a kind; those of others are passed over."""
        end_s = time.monotonic() + timeout_s
        while True:
            while self._next < len(self.heard):
                self._next += 1
                answer = self.heard[self._next - 1]
                if isinstance(answer, kind):
                    return answer
            if not self._listen(end_s - time.monotonic()):
                raise AssertionError(f"{self.host}: no {kind.__name__} in {timeout_s} s, but {self.heard}")

    def quiet(self, kinds: tuple[type, ...], timeout_s: float) -> None:
        """Nothing of these kinds comes for so long."""
        end_s = time.monotonic() + timeout_s
        while self._listen(end_s - time.monotonic()):
            pass
        assert [one for one in self.heard[self._next :] if isinstance(one, kinds)] == []

    def _listen(self, timeout_s: float) -> bool:
        self._socket.settimeout(max(timeout_s, 0.01))
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return False
        if not data:
            raise GoneError(f"{self.host}: it has gone, with {self.heard}")
        self.heard += [answer_from_line(line) for line in self._lines.feed(data)]
        return True

    def end(self) -> None:
        """Close our end: its agent has gone."""
        self._socket.close()

    def wait_for_end(self, timeout_s: float = 5.0) -> int:
        """Exit code, once it has ended by itself; what it still says is heard."""
        end_s = time.monotonic() + timeout_s
        with contextlib.suppress(GoneError, OSError):
            while self._listen(end_s - time.monotonic()):
                pass
        return self.process.wait(max(end_s - time.monotonic(), 0.1))

    def meet(self, size: int = 1, role: str = "default", restarts: int = 0, reason: str = "start") -> None:
        """Give the order to meet."""
        self.tell(Meet(size, role, restarts, reason))  # type: ignore[arg-type]


def opening(host: str, endpoint: str, nodes: tuple[int, int] = (2, 2), **changes: object) -> Open:
    """The first order of an agent."""
    order = Open("c10d", endpoint, "job", *nodes, None, QUICK, host)
    return replace(order, **changes)


@contextlib.contextmanager
def driven() -> Iterator[Callable[..., Driven]]:
    """Start delegates, and end those that are left."""
    started: list[Driven] = []

    def start(host: str, *command: str) -> Driven:
        one = Driven(host, command) if command else Driven(host)
        started.append(one)
        return one

    try:
        yield start
    finally:
        for one in started:
            one.end()
        for one in started:
            try:
                one.process.wait(5)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def met(*delegates: Driven, timeout_s: float = 20.0) -> list[Met]:
    """What all of them say of the round."""
    return [one.wait(Met, timeout_s) for one in delegates]
