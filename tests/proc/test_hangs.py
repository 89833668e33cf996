"""`dsl-stacks` names the rank that hangs, and its line, for real gloo jobs that hang in 14 ways."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kit import processes
from kit.waiting import until
from tests.support.jobs import Job, running
from tests.support.memory import memory_limit
from tests.support.places import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]

WORKER = Path(__file__).resolve().parent.parent / "workers" / "hangs.py"
ODD, RANKS = 2, 4
ANSWER_S = 5.0
QUIET_NS = 5_000_000
"""Most CPU time that a rank that waits uses in a tenth of a second."""
CGROUPS = Path("/sys/fs/cgroup")

# What is told of the odd rank before its line, and of the others.
KINDS = {
    "skip": "waits in barrier",
    "order": "waits in broadcast",
    "loader": r"waits for its data loader \(hangs.py:\d+\); its child pt_data_worker \(pid \d+\) is in read\(\) of pipe",
    "lock": "waits for a lock",
    "deadlock": "waits for a lock",
    "python_loop": r"computes in python_loop\(\)",
    "c_loop": r"computes in c_loop\(\)",
    "stopped": r"is stopped by a signal",
    "frozen": r"is in open\(\) of \S+/checkpoint, stuck in state D",
    "stdin": "waits for input on stdin",
    "store": r"waits in init_process_group, store 127\.0\.0\.1:1 ",
    "ended": "has ended",
    "thrash": "is short of memory",
    "handler": r"is in its handler of SIGUSR1, in read\(\) of pipe",
}


def line_of(mark: str) -> int:
    """Number of the line of the worker program that ends with this comment."""
    (number,) = [
        at for at, line in enumerate(WORKER.read_text().splitlines(), 1) if line.endswith(f"  # {mark}")
    ]
    return number


@contextlib.contextmanager
def hanging(dsl: Path, kind: str, folder: Path, environ: Mapping[str, str]) -> Iterator[Job]:
    """A job that hangs in this way, from the moment when all ranks do."""
    line = [str(dsl), "--num_gpus", str(RANKS), "--master_port", str(free_port()), "--no_local_rank"]
    line += [str(WORKER), kind, str(folder)]
    environ = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environ}
    with running(line, folder, environ=environ) as job:
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
    begin_ns = processes.processor_ns(pid)
    time.sleep(0.1)
    return found.state in "SDT" and processes.processor_ns(pid) - begin_ns < QUIET_NS


def ask(dsl: Path, job: Job, *options: str) -> tuple[str, float]:
    """What `dsl-stacks` prints, and how long that takes."""
    begin = time.monotonic()
    result = subprocess.run(
        [str(dsl.with_name("dsl-stacks")), str(job.guard), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return result.stdout, time.monotonic() - begin


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"frozen", "thrash"}))
def test_the_rank_that_hangs_is_named_with_its_line(
    kind: str, dsl_command: Path, tmp_path: Path, temporary: Path
) -> None:
    judge(kind, dsl_command, tmp_path, {})


def judge(kind: str, dsl: Path, folder: Path, environ: Mapping[str, str]) -> None:
    with hanging(dsl, kind, folder / "job", environ) as job:
        text, took_s = ask(dsl, job)
        if "FROZEN" in environ:
            thaw(Path(environ["FROZEN"]))
    first = text.splitlines()[0]
    print(f"{kind}: {took_s:.2f} s: {first}")
    assert took_s < ANSWER_S
    assert re.search(rf"\brank {ODD} {KINDS[kind]}", first), text
    if kind != "ended":
        # A loop is at its head or in its body.
        assert re.search(
            rf"hangs\.py:({line_of(kind)}|{line_of(kind) + (kind == 'python_loop')})\b", first
        ), text
    if kind == "deadlock":
        assert f'its thread "second" waits for a lock (hangs.py:{line_of("the second thread")})' in first, (
            text
        )
    if kind == "loader":
        assert f"hangs.py:{line_of('in the worker of the data loader')}" in first, text
    if kind in ("store", "ended"):
        line = line_of("others of store and ended")
        assert re.match(
            rf"3 of {RANKS} ranks wait in init_process_group, store \S+:\d+ \(hangs.py:{line}\)", first
        ), text
    else:
        assert f"3 of {RANKS} ranks wait in all_reduce (hangs.py:{line_of('others')})" in first, text


def thaw(folder: Path) -> None:
    """Let a frozen file system go on."""
    subprocess.run(["fsfreeze", "-u", str(folder)], check=False, stderr=subprocess.DEVNULL)


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
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
        yield folder
    finally:
        thaw(folder)
        until(lambda: subprocess.run(["umount", str(folder)], check=False).returncode == 0)


@pytest.mark.root
def test_a_rank_that_a_file_system_holds_is_named_with_its_line(
    dsl_command: Path, tmp_path: Path, temporary: Path, frozen: Path
) -> None:
    judge("frozen", dsl_command, tmp_path, {"FROZEN": str(frozen)})


@pytest.mark.root
def test_a_rank_that_is_short_of_memory_is_named_with_its_line(
    dsl_command: Path, tmp_path: Path, temporary: Path
) -> None:
    with memory_limit(32 << 20) as within:
        if within is None:
            pytest.skip("needs a kernel with a memory controller")
        # Only the one rank moves there.
        *_, processes_of_group = within([])
        judge("thrash", dsl_command, tmp_path, {"LIMITED": processes_of_group})
