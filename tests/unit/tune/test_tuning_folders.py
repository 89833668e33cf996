"""The files of a tuning: whole or not there, and nothing of others is ever removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsl._record import replace
from dsl.errors import AutotuningError
from dsl.machine.files import MOST_BYTES
from dsl.tune.experiment import Experiment, Result
from dsl.tune.folders import MARKER, Folders

OK = Result("ok", {"throughput": 2.0}, "", 0, 1.5)


def experiment(name: str = "z0_gas1_tmbspg1") -> Experiment:
    return Experiment(name, {"train_micro_batch_size_per_gpu": 1}, "run", "z0")


def begin(folders: Folders, one: Experiment, fingerprint: str = "f") -> None:
    config = {**one.config, "autotuning": {"metric_path": folders.written(one)}}
    exp = {"name": one.name, "ds_config": config, "fingerprint": fingerprint}
    folders.begin(one, exp, "dsl train.py 'a b'")


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
    "text", ["", "{", "null", "[]", '{"fingerprint": "f"}', '{"fingerprint": "f", "outcome": "great"}']
)
def test_a_result_that_makes_no_sense_is_no_result(folders: Folders, text: str) -> None:
    begin(folders, experiment())
    with open(f"{folders.folder(experiment())}/result.json", "w", encoding="utf-8") as file:
        file.write(text)
    assert folders.load(experiment(), "f") is None


@pytest.mark.parametrize("name", ["results", "exps"])
def test_a_folder_of_others_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("years of work")
    with pytest.raises(AutotuningError, match="holds files that no tuning has written, name another folder"):
        Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert (names(tmp_path), names(tmp_path / name)) == ([name], ["thesis.tex"])


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


def test_emptying_that_is_interrupted_leaves_no_half_of_an_experiment(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be nobody's, and its result would still count."""
    begin(folders, experiment())
    folders.save(experiment(), "f", Result("ok", {"throughput": 1.0}, "", 0, 1.0))
    folders.mark(is_finished=True)

    def interrupted(path: str) -> None:
        os.unlink(f"{path}/exp.json")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            folders.empty()
    assert folders.load(experiment(), "f") is None
    begin(folders, experiment())
    folders.empty()
    assert names(tmp_path / "results") == [MARKER]


def test_a_folder_that_an_experiment_wants_is_not_taken_from_others(folders: Folders, tmp_path: Path) -> None:
    mine = tmp_path / "results" / "z0_gas1_tmbspg1"
    mine.mkdir()
    (mine / "mine.txt").write_text("mine")
    with pytest.raises(AutotuningError, match="is not of a tuning, move it away"):
        begin(folders, experiment())
    assert names(mine) == ["mine.txt"]


def test_results_of_another_content_are_kept_when_their_name_is_wanted(
    folders: Folders, tmp_path: Path
) -> None:
    begin(folders, experiment(), "0123456789")
    folders.save(experiment(), "0123456789", OK)
    begin(folders, experiment(), "9876543210")
    folders.save(experiment(), "9876543210", replace(OK, elapsed_s=7.0))
    name = experiment().name
    assert names(tmp_path / "results") == [MARKER, name, f"{name}@01234567"]
    assert names(tmp_path / "exps") == [MARKER, f"{name}.json", f"{name}@01234567.json"]
    assert folders.load(experiment(), "9876543210") == replace(OK, elapsed_s=7.0)
    # And the other way round: what was put aside is known again.
    assert folders.load(experiment(), "0123456789") == OK
    assert names(tmp_path / "results") == [MARKER, name, f"{name}@98765432"]
    assert names(tmp_path / "exps") == [MARKER, f"{name}.json", f"{name}@98765432.json"]
    folders.empty()
    assert (names(tmp_path / "results"), names(tmp_path / "exps")) == ([MARKER], [MARKER])


def test_what_was_put_aside_comes_back_though_a_command_was_killed_between(
    folders: Folders, tmp_path: Path
) -> None:
    begin(folders, experiment(), "0123456789")
    folders.save(experiment(), "0123456789", OK)
    name = experiment().name
    (tmp_path / "results" / name).rename(tmp_path / "results" / f"{name}@01234567")
    assert folders.load(experiment(), "0123456789") == OK
    assert names(tmp_path / "results") == [MARKER, name]


