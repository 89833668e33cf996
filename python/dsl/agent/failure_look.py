"""``--stacks-on-failure``: what the other workers execute when one has failed, before they are stopped."""

from __future__ import annotations

import socket

from dsl._record import replace
from dsl.model.observation import Look, RankStacks, RankStatus
from dsl.observe.taker import take_stacks
from dsl.report.speak import optional
from dsl.signals import start_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.model.node import NodePlan

LOOK_S = 2.5
"""Stacks that are not there by then are left out: the stop comes."""
MOST_RANKS = 256
"""Workers of a node at which we look."""
MOST_FRAMES = 16
"""Frames of a main thread that are kept: the innermost ones."""


class FailureLook:
    """A channel of the agent. It is readable once, when the look is over."""

    deadline_s = None

    def __init__(self, plan: NodePlan, pids: Sequence[int]) -> None:
        """``pids``: those of the plan's workers; 0 for a worker that does not run.

        Raises OSError or RuntimeError: there are too many descriptors or threads.
        """
        self.stacks: tuple[RankStacks, ...] = ()
        """What the workers execute that run, as soon as it is known."""
        pairs = zip(plan.workers[:MOST_RANKS], pids, strict=False)
        self._ranks = [RankStatus(worker.rank, worker.local_rank, pid) for worker, pid in pairs if pid]
        self._is_read = False
        self._ours, self._theirs = socket.socketpair()
        what = "what the other workers did is unknown"
        start_thread(lambda: optional(plan.command, what, self._take), "dsl-failure-look")

    def _take(self) -> None:
        with self._theirs:
            found = list(take_stacks(Look(0, "stacks"), self._ranks, LOOK_S))
            self.stacks = tuple([_brief(one) for one in found if one.pid])

    def fileno(self) -> int:
        """A descriptor that is readable when the look is over."""
        return self._ours.fileno()

    def read(self) -> Sequence[object]:
        """The look itself, as the event that it is over."""
        self._is_read = True
        return (self,)

    @property
    def is_going_on(self) -> bool:
        """Whether nobody has read that the look is over."""
        return not self._is_read

    def close(self) -> None:
        """Forget the look, whether it is over or not."""
        self._ours.close()


def _brief(stacks: RankStacks) -> RankStacks:
    """Main threads with few frames: a report holds the stacks of many ranks."""
    kept = [replace(one, frames=one.frames[:MOST_FRAMES]) for one in stacks.threads if one.is_main]
    return replace(stacks, threads=tuple(kept))
