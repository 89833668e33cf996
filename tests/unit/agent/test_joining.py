"""How a node with a fixed place joins: the key of the job, and what fits."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.support.machine import make_facts
from tests.support.requests import make_request

from dsl._record import replace
from dsl.agent import calling
from dsl.agent.calling import OtherNode
from dsl.agent.joining import job_key, joining_of, objection
from dsl.cli.torchrun import parse_args, to_request
from dsl.control.messages import Moved, Over, Said
from dsl.errors import ControlError, OptionError, RendezvousError
from dsl.model.job import Notice
from dsl.plan.job import plan_job

KNOWN = "6e5928d562ca2637a045caf9cff02de3e20cedd5684d4b22f1b806e382f46e51"
LINE = "--nnodes 3 --node-rank 1 --master-addr {} --master-port 1234 --rdzv-id job {} t.py"


def joining(address: str = "host", options: str = "", **environ: str) -> Any:
    facts = make_facts(environ=environ)
    line = LINE.format(address, options).split()
    request = to_request(parse_args([*line, "it's"], environ))
    argv = ("dslrun", "--nnodes", "3", "--node-rank", "1", "t.py", "it's")
    return joining_of(plan_job(request, facts, argv), facts, 2)


def test_a_key_of_the_user_is_another_one_than_that_of_a_run_id() -> None:
    text = "sixteen letters."
    own, is_own = job_key({"DSL_JOB_KEY": text}, "job")
    known, is_known = job_key({}, text)
    assert (len(own), len(known)) == (32, 32)
    assert own != known
    assert (is_own, is_known) == (True, False)
    assert job_key({"DSL_JOB_KEY": text}, "other") == (own, True)
    assert job_key({}, "job") != job_key({}, "other")
    assert len(job_key({"DSL_JOB_KEY": "\udcff" * 16}, "")[0]) == 32


def test_a_whole_key_is_taken_as_it_is_and_a_word_is_dear_to_guess() -> None:
    """The second value was made with another program: OpenSSL's `openssl kdf`."""
    digits = "00ff" * 15 + "aBcD"
    assert job_key({"DSL_JOB_KEY": digits}, "") == (bytes.fromhex(digits), True)
    for almost in (digits[:-1], digits + "0", digits[:-1] + "g", "0 " * 32):
        key, _ = job_key({"DSL_JOB_KEY": almost}, "")
        assert key == hashlib.scrypt(almost.encode(), salt=b"dsl job key", n=16384, r=8, p=1, dklen=32)
    word = "correct horse battery"
    assert job_key({"DSL_JOB_KEY": word}, "")[0].hex() == KNOWN


