"""The file of ``--save_pid``."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.support.outcome import assert_one_line

from dsl.agent.pid_file import pid_file, remove
from dsl.errors import PidFileError


def test_it_is_there_as_long_as_the_job_runs(tmp_path: Path) -> None:
    path = tmp_path / "7.deepspeed"
    with pid_file(str(path)):
        assert path.read_text() == str(os.getpid())
    assert not path.exists()


@pytest.mark.guarantee("G8")
def test_a_leftover_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "7.deepspeed"
    path.write_text("1")
    with (
        pytest.raises(PidFileError, match="File exists, remove it if it is a leftover") as caught,
        pid_file(str(path)),
    ):
        pass
    assert_one_line(str(caught.value))
    assert path.read_text() == "1"


def test_a_leftover_of_a_process_that_is_gone_is_replaced(tmp_path: Path) -> None:
    """In a container each launch has the same pid, and so the same file."""
    path = tmp_path / "1.deepspeed"
    for stale in ("4194305", str(os.getpid())):
        path.write_text(stale)
        with pid_file(str(path)):
            assert path.read_text() == str(os.getpid())
            assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "text"])
def test_what_is_no_pid_file_is_refused_and_stays(kind: str, tmp_path: Path) -> None:
    path, target = tmp_path / "7.deepspeed", tmp_path / "target"
    target.write_text("4194305")
    if kind == "link":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text("pid 5")
    with pytest.raises(PidFileError, match="File exists"), pid_file(str(path)):
        pass
    assert os.path.lexists(path)
    assert target.read_text() == "4194305"


def test_only_the_file_of_the_agent_that_was_killed_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "7.deepspeed"
    path.write_text("12")
    remove(str(path), 13)
    assert path.exists()
    remove(str(path), 12)
    assert not path.exists()
    remove(str(path), 12)


@pytest.mark.guarantee("G8")
def test_a_pid_that_cannot_be_written_is_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "7.deepspeed"
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PidFileError, match="No space left on device") as caught, pid_file(str(path)):
        pass
    assert_one_line(str(caught.value))
    assert not path.exists()