def test_a_copy_of_an_experiment_is_its_owners(folders: Folders, tmp_path: Path) -> None:
    begin(folders, experiment())
    copy = tmp_path / "results" / "best-so-far"
    shutil.copytree(folders.folder(experiment()), copy)
    put(copy / "notes.md")
    put(tmp_path / "exps" / "best-so-far.json")
    put(tmp_path / "exps" / "z0_gas1_tmbspg1.json")
    folders.empty()
    assert names(tmp_path / "results") == [MARKER, "best-so-far"]
    assert names(copy) == ["cmd.txt", "ds_config.json", "exp.json", "notes.md"]
    assert names(tmp_path / "exps") == [MARKER, "best-so-far.json", "z0_gas1_tmbspg1.json"]


@pytest.mark.parametrize("where", ["results/z0_gas1_tmbspg1/exp.json", "exps/z0_gas1_tmbspg1.json"])
def test_files_of_others_are_not_written_over(folders: Folders, tmp_path: Path, where: str) -> None:
    put(tmp_path / where, '{"name": "mine"}')
    with pytest.raises(AutotuningError, match="is not of a tuning, move it away"):
        begin(folders, experiment())
    assert (tmp_path / where).read_text() == '{"name": "mine"}'
    folders.empty()
    assert (tmp_path / where).read_text() == '{"name": "mine"}'


def test_an_experiment_that_the_user_has_moved_elsewhere_is_not_touched(
    folders: Folders, tmp_path: Path
) -> None:
    begin(folders, experiment())
    (tmp_path / "results" / "z0_gas1_tmbspg1").rename(tmp_path / "elsewhere")
    (tmp_path / "results" / "z0_gas1_tmbspg1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AutotuningError, match="z0_gas1_tmbspg1 is not of a tuning, move it away"):
        begin(folders, experiment())
    assert (tmp_path / "results" / "z0_gas1_tmbspg1").is_symlink()
    assert "exp.json" in names(tmp_path / "elsewhere")


def test_what_failed_is_tried_again_after_a_tuning_in_which_nothing_ran(
    folders: Folders, tmp_path: Path
) -> None:
    one, other = experiment(), experiment("z1_gas1_tmbspg1")
    failed = Result("crash", {}, "why", 1, 2.0)
    for each in (one, other):
        begin(folders, each)
        folders.save(each, "f", failed)
    folders.mark(is_finished=True)
    folders.close()
    again = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert (again.load(one, "f"), again.load(other, "f")) == (None, None)
    again.mark(is_finished=False)
    begin(again, one)
    again.save(one, "f", failed)
    again.close()  # killed: the rest is still to be tried, and only that
    last = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert (last.load(one, "f"), last.load(other, "f")) == (failed, None)
    last.close()


def test_what_failed_is_known_after_a_tuning_that_found_a_best_config(
    folders: Folders, tmp_path: Path
) -> None:
    begin(folders, experiment())
    failed = Result("crash", {}, "why", 1, 2.0)
    folders.save(experiment(), "f", failed)
    folders.save_optimal({}, "dsl train.py")
    folders.mark(is_finished=True)
    folders.close()
    again = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert again.load(experiment(), "f") == failed
    again.close()


@pytest.mark.parametrize("results, exps", [("a/b", "a"), ("a", "a/b"), ("a", "a")])
def test_one_folder_may_lie_in_the_other_or_serve_for_both(tmp_path: Path, results: str, exps: str) -> None:
    for _ in range(2):
        folders = Folders(str(tmp_path / results), str(tmp_path / exps))
        begin(folders, experiment())
        folders.empty()
        assert names(tmp_path / "a") == [MARKER, *["b"] * (results != exps)]
        folders.close()


def test_two_tunings_do_not_share_a_folder(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(AutotuningError, match="another command is tuning in"):
        Folders(str(tmp_path / "results"), str(tmp_path / "other"))
    folders.close()
    Folders(str(tmp_path / "results"), str(tmp_path / "other")).close()


def test_whether_a_tuning_has_ended_is_kept(folders: Folders, tmp_path: Path) -> None:
    assert not folders.is_finished()
    folders.mark(is_finished=True)
    folders.close()
    again = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert again.is_finished()
    again.mark(is_finished=False)
    assert not again.is_finished()
    again.close()


@pytest.mark.parametrize(
    "text, memory",
    [
        ('{"memory": {"word": 5}}', 5),
        ('{"memory": {"word": null}}', None),
        ('{"memory": {"other": 5}}', 7),
        ('{"memory": {"word": "x"}}', 7),
        ('{"memory": 5, "failures": "x"}', 7),
        ("finished 0 word 5", 7),
        ("", 7),
        ("\0", 7),
    ],
)
def test_a_tuning_knows_its_memory_again_where_the_marker_makes_sense(
    folders: Folders, tmp_path: Path, text: str, memory: int | None
) -> None:
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
    assert folders.is_finished()


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


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "socket"])
def test_what_is_no_file_of_metrics_holds_nobody_up_and_is_named(folders: Folders, kind: str) -> None:
    begin(folders, experiment())
    written = Path(folders.written(experiment()))
    assert folders.instead(experiment()) == ""
    if kind == "pipe":
        os.mkfifo(written)
    elif kind == "link":
        written.symlink_to("/dev/zero")
    elif kind == "folder":
        written.mkdir()
    else:
        os.mknod(written, stat.S_IFSOCK | 0o600)
    assert folders.text(experiment()) is None
    assert folders.instead(experiment()) == f"a {kind} is at autotuning.metric_path"


