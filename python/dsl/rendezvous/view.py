"""The state of torch's rendezvous in our own values, and what follows from two such states.

torch keeps one object for all nodes, which each of them reads and writes. Its attributes have had the same
names since 1.9; only ``redundancy_list`` is younger. The code here reads no clock: callers pass times in.
"""

from __future__ import annotations

from calendar import timegm
from typing import Any, TypeAlias

from dsl._record import Record

# Text, as in `dsl.model.request`.
Node: TypeAlias = "tuple[str, int, int]"
"""Address, pid and a local number: torch tells nodes apart by these, and orders them."""


class View(Record):
    """The state of a rendezvous."""

    round: int = 0
    """Number of the round."""
    is_complete: bool = False
    """The round has its nodes, and they have ranks."""
    is_closed: bool = False
    """The job is over."""
    participants: tuple[Node, ...] = ()
    """Nodes of the round, in the order of their ranks."""
    waiting: tuple[Node, ...] = ()
    """Nodes that wait for the next round."""
    spares: tuple[Node, ...] = ()
    """Nodes beyond the most that the job takes."""
    heartbeats: tuple[tuple[Node, float], ...] = ()
    """Last heartbeat of each node, by its own clock, in seconds since the epoch."""


def read_state(state: Any) -> View:
    """Make a view of torch's object."""
    ranks = {name_node(node): rank for node, rank in state.participants.items()}
    return View(
        round=state.round,
        is_complete=bool(state.complete),
        is_closed=bool(state.closed),
        participants=tuple(sorted(ranks, key=lambda node: (ranks[node], node))),
        waiting=tuple(sorted(map(name_node, state.wait_list))),
        spares=tuple(sorted(map(name_node, getattr(state, "redundancy_list", ())))),
        heartbeats=tuple([(name_node(node), _epoch_s(at)) for node, at in state.last_heartbeats.items()]),
    )


def name_node(node: Any) -> Node:
    """Our name for a node, from torch's descriptor."""
    return (node.addr, node.pid, node.local_id)


def _epoch_s(moment: Any) -> float:
    """Seconds since the epoch. Before 2.6 torch's times had no zone, but were UTC too."""
    seconds: float = timegm(moment.utctimetuple()) + moment.microsecond / 1e6
    return seconds


def take_out(state: Any, node: Node, least: int) -> bool:
    """Take a node out of torch's object, as torch does when a node leaves. Returns whether it was there.

    A complete round whose last node goes makes room for the next round. An incomplete round that now has too
    few nodes waits for others without a time limit.
    """
    was_in = False
    lists: list[set[Any]] = [state.wait_list, getattr(state, "redundancy_list", set())]
    for nodes in lists:
        for one in [one for one in nodes if name_node(one) == node]:
            nodes.remove(one)
            was_in = True
    for one in [one for one in state.last_heartbeats if name_node(one) == node]:
        del state.last_heartbeats[one]
    for one in [one for one in state.participants if name_node(one) == node]:
        del state.participants[one]
        was_in = True
        if state.complete and not state.participants:
            state.complete = False
            state.round += 1
        elif not state.complete and len(state.participants) < least:
            state.deadline = None
    return was_in


def end_last_call(state: Any) -> bool:
    """Let a round with enough nodes begin now. Returns whether it would have waited for more nodes."""
    if state.complete or state.deadline is None:
        return False
    past = state.deadline.replace(year=1972)  # of the kind that this version of torch compares with
    was_open: bool = state.deadline > past
    state.deadline = past
    return was_open


class NodeClocks:
    """Whether the nodes' clocks agree, judged by heartbeats: each carries the time of its writer's clock.

    A heartbeat that is new since the last look was written between the two looks. So we know the writer's
    clock to within the time between these looks. An older heartbeat may have any age, and proves something
    only if its time lies in the future.
    """

    def __init__(self, most_s: float) -> None:
        """``most_s``: clocks that differ by more are too far apart."""
        self._most_s = most_s
        self._seen: dict[Node, float] | None = None
        self._looked_s = 0.0
        self.offsets: dict[Node, float] = {}
        """A node's clock minus ours, for nodes whose clock is known."""

    def look(self, view: View, own: Node, wall_s: float) -> None:
        """Take in a view. ``wall_s``: the time by our clock."""
        gap_s = max(wall_s - self._looked_s, 0.0)
        for node, heard_s in view.heartbeats:
            if node == own:
                continue
            offset_s = heard_s - wall_s
            is_new = self._seen is not None and self._seen.get(node) != heard_s
            if offset_s > self._most_s or (is_new and -offset_s - gap_s > self._most_s):
                self.offsets[node] = offset_s
            elif is_new:
                self.offsets[node] = 0.0
        self._seen = dict(view.heartbeats)
        self._looked_s = wall_s

    def far(self) -> tuple[tuple[Node, float], ...]:
        """Nodes whose clocks are too far from ours, with the offset in seconds."""
        return tuple([(node, offset_s) for node, offset_s in self.offsets.items() if offset_s])

    @property
    def is_ours_wrong(self) -> bool:
        """Whether more clocks differ from ours than agree with it."""
        return len(self.far()) > len(self.offsets) - len(self.far())


class Pulse:
    """Which nodes are alive: those whose heartbeat has changed lately, to any value."""

    def __init__(self, most_s: float) -> None:
        """``most_s``: a node that is silent for longer is gone."""
        self._most_s = most_s
        self._last: dict[Node, tuple[float, float]] = {}

    def look(self, view: View, now_s: float) -> None:
        """Take in a view. ``now_s``: a time that never jumps."""
        self._last = {
            node: (heard_s, self._last[node][1])
            if node in self._last and self._last[node][0] == heard_s
            else (heard_s, now_s)
            for node, heard_s in view.heartbeats
        }

    def is_alive(self, node: Node, now_s: float) -> bool:
        """Whether a node's heartbeat has changed lately."""
        return node in self._last and now_s - self._last[node][1] <= self._most_s


class RoundNodes(Record):
    """The nodes of the running round."""

    round: int
    """Number of the round."""
    nodes: tuple[Node, ...]
    """By node rank."""
    names: tuple[str, ...]
    """Their names for users, by node rank."""


def missing(round_nodes: RoundNodes, view: View) -> tuple[Node, ...]:
    """Nodes that are no longer in their round. A node that meets the others again has not left."""
    if view.round != round_nodes.round or view.is_closed:
        return ()
    there = {*view.participants, *view.waiting, *view.spares}
    return tuple([node for node in round_nodes.nodes if node not in there])
