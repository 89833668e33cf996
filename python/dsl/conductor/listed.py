"""The conductor of an elastic job whose hosts are in a list that changes."""

from __future__ import annotations

from dsl.conductor.conductor import Conductor
from dsl.conductor.orders import Send, Speak
from dsl.model.job import Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from dsl.conductor.attempts import Attempt
    from dsl.conductor.members import Known
    from dsl.conductor.terms import Terms
    from dsl.control.messages import Hello
    from dsl.model.judgement import Report

UNLISTED = "is not listed any more"


class ListedConductor(Conductor):
    """It reaches hosts that join the list, and lets hosts go that leave it."""

    def list_hosts(self, terms: Terms, listed: Collection[int], now_s: float) -> list[object]:
        """What follows from a new list.

        ``terms`` have a seat for each host that was ever listed. ``listed``: the places of the new list.
        """
        self._now_s, attempt, roster = now_s, self._attempt, self.roster
        if roster.is_over:
            return []
        running = [] if attempt is None else attempt.running
        roster.extend(terms)
        come: list[int] = []
        gone: list[int] = []
        for place, one in enumerate(roster):
            if one.is_listed != (place in listed):
                one.is_listed = place in listed
                (come if one.is_listed else gone).append(place)
                if one.is_listed and place in running:
                    one.put("ready", None, "")
                else:
                    one.put("missing", now_s, "" if one.is_listed else UNLISTED)
        orders = [*self._say(come, "listed now"), *self._say(gone, "not listed any more")]
        orders += [order for place in gone if place not in running for order in self._tell_over(place)]
        if attempt is not None and not attempt.is_stopping and not set(running).isdisjoint(gone):
            attempt.regroups = True
            orders += self._stop(attempt, "hosts have left the list")
        return [*orders, *roster.try_again(now_s), *self._try_to_begin()]

    def _say(self, places: Sequence[int], how: str) -> list[object]:
        verb = "is" if len(places) == 1 else "are"
        return [Speak(Notice("info", f"{self.roster.names(places)} {verb} {how}"))] if places else []

    def _greet(self, place: int, one: Known, hello: Hello) -> list[object]:
        if one.is_listed:
            return super()._greet(place, one, hello)
        one.hello, one.is_told, one.is_gone = hello, True, True
        return [Send(place, self._over())]

    def _hear_report(self, attempt: Attempt, place: int, report: Report) -> list[object]:
        let_go = [] if self.roster[place].is_listed else self._tell_over(place)
        return [*let_go, *super()._hear_report(attempt, place, report)]
