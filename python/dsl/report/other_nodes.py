"""What the user of one node hears of the other nodes, if nodes come and go: a part of the narrator."""

from __future__ import annotations

from dsl.lists import counted
from dsl.model.job import Notice
from dsl.model.nodes import MeetingRefused, NodesMet, PeerFailure
from dsl.model.outcome import AttemptStarted, Awaiting, MembershipChanged, Outcome, Restarting
from dsl.report.verdict import reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl.model.outcome import AttemptOutcome, Tried
    from dsl.model.request import Level


class OtherNodes:
    """What is known of the other nodes, and what the user hears of them."""

    def __init__(
        self,
        say: Callable[[str, Level], None],
        warn: Callable[[str], None],
        say_headline: Callable[[AttemptOutcome], None],
    ) -> None:
        """``say_headline`` says in one line why an attempt has failed here."""
        self._say = say
        self._warn = warn
        self._say_headline = say_headline
        self._failures: list[PeerFailure] = []
        self._lost: tuple[str, ...] = ()
        self._met: NodesMet | None = None
        self._is_lost = False
        self._is_leaving = False
        self._is_blamed = False

    def hear(self, event: object) -> None:
        """Tell the user what matters about an event of the other nodes."""
        if isinstance(event, PeerFailure):
            self._failures.append(event)
            if event.is_final:
                self._say(describe_end(event)[0].text, "error")
        elif isinstance(event, MembershipChanged):
            self._hear_left(event)
        elif isinstance(event, NodesMet):
            self._met = event
        elif isinstance(event, MeetingRefused):
            if event.is_lost and not self._is_lost and not self._is_leaving:
                self._warn(f"{event.text}; the workers go on, but cannot be started again")
            elif event.is_unneeded:
                self._say(event.text, "info")
            self._is_lost |= event.is_lost
        elif isinstance(event, Awaiting):
            self._hear_waiting(event)
        elif isinstance(event, AttemptStarted):
            self._failures, self._lost, self._is_blamed = [], (), False

    def _hear_left(self, event: MembershipChanged) -> None:
        names = _without(event.left, self._lost)
        self._lost += names
        if not names or self._is_leaving or any(one.is_final for one in self._failures):
            return
        if event.has_dropped_us:
            self._say("the other nodes have missed this one and go on without it", "warning")
            return
        self._say(f"{_nodes(names, ' has', ' have')} left the job", "warning")

    def _hear_waiting(self, event: Awaiting) -> None:
        last, what, within_s = event.last, event.what, event.within_s
        if what == "goodbye":
            self._is_leaving = True  # the verdict follows
            return
        if last.ended.first_failure is not None and what == "meeting" and not self._is_blamed:
            self._is_blamed = True
            self._say_headline(last)
        if what == "end" and last.plan.world_size > len(last.plan.workers):
            self._say("all workers of this node ended well, waiting for the other nodes", "info")
        elif what == "loss":
            text = (
                "a worker failed and no restart is left, making sure that it is not for want of a lost node"
            )
            self._say(f"{text} ({within_s:g} s at most)", "info")
        elif within_s:
            self._say(f"waiting {within_s:g} s before the next attempt", "info")

    def hear_restart(self, event: Restarting, tried: Sequence[Tried]) -> bool:
        """Say why there is another attempt; all nodes say the same. False: they have not met for it."""
        met = self._met
        if met is None:
            return False
        again = f"starting all workers again with {counted(len(met.hosts), 'node')}"
        changes = [_nodes(met.joined, " joins", " join")] if met.joined else []
        changes += [_nodes(met.left, " has left", " have left")] if met.left else []
        if not event.is_counted:
            self._say(f"{', '.join(changes) or 'the nodes have changed'}: {again}", "info")
            return True
        from dsl.model.progress import crash_loop

        loop = crash_loop(tried)
        extra = "".join(f", {change}" for change in changes) + (f" ({loop})" if loop else "")
        number = f"restart {event.number} of {event.most}"
        self._say(f"{number}: {self._why(event.last)}, {again}{extra}", "warning")
        return True

    def _why(self, last: AttemptOutcome) -> str:
        """Which worker failed and with which code, here or on another node."""
        if self._failures:
            return _blame(self._failures[0])
        if last.label is not None:
            return f"{last.label} on host {last.plan.host} failed with {last.code}"
        return "a worker of another node failed"

    def hear_outcome(self, outcome: Outcome) -> None:
        """Say what the verdict on this node does not."""
        last = outcome.last
        others = [one for one in self._failures if not one.is_final]
        has_failed = last.ended.first_failure is not None
        if not outcome.code or (last.ended.stop_signal is not None and not has_failed):
            return
        if has_failed:
            if others:
                self._say(f"also failed: {told(others[0])}", "error")
        elif len(others) == len(self._failures):  # else the user has heard of the end of the job
            if others:
                self._say(told(others[0]), "error")
            elif self._lost:
                self._say(f"{_nodes(self._lost, ' has', ' have')} left, the job cannot go on", "error")


def describe_end(event: PeerFailure | MeetingRefused) -> tuple[Notice, int]:
    """The notice about an event that ended the job, and the exit code of a node that had no part in it."""
    if isinstance(event, PeerFailure):
        return Notice("error", f"the job is over: {told(event)}"), event.code or 1
    return Notice("info", event.text), 0


def told(failure: PeerFailure) -> str:
    """What is known about a failure on another node, in one line."""
    failed = failure.failed
    if failed is not None:
        return f"{failed.noun} {failed.name} on host {failure.host} failed: {reason(failed)}"
    return f"host {failure.host} cannot go on" if failure.rank < 0 else _blame(failure)


def _blame(failure: PeerFailure) -> str:
    who = f"rank {failure.rank} on host" if failure.rank >= 0 else "host"
    return f"{who} {failure.host} failed with {failure.code}"


def _nodes(names: Sequence[str], is_one: str, are_many: str) -> str:
    noun, verb = ("nodes", are_many) if len(names) > 1 else ("node", is_one)
    return f"{noun} {', '.join(names)}{verb}"


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
