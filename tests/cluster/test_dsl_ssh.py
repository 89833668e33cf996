"""`dsl-ssh`: one command on all hosts, by real ssh."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.kit.cluster import Cluster

NASTY = (
    *(
        "",
        " ",
        "a b",
        "$HOME",
        "`id`",
        "$(id)",
        ";",
        "&&",
        "|",
        "*",
        "?",
        "[a]",
        "{a,b}",
        "~",
        "#",
        "!",
        "!!",
    ),
    *("'", '"', "''", "\\", "\\\\", "\\n", "a\nb", "\n", "\r\n", "\t", "%s", "%b", "%%"),
    *("--", "-x", "=", "a=b", "a,b@c:d", '{"a": [1, "b c"], "d": null}'),
    *("\u00fc\u4e16\U0001f600", "\udcff\udc80", "\x01\x1b[31m"),
)
SHOW = "import sys, os; print(sys.stdout.flush() or b'\\0'.join(map(os.fsencode, sys.argv[1:])).hex())"


@pytest.fixture
def dsl_ssh(dsl_command: Path) -> str:
    """Path of the installed `dsl-ssh` program."""
    return str(dsl_command.with_name("dsl-ssh"))


@pytest.fixture
def hostfile(hosts: Cluster, tmp_path: Path) -> str:
    """A hostfile with all hosts."""
    path = tmp_path / "hosts"
    path.write_text("# three of them\n\n" + "".join(f"{name} slots=2\n" for name in hosts.names))
    return str(path)


def test_the_output_of_each_host_carries_its_name(hosts: Cluster, dsl_ssh: str, hostfile: str) -> None:
    result = hosts[0].run([dsl_ssh, "-f", hostfile, "hostname; pwd >&2"], check=True)
    assert sorted(result.stdout.splitlines()) == [f"{name}: {name}" for name in hosts.names]
    assert sorted(result.stderr.splitlines()) == [f"{name}: {hosts.home}" for name in hosts.names]
    some = hosts[0].run([dsl_ssh, "-f", hostfile, "-e", "node0@node2", "hostname"], check=True)
    assert some.stdout == "node1: node1\n"


@pytest.mark.guarantee("G5")
def test_arguments_arrive_byte_for_byte(hosts: Cluster, dsl_ssh: str, hostfile: str) -> None:
    generator = random.Random(11)
    alphabet = [chr(code) for code in range(1, 128)] + ["\u00e9", "\udcfe"]
    words = [*NASTY, *["".join(generator.choices(alphabet, k=generator.randrange(40))) for _ in range(500)]]
    sent = b"\0".join(word.encode("utf-8", "surrogateescape") for word in words).hex()
    result = hosts[0].run([dsl_ssh, "-f", hostfile, sys.executable, "-c", SHOW, *words], check=True)
    assert sorted(result.stdout.splitlines()) == [f"{name}: {sent}" for name in hosts.names]


@pytest.mark.guarantee("G2")
def test_the_exit_code_is_that_of_the_first_host_that_failed(
    hosts: Cluster, dsl_ssh: str, hostfile: str, tmp_path: Path
) -> None:
    """The others go on."""
    flag, done = tmp_path / "flag", tmp_path / "done"
    script = (
        f"case $(hostname) in node2) touch {flag}; exit 7;; esac; "
        f"until [ -e {flag} ]; do sleep 0.05; done; sleep 0.5; "
        f"case $(hostname) in node1) kill -9 $$;; *) touch {done};; esac"
    )
    result = hosts[0].run([dsl_ssh, "-f", hostfile, "sh", "-c", script])
    assert result.returncode == 7
    assert done.exists()
    told = [line for line in result.stderr.splitlines() if line.startswith("dsl-ssh: ")]
    assert told == ["dsl-ssh: host node2: exit code 7", "dsl-ssh: host node1: exit code 137"]


def test_a_host_that_cannot_be_reached_is_named_and_the_others_have_run(
    hosts: Cluster, dsl_ssh: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts"
    path.write_text("node1 slots=1\nno-such-host slots=1\nnode2 slots=1\n")
    result = hosts[0].run([dsl_ssh, "-f", path, "hostname"])
    assert result.returncode == 255
    assert sorted(result.stdout.splitlines()) == ["node1: node1", "node2: node2"]
    assert "no-such-host: ssh: Could not resolve hostname no-such-host" in result.stderr
    assert "dsl-ssh: host no-such-host: ssh has failed, the host cannot be reached\n" in result.stderr


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize(
    "signum, code",
    [(signal.SIGINT, -2), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
)
def test_however_it_ends_so_do_the_commands_on_all_hosts(
    hosts: Cluster, dsl_ssh: str, hostfile: str, signum: signal.Signals, code: int
) -> None:
    """The fixture finds what is left, also a command that ignores SIGTERM."""
    script = "trap '' TERM; echo ready; while :; do sleep 1; done"
    process = hosts[0].start(
        [dsl_ssh, "-f", hostfile, "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert sorted(process.stdout.readline() for _ in hosts) == [
            f"{name}: ready\n" for name in hosts.names
        ]
        process.send_signal(signum)
        assert process.wait(20) == code


def test_a_daemon_that_a_command_leaves_on_purpose_stays(
    hosts: Cluster, dsl_ssh: str, hostfile: str, wait_until: WaitUntil
) -> None:
    hosts[0].run([dsl_ssh, "-f", hostfile, "-i", "node1", "nohup sleep 76 >/dev/null 2>&1 &"], check=True)
    wait_until(lambda: any("sleep 76" in text for some in hosts.leftovers().values() for text in some))
    hosts[0].run([dsl_ssh, "-f", hostfile, "-i", "node1", "pkill", "-x", "sleep"], check=True)


def test_no_more_hosts_at_once_than_asked_for(
    hosts: Cluster, dsl_ssh: str, hostfile: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    script = f'echo "begin $(hostname)" >>{log}; sleep 0.2; echo "end $(hostname)" >>{log}'
    hosts[0].run([dsl_ssh, "-f", hostfile, "--max-at-once", "1", script], check=True)
    assert log.read_text().splitlines() == [
        f"{word} {name}" for name in hosts.names for word in ("begin", "end")
    ]


@pytest.mark.guarantee("G6")
def test_lines_of_hosts_are_whole(hosts: Cluster, dsl_ssh: str, hostfile: str) -> None:
    script = 'x=$(printf "%0300d" 7); i=0; while [ $i -lt 500 ]; do echo "$x"; i=$((i+1)); done'
    result = hosts[0].run([dsl_ssh, "-f", hostfile, script], check=True)
    lines = sorted(result.stdout.splitlines())
    assert lines == sorted([f"{name}: {'7'.zfill(300)}" for name in hosts.names] * 500)
