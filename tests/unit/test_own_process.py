"""What the commands change in their process, and that user code finds it as Python leaves it."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from dsl import _own_process

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector is on before and after a test."""
    assert gc.isenabled()
    yield
    _own_process.restore()
    gc.enable()


def test_what_was_claimed_is_restored() -> None:
    _own_process.claim()
    assert not gc.isenabled()
    _own_process.restore()
    assert gc.isenabled()


def test_restoring_what_was_never_claimed_changes_nothing() -> None:
    gc.disable()
    _own_process.restore()
    assert not gc.isenabled()


def test_a_collector_that_was_off_before_stays_off() -> None:
    gc.disable()
    _own_process.claim()
    _own_process.restore()
    assert not gc.isenabled()


def test_who_turns_it_off_after_a_restore_is_not_overruled() -> None:
    _own_process.claim()
    _own_process.restore()
    gc.disable()
    _own_process.restore()
    assert not gc.isenabled()


@pytest.mark.parametrize(
    "module, claims",
    [
        ("dsl.__main__", True),
        ("dsl.run", True),
        ("dsl.launch", True),
        ("dsl.runner", False),
        ("dsl.functions", False),
    ],
)
def test_the_commands_claim_their_process_and_the_library_never_does(module: str, *, claims: bool) -> None:
    code = f"import gc, {module}; print(gc.isenabled())"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20
    )
    assert result.stdout == f"{not claims}\n"
