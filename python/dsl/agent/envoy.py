"""Tells the other nodes what happens here: a listener that gives orders to the rendezvous."""

from __future__ import annotations

from dsl import Exited
from dsl.model.outcome import AttemptStarted, Awaiting, own_code
from dsl.report.verdict import reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl import Exit
    from dsl.model.node import NodePlan
    from dsl.model.outcome import AttemptOutcome
    from dsl.rendezvous.dynamic import Dynamic
    from dsl.rendezvous.words import Reason


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

    def _failure(self, exit_: Exit) -> tuple[int, int, str]:
        worker = self._plan.workers[exit_.worker]
        code = own_code(exit_.status, is_stopped=exit_.caused_by_stop)
        return worker.rank, code, f"{worker.label} on host {self._plan.host} failed: {reason(exit_)}"

    def _end_of(self, last: AttemptOutcome, code: int) -> tuple[int, int, str]:
        """Rank, exit code and line of the failure that ends the job."""
        if last.cause is not None:
            return self._failure(last.cause)
        return -1, code or 1, f"host {self._plan.host} cannot go on"
