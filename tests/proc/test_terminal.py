"""Ctrl-C, Ctrl-\\ and Ctrl-Z at a real terminal, and a terminal that hangs up."""

from __future__ import annotations

import functools
import os
import pty
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import Helpers, states
from tests.support.namespaces import unshared
from tests.support.terminal import Terminal

Open = Callable[..., AbstractContextManager[Terminal]]

pytestmark = pytest.mark.engine


TRACES = "catch INT,TERM,CONT,HUP,QUIT trace {}/trace note {}/ready %p"
"""Words of a worker that traces its signals and announces itself."""
NAMESPACES = pytest.mark.parametrize(
    "namespace",
    [
        list,
        pytest.param(
            lambda: unshared("--pid", "--fork", "--mount-proc", "--kill-child"), marks=pytest.mark.root
        ),
    ],
    ids=["that of the shell", "a pid namespace"],
)
"""In another one the terminal's group has no number, so the agent cannot leave it to a worker and hears the keys, too."""


def _pids(directory: Path) -> list[int]:
    path = directory / "ready"
    until(lambda: path.exists() and len(path.read_text().split()) == 2)
    return [int(word) for word in path.read_text().split()]


def _caught(directory: Path) -> Counter[tuple[int, int]]:
    """How often each (pid, signal) was caught."""
    path = directory / "trace"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((int(line.split()[1]), int(line.split()[0])) for line in lines)


def _has_words(path: Path, count: int) -> bool:
    return path.exists() and len(path.read_text().split()) == count


def _parent(pid: int) -> int:
    process = processes.find(pid)
    assert process is not None
    return process.ppid


@NAMESPACES
def test_a_key_reaches_each_worker_once(
    namespace: Callable[[], list[str]], terminal: Open, tmp_path: Path, helpers: Helpers
) -> None:
    line = helpers.line(2, f"{TRACES} await INT 1 sleep 100 exit 0")
    with terminal([*namespace(), *line]) as screen:
        pids = _pids(tmp_path)
        screen.press(b"\x03")
        # Ctrl-C ends the command as it ends any program, so that a loop of the shell stops too ($? is 130).
        screen.reported("ended -2" if namespace is list else "ended 130")
        assert screen.echo
    assert _caught(tmp_path) == Counter({(pid, signal.SIGINT): 1 for pid in pids})


def test_the_first_ctrl_backslash_harms_no_worker_and_the_second_ends_the_job(
    terminal: Open, tmp_path: Path, helpers: Helpers
) -> None:
    """Also the worker that has the terminal, which gets the key itself, goes on after the first one."""
    with terminal(helpers.line(2, "note {}/ready %p pause")) as screen:
        pids = _pids(tmp_path)
        screen.press(b"\x1c")
        until(lambda: b"press it again" in screen.shown())
        assert states(pids) <= {"S", "R"}
        screen.press(b"\x1c")
        screen.reported("ended 131")
        assert b"failed" not in screen.shown()
    assert states(pids) == {"gone"}


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_program_that_ctrl_c_ends_at_once_has_not_failed(
    workers: int, terminal: Open, tmp_path: Path, helpers: Helpers
) -> None:
    """The worker that has the terminal dies of the key itself, often before the agent hears of the key."""
    for run in range(5):
        ready = tmp_path / str(run)
        words = ["note", str(ready), "%r", "pause"]
        with terminal(helpers.line(workers, words)) as screen:
            until(functools.partial(_has_words, ready, workers))
            screen.press(b"\x03")
            screen.reported("ended -2")
            assert b"SIGINT received: stopping" in screen.shown()
            assert b"failed" not in screen.shown()


def test_a_key_does_not_count_for_a_job_that_was_started_to_ignore_it(
    terminal: Open, tmp_path: Path, helpers: Helpers
) -> None:
    """As behind ``&`` in a script at a terminal. A signal that is sent to the job counts."""
    ignoring = ["/bin/sh", "-c", 'trap "" INT QUIT; exec "$@" < /dev/null', "sh"]
    with terminal(
        [*ignoring, *helpers.line(2, "catch USR1 trace {}/trace note {}/ready %p pause", 600)]
    ) as screen:
        pids = _pids(tmp_path)
        agent = _parent(pids[0])
        for key, echo in ((b"\x03", "^C"), (b"\x1c", "^\\"), (b"\x03", "^C")):
            screen.press(key)
            screen.showed(echo)
        os.kill(_parent(agent), signal.SIGUSR1)
        until(lambda: len(_caught(tmp_path)) == len(pids))
        os.kill(_parent(agent), signal.SIGINT)
        screen.reported("ended 130")
    assert states(pids) == {"gone"}


def test_each_ctrl_c_says_what_it_does_and_what_another_one_would(
    terminal: Open, tmp_path: Path, helpers: Helpers
) -> None:
    with terminal(helpers.line(2, "ignore INT,TERM note {}/ready %p pause", 60)) as screen:
        _pids(tmp_path)
        screen.press(b"\x03")
        until(lambda: b"stopping 2 workers (grace 60 s, a second Ctrl-C kills at once)" in screen.shown())
        screen.press(b"\x03")
        screen.reported("ended -2")
        again = screen.shown().index(b"dsl: SIGINT received again: the grace is over")
        assert b"dsl: killing 2 workers still alive" in screen.shown()[again:]


