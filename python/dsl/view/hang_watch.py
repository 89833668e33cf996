"""Judges whether a job hangs (``--hang-timeout``). Pure: it has no clock and looks at no process.

A job hangs if all of this holds for the whole time-out:

- No rank and no descendant of a rank reads or writes a byte, waits for a page from disk, comes or goes.
- No Python thread of a rank moves to another line.
- Every rank waits: its main thread is in a collective operation, or has not been woken once, and its
  processes use hardly any CPU time. A rank that computes counts as waiting only if it is known to get
  nowhere: it spins in a collective operation or in the driver of a GPU, or in a loop that does nothing.

A missed hang is better than a false alarm: a rank about which we know too little makes progress.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

from dsl.model.observation import NodePulse, NodeStacks, RankStacks, Sight, ThreadStack
from dsl.view.explain import (
    group,
    is_known_wait,
    python_frames,
    spins_in_collective,
    waits_in_collective,
)

Place: TypeAlias = tuple[int, int]
"""Node rank and local rank."""
Progress: TypeAlias = Literal["none", "some", "computes"]
"""``computes``: its C frames have to show whether it gets anywhere."""

LOOKS = 8
"""Looks in the time of a time-out."""
LEAST_STACKS = 3
"""So many looks at the stacks have to agree."""
SLACK_S = 15.0
"""A look may take so long. A longer gap between looks proves nothing: we were stopped, too."""
IDLE_SHARE = 0.05
"""A rank that waits uses at most this much of a CPU: threads of gloo and NCCL look for news all the time."""
BUSY_CHILD = 0.1
"""A descendant that uses more of a CPU while we look makes progress."""
POLLS_A_S = 2.0
"""So often in a second a thread that is known to wait may look for what it waits for."""

_DRIVERS = ("libcuda.so", "libnccl.so", "libamdhip64.so", "libhsa-runtime64.so", "librccl.so")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd")


class HangWatch:
    """Watches a job for hangs. Times are seconds of any one clock that never goes back."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self.interval_s = timeout_s / LOOKS
        """Time between two looks."""
        self.sight: Sight = "stacks"
        """How to look at the stacks next."""
        self.still_s = 0.0
        """How long the job had made no progress at the last look."""
        self._timeout_s = timeout_s
        self._is_told = False
        self._marks: Mapping[Place, str] = {}
        self._heard_s = now_s
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        """There was progress."""
        self._since_s = self._looked_s = now_s
        self._first: dict[Place, RankStacks] = {}
        self._count = 0
        self.sight = "stacks"
        self.still_s = 0.0
        self._is_told = False

    def hear_pulses(self, now_s: float, nodes: Sequence[NodePulse], missing: Sequence[str] = ()) -> bool:
        """Hear the counters of all nodes. Whether the stacks of all ranks are needed now.

        ``missing``: hosts that have not answered.
        """
        marks = {(node.node_rank, rank.local_rank): rank.mark for node in nodes for rank in node.ranks}
        was_away = now_s - self._heard_s > self.interval_s + SLACK_S
        has_changed = marks != self._marks
        self._heard_s, self._marks = now_s, marks
        if missing or was_away or has_changed or not any(marks.values()):
            self._begin(now_s)
            return False
        self.still_s = now_s - self._since_s
        if self._is_told:
            return now_s - self._looked_s >= self._timeout_s / 2
        return self.still_s >= self._timeout_s / 2

    def hear_stacks(self, now_s: float, nodes: Sequence[NodeStacks], missing: Sequence[str] = ()) -> bool:
        """Hear the stacks of all ranks. Whether the job hangs; each hang is reported once."""
        ranks = {(node.node_rank, rank.local_rank): rank for node in nodes for rank in node.ranks}
        span_s = max(now_s - self._looked_s, 1e-3)
        before = self._first
        progress = "some"
        if not missing and ranks.keys() == self._marks.keys() and _can_hang(ranks.values()):
            progress = _progress(before, ranks, span_s) if before else "none"
        if progress == "computes" and self.sight == "stacks":
            self.sight, self._first, self._count = "native", {}, 0
            return False
        if progress != "none":
            self._begin(now_s)
            return False
        if not before or self._is_told:
            self._first, self._looked_s = ranks, now_s
        self._count += 1
        self._heard_s = now_s
        self.still_s = now_s - self._since_s
        is_hang = self.still_s >= self._timeout_s and self._count >= LEAST_STACKS and not self._is_told
        self._is_told |= is_hang
        return is_hang


