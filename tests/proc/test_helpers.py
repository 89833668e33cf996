"""Who hears a signal: the rank, and what it has started only when it must."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import Job, complete_lines, running
from tests.support.warm import Place

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).parents[1] / "workers" / "helped.py"
COMMANDS = {"dsl": ["--no_local_rank", "--num_gpus", "2"], "dslrun": ["--nproc-per-node", "2"]}
METHODS = ("spawn", "forkserver", "warm")
ALL_HELPED = ["0 helped", "1 helped"]


@contextlib.contextmanager
def _training(command: Path, folder: Path, *options: str) -> Iterator[Job]:
    """Two ranks with a helper each, which are ready."""
    line = [str(command), *COMMANDS[command.name], *options, str(PROGRAM), str(folder)]
    with Place() as place, running(line, folder, environ=place.variables()) as job:
        job.ready(2)
        yield job


def _noted(folder: Path, name: str, count: int = 2) -> list[str]:
    """The lines of a file of notes, once so many are there."""
    until(lambda: len(complete_lines(folder / name)) >= count)
    return sorted(complete_lines(folder / name))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_stop_leaves_a_rank_its_helpers_until_it_has_saved(
    name: str, method: str, dsl_command: Path, tmp_path: Path
) -> None:
    """torchrun signals the process group: its data loaders are gone before the rank can use them again."""
    command = dsl_command.with_name(name)
    with _training(command, tmp_path, "--start-method", method) as job:
        for count in (2, 4):
            os.kill(job.guard, signal.SIGUSR1)
            assert _noted(tmp_path, "heard", count) == sorted(ALL_HELPED * (count // 2))
        os.kill(job.guard, signal.SIGTERM)
        assert _noted(tmp_path, "stopping") == ["0 1", "1 1"]
        (tmp_path / "may_save").touch()
        assert job.wait() == 143, job.stderr()
    assert _noted(tmp_path, "saved") == ALL_HELPED


@pytest.mark.parametrize("method", METHODS)
def test_a_preemption_by_the_signal_that_ends_helpers_leaves_them(
    method: str, dsl_command: Path, tmp_path: Path
) -> None:
    options = ["--preempt-signal", "TERM", "--preempt-grace", "600", "--grace", "0", "--start-method", method]
    with _training(dsl_command, tmp_path, *options) as job:
        os.kill(job.guard, signal.SIGTERM)
        _noted(tmp_path, "stopping")
        (tmp_path / "may_save").touch()
        assert job.wait() == 75, job.stderr()
    assert _noted(tmp_path, "saved") == ALL_HELPED


def test_the_failure_of_another_rank_leaves_a_rank_its_helpers(dsl_command: Path, tmp_path: Path) -> None:
    with _training(dsl_command, tmp_path) as job:
        (tmp_path / "may_fail").touch()
        assert _noted(tmp_path, "stopping", 1) == ["0 1"]
        (tmp_path / "may_save").touch()
        assert job.wait() == 3, job.stderr()
    assert _noted(tmp_path, "saved", 1) == ["0 helped"]


def test_a_function_that_is_asked_to_end_keeps_its_helpers_until_it_has_saved(tmp_path: Path) -> None:
    with running([sys.executable, str(PROGRAM), str(tmp_path)], tmp_path) as job:
        job.ready(2)
        os.kill(job.process.pid, signal.SIGTERM)
        _noted(tmp_path, "stopping")
        (tmp_path / "may_save").touch()
        assert job.wait() == 143, job.stderr()
    assert _noted(tmp_path, "saved") == ALL_HELPED


def test_in_the_scope_of_the_group_a_stop_reaches_the_helpers_at_once(
    dsl_command: Path, tmp_path: Path
) -> None:
    with _training(dsl_command, tmp_path, "--signal-scope", "group") as job:
        os.kill(job.guard, signal.SIGTERM)
        _noted(tmp_path, "stopping")
        (tmp_path / "may_save").touch()
        assert job.wait() == 143, job.stderr()
    assert _noted(tmp_path, "saved") == ["0 alone", "1 alone"]


def _helped_line(dsl: Path, testchild: Path, folder: Path, *options: str) -> list[str]:
    """A line of two deaf ranks, each with a helper in its group and one in a session of its own."""
    helper = [
        "catch",
        "USR1,TERM",
        "trace",
        str(folder / "helpers"),
        "note",
        str(folder / "helpers_ready"),
        "%r",
    ]
    end = ["await", "TERM", "1", "exit", "0"]
    helpers = ["child", "[", *helper, *end, "]", "child", "[", "setsid", *helper, *end, "]"]
    rank = [
        "catch",
        "USR1,TERM",
        "trace",
        str(folder / "trace"),
        "note",
        str(folder / "ready"),
        "%r %p",
        "pause",
    ]
    return dsl_line(dsl, 2, [str(testchild), *helpers, *rank], None, *options)


def _counts(job: Job, name: str) -> list[Counter[int]]:
    """For each process of a trace how often it caught each signal."""
    counts: dict[int, Counter[int]] = {}
    for one in job.caught(name):
        counts.setdefault(one.pid, Counter())[one.signum] += 1
    return list(counts.values())


@pytest.mark.parametrize("options", [("--grace", "2"), ("--grace", "600", "--preempt-signal", "TERM")])
def test_helpers_of_a_rank_that_does_not_end_are_asked_before_all_are_killed(
    options: Sequence[str], dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    preempt = ["--preempt-grace", "2"] if "--preempt-signal" in options else []
    line = _helped_line(dsl_command, testchild, tmp_path, "--signal-scope", "rank", *options, *preempt)
    with running(line, tmp_path) as job:
        job.ready(2)
        _noted(tmp_path, "helpers_ready", 4)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == (75 if preempt else 143), job.stderr()
        assert job.left() == []
        assert _counts(job, "trace") == [Counter({signal.SIGTERM: 1})] * 2
        assert _counts(job, "helpers") == [Counter({signal.SIGTERM: 1})] * 4
        of_ranks, of_helpers = job.caught(), job.caught("helpers")
    assert max(one.time_ns for one in of_ranks) < min(one.time_ns for one in of_helpers)


WRAPPER = ("/bin/sh", "-c", 'trap "echo >>$0" USR1; "$@" & program=$!; while ! wait "$program"; do :; done')
"""As `nsys profile python` and `conda run` it has the program for a child, and passes no signal on to it.

The next word is a file that has a line for each SIGUSR1."""


@pytest.mark.parametrize(
    "options, heard",
    [((), 2), (("--signal-scope", "group"), 2), (("--signal-scope", "rank"), 0)],
)
def test_a_wrapper_does_not_keep_signals_from_its_program(
    options: Sequence[str], heard: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    program = [
        "catch",
        "USR1,USR2",
        "trace",
        str(tmp_path / "trace"),
        "note",
        str(tmp_path / "ready"),
        "%r %p",
    ]
    words = [*WRAPPER, str(tmp_path / "wrappers"), str(testchild), *program, "await", "USR2", "1"]
    with running(dsl_line(dsl_command, 2, words, None, *options), tmp_path) as job:
        pids = job.ready(2).values()
        os.kill(job.guard, signal.SIGUSR1)
        until(lambda: len(complete_lines(tmp_path / "wrappers")) == 2)
        until(lambda: len(job.caught()) == heard)
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        assert job.wait() == 0, job.stderr()
        assert [one.signum for one in job.caught()].count(signal.SIGUSR1) == heard
