"""Ctrl-C, Ctrl-\\ and Ctrl-Z at a real terminal, and a terminal that hangs up."""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from kit import processes
from kit.waiting import until
from tests.support.command import dsl_line
from tests.support.terminal import Terminal, terminal

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine


def _line(dsl: Path, testchild: Path, directory: Path, *end: str) -> list[str]:
    words = ["trace", str(directory / "trace"), "note", str(directory / "ready"), "%p", *end]
    return dsl_line(dsl, 2, [str(testchild), "catch", "INT,TERM,CONT,HUP,QUIT", *words])


def _pids(directory: Path) -> list[int]:
    path = directory / "ready"
    until(lambda: path.exists() and len(path.read_text().split()) == 2)
    return [int(word) for word in path.read_text().split()]


def _caught(directory: Path) -> Counter[tuple[int, int]]:
    """How often each (pid, signal) was caught."""
    path = directory / "trace"
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((int(line.split()[1]), int(line.split()[0])) for line in lines)


def _states(pids: list[int]) -> set[str]:
    found = [processes.find(pid) for pid in pids]
    return {process.state if process else "gone" for process in found}


@pytest.mark.parametrize("key, number", [(b"\x03", signal.SIGINT), (b"\x1c", signal.SIGQUIT)])
def test_a_key_reaches_each_worker_once(
    key: bytes, number: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    name = signal.Signals(number).name.removeprefix("SIG")
    line = _line(dsl_command, testchild, tmp_path, "await", name, "1", "sleep", "100", "exit", "0")
    with terminal(line) as screen:
        pids = _pids(tmp_path)
        screen.press(key)
        # Ctrl-C ends the command as it ends any program, so that a loop of the shell stops too ($? is 130).
        screen.reported("ended -2" if number == signal.SIGINT else f"ended {128 + number}")
        assert screen.echo
    assert _caught(tmp_path) == Counter({(pid, number): 1 for pid in pids})


def test_ctrl_z_stops_everything_and_fg_goes_on(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    line = _line(dsl_command, testchild, tmp_path, "await", "CONT", "2", "exit", "0")
    with terminal(line) as screen:
        pids = _pids(tmp_path)
        for _ in range(2):
            _suspend(screen, pids)
            screen.resume()
        screen.reported("ended 0")
    assert _caught(tmp_path) == Counter({(pid, signal.SIGCONT): 2 for pid in pids})


def _suspend(screen: Terminal, pids: list[int]) -> None:
    until(lambda: _states(pids) == {"S"})
    screen.press(b"\x1a")
    screen.reported("stopped")
    until(lambda: _states(pids) == {"T"})


def test_a_suspended_job_can_be_interrupted_once_it_is_back(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    with terminal(_line(dsl_command, testchild, tmp_path, "await", "INT", "1", "exit", "0")) as screen:
        pids = _pids(tmp_path)
        _suspend(screen, pids)
        screen.resume()
        until(lambda: _states(pids) == {"S"})
        screen.press(b"\x03")
        screen.reported("ended -2")


def test_a_terminal_that_hangs_up_ends_the_job(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """G1: closing the window sends SIGHUP to the command only; its workers must end all the same."""
    with terminal(_line(dsl_command, testchild, tmp_path, "await", "HUP", "1", "exit", "0")) as screen:
        pids = _pids(tmp_path)
        found = [processes.find(pid) for pid in pids]
        screen.hang_up()
        until(lambda: not any(process and processes.alive(process) for process in found))
    assert {number for _, number in _caught(tmp_path)} == {signal.SIGHUP}
