"""Fixtures of the contract tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory, where there is a place for it: whole trees of /sys go through it, many files each."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="dsl-tests-", dir=place) as folder:
        yield Path(folder)
