"""What a member of the rendezvous makes of the states that torch's threads see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dsl.model.job import MeetingPoint, Notice
from dsl.model.nodes import NodesFinished
from dsl.rendezvous.delegate_messages import Meet, Open
from dsl.rendezvous.meeting import Meetings
from dsl.rendezvous.participant import Participant
from dsl.rendezvous.refusals import describe_waiting
from dsl.rendezvous.round_keys import Round
from dsl.rendezvous.torch_side import Site
from dsl.rendezvous.view import RoundNodes, View
from dsl.rendezvous.watch import Watcher


class Gone:
    """A store that ends while a node waits for the end of the others: after all have ended, or before."""

    def __init__(self, *, all_have_ended: bool) -> None:
        self._all_have_ended = all_have_ended
        self._is_gone = False

    def add(self, _key: str, _number: int) -> int:
        return 1

    def wait(self, _keys: list[str], _timeout: object) -> None:
        if self._is_gone or not self._all_have_ended:
            raise RuntimeError("the connection has ended")
        self._is_gone = True

    def check(self, _keys: list[str]) -> bool:
        raise RuntimeError("the connection has ended")


@pytest.mark.parametrize("all_have_ended", [True, False])
def test_only_a_store_that_ends_before_all_nodes_have_ended_well_is_missed(
    monkeypatch: pytest.MonkeyPatch, *, all_have_ended: bool
) -> None:
    """A torchrun that hosts it goes as soon as all have."""
    said: list[object] = []
    site = Site(OPEN)
    site.can_wait, site.handler = True, SimpleNamespace(set_closed=lambda: None)
    watcher = Watcher(site, OURS, said.append)
    watcher.watch(RoundNodes(0, (OURS, OTHER), ("a", "b")))
    monkeypatch.setattr("dsl.rendezvous.watch.SILENT_S", -1.0)
    monkeypatch.setattr(watcher, "pause", lambda _seconds: watcher.ask_if_silent())  # it has seen it, too
    meetings = Meetings(site, watcher, said.append)
    meetings.round = Round(Gone(all_have_ended=all_have_ended), 0, 2)
    Participant(site, watcher, meetings, said.append, lambda: True).finish()
    assert said[-1] == NodesFinished()
    warnings = [one.text for one in said if isinstance(one, Notice)]
    assert len(warnings) == (not all_have_ended)
    assert all("has ended before all nodes" in one for one in warnings)


OURS, OTHER = ("a", 1, 0), ("b", 2, 0)
OPEN = Open(MeetingPoint("dynamic", "", None, "custom", "h:1", least_nodes=2), "job", 2, "a")


@pytest.mark.parametrize(
    "least, count, said",
    [
        (2, 1, "waits for nodes: 1 of 2 are at h:1 with run id job"),
        (
            1,
            1,
            "1 of up to 3 nodes are at h:1 with run id job, which is enough: waits up to 7 s for more",
        ),
    ],
)
def test_a_node_says_whether_it_waits_for_nodes_that_the_job_needs(least: int, count: int, said: str) -> None:
    point = MeetingPoint("dynamic", "", None, "c10d", "h:1", (("last_call_timeout", "7"),), least_nodes=least)
    order = Open(point, "job", 3, "a")
    nodes = (OURS, OTHER)[:count]
    assert describe_waiting(View(participants=nodes), OURS, order, "h:1").startswith(said)
    assert describe_waiting(View(participants=nodes, is_complete=True), OURS, order, "h:1") == ""


class SeenElsewhere:
    """A meeting in which only the thread of torch's heartbeats sees a node whose clock is an hour behind."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def meet(self, _order: Meet, _view: object, judge: Callable[[], None]) -> None:
        now_s = time.time()
        self._site.hooks.saw(View(heartbeats=((OURS, now_s),)))
        both = View(heartbeats=((OURS, now_s), (OTHER, now_s - 3600)))
        thread = threading.Thread(target=self._site.hooks.saw, args=[both])
        thread.start()
        thread.join()
        self._site.hooks.saw(View(heartbeats=((OURS, now_s),)))
        judge()


def test_a_clock_that_only_another_thread_has_seen_is_judged() -> None:
    """Torch drops such a node in the thread of its heartbeats: the thread that meets may never see it."""
    said: list[Any] = []
    site = Site(OPEN)
    meetings: Any = SeenElsewhere(site)
    member = Participant(site, Watcher(site, OURS, said.append), meetings, said.append, lambda: True)
    member.meet(Meet(1, "default", 0, "start"))
    assert [(one.kind, "the clock of b is 3600 s behind this one's" in one.text) for one in said] == [
        ("clock", True)
    ]
