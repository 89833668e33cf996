"""A node alone: the conductor of its job is in this process, and this node is the only member."""

from __future__ import annotations

from dsl import __version__
from dsl.agent.carrier import Near
from dsl.agent.member import Member
from dsl.conductor.conductor import Conductor
from dsl.conductor.terms import fixed_places
from dsl.control.messages import Hello, Over
from dsl.model.job import Meeting
from dsl.model.outcome import Decision, Pausing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.model.job import Job, NodePlan
    from dsl.model.outcome import AttemptOutcome


class Direct(Near):
    """The way to a conductor that has no other member. The narrator says what happens, and judges."""

    def __init__(self, job: Job, workers: int, begin_s: float) -> None:
        """``begin_s``: when the first attempt has begun."""
        conductor = Conductor(fixed_places(job, 1, __version__, "localhost", 0), begin_s, lambda _: 0)
        super().__init__(conductor, None)
        hello = Hello(__version__, 0, "", 0, nodes=1, workers=workers, role=job.role, run_id=job.run_id)
        conductor.hear(0, hello, begin_s)

    def _send(self, place: int, message: object) -> None:
        super()._send(place, Over() if isinstance(message, Over) else message)


class Alone(Member):
    """The only member of a job."""

    def __init__(self, job: Job, plan: NodePlan, begin_s: float) -> None:
        """``plan``: that of the first attempt, which has begun at ``begin_s``."""
        self._direct = Direct(job, len(plan.workers), begin_s)
        first = Meeting(0, 0, (), plan.master_addr, plan.master_port)
        super().__init__(self._direct, first, job.max_restarts, plan)

    def decide(self, event: object, last: AttemptOutcome | None) -> Decision:
        """Say what follows from an event. The conductor answers at once, unless it makes a pause."""
        decision = super().decide(event, last)
        if event is not last or decision.kind != "go_on":
            return decision
        for message in self.read():
            decision = super().decide(message, last)
            if decision.kind != "go_on":
                return decision
        return Decision("go_on", told=Pausing())

    def hear(self, event: object) -> None:
        """Tell the conductor."""
        super().hear(event)
        self._direct.hear(event)
