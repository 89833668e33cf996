"""The names that DeepSpeed's users import, beyond what the contract tests show."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from dsl import errors, runner


def test_a_missing_hostfile_is_none_and_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    assert "will proceed with training with local resources only" in caplog.text


def test_a_hostfile_is_read_and_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\r\nb slots=1\n", encoding="utf-8")
    assert runner.fetch_hostfile(str(path)) == {"a": 2, "b": 1}
    path.write_text("a slots=2\nb\n", encoding="utf-8")
    with pytest.raises(errors.HostfileError, match=r"hosts line 2: hostfile contains a bad entry: 'b'"):
        runner.fetch_hostfile(str(path))


def test_without_a_filter_the_same_object_comes_back() -> None:
    pool = {"a": [0, 1]}
    assert runner.parse_resource_filter(pool) is pool


def test_duplicates_are_removed_in_order() -> None:
    assert runner._stable_remove_duplicates([3, 1, 3, 2, 1]) == [3, 1, 2]
    assert runner._stable_remove_duplicates([[1], [1]]) == [[1]]


@pytest.mark.parametrize(
    "text, elastic, expected", [("3", False, (3, -1)), ("3", True, (3, -1)), ("1:4", True, (1, 4))]
)
def test_num_nodes(text: str, *, elastic: bool, expected: tuple[int, int]) -> None:
    assert runner.parse_num_nodes(text, elastic) == expected


@pytest.mark.parametrize(
    "text, elastic, kind, message",
    [
        ("1:4", False, RuntimeError, "MIN:MAX format is only supported in elastic training"),
        ("1:2:3", True, RuntimeError, "is not in MIN:MAX format"),
        ("x", True, ValueError, "nor a whole number"),
        ("", False, ValueError, "nor a whole number"),
    ],
)
def test_bad_num_nodes(text: str, *, elastic: bool, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        runner.parse_num_nodes(text, elastic)


def test_arguments_default_to_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dsl", "--num_gpus", "2", "train.py", "--x"])
    options = runner.parse_args()
    assert (options.num_gpus, options.user_script, options.user_args) == (2, "train.py", ["--x"])


@pytest.mark.parametrize("code", [0, 3])
def test_main_exits_with_the_code_of_the_job_unless_it_is_0(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsl.cli.in_process.run_deepspeed", lambda _args: code)
    if code:
        with pytest.raises(SystemExit) as caught:
            runner.main(["train.py"])
        assert caught.value.code == code
    else:
        assert runner.main(["train.py"]) is None  # type: ignore[func-returns-value]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "words, kind",
    [
        (["-H", "{}/none_of_it", "--include", "a@b", "train.py"], ValueError),
        (["-H", "{}/bad", "train.py"], ValueError),
        (["--num_nodes", "1:2", "train.py"], ValueError),
        (["--num_gpus", "2", "no_such_script.py"], errors.ScriptError),
    ],
)
def test_main_raises_what_deepspeeds_raises(words: list[str], kind: type[Exception], tmp_path: Path) -> None:
    """As every function of the module, see docs/compat.md."""
    (tmp_path / "bad").write_text("localhost slots=many\n")
    with pytest.raises(kind) as caught:
        runner.main([word.format(tmp_path) for word in words])
    assert isinstance(caught.value, errors.DslError)
    assert "\n" not in str(caught.value)
