"""Tells the other nodes what happens here: a listener that gives orders to the rendezvous."""

from __future__ import annotations

from dsl import Exited
from dsl.model.nodes import PeerFailure
from dsl.model.outcome import AttemptStarted, Awaiting
from dsl.rendezvous.delegate_messages import Finish, Leave

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl import Exit
    from dsl.model.job import RestartReason
    from dsl.model.node import NodePlan
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
                self._rendezvous.send(self._failure(exit_, is_final=False))
        elif isinstance(event, Awaiting):
            self._await(event)

    def _await(self, event: Awaiting) -> None:
        decision, history = event.decision, event.history
        if decision.kind == "finish":
            self._rendezvous.send(Finish())
        elif decision.kind == "doubt":
            self._rendezvous.wait(decision.within_s)
        elif decision.kind == "leave":
            if decision.closes:
                cause = history.attempts[-1].cause
                lost = PeerFailure(self._rendezvous.host, -1, decision.code or 1, None, is_final=True)
                self._rendezvous.send(lost if cause is None else self._failure(cause, is_final=True))
            elif decision.code:
                self._rendezvous.send(Leave())
            self._rendezvous.wait(decision.within_s, for_goodbye=True)
        else:
            restarts = history.restarts + decision.counted
            why: RestartReason = "failure" if decision.counted else "membership"
            self._rendezvous.join(restarts, why, decision.within_s)

    def _failure(self, exit_: Exit, *, is_final: bool) -> PeerFailure:
        from dsl.evidence.reports import failed

        facts = failed(self._plan.workers[exit_.worker], exit_)
        return PeerFailure(self._rendezvous.host, facts.rank, facts.status, facts, is_final)
