"""Looks that are made beside the loop of the agent, which waits for a descriptor and never for a thread.

Another process, the taker, finds out what workers execute: see `dsl.view.stacks`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

from dsl import EngineError
from dsl._own_process import START
from dsl._record import replace
from dsl.errors import JobFormatError
from dsl.model.codec import Lines, to_line
from dsl.model.job import NodePlan
from dsl.model.observation import Look, RankStacks, RankStatus
from dsl.report.speak import optional
from dsl.words import shortage, start_thread

Ask = Callable[[Look], "tuple[Sequence[Any], Sequence[str]]"]
"""Puts a question to all nodes of the job. Returns their answers, and the hosts that have not answered.
Raises OSError or EngineError: the job is ending."""

TAKE_S = 5.0
"""A taker that has not answered by then is killed, unless its caller has less time."""

LOOK_S = 2.5
"""Stacks after a failure that are not there by then are left out: the stop comes."""
MOST_RANKS = 256
"""Workers of a node at which we look after a failure."""
MOST_FRAMES = 16
"""Frames of a main thread that are kept then: the innermost ones."""
ENDED = "the process that takes stacks was ended"
"""The problem of a worker whose attempt has ended during the look."""


class Lookout:
    """A thread that looks, and what it shares with the agent."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._is_over = Event()

    def begin(self, work: Callable[[], object], without: str) -> None:
        """Do it on a thread. ``without``: what is missing if that fails, for a line to the user.

        Raises RuntimeError: there are too many threads.
        """
        start_thread(lambda: optional(self._command, without, work), "dsl-lookout")

    def repeat(self, work: Callable[[], None], first_s: float, every_s: float) -> None:
        """Do it after this time, and then again and again, until `close`."""
        pause_s = first_s
        while not self._is_over.wait(pause_s):
            pause_s = every_s
            with suppress(OSError, EngineError):  # between two attempts, or at the end of the job
                work()

    def close(self) -> None:
        """Look no more."""
        self._is_over.set()


class WatchChannel(Lookout):
    """A lookout that is a channel of the agent."""

    deadline_s = None

    def __init__(self, command: str, work: Callable[[], object], without: str) -> None:
        """Begin. Raises OSError or RuntimeError: there are too many descriptors or threads."""
        super().__init__(command)
        self._found: list[tuple[object, ...]] = []
        self._ours, self._theirs = socket.socketpair()

        def run() -> None:
            with self._theirs:
                work()

        self.begin(run, without)

    def tell(self, *events: object) -> None:
        """Let the agent read these events."""
        self._found.append(events)
        self._theirs.send(b"!")

    def fileno(self) -> int:
        """A descriptor that is readable when something was found; -1: nobody looks any more."""
        return self._ours.fileno()

    def read(self) -> Sequence[object]:
        """What was found."""
        if self._ours.recv(1):
            return self._found.pop(0)
        self._ours.close()
        return ()

    def close(self) -> None:
        """Look no more, and forget what was found."""
        super().close()
        self._ours.close()


class HangWatcher(WatchChannel):
    """``--hang-timeout``: a `Hang` for each hang that `dsl.view.hang_watch` finds.

    ``ends_ranks``: there is no conductor to end ranks, so an `EndHung` may follow.
    """

    def __init__(self, plan: NodePlan, ask: Ask, *, ends_ranks: bool) -> None:
        """Begin to watch. Raises as `WatchChannel`."""
        from dsl.view.hang_watch import HangWatch

        timeout_s = plan.job.hang_timeout_s
        assert timeout_s is not None
        self._action, self._ends_ranks, self._ask = plan.job.hang_action, ends_ranks, ask
        self._watch = watch = HangWatch(timeout_s, time.monotonic())
        without = "nobody watches for hangs any more (--hang-timeout)"

        def look() -> None:
            self.repeat(self._look, watch.interval_s, watch.interval_s)

        super().__init__(plan.command, look, without)

    def _look(self) -> None:
        from dsl.model.outcome import EndHung, Hang
        from dsl.view.explain import explain_stacks
        from dsl.view.hang_watch import odd_ranks

        watch = self._watch
        pulses, missing = self._ask(Look(0, "pulse"))
        if not watch.hear_pulses(time.monotonic(), pulses, missing):
            return
        stacks, missing = self._ask(Look(0, watch.sight))
        if not watch.hear_stacks(time.monotonic(), stacks, missing):
            return
        attempt = max(node.attempt for node in pulses)
        ranks = odd_ranks(stacks)
        hang = Hang(attempt, round(watch.still_s, 1), self._action, tuple(explain_stacks(stacks)), ranks)
        ends_ranks = self._ends_ranks and hang.action == "restart"
        self.tell(hang, *([EndHung(attempt, ranks, hang.why)] if ends_ranks else []))


