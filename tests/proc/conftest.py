"""What the tests with real workers share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.support import terminal as support
from tests.support.places import Nodes
from tests.support.terminal import Terminal


@pytest.fixture(params=support.MODES)
def terminal(request: pytest.FixtureRequest) -> Callable[..., AbstractContextManager[Terminal]]:
    """`tests.support.terminal.terminal` in each of its modes: the results must be the same."""
    return functools.partial(support.terminal, mode=request.param)


@pytest.fixture
def dslrun(dsl_command: Path) -> Path:
    """Path of the installed `dslrun` program."""
    path = dsl_command.with_name("dslrun")
    assert path.exists(), f"{path} does not exist: run `make build` first"
    return path


@pytest.fixture
def nodes(dsl_command: Path, tmp_path: Path) -> Iterator[Nodes]:
    """Nodes of one job."""
    with contextlib.ExitStack() as stack:
        yield Nodes(dsl_command.with_name("dslrun"), tmp_path, stack)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files that is this test's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder
