"""When the next attempt begins, and with which members."""

from __future__ import annotations

from dsl.conductor.orders import Speak
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl.conductor.members import Known, Roster
    from dsl.conductor.terms import Terms

TOGETHER_S = 3.0
"""After the first member that cannot be reached, others get this long to report their own problems."""

LAST_CALL_S = 30.0
"""When enough hosts are there, hosts that are still starting get this long to join the attempt."""

USAGE = 2
FAILURE = 1


class Gathering:
    """The time between two attempts, and before the first one."""

    def __init__(self, terms: Terms, roster: Roster, now_s: float) -> None:
        self._terms, self._roster = terms, roster
        self.members: frozenset[int] = frozenset()
        """Members of the last attempt, which the next one prefers; empty before the first attempt."""
        self.refusal: list[str] = []
        """Why no attempt can begin, once that is certain."""
        self.code = FAILURE
        """The exit code then."""
        self.pause_s: float | None = None
        """When another attempt may begin; None: at once."""
        self._calls = True
        """Wait a moment for starting members before the next attempt."""
        self._call_s: float | None = None
        self._refuse_s: float | None = None
        self._waits_s = None if terms.wait_s is None else now_s + terms.wait_s
        self._has_said_wait = False

    def due(self) -> list[float | None]:
        """When to call `choose` again."""
        return [self.pause_s or self._call_s, self._waits_s, self._refuse_s]

    def hopeless(self) -> list[Known]:
        """The members that stand in the way, if too few others may come before the first attempt."""
        bad = [
            one
            for one in self._roster
            if one.status == "unfit" or (one.status == "missing" and not self._terms.is_elastic)
        ]
        return bad if not self.members and len(self._roster) - len(bad) < self._terms.least else []

    def refuse(self) -> None:
        """Begin no attempt, because of the problems of all members."""
        self.refusal = self._roster.problems(awaited=False)
        self.code = USAGE if all(one.hello is not None for one in self.hopeless()) else FAILURE

    def choose(self, now_s: float) -> tuple[tuple[int, ...] | None, list[object]]:
        """The members of the attempt that begins now, or None; and what to tell the user."""
        roster, terms = self._roster, self._terms
        if self.pause_s is not None and self.pause_s <= now_s:
            self.pause_s = None
        if bad := self.hopeless():
            self._call_s = None
            # A member that has looked and found a problem is no reason to hurry the others.
            is_unheard = any(one.checked is None for one in bad)
            if self._refuse_s is None and (terms.is_elastic or is_unheard):
                self._refuse_s = now_s + TOGETHER_S
            is_due = self._refuse_s is not None and self._refuse_s <= now_s
            if is_due or not roster.has("starting"):
                self.refuse()
            return None, []
        self._refuse_s = None
        chosen = roster.choose(self.members)
        is_late = self._waits_s is not None and self._waits_s <= now_s
        if is_late:
            self._waits_s = None
        if chosen is None:
            return None, self._wait(now_s, is_late=is_late)
        self._calls &= not is_late
        # The first members have priority, if they come in time.
        before = chosen[-1] if len(chosen) == terms.most else len(roster)
        if self._calls and roster.has("starting", before):
            self._call_s = self._call_s or now_s + LAST_CALL_S
            if now_s < self._call_s:
                return None, []
        return (None if self.pause_s else chosen), []

    def _wait(self, now_s: float, *, is_late: bool) -> list[object]:
        """Wait for more members: there are too few. ``is_late``: the wait is over."""
        roster, terms = self._roster, self._terms
        if is_late and terms.members_come:
            missing = roster.names(roster.missing())
            self.refusal = [f"after {terms.wait_s:g} s the job is still waiting for {missing}"]
        elif is_late:
            text = f"{roster.shortage()}, and no more came within {terms.wait_s:g} s"
            self.refusal = [text, *roster.problems(awaited=True)]
        if is_late or not terms.is_elastic:
            return []
        self._call_s, self._calls = None, True
        if self._waits_s is None:
            self._waits_s = now_s + (terms.wait_s or 0.0)
        elif self.members or self._has_said_wait or roster.has("starting"):
            return []
        self._has_said_wait = True
        left_s = self._waits_s - now_s
        text = f"{roster.shortage()}: waiting for more, {left_s:.0f} s at most"
        return [Speak(Notice("warning", text))]

    def begin(self, chosen: tuple[int, ...]) -> None:
        """Note that an attempt begins with these members."""
        for place in chosen:
            self._roster[place].problem, self._roster[place].is_spare = "", False
        self.members, self._calls = frozenset(chosen), False
        self._call_s = self.pause_s = self._waits_s = None
