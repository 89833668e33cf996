"""This node's part in the rendezvous, in the delegate: it carries out the agent's orders, one by one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from dsl.lists import with_port
from dsl.model.job import Notice
from dsl.model.nodes import NodesFinished, PeerFailure
from dsl.rendezvous.delegate_messages import Answer, Meet, Open
from dsl.rendezvous.meeting import ASK_S, Meetings, RoundBroken
from dsl.rendezvous.refusals import (
    Refusal,
    connection_text,
    describe_waiting,
    is_spare,
    refusal,
    unneeded,
)
from dsl.rendezvous.round_keys import Round, arrive_at_exit, exit_keys
from dsl.rendezvous.settings import number
from dsl.rendezvous.store_messages import NodeFailed, NodeLeft, StateChanged
from dsl.rendezvous.torch_side import (
    Interrupted,
    RendezvousHooks,
    Site,
    change_state,
    host_and_port,
    node_of,
    open_site,
    stop_heartbeats,
)
from dsl.rendezvous.view import Node, NodeClocks, View, end_last_call, take_out
from dsl.rendezvous.watch import Watcher, describe_clock, wall_s

ASK_OF_MANY_S = 1.0
"""How often we ask the store of a job with many nodes while they meet, as torch does."""
MANY = 64
FIRST_WORD_S = 5.0
"""After this time the user hears what we wait for."""
GRACE_OF_CLOCKS_S = 3.0
"""NodeClocks that differ are judged after this time, so that other nodes can come and be heard."""
EXIT_BARRIER_S = 300.0
"""How long we wait for nodes whose workers have not ended, as torch's agents do."""
ACKNOWLEDGE_S = 2.0
"""How long the host of the store stays for nodes that have not yet read that the job is over."""
STRANGERS_S = 1.0
"""How long it stays for nodes under torchrun, which close the rendezvous once more."""
SPARES_S = 5.0
"""How long it stays for waiting spares, which go when they have seen that the job is over."""


def open_participant(
    order: Open, say: Callable[[Answer], None], is_wanted: Callable[[], bool]
) -> Participant | None:
    """Make this node's part in the rendezvous; if that fails, say `MeetingRefused` and return None.

    ``is_wanted``: whether to go on with the present order.
    """
    begin_s = time.monotonic()

    def tell_of_connecting() -> None:
        time_s = number(order.point.settings, "read_timeout")
        say(Notice("info", connection_text(order, f"trying for up to {time_s} s")))

    said = threading.Timer(FIRST_WORD_S, tell_of_connecting)
    said.daemon = True
    said.start()
    try:
        site = open_site(order)
        watcher = Watcher(site, node_of(site.handler, order.point.local_address), say)
        watcher.start()
        meetings = Meetings(site, watcher, say)
        meetings.introduce()
    except Exception as error:  # noqa: BLE001 - torch has no common class for its errors
        say(refusal(error, order, time.monotonic() - begin_s))
        return None
    finally:
        said.cancel()
    host, port = host_and_port(order.point)
    if site.is_host and port == 0:
        site.place = with_port(host, site.store.port)
        if order.max_nodes > 1:
            say(Notice("info", f"the store of the rendezvous listens on port {site.store.port}"))
    return Participant(site, watcher, meetings, say, is_wanted)


