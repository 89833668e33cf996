"""The stub of the extension says what the built extension is."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from tests.support.command import ran

import dsl._core as core

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(180)
def test_the_stub_equals_the_built_extension() -> None:
    command = [sys.executable, "-m", "mypy.stubtest", "dsl._core", "--mypy-config-file", "pyproject.toml"]
    result = ran(command, cwd=ROOT, timeout_s=170)
    assert result.returncode == 0, result.stdout + result.stderr


def callables() -> list[tuple[str, object]]:
    """Public functions, classes that can be constructed, and their methods: (name, object)."""
    found: list[tuple[str, object]] = []
    for name, value in vars(core).items():
        if name.startswith("_"):
            continue
        if not inspect.isclass(value):
            found.append((name, value))
            continue
        if issubclass(value, BaseException):
            continue
        if value.__new__ is not object.__new__:
            found.append((name, value))
        methods = {key: getattr(value, key) for key in vars(value) if not key.startswith("_")}
        found += [(f"{name}.{key}", method) for key, method in methods.items() if callable(method)]
    return found


def test_every_callable_of_the_extension_tells_its_parameters() -> None:
    """Without a signature the comparison above would accept any parameter list."""
    names = [name for name, _ in callables()]
    assert {"Supervisor.start", "Guard.supervise", "build_info"} <= set(names)
    silent = [
        name
        for name, value in callables()
        if callable(value) and getattr(value, "__text_signature__", None) is None
    ]
    assert silent == []


def test_every_public_item_of_the_extension_is_documented() -> None:
    classes = [(name, value) for name, value in vars(core).items() if inspect.isclass(value)]
    silent = [name for name, value in [*callables(), *classes] if not getattr(value, "__doc__", None)]
    assert silent == []
