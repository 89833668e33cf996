"""A process that SIGKILL does not end is given up, and described well enough to look for the reason."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.group import Group

from dsl.report.verdict import survivor

FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def freeze() -> Iterator[Callable[[int], None]]:
    """Freezes a process as only version 1 of cgroups does it: not even SIGKILL ends it before it is thawed."""
    group = FREEZER / f"dsl-tests-{uuid.uuid4().hex[:12]}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs a kernel with a freezer of cgroup v1")
    state = group / "freezer.state"

    frozen: list[int] = []

    def carry_out(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        state.write_text("FROZEN")
        until(lambda: state.read_text() == "FROZEN\n")
        frozen.append(pid)

    yield carry_out
    state.write_text("THAWED")
    for pid in frozen:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)  # the engine has given it up
    deadline_s = time.monotonic() + 10
    while group.exists() and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError):
            group.rmdir()


@pytest.mark.root
def test_what_would_not_die_is_described_with_where_it_waits(
    testchild: Path, freeze: Callable[[int], None]
) -> None:
    with Group([[str(testchild), "pause"]]) as group:
        (pid,) = group.all_started().values()
        until(lambda: Path(f"/proc/{pid}/wchan").read_text() not in {"", "0"})
        freeze(pid)
        wchan = Path(f"/proc/{pid}/wchan").read_text()
        group.supervisor.kill()
        ended = group.finish(timeout_s=20.0)
    assert ended.survivors == ((pid, "D", "dsl-testchild", wchan, None),)
    assert ended.to_dict()["survivors"] == [
        {"pid": pid, "state": "D", "name": "dsl-testchild", "wchan": wchan, "errno": None}
    ]
    assert survivor(*ended.survivors[0]).endswith(f" did not die of SIGKILL (waits in {wchan})")
