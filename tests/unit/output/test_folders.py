"""Files for the output of single ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dsl.errors import LogDirError, LogDirIsFileError
from dsl.output import flat_error_file
from dsl.output.folders import (
    link_latest,
    make_log_dir,
    make_run_dirs,
    remake_run_dirs,
    remove_run_dir,
    unlink_latest,
)


def test_the_directory_is_made_with_its_parents_and_kept_when_there(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    make_log_dir(str(path))
    (path / "old.log").touch()
    make_log_dir(str(path))
    assert os.listdir(path) == ["old.log"]


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(LogDirIsFileError, match="should not be a file, it should be a directory"):
        make_log_dir(str(tmp_path / "f"))
    with pytest.raises(
        LogDirIsFileError, match=r"unable to create directory '.*f/sub' for each rank log: not a directory"
    ):
        make_log_dir(str(tmp_path / "f" / "sub"))


def test_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_args: False)
    with pytest.raises(LogDirError, match="cannot be written by this user"):
        make_log_dir(str(tmp_path))


def test_the_directory_of_a_run_must_be_new(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run_dirs([str(run), str(run / "attempt_0"), str(run / "attempt_0" / "0")])
    assert (run / "attempt_0" / "0").stat().st_mode & 0o777 == 0o750
    with pytest.raises(LogDirError, match="directory of this run"):
        make_run_dirs([str(run)])


@pytest.mark.parametrize("left", ["", "deep", "deep/run"])
def test_directories_of_a_further_attempt_are_made_whatever_is_left(left: str, tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    (tmp_path / left).mkdir(parents=True, exist_ok=True)
    remake_run_dirs(str(run), [str(run / "attempt_1"), str(run / "attempt_1" / "0")])
    assert (run / "attempt_1" / "0").is_dir()


def test_the_directory_of_a_run_may_be_for_this_user_alone_also_when_it_was_deleted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run_dirs([str(run), str(run / "attempt_0")], is_private=True)
    modes = [path.stat().st_mode & 0o777 for path in (run, run / "attempt_0")]
    assert modes == [0o700, 0o750]
    shutil.rmtree(run)
    for _ in range(2):  # the second time it is still there
        remake_run_dirs(str(run), [str(run)], is_private=True)
        assert run.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "file"])
def test_the_directory_of_a_run_that_is_not_ours_any_more_is_refused(kind: str, tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "target"
    target.mkdir()
    if kind == "link":
        run.symlink_to(target)
    else:
        run.touch()
    with pytest.raises(LogDirError, match="unable to create the directory of this run"):
        remake_run_dirs(str(run), [str(run / "attempt_1")])
    assert list(target.iterdir()) == []


def grow(run: Path, *files: str) -> None:
    """Files in a run's directory, beside empty directories of two attempts."""
    for folder in ("attempt_0/0", "attempt_0/1", "attempt_2/0"):
        (run / folder).mkdir(parents=True)
    for name in files:
        (run / name).touch()


OURS = ("attempt_0/1/error.json", os.path.basename(flat_error_file("", 3, 12)))
THEIRS = ("error.txt", "attempt_0/0/stdout.log", "attempt_2_error.json", "attempt_0/my_error.json")


def test_a_run_that_has_succeeded_leaves_nothing_of_ours(tmp_path: Path) -> None:
    run = tmp_path / "run"
    grow(run, *OURS)
    remove_run_dir(str(run), succeeded=True)
    assert os.listdir(tmp_path) == []
    remove_run_dir(str(run), succeeded=True)  # nothing is there


@pytest.mark.parametrize("name", THEIRS)
def test_files_of_others_stay_after_a_success_with_their_directories(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    grow(run, *OURS, name)
    remove_run_dir(str(run), succeeded=True)
    assert [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()] == [name]
    assert not (run / "attempt_0" / "1").exists()


@pytest.mark.parametrize("name", [*OURS, *THEIRS])
def test_files_stay_after_a_failure_and_empty_directories_go(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    grow(run, name)
    remove_run_dir(str(run), succeeded=False)
    left = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
    assert left == sorted([name, *[str(path) for path in Path(name).parents if path.name]])


def test_links_in_the_directory_of_a_run_are_not_followed(tmp_path: Path) -> None:
    run, target = tmp_path / "run", tmp_path / "target"
    grow(target, *OURS)
    run.mkdir()
    (run / "attempt_0").symlink_to(target)
    (tmp_path / "link").symlink_to(target)
    for path in (run, tmp_path / "link"):
        remove_run_dir(str(path), succeeded=True)
    assert (run / "attempt_0").is_symlink()
    assert sorted(os.listdir(target)) == ["attempt_0", "attempt_2", "attempt_3_12_error.json"]


RUN = "20260102030405_77"


@pytest.mark.parametrize("target", ["", "job_20250102030405_0123abcd", "20250102030405_5_node1"])
def test_the_link_leads_to_the_newest_run(target: str, tmp_path: Path) -> None:
    if target:
        (tmp_path / ".latest").symlink_to(target)
    link_latest(f"{tmp_path}/{RUN}", ".latest")
    assert os.readlink(tmp_path / ".latest") == RUN
    assert os.listdir(tmp_path) == [".latest"]


@pytest.mark.parametrize("kind", ["file", "folder", "best", "/20260102030405_77", "../20260102030405_77"])
def test_what_has_the_name_of_the_link_and_is_not_ours_stays(kind: str, tmp_path: Path) -> None:
    latest = tmp_path / ".latest"
    if kind == "file":
        latest.write_text("mine")
    elif kind == "folder":
        latest.mkdir()
    else:
        latest.symlink_to(kind)
    before = os.lstat(latest)
    link_latest(f"{tmp_path}/{RUN}", ".latest")
    assert os.lstat(latest) == before
    assert os.listdir(tmp_path) == [".latest"]


def test_a_link_to_a_run_that_left_nothing_goes_with_it_and_no_other(tmp_path: Path) -> None:
    link_latest(f"{tmp_path}/{RUN}", ".latest")
    unlink_latest(f"{tmp_path}/20260102030405_78", ".latest")
    assert os.readlink(tmp_path / ".latest") == RUN
    unlink_latest(f"{tmp_path}/{RUN}", ".latest")
    assert os.listdir(tmp_path) == []
