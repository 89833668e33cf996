"""`dsl-stacks` names the rank that hangs, and its line, for real gloo jobs that hang in 14 ways."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.hangs import KINDS, ODD, RANKS, WORKER, check
from tests.support.jobs import Job, running
from tests.support.memory import memory_limit
from tests.support.places import free_port

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

QUIET_NS = 5_000_000
"""Most CPU time that a rank that waits uses in a tenth of a second."""


@contextlib.contextmanager
def hanging(dsl: Path, kind: str, folder: Path) -> Iterator[Job]:
    """A job that hangs in this way, from the moment when all ranks do."""
    line = [str(dsl), "--num_gpus", str(RANKS), "--master_port", str(free_port()), "--no_local_rank"]
    line += [str(WORKER), kind, str(folder)]
    with running(line, folder, environ={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}) as job:
        files = [folder / f"ready-{rank}" for rank in range(RANKS)]
        until(lambda: all(file.exists() for file in files) or job.process.poll() is not None, 90)
        assert job.process.poll() is None, job.stderr()
        for rank, file in enumerate(files):
            until(lambda rank=rank, file=file: hangs(int(file.read_text()), kind if rank == ODD else ""))  # type: ignore[misc]
        yield job


def hangs(pid: int, kind: str) -> bool:
    """Whether a process has done nothing for a moment, has ended, or does what it will do forever."""
    if kind in ("python_loop", "c_loop", "thrash"):
        return True

    found = processes.find(pid)
    if found is None or found.state == "Z":
        return True
    try:
        begin_ns = processes.processor_ns(pid)
        time.sleep(0.1)
        return found.state in "SDT" and processes.processor_ns(pid) - begin_ns < QUIET_NS
    except FileNotFoundError:
        return True


def ask(dsl: Path, job: Job) -> tuple[str, float]:
    """What `dsl-stacks` prints, and how long that takes."""
    begin = time.monotonic()
    result = ran([dsl.with_name("dsl-stacks"), job.guard])
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout, time.monotonic() - begin


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"frozen", "thrash"}))
def test_the_rank_that_hangs_is_named_with_its_line(
    kind: str, dsl_command: Path, tmp_path: Path, temporary: Path
) -> None:
    judge(kind, dsl_command, tmp_path)


def judge(kind: str, dsl: Path, folder: Path) -> None:
    with hanging(dsl, kind, folder) as job:
        text, took_s = ask(dsl, job)
        if kind == "frozen":
            thaw(folder / "frozen")
    check(text, took_s, kind)


def thaw(folder: Path) -> None:
    """Let a frozen file system go on."""
    subprocess.run(["fsfreeze", "-u", str(folder)], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[None]:
    """A file system that lets nobody write."""
    image, folder = tmp_path / "image", tmp_path / "frozen"
    folder.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False).returncode:
        pytest.skip("needs a kernel with loop devices")
    try:
        subprocess.run(["fsfreeze", "-f", str(folder)], check=True)
        yield
    finally:
        thaw(folder)
        until(lambda: subprocess.run(["umount", str(folder)], check=False).returncode == 0)


@pytest.mark.root
def test_a_rank_that_a_file_system_holds_is_named_with_its_line(
    dsl_command: Path, tmp_path: Path, temporary: Path, frozen: None
) -> None:
    judge("frozen", dsl_command, tmp_path)


@pytest.mark.root
def test_a_rank_that_is_short_of_memory_is_named_with_its_line(
    dsl_command: Path, tmp_path: Path, temporary: Path
) -> None:
    with memory_limit(32 << 20) as within:
        if within is None:
            pytest.skip("needs a kernel with a memory controller")
        # Only the one rank moves there.
        *_, processes_of_group = within([])
        (tmp_path / "limited").write_text(processes_of_group)
        judge("thrash", dsl_command, tmp_path)
