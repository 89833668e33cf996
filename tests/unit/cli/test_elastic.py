"""``dsl-elastic``: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsl.cli.elastic import ELASTIC

SECTION = {"enabled": True, "version": 0.1, "max_train_batch_size": 16, "micro_batch_sizes": [2, 3]}
TEXT = """\
------------------------------------------
Elasticity config:
------------------------------------------
{
    "enabled": true,
    "max_train_batch_size": 16,
    "micro_batch_sizes": [
        2,
        3
    ],
    "version": 0.1
}
------------------------------------------
Calculated results:
------------------------------------------
final_batch_size .... 12
valid_gpus .......... [1, 2, 3, 4, 6]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"elasticity": SECTION, "optimizer": {}}))
    return path


def test_the_section_and_its_solution(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ELASTIC.main(["-c", str(config)]) == 0
    assert capfd.readouterr() == (TEXT, "")
    assert ELASTIC.main(["--config", str(config), "--world-size", "0"]) == 0
    assert capfd.readouterr() == (TEXT, "")


def test_a_world_size_has_a_micro_batch(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = TEXT.replace("results:", "results for world size 4:") + "micro_batch_size .... 3\n"
    assert ELASTIC.main(["-c", str(config), "-w", "4"]) == 0
    assert capfd.readouterr() == (expected, "")


@pytest.mark.parametrize(
    "text, line",
    [
        (None, "does not exist, or is no regular file"),
        ("", "is no JSON: line 1: expecting value"),
        ('{\n"a": }', "is no JSON: line 2: expecting value"),
        ("[" * 100_000, "is no JSON that can be read"),
        ("1" * 5000, "is no JSON that can be read"),
        ("[]", "is no JSON object"),
        ("{}", "elasticity is missing from the config, which an elastic job needs"),
        ('{"elasticity": 3}', "elasticity: expected an object with keys, got 3"),
        ('{"elasticity": {"enabled": true}}', "elasticity config missing max_train_batch_size, which an enabled one needs"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_solved_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str | None, line: str
) -> None:
    path = tmp_path / "c"
    if text is not None:
        path.write_text(text)
    assert ELASTIC.main(["-c", str(path)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("dsl-elastic: error: ")
    assert err.endswith(f"{line}\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "words, line",
    [
        ([], "no config was given: dsl-elastic -c CONFIG [-w N]"),
        (["-c", "CONFIG", "-w", "5"], "world size 5 is not valid, valid are 1, 2, 3, 4, 6"),
    ],
)
def test_what_it_cannot_answer_is_one_line(
    config: Path, capfd: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    assert ELASTIC.main([str(config) if word == "CONFIG" else word for word in words]) == 2
    assert capfd.readouterr() == ("", f"dsl-elastic: error: {line}\n")


def test_version_0_2_needs_a_world_size(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    section: dict[str, Any] = {**SECTION, "version": 0.2}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"elasticity": section}))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ELASTIC.main(["-c", str(path)]) == 2
    assert "needs a world size here: give one, or set WORLD_SIZE, which is not set" in capfd.readouterr().err
    assert ELASTIC.main(["-c", str(path), "-w", "5"]) == 0
    assert capfd.readouterr().out.endswith(
        "final_batch_size .... 15\nvalid_gpus .......... [5]\nmicro_batch_size .... 3\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ELASTIC.main(["-c", str(path)]) == 0
    assert "valid_gpus .......... [1, 2, 3, 4, 6]\n" in capfd.readouterr().out


def test_a_world_size_that_is_no_number(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ELASTIC.main(["-c", str(config), "-w", "four"])
    assert caught.value.code == 2
    assert "argument -w/--world-size: invalid int value: 'four'" in capfd.readouterr().err
