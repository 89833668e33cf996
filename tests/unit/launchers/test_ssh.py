"""One ssh for each host."""

from __future__ import annotations

import shlex

import pytest
from tests.support.launchers import starts
from tests.support.machine import make_facts
from tests.support.requests import make_request

from dsl.launchers.ssh import ssh_command
from dsl.launchers.table import starts_of
from dsl.plan.job import plan_job

HOSTS = {"a": 2, "b": 1}
SETTINGS = {"BatchMode": "yes", "ClearAllForwardings": "yes", "ControlMaster": "no"}
SETTINGS |= {"ConnectTimeout": "15", "ServerAliveInterval": "5", "ServerAliveCountMax": "3"}
OPTIONS = ["-T", "-x", "-a", "-e", "none"]
OPTIONS += [word for name, value in SETTINGS.items() for word in ("-o", f"{name}={value}")]
WORDS = ["exec", "/opt/py", "-m", "dsl_launcher.node", "--connect", "10.0.0.1:7"]


def test_every_host_has_a_command_that_is_its_agent() -> None:
    found = starts("ssh", HOSTS)
    assert [(one.node_rank, one.speaks) for one in found] == [(0, True), (1, True)]
    assert [list(one.argv[:-1]) for one in found] == [["ssh", *OPTIONS, "a"], ["ssh", *OPTIONS, "b"]]
    assert [shlex.split(one.argv[-1]) for one in found] == [
        [*WORDS, "--place", "0"],
        [*WORDS, "--place", "1"],
    ]
    assert not any(one.env or one.files or one.unset for one in found)


def test_a_port_and_words_for_ssh_that_count_before_ours() -> None:
    """Of two settings ssh keeps the first, and of two ports, too."""
    (one,) = starts("ssh", {"a": 1}, ssh_port=2222, args=("-o", "ConnectTimeout=60"))
    assert list(one.argv[:-1]) == ["ssh", "-o", "ConnectTimeout=60", *OPTIONS, "-p", "2222", "a"]


@pytest.mark.parametrize("heartbeat_s, interval", [(15.0, 5), (60.0, 20), (1.0, 1), (0.0, 0)])
def test_ssh_notices_silence_as_the_heartbeat_does(heartbeat_s: float, interval: int) -> None:
    (one,) = starts("ssh", {"a": 1}, heartbeat_s=heartbeat_s)
    assert f"ServerAliveInterval={interval}" in one.argv


@pytest.mark.parametrize(
    "name, given",
    [
        ("me@a", "me@a"),
        ("10.0.0.2", "10.0.0.2"),
        ("fd00::2", "fd00::2"),
        ("[fd00::2]", "fd00::2"),
        ("me@[fe80::1%eth0]", "me@fe80::1%eth0"),
        ("me@realm@gate", "me@realm@gate"),
        ("node_1.cluster", "node_1.cluster"),
    ],
)
def test_users_and_addresses(name: str, given: str) -> None:
    (one,) = starts("ssh", {name: 1})
    assert one.argv[-2] == given


def test_another_program_gets_the_names_of_hosts_and_a_line_for_their_shells() -> None:
    """Neither options of ssh nor words for it; a name stays one word."""
    way = ("kubectl", "exec", "-i", "pod/{host}", "--", "sh", "-c")
    first, second = starts("ssh", {"a": 1, "[fd00::2]": 1}, program=way, ssh_port=6)
    assert first.argv[:-1] == ("kubectl", "exec", "-i", "pod/a", "--", "sh", "-c")
    assert second.argv[3] == "pod/fd00::2"
    assert first.argv[-1] == starts("ssh", {"a": 1})[0].argv[-1]
    assert first.speaks


def test_every_host_has_its_interpreter() -> None:
    found = starts("ssh", HOSTS, pythons=("/a/py", "/my env's/py"))
    assert [shlex.split(one.argv[-1])[1] for one in found] == ["/a/py", "/my env's/py"]


@pytest.mark.parametrize(
    "script, path", [("/e/activate", "/e/activate"), ("~/activate", "~/activate"), ("e/a b", "/data/e/a b")]
)
def test_a_script_is_sourced_first_and_sees_no_words(script: str, path: str) -> None:
    (one,) = starts("ssh", {"a": 1}, venv_script=script)
    words = shlex.split(one.argv[-1])
    assert words[:3] == ["exec", "bash", "-c"]
    assert words[4:] == ["dsl", path, *WORDS[1:], "--place", "0"]


def test_pdsh_carries_no_variables_and_says_so() -> None:
    with pytest.raises(ValueError, match="carries no variables"):
        starts("pdsh", HOSTS, variables=(("KEY", "x"),))


def test_with_more_hosts_than_ssh_reaches_at_once_agents_stay_behind() -> None:
    """No variable with a key is among the words."""
    files = {"H": "a slots=1\nb slots=1\nc slots=1\n"}
    for fanout, is_many in (("2", True), ("3", False)):
        facts = make_facts(files=files, environ={"DSL_SSH_FANOUT": fanout})
        planned = plan_job(make_request("deepspeed", hostfile="H", launcher="ssh"), facts)
        assert planned.remote is not None
        found = starts_of(planned.job, planned.remote, facts, is_root=False, variables=(("KEY", "x"),))
        for place, start in enumerate(found):
            assert (start.speaks, start.detaches, start.node_rank) == (not is_many, is_many, place)
            assert ("--detach" in start.argv[-1].split(), start.env) == (is_many, ())
            assert start.argv[-1].endswith(f" --place {place}")


def test_options_come_before_the_host_and_nothing_of_it_is_one() -> None:
    words = ssh_command("me@n1", ("ls", "-l"), 2222)
    end = words.index("--")
    assert words[0] == "ssh"
    assert words[end - 2 : end] == ("-p", "2222")
    assert "BatchMode=yes" in words[:end]
    assert words[end + 1] == "me@n1"
    assert len(words) == end + 3
    assert "-p" not in ssh_command("n1", ("ls", "-l"))
    assert ssh_command("[fd00::1]", ("ls",))[-2] == "fd00::1"


def test_no_shell_on_the_way_sees_a_line_break() -> None:
    """Shells spell them differently."""
    for words in (("a\nb", "\r\n"), ("echo a\necho b",)):
        line = ssh_command("n1", words)[-1]
        assert "\n" not in line
        assert "\r" not in line