def odd_ranks(nodes: Sequence[NodeStacks]) -> tuple[int, ...]:
    """The ranks to end, so that the job can start again: those that do something else than most ranks.

    A rank that has ended, or that no signal ends, is of no use: then it is the first rank of the others.
    """
    crowd, *others = group(nodes)
    living = [rank for other in others for _, rank in other.members if rank.pid]
    if not living or any(rank.state == "D" for rank in living):
        living += [rank for _, rank in crowd.members if rank.pid][:1]
    return tuple([rank.rank for rank in living])


def _can_hang(ranks: Collection[RankStacks]) -> bool:
    """Whether a look at all ranks shows no reason why the job goes on by itself."""
    living = [rank for rank in ranks if rank.pid]
    if all(rank.state == "T" for rank in living):
        return False  # none runs, or the user has stopped the job
    return not any(_goes_on(rank) for rank in living)


def _goes_on(rank: RankStacks) -> bool:
    """Whether a rank goes on by itself, is in the hands of a user, or is unknown to us."""
    main = _main(rank)
    if (
        main is None
        or rank.state == "t"
        or any(word in frame.file for frame in main.frames for word in _DEBUGGERS)
    ):
        return True
    if main.state == "S" and main.call.endswith(("(stdout)", "(stderr)")):
        return True  # it waits for the reader of the output, such as a pager
    if rank.naps or any(thread.pid and thread.cpu_share > BUSY_CHILD for thread in rank.threads):
        return True
    return _sleeps(main) and not waits_in_collective(rank)


def _main(rank: RankStacks) -> ThreadStack | None:
    return next((thread for thread in rank.threads if thread.is_main), None)


def _sleeps(thread: ThreadStack) -> bool:
    return thread.call.endswith("nanosleep")


def _progress(before: Mapping[Place, RankStacks], now: Mapping[Place, RankStacks], span_s: float) -> Progress:
    """What all ranks together have done between two looks."""
    found = {_progress_of(before[place], rank, span_s) for place, rank in now.items()}
    return "some" if "some" in found else "computes" if "computes" in found else "none"


def _progress_of(before: RankStacks, now: RankStacks, span_s: float) -> Progress:
    """What a rank has done between two looks."""
    if before.pid != now.pid:
        return "some"
    if not now.pid:
        return "none"
    old, new = _threads(before), _threads(now)
    if [_signature(thread) for thread in old] != [_signature(thread) for thread in new]:
        return "some"
    main = new[0]
    share = (now.cpu_ms - before.cpu_ms) / 1000 / span_s
    if share > IDLE_SHARE:
        gets_nowhere = main.is_bare_loop or spins_in_collective(now) or _is_in_driver(main)
        return "none" if gets_nowhere else "computes"
    if waits_in_collective(now):
        old, new = old[1:], new[1:]  # it looks at the store, or for news, as often as it likes
    wakes = [_has_woken(earlier, later, now, span_s) for earlier, later in zip(old, new, strict=True)]
    return "some" if any(wakes) else "none"


def _threads(rank: RankStacks) -> list[ThreadStack]:
    """The threads that tell about progress: the main thread, those with Python frames, and descendants."""
    return [thread for thread in rank.threads if thread.is_main or thread.pid or thread.frames]


def _signature(thread: ThreadStack) -> tuple[object, ...]:
    """What stays the same while a thread makes no progress."""
    frames = python_frames(thread)
    if not frames:
        return thread.name, thread.pid, thread.call, thread.channel
    first = frames[0]
    place = (first.function, first.file, 0 if thread.is_bare_loop else first.line)
    return thread.name, thread.pid, place, *frames[1:]


def _is_in_driver(main: ThreadStack) -> bool:
    """Whether its C frames show that it waits for a GPU."""
    frames = python_frames(main)
    native = main.frames[: main.frames.index(frames[0])] if frames else main.frames
    return any(name in frame.file for frame in native for name in _DRIVERS)


def _has_woken(before: ThreadStack, now: ThreadStack, rank: RankStacks, span_s: float) -> bool:
    """Whether a thread has begun to wait again, more often than its way of waiting explains."""
    looks_again = is_known_wait(now, rank) or (_sleeps(now) and not now.is_main and not now.pid)
    return now.switches - before.switches > (POLLS_A_S * span_s if looks_again else 0)
