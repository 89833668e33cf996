"""Functions that a program launches again and again: one warm server forks their workers, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support import functions
from tests.support.warm import Place, variables

from dsl.functions import ChildFailedError, warm_launch

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys
from dsl.functions import warm_launch
from tests.support import functions

if __name__ == "__main__":
    with warm_launch(preload="json") as launch:
        launch(functions.parents)
        if sys.argv[1] == "forks" and not os.fork():
            sys.stdin.read()
            os._exit(0)
        if sys.argv[1] == "stays":
            print("launched", flush=True)
            sys.stdin.read()
    print("left", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Place]:
    with Place() as found, variables(found.variables()):
        yield found


def program(folder: Path, word: str) -> subprocess.Popen[str]:
    """A program of its own, which has launched a function and waits for the end of its stdin."""
    (folder / "program.py").write_text(PROGRAM)
    started = subprocess.Popen(
        [sys.executable, str(folder / "program.py"), word],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == ("launched\n" if word == "stays" else "left\n")
    return started


def test_launches_share_a_server_and_each_has_workers_of_its_own(place: Place) -> None:
    with warm_launch(nproc_per_node=2, preload="json") as launch:
        first, second = launch(functions.parents), launch(functions.parents)
        branch, server = first[0]
        assert first == [(branch, server)] * 2
        assert second[0][0] != branch
        assert second[0][1] == server == place.server().pid
        with pytest.raises(ChildFailedError):
            launch(functions.exit_in, 1, 3)
        assert launch(functions.add, 1, 2, nproc_per_node=3) == [3, 4, 5]
        assert place.server().pid == server
    until(lambda: not place.all())


def test_a_server_that_was_ended_is_replaced(place: Place) -> None:
    with warm_launch(preload="json") as launch:
        ((_, server),) = launch(functions.parents)
        os.kill(server, signal.SIGKILL)
        until(lambda: processes.find(server) is None)  # its memory goes before its connections
        ((_, other),) = launch(functions.parents)
        assert other == place.server().pid != server


def test_a_server_is_found_whose_imports_end_while_it_is_called(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket has another name then than a moment before."""
    with warm_launch(preload="json") as launch:
        first = launch(functions.parents)
        names = [(folder, name.replace(".warm", ".new")) for folder, name in place.sockets()]
        monkeypatch.setattr("dsl.agent.warm._servers", lambda _digest: names)
        assert launch(functions.parents)[0][1] == first[0][1]


def test_threads_share_a_held_server(place: Place) -> None:
    with warm_launch(preload="json") as launch, ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: launch(functions.parents)[0], range(8))]
        assert {server for _, server in found} == {place.server().pid}


def test_a_held_server_ends_with_a_killed_program(place: Place, tmp_path: Path) -> None:
    with program(tmp_path, "stays") as started:
        assert place.server().jobs == 1
        started.kill()
    until(lambda: not place.all())


def test_a_child_of_the_program_does_not_hold_the_server(place: Place, tmp_path: Path) -> None:
    with program(tmp_path, "forks") as started:
        until(lambda: not place.servers())
        assert started.poll() is None
        started.communicate()
    assert started.returncode == 0
