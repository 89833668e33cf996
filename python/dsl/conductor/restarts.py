"""Decides whether another attempt follows an ended one, and words that decision for the user."""

from __future__ import annotations

from dsl.model.outcome import Tried
from dsl.model.progress import OTHER_HOSTS, SAME_HOSTS, Next, add, after_failure, failures_line, restart_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.conductor.attempt import Attempt
    from dsl.conductor.members import Roster
    from dsl.conductor.terms import Terms
    from dsl.model.job import RestartReason
    from dsl.model.judgement import Judgement


class Restarts:
    """The restarts of a job so far."""

    def __init__(self, terms: Terms, roster: Roster) -> None:
        self._terms, self._roster = terms, roster
        self.count = 0
        """Restarts because of failures; others cost nothing."""
        self.reason: RestartReason = "start"
        """Why the next attempt begins."""
        self._tried: tuple[Tried, ...] = ()

    def after_failure(self, attempt: Attempt, judgement: Judgement, now_s: float) -> tuple[Next, str]:
        """What follows when a worker failed, or a member that the job needs; and a line for the user."""
        job, terms = self._terms.job, self._terms
        rank = judgement.causes[0].rank if judgement.causes else -1
        self._note(attempt, f"rank {rank}, exit code {judgement.code}", now_s)
        left = 0 if attempt.left else job.max_restarts - self.count
        patience = OTHER_HOSTS if terms.is_elastic else SAME_HOSTS
        step = after_failure(self._tried, patience, left, gives_up=terms.gives_up)
        if step.kind == "restart":
            self.count += 1
            self.reason = "failure"
            who = "all nodes" if terms.members_come else "all hosts"
            return step, restart_line(who, self.count, job.max_restarts, self._tried, step.wait_s)
        text = failures_line(self.count + 1, self._tried)
        return step, f"{text}: the job is given up" if step.kind == "futile" else text

    def after_change(self, attempt: Attempt, now_s: float) -> tuple[Next, str]:
        """What follows when members of an elastic job were lost or have come; and a line for the user."""
        lost = self._roster.names(sorted(attempt.left)) if attempt.left else ""
        self._note(attempt, f"{lost} lost" if lost else "", now_s)
        step = after_failure(self._tried, OTHER_HOSTS, 1, gives_up=True)
        if step.kind == "futile":
            return step, f"{lost} was lost over and over as soon as its workers ran: the job is given up"
        self.reason = "membership"
        return step, ""

    def _note(self, attempt: Attempt, cause: str, now_s: float) -> None:
        self._tried = add(self._tried, Tried(now_s - attempt.begun_s, cause))
