"""The keeper of the programs that reach the hosts of a job: starts and ends these programs as ordered."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsl.agent.keeper import Answer, Begin, End
from dsl.model.codec import from_line, to_line

WAITS = "trap 'echo told; exit 3' TERM; echo here; while :; do sleep 0.05; done"


class Keeper:
    """The program, and a conversation with it."""

    def __init__(self, folder: Path, scripts: tuple[str, ...], at_once: int) -> None:
        path = folder / "commands.json"
        commands = [["sh", "-c", script] if script else ["/no/such/program"] for script in scripts]
        path.write_text(json.dumps({"commands": commands, "at_once": at_once}))
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dsl_launcher.fanout", str(path)],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                text=True,
            )

    def order(self, order: Begin | End) -> None:
        """Say what is to be done."""
        self.orders.send(to_line(order))

    def answer(self) -> tuple[int, int, str | int]:
        """What it says next: the place and turn of a program, and its line or its exit status."""
        assert self.process.stdout is not None
        found = from_line(self.process.stdout.readline().encode(), {"Answer": Answer})
        return found.place, found.turn, found.line if found.status is None else found.status

    def answers(self, count: int) -> set[tuple[int, int, str | int]]:
        """The next answers, in any order."""
        return {self.answer() for _ in range(count)}


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Keeper]]:
    """Starts keepers of shell scripts."""
    started: list[Keeper] = []

    def start(*scripts: str, at_once: int = 0) -> Keeper:
        started.append(Keeper(tmp_path, scripts, at_once))
        return started[-1]

    yield start
    for keeper in started:
        keeper.orders.close()
        keeper.process.kill()
        keeper.process.communicate()


def test_lines_and_ends_come_with_the_place_of_their_host(keep: Callable[..., Keeper]) -> None:
    keeper = keep("echo one; printf two", "echo no route >&2; exit 255", "")
    assert keeper.answers(7) == {
        *((0, 0, "one"), (0, 0, "two"), (0, 0, 0)),
        *((1, 0, "no route"), (1, 0, 255)),
        *((2, 0, "No such file or directory"), (2, 0, 127)),
    }


def test_a_program_is_started_again_once_the_last_one_has_ended(keep: Callable[..., Keeper]) -> None:
    keeper = keep(WAITS)
    assert keeper.answer() == (0, 0, "here")
    keeper.order(Begin(0, 1))
    said = [keeper.answer() for _ in range(3)]
    assert said == [(0, 0, "told"), (0, 0, 3), (0, 1, "here")]
    keeper.order(End((0,)))
    assert keeper.answer() == (0, 1, "told")
    assert keeper.process.wait(20) == 0


def test_so_many_programs_run_at_once(tmp_path: Path, keep: Callable[..., Keeper]) -> None:
    """The next one starts when one has ended."""
    fifo = tmp_path / "go"
    subprocess.run(["mkfifo", fifo], check=True)
    keeper = keep(*[f"echo here; read word < {fifo}"] * 2, "echo third", at_once=2)
    assert keeper.answers(2) == {(0, 0, "here"), (1, 0, "here")}
    with fifo.open("w") as go:
        go.write("\n")
        go.flush()
        said = [keeper.answer() for _ in range(3)]
    assert said[0][0] in (0, 1)
    assert isinstance(said[0][2], int), "no third program before an end"
    assert (2, 0, "third") in said


def test_a_program_that_does_not_want_to_end_is_killed(keep: Callable[..., Keeper]) -> None:
    keeper = keep("trap '' TERM; echo here; exec sleep 60")
    assert keeper.answer() == (0, 0, "here")
    keeper.order(End((0,)))
    assert keeper.answer() == (0, 0, 137)
    assert keeper.process.wait(20) == 0


def test_when_the_head_is_gone_it_ends_them_and_itself(keep: Callable[..., Keeper]) -> None:
    keeper = keep("echo here; exec sleep 60")
    assert keeper.answer() == (0, 0, "here")
    keeper.orders.close()
    assert keeper.process.wait(20) == 0
