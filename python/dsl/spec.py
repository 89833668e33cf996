"""`dsl.model.node.NodePlan` -> `dsl._core.LaunchSpec`: the only place that makes specs of a job's workers."""

from __future__ import annotations

from dsl._record import replace
from dsl.model.node import INHERIT, NodePlan, Route, WorkerPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Literal

    from dsl._core import LaunchSpec, Stdio

NOWHERE = Route()
"""A stream that is neither kept nor shown."""


def launch_spec(
    plan: NodePlan,
    *,
    stdin_is_terminal: bool,
    fork_servers: Sequence[int] = (),
    tells_first_output: bool = False,
) -> LaunchSpec:
    """Translate a plan. The only decision here is how to carry out each route.

    A worker that reads from our terminal, or writes to it directly, goes to the foreground: elsewhere the
    terminal may stop it. ``fork_servers``: the engine's numbers for the fork servers of the plan; without
    them all workers are executed. ``tells_first_output``: the engine reports the first output of each worker
    that dsl sees.

    Raises:
        SpecError: the engine cannot start such a plan.
    """
    from dsl._core import LaunchSpec, WorkerSpec

    servers: dict[int | None, int] = dict(enumerate(fork_servers))
    workers = [
        WorkerSpec(
            worker.argv,
            env=worker.env,
            stdin=_stdin(worker, is_terminal=stdin_is_terminal),
            stdout=_stdio(plan, worker.stdout, 1),
            stderr=_stderr(plan, worker),
            cpus=worker.cpus,
            mempolicy=worker.mempolicy,
            foreground=(worker.stdin and stdin_is_terminal) or _has_terminal(worker),
            prefix=worker.prefix,
            keep_fds=worker.keep_fds,
            fork_server=servers.get(worker.fork_server),
            fork_entry=worker.fork_entry,
        )
        for worker in plan.workers
    ]
    return LaunchSpec(
        workers,
        env=plan.env,
        inherits=True,
        on_failure=plan.on_failure,
        grace_s=plan.grace_s,
        lingers=plan.workers[0].noun == "rank",
        signal_scope=plan.signal_scope,
        binding=plan.binding,
        log_max_bytes=plan.log_max_bytes,
        collapse=plan.collapse,
        line_files=plan.line_files,
        partial_after_s=plan.partial_after_s,
        relayed=plan.is_conducted,
        tells_first_output=tells_first_output,
        tells_signals=plan.tells_signals,
        import_throttle=plan.import_throttle,
    )


def with_few_pipes(plan: NodePlan) -> NodePlan:
    """The plan for few descriptors: workers write straight to the console what goes nowhere else."""

    def own(route: Route | None) -> Route | None:
        is_only_shown = route is not None and route.console is not None and route.path is None
        return INHERIT if is_only_shown and not plan.line_files else route

    workers = [replace(one, stdout=own(one.stdout), stderr=own(one.stderr)) for one in plan.workers]
    return replace(plan, workers=tuple(workers))


def _stdin(worker: WorkerPlan, *, is_terminal: bool) -> Stdio:
    """At a terminal each worker can ask its stdin for the terminal's size, as ``stty size`` does."""
    from dsl._core import Stdio

    if worker.stdin_fd is not None:
        return Stdio.fd(worker.stdin_fd)
    if worker.stdin:
        return Stdio.inherit()
    return Stdio.unreadable() if is_terminal else Stdio.null()


def _stderr(plan: NodePlan, worker: WorkerPlan) -> Stdio:
    """Read stderr even if it is neither shown nor kept: its end may say why the worker failed."""
    from dsl._core import Stdio

    if worker.stderr is None and worker.stdout != NOWHERE:
        return Stdio.stdout()
    if worker.stderr in (None, NOWHERE):
        return Stdio.log()
    return _stdio(plan, worker.stderr, 2)


def _has_terminal(worker: WorkerPlan) -> bool:
    routes = (worker.stdout, worker.stderr)
    return any(route is not None and route.inherit and route.terminal for route in routes)


def _stdio(plan: NodePlan, route: Route, stream: Literal[1, 2]) -> Stdio:
    """Let the worker write to its file directly, unless the engine has to process the bytes."""
    from dsl._core import Stdio

    if route.inherit:
        return Stdio.inherit()
    if route.pipe or route.fd is not None:
        return Stdio.pipe() if route.fd is None else Stdio.fd(route.fd)
    is_searched = any(number == stream for number, _, _ in plan.line_files)
    if route.console is not None or is_searched or (route.path and plan.log_max_bytes):
        return Stdio.log(route.path, console=route.console, terminal=route.terminal, prefix=route.prefix)
    return Stdio.null() if route.path is None else Stdio.file(route.path, append=True)
