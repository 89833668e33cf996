"""Launch a function or a program from Python, in the shape of torch.distributed.launcher.

::

    from dsl.functions.launcher import ChildFailedError, LaunchConfig, elastic_launch

    results = elastic_launch(LaunchConfig(1, 1, 4), train)(arguments)    # {rank: what train returned}

torch is never imported here; workers import what the function needs.
"""

from __future__ import annotations

import contextlib
import sys

from dsl import _own_process
from dsl._record import replace
from dsl.agent.planner import Planner, check_job
from dsl.agent.session import OneNode, Session
from dsl.errors import DslError, HangError, RendezvousError, UnsupportedError
from dsl.facts import this_machine
from dsl.functions.call import (
    Call,
    EntrypointError,
    ResultError,
    entrypoint_name,
    interpreter_words,
    refuse_while_importing,
    source_of,
    unguarded,
)
from dsl.functions.config import LaunchConfig, to_request, warnings_of
from dsl.functions.errors import (
    ChildFailedError,
    HandledSignals,
    ProcessFailure,
    SignalException,
    failure_of,
    name_of_torch,
)
from dsl.machine.check import NO_PYTHON
from dsl.model.job import Notice
from dsl.model.outcome import HANG_CODE
from dsl.model.request import LEVELS, Program
from dsl.plan.job import plan_job
from dsl.report.narrator import judge_attempt
from dsl.report.verdict import verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from dsl.agent.warm import HeldServers
    from dsl.facts import Facts
    from dsl.model.job import NodePlan
    from dsl.model.outcome import Outcome
    from dsl.model.request import Level, Request
    from dsl.plan.job import JobPlan
    from dsl.report.narrator import Show
    from dsl.report.recorder import Recorder


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
    "warm_launch",
]


def __getattr__(name: str) -> Any:
    return name_of_torch(name, "torch.distributed.launcher.api", globals())


