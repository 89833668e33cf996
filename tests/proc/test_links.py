"""The links between head and agents, and the door by which an agent of a host begins."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import WaitUntil
from tests.support.command import ran
from tests.support.links import Ends, messages, until

from dsl.control.hub import FdStream, Link
from dsl.control.messages import Bye, Hello, Lost, Over

# A host's half: it speaks, forks, and the parent stays as a guard does.
AGENT = """
import os, signal, sys
from dsl.control.hub import FdStream, Hub
from dsl.control.messages import Bye, Hello, Said
from dsl.model.job import Notice
hub = Hub(float(sys.argv[1]))
link = hub.add(FdStream(os.dup(0), os.dup(1)), "the head")
os.dup2(2, 0), os.dup2(2, 1)
link.send_now(Hello("1", 0, "host", os.getpid()))
link.receive(20)
child = os.fork()
if child:
    hub.disown()
    os.waitpid(child, 0)
    signal.pause()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
hub.start()
link.send(Said(Notice("info", str(os.getpid()))))
signal.sigwait({signal.SIGUSR1})
link.send(Bye())
hub.close(5)
os._exit(0)
"""


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends(head_s=3.0)
    yield made
    made.close()


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(10)


def begin(ends: Ends, agents: list[subprocess.Popen[bytes]], heartbeat_s: float = 20.0) -> tuple[Link, int]:
    """Start an agent and answer it; returns its link and the pid of the process that goes on."""
    mine, theirs = socket.socketpair()
    with theirs:
        agents.append(
            subprocess.Popen(
                [sys.executable, "-c", AGENT, str(heartbeat_s)], stdin=theirs.fileno(), stdout=theirs.fileno()
            )
        )
    link = ends.head.add(FdStream(mine.fileno(), mine.detach()), "node1")
    ends.head.start()
    (first,) = messages(ends.head, 1)
    assert first.pid == agents[-1].pid
    link.send(Over())
    ((_, said),) = until(ends.head, bool)
    return link, int(said.notice.line)


def test_an_agent_goes_on_in_its_child(ends: Ends, agents: list[subprocess.Popen[bytes]]) -> None:
    link, child = begin(ends, agents)
    assert child != agents[0].pid
    os.kill(child, signal.SIGUSR1)
    assert until(ends.head, lambda found: len(found) == 2) == [
        (link, Bye()),
        (link, Lost("has closed the connection")),
    ]


def test_the_death_of_an_agent_is_seen_though_its_guard_lives(
    ends: Ends, agents: list[subprocess.Popen[bytes]]
) -> None:
    _, child = begin(ends, agents)
    os.kill(child, signal.SIGKILL)
    assert messages(ends.head, 1) == [Lost("has closed the connection")]
    assert agents[0].poll() is None


def test_an_agent_that_is_stopped_is_given_up_after_the_heartbeat(
    ends: Ends, agents: list[subprocess.Popen[bytes]]
) -> None:
    _, child = begin(ends, agents)
    begin_s = time.monotonic()
    os.kill(child, signal.SIGSTOP)
    assert messages(ends.head, 1) == [Lost("has not been heard for 3 s", is_silent=True)]
    assert 2.0 < time.monotonic() - begin_s < 8
    os.kill(child, signal.SIGKILL)


def test_an_agent_that_was_stopped_listens_before_it_gives_up_its_head(
    ends: Ends, agents: list[subprocess.Popen[bytes]], wait_until: WaitUntil
) -> None:
    """It is stopped for longer than its own patience, and its head has sent heartbeats all the while."""
    link, child = begin(ends, agents, heartbeat_s=2.0)
    os.kill(child, signal.SIGSTOP)
    until_s = time.monotonic() + 2.5
    wait_until(lambda: time.monotonic() > until_s)
    os.kill(child, signal.SIGCONT)
    os.kill(child, signal.SIGUSR1)
    found = until(ends.head, lambda found: len(found) == 2)
    assert found == [(link, Bye()), (link, Lost("has closed the connection"))]


# A head that says what it hears, a line each.
HEAD = """
import os, select, sys
from dsl.control.hub import FdStream, Hub
hub = Hub(1.0, show=True)
hub.add(FdStream(os.dup(0), os.dup(0)), "node1")
hub.start()
while True:
    select.select([hub], [], [])
    for _, message in hub.read():
        print(message, flush=True)
