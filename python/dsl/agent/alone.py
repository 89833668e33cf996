"""What decides on a node without a conductor.

Its own failures cost restarts, and a signal to it ends only its own part.
"""

from __future__ import annotations

import time

from dsl import SignalReceived, Stopping
from dsl._record import replace
from dsl.conductor.restarts import SAME_HOSTS, after_failure, with_attempt
from dsl.model.outcome import (
    END_ACTIONS,
    GO_ON,
    AttemptOutcome,
    Decision,
    Hang,
    RestartFailed,
    Restarting,
    signal_code,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.conductor.restarts import Tried
    from dsl.model.job import Job


class Alone:
    """Decider of a node without a conductor; as it is, of the only node of a job.

    It is a channel, too, which says that a pause is over.
    """

    def __init__(self, job: Job, restarts: int = 0) -> None:
        """``restarts``: those that were counted so far."""
        self._max_restarts, self._restarts, self._policy = job.max_restarts, restarts, job.policy
        self._patience, self._gives_up = SAME_HOSTS, False
        self._tried: tuple[Tried, ...] = ()
        self._next = GO_ON
        """What follows the pause."""
        self.deadline_s: float | None = None
        """`time.monotonic` when the pause is over."""

    def fileno(self) -> int:
        """Nothing is ever readable."""
        return -1

    def read(self) -> Sequence[object]:
        """The pause is over: what follows is an event for `decide`."""
        self.deadline_s = None
        return (self._next,)

    def decide(self, event: object, last: AttemptOutcome | None) -> Decision:
        """Say what follows from an event."""
        if last is None:
            return self._while_running(event)
        if isinstance(event, AttemptOutcome):
            return self._after(last)
        if isinstance(event, RestartFailed):
            return self._end(last, closes=True)
        if isinstance(event, SignalReceived) and event.action in END_ACTIONS:
            return Decision("end", code=signal_code(event.signum, last.plan.job.signals.preempt))
        if isinstance(event, Stopping):  # without a guard the workers may not start again
            return Decision("end", code=_code_of(last) or 1)
        return self._while_waiting(event, last)

    def _after(self, last: AttemptOutcome) -> Decision:
        """What follows when nothing of the group is left, or what is left cannot be ended."""
        ended = last.ended
        self._tried = with_attempt(self._tried, last)
        has_lost_guard = any(isinstance(one, Stopping) for one in last.news)
        if ended.stop_signal is not None or last.fatal_hang is not None or has_lost_guard:
            return self._end(last)
        return self._end(last, closes=True) if ended.survivors else self._go_on(last)

    def _go_on(self, last: AttemptOutcome) -> Decision:
        """Start again after a failure, as long as restarts are left.

        A signal that came while the workers ended for the failure ends the next attempt before its start.
        """
        if last.ended.first_failure is None:
            return self._end(last)
        left = self._max_restarts - self._restarts
        step = after_failure(self._tried, self._patience, left, gives_up=self._gives_up, policy=self._policy)
        if step.kind != "restart":
            why = "attempt after attempt has failed in the same way, soon after its start"
            end = self._end(last, closes=True, why=why if step.kind == "futile" else "")
            return replace(end, not_tried=step.why)
        self._restarts += 1
        return self._restart(last, step.wait_s)

    # ------------------------------------------------------------------ what differs

    def _while_running(self, event: object) -> Decision:
        return Decision("stop") if isinstance(event, Hang) and event.action == "stop" else GO_ON

    def _while_waiting(self, event: object, last: AttemptOutcome) -> Decision:  # noqa: ARG002  nodes that meet use it
        return self._next if event is self._next else GO_ON

    def _restart(self, last: AttemptOutcome, pause_s: float) -> Decision:
        """Start again after a pause."""
        told = Restarting(last, self._restarts, wait_s=pause_s)
        self._next = Decision("start", attempt=last.plan.meeting.attempt + 1)
        if not pause_s:
            return replace(self._next, told=told)
        self.deadline_s = time.monotonic() + pause_s
        return Decision("go_on", told=told)

    def _end(self, last: AttemptOutcome, *, closes: bool = False, why: str = "") -> Decision:  # noqa: ARG002  nodes that meet use it
        """End the job as the last attempt ended. ``closes``: other nodes must not go on, either."""
        return Decision("end", code=_code_of(last), why=why)


def _code_of(last: AttemptOutcome) -> int:
    """The command's exit code after the last attempt (G2).

    Not 0 if the workers were stopped for a restart that never came.
    """
    ended = last.ended
    was_stopped = ended.first_failure is None and ended.stop_signal is None and last.fatal_hang is None
    return 1 if was_stopped and any(exit_.caused_by_stop for exit_ in last.exits) else last.final_code
