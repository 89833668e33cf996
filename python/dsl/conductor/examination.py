"""The examination of the hosts of a job, for ``--doctor``: the conductor of a job that starts nothing.

It hears messages of members, signals and times, and answers with orders, as `dsl.conductor.conductor` does.
It has no clock of its own. Every member looks at its host; then all of them try the ways to each other.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.conductor.base import BaseConductor
from dsl.conductor.orders import Send, Show, Speak
from dsl.conductor.terms import objection
from dsl.control.messages import Bye, Checked, Hello, Lost, Refused, Said, TryWays, WaysTried
from dsl.doctor.job_checks import Examined, exit_code, find_all, page
from dsl.model.health import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.conductor.terms import Terms
    from dsl.model.job import Notice
    from dsl.model.outcome import Hang

TRY_S = 8.0
"""Members get so long to try the ways to the others."""

LATE_S = 20.0
"""When one host has looked, the others get so long."""

LATE = (
    "has not answered in time: look whether it hangs, and whether `ssh HOST true` does; if that hangs, too, "
    "large packets may be lost on the way (MTU)"
)
"""The problem of a host that does not answer."""


class Examination(BaseConductor):
    """Decides for all hosts. No attempt begins, and none is judged."""

    farewell_s = 3.0

    def __init__(self, terms: Terms, now_s: float, notices: Sequence[Notice] = ()) -> None:
        """``notices``: warnings of the plan, which are findings, too."""
        super().__init__(terms, now_s)
        self._hosts = [Examined(seat.host) for seat in terms.seats]
        self._planned = notices
        self._asked: frozenset[int] = frozenset()
        """Members that try the ways."""
        self._tried: set[int] = set()
        self._is_trying = False
        self._deadline_s = self.roster.answer_by(now_s)

    # ------------------------------------------------------------------ what happens

    def hear(self, place: int, message: object, now_s: float) -> list[object]:
        """What follows from what a member says."""
        self._now_s = now_s
        one = self.roster[place]
        if isinstance(message, Said):
            return [Speak(message.notice)]
        if isinstance(message, (Bye, Lost)):
            one.has_ended |= isinstance(message, Bye)
            one.is_gone = True
            reason = message.reason if isinstance(message, Lost) else "has ended before its time"
            self._fail(place, f"was lost: it {reason}")
        elif self.roster.is_over:
            return []
        elif isinstance(message, Hello):
            one.hello = message
            problem = objection(self._terms, place, message)
            if not problem:
                return [Send(place, self._terms.assigned(place))]
            self._fail(place, problem)
        elif isinstance(message, Refused):
            self._fail(place, message.text)
        elif isinstance(message, Checked) and self._hosts[place].checked is None:
            self._hosts[place] = replace(self._hosts[place], checked=message)
            soon_s = now_s + LATE_S
            if not self._is_trying:
                self._deadline_s = soon_s if self._deadline_s is None else min(self._deadline_s, soon_s)
        elif isinstance(message, WaysTried) and place in self._asked:
            self._hosts[place] = replace(self._hosts[place], ways=message.ways)
            self._tried.add(place)
        return self._go_on()

    def starter_ended(self, places: Sequence[int], why: str, now_s: float) -> list[object]:
        """The programs that reach these members have ended: members that have not answered never will."""
        self._now_s = now_s
        for place in places:
            if self.roster[place].hello is None:
                self.roster[place].is_gone = True
                self._fail(place, why)
        return self._go_on()

    def starters_lost(self, why: str, now_s: float) -> list[object]:
        """All programs that reach the members have ended."""
        return self.starter_ended(range(len(self._hosts)), why, now_s)

    def signal(self, signum: int, action: str, now_s: float, *, is_key: bool = False) -> list[object]:  # noqa: ARG002  as every conductor
        """A signal of the user ends the examination."""
        self._now_s = now_s
        if action not in ("stop", "preempt") or self.roster.is_over:
            return []
        self.code = 128 + signum
        return self._end()

    def hang(self, hang: Hang, now_s: float) -> list[object]:  # noqa: ARG002  as every conductor
        """Nothing runs that could hang."""
        return []

    def _lose_silent(self) -> list[object]:
        for place, host in enumerate(self._hosts):
            if self._is_trying and place in self._asked - self._tried:
                self._fail(place, "has not answered any more")
            elif host.checked is None:
                self._fail(place, LATE)
        return self._go_on()

    # ------------------------------------------------------------------ what follows

    def _fail(self, place: int, problem: str) -> None:
        """Note the first problem of a member that keeps it from an answer."""
        host = self._hosts[place]
        if not host.problem and not self.roster.is_over:
            self._hosts[place] = replace(host, problem=problem)

    def _go_on(self) -> list[object]:
        """Go on to the ways when all have looked, and to the end when all ways are tried."""
        if self.roster.is_over:
            return self._dismiss_if_done()
        if any(one.checked is None and not one.problem for one in self._hosts):
            return []
        if not self._is_trying:
            self._is_trying = True
            self._deadline_s = self._now_s + TRY_S
            targets = self._targets()
            self._asked = frozenset(targets if len(targets) > 1 else ())
            if self._asked:
                return [
                    Send(place, TryWays(tuple([one for other, one in targets.items() if other != place])))
                    for place in targets
                ]
        if any(not self._hosts[place].problem for place in self._asked - self._tried):
            return []
        hosts = [replace(one, clock=self.clocks.get(place)) for place, one in enumerate(self._hosts)]
        findings = find_all(hosts, self._planned)
        self.code = exit_code(findings)
        workers = sum(seat.size for seat in self._terms.seats)
        return [Show("\n".join(page(findings, [one.name for one in hosts], workers))), *self._end()]

    def _targets(self) -> dict[int, Target]:
        """The hosts that can be tried, by place. The first is also tried by the name that the user gave."""
        found = {}
        for place, host in enumerate(self._hosts):
            checked = host.checked
            if checked is None or host.problem or checked.health is None or not checked.health.port:
                continue
            faces = checked.health.interfaces
            others = [one for face in faces for one in face.addresses if face.is_up and face.name != "lo"]
            addresses = checked.addresses or tuple([one for one in others if not one.startswith("fe80")])
            named = self._terms.job.meeting.address if self._terms.seats[place].node_rank == 0 else ""
            addresses = (named,) if named else addresses
            found[place] = Target(place, host.name, addresses, checked.health.port, checked.health.token)
        return found
