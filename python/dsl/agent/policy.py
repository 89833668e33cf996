"""What an event means for a job: pure functions of its history, the event, and the membership."""

from __future__ import annotations

from dsl import Ended, SignalReceived, Stopping
from dsl.model.outcome import (
    REQUEUE_CODE,
    SIGNAL_CODES,
    Decision,
    Hang,
    MembershipChanged,
    PatienceOver,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.outcome import History, Membership

GO_ON = Decision("go_on")

END_ACTIONS = ("stop", "ignore", "preempt")
"""Values of `dsl.SignalReceived.action` that end the job. ``ignore``: its workers were ending already."""


def decide(history: History, event: object, membership: Membership) -> Decision:
    """What follows from an event.

    For an `Ended` event, ``history`` already holds its attempt. A failed attempt is followed by another while
    restarts are left, unless an end was requested or a part of the group is left. After several attempts that
    failed at once there is a pause first. A group whose nodes change starts again without using a restart.
    """
    if isinstance(event, Ended):
        return _after(history, membership)
    if history.awaits:
        return _while_pausing(history, event)
    if isinstance(event, MembershipChanged):
        if event.membership.is_closed:
            return Decision("stop")
        return Decision("restart", counted=False) if event.membership.waiting else GO_ON
    if isinstance(event, Hang) and event.action == "stop":
        return Decision("stop")
    return GO_ON


def _after(history: History, membership: Membership) -> Decision:
    last = history.attempts[-1]
    ended = last.ended
    is_over = membership.is_closed or last.fatal_hang is not None
    can_go_on = ended.stop_signal is None and not ended.survivors and not is_over
    if can_go_on and ended.first_failure is not None:
        from dsl.model.progress import SAME_HOSTS, after_failure

        step = after_failure(history.tried, SAME_HOSTS, history.max_restarts - history.restarts)
        if step.kind == "restart":
            return Decision("pause", within_s=step.wait_s) if step.wait_s else Decision("restart")
    was_stopped = any(exit_.caused_by_stop for exit_ in last.exits)
    if can_go_on and ended.first_failure is None and history.regroups and was_stopped:
        return Decision("restart", counted=False)
    if last.is_preempted:
        return Decision("end", code=REQUEUE_CODE)
    return Decision("end", code=last.code)


def _while_pausing(history: History, event: object) -> Decision:
    last = history.attempts[-1]
    if isinstance(event, SignalReceived) and event.action in END_ACTIONS:
        return Decision("end", code=signal_code(event.signum, last.plan.preempt_signal))
    if isinstance(event, Stopping):
        return Decision("end", code=last.code)
    return Decision("restart") if isinstance(event, PatienceOver) else GO_ON


def signal_code(signum: int, preempt_signal: int | None) -> int:
    """The exit code of a job that a signal ends while no worker runs (G2)."""
    return REQUEUE_CODE if signum == preempt_signal else SIGNAL_CODES + signum
