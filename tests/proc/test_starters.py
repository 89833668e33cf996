"""What keeps the programs that reach the hosts of an elastic job: one for each, ended and started as ordered."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Keeper:
    """The program, and a conversation with it."""

    def __init__(self, folder: Path, commands: Sequence[Sequence[str]]) -> None:
        path = folder / "commands.json"
        path.write_text(json.dumps({"commands": commands}))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dsl.fanout", "--orders", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, **order: Any) -> None:
        """Say what is to be done."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it says next."""
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@pytest.fixture
def keepers() -> Iterator[list[Keeper]]:
    started: list[Keeper] = []
    yield started
    for keeper in started:
        keeper.process.kill()
        keeper.process.communicate()


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_lines_and_ends_come_with_the_place_of_their_host(tmp_path: Path, keepers: list[Keeper]) -> None:
    keepers.append(Keeper(tmp_path, [sh("echo one; printf two"), sh("echo no route >&2; exit 255")]))
    said = [keepers[0].answer() for _ in range(5)]
    assert sorted([json.dumps(one) for one in said if one["place"] == 0]) == sorted(
        [
            '{"place": 0, "line": "one", "stream": 1}',
            '{"place": 0, "line": "two", "stream": 1}',
            '{"place": 0, "status": 0}',
        ]
    )
    assert [one for one in said if one["place"] == 1] == [
        {"place": 1, "line": "no route", "stream": 2},
        {"place": 1, "status": 255},
    ]


def test_a_program_is_started_again_once_the_last_one_has_ended(
    tmp_path: Path, keepers: list[Keeper]
) -> None:
    keepers.append(
        Keeper(tmp_path, [sh("trap 'echo told; exit 3' TERM; echo here; while :; do sleep 0.05; done")])
    )
    assert keepers[0].answer()["line"] == "here"
    keepers[0].order(reach=0)
    assert keepers[0].answer()["line"] == "told"
    assert keepers[0].answer() == {"place": 0, "status": 3}
    assert keepers[0].answer()["line"] == "here"
    keepers[0].order(end=[0])
    assert keepers[0].answer()["line"] == "told"
    assert keepers[0].process.wait(20) == 0


def test_a_program_that_does_not_want_to_end_is_killed(tmp_path: Path, keepers: list[Keeper]) -> None:
    keepers.append(Keeper(tmp_path, [["sh", "-c", "trap '' TERM; echo here; exec sleep 60"]]))
    assert keepers[0].answer()["line"] == "here"
    keepers[0].order(end=[0])
    assert keepers[0].answer() == {"place": 0, "status": 137}
    assert keepers[0].process.wait(20) == 0


def test_when_the_head_is_gone_it_ends_them_and_itself(tmp_path: Path, keepers: list[Keeper]) -> None:
    keepers.append(Keeper(tmp_path, [sh("echo here; exec sleep 60")]))
    assert keepers[0].answer()["line"] == "here"
    assert keepers[0].process.stdin is not None
    keepers[0].process.stdin.close()
    assert keepers[0].process.wait(20) == 0
    keepers[0].process.stdin = None


def test_a_program_that_is_not_there_has_ended(tmp_path: Path, keepers: list[Keeper]) -> None:
    keepers.append(Keeper(tmp_path, [["/no/such/program"]]))
    assert "No such file" in keepers[0].answer()["line"]
    assert keepers[0].answer() == {"place": 0, "status": 127}
