"""A worker that cannot be executed: which step, which errno, which path, and what the command makes of it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.command import dsl_line
from tests.support.group import Group
from tests.support.jobs import running

from dsl import Started, WorkerSpec

pytestmark = [pytest.mark.engine, pytest.mark.guarantee("G2", "G3")]


def _missing(directory: Path) -> str:
    return str(directory / "nothing-here")


def _not_executable(directory: Path) -> str:
    path = directory / "plain"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o644)
    return str(path)


def _no_format(directory: Path) -> str:
    path = directory / "no-format"
    path.write_bytes(b"\x01\x02\x03 not a program\n")
    path.chmod(0o755)
    return str(path)


def _no_interpreter(directory: Path) -> str:
    path = directory / "no-interpreter"
    path.write_text("#!/nothing/here\n")
    path.chmod(0o755)
    return str(path)


def _directory(directory: Path) -> str:
    return str(directory)


def _through_a_file(directory: Path) -> str:
    (directory / "file").touch()
    return str(directory / "file" / "program")


ROWS: list[tuple[Callable[[Path], str], int, int]] = [
    (_missing, errno.ENOENT, 127),
    (_no_interpreter, errno.ENOENT, 127),
    (_not_executable, errno.EACCES, 126),
    (_directory, errno.EACCES, 126),
    (_no_format, errno.ENOEXEC, 126),
    (_through_a_file, errno.ENOTDIR, 127),
]


@pytest.mark.parametrize("make, number, status", ROWS, ids=[row[0].__name__.strip("_") for row in ROWS])
def test_the_engine_names_step_errno_and_path(
    make: Callable[[Path], str], number: int, status: int, testchild: Path, tmp_path: Path
) -> None:
    program = make(tmp_path)
    with Group([[str(testchild), "pause"], [program]]) as group:
        ended = group.finish()
    failure = ended.first_failure
    assert failure is not None
    assert (failure.worker, failure.pid, failure.code, failure.signal) == (1, 0, None, None)
    assert (failure.exec_stage, failure.exec_errno, failure.exec_path) == ("exec", number, program)
    assert (failure.status, failure.started_ns) == (status, 0)
    assert 1 not in {event.worker for event in group.of(Started)}
    assert group.exits()[0].caused_by_stop


def test_arguments_too_long_for_the_kernel(testchild: Path) -> None:
    with Group([[str(testchild), "x" * (1 << 18)]]) as group:
        ended = group.finish()
    assert ended.first_failure is not None
    assert (ended.first_failure.exec_errno, ended.first_failure.status) == (errno.E2BIG, 126)


def test_a_name_without_a_slash_is_looked_up_on_the_path_of_the_worker(
    testchild: Path, tmp_path: Path
) -> None:
    """The worker's PATH counts, not ours; a file there that is not executable is passed over."""
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    (first / "tool").write_text("not executable")
    (second / "tool").symlink_to(testchild)
    found = WorkerSpec(["tool", "exit", "5"], env={"PATH": f"{first}:{second}"})
    with Group([found]) as group:
        assert group.finish().first_failure.code == 5  # type: ignore[union-attr]
    for path, number, status in ((str(first), errno.EACCES, 126), ("", errno.ENOENT, 127)):
        with Group([WorkerSpec(["tool"], env={"PATH": path})]) as group:
            failure = group.finish().first_failure
        assert failure is not None
        assert (failure.exec_errno, failure.status) == (number, status)


@pytest.mark.parametrize("kind, number", [("missing", errno.ENOENT), ("file", errno.ENOTDIR)])
def test_a_working_directory_that_is_none(kind: str, number: int, testchild: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cwd = tmp_path / kind
    with Group([WorkerSpec([str(testchild)], cwd=cwd)]) as group:
        failure = group.finish().first_failure
    assert failure is not None
    assert (failure.exec_stage, failure.exec_errno, failure.exec_path) == ("chdir", number, str(cwd))


@pytest.mark.parametrize("make, number, status", ROWS, ids=[row[0].__name__.strip("_") for row in ROWS])
def test_the_command_ends_with_the_code_of_a_shell_and_names_the_path(
    make: Callable[[Path], str], number: int, status: int, dsl_command: Path, tmp_path: Path
) -> None:
    del number
    program = make(tmp_path)
    with running(dsl_line(dsl_command, 3, [program]), tmp_path / "job") as job:
        code = job.wait()
    assert (code, job.stdout()) == (status, "")
    assert program in job.stderr()
    assert "Traceback" not in job.stderr()
