"""Jobs whose nodes find each other: a helper process, the delegate, meets the other nodes for this one.

The first meeting comes before there is a guard.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

from dsl._record import replace
from dsl.agent.elastic import Elastic
from dsl.agent.envoy import Envoy
from dsl.agent.planner import Planner
from dsl.cli.process import ENDING, Crew, HeldSignals, channels_of, listen, run_guarded
from dsl.errors import OptionError
from dsl.lists import quote
from dsl.machine.check import check_program
from dsl.model.job import MeetingPoint, Notice
from dsl.plan.meeting_point import LOCAL_ADDRESS, STATIC, STORES
from dsl.rendezvous import dynamic
from dsl.report.narrator import Narrator
from dsl.report.other_nodes import describe_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from typing import Protocol

    from dsl.facts import Facts
    from dsl.model.job import Job
    from dsl.model.node import NodePlan
    from dsl.model.request import Request, ShowRequest
    from dsl.plan.job import JobPlan
    from dsl.rendezvous.dynamic import Delegate, Dynamic

    class Speaker(Protocol):
        """What this module needs of a command: its messages start with the command's name."""

        def say(self, text: str) -> None:
            """Write one line to stderr."""

        def show(self, notices: Sequence[Notice], log_level: str) -> None:
            """Say the notices of this level or above."""


HANDLERS = "torchrun.handlers"
"""The group of entry points that registers other backends with torch."""


def start_elastic(
    command: Speaker,
    planned: JobPlan,
    request: Request,
    show: ShowRequest,
    facts: Facts,
) -> int:
    """Run this node's part of a job whose nodes come and go, or show the part of the plan known beforehand.

    Returns the command's exit code only if nothing was started.

    Raises:
        DslError: the job cannot be planned or prepared, or the nodes do not meet.
    """
    job = planned.job
    _check_backend(job.meeting.backend)
    if show.dry_run or show.dry_run_json:
        return _show(command, planned, show, facts)
    delegate = dynamic.Delegate(dynamic.delegate_words(), shows_errors=job.log_level == "debug")
    with HeldSignals() as held, ExitStack() as stack:
        stack.callback(delegate.reap)  # nothing was started
        with _ended_by_signals(delegate):
            check_program(job.program, job.flavour, facts.environ)
            if job.debug.ranks:
                from dsl.machine.programs import check_debugger
                from dsl.plan.program import interpreter_of

                python = interpreter_of(job.flavour, facts.environ, facts.names.executable)
                check_debugger(python, facts.environ)
            rendezvous = dynamic.Dynamic(job, facts.names.host, delegate)
            planner = Planner(planned, facts, rendezvous)
            stack.callback(planner.finish, succeeded=False)
            command.show(planned.notices, request.log_level)
            over = rendezvous.open(
                planner.local_world_size, lambda one: command.show([one], request.log_level)
            )
            if over is not None:
                notice, code = describe_end(over)
                command.show([notice], request.log_level)
                return code
            plan = planner.plan(0)
            command.show([_greeting(rendezvous), *_of_now(plan, made=False)], request.log_level)
            if job.debug.ranks:
                from dsl.plan.debugging import attach_notices, check_ports

                check_ports(plan, facts)
                command.show(attach_notices(plan, job), request.log_level)
            if show.is_asked:
                from dsl.cli.show import show_plan

                show_plan(show, plan, facts.environ, command.say)
            held.hold()
            plan = planner.prepare(plan)
            command.show(_of_now(plan, made=True), request.log_level)
        crew = ElasticCrew(planner, plan, rendezvous, delegate, gives_up=request.max_restarts is None)
        is_terminal = facts.console.stdin_is_terminal
        return run_guarded(planner, plan, crew, held, stdin_is_terminal=is_terminal)


class ElasticCrew(Crew):
    """The crew of one node of a job whose nodes find each other."""

    def __init__(
        self, planner: Planner, plan: NodePlan, rendezvous: Dynamic, delegate: Delegate, *, gives_up: bool
    ) -> None:
        job = planner.job
        listeners = [*listen(planner, plan, Narrator(plan, has_others=True)), Envoy(plan, rendezvous)]
        policy = Elastic(job.meeting.least_nodes, job.node_count, plan.preempt_signal, gives_up=gives_up)
        super().__init__(listeners, (rendezvous, *channels_of(planner)), policy.decide)
        self._delegate = delegate
        self.helper = delegate.pid

    def stay(self) -> None:
        """Leave the connection to the delegate to the agent."""
        self._delegate.close()

    def leave(self, code: int) -> int:
        """Let the delegate leave the other nodes, and wait for that."""
        self._delegate.see_off()
        return code


def _check_backend(name: str) -> None:
    """Refuse an unregistered backend before torch is asked for it."""
    if name in STORES:
        return
    from importlib.metadata import entry_points

    registered = sorted({one.name for one in entry_points(group=HANDLERS)})
    if name not in registered:
        known = ", ".join((STATIC, *STORES, *registered))
        raise OptionError(f"--rdzv-backend {quote(name)}: expected one of {known}")


def _of_now(plan: NodePlan, *, made: bool) -> list[Notice]:
    return [notice for notice in plan.notices if notice.is_made == made]


def _greeting(rendezvous: Dynamic) -> Notice:
    names = rendezvous.hosts
    count = f"{len(names)} node{'s' if len(names) != 1 else ''}"
    return Notice("info", f"starting with {count}: {', '.join(names)}")


def _show(command: Speaker, planned: JobPlan, show: ShowRequest, facts: Facts) -> int:
    """Show the plan of this node as if it were alone: which nodes take part is known only after they met."""
    from dsl.cli.show import show_plan

    job = planned.job
    check_program(job.program, job.flavour, facts.environ)
    point = MeetingPoint("alone", job.meeting.local_address or LOCAL_ADDRESS, 0)
    own = job.hosts[planned.node_rank : planned.node_rank + 1]
    alone = replace(planned, node_rank=0, job=replace(job, node_count=1, hosts=own, meeting=point))
    plan = Planner(alone, facts).plan(0)
    command.show(planned.notices, job.log_level)
    command.say(meeting_line(job))
    show_plan(show, plan, facts.environ, command.say)
    return 0


def meeting_line(job: Job) -> str:
    """How the nodes will meet, in one line."""
    point = job.meeting
    least, most = point.least_nodes, job.node_count
    count = f"{most} node{'s' if most > 1 else ''}" if least == most else f"{least} to {most} nodes"
    where = f" at {point.endpoint}" if point.endpoint else ""
    return (
        f"{count} will meet through {point.backend}{where} as job {job.run_id}; this node alone would start:"
    )


def _ended_by_signals(delegate: Delegate) -> AbstractContextManager[None]:
    """While there is no guard, let a signal end the delegate first and then this process."""
    import signal
    from contextlib import contextmanager

    def end(signum: int, _frame: object) -> None:
        delegate.reap()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    @contextmanager
    def handled() -> Iterator[None]:
        taken = [one for one in ENDING if signal.getsignal(one) is signal.SIG_DFL]
        for signum in taken:
            signal.signal(signum, end)
        try:
            yield
        finally:
            for signum in taken:
                signal.signal(signum, signal.SIG_DFL)

    return handled()
