"""The meetings of nodes that have agreed beforehand: sizes, places and ports, attempt by attempt."""

from __future__ import annotations

import pytest
from tests.support.machine import FREE_PORT, make_facts
from tests.support.outcome import error_of

from dsl.errors import PortError
from dsl.model.job import Host, Job, MeetingPoint
from dsl.model.request import Program
from dsl.plan.node import Static, choose_port
from dsl.plan.worker import DEEPSPEED, TORCH

PROGRAM = Program("script", "t.py")
HOSTS = (Host("alpha", (0, 1, 2, 3)), Host("beta", (0, 1)))


def torch_job(port: int | None, nodes: int = 1) -> Job:
    return Job(TORCH, PROGRAM, MeetingPoint("static", "a", port), node_count=nodes, workers="2")


def test_named_hosts_say_how_many_workers_each_has() -> None:
    job = Job(DEEPSPEED, PROGRAM, MeetingPoint("static", "10.0.0.1", None), hosts=HOSTS, node_count=2)
    meeting = Static(job, 1, make_facts().ports).meet(0, 2)
    assert meeting.local_world_sizes == (4, 2)
    assert (meeting.world_size, meeting.node_count, meeting.local_world_size) == (6, 2, 2)
    assert (meeting.address, meeting.port, list(meeting.ranks)) == ("10.0.0.1", 29500, [4, 5])


def test_nodes_without_names_are_taken_to_be_alike() -> None:
    meeting = Static(torch_job(7, nodes=3), 2, make_facts().ports).meet(1, 4)
    assert meeting.local_world_sizes == (4, 4, 4)
    assert (meeting.attempt, list(meeting.ranks)) == (1, [8, 9, 10, 11])


@pytest.mark.parametrize(
    "asked, nodes, rank, taken, attempt, port",
    [
        (0, 1, 0, (), 0, FREE_PORT),
        (7, 1, 0, (), 0, 7),
        (7, 2, 0, (), 0, 7),
        # Rank 0 does not listen there.
        (7, 2, 1, (7,), 0, 7),
        (None, 2, 1, (29500,), 0, 29500),
        (None, 1, 0, (), 0, 29500),
        # The job has run there, and nobody else has to know where it goes.
        (7, 1, 0, (), 1, 7),
        (7, 1, 0, (7,), 1, FREE_PORT),
        (7, 2, 1, (7,), 1, 7),
    ],
)
def test_the_port_of_an_attempt(
    asked: int | None, nodes: int, rank: int, taken: tuple[int, ...], attempt: int, port: int
) -> None:
    rendezvous = Static(torch_job(asked, nodes), rank, make_facts(taken=taken).ports)
    assert rendezvous.meet(attempt, 2).port == port


@pytest.mark.parametrize("nodes, attempt", [(1, 0), (2, 0), (2, 1)])
def test_a_port_that_was_asked_for_and_is_taken_is_refused_with_its_holder(nodes: int, attempt: int) -> None:
    rendezvous = Static(torch_job(7, nodes), 0, make_facts(taken=(7,)).ports)
    message = error_of(PortError, lambda: rendezvous.meet(attempt, 2))
    assert "master port 7 is taken by pid 9 (python old.py)" in message


def test_a_port_that_stands_in_for_the_usual_one_is_said() -> None:
    meeting = Static(torch_job(None), 0, make_facts(taken=(29500,)).ports).meet(0, 1)
    assert meeting.port == FREE_PORT
    assert [notice.text for notice in meeting.notices] == [f"master port 29500 is taken, using {FREE_PORT}"]


@pytest.mark.parametrize(
    "asked, shared, message",
    [
        (
            29500,
            False,
            "master port 29500 is taken by pid 9 (python old.py); choose another, or 0 for any free one",
        ),
        (
            None,
            True,
            "master port 29500 is taken by pid 9 (python old.py); choose another, the same on every node",
        ),
        (0, True, "master port 0: a job on several nodes needs the same port on each"),
        (-2, False, "master port -2 is none, expected 1 to 65535"),
        (65536, False, "master port 65536 is none"),
    ],
)
def test_the_port_that_is_refused(asked: int | None, *, shared: bool, message: str) -> None:
    with pytest.raises(PortError) as caught:
        choose_port(asked, shared=shared, ports=make_facts(taken=(29500,)).ports)
    assert str(caught.value).startswith(message)
