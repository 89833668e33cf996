"""Random histories of jobs: agents come, fail, report, leave and are lost, at any moment and in any order.

A byte of an example is a throw of a die: what happens next. The world keeps the books of what has happened, and
checks each order against them. `make stress` runs 100 000 histories.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.support.conducting import CLOSED, a_job, coming, coming_and_going, reached, verdict_of
from tests.support.events import a_report

from dsl.conductor.conductor import Conductor
from dsl.conductor.listed import ListedConductor
from dsl.conductor.orders import Dismiss, Drop, Explain, Reach, Send, Speak
from dsl.conductor.terms import Terms
from dsl.control.clock import Clock
from dsl.control.messages import (
    Assignment,
    Bye,
    Checked,
    Failing,
    Forward,
    Hello,
    Lost,
    MeetByTorch,
    Over,
    Preempted,
    Refused,
    Said,
    Stop,
)
from dsl.model.job import Meeting, Notice
from dsl.plan.remote import Remote
from dsl.report.verdict import verdict

MS = 1_000_000
MOST_STEPS = 3000
"""Steps in which every job has to end once nobody is left."""


class Dice:
    """The throws of one example; all are 0 when the bytes are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def is_left(self) -> bool:
        return self._at < len(self._data)

    def throw(self, sides: int) -> int:
        """A number below ``sides``."""
        value = self._data[self._at] if self.is_left else 0
        self._at += 1
        return value % sides


class Agent:
    """An agent whose connection lives, and what the conductor has to know of it."""

    def __init__(self) -> None:
        self.outbox: list[object] = []
        self.attempt: int | None = None
        """The attempt whose workers run here, until the conductor has heard how they ended."""
        self.is_told = False
        self.stops = 0


