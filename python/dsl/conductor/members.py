"""What a conductor knows of each member: whether it can take part, and when it is tried again."""

from __future__ import annotations

from dsl.conductor.judge import Judged
from dsl.conductor.orders import Dismiss, Drop, Reach, Speak
from dsl.model.job import Notice
from dsl.plan.remote import choose_hosts
from dsl.words import first_few, format_ranges, name_few

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Literal, TypeAlias

    from dsl.conductor.terms import Seat, Terms
    from dsl.control.messages import Checked, Hello

    Status: TypeAlias = Literal["starting", "ready", "unfit", "missing"]

RETRY_S = 1.0
"""Time until a host that could not be reached is tried again. It doubles each time."""

LONGEST_RETRY_S = 60.0

MENDED_S = 30.0
"""Time until we retry a host on which the user has to fix something first."""

SHOWN = 8
"""Hosts that one line names."""

MOST_PLACES = 1 << 16
"""A job whose members come at any time has at most this many, over all of its time."""


class Known:
    """What is known of one member."""

    def __init__(self, member: Seat, due_s: float | None) -> None:
        self.host, self.size, self.role = member.host, member.size, ""
        self.order = ""
        """Ranks follow these texts, and the places of members that have the same."""
        self.problem = ""
        """Why it does not take part, as the user was last told."""
        self.is_listed = True
        """Whether the user's list of hosts still has it."""
        self.is_spare = False
        """The user was told that it is a spare."""
        self.joined_s = 0.0
        """When it became ready."""
        self.retry_s = RETRY_S
        self.expect(due_s)

    def expect(self, due_s: float | None) -> None:
        """Wait for another agent at this place, until ``due_s``."""
        self.status: Status = "starting"
        """``starting``: it has not yet said that all is well; ``ready``: it can take part, or takes part;
        ``unfit``: something is wrong there; ``missing``: it cannot be reached, is lost or has left."""
        self.due_s = due_s
        """While starting: the deadline for its answer. Otherwise: when to try it again; None: never."""
        self.hello: Hello | None = None
        self.checked: Checked | None = None
        self.is_told = self.has_ended = self.is_gone = False
        """It was told that the job is over for it; it has said goodbye; nothing more can come from it."""
        self.is_bad = False
        """It has failed first twice in a row: a spare takes its place, if there is one."""

    @property
    def is_alive(self) -> bool:
        """Whether something may still come from it."""
        return self.hello is not None and not self.has_ended and not self.is_gone

    @property
    def is_there(self) -> bool:
        """Whether it can be told something."""
        return self.is_alive and not self.is_told

    def pause_s(self) -> float:
        """Seconds until it is tried again. They double for the next time."""
        pause_s, self.retry_s = self.retry_s, min(2 * self.retry_s, LONGEST_RETRY_S)
        return pause_s

    def put(self, status: Status, due_s: float | None, problem: str) -> bool:
        """Change its status. Returns whether the user does not know the problem yet."""
        is_news = self.problem != problem
        self.status, self.due_s, self.problem = status, due_s if self.is_listed else None, problem
        return is_news


