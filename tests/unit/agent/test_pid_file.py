"""The file of ``--save_pid``."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from tests.support.outcome import assert_one_line

from dsl.agent.pid_file import PidFile
from dsl.errors import PidFileError

if TYPE_CHECKING:
    from pathlib import Path


def test_it_is_there_as_long_as_the_job_runs(tmp_path: Path) -> None:
    path = tmp_path / "7.deepspeed"
    with PidFile(str(path)):
        assert path.read_text() == str(os.getpid())
    assert not path.exists()


def test_a_leftover_is_refused_and_stays(tmp_path: Path) -> None:
    """G8."""
    path = tmp_path / "7.deepspeed"
    path.write_text("1")
    with (
        pytest.raises(PidFileError, match="File exists, remove it if it is a leftover") as caught,
        PidFile(str(path)),
    ):
        pass
    assert_one_line(str(caught.value))
    assert path.read_text() == "1"


def test_a_pid_that_cannot_be_written_is_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G8."""

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "7.deepspeed"
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(PidFileError, match="No space left on device") as caught, PidFile(str(path)):
        pass
    assert_one_line(str(caught.value))
    assert not path.exists()