class World:
    """A conductor, its members and the books."""

    makes: type[Conductor] = Conductor
    is_cut = False
    """The workers of the attempt were stopped to start again, however they end."""

    def __init__(self, terms: Terms, dice: Dice) -> None:
        self.terms, self.dice = terms, dice
        self.now_s = 100.0
        self.conductor = self.makes(terms, self.now_s, (lambda _: 29500) if terms.members_come else None)
        self.agents: dict[int, Agent] = {}
        self.places = len(terms.seats) or 6
        self.reachable = set(range(self.places))
        """Places where a program that reaches the member runs, or where a member may come by itself."""
        self.attempt, self.restarts, self.failures = -1, 0, 0
        self.members: set[int] = set()
        self.codes: dict[int, int] = {}
        """How the last attempt has ended at its members."""
        self.signals = 0
        self.is_abandoned = self.is_dismissed = False

    # What happens.

    def step(self) -> None:
        place = self.dice.throw(self.places)
        agent, what = self.agents.get(place), self.dice.throw(16)
        if agent is None:
            self.without_agent(place, what)
        elif what < 11 and agent.outbox:
            self.hear(place, agent.outbox.pop(0))
        elif what < 11:
            self.end_workers(place, agent, self.dice.throw(8))
        elif what == 11 and self.dice.throw(3) == 2:
            self.lose(
                place, CLOSED if self.dice.throw(2) else Lost("has not been heard for 15 s", is_silent=True)
            )
        elif what == 12:
            self.hear(place, self.nonsense(place))
        elif what == 13 and agent.attempt == self.attempt and self.dice.throw(4) == 3:
            self.signals += not self.terms.is_open
            self.hear(place, Preempted(self.attempt, 10))
        else:
            self.anywhere(what)

    def without_agent(self, place: int, what: int) -> None:
        """Something happens at a place where no agent is connected."""
        if what < 10 and place in self.reachable and self.conductor.expects(place):
            self.agents[place] = Agent()
            if not self.terms.members_come:
                self.reachable.discard(place)
            version = "0" if self.dice.throw(20) == 19 else "1"
            run_id = "another" if self.dice.throw(20) == 19 else ""
            hello = Hello(version, place, f"n{place}", 1, workers=1 + place % 2, run_id=run_id)
            self.hear(place, hello)
            if self.terms.offers and place in self.agents:
                self.agents[place].outbox.append(Checked((), ("10.0.0.1",), free_port=29500))
        elif what == 10 and place in self.reachable and not self.terms.members_come:
            self.reachable.discard(place)
            self.obey(self.conductor.starter_ended([place], "cannot be reached", self.now_s))
        else:
            self.anywhere(what)

    def anywhere(self, what: int) -> None:
        """Time goes by, or somebody sends a signal."""
        if what == 15 and self.dice.throw(4) == 3:
            action = ("stop", "preempt", "forward")[self.dice.throw(3)]
            self.signals += action != "forward"
            self.obey(self.conductor.signal(15, action, self.now_s, is_key=True))
        elif what == 14 and self.dice.throw(8) == 7 and self.terms.is_open:
            self.obey(self.conductor.meet_by_torch(self.now_s))
        elif what == 14 and self.dice.throw(8) == 7 and not self.terms.members_come:
            self.is_abandoned = True
            self.reachable.clear()
            self.obey(self.conductor.starters_lost("the launcher was killed", self.now_s))
        else:
            self.wait(self.dice.throw(3))

    def wait(self, how: int) -> None:
        """Time goes by: a moment, or until the next thing is due."""
        due_s = self.conductor.deadline_s
        self.now_s = max(self.now_s, due_s) if how and due_s is not None else self.now_s + 0.25
        self.obey(self.conductor.wait_is_over(self.now_s), is_late=True)
        due_s = self.conductor.deadline_s
        assert due_s is None or due_s > self.now_s, "something is due twice"

    def end_workers(self, place: int, agent: Agent, how: int) -> None:
        """The workers of a member end, if they run; the report travels."""
        number = agent.attempt
        if number is None or any(not isinstance(one, Said) for one in agent.outbox):
            return
        ranks: dict[str, Any] = {"victims": (place,)}
        if how < 3:
            agent.outbox.append(a_report(number))
        elif how < 6:
            failed: dict[str, Any] = {"rank": place, "at_ms": 1 + self.dice.throw(9), "host": f"n{place}"}
            agent.outbox.append(Failing(number, place, 7, MS))
            agent.outbox += [a_report(number, 7, **failed)] if how < 5 else []
        elif how == 6:
            agent.outbox.append(a_report(number, 143, stop_signal=15, **ranks))
        else:
            survivors, refused = self.dice.throw(2), self.dice.throw(2)
            agent.outbox.append(
                Refused("cannot bind", 2) if refused else a_report(number, 137, survivors=survivors, **ranks)
            )

    def nonsense(self, place: int) -> object:
        """A message that no agent sends at this moment."""
        others = (
            *(
                Checked(addresses=("10.0.0.1",)),
                Bye(),
                Said(Notice("info", "x")),
                Refused("no", 2),
                Hello("1", place, "x", 1),
            ),
            *(
                a_report(self.attempt + 1),
                a_report(max(self.attempt - 1, 0), 9),
                Failing(self.attempt + 7, 0, 1, 1),
            ),
        )
        return others[self.dice.throw(len(others))]

    def hear(self, place: int, message: object) -> None:
        agent = self.agents[place]
        if isinstance(message, Hello) and self.conductor.expects(place):
            agent = self.agents[place] = Agent()
        attempt = getattr(message, "attempt", None)
        if isinstance(message, (Bye, Refused)):
            self.settle(place, agent, getattr(message, "code", 1) or 1)
        elif type(message).__name__ == "Report" and attempt == agent.attempt:
            self.settle(place, agent, message.code)  # type: ignore[attr-defined]
        if isinstance(message, Bye):
            del self.agents[place]
        self.obey(self.conductor.hear(place, message, self.now_s))

    def settle(self, place: int, agent: Agent, code: int) -> None:
        """The conductor knows how the attempt has ended at a member."""
        if agent.attempt is not None:
            self.codes[place] = code
        agent.attempt = None

    def lose(self, place: int, message: Lost) -> None:
        agent = self.agents.pop(place)
        self.settle(place, agent, 1)
        self.obey(self.conductor.hear(place, message, self.now_s))

    # What is ordered.

    def obey(self, orders: list[object], *, is_late: bool = False) -> None:
        """Carry orders out. AssertionError: one of them must not be."""
        meetings = [
            one.message for one in orders if isinstance(one, Send) and isinstance(one.message, Meeting)
        ]
        if meetings:
            self.begin(meetings, [one for one in orders if isinstance(one, Send)])
        seen: set[tuple[int, str]] = set()
        for order in orders:
            if isinstance(order, Send):
                key = (order.place, type(order.message).__name__)
                assert key not in seen, f"twice for one event: {key}"
                seen.add(key)
                self.deliver(order.place, order.message)
            elif isinstance(order, Reach):
                self.reachable.add(order.place)
            elif isinstance(order, Drop):
                self.agents.pop(order.place, None)
            elif isinstance(order, Explain):
                assert verdict(order.judgement)[0]
            elif isinstance(order, Dismiss):
                assert self.conductor.roster.is_done
                assert not self.is_dismissed, "dismissed twice"
                self.is_dismissed = True
            else:
                assert isinstance(order, Speak)
        if self.conductor.code is not None:
            self.end(is_late=is_late)

    def begin(self, meetings: list[Meeting], sends: list[Send]) -> None:
        number, terms = meetings[0].attempt, self.terms
        places = [one.place for one in sends if isinstance(one.message, Meeting)]
        assert self.conductor.code is None, "an attempt of a job that is over"
        assert number == self.attempt + 1, "attempts are counted"
        assert terms.least <= len(places) <= terms.most
        assert [one.attempt for one in meetings] == [number] * len(meetings)
        assert not [place for place in self.members if self.is_unheard(place)], "a member is unheard"
        assert number == 0 or self.members <= self.codes.keys()
        restarts, reason = meetings[0].restarts, meetings[0].reason
        assert restarts - self.restarts == (reason == "failure"), "a restart for each failure, and no other"
        assert restarts <= terms.job.max_restarts, "more restarts than there are"
        assert not self.signals, "an attempt after a request to end"
        assert terms.is_elastic or reason != "membership"
        assert sorted({one.node_rank for one in meetings}) == list(range(meetings[0].node_count))
        assert (
            meetings[0].world_size == sum(one.size for one in terms.seats)
            or terms.is_elastic
            or terms.members_come
        )
        sizes = [0] * meetings[0].node_count
        for place, meeting in zip(places, meetings, strict=True):
            sizes[meeting.node_rank] += self.conductor.roster[place].size
        assert {one.local_world_sizes for one in meetings} == {tuple(sizes)}
        self.attempt, self.restarts, self.members, self.codes = number, restarts, set(places), {}

    def is_unheard(self, place: int) -> bool:
        """Whether workers run at a member that is there."""
        return place in self.agents and self.agents[place].attempt == self.attempt

    def deliver(self, place: int, message: object) -> None:
        assert place in self.agents, f"nobody is at place {place} to hear {message}"
        agent = self.agents[place]
        assert not agent.is_told, f"after Over: {message}"
        if isinstance(message, Assignment):
            agent.outbox.append(Checked(("no script",) if self.dice.throw(10) == 9 else (), ("10.0.0.1",)))
        elif isinstance(message, Meeting):
            agent.attempt, agent.stops = message.attempt, 0
            agent.outbox = []
        elif isinstance(message, Stop):
            assert agent.attempt == self.attempt, "no worker runs there"
            agent.stops += 1
            assert agent.stops <= 1 + self.signals, "stopped twice"
            if all(isinstance(one, (Said, Failing)) for one in agent.outbox):
                agent.outbox.append(a_report(self.attempt, 1, victims=(place,)))
        elif isinstance(message, (Over, MeetByTorch)):
            agent.is_told = True
            agent.outbox.append(Bye())
        elif isinstance(message, Refused):
            assert self.terms.members_come
            if self.conductor.code is None:
                del self.agents[place]  # its place is free for another
        else:
            assert isinstance(message, Forward)
            assert agent.attempt == self.attempt

    def end(self, *, is_late: bool) -> None:
        code = self.conductor.code
        unheard = [place for place in self.members if self.is_unheard(place)]
        assert not unheard or (self.is_abandoned and is_late) or self.ended, "a living member is unheard"
        if not self.ended:
            self.ended = True
            self.code = code
            well = self.attempt >= 0 and self.members <= self.codes.keys() and not any(self.codes.values())
            well = well and not self.is_cut
            assert (code == 0) == (well and not self.signals and not self.is_abandoned), (code, self.codes)
            assert verdict_of(self.conductor) or not code or self.signals
        assert code == self.code or (self.code == 0 and self.signals), "two exit codes"

    ended = False

    def run(self) -> None:
        """Play the history; then everybody goes, and the job has to end."""
        for place in range(self.places) if self.dice.throw(4) else ():
            self.without_agent(place, 0)
            while place in self.agents and self.agents[place].outbox and self.attempt < 0:
                self.hear(place, self.agents[place].outbox.pop(0))
        while self.dice.is_left and not self.conductor.roster.is_done:
            self.step()
        for place in list(self.agents):
            if place in self.agents:
                self.lose(place, CLOSED)
        for _ in range(MOST_STEPS):
            if self.conductor.roster.is_done:
                break
            for place in sorted(self.reachable) if not self.terms.members_come else ():
                self.reachable.discard(place)
                self.obey(self.conductor.starter_ended([place], "cannot be reached", self.now_s))
            self.wait(1)
        assert self.conductor.roster.is_done, "the job does not end"
        assert self.is_dismissed
        assert self.conductor.deadline_s is None


