"""Tells the other nodes what happens here: a listener that gives orders to the rendezvous."""

from __future__ import annotations

from dsl import Exited
from dsl.model.outcome import AttemptStarted, Awaiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl import Exit
    from dsl.model.judgement import Failed
    from dsl.model.node import NodePlan
    from dsl.model.outcome import AttemptOutcome
    from dsl.rendezvous.delegate_messages import Reason
    from dsl.rendezvous.dynamic import Dynamic


class Envoy:
    """Speaks for one node of a job whose nodes come and go."""

    def __init__(self, plan: NodePlan, rendezvous: Dynamic) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._has_told = False

    def hear(self, event: object) -> None:
        """Pass on what the other nodes have to know."""
        if isinstance(event, AttemptStarted):
            self._plan, self._has_told = event.plan, False
        elif isinstance(event, Exited):
            exit_ = event.exit
            if exit_.status and not exit_.caused_by_stop and not self._has_told:
                self._has_told = True
                self._rendezvous.fail_for_now(*self._failure(exit_))
        elif isinstance(event, Awaiting):
            self._await(event)

    def _await(self, event: Awaiting) -> None:
        decision, history = event.decision, event.history
        if decision.kind == "finish":
            self._rendezvous.finish()
        elif decision.kind == "doubt":
            self._rendezvous.wait(decision.within_s)
        elif decision.kind == "leave":
            if decision.closes:
                self._rendezvous.fail(*self._end_of(history.attempts[-1], decision.code))
            elif decision.code:
                self._rendezvous.leave()
            self._rendezvous.wait(decision.within_s, for_goodbye=True)
        else:
            restarts = history.restarts + decision.counted
            why: Reason = "failure" if decision.counted else "membership"
            self._rendezvous.join(restarts, why, decision.within_s)

    def _failure(self, exit_: Exit) -> tuple[int, int, Failed]:
        from dsl.evidence.reports import failed

        facts = failed(self._plan.workers[exit_.worker], exit_)
        return facts.rank, facts.status, facts

    def _end_of(self, last: AttemptOutcome, code: int) -> tuple[int, int, Failed | None]:
        """Rank, exit code and facts of the failure that ends the job."""
        return (-1, code or 1, None) if last.cause is None else self._failure(last.cause)
