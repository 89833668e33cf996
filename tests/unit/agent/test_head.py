"""The head: what it does with the words of agents and of programs. Its hub only takes notes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.conducting import a_job, reached
from tests.support.events import a_plan, a_report, an_attempt, an_exit, end, exited

from dsl import Ended, Output, SignalReceived
from dsl.agent.head import Head
from dsl.agent.starters import Starters
from dsl.conductor.conductor import Conductor
from dsl.conductor.orders import Show
from dsl.control.messages import Assignment, Bye, Checked, Hello, Lost, Over, Said, Stop
from dsl.launchers.base import Start
from dsl.model.job import Meeting, Notice
from dsl.model.outcome import Outcome
from dsl.plan.remote import Remote
from dsl.report.verdict import verdict

STDOUT, STDERR = 1, 2
PDSH = Start(argv=("pdsh",), labels=(("n0", 0), ("n1", 1)))
COME_AND_GO = [Start(argv=("ssh", f"n{rank}"), node_rank=rank) for rank in range(2)]
MADE: list[Stage] = []


class Stage:
    """A head of two hosts."""

    def __init__(self, *starts: Start) -> None:
        MADE.append(self)
        is_elastic = len(starts) > 1
        job = a_job(1, 1, is_elastic=is_elastic)
        self.hub = Mock(read=Mock(return_value=[]), has_lost_output=False)
        remote = Remote("ssh", least_nodes=1, most_nodes=2, wait_s=600.0) if is_elastic else Remote("pdsh")
        self.conductor = Conductor(reached(job, remote), time.monotonic())
        self.starters = Starters(job, starts, (0, 1), {}, at_once=64)
        self.recorder = Mock()
        self.head = Head(self.conductor, self.starters, self.hub, self.recorder)
        plan = self.starters.plan(0)
        assert plan is not None
        self.supervisor = Mock(add=Mock(return_value=2))
        self.head.enter(self.supervisor)

    def says(self, data: bytes, stream: int = STDERR, program: int = 0) -> None:
        """A program writes; nothing: that is the end of its output."""
        event: Any = Mock(spec=Output, worker=program, stream=stream, data=data)
        self.head.hear(event)

    def fails(self, program: int) -> None:
        """A program ends, and its output."""
        self.says(b"", program=program)
        self.head.hear(exited(an_exit(program, code=255)))

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

    def begin(self) -> list[Mock]:
        """Both agents come; their links."""
        return [self.come(place) for place in range(2)]

    @property
    def verdict(self) -> list[str]:
        judgement = self.conductor.judgement
        lines = [] if judgement is None else verdict(judgement)
        return [*lines, *[notice.line for notice in self.conductor.notices]]


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    """Close what a test has opened."""
    yield
    while MADE:
        MADE.pop().head.stay()


def sent(link: Mock) -> list[type]:
    """The kinds of messages that went to an agent."""
    return [type(call[0][0]) for call in link.send.call_args_list]


def test_when_the_program_that_reaches_all_hosts_dies_their_agents_are_conducted_to_their_end() -> None:
    pdsh = Stage(PDSH)
    links = pdsh.begin()
    bell = os.eventfd(1)
    pdsh.hub.fileno.return_value = bell
    pdsh.head.enter(Mock(fileno=Mock(return_value=bell), wait=Mock(return_value=[])))
    reports = [(link, a_report(0, 1, victims=(link.place,))) for link in links]
    pdsh.hub.read.side_effect = [reports, [(link, Bye()) for link in links], []]
    pdsh.says(b"")
    pdsh.head.hear(exited(an_exit(0, signal=9)))
    pdsh.head.hear(Mock(spec=Ended))
    os.close(bell)
    for link in links:
        assert sent(link) == [Assignment, Meeting, Stop, Over]
    assert pdsh.verdict == ["pdsh was killed by SIGKILL (signal 9)", "stopped by dsl: ranks 0-1"]


def test_an_end_of_output_that_nobody_reads_is_waited_for_until_a_signal() -> None:
    pdsh = Stage(PDSH)
    links = pdsh.begin()
    pdsh.hears(*[(link, message) for link in links for message in (a_report(0, 0), Bye())])
    pdsh.hub.drain.return_value = False
    signal: Any = Mock(spec=SignalReceived, signum=15, action="stop")
    pdsh.head.enter(Mock(wait=Mock(side_effect=[[], [], [signal]])))
    pdsh.head.hear(exited(an_exit(0, code=0)))
    pdsh.head.hear(Mock(spec=Ended))
    assert pdsh.conductor.code == 143
    assert pdsh.hub.drain.call_count >= 3


def test_a_head_without_its_guard_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    pdsh = Stage(PDSH)
    links = pdsh.begin()
    pdsh.hears(*[(link, message) for link in links for message in (a_report(0, 0), Bye())])
    pdsh.hub.drain.return_value = False
    pdsh.head.enter(Mock(wait=Mock(return_value=[])))
    another = os.getppid() + 1
    monkeypatch.setattr(os, "getppid", lambda: another)
    pdsh.hub.drain.reset_mock()
    pdsh.head.hear(Mock(spec=Ended))
    assert pdsh.hub.drain.call_count == 1


def test_agents_are_waited_for_while_nobody_reads_their_output(monkeypatch: pytest.MonkeyPatch) -> None:
    pdsh = Stage(PDSH)
    pdsh.hears(*[(link, a_report(0, 0)) for link in pdsh.begin()])
    later_s = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    pdsh.hub.drain.return_value = False
    pdsh.head.read()
    assert not pdsh.conductor.roster.is_done
    later_s += 60
    pdsh.hub.drain.return_value = True
    pdsh.head.read()
    assert pdsh.conductor.roster.is_done


def test_a_key_opens_the_door_and_a_second_one_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    pdsh = Stage(PDSH)
    for key in ("ab", *["cd"] * 5):
        pdsh.says(f"n1: dsl-agent 1 {key * 32}\n".encode(), STDOUT)
    pdsh.hub.expect.assert_called_once_with(1, b"\xab" * 32)
    assert capfd.readouterr().err == "dsl: warning: host n1 has told a second key: it was refused\n"


def test_the_place_of_an_agent_is_taken_by_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    pdsh = Stage(PDSH)
    first, other = pdsh.begin()
    second, third = Mock(place=0, clock=None), Mock(place=9, clock=None)
    second.name = third.name = "10.0.0.9:1"
    pdsh.hears((second, Hello("1", 0, "h", 1)), (second, a_report(0, 0)), (third, Hello("1", 9, "h", 1)))
    second.close.assert_called_once_with()
    third.close.assert_called_once_with()
    second.send.assert_not_called()
    pdsh.hears((first, a_report(0, 3)), (other, a_report(0, 0)))
    assert pdsh.conductor.code == 3
    assert capfd.readouterr().err.count("refused") == 1


def test_what_an_agent_says_does_nothing_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    pdsh = Stage(PDSH)
    first, second = pdsh.begin()
    text = "\x1b]0;mine\x07\x1b[2Jhost n0:\r\nok\x9b1m"
    pdsh.hears(
        (first, Said(Notice("info", text))),
        (first, a_report(0, 3, rank=0, host=text)),
        (second, a_report(0, 143)),
    )
    pdsh.head.hear(Outcome(3, an_attempt(a_plan(1), [], end())))
    said = capfd.readouterr().err
    assert said.count("host n0:  ok") >= 2
    assert said.replace("\n", "").isprintable()


# Hosts that come and go.


def test_a_host_that_cannot_be_reached_is_named_and_reached_again(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = Stage(*COME_AND_GO)
    elastic.come(0)
    elastic.says(b"ssh: connect to host n1 port 22: No route to host\n", program=1)
    elastic.fails(1)
    said = capfd.readouterr().err
    assert "host n1: cannot be reached: ssh: connect to host n1 port 22: No route to host" in said
    later_s = time.monotonic() + 2
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    elastic.head.read()
    assert elastic.supervisor.add.call_args[0][0].argv == ("ssh", "n1")


def test_an_agent_of_an_elastic_job_is_replaced_by_none_while_it_is_there() -> None:
    elastic = Stage(*COME_AND_GO)
    elastic.come(0)
    old = elastic.come(1)
    elastic.come(1).close.assert_called_once_with()
    elastic.hears((old, Lost("has closed the connection")))
    new = elastic.come(1)
    new.close.assert_not_called()
    elastic.hears((old, a_report(0, 9)))
    assert elastic.conductor.code is None
    assert sent(new) == [Assignment]


@pytest.mark.parametrize("is_lost", [True, False])
def test_output_that_an_agent_has_lost_makes_the_job_fail(is_lost: bool) -> None:  # noqa: FBT001  both cases
    pdsh = Stage(PDSH)
    first, second = pdsh.begin()
    pdsh.hears((first, a_report(0, 0)), (second, a_report(0, 0)))
    pdsh.hears((first, Bye(has_lost_output=is_lost)), (second, Bye()))
    over = pdsh.head.decide(None, an_attempt(a_plan(1), [], end()))
    assert (over.kind, over.code) == ("end", int(is_lost))


def test_at_the_end_programs_whose_agents_have_said_goodbye_are_left_to_end() -> None:
    elastic = Stage(*COME_AND_GO)
    link = elastic.come(0)
    elastic.fails(1)
    assert sent(link)[-1] is Meeting
    elastic.hears((link, a_report(0, 0)), (link, Bye()))
    assert elastic.conductor.roster.is_done
    elastic.supervisor.signal.assert_not_called()
    elastic.supervisor.stop.assert_not_called()
    elastic.head.hear(exited(an_exit(0)))
    elastic.supervisor.stop.assert_called_once()


def test_a_page_that_cannot_be_shown_changes_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As ``--doctor`` of a job on several hosts shows it."""
    stage = Stage(PDSH)
    link = stage.come(0)
    monkeypatch.setattr(stage.conductor, "hear", lambda *_: [Show("the page")])
    monkeypatch.setattr("sys.stdout", None)  # as Python has it where it was closed before the start
    stage.hears((link, Bye()))
    assert stage.conductor.code == 1
    assert capfd.readouterr().err == "dsl: error: stdout cannot be written: it is closed\n"


def test_a_host_that_leaves_is_recorded_and_not_the_end_of_the_job() -> None:
    stage = Stage(*COME_AND_GO)
    here, there = stage.begin()
    stage.hears((there, a_report(0, 143, stop_signal=15, victims=(1,))), (there, Bye()))
    stage.hears((here, a_report(0, 1, victims=(0,))))
    stage.hears((here, a_report(1, 0)), (here, Bye()))
    left = [call.kwargs["left"] for call in stage.recorder.membership.call_args_list if "left" in call.kwargs]
    assert left == [["host n1"]]
