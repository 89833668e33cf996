"""The plan as the engine gets it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from dsl import spec
from dsl._record import replace
from dsl.model.node import NodePlan, Route, WorkerPlan

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
        file = staticmethod(lambda path, append: f"file {path}" if append else "truncated")
        log = staticmethod(lambda path, **facts: ("log", path, facts))

    fake = ModuleType("dsl._core")
    vars(fake).update(Stdio=Stdio, WorkerSpec=_recorder("worker"), LaunchSpec=_recorder("launch"))
    monkeypatch.setitem(sys.modules, "dsl._core", fake)


def _plan(*workers: WorkerPlan) -> NodePlan:
    return NodePlan("localhost", 0, workers, {"A": "1"}, "127.0.0.1", 29500, len(workers), grace_s=5.0)


def _worker(rank: int, **changes: Any) -> WorkerPlan:
    return WorkerPlan(rank, rank, ("python", f"--local_rank={rank}"), {"RANK": str(rank)}, **changes)


def _route(stdout: Route, stderr: Route | None, **group: Any) -> tuple[Any, Any]:
    plan = replace(_plan(_worker(0, stdout=stdout, stderr=stderr)), **group)
    ((worker,), _) = _translate(plan)
    return worker["stdout"], worker["stderr"]


def _translate(
    plan: NodePlan, *, stdin_is_terminal: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    made: Any = spec.launch_spec(plan, stdin_is_terminal=stdin_is_terminal)
    _, (workers,), group = made
    return [{"argv": args[0], **kwargs} for _, args, kwargs in workers], group


def test_the_group_gets_the_environment_the_grace_and_stops_on_failure() -> None:
    _, group = _translate(_plan(_worker(0)))
    assert group.pop("env") == {"A": "1"}
    assert group == {
        "on_failure": "stop",
        "grace_s": 5.0,
        "binding": "required",
        "log_max_bytes": None,
        "collapse": False,
        "line_files": (),
    }


def test_what_is_done_with_all_output_is_passed_on() -> None:
    line_files = ((1, "/f", ("x",)),)
    plan = replace(_plan(_worker(0)), log_max_bytes=7, collapse=True, line_files=line_files)
    _, group = _translate(plan)
    assert (group["log_max_bytes"], group["collapse"], group["line_files"]) == (7, True, line_files)


def test_a_worker_keeps_its_arguments_environment_and_binding() -> None:
    bound = _worker(1, cpus=(2, 3), mempolicy=("bind", (1,)))
    (_, worker), _ = _translate(_plan(_worker(0), bound))
    assert worker["argv"] == ("python", "--local_rank=1")
    assert worker["env"] == {"RANK": "1"}
    assert (worker["cpus"], worker["mempolicy"]) == ((2, 3), ("bind", (1,)))


def test_a_file_alone_is_written_by_the_worker_itself() -> None:
    assert _route(Route(path="/l"), None) == ("file /l", "stdout")
    assert _route(Route(path="/o"), Route(path="/e")) == ("file /o", "file /e")


def test_what_is_shown_goes_through_the_engine() -> None:
    shown = Route(path="/o", console=1, terminal=True)
    assert _route(shown, Route(console=2)) == (
        ("log", "/o", {"console": 1, "terminal": True}),
        ("log", None, {"console": 2, "terminal": False}),
    )


def test_what_is_capped_or_searched_goes_through_the_engine() -> None:
    files = (Route(path="/o"), Route(path="/e"))
    through = {"console": None, "terminal": False}
    assert _route(*files, log_max_bytes=1 << 20) == (("log", "/o", through), ("log", "/e", through))
    assert _route(*files, line_files=((2, "/f", ("x",)),)) == ("file /o", ("log", "/e", through))


def test_our_own_streams_and_nothing_at_all() -> None:
    assert _route(Route(inherit=True), Route(inherit=True)) == ("inherit", "inherit")
    assert _route(Route(), Route()) == ("null", "null")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_worker_that_reads_our_stdin_has_the_terminal_too(*, is_terminal: bool) -> None:
    plan = _plan(_worker(0), _worker(1, stdin=True))
    workers, _ = _translate(plan, stdin_is_terminal=is_terminal)
    assert [(worker["stdin"], worker["foreground"]) for worker in workers] == [
        ("null", False),
        ("inherit", is_terminal),
    ]