class ListedWorld(World):
    """An elastic job whose hosts are in a list that changes."""

    makes = ListedConductor
    conductor: ListedConductor
    listed: frozenset[int] | None = None
    """The places of the list; None: it has not changed yet."""

    def step(self) -> None:
        if self.dice.throw(8) or self.conductor.roster.is_over:
            super().step()
            return
        count = self.places + (self.places < 6 and self.dice.throw(2))
        self.listed = frozenset([place for place in range(count) if self.dice.throw(3)])
        self.terms = listed_terms(count)
        self.places = count
        self.obey(self.conductor.list_hosts(self.terms, self.listed, self.now_s))

    def deliver(self, place: int, message: object) -> None:
        self.is_cut |= isinstance(message, Stop) and message.why.startswith("hosts have ")
        super().deliver(place, message)

    def begin(self, meetings: list[Meeting], sends: list[Send]) -> None:
        super().begin(meetings, sends)
        self.is_cut = False
        assert self.listed is None or self.members <= self.listed, (
            "an attempt on a host that has left the list"
        )


def listed_terms(count: int) -> Terms:
    job = a_job(*[1] * count, restarts=5, is_elastic=True)
    return reached(job, Remote("ssh", least_nodes=2, most_nodes=4, wait_s=60.0))


def some_terms(dice: Dice) -> Terms:
    """A fixed job, one of tasks, an elastic job, or one whose members come by themselves, once or at any time."""
    kind, count, restarts = dice.throw(7), 1 + dice.throw(4), dice.throw(3)
    if kind == 0:
        return coming(count, restarts=restarts, spares=dice.throw(3))
    if kind < 3:
        return reached(a_job(*[2] * count, restarts=restarts), Remote("pdsh", per_node=kind == 1))
    least = 1 + dice.throw(count)
    most = least + dice.throw(count - least + 1)
    if kind > 4:
        return coming_and_going(least, most, restarts, last_call_s=1.0, gives_up=bool(dice.throw(2)))
    job = a_job(*[1] * count, restarts=restarts * 10, is_elastic=True, gives_up=bool(dice.throw(2)))
    sizes = () if dice.throw(2) else (least, most)
    launcher: Any = ("ssh", "slurm")[dice.throw(2)]
    return reached(
        job,
        Remote(launcher, least_nodes=least, most_nodes=most, wait_s=60.0, world_sizes=sizes),
    )