def test_a_file_of_metrics_without_an_end_is_read_to_a_bound(folders: Folders) -> None:
    begin(folders, experiment())
    written = Path(folders.written(experiment()))
    written.touch()
    os.truncate(written, 1 << 40)
    assert len(folders.text(experiment()) or "") == MOST_BYTES
    assert folders.instead(experiment()) == ""


def test_what_became_of_an_experiment_is_kept_though_it_has_removed_its_folder(
    folders: Folders, tmp_path: Path
) -> None:
    failed = Result("no metric", {}, "why", 0, 2.0)
    begin(folders, experiment())
    shutil.rmtree(folders.folder(experiment()))
    assert folders.text(experiment()) is None
    assert folders.instead(experiment()) == "its folder is gone"
    folders.save(experiment(), "f", failed)
    assert folders.load(experiment(), "f") == failed
    begin(folders, experiment(), "another")
    folders.empty()
    assert names(tmp_path / "results") == [MARKER]


def test_an_experiment_may_clean_its_folder_before_it_writes(folders: Folders, tmp_path: Path) -> None:
    begin(folders, experiment())
    shutil.rmtree(folders.folder(experiment()))
    put(Path(folders.written(experiment())), "{}")
    assert folders.text(experiment()) == "{}"
    folders.save(experiment(), "f", OK)
    begin(folders, experiment(), "another")  # what is there is known to be of a tuning
    assert folders.load(experiment(), "f") == OK


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_has_taken_the_place_of_a_folder_costs_its_experiment_alone(
    folders: Folders, tmp_path: Path, kind: str
) -> None:
    begin(folders, experiment())
    folder = Path(folders.folder(experiment()))
    shutil.rmtree(folder)
    if kind == "file":
        folder.touch()
    else:
        folder.symlink_to(tmp_path)
    assert folders.text(experiment()) is None
    assert folders.instead(experiment()) == f"its folder is now a {kind}"
    folders.save(experiment(), "f", Result("no metric", {}, "why", 0, 2.0))
    assert folders.load(experiment(), "f") is None
    begin(folders, experiment("z1_gas1_tmbspg1"))


def test_the_home_of_the_user_can_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folders = Folders("~/results", "~/exps")
    folders.close()
    assert names(tmp_path) == ["exps", "results"]


