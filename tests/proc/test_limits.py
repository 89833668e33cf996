"""Limits of the machine are looked at before anything starts; what the kernel refuses all the same is one clear line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.arena import arena
from tests.support.command import dsl_line, ran
from tests.support.jobs import Helpers, running

pytestmark = pytest.mark.engine


def _refused(line: Sequence[str], directory: Path, started: Path) -> str:
    with running(line, directory) as job:
        assert job.wait() == 1, job.stderr()
    assert not started.exists()
    assert "Traceback" not in job.stderr()
    (said,) = [text for text in job.stderr().splitlines() if "error" in text]
    return said


def test_too_few_descriptors(tmp_path: Path, helpers: Helpers) -> None:
    started = tmp_path / "started"
    line = helpers.line(400, "touch {}/started")
    said = _refused(["/bin/sh", "-c", 'ulimit -n 100 && exec "$0" "$@"', *line], tmp_path / "job", started)
    needed = re.search(r"400 workers need (\d+) open files, but the hard limit is 100: ", said)
    assert needed, said
    assert int(needed[1]) >= 400


@pytest.mark.parametrize("place", ["two", "one"])
@pytest.mark.parametrize(
    "method, limit", [("spawn", 64), pytest.param("forkserver", 94, marks=pytest.mark.needs_pidfd)]
)
def test_with_few_descriptors_workers_write_straight_to_the_console(
    method: str, limit: int, place: str, dsl_command: Path, tmp_path: Path
) -> None:
    """24 workers with a pipe each need more than so many descriptors; pidfds on their way need some as well."""
    (tmp_path / "says.py").write_text("import os\nos.write(1, b'said\\n')\nos.write(2, b'warned\\n')\n")
    options = ["--no_local_rank", "--num_gpus=24", "--start-method", method, str(tmp_path / "says.py")]
    joined = " 2>&1" if place == "one" else ""
    limited = ["/bin/sh", "-c", f'ulimit -n {limit} && exec "$0" "$@"{joined}', str(dsl_command)]
    with running([*limited, *options], tmp_path) as job:
        assert job.wait() == 0, job.stderr()
    lines = (job.stdout() + job.stderr()).splitlines()
    assert (lines.count("said"), lines.count("warned")) == (24, 24)
    rest = set(lines) - {"said", "warned"}
    assert len(rest) == 1, rest
    (told,) = rest
    needed = 24 * (2 if place == "one" else 3)
    found = re.search(rf"24 workers need (\d+) open files, but the hard limit is {limit}: .*straight", told)
    assert found, told
    assert needed < int(found[1]) <= needed + 64


def test_the_agent_has_room_for_all_descriptors_before_its_threads_start(dsl_command: Path) -> None:
    """When a process with threads needs room for more, the kernel makes it wait, some ten milliseconds each time."""
    script = "grep FDSize /proc/$PPID/status; grep 'Max open files' /proc/self/limits"
    line = dsl_line(dsl_command, 40, ["/bin/sh", "-c", script], None, "--tag-output=never")
    told = ran(["/bin/sh", "-c", 'ulimit -Sn 150 && exec "$0" "$@"', *line], check=True).stdout.splitlines()
    sizes = {int(one.split()[1]) for one in told if one.startswith("FDSize")}
    assert len(told) == 80
    assert len(sizes) == 1
    assert min(sizes) >= 40 * 5
    assert {one.split()[3] for one in told if one.startswith("Max")} == {"150"}


@pytest.mark.parametrize("options, needed", [((), r"1\d\d"), (("--log-max-size=1M",), r"2\d\d")])
def test_log_files_need_their_descriptors(
    options: Sequence[str], needed: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """A file with a limit is written in parts, which are open at the same time."""
    started = tmp_path / "started"
    line = [str(dsl_command), "--no_python", "--no_local_rank", "--num_gpus=24"]
    line += ["--log-dir", str(tmp_path / "logs"), *options]
    line += [str(testchild), "touch", str(started)]
    said = _refused(["/bin/sh", "-c", 'ulimit -n 64 && exec "$0" "$@"', *line], tmp_path / "job", started)
    assert re.search(rf"24 workers need {needed} open files, but the hard limit is 64: ", said)


def test_a_low_soft_limit_is_raised_by_itself(tmp_path: Path, helpers: Helpers) -> None:
    line = helpers.line(200, "exit 0")
    with running(["/bin/sh", "-c", 'ulimit -S -n 40 && exec "$0" "$@"', *line], tmp_path) as job:
        assert job.wait() == 0, job.stderr()


@pytest.mark.root
def test_too_few_processes_in_the_control_group(tmp_path: Path, helpers: Helpers) -> None:
    """Without the check a launch of 200 would fail half way, with workers running."""
    started = tmp_path / "started"
    with arena(60) as net:
        if net.group is None:
            pytest.skip("needs a writable cgroup v2")
        said = _refused(net.inside(helpers.line(200, "touch {}/started")), tmp_path / "job", started)
    assert "pids.max" in said
    assert re.search(r"\b2\d\d\b", said)


@pytest.mark.root
def test_the_process_limit_of_an_ordinary_user(tmp_path: Path, helpers: Helpers) -> None:
    """RLIMIT_NPROC does not bind root, so the worker is started by somebody else."""
    from tests.kit.users import as_ordinary_user

    tmp_path.chmod(0o777)
    started = tmp_path / "started"
    program = helpers.line(300, "touch {}/started")[1:]
    line = as_ordinary_user(program, tmp_path, limit=50)
    said = _refused(line, tmp_path / "job", started)
    assert re.search(r"\b3\d\d\b", said)


@pytest.mark.root
@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("command", ["dsl", "dslrun"])
@pytest.mark.parametrize("limit", range(1, 8))
def test_a_refused_fork_is_one_clear_line(
    limit: int, command: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The agent, the engine's threads and the workers are refused in turn."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = ["--tee=3"] if command == "dslrun" else []
    line = dsl_line(dsl_command.with_name(command), 2, [testchild, "exit", "0"], None, *options)
    with arena(limit) as net:
        if net.group is None:
            pytest.skip("needs a writable cgroup v2")
        with running(net.inside(line), tmp_path / "job", environ={"TMPDIR": str(temporary)}) as job:
            code = job.wait()
            said = job.stderr().splitlines()
            assert code in {0, 1}, said
            if code:
                assert "Traceback" not in job.stderr()
                assert "panicked" not in job.stderr()
                assert "internal error" not in job.stderr()
            if code == 1:
                (error,) = [line for line in said if "error" in line]
                assert error.startswith(f"{command}: error: ")
                assert "raise" in error
                assert list(temporary.iterdir()) == []
            assert job.left() == []
            assert list(Path("/sys/fs/cgroup").glob(f"**/dsl-{job.guard}-*")) == []
