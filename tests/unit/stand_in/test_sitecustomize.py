"""A program below `--stand-in` imports our modules under torch's names."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from dsl.stand_in import sitecustomize
from dsl.stand_in.__main__ import COMMANDS


@pytest.fixture(autouse=True)
def torch() -> Iterator[None]:
    """A torch whose packages hold nothing."""
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torch"}
    for name in kept:
        del sys.modules[name]
    for name in ("torch", "torch.distributed", "torch.distributed.launcher"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
    sys.meta_path.insert(0, sitecustomize)
    yield
    sys.meta_path.remove(sitecustomize)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.parametrize("theirs, ours", sitecustomize.OURS.items())
def test_ours_is_imported_under_the_name_of_torchs(theirs: str, ours: str) -> None:
    module = importlib.import_module(theirs)
    assert module is importlib.import_module(ours)
    assert module.__spec__ is not None
    assert module.__spec__.name == ours, "it stays itself"
    assert getattr(sys.modules[theirs.rpartition(".")[0]], theirs.rpartition(".")[2]) is module


def test_other_modules_are_found_by_others() -> None:
    assert sitecustomize.find_spec("torch.distributed.elastic") is None
    assert find_spec("torch.distributed.elastic") is None
    assert find_spec("json") is not None


def test_a_debugger_that_runs_torchs_module_gets_our_code() -> None:
    spec = find_spec("torch.distributed.run")
    assert spec is not None
    code = spec.loader.get_code("torch.distributed.run")  # type: ignore[union-attr]
    assert code.co_filename == importlib.import_module("dsl.run").__file__


@pytest.mark.parametrize(
    "line, became",
    [
        ("python -m torch.distributed.run -m x", "torch.distributed.run -m x"),
        ("python -u -X dev -m torch.distributed.launch", "torch.distributed.launch"),
        ("python -m torch.distributed.elastic a", ""),
        ("python train.py -m torch.distributed.run", ""),
        ("python -c code -m torch.distributed.run", ""),
        ("python", ""),
        ("", ""),
    ],
)
def test_python_m_becomes_our_command_at_once(
    line: str, became: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = line.split()
    at = next((at for at, word in enumerate(words) if word in ("-m", "-c", "train.py")), len(words))
    is_file = words[at : at + 1] == ["train.py"]
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(
        sys, "argv", words[at:] if is_file else [*words[at : at + 1], *words[at + 2 :]] or [""]
    )
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: calls.append(words))
    sitecustomize.become_command()
    expected = [[sys.executable, sitecustomize.FOLDER, *became.split()]] if became else []
    assert calls == expected


def test_each_module_that_becomes_a_command_has_one() -> None:
    assert {name for name in sitecustomize.OURS if not name.endswith(".api")} <= COMMANDS.keys()
    for module, function in COMMANDS.values():
        assert callable(getattr(importlib.import_module(module), function))


def test_an_old_python_reads_it_without_a_message() -> None:
    text = Path(sitecustomize.__file__).read_text()
    ast.parse(text, feature_version=(3, 6))
    assert "__future__" not in text, "3.6 knows no annotations there"