def of_another_user(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let files look as if another user had made them."""
    real, inodes = os.fstat, [path.stat().st_ino for path in paths]

    def looks(fd: int) -> os.stat_result:
        found = real(fd)
        if found.st_ino not in inodes:
            return found
        return os.stat_result([*found[:4], found.st_uid + 7, *found[5:]])

    monkeypatch.setattr("os.fstat", looks)


@pytest.mark.parametrize("name", ["results", "exps"])
def test_a_folder_that_another_user_has_prepared_is_refused(
    folders: Folders, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results would decide which command runs."""
    folders.close()
    of_another_user(monkeypatch, tmp_path / name)
    with pytest.raises(
        AutotuningError, match=rf"{name} belongs to another user \(uid \d+\), name another folder as"
    ):
        Folders(str(tmp_path / "results"), str(tmp_path / "exps"))


def test_a_folder_that_every_user_may_write_to_is_refused(folders: Folders, tmp_path: Path) -> None:
    folders.close()
    (tmp_path / "results").chmod(0o777)
    with pytest.raises(AutotuningError, match=r"may be written by every user, take that away \(chmod o-w\)"):
        Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    (tmp_path / "results").chmod(0o775)  # what a umask of 002 makes
    Folders(str(tmp_path / "results"), str(tmp_path / "exps")).close()


def test_a_file_system_that_names_one_user_for_all_is_no_stranger(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network's that maps root to nobody, or one in user space."""
    begin(folders, experiment())
    folders.save(experiment(), "f", OK)
    folders.close()
    monkeypatch.setattr("os.geteuid", lambda: (tmp_path / "results").stat().st_uid + 7)
    again = Folders(str(tmp_path / "results"), str(tmp_path / "exps"))
    assert again.load(experiment(), "f") == OK
    assert names(tmp_path / "results") == [MARKER, experiment().name]
    again.close()


@pytest.mark.parametrize("what", ["", "result.json"])
def test_a_result_of_another_user_does_not_count(
    folders: Folders, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(folders, experiment())
    folders.save(experiment(), "f", OK)
    of_another_user(monkeypatch, Path(folders.folder(experiment()), what))
    assert folders.load(experiment(), "f") is None


@pytest.mark.parametrize("what", ["result.json", "exp.json", "metrics", "folder"])
def test_no_link_is_followed_to_a_result(folders: Folders, tmp_path: Path, what: str) -> None:
    begin(folders, experiment())
    folders.save(experiment(), "f", OK)
    folder = Path(folders.folder(experiment()))
    if what == "metrics":
        put(tmp_path / "elsewhere", "{}")
        Path(folders.written(experiment())).symlink_to(tmp_path / "elsewhere")
        assert folders.text(experiment()) is None
        return
    path = folder if what == "folder" else folder / what
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    if what == "exp.json":
        with pytest.raises(AutotuningError, match="is not of a tuning, move it away"):
            begin(folders, experiment())
    else:
        assert folders.load(experiment(), "f") is None


def test_no_link_is_followed_to_write(folders: Folders, tmp_path: Path) -> None:
    put(tmp_path / "mine")
    begin(folders, experiment())
    Path(folders.folder(experiment()), "result.json.new").symlink_to(tmp_path / "mine")
    folders.save(experiment(), "f", OK)
    assert (tmp_path / "mine").read_text() == "mine"
    assert folders.load(experiment(), "f") == OK


def test_a_pipe_where_a_file_is_written_or_read_holds_nobody_up(folders: Folders) -> None:
    begin(folders, experiment())
    for name in ("result.json.new", "stdout.log"):
        os.mkfifo(f"{folders.folder(experiment())}/{name}")
    folders.save(experiment(), "f", OK)
    assert folders.load(experiment(), "f") == OK
    assert folders.tail(experiment(), "stdout") == ""


def test_what_is_whole_or_not_there_is_so_after_a_power_cut(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is on the disk before it gets its name, and the name before anything follows from it."""
    done: list[tuple[str, str]] = []
    sync, rename, replace = os.fsync, os.rename, os.replace

    def synced(fd: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{fd}").removeprefix(f"{tmp_path}/")))
        sync(fd)

    def renamed(old: str, new: str, **where: Any) -> None:
        done.append(("rename", new))
        (replace if old.endswith(".new") else rename)(old, new, **where)

    for name, stand_in in (("fsync", synced), ("rename", renamed), ("replace", renamed)):
        monkeypatch.setattr(f"os.{name}", stand_in)
    begin(folders, experiment())
    folders.save(experiment(), "f", OK)
    folders.mark(is_finished=True)
    folder, made = f"results/{experiment().name}", f"results/.dsl-exp-new-{experiment().name}"
    whole = [(f"{made}/exp.json", made), (f"{made}/ds_config.json", made), (f"{made}/cmd.txt", made)]
    whole += [(f"exps/{experiment().name}.json", "exps")]
    expected = [
        step
        for path, around in whole
        for step in (("sync", f"{path}.new"), ("rename", Path(path).name), ("sync", around))
    ]
    assert done == [
        *expected,
        *(("rename", experiment().name), ("sync", "results")),
        *(("sync", f"{folder}/result.json.new"), ("rename", "result.json"), ("sync", folder)),
        ("sync", f"results/{MARKER}"),
    ]


def test_a_file_system_that_cannot_sync_a_folder_is_used_all_the_same(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(_fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("os.fsync", cannot)
    begin(folders, experiment())
    folders.save(experiment(), "f", OK)
    assert folders.load(experiment(), "f") == OK


def test_a_disk_that_fails_is_one_line(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    begin(folders, experiment())
    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(AutotuningError, match=r"cannot write .*/result\.json: Input/output error"):
        folders.save(experiment(), "f", OK)
    assert not any("result.json" in one for one in os.listdir(folders.folder(experiment())))
