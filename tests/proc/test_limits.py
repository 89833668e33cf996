"""Limits of the machine are looked at before anything starts, and named with the number needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.arena import arena
from tests.support.command import dsl_line
from tests.support.jobs import running

pytestmark = pytest.mark.engine


def _refused(line: Sequence[str], directory: Path, started: Path) -> str:
    with running(line, directory) as job:
        assert job.wait() == 1, job.stderr()
    assert not started.exists()
    assert "Traceback" not in job.stderr()
    (said,) = [text for text in job.stderr().splitlines() if "error" in text]
    return said


def test_too_few_descriptors(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    line = dsl_line(dsl_command, 400, [str(testchild), "touch", str(started)])
    said = _refused(["/bin/sh", "-c", 'ulimit -n 100 && exec "$0" "$@"', *line], tmp_path / "job", started)
    needed = re.search(r"400 workers need (\d+) open files, but the hard limit is 100: ", said)
    assert needed, said
    assert int(needed[1]) >= 400


@pytest.mark.parametrize("place", ["two", "one"])
@pytest.mark.parametrize(
    "method, limit", [("spawn", 64), pytest.param("forkserver", 84, marks=pytest.mark.needs_pidfd)]
)
def test_with_few_descriptors_workers_write_straight_to_the_console(
    method: str, limit: int, place: str, dsl_command: Path, tmp_path: Path
) -> None:
    """24 workers with a pipe each need more than so many descriptors."""
    (tmp_path / "says.py").write_text("import os\nos.write(1, b'said\\n')\nos.write(2, b'warned\\n')\n")
    options = ["--no_local_rank", "--num_gpus=24", "--start-method", method, str(tmp_path / "says.py")]
    joined = " 2>&1" if place == "one" else ""
    limited = ["/bin/sh", "-c", f'ulimit -n {limit} && exec "$0" "$@"{joined}', str(dsl_command)]
    with running([*limited, *options], tmp_path) as job:
        assert job.wait() == 0, job.stderr()
    lines = (job.stdout() + job.stderr()).splitlines()
    assert (lines.count("said"), lines.count("warned")) == (24, 24)
    (told,) = set(lines) - {"said", "warned"}
    needed = 24 * (2 if place == "one" else 3)
    found = re.search(rf"24 workers need (\d+) open files, but the hard limit is {limit}: .*straight", told)
    assert found, told
    assert needed < int(found[1]) <= needed + 64


def test_log_files_need_their_descriptors(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    started = tmp_path / "started"
    line = [
        str(dsl_command),
        "--no_python",
        "--no_local_rank",
        "--num_gpus=24",
        "--log-dir",
        str(tmp_path / "logs"),
    ]
    line += [str(testchild), "touch", str(started)]
    said = _refused(["/bin/sh", "-c", 'ulimit -n 64 && exec "$0" "$@"', *line], tmp_path / "job", started)
    assert re.search(r"24 workers need 1\d\d open files, but the hard limit is 64: ", said)


def test_a_low_soft_limit_is_raised_by_itself(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    line = dsl_line(dsl_command, 200, [str(testchild), "exit", "0"])
    with running(["/bin/sh", "-c", 'ulimit -S -n 40 && exec "$0" "$@"', *line], tmp_path) as job:
        assert job.wait() == 0, job.stderr()


@pytest.mark.root
def test_too_few_processes_in_the_control_group(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """Without the check a launch of 200 would fail half way, with workers running."""
    started = tmp_path / "started"
    with arena(60) as net:
        if net.group is None:
            pytest.skip("needs a writable cgroup v2")
        line = dsl_line(dsl_command, 200, [str(testchild), "touch", str(started)])
        said = _refused(net.inside(line), tmp_path / "job", started)
    assert "pids.max" in said
    assert re.search(r"\b2\d\d\b", said)


@pytest.mark.root
def test_the_process_limit_of_an_ordinary_user(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """RLIMIT_NPROC does not bind root, so the worker is started by somebody else."""
    from tests.kit.users import as_ordinary_user

    tmp_path.chmod(0o777)
    started = tmp_path / "started"
    program = dsl_line(dsl_command, 300, [str(testchild), "touch", str(started)])[1:]
    line = as_ordinary_user(program, tmp_path, limit=50)
    said = _refused(line, tmp_path / "job", started)
    assert re.search(r"\b3\d\d\b", said)
