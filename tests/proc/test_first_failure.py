"""The first failure is the first death the kernel saw, not the lowest rank found in one look."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.command import dsl_line
from tests.support.group import Group
from tests.support.jobs import running

from dsl import WorkerSpec

pytestmark = [pytest.mark.engine, pytest.mark.guarantee("G3")]


def _after(directory: Path, testchild: Path, rank: int, cause: int | None, *end: str) -> WorkerSpec:
    """A worker that dies as soon as worker `cause` is dead: the kernel's order of deaths is then certain."""
    words = ["touch", str(directory / f"pid{rank}")]
    if cause is not None:
        words += ["wait", str(directory / f"pid{cause}"), "waitpid", str(directory / f"pid{cause}")]
    return WorkerSpec([str(testchild), *words, *end], env={"RANK": str(rank)})


@pytest.mark.needs_pidfd
@pytest.mark.parametrize("run", range(3))
def test_order_is_the_order_in_which_the_kernel_saw_the_deaths(
    run: int, testchild: Path, tmp_path: Path
) -> None:
    del run
    size = 24
    specs = [_after(tmp_path, testchild, rank, rank + 1, "exit", str(rank + 1)) for rank in range(size - 1)]
    gate = tmp_path / f"pid{size - 2}"
    specs.append(_after(tmp_path, testchild, size - 1, None, "wait", str(gate), "exit", str(size)))
    with Group(specs, on_failure="report") as group:
        ended = group.finish()
    exits = sorted(group.exits().values(), key=lambda exit_: exit_.order)
    assert [exit_.worker for exit_ in exits] == list(reversed(range(size)))
    assert [exit_.order for exit_ in exits] == list(range(size))
    assert ended.first_failure is not None
    assert ended.first_failure.worker == size - 1


@pytest.mark.needs_pidfd
def test_two_failures_a_millisecond_apart_blame_the_first_every_time(testchild: Path, tmp_path: Path) -> None:
    """50 runs: rank 3 dies, rank 0 follows 1 ms later (deaf to our TERM); rank 3 is always the cause."""
    blamed = []
    for run in range(50):
        directory = tmp_path / str(run)
        directory.mkdir()
        late = _after(directory, testchild, 0, 3, "sleep", "1", "exit", "5")
        late = WorkerSpec([late.argv[0], "ignore", "TERM", *late.argv[1:]])
        bystanders = [WorkerSpec([str(testchild), "pause"])] * 2
        gate = ["wait", str(directory / "pid0"), "exit", "3"]
        specs = [late, *bystanders, _after(directory, testchild, 3, None, *gate)]
        with Group(specs) as group:
            ended = group.finish()
        assert ended.first_failure is not None
        blamed.append((ended.first_failure.worker, ended.first_failure.code))
        assert group.exits()[1].caused_by_stop
        assert group.exits()[2].caused_by_stop
    assert blamed == [(3, 3)] * 50


def test_the_command_blames_the_cause_and_lists_the_victims(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The lowest rank dies too, a millisecond later and by itself: deaf to our TERM, its code is certain."""
    pid3 = str(tmp_path / "job" / "pid3")
    words = [
        *("only", "3", "[", "touch", pid3, "wait", str(tmp_path / "job" / "pid0"), "exit", "3", "]"),
        *("only", "0", "[", "ignore", "TERM", "touch", str(tmp_path / "job" / "pid0")),
        *("wait", pid3, "waitpid", pid3, "sleep", "1", "exit", "5", "]", "pause"),
    ]
    with running(dsl_line(dsl_command, 4, [str(testchild), *words]), tmp_path / "job") as job:
        code = job.wait()
    assert code == 3
    cause, victims, followers = job.stderr().splitlines()
    assert re.fullmatch(r"dsl: rank 3 \(local rank 3, pid \d+, host \S+\) failed first: exit code 3", cause)
    assert victims == "dsl: stopped by dsl: ranks 1-2 (SIGTERM)"
    assert followers == "dsl: ended because of it: rank 0 (exit code 5)"
