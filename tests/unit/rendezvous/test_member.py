"""What a member of the rendezvous makes of the states that torch's threads see."""

from __future__ import annotations

import threading
import time

import pytest

from dsl.rendezvous.member import Member
from dsl.rendezvous.refusals import Refusal
from dsl.rendezvous.view import Clocks, View

OURS, OTHER = ("a", 1, 0), ("b", 2, 0)


def test_a_clock_that_only_another_thread_has_seen_is_judged() -> None:
    """Torch drops such a node in the thread of its heartbeats: the thread that meets may never see it."""
    member = Member(lambda _answer: None, lambda: True)
    member._node, member._clocks = OURS, Clocks(5.0)
    now_s = time.time()
    member.saw(View(heartbeats=((OURS, now_s),)))
    both = View(heartbeats=((OURS, now_s), (OTHER, now_s - 3600)))
    thread = threading.Thread(target=member.saw, args=[both])
    thread.start()
    thread.join()
    member.saw(View(heartbeats=((OURS, now_s),)))
    with pytest.raises(Refusal, match="the clock of b is 3600 s behind this one's"):
        member._judge()
