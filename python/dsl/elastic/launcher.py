"""Launch a function or a program from Python, in the shape of torch.distributed.launcher.

::

    from dsl.elastic.launcher import ChildFailedError, LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(1, 1, 4), train)(arguments)    # {rank: what train returned}

torch is never imported here; workers import what the function needs.
"""

from __future__ import annotations

import os
import sys
import time

from dsl import Ended, EngineError, LogNotice, Supervisor, Unbound
from dsl._record import replace
from dsl.attempts import flush_output, run_attempt
from dsl.elastic.call import Call, EntrypointError, ResultError, entrypoint_name, refuse_while_importing
from dsl.elastic.config import LaunchConfig, to_request
from dsl.elastic.errors import ChildFailedError, ProcessFailure
from dsl.elastic.signals import HandledSignals, SignalException
from dsl.errors import DslError
from dsl.plan.host import this_host
from dsl.plan.logs import make_log_dir, make_run_dirs, remove_run_dir
from dsl.plan.output import TEMPLATE_VARIABLE
from dsl.plan.torchrun import THREADS_VARIABLE, build_group, plan_attempt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from dsl import Event
    from dsl.attempts import Attempt
    from dsl.model import NodePlan
    from dsl.plan.host import Host
    from dsl.plan.torchrun import Group

__all__ = [
    "ChildFailedError",
    "EntrypointError",
    "LaunchConfig",
    "ProcessFailure",
    "ResultError",
    "SignalException",
    "elastic_launch",
    "launch",
    "launch_agent",
]

SILENCE_S = 1.0
"""A group that runs says at once that it is being stopped; after this long, none does."""