class elastic_launch:  # noqa: N801  torch's name
    """Call an instance to run the entrypoint with the arguments in every worker, and to wait for all workers.

    The call goes to `launch_agent`: see there for the entrypoint, the result and the errors.
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
    return list(_launch(config, entrypoint, args).values())


def launch_agent(
    config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: Sequence[Any]
) -> dict[int, Any]:
    """Run the entrypoint in this node's workers until all have ended; returns {global rank: result}.

    ``entrypoint`` is a function, or the name of a program, which is looked up on ``PATH``. A program gets its
    arguments as text, and its result is None. ``${local_rank}`` in a text argument becomes the local rank of
    the worker. You may call this from any thread, and from several threads at once. If an exception such as
    KeyboardInterrupt is raised during the wait, the workers are ended before you get it. A config without a
    run_id has one afterwards.

    Raises:
        ChildFailedError: a worker failed, and all restarts are spent.
        HangError: the job hung, and ``config.hang_action`` is ``stop``.
        ResultError: a worker ended well, but its result is missing or cannot be read.
        EntrypointError: the function or an argument cannot be sent to a worker.
        SignalException: a signal of ``config.signals_to_handle`` arrived.
        ProgramError: the program is missing (FileNotFoundError), or may not be executed (PermissionError).
        UsageError: the config asks for something that cannot be done.
        EngineError: the workers cannot be started on this machine.
    """
    return _launch(config, entrypoint, args)


@contextlib.contextmanager
def warm_launch(**fields: Any) -> Iterator[Callable[..., list[Any]]]:
    """Launch again and again, with what the workers import imported once.

    The block gets a function that is called as `launch`, with these ``fields`` as defaults. Its workers are
    forked by a warm fork server, which ends with the block, and with this process however that ends. The
    first launch waits for the imports. Modules to ``preload`` are found as the interpreter finds installed
    modules, or in the working directory. Several threads may launch at once. ::

        with warm_launch(nproc_per_node=4, preload="torch") as launch:
            losses = [launch(train, rate) for rate in rates]
    """
    from dsl.agent.warm import HeldServers

    defaults = {"nproc_per_node": 1, "max_restarts": 0, "start_method": "warm", "warm_for_s": 0.0, **fields}
    held = HeldServers()

    def launch(entrypoint: Callable[..., Any] | str, *args: Any, **fields: Any) -> list[Any]:
        config = LaunchConfig(1, 1, **{**defaults, **fields})
        return list(_launch(config, entrypoint, args, held).values())

    try:
        yield launch
    finally:
        held.close()


def _launch(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    held: HeldServers | None = None,
) -> dict[int, Any]:
    refuse_while_importing()
    program = _program(entrypoint, args)
    # A held server that imports named modules serves the functions of all modules.
    source = "" if held is not None and config.preload else source_of(entrypoint)
    request = to_request(config, program, source)
    for line in warnings_of(config, request):
        log("warning", line)
    config.run_id = request.meeting.run_id
    call = (entrypoint, tuple(args)) if callable(entrypoint) else None
    try:
        return run_request(request, this_machine(), call, held=held)
    except DslError as error:
        raise error.with_traceback(None)  # noqa: B904  it is the same error, without our frames


def run_request(
    request: Request,
    facts: Facts,
    call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None,
    *,
    held: HeldServers | None = None,
    show: Show | None = None,
    preview: Callable[[NodePlan], bool] | None = None,
    argv: tuple[str, ...] = (),
) -> dict[int, Any]:
    """Run this node's part of a job in this process; returns {global rank: result}.

    ``call`` is the function for the workers and its arguments; without a call the request's program runs, and
    the results are None. ``held`` holds the warm servers that the job uses. ``show`` shows what the user
    should know; None: the logger ``dsl`` gets it, and the caller gets the verdict as an exception.
    ``preview`` takes the first plan before anything is created; if it returns true, nothing is started.
    ``argv``: what the user has typed.

    Raises what `launch_agent` raises, and ScriptError for a script that does not exist.
    """
    stdin_is_terminal = request.flavour != "functions" and facts.console.stdin_is_terminal
    if stdin_is_terminal and not request.output.stdin:
        # A worker that reads a terminal is in our process group, and would get Ctrl-C from there and from us.
        request = replace(request, output=replace(request.output, stdin="none"))
    planned = plan_job(request, facts, argv)
    if planned.remote is not None:
        raise UnsupportedError(
            "other hosts would have to be reached, which a program cannot do from within: use the command dsl"
        )
    check_job(planned.job, facts, "" if request.flavour == "functions" else NO_PYTHON)
    with HandledSignals(request.signals.stop or ()), contextlib.ExitStack() as stack:
        source = _Source(planned, facts, call, held)
        recorder = None
        if request.events is not None:
            from dsl.report.recorder import record_job

            recorder, file = record_job(request.events, planned, facts, lambda text: log("warning", text))
            stack.callback(file.close)
        side = OneNode(source)
        if planned.job.meeting.way != "alone":
            from dsl.agent.several_nodes import nodes_of

            side = nodes = nodes_of(planned, facts, _log_notice)
            stack.callback(nodes.close)
            nodes.open(source)
            over = nodes.find()
            if over is None:
                nodes.enter()
                over = nodes.join()
            if over is not None:
                return _without_part(recorder, *over)
        side.show, side.has_verdict = show or to_logger, show is not None
        results = Session(
            side,
            preview=preview,
            stdin_is_terminal=stdin_is_terminal,
            recorder=recorder,
        ).run_here(lambda outcome: conclude(source, outcome, side))
    return results or {}


def _log_notice(notice: Notice) -> None:
    log(notice.level, notice.text)


def _without_part(recorder: Recorder | None, notice: Notice | None, code: int) -> dict[int, Any]:
    """No results, for a node that stayed a spare until the job ended. RendezvousError if the job failed."""
    if notice is not None and recorder is not None:
        recorder.end(code, [notice.text] if code else [])
    if notice is not None and not code:
        log(notice.level, notice.text)
    if code:
        error = RendezvousError("the job is over" if notice is None else notice.text)
        error.exit_code = code
        raise error
    return {}


def _program(entrypoint: object, args: Sequence[Any]) -> Program:
    if callable(entrypoint):
        words = interpreter_words()
        return Program("call", words[0], words[1:], name=entrypoint_name(entrypoint))
    if not isinstance(entrypoint, str) or entrypoint == "":
        raise EntrypointError(f"entrypoint {entrypoint!r}: expected a function or the name of a program")
    texts = tuple(map(str, args))
    name = entrypoint
    if entrypoint == sys.executable:
        name = next((text for text in texts if not text.startswith("-")), entrypoint)
    return Program("program", entrypoint, texts, name=name)


class _Source(Planner):
    """A planner whose workers may run a function. Files carry the function and its results."""

    def __init__(
        self,
        planned: JobPlan,
        facts: Facts,
        call: tuple[Callable[..., Any], tuple[Any, ...]] | None,
        held: HeldServers | None = None,
    ) -> None:
        super().__init__(planned, facts)
        self._held = held
        self._call = None if call is None or self.run_dir is None else Call(*call, self.run_dir)

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make the directories of an attempt, and write the call unless it is still there.

        If tools of this process follow what it starts, the plan is as they start it.
        """
        plan = self._with_call(super().prepare(plan))
        if not _own_process.is_followed():
            return plan
        from dsl.agent.followed import as_followed

        return as_followed(plan)

    def _with_call(self, plan: NodePlan) -> NodePlan:
        if self._held is not None:
            self._held.hold(plan.fork_servers, ())
        if self._call is None:
            return plan
        if not self._call.is_written():
            self._call.write()
        return self._call.with_worker(plan)

    def notices(self, plan: NodePlan) -> tuple[Notice, ...]:
        """See `Planner`; and that a tool of this process keeps workers from being forked."""
        told = super().notices(plan)
        if not plan.fork_servers or not _own_process.is_followed():
            return told
        text = "the workers are executed, not forked: a tool of this process follows what it starts"
        return (*told, Notice("info", text))

    def results(self, plan: NodePlan) -> dict[int, Any]:
        """What the function returned, by rank; None for a program. Raises ResultError."""
        call, attempt = self._call, plan.meeting.attempt
        return {
            worker.rank: None if call is None else call.result(attempt, worker.local_rank, worker.rank)
            for worker in plan.workers
        }

    def finish(self, *, succeeded: bool) -> None:
        """Remove the files of the call, and the run's directory unless it holds something worth keeping."""
        if self._call is not None:
            self._call.remove(self.attempts - 1, self.local_world_size)
        super().finish(succeeded=succeeded)