@given(st.binary(min_size=20, max_size=500))
@settings(deadline=None)
def test_every_history_is_conducted_well(data: bytes) -> None:
    dice = Dice(data)
    World(some_terms(dice), dice).run()


@given(st.binary(min_size=20, max_size=500))
@settings(deadline=None)
def test_every_history_of_a_job_whose_list_of_hosts_changes_is_conducted_well(data: bytes) -> None:
    dice = Dice(data)
    ListedWorld(listed_terms(2 + dice.throw(3)), dice).run()


@pytest.mark.stress
def test_a_hundred_thousand_histories_are_conducted_well() -> None:
    first = Random().randrange(2**32)
    for seed in range(first, first + 100_000):
        random = Random(seed)
        dice = Dice(random.randbytes(random.randrange(20, 500)))
        try:
            World(some_terms(dice), dice).run()
        except AssertionError as error:
            raise AssertionError(f"the history of seed {seed}") from error


ENDS = st.sampled_from(["failed", "lost", "refused", "stopped", "well"])


@given(st.lists(ENDS, min_size=1, max_size=5), st.randoms(), st.sampled_from(["fixed", "elastic"]))
def test_the_judgement_is_the_same_whatever_the_order_of_arrival(
    ends: list[str], random: Random, kind: str
) -> None:
    """A stopped member reports after the failure for which it was stopped: in any order, but not before."""
    assume({"failed", "lost", "refused"} & set(ends))
    found = []
    for _ in range(2):
        count, places = len(ends), list(range(len(ends)))
        bounds = count if kind == "elastic" else 0
        remote = Remote("pdsh", least_nodes=bounds, most_nodes=bounds, wait_s=60.0)
        conductor = Conductor(reached(a_job(*[1] * count, is_elastic=bounds > 0), remote), 0.0)
        for place in places:
            conductor.hear(place, Hello("1", place, "h", 1), 0.0)
            conductor.hear(place, Checked(addresses=("10.0.0.1",)), 0.0)
            conductor.clocks[place] = Clock(0, MS)
        random.shuffle(places)
        places.sort(key=lambda place: ends[place] == "stopped")
        for place in places:
            message: object = {
                "failed": a_report(0, 7 + place, rank=place, at_ms=5 + place // 2),
                "lost": CLOSED,
                "refused": Refused("cannot bind", 2),
                "stopped": a_report(0, 1, victims=(place,)),
                "well": a_report(0, 0),
            }[ends[place]]
            conductor.hear(place, message, 1.0)
        assert conductor.judgement is not None
        found.append((conductor.judgement, conductor.code))
    assert found[0] == found[1]
