"""The plan as the engine gets it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.events import A_JOB

from dsl import LaunchSpec, Stdio, WorkerSpec
from dsl._record import replace
from dsl.agent.planner import launch_spec, with_few_pipes
from dsl.model.job import INHERIT, Meeting, NodePlan, Route, WorkerPlan
from dsl.model.request import Policy

HEARD = replace(A_JOB, policy=Policy(restart_on=(1,)))


def _plan(*workers: WorkerPlan) -> NodePlan:
    group = LaunchSpec((), grace_s=5.0)
    return NodePlan(
        A_JOB, Meeting(0, 0, (len(workers),), "127.0.0.1", 29500), "localhost", workers, {"A": "1"}, group
    )


def _worker(rank: int, **changes: Any) -> WorkerPlan:
    return WorkerPlan(rank, rank, ("python", f"--local_rank={rank}"), {"RANK": str(rank)}, **changes)


def _route(stdout: Route, stderr: Route | None, **group: Any) -> tuple[Stdio, Stdio]:
    plan = replace(_plan(_worker(0, stdout=stdout, stderr=stderr)), group=LaunchSpec((), **group))
    (worker,) = launch_spec(plan, stdin_is_terminal=False).workers
    return worker.stdout, worker.stderr


def test_the_group_gets_the_environment_the_grace_and_stops_on_failure() -> None:
    plain = WorkerSpec(
        ("python", "--local_rank=0"), env={"RANK": "0"}, stdout=Stdio.inherit(), stderr=Stdio.inherit()
    )
    plan = _plan(_worker(0, stdout=Route(inherit=True), stderr=Route(inherit=True)))
    spec = launch_spec(plan, stdin_is_terminal=False)
    assert spec == LaunchSpec((plain,), env={"A": "1"}, inherits=True, grace_s=5.0, lingers=True)


def test_what_the_plan_says_of_the_whole_group_is_passed_on() -> None:
    group = LaunchSpec(
        (),
        on_failure="report",
        signal_scope="rank",
        binding="wanted",
        log_max_bytes=7,
        collapse=True,
        line_files=((1, "/f", ("x",)),),
        partial_after_s=None,
        tells_signals=True,
    )
    plan = replace(_plan(_worker(0)), group=group)
    spec = launch_spec(plan, stdin_is_terminal=False)
    own = {"workers": spec.workers, "env": {"A": "1"}, "inherits": True, "lingers": True}
    assert spec == replace(group, **own)


def test_a_worker_keeps_its_arguments_environment_binding_and_prefix() -> None:
    bound = _worker(1, cpus=(2, 3), mempolicy=("bind", (1,)), prefix="[1] ", keep_fds=(7,))
    spec = launch_spec(_plan(_worker(0), bound), stdin_is_terminal=False)
    _, worker = spec.workers
    assert (worker.argv, worker.env) == (("python", "--local_rank=1"), {"RANK": "1"})
    assert (worker.cpus, worker.mempolicy) == ((2, 3), ("bind", (1,)))
    assert (worker.prefix, worker.keep_fds) == ("[1] ", (7,))


def test_a_file_alone_is_written_by_the_worker_itself() -> None:
    assert _route(Route(path="/l"), None) == (Stdio.file("/l", append=True), Stdio.stdout())
    files = (Stdio.file("/o", append=True), Stdio.file("/e", append=True))
    assert _route(Route(path="/o"), Route(path="/e")) == files


def test_what_is_shown_goes_through_the_engine() -> None:
    shown = Route(path="/o", console=1, terminal=True, prefix="[default0]:")
    assert _route(shown, Route(console=2)) == (
        Stdio.log("/o", console=1, terminal=True, prefix="[default0]:"),
        Stdio.log(console=2),
    )


def test_what_is_capped_or_searched_goes_through_the_engine() -> None:
    files = (Route(path="/o"), Route(path="/e"))
    assert _route(*files, log_max_bytes=1 << 20) == (Stdio.log("/o"), Stdio.log("/e"))
    searched = _route(*files, line_files=((2, "/f", ("x",)),))
    assert searched == (Stdio.file("/o", append=True), Stdio.log("/e"))


def test_our_own_streams_and_nothing_at_all() -> None:
    assert _route(Route(inherit=True), Route(inherit=True)) == (Stdio.inherit(), Stdio.inherit())


@pytest.mark.guarantee("G3")
def test_what_is_shown_nowhere_is_read_for_the_verdict() -> None:
    """Of stderr, where a worker says why it failed."""
    assert _route(Route(), Route()) == (Stdio.null(), Stdio.log())
    assert _route(Route(), None) == (Stdio.null(), Stdio.log())
    assert _route(Route(path="/o"), Route()) == (Stdio.file("/o", append=True), Stdio.log())


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_worker_that_reads_our_stdin_has_the_terminal_too(*, is_terminal: bool) -> None:
    plan = _plan(_worker(0), _worker(1, stdin=True))
    workers = launch_spec(plan, stdin_is_terminal=is_terminal).workers
    assert [(worker.stdin, worker.foreground) for worker in workers] == [
        (Stdio.unreadable() if is_terminal else Stdio.null(), False),
        (Stdio.inherit(), is_terminal),
    ]


@pytest.mark.parametrize("stream", [0, 1])
def test_a_worker_that_writes_to_our_terminal_has_it_whatever_it_reads(stream: int) -> None:
    """Where the terminal stops background output (``stty tostop``), it would be stopped elsewhere."""
    ours = [Route(inherit=True), Route(inherit=True)]
    ours[stream] = Route(inherit=True, terminal=True)
    worker = replace(_worker(0), stdout=ours[0], stderr=ours[1])
    assert launch_spec(_plan(worker), stdin_is_terminal=False).workers[0].foreground
    own = Route(console=1, terminal=True)
    worker = replace(_worker(0), stdout=own, stderr=None)
    assert not launch_spec(_plan(worker), stdin_is_terminal=False).workers[0].foreground


def test_with_few_descriptors_only_streams_that_something_else_needs_have_pipes() -> None:
    shown = (Route(console=1), Route(console=2))
    kept = (Route(path="/o", console=1), Route(console=2))
    plan = _plan(*[_worker(rank, stdout=one, stderr=two) for rank, (one, two) in enumerate((shown, kept))])
    first, second = with_few_pipes(plan).workers
    assert (first.stdout, first.stderr) == (INHERIT, INHERIT)
    assert (second.stdout, second.stderr) == (kept[0], INHERIT)
    searched = replace(plan, group=LaunchSpec((), line_files=((1, "/found", ("loss",)),)))
    assert with_few_pipes(searched) == searched
    heard = replace(plan, job=HEARD)
    assert [one.stdout for one in launch_spec(heard, stdin_is_terminal=False).workers] == [
        Stdio.log(console=1), Stdio.log("/o", console=1),
    ]  # fmt: skip
    fewer = launch_spec(with_few_pipes(heard), stdin_is_terminal=False)
    assert [one.stderr for one in fewer.workers] == [Stdio.inherit()] * 2
    joined = _plan(_worker(0, stdout=Route(console=1), stderr=None))
    assert with_few_pipes(joined).workers[0].stderr is None


@pytest.mark.parametrize(
    "route, spec",
    [
        (INHERIT, Stdio.log(console=1)),
        (Route(inherit=True, terminal=True), Stdio.log(console=1, terminal=True)),
        (Route(), Stdio.log()),
        (Route(path="/o"), Stdio.log("/o")),
        (Route(console=1, prefix="a"), Stdio.log(console=1, prefix="a")),
    ],
)
def test_a_policy_of_restarts_hears_all_output(route: Route, spec: Stdio) -> None:
    plan = replace(_plan(_worker(0, stdout=route)), job=HEARD)
    assert launch_spec(plan, stdin_is_terminal=False).workers[0].stdout == spec


def test_a_lone_worker_whose_output_is_heard_keeps_its_order_on_a_terminal() -> None:
    for is_terminal, stderr in ((True, Stdio.stdout()), (False, Stdio.log(console=2))):
        own = Route(inherit=True, terminal=is_terminal)
        plan = replace(_plan(_worker(0, stdout=own, stderr=own)), job=HEARD)
        assert launch_spec(plan, stdin_is_terminal=False).workers[0].stderr == stderr