@pytest.mark.parametrize("error", [AttributeError, ValueError])
def test_without_scrypt_a_whole_key_is_needed(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """As in a Python without OpenSSL, or with one that may not use it."""
    monkeypatch.setattr(hashlib, "scrypt", Mock(side_effect=error))
    with pytest.raises(OptionError, match=r"this Python has no scrypt, .* `openssl rand -hex 32`"):
        job_key({"DSL_JOB_KEY": "sixteen letters."}, "job")
    assert job_key({"DSL_JOB_KEY": "ab" * 32}, "job") == (b"\xab" * 32, True)


@pytest.mark.parametrize("text", ["", "fifteen letters"])
def test_a_key_that_could_be_guessed_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(
        OptionError, match=f"DSL_JOB_KEY has {len(text)} characters, it needs at least 16"
    ) as error:
        job_key({"DSL_JOB_KEY": text}, "job")
    assert "fifteen" not in str(error.value)


def test_what_a_node_says_and_how_long_it_waits() -> None:
    found = joining(options="--role r --rdzv-conf timeout=7,keep_alive_interval=2,keep_alive_max_attempt=4")
    hello = found.hello
    assert (hello.place, hello.nodes, hello.workers, hello.role, hello.run_id) == (1, 3, 2, "r", "job")
    assert (found.timeout_s, found.silence_s) == (7, 8)
    assert found.meeting_point == "host:1234"
    assert joining("[::1]").meeting_point == "[::1]:1234"
    assert found.command_of(2) == "dslrun --nnodes 3 --node-rank 2 t.py 'it'\"'\"'s'"
    assert replace(found, command=(("a\nb",), ())).command_of(0) == ""


@pytest.mark.parametrize(
    "setting", ["timeout=0", "timeout=x", "keep_alive_interval=-1", "keep_alive_max_attempt=nan"]
)
def test_settings_are_numbers_above_0(setting: str) -> None:
    with pytest.raises(OptionError, match="expected a number above 0"):
        joining(options=f"--rdzv-conf {setting}")


@pytest.mark.parametrize(
    "fields, words",
    [
        ({}, ""),
        ({"nodes": 2}, "its --nnodes is 2, that of node 0 is 3"),
        ({"spares": 1}, "its --spares is 1, that of node 0 is 0"),
        ({"place": 0}, "its --node-rank is 0, with 3 nodes it must be 1 to 2"),
        ({"place": 3}, "its --node-rank is 3, with 3 nodes it must be 1 to 2"),
    ],
)
def test_a_node_needs_a_place_of_the_job(fields: dict[str, int], words: str) -> None:
    found = joining()
    own = found.hello
    assert objection(replace(own, **fields), replace(own, place=0), found.job) == words


def test_nodes_without_ssh_are_named_by_their_hosts_and_told_in_the_words_of_their_command() -> None:
    files = {"H": "alpha slots=4\nempty slots=0\nbeta slots=2\ngamma slots=2\n"}
    wish: dict[str, Any] = {"hostfile": "H", "no_ssh": True, "node_rank": 2, "master_addr": "[::1]"}
    request = make_request("deepspeed", "t.py", wait_hosts_s=7.5, heartbeat_s=3.0, **wish)
    facts = make_facts(files=files)
    argv = ("dsl", "-H", "H", "--no_ssh", "--node_rank", "2", "t.py")
    found = joining_of(plan_job(request, facts, argv), facts, 2)
    hello = found.hello
    assert (hello.place, hello.nodes, hello.host, hello.workers) == (1, 3, "beta", 2)
    assert (found.meeting_point, found.timeout_s, found.silence_s) == ("[::1]:29500", 7.5, 3)
    assert found.command_of(0) == "dsl -H H --no_ssh --node_rank 0 t.py"
    assert found.command_of(2) == "dsl -H H --no_ssh --node_rank 3 t.py"
    odd = objection(replace(hello, nodes=2), hello, found.job)
    assert odd == "its number of hosts is 2, that of node 0 is 3"
    assert objection(replace(hello, place=3), hello, found.job).startswith("its --node_rank is 3, ")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What node 0 answers, instead of a link to it."""
    found = Answers()
    hub = Mock()
    hub.add.return_value.receive = found.receive
    monkeypatch.setattr(calling, "time", SimpleNamespace(monotonic=lambda: found.now_s, sleep=found.sleep))
    monkeypatch.setattr(calling, "connect", Mock())
    monkeypatch.setattr(calling, "Hub", lambda _silence_s: hub)
    return found


class Answers:
    """Answers of node 0 by their order, the last one again and again, and a clock that only sleep moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.next: list[object] = []

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s
        assert self.now_s < 1000, "it calls for ever"

    def receive(self, *_limits: object, **_how: object) -> object:
        said = self.next.pop(0) if len(self.next) > 1 else self.next[0]
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Said):
            self.now_s += 900
        return said


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("end", [ControlError("node 0 has hung up"), object()])
def test_a_node_whose_calls_lead_nowhere_gives_up_in_time(end: object, answers: Answers) -> None:
    answers.next = [end]
    told: list[Any] = []
    node = OtherNode(joining("127.0.0.1", "--rdzv-conf timeout=7"), told.append)
    with pytest.raises(RendezvousError, match=r"^still waiting for node 0 after 7 s: (node 0|it) has "):
        node.call()
    assert answers.now_s < 8
    assert [one.text.partition(":")[0] for one in told] == ["waiting for node 0 for up to 7 s"]


MOVED, BEGUN = Moved(1, "h"), Said(Notice("info", "node 3 is a spare"), has_begun=True)
HUNG_UP = ControlError("node 0 has hung up")


def test_a_spare_that_has_lost_its_link_comes_back_long_after_the_start(answers: Answers) -> None:
    answers.next = [MOVED, BEGUN, HUNG_UP, HUNG_UP, MOVED, BEGUN, Over(has_succeeded=True)]
    node = OtherNode(joining("127.0.0.1", "--rdzv-conf timeout=7"), lambda _: None)
    assert node.call() == Over(has_succeeded=True)


@pytest.mark.guarantee("G8")
def test_a_spare_that_has_lost_node_0_calls_as_long_as_that_may_be_silent(answers: Answers) -> None:
    answers.next = [MOVED, BEGUN, ControlError("node 0 is gone"), HUNG_UP]
    told: list[Any] = []
    node = OtherNode(joining("127.0.0.1", "--rdzv-conf timeout=70"), told.append)
    text = "node 0 is gone, and cannot be reached again within 15 s: node 0 has hung up"
    with pytest.raises(RendezvousError, match=f"^{text}$"):
        node.call()
    assert 915 <= answers.now_s < 916
    assert told == [BEGUN.notice]
