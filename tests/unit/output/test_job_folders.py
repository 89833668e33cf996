"""The folders of jobs in the background, without jobs: locks, names, ages, and what is no job."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl.errors import JobFolderError
from dsl.output.job_folders import KEPT, BackgroundJob, JobFolders, OwnFolder


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[JobFolders]:
    """A folder of its own, whose jobs end with the test."""
    made = JobFolders({"XDG_STATE_HOME": str(tmp_path)}, make=True)
    yield made
    for name in os.listdir(made.path):
        release(made, name)


def found(folders: JobFolders, pid: str = "") -> BackgroundJob:
    job = folders.find(pid)
    assert job is not None
    return job


def end(folders: JobFolders, name: str, own: OwnFolder) -> None:
    """End a job as its guard does."""
    own.end(0)
    release(folders, name)


def release(folders: JobFolders, name: str) -> None:
    """Close the file that is locked, as the end of a process does."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}") == f"{folders.path}/{name}/job.json":
                os.close(int(fd))


def test_a_job_is_over_when_its_lock_is_free(folders: JobFolders) -> None:
    own = folders.begin(["dsl", "x.py"], "1-a")
    job = found(folders)
    assert (job.pid, job.is_over(), job.end()) == (os.getpid(), False, None)
    os.write(own.output, b"text")
    own.end(3)
    assert not job.is_over(), "its processes have not ended"
    release(folders, "1-a")
    assert job.is_over()
    over = job.end()
    assert over is not None
    assert over.code == 3
    assert os.read(job.open_output(), 10) == b"text"


def test_the_newest_job_that_runs_is_meant_or_else_the_newest(folders: JobFolders) -> None:
    assert folders.find() is None
    owns = [folders.begin(["dsl", name], name) for name in ("1", "2", "3")]
    assert [job.begun.words[1] for job in folders.jobs()] == ["3", "2", "1"]
    end(folders, "3", owns[2])
    assert found(folders).begun.words[1] == "2"
    assert found(folders, str(os.getpid())).begun.words[1] == "2", "a pid that was used again"
    end(folders, "2", owns[1])
    end(folders, "1", owns[0])
    assert found(folders).begun.words[1] == "3"
    assert folders.find("77") is None


def test_the_newest_that_have_ended_are_kept(folders: JobFolders) -> None:
    folders.begin(["dsl", "runs"], "runs")
    for number in range(KEPT + 5):
        end(folders, f"1-{number}", folders.begin(["dsl", str(number)], f"1-{number}"))
    folders.begin(["dsl", "last"], "last")
    names = [job.begun.words[1] for job in folders.jobs()]
    assert names == ["last", *[str(number) for number in range(KEPT + 4, 4, -1)], "runs"]
    assert len(os.listdir(folders.path)) == len(names)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"JobStart":{}}',
        b"\xff",
        b'{"JobEnd":{"code":0,"ended_ns":1}}',
        b"9" * 5_000_000,
    ],
)
def test_what_is_no_job_is_neither_listed_nor_removed(
    folders: JobFolders, tmp_path: Path, content: bytes
) -> None:
    end(folders, "1-a", folders.begin(["dsl"], "1-a"))
    begun = json.loads((tmp_path / "dsl/jobs/1-a/job.json").read_text())["JobStart"]
    strange = tmp_path / "dsl/jobs/1-b"
    strange.mkdir()
    (strange / "job.json").write_bytes(content)
    elsewhere = tmp_path / "dsl/jobs/1-c"
    elsewhere.mkdir()
    (elsewhere / "job.json").write_text(json.dumps({"JobStart": {**begun, "host": "another"}}))
    (tmp_path / "dsl/jobs/1-d").symlink_to("1-a/job.json")
    for number in range(KEPT + 2):
        end(folders, f"2-{number}", folders.begin(["dsl"], f"2-{number}"))
    assert strange.exists()
    assert elsewhere.exists()
    assert {job.begun.host for job in folders.jobs()} == {os.uname().nodename}


def test_a_folder_that_cannot_be_completed_is_removed_and_reported(folders: JobFolders) -> None:
    folders.begin(["dsl"], "1-a")
    with pytest.raises(JobFolderError, match="file exists, mend that, or set XDG_STATE_HOME"):
        folders.begin(["dsl"], "1-a")
    assert not found(folders).is_over(), "the job that has this folder is not touched"


def test_nobody_makes_the_folder_by_looking(tmp_path: Path) -> None:
    assert JobFolders({"XDG_STATE_HOME": str(tmp_path / "none")}).jobs() == []
    assert not (tmp_path / "none").exists()