class FailureLook(WatchChannel):
    """``--stacks-on-failure``: what the others execute when a worker has failed, before they are stopped.

    It is readable once, when the look is over.
    """

    def __init__(self, plan: NodePlan, pids: Sequence[int]) -> None:
        """``pids``: those of the plan's workers; 0: it does not run. Raises as `WatchChannel`."""
        self.stacks: tuple[RankStacks, ...] = ()
        """What the workers execute that run, as soon as it is known."""
        self.is_going_on = True
        """Whether nobody has read that the look is over."""
        pairs = zip(plan.workers[:MOST_RANKS], pids, strict=False)
        self._ranks = [RankStatus(worker.rank, worker.local_rank, pid) for worker, pid in pairs if pid]
        super().__init__(plan.command, self._take, "what the other workers did is unknown")

    def _take(self) -> None:
        found = list(take_stacks(Look(0, "stacks"), self._ranks, LOOK_S))
        self.stacks = tuple([_brief(one) for one in found if one.pid and one.problem != ENDED])

    def read(self) -> Sequence[object]:
        """The look itself, as the event that it is over."""
        self.is_going_on = False
        return (self,)


def _brief(stacks: RankStacks) -> RankStacks:
    """Main threads with few frames: a report holds the stacks of many ranks."""
    kept = [replace(one, frames=one.frames[:MOST_FRAMES]) for one in stacks.threads if one.is_main]
    return replace(stacks, threads=tuple(kept))


def take_stacks(look: Look, ranks: Sequence[RankStatus], within_s: float = TAKE_S) -> Iterator[RankStacks]:
    """What these workers of this machine execute, as it becomes known, for at most so long after the samples.

    A worker whose stacks could not be taken comes last, with a `problem`.
    """
    missing = {one.local_rank: one for one in ranks}
    why = "the process that takes stacks gave no answer in time"
    try:
        with _taker("sampling" if look.what == "samples" else "stacks") as taker:
            taker.sendall(b"".join([to_line(record) for record in (look, *ranks)]))
            taker.shutdown(socket.SHUT_WR)
            for stacks in _answers(taker, within_s + look.for_s):
                if missing.pop(stacks.local_rank, None):
                    yield stacks
    except ConnectionError:
        why = ENDED
    except (OSError, JobFormatError) as error:
        why = f"the process that takes stacks failed: {shortage(error) or error}"
    for one in missing.values():
        yield RankStacks(one.rank, one.local_rank, one.pid, problem=why)


def _answers(taker: socket.socket, within_s: float) -> Iterator[RankStacks]:
    lines = Lines(RankStacks)
    deadline_s = time.monotonic() + within_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        taker.settimeout(left_s)
        try:
            data = taker.recv(1 << 16)
        except TimeoutError:
            return
        if not data:
            raise ConnectionResetError
        yield from lines.feed(data)


@contextmanager
def _taker(module: str) -> Iterator[socket.socket]:
    """The connection to a new taker, of this module, which ends with the block."""
    code = f"{START}from dsl.view.{module} import main; main()"
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", code],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,
                setsigmask=(),
            )
        # The engine reaps it, too, and then its pid may belong to another process.
        pidfd = None
        with suppress(OSError):  # it has ended, or the kernel has no pidfds: it ends by itself
            pidfd = os.pidfd_open(pid)
        try:
            yield ours
        finally:
            if pidfd is not None:
                with suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
