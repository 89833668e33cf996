"""The files of a tuning: whole or not there, and nothing of others is ever removed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dsl.autotune.experiment import Experiment, Result
from dsl.autotune.folders import MARKER, Folders
from dsl.errors import AutotuningError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OK = Result("ok", {"throughput": 2.0}, "", 0, 1.5)


def experiment(name: str = "z0_gas1_tmbspg1") -> Experiment:
    return Experiment(name, {"train_micro_batch_size_per_gpu": 1}, "run", "z0")


def begin(folders: Folders, one: Experiment, fingerprint: str = "f") -> None:
    description = {"name": one.name, "ds_config": dict(one.config)}
    folders.begin(one, description, {**description, "fingerprint": fingerprint}, "dsl train.py 'a b'")


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    made = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    yield made
    made.close()


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir())


def test_an_experiment_has_the_files_of_the_contract(folders: Folders, tmp_path: Path) -> None:
    begin(folders, experiment())
    folder = tmp_path / "results" / "z0_gas1_tmbspg1"
    assert names(folder) == ["cmd.txt", "ds_config.json", "exp.json"]
    assert json.loads((folder / "ds_config.json").read_text()) == {"train_micro_batch_size_per_gpu": 1}
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
    assert folders.began(experiment(), "f")
    assert not folders.began(experiment(), "g")


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", '{"fingerprint": "f"}', '{"fingerprint": "f", "outcome": "great"}']
)
def test_a_result_that_makes_no_sense_is_no_result(folders: Folders, text: str) -> None:
    begin(folders, experiment())
    with open(f"{folders.folder(experiment())}/result.json", "w", encoding="utf-8") as file:
        file.write(text)
    assert folders.load(experiment(), "f") is None


def test_a_new_run_never_sees_the_metrics_of_an_earlier_one(folders: Folders) -> None:
    begin(folders, experiment())
    with open(folders.written(experiment()), "w", encoding="utf-8") as file:
        file.write("{}")
    assert folders.text(experiment()) == "{}"
    begin(folders, experiment(), "g")
    assert folders.text(experiment()) is None


@pytest.mark.parametrize("name", ["results", "exps"])
def test_a_folder_of_others_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("years of work")
    with pytest.raises(AutotuningError, match="holds files that no tuning has written, name another folder"):
        Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert names(tmp_path / name) == ["thesis.tex"]


def test_emptying_removes_what_tunings_wrote_and_nothing_else(folders: Folders, tmp_path: Path) -> None:
    begin(folders, experiment())
    folders.save_optimal({}, "dsl train.py")
    results = tmp_path / "results"
    (results / "notes.md").write_text("mine")
    (results / "plots").mkdir()
    (results / "plots" / "a.png").write_text("mine")
    (tmp_path / "exps" / "mine.json").write_text("mine")
    (results / "link").symlink_to(tmp_path / "exps")
    folders.empty()
    assert names(results) == [MARKER, "link", "notes.md", "plots"]
    assert names(tmp_path / "exps") == [MARKER, "mine.json"]


def test_a_folder_that_an_experiment_wants_is_not_taken_from_others(folders: Folders, tmp_path: Path) -> None:
    mine = tmp_path / "results" / "z0_gas1_tmbspg1"
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    with pytest.raises(AutotuningError, match="is not of a tuning, move it away"):
        begin(folders, experiment())
    assert names(mine) == ["mine.txt"]


def test_two_tunings_do_not_share_a_folder(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(AutotuningError, match="another command is tuning in"):
        Folders(str(tmp_path / "results"), str(tmp_path / "other"))
    folders.close()
    Folders(str(tmp_path / "results"), str(tmp_path / "other")).close()


def test_one_folder_can_serve_for_both(tmp_path: Path) -> None:
    folders = Folders(str(tmp_path / "both"), str(tmp_path / "both"))
    begin(folders, experiment())
    folders.empty()
    assert names(tmp_path / "both") == [MARKER]
    folders.close()


def test_whether_a_tuning_has_ended_is_kept(folders: Folders, tmp_path: Path) -> None:
    assert not folders.is_finished()
    folders.mark(is_finished=True)
    folders.close()
    again = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert again.is_finished()
    again.mark(is_finished=False)
    assert not again.is_finished()
    again.close()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AutotuningError, match=r"cannot write .*file/results"):
        Folders(str(tmp_path / "file" / "results"), str(tmp_path / "exps"))
