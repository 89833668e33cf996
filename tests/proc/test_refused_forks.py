"""A machine that lets us make no more processes or threads: one clear line, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kit.users import as_ordinary_user
from tests.support.arena import arena
from tests.support.command import dsl_line
from tests.support.jobs import Job, running

pytestmark = [pytest.mark.engine, pytest.mark.root]


def _cgroups(job: Job) -> list[str]:
    """Cgroups that a command has left behind."""
    return [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/dsl-{job.guard}-*")]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("command", ["dsl", "dslrun"])
@pytest.mark.parametrize("limit", range(1, 8))
def test_a_refused_fork_is_one_clear_line(
    limit: int, command: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The agent, the engine's threads and the workers are refused in turn."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    line = dsl_line(dsl_command, 2, [str(testchild), "exit", "0"])
    if command == "dslrun":
        own = ["--no-python", "--nproc-per-node=2", "--tee=3"]
        line = [str(dsl_command.with_name("dslrun")), *own, str(testchild), "exit", "0"]
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
            assert _cgroups(job) == []


@pytest.mark.guarantee("G8")
def test_the_process_limit_of_an_ordinary_user_is_one_clear_line(testchild: Path, tmp_path: Path) -> None:
    options = ["--no_python", "--no_local_rank", "--num_gpus", "1"]
    line = as_ordinary_user([*options, str(testchild), "exit", "0"], tmp_path, limit=1)
    with running(line, tmp_path / "job") as job:
        assert job.wait() == 1, job.stderr()
        (said,) = job.stderr().splitlines()
        assert said.startswith("dsl: error: ")
        assert "raise" in said
        assert _cgroups(job) == []