def conclude(source: _Source, outcome: Outcome, side: OneNode) -> dict[int, Any]:
    """The results of a job that ended well; else the error of the job."""
    plan = outcome.last.plan
    is_stopped = any(one.caused_by_stop for one in outcome.last.exits)  # who is stopped may end with 0
    if (outcome.last.code or is_stopped) and (outcome.lost_output or not outcome.code):
        return {}  # the job has ended well: a spare took the place of this node
    if outcome.cause is not None:
        failed = failure_of(plan.job.program.name, outcome.last)
        raise (unguarded(failed) or failed) from outcome.error
    is_alone = type(side) is OneNode
    if outcome.code and not outcome.lost_output and not (is_alone and outcome.last.fatal_hang is None):
        judgement = judge_attempt(outcome.last) if is_alone else side.judged()
        lines = [] if judgement is None else verdict(judgement)
        text = lines[0] if lines else "the nodes of the job cannot go on without one of them"
        is_hang = outcome.code == HANG_CODE and judgement is not None and judgement.fault
        error = HangError(text) if is_hang else RendezvousError(text)
        error.exit_code = outcome.code
        raise outcome.error or error
    return source.results(plan)


def to_logger(_plan: NodePlan, text: str, level: Level, _mark: str) -> None:
    """Take a line of the narrator for the logger ``dsl``, whose records have levels."""
    log(level, text)


def log(level: str, text: str) -> None:
    """Tell the logger ``dsl``."""
    import logging

    logging.getLogger("dsl").log(logging.INFO if level == "detail" else LEVELS[level], "%s", text)
