"""What the fault tests share: the net, the bystanders, and the tally at the end."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.arena import Arena, arena
from tests.support.bystanders import Bystanders
from tests.support.tally import Tally

PROCESS_LIMIT = 4000
_TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Tally()


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Where the runs of the kill matrix are counted; printed and written when the session ends."""
    return pytestconfig.stash.setdefault(_TALLY, Tally())


@pytest.fixture(scope="session")
def net() -> Iterator[Arena]:
    """The control group in which every process of the fault tests lives."""
    with arena(PROCESS_LIMIT) as made:
        yield made


@pytest.fixture(scope="session")
def bystanders(testchild: Path, tmp_path_factory: pytest.TempPathFactory, net: Arena) -> Iterator[Bystanders]:
    """One tree of bystanders for the whole session, in the same control group as the jobs."""
    tree = Bystanders(testchild, tmp_path_factory.mktemp("bystanders") / "tree", net)
    yield tree
    tree.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash.get(_TALLY, None)
    if not tally:
        return
    terminalreporter.section("kill matrix")
    for line in tally.lines():
        terminalreporter.write_line(line)
    directory = Path(config.rootpath) / "bench-results"
    directory.mkdir(exist_ok=True)
    report = {"kernel": platform.release(), "cases": tally.rows()}
    (directory / "kill-matrix.json").write_text(json.dumps(report, indent=1) + "\n")
