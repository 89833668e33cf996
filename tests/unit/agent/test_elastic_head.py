"""The head of an elastic job: what it makes of what its one program says. The network is of the test."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from tests.support.events import a_report

from dsl import Output
from dsl.agent.elastic_conductor import ElasticConductor
from dsl.agent.elastic_head import RETRY_S, ElasticHead
from dsl.agent.gathering import Reach
from dsl.control.messages import Assignment, Bye, Checked, Hello, Lost
from dsl.launchers.base import Start
from dsl.model.job import Host, Job, Meeting, MeetingPoint, Program
from dsl.model.remote import Remote
from dsl.plan.flavours import ELASTIC

if TYPE_CHECKING:
    from collections.abc import Iterator

STDOUT = 1


class Stage:
    """A head of two hosts with a hub that only takes notes."""

    def __init__(self, launcher: Any = "ssh") -> None:
        job = Job(
            flavour=ELASTIC,
            program=Program("script", "train.py"),
            meeting=MeetingPoint("static", "10.0.0.1", 29501),
            hosts=(Host("n0", (0,)), Host("n1", (0,))),
            node_count=2,
        )
        remote = Remote(launcher, least_nodes=1, most_nodes=2, wait_s=600.0)
        self.hub = Mock(read=Mock(return_value=[]))
        self.conductor = ElasticConductor(job, remote, Assignment("1", job, 0), time.monotonic())
        start = Start(argv=("python", "-m", "dsl.fanout"), env=(("KEY", "k"),), unset=("GONE",))
        self.head = ElasticHead(job, self.conductor, [start], self.hub, {"GONE": "1", "HOME": "/"})
        self.head.launcher = launcher
        self.plan = self.head.plan(0)
        assert self.plan is not None
        self.orders_fd = self.head._programs[0].fds[0]

    def says(self, **answer: Any) -> None:
        """Its program answers."""
        event: Any = Mock(spec=Output, worker=0, stream=STDOUT, data=json.dumps(answer).encode() + b"\n")
        self.head.hear(event)

    def hears(self, *said: tuple[Mock, object]) -> None:
        """Agents speak."""
        self.hub.read.return_value = list(said)
        self.head.read()
        self.hub.read.return_value = []

    def come(self, place: int) -> Mock:
        """An agent comes, and nothing stands in the way; its link."""
        link = Mock(place=place, clock=None)
        self.hears((link, Hello("1", place, "h", 1)), (link, Checked(addresses=("10.0.0.1",))))
        return link

    def orders(self) -> list[dict[str, Any]]:
        """What the program has been told."""
        os.set_blocking(self.orders_fd, False)
        try:
            return [json.loads(line) for line in os.read(self.orders_fd, 4096).splitlines()]
        except BlockingIOError:
            return []


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.head._orders.close()
    os.close(made.orders_fd)


def test_one_program_keeps_those_that_reach_the_hosts(stage: Stage) -> None:
    assert stage.plan is not None
    (worker,) = stage.plan.workers
    assert (worker.stdin_fd, worker.stdout.pipe, dict(worker.env)) == (stage.orders_fd, True, {"KEY": "k"})
    assert dict(stage.plan.env) == {"HOME": "/"}
    assert stage.head.plan(1) is None


def test_the_key_that_an_agent_tells_by_ssh_lets_it_in(stage: Stage) -> None:
    stage.says(place=1, line=f"dsl-agent 1 {'ab' * 32}", stream=1)
    stage.hub.expect.assert_called_once_with(1, b"\xab" * 32)


def test_a_host_that_cannot_be_reached_is_named_and_reached_again(
    stage: Stage, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.come(0)
    stage.says(place=1, line="ssh: connect to host n1 port 22: No route to host", stream=2)
    stage.says(place=1, status=255)
    said = capfd.readouterr().err
    assert "host n1: cannot be reached: ssh: connect to host n1 port 22: No route to host" in said
    later_s = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    stage.head.read()
    assert stage.orders() == [{"reach": 1}]


def test_the_connection_of_an_agent_that_is_replaced_is_heard_no_more(stage: Stage) -> None:
    stage.come(0)
    old = stage.come(1)
    stage.hears((old, Lost("has closed the connection")))
    new = stage.come(1)
    stage.hears((old, a_report(0, 9)))
    assert stage.conductor.code is None
    assert [type(call[0][0]) for call in new.send.call_args_list] == [Assignment]


def test_at_the_end_programs_whose_agents_have_said_goodbye_are_left_to_end(stage: Stage) -> None:
    link = stage.come(0)
    stage.says(place=1, status=255)
    assert isinstance(link.send.call_args_list[-1][0][0], Meeting)
    stage.hears((link, a_report(0, 0)), (link, Bye(0)))
    assert stage.conductor.is_done
    assert stage.orders() == [{"end": [1]}]


def test_orders_that_are_taken_in_part_arrive_whole_and_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have to wait are few, however often they are given."""
    taken, room = bytearray(), 0

    def send(data: bytes) -> int:
        nonlocal room
        if not room:
            raise BlockingIOError
        count = min(room, len(data))
        taken.extend(data[:count])
        room -= count
        return count

    orders = stage.head._orders
    monkeypatch.setattr(stage.head, "_orders", Mock(send=send, close=orders.close))
    room = 5
    for _ in range(1000):
        stage.head._obey([Reach(0), Reach(1)])
    deadline_s = stage.head.deadline_s
    assert deadline_s is not None
    assert deadline_s <= time.monotonic() + RETRY_S
    for _ in range(20):
        room = 5
        stage.head.read()
    assert [json.loads(line) for line in taken.splitlines()] == [{"reach": 0}, {"reach": 1}, {"reach": 0}]


