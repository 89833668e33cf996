"""Files for the output of single ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from dsl.errors import LogDirError
from dsl.output.folders import make_log_dir, rank_log_path

if TYPE_CHECKING:
    from pathlib import Path


def test_the_name_of_a_log_file() -> None:
    """DeepSpeed's name, which scripts look for."""
    assert rank_log_path("out/logs", "20260102030405", 12) == "out/logs/20260102030405_rank12.log"


def test_the_directory_is_made_with_its_parents_and_kept_when_there(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    make_log_dir(str(path))
    (path / "old.log").touch()
    make_log_dir(str(path))
    assert os.listdir(path) == ["old.log"]


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(LogDirError, match="should not be a file, it should be a directory"):
        make_log_dir(str(tmp_path / "f"))
    with pytest.raises(
        LogDirError, match=r"unable to create directory '.*f/sub' for each rank log: not a directory"
    ):
        make_log_dir(str(tmp_path / "f" / "sub"))


def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_args: False)
    with pytest.raises(LogDirError, match="cannot be written by this user"):
        make_log_dir(str(tmp_path))
