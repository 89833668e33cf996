"""Lines that are not finished, of several workers in a pipe: shown after a while, and never torn."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line

pytestmark = pytest.mark.guarantee("G6")

MARK = "\u2026".encode()

# Each rank does what its argument says, as Python.
PROGRAM = r"""
import os, sys, time
def wait(name):
    while not os.path.exists(name):
        time.sleep(0.005)
def say(text):
    print(text, end="", flush=True)
exec(sys.argv[1 + int(os.environ["RANK"])])
"""


class Job:
    """A command whose stdout is read as it comes."""

    def __init__(self, line: list[str], cwd: Path) -> None:
        self.process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=cwd
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.text = b""

    def read(self) -> bytes:
        """All that has come."""
        assert self.process.stdout is not None
        self.text += self.process.stdout.read() or b""
        return self.text

    def showed(self, text: bytes, timeout_s: float = 20.0) -> None:
        """Wait for it."""
        until(lambda: text in self.read(), timeout_s)

    def ended(self) -> bytes:
        """All of the output, once the command has ended well."""
        assert self.process.wait(20) == 0
        return self.read()


@pytest.fixture
def start(dsl_command: Path, tmp_path: Path) -> Iterator[object]:
    jobs = []

    def start(*ranks: str, options: tuple[str, ...] = ()) -> Job:
        program = [sys.executable, "-c", PROGRAM, *ranks]
        jobs.append(Job(dsl_line(dsl_command, len(ranks), program, 1.0, *options), tmp_path))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.terminate()
        job.process.wait(20)
        assert job.process.stdout is not None
        job.process.stdout.close()


@pytest.mark.parametrize("options", [(), ("--tag-output", "always")])
def test_the_last_words_before_a_hang_are_shown(
    start: object, tmp_path: Path, options: tuple[str, ...]
) -> None:
    job = start('say("loading "); wait("gate"); say("done\\n")', 'wait("gate")', options=options)  # type: ignore[operator]
    begin = time.monotonic()
    job.showed(b"loading ")
    assert 0.5 < time.monotonic() - begin < 10
    (tmp_path / "gate").touch()
    tag = b"[rank 0] " if options else b""
    assert job.ended() == tag + b"loading done\n"


def test_a_line_of_another_rank_does_not_tear_it(start: object, tmp_path: Path) -> None:
    job = start(  # type: ignore[operator]
        'say("loading "); wait("gate"); say("done\\n")', 'wait("first"); say("other\\n"); wait("gate")'
    )
    job.showed(b"loading ")
    (tmp_path / "first").touch()
    job.showed(b"other\n")
    (tmp_path / "gate").touch()
    assert job.ended() == b"loading " + MARK + b"\nother\nloading done\n"


def test_whole_lines_can_be_asked_for(start: object, tmp_path: Path) -> None:
    job = start(  # type: ignore[operator]
        'say("loading "); wait("gate"); say("done\\n")',
        'say("begun\\n"); time.sleep(2.5); say("other\\n"); wait("gate")',
        options=("--partial-after", "never"),
    )
    job.showed(b"other\n")
    assert b"loading" not in job.read()
    (tmp_path / "gate").touch()
    assert b"loading done\n" in job.ended()


def test_a_progress_bar_moves_at_least_every_two_seconds(start: object, tmp_path: Path) -> None:
    bar = 'step = 0\nwhile not os.path.exists("gate"):\n    step += 1\n    say("\\r%d%%" % step); time.sleep(0.1)\n'
    job = start(f'{bar}say("\\n")', bar)  # type: ignore[operator]
    moves = [time.monotonic()]

    def moved_again() -> bool:
        before = len(job.text)
        if len(job.read()) > before:
            moves.append(time.monotonic())
        return len(moves) > 4

    until(moved_again, 20)
    (tmp_path / "gate").touch()
    first, *gaps = [later - earlier for earlier, later in itertools.pairwise(moves)]
    assert first < 10  # until both interpreters run
    assert max(gaps) < 3


def test_nothing_wakes_up_for_a_line_that_has_been_shown(start: object, tmp_path: Path) -> None:
    job = start('say("loading "); wait("gate")', 'wait("gate")')  # type: ignore[operator]
    job.showed(b"loading ")
    agents = processes.children(job.process.pid)

    def is_still() -> bool:
        before = [processes.processor_ns(agent, "dsl-mux") for agent in agents]
        time.sleep(0.5)
        return before == [processes.processor_ns(agent, "dsl-mux") for agent in agents]

    until(is_still)
    (tmp_path / "gate").touch()
    job.ended()