def test_ctrl_z_stops_everything_and_fg_goes_on(terminal: Open, tmp_path: Path, helpers: Helpers) -> None:
    line = helpers.line(2, f"{TRACES} await CONT 2 exit 0")
    with terminal(line) as screen:
        pids = _pids(tmp_path)
        for _ in range(2):
            _suspend(screen, pids)
            screen.resume()
        screen.reported("ended 0")
    assert _caught(tmp_path) == Counter({(pid, signal.SIGCONT): 2 for pid in pids})


def _suspend(screen: Terminal, pids: list[int]) -> None:
    until(lambda: states(pids) == {"S"})
    screen.press(b"\x1a")
    screen.reported("stopped")
    until(lambda: states(pids) == {"T"})


@pytest.mark.parametrize(
    "words", [(), ("/bin/sh", "-c", '"$@"; exit $?', "sh")], ids=["alone", "of-a-script"]
)
def test_where_no_shell_could_continue_the_job_ctrl_z_does_not_stop_it(
    words: tuple[str, ...], tmp_path: Path, helpers: Helpers
) -> None:
    """As under ``ssh -t host dsl`` or in a container: no program stops there."""
    line = [*words, *helpers.line(2, f"{TRACES} await CONT 1 exit 0")]
    command, keyboard = pty.fork()
    if command == 0:
        os.execv(line[0], line)
    try:
        pids = _pids(tmp_path)
        until(lambda: states(pids) == {"S"})
        os.write(keyboard, b"\x1a")
        until(lambda: (process := processes.find(command)) is None or process.state == "Z")
    finally:
        os.kill(command, signal.SIGKILL)  # not reaped: its pid is its own
        _, status = os.waitpid(command, 0)
        os.close(keyboard)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_suspended_job_can_be_interrupted_once_it_is_back(
    terminal: Open, tmp_path: Path, helpers: Helpers
) -> None:
    with terminal(helpers.line(2, f"{TRACES} await INT 1 exit 0")) as screen:
        pids = _pids(tmp_path)
        _suspend(screen, pids)
        screen.resume()
        until(lambda: states(pids) == {"S"})
        screen.press(b"\x03")
        screen.reported("ended -2")


# It passes SIGHUP on to its child, the foreground group's first process, alone.
_INIT = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    os.execv(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGHUP, lambda number, _: os.kill(child, number))
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize(
    "words, most",
    [
        ((), 1),
        (("/bin/sh", "-c", '"$@"; exit $?', "sh"), 1),
        # Whether the leader of the session has told the group cannot be known.
        ((sys.executable, "-c", _INIT), 1),
        (("/bin/bash", "--norc", "-i", "-c", '"$@"; exit $?', "bash"), 3),
    ],
    ids=["alone", "of-a-script", "of-an-init", "of-a-shell"],
)
def test_a_hang_up_reaches_every_worker_whoever_leads_the_session(
    words: tuple[str, ...], most: int, tmp_path: Path, helpers: Helpers
) -> None:
    """Alone is ``ssh -t host dsl``, ``tmux new-session dsl``, ``docker run -it``: the kernel tells the leader only."""
    line = [
        *words,
        *helpers.line(2, f"{TRACES} await HUP 1 sleep 100 exit 0"),
    ]
    leader, keyboard = pty.fork()
    if leader == 0:
        os.execv(line[0], line)
    try:
        pids = _pids(tmp_path)
        found = [processes.find(pid) for pid in pids]
    finally:
        os.close(keyboard)
    until(lambda: not any(process and processes.alive(process) for process in found))
    os.waitpid(leader, 0)
    caught = _caught(tmp_path)
    assert all(1 <= caught[pid, signal.SIGHUP] <= most for pid in pids), caught


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_job_ends_with_its_code_and_its_verdict(
    workers: int, terminal: Open, helpers: Helpers
) -> None:
    """Whatever the terminal does to those that write to it from the background."""
    with terminal(helpers.line(workers, "exit 7", 1.0)) as screen:
        screen.reported("ended 7")
        assert b": exit code 7" in screen.shown()


def test_a_failed_job_is_started_again(
    terminal: Open, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = [str(testchild), "only", "0", "[", "note", str(tmp_path / "ready"), "%r", "exit", "7", "]"]
    words += ["pause"]
    line = dsl_line(dsl_command.with_name("dslrun"), 2, words, None, "--max-restarts=1")
    with terminal(line) as screen:
        screen.reported("ended 7")
        assert b"restart 1 of 1" in screen.shown()
    assert (tmp_path / "ready").read_text().split() == ["0", "0"]


@pytest.mark.parametrize("stdin", ["none", ""])
def test_a_lone_worker_that_writes_to_the_terminal_is_treated_as_without_us(
    stdin: str, terminal: Open, helpers: Helpers
) -> None:
    """In the foreground it goes on; a background job stops if the terminal says so, and the shell learns of it."""
    with terminal(helpers.line(1, "say hello exit 7", None, f"--stdin={stdin}")) as screen:
        if screen.is_in_background:
            screen.reported("stopped")
            assert screen.shown() == b""
            screen.resume()
        screen.reported("ended 7")
        assert b"hello" in screen.shown()


@NAMESPACES
def test_a_lone_worker_that_reads_the_terminal_is_treated_as_without_us(
    namespace: Callable[[], list[str]], terminal: Open, dsl_command: Path
) -> None:
    line = dsl_line(dsl_command, 1, ["/bin/sh", "-c", 'read line && test "$line" = word && exit 7'])
    with terminal([*namespace(), *line]) as screen:
        if screen.is_in_background:
            screen.reported("stopped")
        screen.press(b"word\n")
        screen.reported("ended 7")
