"""The watching thread of a delegate: news of other nodes, nodes that come and go, a silent store.

It has a connection of its own, so that it may wait in the store while torch's handler uses another
connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dsl.model.job import Notice
from dsl.model.outcome import Membership, MembershipChanged
from dsl.rendezvous.delegate_messages import Answer
from dsl.rendezvous.settings import number
from dsl.rendezvous.store_messages import Item, News, NodeFailed, NodeLeft, StateChanged
from dsl.rendezvous.torch_side import Site, view_of
from dsl.rendezvous.view import Node, NodeClocks, Pulse, RoundNodes, View, missing

LOOK_S = 1.0
"""How often we read the state without news: nodes that are not ours send none, and dead nodes cannot."""
SURE_S = 1.0
"""A node that is missing without news may be between two steps of torch's protocol for this long."""
SURE_ALONE_S = 3.0
"""The longer time before a decision that this node leaves, or that a round begins."""
MOST_HELD = 256
"""Most news that we hold for rounds that have not begun here."""
SILENT_S = 20.0
"""A store that has not answered for this long counts as lost."""


class Watcher:
    """Watches the rendezvous of one node."""

    def __init__(self, site: Site, node: Node, say: Callable[[Answer], None]) -> None:
        self._site = site
        self.node = node
        """This node's name in torch, or its place in the round if torch does not tell."""
        self._say = say
        self._news: News | None = None
        self._lock = threading.Lock()
        self._round_nodes: RoundNodes | None = None
        self._held: list[NodeFailed] = []
        self._gone: set[Node] = set()  # for good: no two nodes ever have the same name
        self._seen_s: dict[Node, float] = {}
        self._missing_since: dict[Node, float] = {}
        self._told: MembershipChanged | None = None
        self._answered_s = time.monotonic()
        self._company_s = float("-inf")
        self._round_news: News | None = None
        self._turns = 0
        settings = site.order.point.settings
        interval_s = number(settings, "keep_alive_interval")
        expiry_s = interval_s * number(settings, "keep_alive_max_attempt")
        self.most_offset_s = float(max(expiry_s - interval_s, 1))
        """Nodes whose clocks differ by more drop each other."""
        self._pulse = Pulse(float(expiry_s))
        self._clocks = NodeClocks(self.most_offset_s)
        self._warned: set[Node] = set()
        self._acknowledged = f"dsl/{site.order.run_id}/acknowledged"
        self.view = View()
        """The last view that was read."""
        self.wake = threading.Event()
        """Something may have changed."""
        self.is_over = False
        """Another node has said that the job is over."""
        self.is_lost = False
        """The store does not answer."""
        self.is_finishing = False
        """The workers here have ended well, and need the store no more."""

    def start(self) -> None:
        """Begin to watch, from now on."""
        if self._site.is_dynamic:
            self._news = self._site.new_news()
        threading.Thread(target=self._run, name="watcher", daemon=True).start()

    def watch(self, round_nodes: RoundNodes | None, news: News | None = None) -> None:
        """Note that a round's workers run (None: no workers). ``news``: for handlers that are not dynamic."""
        with self._lock:
            self._round_nodes, self._round_news = round_nodes, news or self._round_news
            self._told = MembershipChanged(Membership(len(round_nodes.nodes))) if round_nodes else None
            self._missing_since.clear()
            held, self._held = self._held, []
            for item in held:
                self._hear(item)
        self.wake.set()

    def others(self) -> tuple[Node, ...]:
        """Other nodes of the job that are alive."""
        view, now_s = self.view, time.monotonic()
        nodes = dict.fromkeys([*view.participants, *view.waiting, *view.spares])
        return tuple([node for node in nodes if node != self.node and self._pulse.is_alive(node, now_s)])

    def expected(self) -> tuple[Node, ...]:
        """Nodes that should be in the next round: those of the present round, and those that wait."""
        nodes = self._round_nodes.nodes if self._round_nodes is not None and self._site.is_dynamic else ()
        return tuple(dict.fromkeys([*nodes, *self.view.waiting])) if nodes else ()

    def may_come(self, node: Node) -> bool:
        """Whether a node may still come: it is not surely gone."""
        seen_s = self._seen_s.get(node, float("-inf"))
        return node not in self._gone and time.monotonic() - seen_s <= SURE_ALONE_S

    @property
    def is_alone(self) -> bool:
        """Whether no other node is left. A node that meets again is out of the job only for an instant."""
        return time.monotonic() - self._company_s > SURE_ALONE_S

    def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until something may have changed."""
        self.wake.wait(seconds)
        self.wake.clear()

    def hear_all(self) -> None:
        """Return when all news sent before this call was read, or the store is gone."""
        enough = self._turns + 2  # the present turn may have read too early
        end_s = time.monotonic() + 3 * LOOK_S
        while self._turns < enough and time.monotonic() < end_s:
            self.pause(LOOK_S)

    def ask_if_silent(self) -> None:
        """Report once that the store has not answered for long. Any thread may call this."""
        if time.monotonic() - self._answered_s > SILENT_S:
            self._lose()

    def _run(self) -> None:
        while True:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - a lost store raises errors of many classes
                self._lose()
                time.sleep(LOOK_S)
            else:
                self._answered_s = time.monotonic()
                self.is_lost = False

    def _turn(self) -> None:
        news = self._news or self._round_news
        if news is None:
            time.sleep(LOOK_S / 4)
            return
        news.wait(LOOK_S)
        items = news.read()
        if self._site.is_dynamic:
            found = self._site.watch_backend.get_state()
            view = view_of(found[0]) if found else View()
        else:
            view = self._view_of_other()
        with self._lock:
            for item in items:
                self._hear(item)
            self._look(view)
        self._turns += 1
        self.wake.set()

    def _view_of_other(self) -> View:
        """The view of a handler that is not dynamic."""
        round_nodes, handler = self._round_nodes, self._site.handler
        if round_nodes is None:
            return View()
        waiting = tuple([("", place, 0) for place in range(handler.num_nodes_waiting())])
        return View(round_nodes.round, True, bool(handler.is_closed()), round_nodes.nodes, waiting)

    def _lose(self) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self.wake.set()
        if self._round_nodes is not None and not self.is_over and not self.is_finishing:
            self._say(Notice("warning", _LOST.format(place=self._site.place)))

    def _hear(self, item: Item) -> None:
        round_nodes = self._round_nodes
        if isinstance(item, StateChanged) or item.node == self.node:
            return
        if isinstance(item, NodeLeft):
            self._gone.add(item.node)
        elif item.failure.is_final:
            self._say(item.failure)
            self.is_over = True
            if self._site.watch_store is not None:
                self._site.watch_store.add(self._acknowledged, 1)
        elif round_nodes is None or item.round > round_nodes.round:
            self._held = [*self._held, item][-MOST_HELD:]
        elif item.round == round_nodes.round:
            self._say(item.failure)

    def acknowledged(self) -> int:
        """How many nodes have heard that the job is over."""
        return int(self._site.store.add(self._acknowledged, 0))

    def _look(self, view: View) -> None:
        self.view = view
        now_s = time.monotonic()
        self._pulse.look(view, now_s)
        for node in self.others():
            self._company_s = self._seen_s[node] = now_s
        round_nodes = self._round_nodes
        if round_nodes is None:
            return
        self._warn_of_clocks(view)
        left = self._left(round_nodes, view, now_s)
        node_count = len(round_nodes.nodes) - len(left)
        # Older versions of torch have no list of spares. A waiting node of the round wants to meet again.
        has_place = node_count < self._site.order.max_nodes
        waiting = sum(has_place or node in round_nodes.nodes for node in view.waiting)
        names = [
            name for node, name in zip(round_nodes.nodes, round_nodes.names, strict=True) if node in left
        ]
        changed = MembershipChanged(
            Membership(node_count, waiting, view.is_closed), tuple(names), self.node in left
        )
        if changed != self._told:
            self._told = changed
            self._say(changed)

    def _left(self, round_nodes: RoundNodes, view: View, now_s: float) -> tuple[Node, ...]:
        """Nodes of the round that are gone for sure."""
        if not self._site.is_dynamic:
            return tuple([node for node in round_nodes.nodes if node in self._gone])
        if view.round > round_nodes.round:
            # The others have dropped us and gone on.
            return (self.node,) if self.node in round_nodes.nodes else ()
        absent = missing(round_nodes, view)
        self._missing_since = {node: self._missing_since.get(node, now_s) for node in absent}
        sure = [
            node
            for node, since_s in self._missing_since.items()
            if node in self._gone or now_s - since_s >= SURE_S
        ]
        dead = [
            node
            for node in round_nodes.nodes
            if node not in absent and node != self.node and not self._pulse.is_alive(node, now_s)
        ]
        return tuple([node for node in round_nodes.nodes if node in sure or node in dead])

    def _warn_of_clocks(self, view: View) -> None:
        self._clocks.look(view, self.node, wall_s())
        for node, offset_s in self._clocks.far():
            if node not in self._warned:
                self._warned.add(node)
                self._say(Notice("warning", describe_clock(node[0], offset_s)))


_LOST = (
    "the store of the rendezvous at {place} does not answer any more: the workers go on, but no node can "
    "join and none can start again, see to the node that hosts it"
)


def wall_s() -> float:
    """The time by this machine's clock."""
    return time.time()


def describe_clock(host: str, offset_s: float) -> str:
    """What users should know about a clock that is too far from ours."""
    side = "ahead of" if offset_s > 0 else "behind"
    return (
        f"the clock of {host} is {abs(offset_s):.0f} s {side} this one's: nodes drop each other whose clocks "
        "differ by more than some seconds, let NTP set both"
    )
