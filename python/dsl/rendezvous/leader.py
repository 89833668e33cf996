"""What node 0 of a job with fixed nodes decides: messages in, messages out.

The nodes have their places from the start. Every round has all nodes: a node that leaves or is lost ends the
job. Before the first round, the place of a node that goes becomes free again.
"""

from __future__ import annotations

from dsl.errors import DslError
from dsl.lists import format_ranges
from dsl.rendezvous.delegate_messages import (
    Changed,
    Fail,
    FailingRank,
    Finish,
    Finished,
    Leave,
    Meet,
    Met,
    NotMet,
    PeerFailed,
    Remark,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from dsl.rendezvous.delegate_messages import Answer, Order, Reason

    Says: TypeAlias = list[tuple[int, Answer]]
    """Answers to the nodes of these places, in this order."""


class Seat:
    """A node that has come."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.meet: Meet | None = None
        """The order with which it waits for the next round."""
        self.has_finished = False
        """It waits for the others to finish."""
        self.is_gone = False
        """The node has said goodbye, is lost, or knows that the job is over."""


class Leader:
    """The rounds of a job of ``node_count`` nodes."""

    def __init__(self, node_count: int, address: str, port_of: Callable[[int], int]) -> None:
        """``port_of`` chooses the port of a round, counted from 0. It may raise DslError."""
        self.node_count = node_count
        self.seats: dict[int, Seat] = {}
        self.rounds = 0
        """Number of rounds so far."""
        self._restarts = 0
        self.closed = ""
        """Why no further round can follow; empty if one can."""
        self._address = address
        self._port_of = port_of

    def name(self, place: int) -> str:
        """The name of a node in messages."""
        return node_name(place, self.seats[place].host)

    def is_taken(self, place: int) -> bool:
        """Whether a place is taken."""
        return place in self.seats

    def come(self, place: int, host: str) -> None:
        """Give a node its place."""
        self.seats[place] = Seat(host)

    def hear(self, place: int, order: Order) -> Says:
        """What follows from what a node says."""
        seat = self.seats.get(place)
        if seat is None or seat.is_gone:
            return []
        if isinstance(order, Meet):
            return self._meet(place, seat, order)
        if isinstance(order, FailingRank):
            return self._to_others(place, self._failure(seat, order, final=False))
        if isinstance(order, Finish):
            seat.has_finished = True
            return self._finish()
        if isinstance(order, Fail):
            seat.is_gone = True
            return self._close(
                place, f"{self.name(place)} has failed", [self._failure(seat, order, final=True)]
            )
        if isinstance(order, Leave):
            return self._go(place, seat, f"{self.name(place)} has left the job", "info")
        return []

    def lose(self, place: int, why: str) -> Says:
        """What follows when a node is lost."""
        seat = self.seats.get(place)
        if seat is None or seat.is_gone:
            return []
        return self._go(place, seat, f"{self.name(place)} is lost: {why}", "warning")

    def expire(self, seconds: float) -> Says:
        """What follows when the nodes have not met in time."""
        if self.rounds or self.closed:
            return []
        text = f"after {seconds:g} s the job is still {self.waiting()}"
        waiting = [place for place, seat in self.seats.items() if seat.meet is not None]
        for place in waiting:
            self.seats[place].meet = None
        return [(place, NotMet("timeout", text)) for place in waiting]

    def waiting(self) -> str:
        """A text about the nodes that the next round waits for."""
        seats, missing = self.seats, self.missing()
        if len(missing) == 1:
            place = missing[0]
            names = self.name(place) if place in seats else f"node {place}"
        else:
            names = f"nodes {format_ranges(missing)}"
        return f"waiting for {len(missing)} of {self.node_count} nodes: {names}"

    def missing(self) -> list[int]:
        """The places of the nodes that the next round waits for."""
        seats = self.seats
        return [place for place in range(self.node_count) if place not in seats or not seats[place].meet]

    def _meet(self, place: int, seat: Seat, meet: Meet) -> Says:
        if self.closed:
            return [(place, NotMet("closed", self.closed))]
        seat.meet, seat.has_finished = meet, False
        meets = [self.seats[one].meet for one in range(self.node_count) if one in self.seats]
        known = [one for one in meets if one is not None]
        return self._make_round(known) if len(known) == self.node_count else []

    def _make_round(self, meets: list[Meet]) -> Says:
        places = range(self.node_count)
        for place in places:
            self.seats[place].meet = None
        try:
            port = self._port_of(self.rounds)
        except DslError as error:
            return [(place, NotMet("other", str(error))) for place in places]
        number, self.rounds = self.rounds, self.rounds + 1
        sizes = tuple([meet.local_world_size for meet in meets])
        hosts = tuple([self.seats[place].host for place in places])
        # A round counts at most one restart, even if a node says more.
        restarts = self._restarts = min(max([meet.restarts for meet in meets]), self._restarts + (number > 0))
        reason = _reason(meets, is_first=number == 0)
        before: dict[str, int] = {}
        firsts = []
        for meet in meets:
            firsts.append(before.get(meet.role, 0))
            before[meet.role] = firsts[-1] + meet.local_world_size
        return [
            (
                place,
                Met(
                    number,
                    place,
                    sizes,
                    firsts[place],
                    before[meets[place].role],
                    self._address,
                    port,
                    restarts,
                    reason,
                    hosts,
                    tuple(map(str, places)),
                ),
            )
            for place in places
        ]

    def _finish(self) -> Says:
        """Release nodes that wait for the others' end, once all nodes still here wait or the job is over."""
        here = {place: seat for place, seat in self.seats.items() if not seat.is_gone}
        if not self.closed and not all(seat.has_finished for seat in here.values()):
            return []
        done = [place for place, seat in here.items() if seat.has_finished]
        for place in done:
            here[place].is_gone = True
        return [(place, Finished()) for place in done]

    def _go(self, place: int, seat: Seat, text: str, level: str) -> Says:
        if not self.rounds and not self.closed:
            told: list[Answer] = [Remark("info", f"{text}, before the job has begun")]
            says = self._to_others(place, *told)
            del self.seats[place]
            return says
        seat.is_gone = True
        if self.closed:
            return self._finish()
        left = sum(not one.is_gone for one in self.seats.values())
        changed = Changed(left, 0, closed=True, left=(seat.host,))
        return self._close(place, text, [Remark(level, text), changed])

    def _close(self, place: int, text: str, answers: list[Answer]) -> Says:
        """End the job for all."""
        if self.closed:
            return self._finish()
        self.closed = text
        says = self._to_others(place, *answers)
        for other, seat in self.seats.items():
            if seat.meet is not None and other != place and not seat.is_gone:
                seat.meet = None
                says.append((other, NotMet("closed", text)))
        return says + self._finish()

    def _failure(self, seat: Seat, order: FailingRank | Fail, *, final: bool) -> PeerFailed:
        return PeerFailed(seat.host, order.rank, order.code, order.failed, final)

    def _to_others(self, place: int, *answers: Answer) -> Says:
        others = [other for other, seat in self.seats.items() if other != place and not seat.is_gone]
        return [(other, answer) for other in others for answer in answers]


def node_name(place: int, host: str) -> str:
    """The name of a node in messages."""
    return f"node {place} ({host})" if host else f"node {place}"


def _reason(meets: list[Meet], *, is_first: bool) -> Reason:
    if is_first:
        return "start"
    return "failure" if any(meet.reason == "failure" for meet in meets) else "membership"
