"""A member of a job: what this node does, which is what the conductor orders.

It tells the conductor what happens here. It decides one thing: its workers end when the conductor is gone.
"""

from __future__ import annotations

from dsl import Exited, SignalReceived, Stopping
from dsl.control.messages import Failing, Forward, Lost, Over, Preempted, Running, Stop
from dsl.model.job import Meeting
from dsl.model.observation import Look, SignalRank
from dsl.model.outcome import (
    GO_ON,
    REQUEUE_CODE,
    SIGNAL_CODES,
    Asked,
    AttemptOutcome,
    AttemptStarted,
    Awaiting,
    Decision,
    RestartFailed,
    Restarting,
    own_code,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    from dsl.model.job import NodePlan
    from dsl.model.judgement import Judgement

    class Conversation(Protocol):
        """The way to the conductor and back."""

        @property
        def deadline_s(self) -> float | None:
            """`time.monotonic` when `receive` returns something even if nothing is readable; None: never."""

        def fileno(self) -> int:
            """Give a descriptor that is readable when `receive` may return something; negative: none is."""

        def receive(self) -> Sequence[object]:
            """Take the messages that are there, without waiting."""

        def send(self, message: object) -> None:
            """Send a message, without waiting. The message is lost if the conductor is lost."""


FAILURE = 1

END_ACTIONS = ("stop", "ignore", "preempt")
"""Values of `dsl.SignalReceived.action` that end the job. ``ignore``: its workers were ending already."""


class Member:
    """Decider, channel and listener of the agent, and the meetings of its planner (a `Rendezvous`).

    ``first`` is the meeting of the first attempt here. The conductor counts attempts over all members, so a
    member that comes late or is left out for a while misses some numbers.
    """

    def __init__(
        self, conversation: Conversation, first: Meeting, max_restarts: int = 0, plan: NodePlan | None = None
    ) -> None:
        """``max_restarts``: those of the job. ``plan``: that of the attempt that runs; None: none does."""
        self._conversation, self._max_restarts, self._plan = conversation, max_restarts, plan
        self.meeting = first
        """The latest meeting."""
        self.judgement: Judgement | None = None
        """How the job has ended, once the conductor has said so; None also if it has ended well."""

    # ------------------------------------------------------------------ what the conductor says

    @property
    def deadline_s(self) -> float | None:
        """The deadline of the conversation."""
        return self._conversation.deadline_s

    def fileno(self) -> int:
        """The descriptor of the conversation."""
        return self._conversation.fileno()

    def read(self) -> Sequence[object]:
        """Take the messages of the conductor: they are events for `decide`."""
        said = list(self._conversation.receive())
        for index, message in enumerate(said):
            if isinstance(message, Meeting):
                self.meeting = message
            elif isinstance(message, Over):
                self.judgement = message.judgement
            elif isinstance(message, (Look, SignalRank)):
                said[index] = Asked(message, self._conversation.send)
        return said

    def meet(self, attempt: int, local_world_size: int) -> Meeting:  # noqa: ARG002  the conductor knows
        """The meeting of an attempt, which the conductor has made."""
        assert self.meeting.attempt == attempt
        return self.meeting

    # ------------------------------------------------------------------ what follows

    def decide(self, event: object, last: AttemptOutcome | None) -> Decision:
        """Say what follows from an event: what the conductor orders."""
        if last is not None:
            return self._between(event, last)
        if isinstance(event, Stop):
            return Decision("stop", signum=event.signum, grace_s=event.grace_s, why=event.why)
        if isinstance(event, Forward):
            return Decision("signal", signum=event.signum)
        return Decision("stop") if isinstance(event, (Over, Lost)) else GO_ON

    def _between(self, event: object, last: AttemptOutcome) -> Decision:
        """The conductor says what follows an attempt, unless it has said so already."""
        if isinstance(event, SignalReceived) and event.action in END_ACTIONS:
            return Decision("end", code=signal_code(event.signum, last.plan.preempt_signal))
        if isinstance(event, Meeting):
            told = Restarting(last, event.restarts, self._max_restarts)
            return Decision("start", attempt=event.attempt, restarts=event.restarts, told=told)
        # Without a guard the workers may not start again.
        said = last.news if event is last else (event,)
        ending = [one for one in said if isinstance(one, (Over, Lost, Stopping, RestartFailed))]
        if ending:
            # The code of the job if the conductor has judged, else that of the last attempt here.
            judged = [one.judgement for one in ending if isinstance(one, Over) and one.judgement is not None]
            return Decision("end", code=judged[0].code or FAILURE if judged else last.final_code)
        return Decision("go_on", told=Awaiting(last)) if event is last else GO_ON

    # ------------------------------------------------------------------ what the conductor has to know

    def hear(self, event: object) -> None:
        """Tell the conductor."""
        send = self._conversation.send
        if isinstance(event, AttemptStarted):
            self._plan = event.plan
            send(Running(event.plan.attempt))
            return
        plan = self._plan
        if plan is None:
            return
        if isinstance(event, Exited):
            exit_ = event.exit
            if exit_.status and not exit_.caused_by_stop:
                code = own_code(exit_.status, is_stopped=False)
                send(Failing(plan.attempt, plan.workers[exit_.worker].rank, code, exit_.ended_ns))
        elif isinstance(event, SignalReceived) and event.action == "preempt":
            send(Preempted(plan.attempt, event.signum))
        elif isinstance(event, AttemptOutcome):
            from dsl.evidence.reports import report_of

            send(event.report or report_of(event))


def signal_code(signum: int, preempt_signal: int | None) -> int:
    """The exit code of a job that a signal ends while no worker runs (G2)."""
    return REQUEUE_CODE if signum == preempt_signal else SIGNAL_CODES + signum
