"""Tells the user about a job whose nodes come and go: what `Narrator` says, and news of the other nodes."""

from __future__ import annotations

from dsl.model.job import Notice
from dsl.model.nodes import MeetingRefused, NodesMet, PeerFailure
from dsl.model.outcome import AttemptEnded, AttemptStarted, Awaiting, MembershipChanged, Outcome
from dsl.report.narrator import Narrator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.model.node import NodePlan
    from dsl.model.outcome import AttemptOutcome


class TogetherNarrator(Narrator):
    """A listener on one node of such a job."""

    def __init__(self, plan: NodePlan) -> None:
        super().__init__(plan)
        self._failures: list[PeerFailure] = []
        self._lost: tuple[str, ...] = ()
        self._met: NodesMet | None = None
        self._is_lost = False
        self._is_leaving = False
        self._is_blamed = False

    def hear(self, event: object) -> None:
        """Tell the user what matters about an event."""
        if isinstance(event, Notice):
            self.note(event)
        elif isinstance(event, PeerFailure):
            self._failures.append(event)
            if event.is_final:
                self.say(describe_end(event)[0].text, "error")
        elif isinstance(event, MembershipChanged):
            self._hear_left(event)
        elif isinstance(event, NodesMet):
            self._met = event
        elif isinstance(event, MeetingRefused):
            if event.is_lost and not self._is_lost and not self._is_leaving:
                self.say(f"warning: {event.text}; the workers go on, but cannot be started again", "warning")
            elif event.is_unneeded:
                self.note(describe_end(event)[0])
            self._is_lost |= event.is_lost
        elif isinstance(event, Awaiting):
            self._hear_waiting(event)
        elif isinstance(event, AttemptStarted):
            self._failures, self._lost, self._is_blamed = [], (), False
            super().hear(event)
        else:
            super().hear(event)

    def _hear_left(self, event: MembershipChanged) -> None:
        names = _without(event.left, self._lost)
        self._lost += names
        if not names or self._is_leaving or any(one.is_final for one in self._failures):
            return
        if event.has_dropped_us:
            self.say("the other nodes have missed this one and go on without it", "warning")
            return
        self.say(f"{_nodes(names)} {_has(names)} left the job", "warning")

    def _hear_waiting(self, event: Awaiting) -> None:
        last = event.history.attempts[-1]
        kind = event.decision.kind
        if kind == "leave":
            self._is_leaving = True  # the verdict follows
            return
        if last.ended.first_failure is not None and kind == "meet" and not self._is_blamed:
            self._is_blamed = True
            self.say(self._verdict(last)[1][0], "error")
        if kind == "finish":
            self.say("all workers of this node ended well, waiting for the other nodes", "info")
        elif kind == "doubt":
            text = (
                "a worker failed and no restart is left, making sure that it is not for want of a lost node"
            )
            self.say(f"{text} ({event.decision.within_s:g} s at most)", "info")
        elif event.decision.within_s:
            self.say(f"waiting {event.decision.within_s:g} s before the next attempt", "info")

    def _hear_restart(self, event: AttemptEnded) -> None:
        """Say why there is another attempt; all nodes say the same."""
        history, met = event.history, self._met
        if met is None:
            super()._hear_restart(event)
            return
        count = len(met.hosts)
        again = f"starting all workers again with {count} node{'s' if count != 1 else ''}"
        changes = (
            [f"{_nodes(met.joined)} {'joins' if len(met.joined) == 1 else 'join'}"] if met.joined else []
        )
        changes += [f"{_nodes(met.left)} {_has(met.left)} left"] if met.left else []
        if not event.decision.counted:
            self.say(f"{', '.join(changes) or 'the nodes have changed'}: {again}", "info")
            return
        why = self._why(history.attempts[-1])
        from dsl.model.progress import crash_loop

        loop = crash_loop(history.tried)
        extra = "".join(f", {change}" for change in changes) + (f" ({loop})" if loop else "")
        number = f"restart {history.restarts} of {history.max_restarts}"
        self.say(f"{number}: {why}, {again}{extra}", "warning")

    def _why(self, last: AttemptOutcome) -> str:
        """Which worker failed and with which code, here or on another node."""
        if self._failures:
            return _blame(self._failures[0])
        if last.cause is not None:
            from dsl.model.outcome import own_code

            label = last.plan.workers[last.cause.worker].label
            code = own_code(last.cause.status, is_stopped=last.cause.caused_by_stop)
            return f"{label} on host {last.plan.host} failed with {code}"
        return "a worker of another node failed"

    def _hear_outcome(self, outcome: Outcome) -> None:
        last = outcome.last
        super()._hear_outcome(outcome)
        others = [one for one in self._failures if not one.is_final]
        if outcome.code and last.ended.first_failure is not None and others:
            self.say(f"also failed: {_told(others[0])}", "error")
        elif outcome.code and last.ended.first_failure is None and last.ended.stop_signal is None:
            self._say_why_ended()

    def _say_why_ended(self) -> None:
        if any(one.is_final for one in self._failures):
            return
        if self._failures:
            self.say(_told(self._failures[0]), "error")
        elif self._lost:
            self.say(f"{_nodes(self._lost)} {_has(self._lost)} left, the job cannot go on", "error")


def describe_end(event: PeerFailure | MeetingRefused) -> tuple[Notice, int]:
    """The notice about an event that ended the job, and the exit code of a node that had no part in it."""
    if isinstance(event, PeerFailure):
        return Notice("error", f"the job is over: {_told(event)}"), event.code or 1
    return Notice("info", event.text), 0


def _told(failure: PeerFailure) -> str:
    """What another node says about a failure, on one line."""
    line = " ".join(failure.line.split()) or _blame(failure)
    return line if failure.host in line else f"host {failure.host}: {line}"


def _blame(failure: PeerFailure) -> str:
    who = f"rank {failure.rank} on host" if failure.rank >= 0 else "host"
    return f"{who} {failure.host} failed with {failure.code}"


def _nodes(names: Sequence[str]) -> str:
    return f"node{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _without(names: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
    """The names minus the others, counting repeats: several hosts may have the same name."""
    rest = list(others)
    found = []
    for name in names:
        if name in rest:
            rest.remove(name)
        else:
            found.append(name)
    return tuple(found)


def _has(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"