class Roster:
    """All members of a job, by place."""

    def __init__(self, terms: Terms, now_s: float) -> None:
        self.terms = terms
        """How the members take part."""
        self._known = [Known(member, self.answer_by(now_s)) for member in terms.seats]
        self.is_over = False
        """The job is over: no member is awaited any more."""
        self._is_dismissed = False

    def __getitem__(self, place: int) -> Known:
        while self.terms.is_open and len(self._known) <= place < MOST_PLACES:
            self._known.append(self._vacant(len(self._known)))
        return self._known[place]

    def __iter__(self) -> Iterator[Known]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def answer_by(self, now_s: float) -> float | None:
        """When a member has to have answered that starts now."""
        return None if self.terms.start_s is None else now_s + self.terms.start_s

    def forget(self, place: int) -> None:
        """Make a place free again."""
        self._known[place] = self._vacant(place)

    def _vacant(self, place: int) -> Known:
        """A member that has not come. Where members come at any time, no certain one is awaited."""
        known = Known(self.terms.seat(place), None)
        if self.terms.is_open:
            known.status, known.is_gone = "missing", True
        return known

    # ------------------------------------------------------------------ members that come and go

    @property
    def is_done(self) -> bool:
        """Whether nothing more can come from any member."""
        return self.is_over and all(one.is_gone or one.has_ended for one in self._known)

    @property
    def is_complete(self) -> bool:
        """Whether every member has said goodbye: then the programs that started them end by themselves."""
        return all(one.has_ended for one in self._known)

    def has_greeted(self, place: int) -> bool:
        """Whether the member has greeted us."""
        return self._known[place].hello is not None

    def has_said_goodbye(self, place: int) -> bool:
        """Whether the member has said that it ends."""
        return self._known[place].has_ended

    def is_awaited(self, place: int) -> bool:
        """Whether the member has not greeted us, and still may."""
        one = self._known[place]
        return one.hello is None and not one.is_gone and not self.is_over

    def is_lost(self, place: int) -> bool:
        """Whether the member has not come, or is gone without a goodbye."""
        return self._known[place].status == "missing" and not self._known[place].has_ended

    def missing(self) -> list[int]:
        """The places of members that have not come, or cannot take part."""
        ready = self.ready()
        return [place for place, one in enumerate(self._known) if place not in ready and one.is_listed]

    def give_up(self) -> None:
        """Expect nothing more from anyone."""
        for one in self._known:
            one.is_gone = True

    def dismiss_if_done(self, within_s: float) -> list[object]:
        """Once nothing more can come, dismiss the programs that reach the members, which get ``within_s``."""
        if not self.is_over:
            return []
        for one in self._known:
            one.is_gone |= one.hello is None  # this member will never come
        if self._is_dismissed or not self.is_done:
            return []
        self._is_dismissed = True
        return [Dismiss(within_s)]

    def extend(self, terms: Terms) -> None:
        """Know the members of terms with more seats, too. Nothing is expected of them yet."""
        self.terms = terms
        for seat in terms.seats[len(self._known) :]:
            self._known.append(Known(seat, None))
            self._known[-1].is_listed = False

    # ------------------------------------------------------------------ members that cannot take part

    def find_unfit(self, place: int, problems: Sequence[str], now_s: float) -> list[object]:
        """Note problems at a member. An elastic job tries it again when the user may have mended them."""
        due_s = now_s + MENDED_S if self.terms.tries_again else None
        is_news = self._known[place].put("unfit", due_s, "\n".join(problems))
        return self.say_unfit(place) if is_news and self.terms.is_elastic else []

    def say_unfit(self, place: int) -> list[object]:
        """Tell the user what is wrong at a member."""
        lines = self._known[place].problem.split("\n")
        return [Speak(Notice("warning", f"{self.name(place)} cannot take part: {line}")) for line in lines]

    def miss(self, place: int, why: str, now_s: float, *, is_known: bool = False) -> list[object]:
        """Note that a member is missing. An elastic job tries it again. ``is_known``: say nothing."""
        one, terms = self._known[place], self.terms
        is_news = one.put("missing", now_s + one.pause_s() if terms.tries_again else None, why)
        if not terms.is_elastic or not is_news or is_known:
            return []
        text = f"{self.name(place)}: {why}; it is tried again"
        return [Speak(Notice("warning", text if terms.tries_again else f"{self.name(place)} {why}"))]

    def try_again(self, now_s: float) -> list[object]:
        """Give up waiting for members that have not answered in time, and try missing members again."""
        orders: list[object] = []
        for place, one in enumerate(self._known):
            if one.due_s is None or now_s < one.due_s:
                continue
            drops = [Drop(place)] if self.terms.is_elastic else []
            if one.status == "starting":
                one.is_gone |= self.terms.is_elastic
                why = f"has not answered within {self.terms.start_s:g} s"
                orders += [*drops, *self.miss(place, why, now_s)]
            else:
                one.expect(self.answer_by(now_s))
                orders += [*drops, Reach(place)]
        return orders

    def problems(self, *, awaited: bool) -> list[str]:
        """The problems that prevent an attempt, one line each. ``awaited``: include silent members."""
        where: dict[str, list[int]] = {}
        for place, one in enumerate(self._known):
            is_silent = awaited and one.status == "starting" and not one.problem
            problem = "has not answered" if is_silent else one.problem
            for line in problem.split("\n") if problem else ():
                where.setdefault(line, []).append(place)
        return [f"{self.names(places)}: {line}" for line, places in where.items()]

    # ------------------------------------------------------------------ members that can

    def ready(self) -> list[int]:
        """The places of the members that can take part now."""
        return [place for place, one in enumerate(self._known) if one.status == "ready" and one.is_there]

    def has(self, status: Status, before: int | None = None) -> bool:
        """Whether a member has this status; ``before``: of those that stand before this place."""
        return any(one.status == status for one in self._known[:before])

    def choose(self, last: Sequence[int]) -> tuple[int, ...] | None:
        """The largest set of ready members that the job may run on, by their ranks; None: too few.

        ``last``: the members of the last attempt, by their ranks. They are preferred, and bad members come
        after all others. If as many take part again, they keep their ranks, and others take the free ones.
        """
        terms, known = self.terms, self._known
        ordered = sorted(self.ready(), key=lambda place: (known[place].is_bad, place not in last, place))
        sizes = [(place, known[place].size) for place in ordered]
        chosen = choose_hosts(sizes, terms.least, terms.most, terms.world_sizes)
        if chosen is None:
            return None
        ranked = sorted(chosen, key=lambda place: (known[place].order, place))
        if len(chosen) != len(last):
            return tuple(ranked)
        others = iter([place for place in ranked if place not in last])
        return tuple([place if place in chosen else next(others) for place in last])

    def shortage(self) -> str:
        """Why the members that are ready are too few."""
        there, least = len(self.ready()), self.terms.least
        if there < least:
            return f"{there} of at least {least} {self.terms.noun}s {'is' if there == 1 else 'are'} there"
        sizes = first_few(self.terms.world_sizes)
        return f"{there} hosts are there, but none of them make a number of workers that is valid ({sizes})"

    def say_spares(self, places: Sequence[int]) -> list[object]:
        """Tell the user which members are spares, each once."""
        new = [place for place in places if not self._known[place].is_spare]
        for place in new:
            self._known[place].is_spare = True
        if not new:
            return []
        text = f"{self.names(new)} {'is a spare' if len(new) == 1 else 'are spares'}"
        return [Speak(Notice("info", f"{text}, in case that another is lost"))]

    # ------------------------------------------------------------------ names

    def name(self, place: int) -> str:
        """The name of a member: ``host n1``, ``rank 3 on host n1``, ``node 1 (n1)``, or ``node n1``."""
        host = self._known[place].host
        if self.terms.is_open:
            return f"node {host}"
        if self.terms.members_come:
            return f"node {place} ({host})" if host else f"node {place}"
        is_task = self.terms.seats[place].task is not None
        return f"rank {place} on host {host}" if is_task else f"host {host}"

    def judged(self, places: Iterable[int]) -> dict[int, Judged]:
        """Members as the judge sees them, by place."""
        return {place: Judged(self.name(place), self.terms.seat(place).node_rank) for place in places}

    def names(self, places: Sequence[int]) -> str:
        """Several members: ``hosts n1, n2``, ``nodes 1, 2``."""
        if len(places) == 1:
            return self.name(places[0])
        if self.terms.members_come and not self.terms.is_open:
            return f"nodes {format_ranges(places)}"
        hosts = self.hosts(places)
        return f"{self.terms.noun}{'s' * (', ' in hosts)} {hosts}"

    def hosts(self, places: Sequence[int]) -> str:
        """The hosts of some members: ``n1, n2``."""
        names = list(dict.fromkeys([self._known[place].host for place in places]))
        return name_few(names, SHOWN)
