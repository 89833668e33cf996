"""The plan as the engine gets it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from dsl import spec
from dsl.model import NodePlan, WorkerPlan

if TYPE_CHECKING:
    from collections.abc import Callable


def _recorder(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: (name, args, kwargs)


@pytest.fixture(autouse=True)
def extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of the extension that only note how they were made."""

    class Stdio:
        inherit = staticmethod(lambda: "inherit")
        null = staticmethod(lambda: "null")
        stdout = staticmethod(lambda: "stdout")
        file = staticmethod(lambda path: f"file {path}")

    fake = ModuleType("dsl._core")
    vars(fake).update(Stdio=Stdio, WorkerSpec=_recorder("worker"), LaunchSpec=_recorder("launch"))
    monkeypatch.setitem(sys.modules, "dsl._core", fake)


def _plan(*workers: WorkerPlan) -> NodePlan:
    return NodePlan("localhost", 0, workers, {"A": "1"}, "127.0.0.1", 29500, len(workers), grace_s=5.0)


def _worker(rank: int, **changes: Any) -> WorkerPlan:
    return WorkerPlan(rank, rank, ("python", f"--local_rank={rank}"), {"RANK": str(rank)}, **changes)


def _translate(
    plan: NodePlan, *, stdin_is_terminal: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    made: Any = spec.launch_spec(plan, stdin_is_terminal=stdin_is_terminal)
    _, (workers,), group = made
    return [{"argv": args[0], **kwargs} for _, args, kwargs in workers], group


def test_the_group_gets_the_environment_the_grace_and_stops_on_failure() -> None:
    _, group = _translate(_plan(_worker(0)))
    assert group == {"env": {"A": "1"}, "on_failure": "stop", "grace_s": 5.0}


def test_a_worker_keeps_its_arguments_environment_and_binding() -> None:
    bound = _worker(1, cpus=(2, 3), mempolicy=("bind", (1,)))
    (_, worker), _ = _translate(_plan(_worker(0), bound))
    assert worker["argv"] == ("python", "--local_rank=1")
    assert worker["env"] == {"RANK": "1"}
    assert (worker["cpus"], worker["mempolicy"]) == ((2, 3), ("bind", (1,)))


def test_a_log_file_takes_both_streams() -> None:
    (logged, shown), _ = _translate(_plan(_worker(0, log_path="/logs/0.log"), _worker(1)))
    assert (logged["stdout"], logged["stderr"]) == ("file /logs/0.log", "stdout")
    assert (shown["stdout"], shown["stderr"]) == ("inherit", "inherit")


@pytest.mark.parametrize(
    "count, is_terminal, stdin, foreground",
    [
        (1, False, "inherit", False),
        (1, True, "inherit", True),
        (2, False, "null", False),
        (2, True, "null", False),
    ],
)
def test_only_a_worker_that_is_alone_reads_our_stdin(
    *,
    count: int,
    is_terminal: bool,
    stdin: str,
    foreground: bool,
) -> None:
    workers, _ = _translate(_plan(*map(_worker, range(count))), stdin_is_terminal=is_terminal)
    assert {(worker["stdin"], worker["foreground"]) for worker in workers} == {(stdin, foreground)}
