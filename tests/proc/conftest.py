"""What the tests with real workers share."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.support import forks
from tests.support import terminal as support
from tests.support.delegates import Driven, Nursery, driven
from tests.support.places import Nodes, free_port
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


@pytest.fixture(params=["forkserver", "warm"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether the fork servers of a test stay after their job."""
    monkeypatch.setattr(forks, "ARE_WARM", request.param == "warm")
    return str(request.param)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """What forks the delegates of a module."""
    one = Nursery()
    yield one
    one.close()


@pytest.fixture
def start(nursery: Nursery) -> Iterator[Callable[..., Driven]]:
    """Start a delegate."""
    with driven(nursery) as starter:
        yield starter


@pytest.fixture
def endpoint() -> str:
    """Where nobody listens."""
    return f"127.0.0.1:{free_port()}"
