"""A plain torch script is tuned without DeepSpeed, and trains with what was found."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.command import ran

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = [
    pytest.mark.torch,
    pytest.mark.proc,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("one_thread"),
]


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return ran(words, cwd=folder, timeout_s=150)


def test_the_best_config_is_found_written_down_and_trained_with(dsl_command: Path, tmp_path: Path) -> None:
    script = shutil.copy(EXAMPLES / "tune_plain.py", tmp_path)
    config = json.loads((EXAMPLES / "tune_plain.json").read_text())
    config["autotuning"]["space"] = {"optimizer.lr": [0.001, 0.1]}  # two of its values, which differ much
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--num_gpus", "1", "--autotuning", "run", script, "--config", "config.json"]
    result = run(tmp_path, dsl_command, *words)
    assert result.returncode == 0, result.stderr
    results = tmp_path / "autotuning_results"
    found = json.loads((results / "summary.json").read_text())
    assert [trial["outcome"] for trial in found["trials"]] == ["ok", "ok"]
    worse, best = (trial["value"] for trial in found["trials"])
    assert best < worse / 2
    assert found["best"] == {
        "name": "lr=0.1",
        "space": "space",
        "value": best,
        "config": {"optimizer.lr": 0.1},
    }
    assert (results / "summary.txt").read_text().startswith(result.stdout.partition("\ntrained")[0])
    assert (results / "summary.png").exists()
    optimal = json.loads((results / "ds_config_optimal.json").read_text())
    assert optimal == {
        **{key: config[key] for key in ("steps", "batch_size", "model")},
        "optimizer": {"lr": 0.1},
    }
    assert 'trained 200 steps with {"lr": 0.1}' in result.stdout


def test_the_config_of_the_example_names_what_the_script_reads() -> None:
    config = json.loads((EXAMPLES / "tune_plain.json").read_text())
    assert set(config["autotuning"]["space"]) == {"optimizer.lr", "batch_size"}
    text = (EXAMPLES / "tune_plain.py").read_text()
    for key in (
        "steps",
        "batch_size",
        "model",
        "width",
        "optimizer",
        "lr",
        "metric_path",
        "end_profile_step",
    ):
        assert f'"{key}"' in text
