"""A member of a job: what this node does, which is what the conductor orders.

It tells the conductor what happens here. It decides one thing: its workers end when the conductor is gone.
"""

from __future__ import annotations

from dsl import Exited, SignalReceived, Stopping
from dsl.control.messages import Failing, Forward, Lost, Over, Preempted, Stop
from dsl.model.job import Meeting
from dsl.model.observation import Look, SignalRank
from dsl.model.outcome import (
    END_ACTIONS,
    GO_ON,
    Asked,
    AttemptOutcome,
    AttemptStarted,
    Awaiting,
    Decision,
    RestartFailed,
    Restarting,
    own_code,
    signal_code,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Protocol

    from dsl.control.messages import Checked
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

        def hear(self, event: object) -> None:
            """Hear what happens here, beside the messages of the member."""


FAILURE = 1


class Nobody:
    """The conversation with a conductor that is lost."""

    deadline_s = None

    def fileno(self) -> int:
        """There is none."""
        return -1

    def receive(self) -> Sequence[object]:
        """Nothing."""
        return ()

    def send(self, message: object) -> None:
        """Lose the message."""

    def hear(self, event: object) -> None:
        """Nobody listens."""


class Member:
    """Decider, channel and listener of the agent, and the meetings of its planner (a `Rendezvous`).

    ``first`` is the meeting of the first attempt here. The conductor counts attempts over all members, so a
    member that comes late or is left out for a while misses some numbers.
    """

    stays = False
    """A signal here ends the whole job, and the conductor says when this node may end."""

    def __init__(
        self, conversation: Conversation, first: Meeting, offer: Callable[[], Checked] | None = None
    ) -> None:
        """``offer`` makes what this node says about itself before each further attempt; None: nothing."""
        self.conversation = conversation
        self._offer = offer
        self._plan: NodePlan | None = None
        self.meeting = first
        """The latest meeting."""
        self.judgement: Judgement | None = None
        """How the job has ended, once the conductor has said so; None also if it has ended well."""
        self.has_succeeded = False
        """The conductor has said that the job has ended well."""

    # ------------------------------------------------------------------ what the conductor says

    @property
    def deadline_s(self) -> float | None:
        """The deadline of the conversation."""
        return self.conversation.deadline_s

    def fileno(self) -> int:
        """The descriptor of the conversation."""
        return self.conversation.fileno()

    def read(self) -> Sequence[object]:
        """Take the messages of the conductor: they are events for `decide`."""
        said = list(self.conversation.receive())
        for index, message in enumerate(said):
            if isinstance(message, Meeting):
                self.meeting = message
            elif isinstance(message, Over):
                self.judgement = message.judgement
            elif isinstance(message, (Look, SignalRank)):
                said[index] = Asked(message, self.conversation.send)
        return said

    def meet(self, attempt: int, local_world_size: int) -> Meeting:  # noqa: ARG002  the conductor knows both
        """The meeting of an attempt, which the conductor has made and counted."""
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
        if isinstance(event, SignalReceived) and event.action in END_ACTIONS and not self.stays:
            return Decision("end", code=signal_code(event.signum, last.plan.job.signals.preempt))
        if isinstance(event, Meeting):
            told = Restarting(last, event.restarts, event.reason != "membership")
            return Decision("start", attempt=event.attempt, told=told)
        # Without a guard the workers may not start again.
        said = last.news if event is last else (event,)
        ending = [one for one in said if isinstance(one, (Over, Lost, Stopping, RestartFailed))]
        if ending:
            # The code of the job if the conductor has judged, else that of the last attempt here.
            judged = [one.judgement for one in ending if isinstance(one, Over) and one.judgement is not None]
            self.judgement = judged[0] if judged else self.judgement
            self.has_succeeded = any(isinstance(one, Over) and one.has_succeeded for one in ending)
            if self.has_succeeded:  # whatever has happened here before a spare has taken over
                return Decision("end")
            return Decision("end", code=judged[0].code or FAILURE if judged else last.final_code)
        return Decision("go_on", told=Awaiting(last)) if event is last else GO_ON

    # ------------------------------------------------------------------ what the conductor has to know

    def hear(self, event: object) -> None:
        """Tell the conductor."""
        send, plan = self.conversation.send, self._plan
        if isinstance(event, AttemptStarted):
            self._plan = event.plan
        elif plan is None:
            pass
        elif isinstance(event, Exited):
            exit_ = event.exit
            if exit_.status and not exit_.caused_by_stop:
                code = own_code(exit_.status, is_stopped=False)
                send(Failing(plan.meeting.attempt, plan.workers[exit_.worker].rank, code, exit_.ended_ns))
        elif isinstance(event, SignalReceived) and event.action == "preempt":
            send(Preempted(plan.meeting.attempt, event.signum))
        elif isinstance(event, AttemptOutcome):
            from dsl.evidence.reports import report_of

            if self._offer is not None:  # the conductor has to know it before it can begin anew
                send(self._offer())
            send(event.report or report_of(event))
        self.conversation.hear(event)
