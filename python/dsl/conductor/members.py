"""What a conductor knows of each member: whether it can take part, and when it is tried again."""

from __future__ import annotations

from dsl.conductor.orders import Dismiss, Drop, Reach, Speak
from dsl.lists import first_few, format_ranges, name_few
from dsl.model.job import Notice
from dsl.plan.elastic import choose_hosts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
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


class Known:
    """What is known of one member."""

    def __init__(self, member: Seat, due_s: float | None) -> None:
        self.host, self.size, self.role = member.host, member.size, ""
        self.problem = ""
        """Why it does not take part, as the user was last told."""
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
        self.status, self.due_s, self.problem = status, due_s, problem
        return is_news


class Roster:
    """All members of a job, by place."""

    def __init__(self, terms: Terms, now_s: float) -> None:
        self._terms = terms
        self._known = [Known(member, self.answer_by(now_s)) for member in terms.seats]
        self.is_over = False
        """The job is over: no member is awaited any more."""
        self._is_dismissed = False

    def __getitem__(self, place: int) -> Known:
        return self._known[place]

    def __iter__(self) -> Iterator[Known]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def answer_by(self, now_s: float) -> float | None:
        """When a member has to have answered that starts now."""
        return None if self._terms.start_s is None else now_s + self._terms.start_s

    def forget(self, place: int) -> None:
        """Make a place free again."""
        self._known[place] = Known(self._terms.seats[place], None)

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
        return [place for place in range(len(self._known)) if place not in ready]

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

    # ------------------------------------------------------------------ members that cannot take part

    def find_unfit(self, place: int, problems: Sequence[str], now_s: float) -> list[object]:
        """Note problems at a member. An elastic job tries it again when the user may have mended them."""
        is_elastic = self._terms.is_elastic
        is_news = self._known[place].put(
            "unfit", now_s + MENDED_S if is_elastic else None, "\n".join(problems)
        )
        return self.say_unfit(place) if is_news and is_elastic else []

    def say_unfit(self, place: int) -> list[object]:
        """Tell the user what is wrong at a member."""
        lines = self._known[place].problem.split("\n")
        return [Speak(Notice("warning", f"{self.name(place)} cannot take part: {line}")) for line in lines]

    def miss(self, place: int, why: str, now_s: float, *, is_known: bool = False) -> list[object]:
        """Note that a member is missing. An elastic job tries it again. ``is_known``: say nothing."""
        one, is_elastic = self._known[place], self._terms.is_elastic
        is_news = one.put("missing", now_s + one.pause_s() if is_elastic else None, why)
        if not is_elastic or not is_news or is_known:
            return []
        return [Speak(Notice("warning", f"{self.name(place)}: {why}; it is tried again"))]

    def try_again(self, now_s: float) -> list[object]:
        """Give up waiting for members that have not answered in time, and try missing members again."""
        orders: list[object] = []
        for place, one in enumerate(self._known):
            if one.due_s is None or now_s < one.due_s:
                continue
            drops = [Drop(place)] if self._terms.is_elastic else []
            if one.status == "starting":
                one.is_gone |= self._terms.is_elastic
                why = f"has not answered within {self._terms.start_s:g} s"
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

    def choose(self, preferred: frozenset[int]) -> tuple[int, ...] | None:
        """The largest set of ready members that the job may run on, preferred ones first; None: too few."""
        terms = self._terms
        ordered = sorted(self.ready(), key=lambda place: (place not in preferred, place))
        sizes = [(place, self._known[place].size) for place in ordered]
        return choose_hosts(sizes, terms.least, terms.most, terms.world_sizes)

    def shortage(self) -> str:
        """Why the members that are ready are too few."""
        there, least = len(self.ready()), self._terms.least
        if there < least:
            return f"{there} of at least {least} hosts {'is' if there == 1 else 'are'} there"
        sizes = first_few(self._terms.world_sizes)
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
        """The name of a member: ``host n1``, ``rank 3 on host n1``, or ``node 1 (n1)``."""
        host = self._known[place].host
        if self._terms.members_come:
            return f"node {place} ({host})" if host else f"node {place}"
        is_task = self._terms.seats[place].task is not None
        return f"rank {place} on host {host}" if is_task else f"host {host}"

    def names(self, places: Sequence[int]) -> str:
        """Several members: ``hosts n1, n2``, ``nodes 1, 2``."""
        if len(places) == 1:
            return self.name(places[0])
        hosts = self.hosts(places)
        return (
            f"nodes {format_ranges(places)}"
            if self._terms.members_come
            else f"host{'s' * (', ' in hosts)} {hosts}"
        )

    def hosts(self, places: Sequence[int]) -> str:
        """The hosts of some members: ``n1, n2``."""
        names = list(dict.fromkeys([self._known[place].host for place in places]))
        return name_few(names, SHOWN)
