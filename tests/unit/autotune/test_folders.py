"""The files of a tuning: whole or not there, and nothing of others is ever removed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dsl.autotune.experiment import Experiment, Result
from dsl.autotune.files import MARKER, MOST_CHARACTERS
from dsl.autotune.folders import Folders
from dsl.errors import AutotuningError

if TYPE_CHECKING:
    from collections.abc import Iterator

OK = Result("ok", {"throughput": 2.0}, "", 0, 1.5)


def experiment(name: str = "z0_gas1_tmbspg1") -> Experiment:
    return Experiment(name, {"train_micro_batch_size_per_gpu": 1}, "run", "z0")


def begin(folders: Folders, one: Experiment, fingerprint: str = "f") -> None:
    config = {**one.config, "autotuning": {"metric_path": folders.written(one)}}
    description = {"name": one.name, "ds_config": config}
    folders.begin(one, description, {**description, "fingerprint": fingerprint}, "dsl train.py 'a b'")


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    made = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    yield made
    made.close()


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def put(path: Path, text: str = "mine") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_an_experiment_has_the_files_of_the_contract(folders: Folders, tmp_path: Path) -> None:
    begin(folders, experiment())
    folder = tmp_path / "results" / "z0_gas1_tmbspg1"
    assert names(folder) == ["cmd.txt", "ds_config.json", "exp.json"]
    config = json.loads((folder / "ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert (folder / "cmd.txt").read_text() == "dsl train.py 'a b'\n"
    description = json.loads((tmp_path / "exps" / "z0_gas1_tmbspg1.json").read_text())
    assert description["name"] == "z0_gas1_tmbspg1"


def test_a_result_is_known_again_by_its_content(folders: Folders) -> None:
    begin(folders, experiment())
    assert folders.load(experiment(), "f") is None
    folders.save(experiment(), "f", OK)
    assert folders.load(experiment(), "f") == OK
    assert folders.load(experiment(), "g") is None


@pytest.mark.parametrize("outcome", ["oom", "crash", "timeout", "no metric", "torn metric"])
def test_a_failure_is_known_again_too(folders: Folders, outcome: Any) -> None:
    begin(folders, experiment())
    failed = Result(outcome, {}, "why", 1, 2.0)
    folders.save(experiment(), "f", failed)
    assert folders.load(experiment(), "f") == failed


def test_an_experiment_that_was_stopped_is_not_known(folders: Folders) -> None:
    begin(folders, experiment())
    folders.save(experiment(), "f", Result("stopped", {}, "it was stopped", 143, 2.0))
    assert folders.load(experiment(), "f") is None


def test_what_a_run_has_left_counts_only_where_its_end_is_not_known(folders: Folders) -> None:
    begin(folders, experiment())
    assert folders.left(experiment(), "f") is None
    put(Path(folders.written(experiment())), "{}")
    assert folders.left(experiment(), "g") is None
    assert folders.left(experiment(), "f") == "{}"
    folders.save(experiment(), "f", Result("crash", {}, "why", 1, 2.0))
    assert folders.left(experiment(), "f") is None


def test_what_is_left_of_a_command_is_no_result_of_the_next(folders: Folders, tmp_path: Path) -> None:
    begin(folders, experiment())
    late = Path(folders.written(experiment()))
    folders.close()
    again = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    begin(again, experiment())
    put(late, "{}")
    assert again.text(experiment()) is None
    put(Path(again.written(experiment())), "[]")
    assert again.text(experiment()) == "[]"
    assert (Path(again.folder(experiment())) / "metrics.json").read_text() == "[]"
    again.close()


@pytest.mark.parametrize(
    "text, memory",
    [
        ("finished 0 word 5", 5),
        ("finished 0 word", None),
        ("finished 0 other 5", 7),
        ("finished 0 word 5x", 7),
        ("finished 0", 7),
        ("finished", 7),
        ("", 7),
        ("\0", 7),
    ],
)
def test_a_tuning_knows_its_memory_again_where_the_marker_makes_sense(
    folders: Folders, tmp_path: Path, text: str, memory: int | None
) -> None:
    folders.save_optimal({}, "dsl train.py")
    folders.close()
    (tmp_path / "results" / MARKER).write_text(text)
    again = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert again.keep_memory("word", 7) == memory
    again.close()


def test_a_full_disk_keeps_what_stood_in_the_marker(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folders.mark(is_finished=True)
    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(AutotuningError, match=r"cannot write .*results/\.dsl-autotuning: No space left"):
        folders.mark(is_finished=False)
    assert (tmp_path / "results" / MARKER).read_text() == "finished 0\n"


def test_a_pipe_in_place_of_the_marker_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    os.mkfifo(tmp_path / "results" / MARKER)
    with pytest.raises(
        AutotuningError, match=r"cannot write .*results: it holds a \.dsl-autotuning that is no file"
    ):
        Folders(str(tmp_path / "results"), str(tmp_path / "exps"))


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AutotuningError, match=r"cannot write .*file/results"):
        Folders(str(tmp_path / "file" / "results"), str(tmp_path / "exps"))


def test_a_working_directory_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(AutotuningError, match=r"^cannot write results: No such file or directory"):
        Folders("results", "exps")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_what_is_no_file_of_metrics_holds_nobody_up(folders: Folders, kind: str) -> None:
    begin(folders, experiment())
    written = Path(folders.written(experiment()))
    if kind == "pipe":
        os.mkfifo(written)
    elif kind == "device":
        written.symlink_to("/dev/zero")
    elif kind == "folder":
        written.mkdir()
    else:
        written.touch()
        os.truncate(written, 1 << 40)
    text = folders.text(experiment())
    assert text is None or len(text) == MOST_CHARACTERS


def test_the_home_of_the_user_can_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = Folders("~/results", "~/exps")
    folders.close()
    assert names(tmp_path) == ["exps", "results"]