def test_what_is_not_an_answer_of_its_program_is_kept_as_a_word_of_it(stage: Stage) -> None:
    event: Any = Mock(spec=Output, worker=0, stream=2, data=b"Traceback\n[1, 2]\n")
    stage.head.hear(event)
    assert stage.head._programs[0].lines == ["Traceback", "[1, 2]"]


def test_a_host_tells_one_key_for_each_time_that_it_is_reached_and_none_of_another(stage: Stage) -> None:
    stage.says(place=1, line=f"dsl-agent 0 {'ab' * 32}", stream=1)
    stage.hub.expect.assert_not_called()
    stage.says(place=1, line=f"dsl-agent 1 {'ab' * 32}", stream=1)
    stage.says(place=1, line=f"dsl-agent 1 {'cd' * 32}", stream=1)
    stage.hub.expect.assert_called_once_with(1, b"\xab" * 32)
    stage.says(place=1, status=255)
    stage.says(place=1, line=f"dsl-agent 1 {'cd' * 32}", stream=1)
    assert stage.hub.expect.call_args[0] == (1, b"\xcd" * 32)


def test_a_long_line_of_a_host_is_heard_whole(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    stage.says(place=1, line="x" * 1000 + " ends here", stream=2)
    stage.says(place=1, status=1)
    assert "ends here (exit code 1)" in capfd.readouterr().err


@pytest.mark.parametrize(
    "said",
    [
        {"place": 9, "status": 1},
        {"place": True, "status": 1},
        {"place": "1", "line": "x"},
        {"place": 1, "status": "1"},
        {"place": 1, "line": [1]},
        {"place": 1.5},
    ],
)
def test_what_is_of_the_wrong_kind_is_no_word_of_its_program(stage: Stage, said: dict[str, Any]) -> None:
    stage.says(**said)
    stage.says(place=1, status=255)


def test_an_agent_of_an_elastic_job_is_replaced_by_none_while_it_is_there(stage: Stage) -> None:
    first = stage.come(1)
    second = Mock(place=1, clock=None)
    stage.hears((second, Hello("1", 1, "h", 1)))
    second.close.assert_called_once_with()
    stage.hears((first, Lost("has closed the connection")))
    third = stage.come(1)
    third.close.assert_not_called()