class Participant(RendezvousHooks):
    """One node of the job. One thread calls all methods but the hooks."""

    def __init__(
        self,
        site: Site,
        watcher: Watcher,
        meetings: Meetings,
        say: Callable[[Answer], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        """``is_wanted``: whether to go on with the present order."""
        self._say = say
        self._is_wanted = is_wanted
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._site = site
        self._watcher = watcher
        self._meetings = meetings
        self._node = watcher.node
        self._view = View()
        self._was_spare = False
        self._begin_s = 0.0
        self._said = ""
        self._clocks: NodeClocks | None = None
        self._expected: tuple[Node, ...] = ()
        site.hooks = self

    @property
    def is_host(self) -> bool:
        """Whether other nodes need this process because it hosts the store."""
        return self._site.is_host

    # What is done while torch works.

    def saw(self, view: View) -> None:
        """See `RendezvousHooks`."""
        clocks = self._clocks
        if clocks is not None:
            # torch's own thread may be the only thread that sees a node whose clock is far off: torch drops
            # such a node at once.
            with self._lock:
                clocks.look(view, self._node, wall_s())
        if threading.get_ident() == self._thread:
            self._view = view
            self._was_spare |= is_spare(view, self._node, self._site.order.max_nodes)

    def check(self) -> None:
        """See `RendezvousHooks`."""
        if threading.get_ident() == self._thread and not self._is_wanted():
            raise Interrupted

    def pause(self, seconds: float) -> None:
        """See `RendezvousHooks`."""
        if threading.get_ident() != self._thread:
            time.sleep(seconds)
            return
        self.check()
        self._judge(GRACE_OF_CLOCKS_S)
        self._tell_of_waiting()
        self._begin_if_all_are_there()
        is_big = self._site.order.max_nodes > MANY
        self._watcher.pause(min(seconds, ASK_OF_MANY_S if is_big else ASK_S))

    def _judge(self, grace_s: float = 0.0) -> None:
        clocks = self._clocks
        if clocks is None or not clocks.is_ours_wrong or time.monotonic() - self._begin_s < grace_s:
            return
        node, offset_s = clocks.far()[0]
        raise Refusal("clock", describe_clock(node[0], offset_s))

    def _begin_if_all_are_there(self) -> None:
        """End torch's last call if all known nodes have come: those of the last round, and those that waited.

        The last call is meant for unknown nodes, in the first round.
        """
        view, nodes, order = self._view, self._view.participants, self._site.order
        if view.is_complete or view.is_closed or self._node not in nodes or not self._expected:
            return
        if not order.point.least_nodes <= len(nodes) < order.max_nodes:
            return
        if not any(node not in nodes and self._watcher.may_come(node) for node in self._expected):
            self._expected = ()
            change_state(self._site.backend, end_last_call)
            self._watcher.wake.set()

    def _tell_of_waiting(self) -> None:
        if time.monotonic() - self._begin_s < FIRST_WORD_S:
            return
        text = describe_waiting(self._view, self._node, self._site.order, self._site.place)
        if text and text != self._said:
            self._said = text
            self._say(Notice("info", text))

    # Orders.

    def meet(self, order: Meet) -> None:
        """Join the next round, and answer `NodesMet` or `MeetingRefused`."""
        site, watcher = self._site, self._watcher
        settings = site.order.point.settings
        self._expected = watcher.expected()
        watcher.watch(None)
        watcher.is_finishing = False
        self._begin_s, self._said, self._was_spare = time.monotonic(), "", False
        self._clocks = NodeClocks(watcher.most_offset_s)
        end_s = self._begin_s + number(settings, "join_timeout")
        try:
            while True:
                try:
                    self._say(self._meetings.meet(order, lambda: self._view, self._judge))
                    break
                except RoundBroken:
                    if time.monotonic() > end_s:
                        text = f"nodes keep leaving the rendezvous at {site.place}: look at their output"
                        raise Refusal("timeout", text) from None
        except Interrupted:
            return
        except Exception as error:  # noqa: BLE001 - torch has no common class for its errors
            tried_s = time.monotonic() - self._begin_s
            refused = refusal(error, site.order, tried_s, self._view, site.place, was_spare=self._was_spare)
            if self._was_spare and watcher.is_over and refused.kind == "connection":
                refused = unneeded(site.order)  # the store's host ended before torch read the end
            if refused.is_unneeded and not watcher.is_over:
                watcher.hear_all()
            self._leave()
            self._say(refused)
        finally:
            self._clocks = None

    def fail(self, failure: PeerFailure) -> None:
        """Tell the others that a worker failed. If the job is over, close the rendezvous."""
        site, watcher = self._site, self._watcher
        with contextlib.suppress(Exception):  # the store is gone, which the watcher reports
            if site.news is not None:
                site.news.post(NodeFailed(watcher.node, max(self._meetings.number, 0), failure))
        if not failure.is_final:
            return
        self._close()
        if not site.is_host:
            return
        ours = sum(facts is not None for facts in self._meetings.facts) - 1
        end_s = time.monotonic() + ACKNOWLEDGE_S
        while time.monotonic() < end_s:
            others_wait = watcher.view.spares or watcher.view.waiting
            if not others_wait and watcher.acknowledged() >= min(ours, len(watcher.others())):
                break
            watcher.pause(ASK_S / 4)

    def _close(self) -> None:
        site = self._site
        with contextlib.suppress(Exception):  # the store is gone: no node can meet there any more
            if not site.is_dynamic:
                site.handler.set_closed()
            elif change_state(site.backend, _set_closed) and site.news is not None:
                site.news.post(StateChanged())

    def finish(self) -> None:
        """Wait until the workers of all nodes have ended, and say so."""
        watcher, round_ = self._watcher, self._meetings.round
        if round_ is not None and not watcher.is_lost:
            has_ended = False
            try:
                has_ended = self._wait_for_exit(round_)
            except Interrupted:
                return
            except Exception:  # noqa: BLE001 - the store is gone, and with it the way to wait
                watcher.is_lost = True
            if has_ended:
                self._close()
            elif watcher.is_lost:
                self._say(Notice("warning", _ENDED.format(place=self._site.place)))
        self._say(NodesFinished())

    def _wait_for_exit(self, round_: Round) -> bool:
        """Whether the workers of all nodes have ended. Then the host of the store may go at once."""
        site, watcher = self._site, self._watcher
        watcher.is_finishing = True
        is_last = arrive_at_exit(round_)
        if site.news is not None:
            with contextlib.suppress(Exception):  # the store's host has gone already
                site.news.post(StateChanged())
        if is_last:
            return True
        end_s = time.monotonic() + EXIT_BARRIER_S
        while not self._meetings.have(round_, exit_keys(round_)):
            self.check()
            is_alone = site.is_dynamic and watcher.is_alone
            if watcher.is_lost or watcher.is_over or watcher.view.is_closed or is_alone:
                return False
            if time.monotonic() > end_s:
                return False
        return True

    def leave(self) -> None:
        """Take this node out of the rendezvous. The job goes on."""
        self._watcher.watch(None)
        self._leave()

    def _leave(self) -> None:
        site = self._site
        with contextlib.suppress(Exception):  # the store is gone: the others see that this node is silent
            stop_heartbeats(site.handler)
            if site.is_dynamic:
                least = site.order.point.least_nodes
                change_state(site.backend, lambda state: take_out(state, self._node, least))
            if site.news is not None:
                site.news.post(NodeLeft(self._watcher.node))

    def host_on(self, is_wanted: Callable[[], bool], *, has_finished: bool) -> None:
        """Keep the store for the other nodes until they have ended."""
        watcher = self._watcher
        if not self.is_host:
            return
        begin_s = time.monotonic()
        while has_finished and is_wanted():
            passed_s = time.monotonic() - begin_s
            strangers_may_ask = self._meetings.has_strangers and passed_s < STRANGERS_S
            others_wait = watcher.view.spares or watcher.view.waiting
            if not (strangers_may_ask or (others_wait and passed_s < SPARES_S)):
                break
            watcher.pause(ASK_S)
        is_said = has_finished
        while not (watcher.is_alone or watcher.view.is_closed or watcher.is_over) and is_wanted():
            if not is_said and watcher.others():
                is_said = True
                self._say(Notice("warning", _HOSTS.format(place=self._site.place)))
            watcher.pause(1.0)

    def look_after_store(self) -> None:
        """Report once that the store has not answered for long."""
        self._watcher.ask_if_silent()


_ENDED = (
    "the store of the rendezvous at {place} has ended before all nodes have said that their workers ended "
    "well: see to the node that hosts it"
)

_HOSTS = (
    "this node hosts the store of the rendezvous at {place}: it has left the job, and keeps the store until "
    "the other nodes have ended; without it no node could join, and none start again"
)


def _set_closed(state: Any) -> bool:
    was_closed = bool(state.closed)
    state.closed = True
    return not was_closed
