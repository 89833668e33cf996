"""A running job cannot get what a view or an option needs: that costs the view or the option, never the job."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.arena import Arena, arena
from tests.support.command import ran
from tests.support.jobs import Job, running

LIMIT = 70

# Rank 0 makes processes until there may be no more. Then both wait for the gate, and speak for the first time.
WORKER = """
import os, sys, time
folder, end = sys.argv[1:]
pids = []
if os.environ["RANK"] == "0":
    while True:
        try:
            pids.append(os.fork())
        except OSError:
            break
        if pids[-1] == 0:
            time.sleep(600)
open(f"{folder}/full.{os.environ['RANK']}", "w").close()
while not os.path.exists(f"{folder}/gate"):
    time.sleep(0.01)
print("rank", os.environ["RANK"], "is well", flush=True)
if end == "raise" and os.environ["RANK"] == "1":
    raise ValueError("bad batch")
while end == "raise":
    time.sleep(600)
for pid in pids:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
os._exit(0)
"""

NO_THREAD = "no process or thread can be started here, raise the limit of processes"
LOOKS = (["dsl-ps"], ["dsl-stacks"], ["dsl-top", "--once"], ["dsl-attach"])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the sockets, which no other test uses."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / "dsl"


@pytest.fixture
def net() -> Iterator[Arena]:
    with arena(LIMIT) as made:
        if made.group is None:
            pytest.skip("needs a writable cgroup that limits processes")
        yield made


def line_of(dsl_command: Path, tmp_path: Path, options: Sequence[str], end: str = "well") -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    dslrun = str(dsl_command.with_name("dslrun"))
    return [dslrun, "--nproc-per-node=2", "--grace=3", *options, str(script), str(tmp_path), end]


def wait_until_full(job: Job, folder: Path) -> None:
    def is_full() -> bool:
        assert job.process.poll() is None, job.stderr()
        return all((folder / f"full.{rank}").exists() for rank in range(2))

    until(is_full)


def look(dsl_command: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return ran([dsl_command.with_name(words[0]), *words[1:]])


@pytest.mark.root
@pytest.mark.guarantee("G1", "G2", "G6")
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--metrics={}/metrics"],
        ["--hang-timeout=2"],
        ["--events={}/events"],
        ["--log-dir={}/logs"],
        ["--stacks-on-failure"],
    ],
    ids=lambda options: (options or ["nothing"])[0].partition("=")[0].strip("-"),
)
def test_looks_at_a_job_at_its_process_limit_cost_the_look_alone(
    options: list[str], net: Arena, dsl_command: Path, tmp_path: Path
) -> None:
    given = ["--tee=3", *[option.format(tmp_path) for option in options]]
    with running(net.inside(line_of(dsl_command, tmp_path, given)), tmp_path / "job") as job:
        wait_until_full(job, tmp_path)
        for words in LOOKS:
            seen = look(dsl_command, words)
            if words == ["dsl-ps"]:
                assert f"{job.guard} " in seen.stdout
                assert seen.returncode == 0
            else:
                assert seen.returncode == 1
                assert seen.stderr.count("\n") == 1
                assert f"job {job.guard} runs on, but cannot answer: {NO_THREAD}" in seen.stderr
        (tmp_path / "gate").touch()
        assert job.wait() == 0, job.stderr()
        said = job.stderr()
        assert said.count("warning") == said.count(NO_THREAD) == 1, said
        assert "internal error" not in said
        assert sorted(job.stdout().splitlines()) == [
            f"[default{rank}]:rank {rank} is well" for rank in (0, 1)
        ]
    assert not (tmp_path / "dsl").exists()


@pytest.mark.root
@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_job_at_its_process_limit_ends_as_any_other(
    signum: int, net: Arena, dsl_command: Path, tmp_path: Path
) -> None:
    """SIGKILL goes to the agent, so the guard ends what is left."""
    with running(net.inside(line_of(dsl_command, tmp_path, [])), tmp_path / "job") as job:
        wait_until_full(job, tmp_path)
        os.kill(job.agent() if signum == signal.SIGKILL else job.guard, signum)
        assert job.wait() == 128 + signum, job.stderr()
        assert job.left() == []
        assert "warning" not in job.stderr()


@pytest.mark.root
@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("options", [[], ["--stacks-on-failure"]], ids=["plain", "stacks"])
def test_a_failure_at_the_process_limit_has_its_verdict(
    options: list[str], net: Arena, dsl_command: Path, tmp_path: Path
) -> None:
    line = line_of(dsl_command, tmp_path, ["--tee=3", *options], "raise")
    with running(net.inside(line), tmp_path / "job") as job:
        wait_until_full(job, tmp_path)
        (tmp_path / "gate").touch()
        assert job.wait() == 1, job.stderr()
        said = job.stderr()
        assert "rank 1 (local rank 1, pid" in said
        assert "failed first: exit code 1: ValueError: bad batch (worker.py:" in said
        assert (NO_THREAD in said) == bool(options), said
        assert "internal error" not in said


QUIET = """
import os, sys, time
folder = sys.argv[1]
open(f"{folder}/full.{os.environ['RANK']}", "w").close()
while not os.path.exists(f"{folder}/gate"):
    time.sleep(0.01)
if sys.argv[2] == "raise":
    raise ValueError("bad batch")
"""


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WORKER", QUIET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.guarantee("G1", "G2", "G3")
@pytest.mark.parametrize("end", ["well", "raise", "SIGTERM"])
@pytest.mark.parametrize(
    "options",
    [[], ["--metrics={}/metrics"], ["--hang-timeout=2"], ["--events={}/events"], ["--stacks-on-failure"]],
    ids=lambda options: (options or ["nothing"])[0].partition("=")[0].strip("-"),
)
def test_looks_at_a_job_that_can_open_no_file_cost_the_look_alone(
    options: list[str], end: str, dsl_command: Path, tmp_path: Path
) -> None:
    given = ["--tee=3", *[option.format(tmp_path) for option in options]]
    with running(line_of(dsl_command, tmp_path, given, end), tmp_path / "job") as job:
        wait_until_full(job, tmp_path)
        agent = job.agent()
        until(lambda: list((tmp_path / "dsl").glob("*.sock")))
        for pid in (agent, job.guard):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
        seen = look(dsl_command, ["dsl-ps"])
        assert "no answer" in seen.stdout
        until(lambda: "gets no answer: too many files are open" in job.stderr())
        assert job.process.poll() is None, job.stderr()
        if end == "SIGTERM":
            os.kill(job.guard, signal.SIGTERM)
        (tmp_path / "gate").touch()
        assert job.wait() == {"well": 0, "raise": 1, "SIGTERM": 143}[end], job.stderr()
        assert "internal error" not in job.stderr()
        assert job.left() == []