class elastic_launch:  # noqa: N801  torch's name
    """Calling it with arguments runs the entrypoint with them in every worker, and waits for all of them.

    See `launch_agent`, which it calls, for the entrypoint, the result and the errors.
    """

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Return {global rank: result}."""
        return launch_agent(self._config, self._entrypoint, args)


def launch(
    entrypoint: Callable[..., Any] | str,
    *args: Any,
    nproc_per_node: int | str = 1,
    max_restarts: int = 0,
    **fields: Any,
) -> list[Any]:
    """Run a function or a program in some workers of this machine; returns the results in the order of ranks.

    ``fields``: more fields of `LaunchConfig`. Raises what `launch_agent` raises.
    """
    config = LaunchConfig(1, 1, nproc_per_node, max_restarts=max_restarts, **fields)
    return list(launch_agent(config, entrypoint, args).values())


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: Sequence[Any]
) -> dict[int, Any]:
    """Run the entrypoint in this node's workers until all have ended; returns {global rank: result}.

    ``entrypoint`` is a function, whose results these are, or a program, looked up on ``PATH``, with its
    arguments as text, whose result is None. ``${local_rank}`` in a text argument becomes the worker's. It may
    be called from any thread, and from several at once. An exception that is raised while it waits, such as
    KeyboardInterrupt, ends the workers first.

    Raises:
        ChildFailedError: a worker failed, and all restarts are spent.
        ResultError: a worker ended well, but there is no result of it that can be read.
        EntrypointError: the function or an argument cannot be sent to a worker.
        SignalException: a signal of ``config.signals_to_handle`` arrived.
        UsageError: the config asks for something that cannot be done.
        EngineError: the workers cannot be started on this machine.
    """
    refuse_while_importing()
    _check(entrypoint)
    name = _name(entrypoint, args)
    environ = {**os.environ, **config.env}
    if config.log_line_prefix_template is not None:
        environ[TEMPLATE_VARIABLE] = config.log_line_prefix_template
    request = to_request(config, name, environ)
    host = this_host()
    command = [] if callable(entrypoint) else [entrypoint, *map(str, args)]
    group = _without_thread_limit(build_group(request, command, environ, host), environ)
    call = Call(entrypoint, tuple(args), group.run_dir) if callable(entrypoint) else None
    with HandledSignals(request.stop_signals):
        return _Job(name, group, host, call).run()


def _check(entrypoint: object) -> None:
    if not callable(entrypoint) and (not isinstance(entrypoint, str) or entrypoint == ""):
        raise EntrypointError(f"entrypoint {entrypoint!r}: expected a function or the name of a program")


def _name(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    if not isinstance(entrypoint, str):
        return entrypoint_name(entrypoint)
    if entrypoint != sys.executable:
        return entrypoint
    return next((text for text in map(str, args) if not text.startswith("-")), entrypoint)


def _without_thread_limit(group: Group, environ: Mapping[str, str]) -> Group:
    """The limit is the command's; torch's launcher, called from Python, sets none."""
    if THREADS_VARIABLE in environ:
        return group
    env = {name: value for name, value in group.environ.items() if name != THREADS_VARIABLE}
    notices = tuple([notice for notice in group.notices if THREADS_VARIABLE not in notice.text])
    return replace(group, environ=env, notices=notices)


class _Job:
    """One call from its plan to its results: attempts of a group, and the files that belong to them."""

    def __init__(self, name: str, group: Group, host: Host, call: Call | None) -> None:
        self._name = name
        self._group = group
        self._host = host
        self._call = call
        self._number = 0
        self._unbound: set[str] = set()

    def run(self) -> dict[int, Any]:
        """Run attempts until one ends well or none is left. Raises as `launch_agent` does."""
        succeeded = False
        try:
            attempt = self._supervise()
            if attempt.ended.first_failure is not None:
                from dsl.elastic.outcome import failure_of

                raise failure_of(self._name, attempt)
            results = {
                worker.rank: None
                if self._call is None
                else self._call.result(self._number, worker.local_rank, worker.rank)
                for worker in attempt.plan.workers
            }
            succeeded = True
        finally:
            self._tidy(succeeded=succeeded)
        return results

    def _supervise(self) -> Attempt:
        supervisor = Supervisor()
        try:
            return self._attempts(supervisor)
        except (DslError, EngineError):
            raise  # nothing runs
        except BaseException as error:
            _end(supervisor, error, self._group.request.grace_s)
            raise
        finally:
            supervisor.close()

    def _attempts(self, supervisor: Supervisor) -> Attempt:
        plan = self._plan()
        if plan.log_dir is not None:
            make_log_dir(plan.log_dir)
        make_run_dirs(plan.run_dirs)
        if self._call is not None:
            self._call.write()
        for notice in plan.notices:
            _log(notice.level, notice.text)
        flush_output()
        maximum = self._group.request.max_restarts
        while True:
            attempt = run_attempt(supervisor, plan, self._prepare)
            _log_survivors(attempt)
            if self._number >= maximum or not attempt.can_be_restarted:
                return attempt
            self._number += 1
            again = f"starting all workers again, restart {self._number} of {maximum}"
            _log("warning", f"{_cause(attempt)}: {again}")
            plan = self._plan()
            make_run_dirs(plan.run_dirs)

    def _plan(self) -> NodePlan:
        plan = plan_attempt(self._group, self._number, self._host)
        call = self._call
        if call is None:
            return plan
        workers = [
            replace(worker, argv=call.argv(self._number, worker.local_rank)) for worker in plan.workers
        ]
        return replace(plan, workers=tuple(workers))

    def _prepare(self) -> Callable[[Event, int], None]:
        return self._hear

    def _hear(self, event: Event, _ended: int) -> None:
        if isinstance(event, LogNotice):
            where = f" {event.path}" if event.path else ""
            reason = f": {os.strerror(event.errno)}" if event.errno else ""
            what = event.kind.replace("_", " ")
            _log("warning", f"output of the workers: {what}{where}{reason} ({event.count})")
        elif isinstance(event, Unbound) and event.stage not in self._unbound:
            from dsl.report import binding_failure

            self._unbound.add(event.stage)
            _log("warning", f"worker {event.worker} {binding_failure(event.stage, event.errno)} (said once)")

    def _tidy(self, *, succeeded: bool) -> None:
        """Remove what was passed, and the directory of the run unless something in it is worth keeping."""
        group = self._group
        if self._call is not None:
            self._call.remove(self._number, group.local_world_size)
        if not group.keeps_run_dir:
            remove_run_dir(group.run_dir, self._number, group.local_world_size, succeeded=succeeded)


def _end(supervisor: Supervisor, error: BaseException, grace_s: float) -> None:
    """Stop the workers in order because of an exception. Another one kills them at once, in `close`."""
    signum = 2 if isinstance(error, KeyboardInterrupt) else 15
    if isinstance(error, SignalException):
        signum = int(error.sigval)
    supervisor.stop(signum=signum, grace_s=grace_s)
    deadline_s = time.monotonic() + grace_s + SILENCE_S
    events = supervisor.wait(SILENCE_S)
    while events and not any(isinstance(event, Ended) for event in events):
        events = supervisor.wait(max(0.0, deadline_s - time.monotonic()))


def _cause(attempt: Attempt) -> str:
    from dsl.report import reason

    cause = attempt.ended.first_failure
    assert cause is not None
    return f"rank {attempt.plan.workers[cause.worker].rank} failed: {reason(cause)}"


def _log_survivors(attempt: Attempt) -> None:
    if attempt.ended.survivors:
        from dsl.report import survivor

        for one in attempt.ended.survivors:
            _log("warning", survivor(*one))


def _log(level: str, text: str) -> None:
    import logging

    logging.getLogger("dsl").log(getattr(logging, level.upper()), "%s", text)
