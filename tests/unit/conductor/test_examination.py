"""The examination of hosts for `--doctor`: who is asked what, when it ends, and how."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.conducting import a_job

from dsl._record import replace
from dsl.conductor.examination import LATE_S, TRY_S, Examination
from dsl.conductor.orders import Dismiss, Send, Show
from dsl.conductor.terms import START_S, reached_terms
from dsl.control.messages import Assignment, Bye, Checked, Hello, Lost, Over, Refused, TryWays, WaysTried
from dsl.model.health import Health, Interface, LimitLook, Way
from dsl.plan.remote import Remote

COUNT = 3


def make() -> Examination:
    """The examination of three hosts."""
    job = a_job(*[2] * COUNT, address="", port=None)
    assignment = Assignment("1", job, 0, examines=True)
    return Examination(reached_terms(job, Remote("ssh", per_node=True), assignment), 0.0)


def checked(place: int, *problems: str) -> Checked:
    face = Interface("eth0", 1500, True, (f"10.0.0.{place}",))
    health = Health(
        workers=2,
        peers=("x",),
        name=f"n{place}",
        name_addresses=(f"10.0.0.{place}",),
        limits=LimitLook(cpus=8),
    )
    health = replace(health, interfaces=(face,), port=40_000 + place, token=f"{place}" * 16)
    return Checked(problems, (f"10.0.0.{place}",), machine=str(place), health=health)


def shown(orders: Sequence[object]) -> str:
    """The page, once it is shown."""
    return "".join(one.text for one in orders if isinstance(one, Show))


def sent(orders: Sequence[object], kind: type) -> list[int]:
    """The places to which a message of this kind goes."""
    return [one.place for one in orders if isinstance(one, Send) and isinstance(one.message, kind)]


def greet(one: Examination) -> None:
    for place in range(COUNT):
        (order,) = one.hear(place, Hello("1", place, f"m{place}", 9), 1.0)
        assert isinstance(order, Send)
        assert isinstance(order.message, Assignment)
        assert (order.message.node_rank, order.message.examines) == (place, True)


def test_all_hosts_look_then_all_try_the_ways_then_all_end() -> None:
    one = make()
    greet(one)
    assert [one.hear(place, checked(place), 2.0) for place in (0, 1)] == [[], []]
    orders = one.hear(2, checked(2), 2.0)
    assert sent(orders, TryWays) == [0, 1, 2]
    asked = orders[1]
    assert isinstance(asked, Send)
    assert isinstance(asked.message, TryWays)
    assert [(way.place, way.addresses, way.port) for way in asked.message.targets] == [
        (0, ("10.0.0.0",), 40_000),
        (2, ("10.0.0.2",), 40_002),
    ]
    for place in (0, 1):
        assert one.hear(place, WaysTried(()), 3.0) == []
    orders = one.hear(2, WaysTried((Way(0, "10.0.0.0", "silent"),)), 3.0)
    assert "n2: from here n0 at 10.0.0.0 does not answer" in shown(orders)
    assert (sent(orders, Over), one.code) == ([0, 1, 2], 2)
    assert [one.hear(place, Bye(), 3.0) for place in (0, 1)] == [[], []]
    assert one.hear(2, Bye(), 3.0) == [Dismiss(Examination.farewell_s)]
    assert one.roster.is_done


def test_hosts_that_fail_in_any_way_are_findings_and_the_others_are_examined() -> None:
    one = make()
    one.hear(0, Hello("2", 0, "m0", 9), 1.0)
    one.hear(1, Hello("1", 1, "m1", 9), 1.0)
    one.hear(1, Refused("it cannot"), 1.0)
    orders = one.starter_ended((2,), "cannot be reached", 1.0)
    text = shown(orders)
    assert "n0: it has dsl 2, this host has 1: install the same version [launch]" in text
    assert "n1: it cannot [launch]" in text
    assert "n2: cannot be reached [launch]" in text
    assert one.code == 2


def test_silent_hosts_do_not_hold_up_the_others_for_long() -> None:
    one = make()
    assert one.deadline_s == START_S
    greet(one)
    one.hear(0, checked(0), 2.0)
    one.hear(1, checked(1), 3.0)
    assert one.deadline_s == 2.0 + LATE_S
    orders = one.wait_is_over(2.0 + LATE_S)
    assert sent(orders, TryWays) == [0, 1]
    assert one.deadline_s == 2.0 + LATE_S + TRY_S
    one.hear(0, WaysTried(()), 30.0)
    orders = one.wait_is_over(40.0)
    assert "n1: has not answered any more" in shown(orders)
    assert "n2: has not answered in time" in shown(orders)


def test_an_interrupt_ends_it_without_a_page() -> None:
    one = make()
    greet(one)
    orders = one.signal(2, "stop", 2.0)
    assert (shown(orders), sent(orders, Over), one.code) == ("", [0, 1, 2], 130)
    assert one.signal(2, "stop", 2.0) == []


def test_a_host_alone_tries_no_way() -> None:
    one = make()
    greet(one)
    for place in (1, 2):
        one.hear(place, Lost("is gone"), 2.0)
    orders = one.hear(0, checked(0), 2.0)
    assert sent(orders, TryWays) == []
    assert "was lost: it is gone" in shown(orders)


MESSAGES = st.sampled_from(
    (
        Hello("1", 0, "m", 1),
        Checked(),
        checked(0),
        checked(1),
        WaysTried(()),
        Bye(),
        Lost("is gone"),
        Refused("no"),
    )
)
EVENTS = st.lists(st.tuples(st.integers(0, COUNT - 1), MESSAGES, st.floats(0, 30)), max_size=30)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_whatever_members_say_it_ends_in_time_with_one_page(events: list[tuple[int, object, float]]) -> None:
    one, now_s, pages, dismissals = make(), 0.0, 0, 0
    orders: list[object] = []
    for place, said, wait_s in events:
        now_s += wait_s
        message = replace(said, place=place) if isinstance(said, Hello) else said
        orders += one.wait_is_over(now_s)
        if isinstance(message, Hello) or one.roster.has_greeted(place):
            orders += one.hear(place, message, now_s)
    while one.deadline_s is not None:
        now_s = max(now_s, one.deadline_s)
        orders += one.wait_is_over(now_s)
    pages, dismissals = (
        len([o for o in orders if isinstance(o, Show)]),
        orders.count(Dismiss(Examination.farewell_s)),
    )
    assert (pages, dismissals, one.roster.is_done) == (1, 1, True)
    assert one.code in (0, 1, 2)
    assert now_s <= sum(wait_s for *_, wait_s in events) + START_S + TRY_S + Examination.farewell_s
