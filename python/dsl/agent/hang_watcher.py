"""``--hang-timeout``: looks at all ranks of the job from time to time, and tells the agent of a hang.

`dsl.observe.hang_watch` judges. The looks are made on a thread, so the agent never waits for one.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Event

from dsl import EngineError
from dsl.model.observation import Look
from dsl.model.outcome import EndHung, Hang
from dsl.observe.explain import explain
from dsl.observe.hang_watch import HangWatch, odd_ranks
from dsl.report.speak import optional
from dsl.signals import start_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from dsl.model.node import NodePlan

    Ask = Callable[[Look], "tuple[Sequence[Any], Sequence[str]]"]
    """Puts a question to all nodes of the job. Returns their answers, and the hosts that have not answered.
    Raises OSError or EngineError: the job is ending."""


class HangWatcher:
    """A channel of the agent with a `Hang` for each hang.

    ``ends_ranks``: there is no conductor to end ranks, so an `EndHung` may follow.
    """

    deadline_s = None

    def __init__(self, plan: NodePlan, ask: Ask, *, ends_ranks: bool) -> None:
        """Begin to watch. Raises OSError or RuntimeError: there are too many descriptors or threads."""
        assert plan.hang_timeout_s is not None
        self._action, self._command, self._ends_ranks = plan.hang_action, plan.command, ends_ranks
        self._ask = ask
        self._watch = HangWatch(plan.hang_timeout_s, time.monotonic())
        self._found: list[Hang] = []
        self._is_over = Event()
        self._ours, self._theirs = socket.socketpair()
        what = "nobody watches for hangs any more (--hang-timeout)"
        start_thread(lambda: optional(self._command, what, self._run), "dsl-hang-watch")

    def fileno(self) -> int:
        """A descriptor that is readable when a hang was found; -1: the watch has ended."""
        return self._ours.fileno()

    def read(self) -> Sequence[object]:
        """The hangs that were found, and what they lead to."""
        if not self._ours.recv(1):
            self._ours.close()
            return ()
        hang = self._found.pop(0)
        if self._ends_ranks and hang.action == "restart":
            return hang, EndHung(hang.attempt, hang.ranks, hang.why)
        return (hang,)

    def close(self) -> None:
        """End the watch."""
        self._is_over.set()
        self._ours.close()

    def _run(self) -> None:
        with self._theirs:
            while not self._is_over.wait(self._watch.interval_s):
                with suppress(OSError, EngineError):  # between two attempts, or at the end of the job
                    self._look()

    def _look(self) -> None:
        watch = self._watch
        pulses, missing = self._ask(Look(0, "pulse"))
        if not watch.hear_pulses(time.monotonic(), pulses, missing):
            return
        stacks, missing = self._ask(Look(0, watch.sight))
        if not watch.hear_stacks(time.monotonic(), stacks, missing):
            return
        attempt = max(node.attempt for node in pulses)
        ranks = odd_ranks(stacks)
        hang = Hang(attempt, round(watch.still_s, 1), self._action, tuple(explain(stacks)), ranks)
        self._found.append(hang)
        self._theirs.send(b"!")
