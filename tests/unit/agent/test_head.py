"""The head: what it makes of the programs that reach the hosts. The network is of the test."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
from tests.support.events import a_report, an_exit, exited

from dsl import Ended, Output, SignalReceived
from dsl.agent import head as head_module
from dsl.agent.conductor import Conductor
from dsl.agent.head import Head
from dsl.control.messages import Assignment, Bye, Checked, Hello, Over, Said, Stop
from dsl.launchers.base import Start
from dsl.model.job import Host, Job, Meeting, MeetingPoint, Notice, Program
from dsl.model.remote import Remote
from dsl.plan.flavours import DEEPSPEED

if TYPE_CHECKING:
    from collections.abc import Iterator

STDERR = 2
STDOUT = 1


class Stage:
    """A head of two hosts with a hub that only takes notes."""

    def __init__(self, *, speaks: bool, launcher: Any = "pdsh") -> None:
        launcher = "ssh" if speaks else launcher
        hosts = (Host("n0", (0,)), Host("n1", (0,)))
        job = Job(
            flavour=DEEPSPEED,
            program=Program("script", "train.py"),
            meeting=MeetingPoint("static", "10.0.0.1", 29501),
            hosts=hosts,
            node_count=2,
        )
        starts = [
            Start(
                argv=(launcher,),
                node_rank=rank if speaks else None,
                speaks=speaks,
                labels=(("n0", 0), ("n1", 1)) if launcher == "pdsh" else (),
            )
            for rank in range(2 if speaks else 1)
        ]
        self.hub = Mock(read=Mock(return_value=[]))
        self.hub.add.side_effect = lambda *_: Mock()
        self.conductor = Conductor(job, Remote(launcher), Assignment("1", job, 0), 0.0)
        self.head = Head(job, self.conductor, starts, self.hub, {})

    def says(self, program: int, data: bytes, stream: int = STDERR) -> None:
        """A program writes to stderr; nothing: that is its end."""
        event: Any = Mock(spec=Output, worker=program, stream=stream, data=data)
        self.head.hear(event)

    def begin(self) -> list[Mock]:
        """Both agents come, and nothing stands in the way; returns their links."""
        links = [Mock(place=place, clock=None) for place in range(2)]
        said = [(link, Hello("1", link.place, "h", 1)) for link in links]
        self.hub.read.return_value = said + [(link, Checked()) for link in links]
        self.head.read()
        self.hub.read.return_value = []
        return links

    @property
    def verdict(self) -> list[str]:
        return [notice.line for notice in self.conductor.verdict]


@pytest.fixture
def ssh() -> Iterator[Stage]:
    stage = Stage(speaks=True)
    yield stage
    for program in stage.head._programs:
        for fd in program.fds:
            os.close(fd)


def test_what_a_program_writes_last_is_waited_for(ssh: Stage) -> None:
    for program in range(2):
        ssh.head.hear(exited(an_exit(program, code=255)))
    assert ssh.verdict == []
    for program in range(2):
        ssh.says(program, b"ssh: connection refused\n")
        ssh.says(program, b"")
    assert [line.partition(", check")[0] for line in ssh.verdict] == [
        "error: host n0: cannot be reached: ssh: connection refused",
        "error: host n1: cannot be reached: ssh: connection refused",
    ]


def test_a_program_whose_stderr_somebody_else_holds_is_not_waited_for_long(
    ssh: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_module, "LAST_WORDS_S", 0.0)
    for program in range(2):
        ssh.says(program, b"ssh: no route to host\n")
        ssh.head.hear(exited(an_exit(program, code=255)))
    assert ssh.head.deadline_s is not None
    ssh.head.read()
    assert len(ssh.verdict) == 2
    assert "no route to host" in ssh.verdict[0]


def test_when_the_program_that_reaches_all_hosts_dies_their_agents_are_conducted_to_their_end() -> None:
    stage = Stage(speaks=False)
    links = stage.begin()
    bell = os.eventfd(1)
    stage.hub.fileno.return_value = bell
    stage.head._supervisor = Mock(fileno=Mock(return_value=bell), wait=Mock(return_value=[]))
    reports = [(link, a_report(0, 1, victims=(link.place,))) for link in links]
    stage.hub.read.side_effect = [reports, [(link, Bye(1)) for link in links]]
    stage.says(0, b"")
    stage.head.hear(exited(an_exit(0, signal=9)))
    stage.head.hear(Mock(spec=Ended))
    os.close(bell)
    for link in links:
        sent = [call[0][0] for call in link.send.call_args_list]
        assert [type(message) for message in sent] == [Assignment, Meeting, Stop, Over]
    assert stage.verdict == ["pdsh was killed by SIGKILL (signal 9)", "stopped by dsl: ranks 0-1"]


def test_an_end_of_output_that_nobody_reads_is_waited_for_until_a_signal() -> None:
    stage = Stage(speaks=False)
    links = stage.begin()
    stage.hub.read.return_value = [(link, message) for link in links for message in (a_report(0, 0), Bye(0))]
    stage.head.read()
    stage.hub.drain.return_value = False
    signal: Any = Mock(spec=SignalReceived, signum=15, action="stop")
    stage.head._guard = os.getppid()
    stage.head._supervisor = Mock(wait=Mock(side_effect=[[], [], [signal]]))
    stage.head.hear(exited(an_exit(0, code=0)))
    stage.head.hear(Mock(spec=Ended))
    assert stage.conductor.code == 143
    assert stage.hub.drain.call_count >= 3


def test_a_head_without_its_guard_waits_for_no_reader() -> None:
    stage = Stage(speaks=False)
    stage.begin()
    stage.hub.drain.return_value = False
    stage.head._guard = -1
    stage.head._supervisor = Mock(wait=Mock(return_value=[]))
    stage.head._show_rest()
    assert stage.hub.drain.call_count == 1


def test_agents_are_waited_for_while_nobody_reads_their_output(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(speaks=False)
    links = stage.begin()
    stage.hub.read.return_value = [(link, a_report(0, 0)) for link in links]
    stage.head.read()
    stage.hub.read.return_value = []
    later_s = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    stage.hub.drain.return_value = False
    stage.head.read()
    assert not stage.conductor.is_done
    later_s += 60
    stage.hub.drain.return_value = True
    stage.head.read()
    assert stage.conductor.is_done


def test_a_launcher_that_is_killed_is_the_cause_of_what_its_helpers_do_to_the_agents() -> None:
    stage = Stage(speaks=False)
    links = stage.begin()
    stage.head.hear(exited(an_exit(0, signal=9)))
    stage.hub.read.return_value = [
        (link, a_report(0, 143, stop_signal=15, victims=(link.place,))) for link in links
    ]
    stage.head.read()
    assert stage.conductor.code == 1
    assert stage.verdict == ["pdsh was killed by SIGKILL (signal 9)", "stopped by dsl: ranks 0-1"]


def key_line(place: int, key: str = "ab" * 32) -> bytes:
    return f"dsl-agent {place} {key}\n".encode()


def test_an_agent_tells_its_key_over_pdsh_by_a_line_of_its_own_host() -> None:
    stage = Stage(speaks=False)
    stage.says(0, b"n1: Welcome! " + key_line(1) + b"n0: " + key_line(0, "cd" * 32), STDOUT)
    assert [call[0] for call in stage.hub.expect.call_args_list] == [(1, b"\xab" * 32), (0, b"\xcd" * 32)]


@pytest.mark.parametrize(
    "line",
    [
        b"n0: " + key_line(1),
        b"n0: n1: " + key_line(1),
        key_line(1),
        b"n2: " + key_line(1),
        b"n0: " + key_line(5),
        b"n0: dsl-agent " + b"9" * 5000 + b" " + b"ab" * 32 + b"\n",
        b"n0: dsl-agent 0 abab\n",
    ],
)
def test_a_host_cannot_tell_the_key_of_another(line: bytes) -> None:
    stage = Stage(speaks=False)
    stage.says(0, line, STDOUT)
    stage.hub.expect.assert_not_called()


def test_a_place_has_one_key_and_a_second_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    stage = Stage(speaks=False)
    stage.says(0, b"n1: " + key_line(1), STDOUT)
    for _ in range(5):
        stage.says(0, b"n1: " + key_line(1, "cd" * 32), STDOUT)
    stage.hub.expect.assert_called_once_with(1, b"\xab" * 32)
    assert capfd.readouterr().err == "dsl: warning: host n1 has told a second key: it was refused\n"


def test_what_a_rank_of_an_mpi_says_is_no_word_of_ours() -> None:
    stage = Stage(speaks=False, launcher="openmpi")
    stage.says(0, b"dsl-unreachable 1 255 gone\n" + key_line(1) + b"n1: " + key_line(1), STDOUT)
    stage.says(0, b"dsl-unreachable 1 " + b"9" * 5000 + b" gone\n", STDOUT)
    stage.hub.expect.assert_not_called()
    assert stage.conductor.is_awaited(1)


def test_a_host_whose_ssh_failed_is_known_by_what_pdsh_calls_it() -> None:
    stage = Stage(speaks=False)
    stage.says(0, b"n1: no route\npdsh@here: n1: ssh exited with exit code 255\n")
    stage.says(0, b"pdsh@here: n0: ssh exited with exit code " + b"9" * 400 + b"\n")
    assert not stage.conductor.is_awaited(1)
    assert stage.conductor.is_awaited(0)


def test_the_place_of_an_agent_is_taken_by_no_other(capfd: pytest.CaptureFixture[str]) -> None:
    stage = Stage(speaks=False)
    first, other = stage.begin()
    second, third = Mock(place=0, clock=None), Mock(place=9, clock=None)
    second.name = third.name = "10.0.0.9:1"
    stage.hub.read.return_value = [
        (second, Hello("1", 0, "h", 1)),
        (second, a_report(0, 0)),
        (third, Hello("1", 9, "h", 1)),
    ]
    stage.head.read()
    second.close.assert_called_once_with()
    third.close.assert_called_once_with()
    second.send.assert_not_called()
    stage.hub.read.return_value = [(first, a_report(0, 3)), (other, a_report(0, 0))]
    stage.head.read()
    assert stage.conductor.code == 3
    assert capfd.readouterr().err.count("refused") == 1


def test_what_an_agent_says_does_nothing_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    stage = Stage(speaks=False)
    first, second = stage.begin()
    text = "\x1b]0;mine\x07\x1b[2Jhost n0:\r\nok\x9b1m"
    stage.hub.read.return_value = [
        (first, Said(Notice("info", text))),
        (first, a_report(0, 3, rank=0, host=text)),
        (second, a_report(0, 143)),
    ]
    stage.head.read()
    stage.head._end()
    said = capfd.readouterr().err
    assert said.count("host n0:  ok") >= 2
    assert said.replace("\n", "").isprintable()
