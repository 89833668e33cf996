"""The package is removed or upgraded while a job runs: its end, its verdict and its restarts are as without that."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.jobs import Job, running

import dsl
from dsl.errors import DslError
from dsl.view.jobs import RunningJob

# Waits for the gate in its first life, and ends as it is told to.
WORKER = """
import json, os, signal, sys, time
rank, attempt = os.environ["RANK"], int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
folder, ends = sys.argv[1], sys.argv[2:]
with open(folder + "/ready", "a") as file:
    file.write(f"{rank}.{attempt} {os.getpid()}\\n")
while not os.path.exists(folder + "/gate"):
    time.sleep(0.01)
end = ends[min(attempt, len(ends) - 1)]
if rank != "0" and end != "well":
    while True:
        signal.pause()
if end == "raise":
    raise ValueError("bad batch")
if end == "record":
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "KeyError: 7", "extraInfo": {"timestamp": "9"}}}, file)
    sys.exit(4)
if end == "kill":
    os.kill(os.getpid(), 9)
if end == "code":
    sys.exit(5)
"""


def remove(package: Path) -> None:
    """As an uninstallation, or a file system that is taken away."""
    shutil.rmtree(package)


def upgrade(package: Path) -> None:
    """Other files under the same names, which do not fit to what is loaded."""
    for path in package.rglob("*.py"):
        path.unlink()
        path.write_text("raise RuntimeError('of another version')\n", encoding="utf-8")


WAYS = pytest.mark.parametrize("take", [remove, upgrade])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the installed package that the command of this test runs from."""
    folder = tmp_path / "installed"
    shutil.copytree(Path(dsl.__file__).parent, folder / "dsl")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return folder / "dsl"


def socket_of(folder: Path) -> Path:
    """The socket of the job, once it is there: then the agent holds what it may need later."""
    (path,) = until(lambda: list((folder / "dsl").glob("*.sock")))
    return path


def job_of(module: str, tmp_path: Path, options: list[str], *ends: str) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    count = ["--no_local_rank", "--num_gpus"] if module == "dsl" else ["--nproc-per-node"]
    return [sys.executable, "-m", module, *count, "2", *options, str(script), str(tmp_path), *ends]


def open_gate(job: Job, package: Path, take: Callable[[Path], None], folder: Path) -> None:
    """Let the workers go on when the package is gone."""
    job.ready(2)
    socket_of(folder)
    take(package)
    (folder / "gate").touch()


