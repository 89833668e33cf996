"""What decides on a node without a conductor, whose nodes meet by torch's own rendezvous.

Another node is under torchrun, or the backend is a registered one. So it is as under torchrun: each node
counts the restarts that its own failures cost; a node hears of others by nodes that wait for the next round,
among them those whose workers have failed; and a signal to this node ends only its own part.
"""

from __future__ import annotations

from dsl import SignalReceived
from dsl._record import replace
from dsl.agent.alone import Alone
from dsl.conductor.restarts import OTHER_HOSTS
from dsl.model.job import Meeting, Notice, RestartReason
from dsl.model.outcome import (
    END_ACTIONS,
    GO_ON,
    AttemptOutcome,
    Awaiting,
    Decision,
    Restarting,
    signal_code,
)
from dsl.rendezvous.delegate_messages import (
    Finish,
    Leave,
    Meet,
    MeetingRefused,
    NodesFinished,
    NodesMet,
    Waiting,
)
from dsl.words import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl.model.job import Job
    from dsl.rendezvous.dynamic import Delegate


class TorchRounds(Alone):
    """Decider of a node, and the meetings of its planner (a `Rendezvous`)."""

    def __init__(
        self,
        job: Job,
        delegate: Delegate,
        workers: int,
        tell: Callable[[Notice], None],
        *,
        restarts: int = 0,
    ) -> None:
        """``tell`` shows a notice to the user. ``restarts``: those that were counted so far."""
        super().__init__(job, restarts)
        self._delegate, self._order, self._tell = delegate, Meet(workers, job.role), tell
        if job.meeting.least_nodes < job.node_count:
            self._patience, self._gives_up = OTHER_HOSTS, job.gives_up
        self._reason: RestartReason = "start"
        self._met: NodesMet | None = None
        self._is_asked = False
        """A signal has asked for the end of this node's part."""

    # ------------------------------------------------------------------ the meetings

    def open(self, wait: Callable[[], int]) -> MeetingRefused | int | None:
        """Meet the other nodes for the first time; see `Delegate.ask`. None: they have met."""
        found = self._delegate.ask(self._order, (NodesMet,), self._tell, wait)
        if not isinstance(found, NodesMet):
            return found
        self._met = found
        if found.meeting.round:  # the others have begun before
            self._reason = "membership"
        return None

    def meet(self, attempt: int, local_world_size: int) -> Meeting:  # noqa: ARG002  the delegate was told
        """The meeting of an attempt. The nodes have met before."""
        assert self._met is not None
        meeting, names = self._met.meeting, self._met.hosts
        greeting = Notice("info", f"starting with {counted(len(names), 'node')}: {', '.join(names)}")
        told = meeting.notices if attempt else (greeting, *meeting.notices)
        return replace(meeting, attempt=attempt, restarts=self._restarts, reason=self._reason, notices=told)

    def join(self, reason: RestartReason, pause_s: float = 0.0) -> None:
        """Meet the others again, after a pause."""
        self._reason = reason
        self._delegate.send(self._order, pause_s)

    # ------------------------------------------------------------------ what follows

    def _while_running(self, event: object) -> Decision:
        self._is_asked |= isinstance(event, SignalReceived) and event.action in END_ACTIONS
        if isinstance(event, MeetingRefused):
            text = f"{event.text}; the workers go on, but cannot be started again"
            self._tell(Notice("warning", text))
        if isinstance(event, Waiting) and not self._is_asked:
            return Decision("stop")
        return super()._while_running(event)

    def _while_waiting(self, event: object, last: AttemptOutcome) -> Decision:
        if isinstance(event, NodesFinished):
            return self._end(last)
        if isinstance(event, MeetingRefused):
            if event.kind == "unneeded" and last.ended.first_failure is None:
                return Decision("end")
            decision = self._end(last)
            return replace(decision, why=event.text if decision.code else "")
        if isinstance(event, NodesMet):
            self._met = event
            is_counted = self._reason == "failure"
            told = Restarting(last, self._restarts, is_counted)
            return Decision("start", attempt=last.plan.meeting.attempt + 1, told=told)
        return GO_ON

    def _go_on(self, last: AttemptOutcome) -> Decision:
        signals = [one for one in last.news if isinstance(one, SignalReceived) and one.action in END_ACTIONS]
        if signals:
            return Decision("end", code=signal_code(signals[0].signum, last.plan.job.signals.preempt))
        if any(isinstance(one, MeetingRefused) for one in last.news):  # the delegate is lost
            return self._end(last)
        if last.ended.first_failure is not None:
            return super()._go_on(last)
        if not any(exit_.caused_by_stop for exit_ in last.exits):
            self._delegate.send(Finish())
            return Decision("go_on", told=Awaiting(last, "end"))
        self.join("membership")
        return Decision("go_on", told=Awaiting(last, "meeting"))

    def _restart(self, last: AttemptOutcome, pause_s: float) -> Decision:
        self.join("failure", pause_s)
        return Decision("go_on", told=Awaiting(last, "meeting"))

    def _end(self, last: AttemptOutcome, *, closes: bool = False, why: str = "") -> Decision:
        if closes:
            self._delegate.send(Leave(closes=True))
        return super()._end(last, closes=closes, why=why)