"""


def test_a_head_that_was_stopped_asks_again_before_it_gives_anybody_up(wait_until: WaitUntil) -> None:
    """By itself this agent sends a heartbeat only every seven seconds."""
    ends = Ends(agent_s=20.0)
    mine, theirs = socket.socketpair()
    link = ends.agent.add(FdStream(mine.fileno(), mine.detach()), "the head")
    with theirs:
        command = [sys.executable, "-c", HEAD]
        head = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.PIPE, text=True)
    assert head.stdout is not None
    ends.agent.start()
    link.send(Hello("1", 0, "host", 1))
    assert head.stdout.readline().startswith("Hello(")
    head.send_signal(signal.SIGSTOP)
    until_s = time.monotonic() + 2.5
    wait_until(lambda: time.monotonic() > until_s)
    head.send_signal(signal.SIGCONT)
    # It has heard nothing for longer than its patience; it would have given us up at its next look.
    until_s = time.monotonic() + 1.5
    wait_until(lambda: time.monotonic() > until_s)
    link.send(Bye())
    assert head.stdout.readline().startswith("Bye(")
    head.kill()
    head.communicate(timeout=10)
    ends.close()


# Programs that start an agent for each of two hosts, and lose its key on the way.
LOSERS = {
    "pdsh": """
started = [Popen(["sh", "-c", argv[-1].replace("%n", place)], stdin=PIPE) for place in "01"]
""",
    "mpirun": """
del environ["DSL_CONTROL_KEY"]
words = argv[argv.index(executable) :]
started = [Popen(words, env={**environ, "OMPI_COMM_WORLD_RANK": place}) for place in "01"]
""",
}
SHADOWS = ("socket.py", "select.py", "json.py", "threading.py", "shlex.py", "queue.py")


@pytest.mark.parametrize("option", [(), ("-E",)])
def test_files_of_the_user_are_no_modules_of_the_agent(tmp_path: Path, option: tuple[str, ...]) -> None:
    """A script's directory may hold a `socket.py`: the agent runs there, and does not import it."""
    for name in SHADOWS:
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n", encoding="utf-8")
    words = [sys.executable, *option, "-m", "dsl_launcher.node", "--stdio", "--place", "0"]
    ended = subprocess.run(words, cwd=tmp_path, input=b"", capture_output=True, check=False)
    assert b"wrong module" not in ended.stderr + ended.stdout
    assert ended.stderr.startswith(b"dsl: error: ")
    assert ended.stderr.count(b"\n") == 1


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "launcher, program, said",
    [
        ("pdsh", "pdsh", "pdsh does not mark the lines of hosts with their names"),
        ("openmpi", "mpirun", "DSL_CONTROL_KEY has not come to host "),
    ],
)
def test_a_key_that_is_lost_on_the_way_is_missed_at_once_and_shown_nowhere(
    dsl_command: Path, tmp_path: Path, launcher: str, program: str, said: str
) -> None:
    """The agents would call for half a minute."""
    path = tmp_path / "bin" / program
    path.parent.mkdir()
    imports = (
        "from os import environ\nfrom subprocess import PIPE, Popen\nfrom sys import argv, executable, exit\n"
    )
    path.write_text(
        f"#!{sys.executable}\n{imports}{LOSERS[program]}exit(max(one.wait() for one in started))\n",
        encoding="utf-8",
    )
    path.chmod(0o700)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n", encoding="utf-8")
    (tmp_path / "t.py").touch()
    words = [str(dsl_command), "--hostfile", "hosts", "--launcher", launcher, "--log_level", "debug", "t.py"]
    ended = ran(
        words, cwd=tmp_path, environ={"PATH": f"{path.parent}:{os.environ['PATH']}"}, stdin=subprocess.DEVNULL
    )
    assert ended.returncode == 1
    assert said in ended.stderr
    assert not re.search("[0-9a-f]{64}", ended.stdout + ended.stderr)