@pytest.mark.guarantee("G2", "G3")
@WAYS
@pytest.mark.parametrize("module", ["dsl", "dsl.run"])
@pytest.mark.parametrize(
    "end, code, words",
    [
        ("well", 0, ()),
        ("code", 5, ("failed first: exit code 5",)),
        ("raise", 1, ("failed first: exit code 1: ValueError: bad batch (worker.py:", "raise ValueError")),
        ("kill", 137, ("failed first: killed by SIGKILL (signal 9)",)),
    ],
)
def test_a_failure_has_its_code_and_its_verdict(
    end: str, code: int, words: tuple[str, ...], module: str, take: Callable[[Path], None], package: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    with running(
        job_of(module, tmp_path, ["--tee", "3"] if module == "dsl.run" else [], end), tmp_path
    ) as job:
        open_gate(job, package, take, tmp_path)
        assert job.wait() == code, job.stderr()
        said = job.stderr()
        for word in words:
            assert word in said
        assert "rror: " not in said.replace("ValueError: bad batch", "")


@pytest.mark.guarantee("G3")
@WAYS
def test_a_record_is_read_and_restarts_go_on(
    take: Callable[[Path], None], package: Path, tmp_path: Path
) -> None:
    options = ["--max-restarts", "2"]
    with running(job_of("dsl.run", tmp_path, options, "raise", "kill", "record"), tmp_path) as job:
        open_gate(job, package, take, tmp_path)
        assert job.wait() == 4, job.stderr()
        said = job.stderr()
        assert "restart 2 of 2" in said
        assert "KeyError: 7" in said
        assert "3 attempts have failed" in said


@WAYS
def test_a_killed_agent_is_reported(take: Callable[[Path], None], package: Path, tmp_path: Path) -> None:
    with running(job_of("dsl", tmp_path, ["--save_pid"], "well"), tmp_path) as job:
        job.ready(2)
        take(package)
        agent = job.agent()
        os.kill(agent, signal.SIGKILL)
        assert job.wait() == 137
        assert f"the agent (pid {agent}) was killed by SIGKILL: its workers were ended" in job.stderr()
        assert not Path(f"/tmp/{job.guard}.deepspeed").exists()


@WAYS
def test_an_interrupt_ends_the_job_as_ever(
    take: Callable[[Path], None], package: Path, tmp_path: Path
) -> None:
    with running(job_of("dsl", tmp_path, [], "well"), tmp_path) as job:
        job.ready(2)
        take(package)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143
        assert "SIGTERM received: stopping 2 workers" in job.stderr()


@pytest.mark.guarantee("G2")
@WAYS
@pytest.mark.parametrize("end, code", [("well", 0), ("code", 5)])
@pytest.mark.parametrize(
    "options", [[], ["--stacks-on-failure"], ["--hang-timeout", "2"], ["--metrics", "m"]]
)
def test_a_look_costs_the_look_alone(
    options: list[str], end: str, code: int, take: Callable[[Path], None], package: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with running(job_of("dsl", tmp_path, options, end), tmp_path) as job:
        job.ready(2)
        path = socket_of(tmp_path)
        take(package)
        with contextlib.suppress(OSError, DslError):
            look = RunningJob(str(path))
            with contextlib.closing(look):
                look.look("stacks")
        (tmp_path / "gate").touch()
        assert job.wait() == code, job.stderr()
        assert "internal error" not in job.stderr()
        assert options or "a file of dsl or of its Python is gone or has changed" in job.stderr()


# Waits as `socket_of`, and takes the package away.
TAKES = """
import glob, shutil, sys, time
def take(package, folder):
    while not glob.glob(folder + "/dsl/*.sock"):
        time.sleep(0.001)
    shutil.rmtree(package)
"""


@pytest.mark.guarantee("G2", "G3")
def test_a_worker_may_take_the_package_away(package: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"{TAKES}take(*sys.argv[1:])\nraise ValueError('bad batch')\n")
    command = [sys.executable, "-m", "dsl.run", "--tee", "3", "--max-restarts", "1", str(script)]
    command += [str(package), str(tmp_path)]
    with running(command, tmp_path) as job:
        assert job.wait() == 1, job.stderr()
        assert "restart 1 of 1" in job.stderr()
        assert "ValueError: bad batch" in job.stderr()
        assert "internal error" not in job.stderr()


FUNCTION = f"""{TAKES}
import os
def work(*places):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        take(*places)
        sys.exit(3)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        raise ValueError("bad batch")
    return "fine"
if __name__ == "__main__":
    from dsl.functions import ChildFailedError, launch
    try:
        print(launch(work, *sys.argv[2:], max_restarts=int(sys.argv[1])))
    except ChildFailedError as error:
        print(error.exit_code, "ValueError: bad batch" in str(error))
"""


@pytest.mark.parametrize("restarts, said", [(1, "1 True"), (2, "['fine']")])
def test_functions_are_started_again_without_the_package(
    restarts: int, said: str, package: Path, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(FUNCTION, encoding="utf-8")
    command = [sys.executable, str(script), str(restarts), str(package), str(tmp_path)]
    with running(command, tmp_path) as job:
        assert job.wait() == 0, job.stderr()
        assert job.stdout().splitlines()[-1:] == [said], job.stderr()
    assert [path.name for path in (tmp_path / "temporary").rglob("*.py")] == []
