"""What a tuning tells where there is no terminal, and what it leaves behind."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.summaries import make_summary, make_trial

from dsl.errors import AutotuningError
from dsl.machine.folders import Folder
from dsl.tune.config import Section
from dsl.tune.experiment import Resources
from dsl.tune.show import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from dsl.tune.experiment import Trial

SIZE = Resources(1, 2, 1, None)


class Told:
    """A progress without a terminal, and what it has said."""

    def __init__(self, folder: Path, **section: Any) -> None:
        self.lines: list[str] = []
        self.progress = Progress(
            lambda notice: self.lines.append(notice.line),
            Section(**section),
            Folder(str(folder), AutotuningError),
            SIZE,
            is_quiet=True,
        )

    def run(self, *trials: Trial, is_reused: bool = False) -> list[str]:
        for one in trials:
            self.progress.began(one.experiment)
            self.progress.ended(one.experiment, one.result, is_reused=is_reused)
        return self.lines


def test_a_line_for_each_experiment_with_the_best_so_far(tmp_path: Path) -> None:
    lines = Told(tmp_path).run(
        make_trial("profile_model_info", 1.0, kind="profile", config={}, space=""),
        make_trial("z0_gas1_tmbspg1", 5.0),
        make_trial("z0_gas1_tmbspg2", 4.0),
        make_trial("z0_gas1_tmbspg4", 6.0),
        make_trial("z0_gas1_tmbspg8"),
    )
    assert lines == [
        "profile_model_info: done",
        "z0_gas1_tmbspg1: throughput 5, the best so far",
        "z0_gas1_tmbspg2: throughput 4",
        "z0_gas1_tmbspg4: throughput 6, the best so far",
        "z0_gas1_tmbspg8: oom, out of memory",
    ]


def test_latency_is_best_where_it_is_least_and_flops_have_two_names(tmp_path: Path) -> None:
    trials = [make_trial(f"z0_gas1_tmbspg{n}", value, metric="latency") for n, value in ((1, 5.0), (2, 4.0))]
    assert (
        Told(tmp_path, metric="latency", mode="min").run(*trials)[-1].endswith("latency 4, the best so far")
    )
    trial = make_trial("z0_gas1_tmbspg1", 5.0, metric="FLOPS_per_gpu")
    assert Told(tmp_path, metric="FLOPS").run(trial)[-1].endswith("FLOPS 5, the best so far")


def test_what_an_experiment_says_is_harmless_and_a_reused_one_is_named(tmp_path: Path) -> None:
    trial = make_trial("z0_gas1_tmbspg1")
    told = Told(tmp_path)
    from dsl._record import replace

    (line,) = told.run(replace(trial, result=replace(trial.result, reason="no\x1b[2Jway")), is_reused=True)
    assert line == "z0_gas1_tmbspg1: oom, noway, known from before: remove its folder to run it again"


@pytest.mark.needs_package("matplotlib")
def test_what_is_left_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials = [make_trial("z0_gas1_tmbspg1", 5.0), make_trial("z0_gas1_tmbspg2", 4.0)]
    told = Told(tmp_path)
    told.run(trials[0], is_reused=True)
    told.run(trials[1])
    told.progress.finish(make_summary(trials, notes=("stage 3 is left out",)))
    text = (tmp_path / "summary.txt").read_text()
    assert capsys.readouterr().out == text.partition("\n\n")[0] + "\n"
    found = json.loads((tmp_path / "summary.json").read_text())
    assert [one["is_reused"] for one in found["trials"]] == [True, False]
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["summary.json", "summary.png", "summary.txt"]
    assert told.lines[-3:] == [
        "stage 3 is left out",
        "all stages are tried",
        f"summary.txt, summary.json, summary.png in {tmp_path}",
    ]


def test_a_closed_stdout_costs_nothing_but_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path)
    monkeypatch.setattr("sys.stdout", None)  # as Python has it where it was closed before the start
    told.progress.finish(make_summary([make_trial("z0_gas1_tmbspg1", 5.0)]))
    assert (tmp_path / "summary.txt").exists()


def test_without_matplotlib_a_line_says_so_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = Told(tmp_path)
    assert told.lines == [
        "warning: matplotlib is not installed, so there will be no plot: pip install matplotlib"
    ]
    told.progress.finish(make_summary([]))
    assert told.lines[1:] == ["all stages are tried", f"summary.txt, summary.json in {tmp_path}"]


def test_what_cannot_be_written_is_said_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_picture: object) -> bytes:
        raise RuntimeError("no fonts")

    monkeypatch.setattr("dsl.tune.show.draw", broken)
    (tmp_path / "summary.json.new").mkdir()
    told = Told(tmp_path)
    told.progress.finish(make_summary([]))
    assert told.lines[1:] == [
        f"warning: cannot write {tmp_path}/summary.json: Is a directory",
        f"warning: {tmp_path}/summary.png was not made: RuntimeError: no fonts",
        f"summary.txt in {tmp_path}",
    ]
