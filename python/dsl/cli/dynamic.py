"""Jobs whose nodes find each other: a helper process, the delegate, meets the other nodes for this one.

The first meeting comes before there is a guard.
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack, contextmanager

from dsl._record import replace
from dsl.agent.elastic import Elastic
from dsl.agent.envoy import Envoy
from dsl.agent.planner import Planner
from dsl.agent.session import ENDING, Crew, crew_of, listen, timers_of
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
    from collections.abc import Callable, Iterator, Sequence

    from dsl.agent.session import Launch
    from dsl.facts import Facts
    from dsl.model.job import Job
    from dsl.model.node import NodePlan
    from dsl.model.request import Request, ShowRequest
    from dsl.plan.job import JobPlan
    from dsl.rendezvous.dynamic import Delegate, Dynamic


HANDLERS = "torchrun.handlers"
"""The group of entry points that registers other backends with torch."""


def start_elastic(
    planned: JobPlan,
    request: Request,
    show: ShowRequest,
    facts: Facts,
    tell: Callable[[Sequence[Notice]], None],
    launch: Launch,
) -> int:
    """Run this node's part of a job whose nodes come and go, or show the part of the plan known beforehand.

    Returns the command's exit code only if nothing was started.

    Raises:
        DslError: the job cannot be planned or prepared, or the nodes do not meet.
    """
    job = planned.job
    _check_backend(job.meeting.backend)
    if show.dry_run or show.dry_run_json:
        return _show(planned, facts, launch)
    delegate = dynamic.Delegate(dynamic.delegate_words(), shows_errors=job.log_level == "debug")
    with ExitStack() as stack:
        stack.callback(delegate.reap)  # nothing was started
        handlers = stack.enter_context(ExitStack())
        handlers.enter_context(_ended_by_signals(delegate))
        check_program(job.program, job.flavour, facts.environ)
        if job.debug.ranks:
            from dsl.machine.programs import check_debugger
            from dsl.plan.program import interpreter_of

            python = interpreter_of(job.flavour, facts.environ, facts.names.executable)
            check_debugger(python, facts.environ)
        rendezvous = dynamic.Dynamic(job, facts.names.host, delegate)
        planner = Planner(planned, facts, rendezvous)

        tell(planned.notices)
        over = rendezvous.open(planner.local_world_size, lambda one: tell([one]))
        if over is not None:
            notice, code = describe_end(over)
            tell([notice])
            return code

        def crew(plan: NodePlan) -> Crew:
            handlers.close()  # signals are held back by now, and the guard will handle them
            return ElasticCrew(planner, plan, rendezvous, delegate, gives_up=request.max_restarts is None)

        return launch(
            planner, crew, lambda plan: (_greeting(rendezvous), *planner.notices(plan))
        ).run_guarded()


class ElasticCrew(Crew):
    """The crew of one node of a job whose nodes find each other."""

    def __init__(
        self, planner: Planner, plan: NodePlan, rendezvous: Dynamic, delegate: Delegate, *, gives_up: bool
    ) -> None:
        job = planner.job
        listeners = [*listen(planner, plan, Narrator(plan, has_others=True)), Envoy(plan, rendezvous)]
        policy = Elastic(job.meeting.least_nodes, job.node_count, plan.preempt_signal, gives_up=gives_up)
        super().__init__(listeners, (rendezvous, *timers_of(planner)), policy.decide)
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


def _greeting(rendezvous: Dynamic) -> Notice:
    names = rendezvous.hosts
    count = f"{len(names)} node{'s' if len(names) != 1 else ''}"
    return Notice("info", f"starting with {count}: {', '.join(names)}")


def _show(planned: JobPlan, facts: Facts, launch: Launch) -> int:
    """Show the plan of this node as if it were alone: which nodes take part is known only after they met."""
    job = planned.job
    check_program(job.program, job.flavour, facts.environ)
    point = MeetingPoint("alone", job.meeting.local_address or LOCAL_ADDRESS, 0)
    own = job.hosts[planned.node_rank : planned.node_rank + 1]
    alone = replace(planned, node_rank=0, job=replace(job, node_count=1, hosts=own, meeting=point))
    planner = Planner(alone, facts)
    notices = (*planned.notices, Notice("critical", meeting_line(job)))
    return launch(planner, lambda plan: crew_of(planner, plan), lambda _: notices).run_guarded()


def meeting_line(job: Job) -> str:
    """How the nodes will meet, in one line."""
    point = job.meeting
    least, most = point.least_nodes, job.node_count
    count = f"{most} node{'s' if most > 1 else ''}" if least == most else f"{least} to {most} nodes"
    where = f" at {point.endpoint}" if point.endpoint else ""
    return (
        f"{count} will meet through {point.backend}{where} as job {job.run_id}; this node alone would start:"
    )


@contextmanager
def _ended_by_signals(delegate: Delegate) -> Iterator[None]:
    """While there is no guard, let a signal end the delegate first and then this process."""

    def end(signum: int, _frame: object) -> None:
        delegate.reap()
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    taken = [one for one in ENDING if signal.getsignal(one) is signal.SIG_DFL]
    for signum in taken:
        signal.signal(signum, end)
    try:
        yield
    finally:
        for signum in taken:
            signal.signal(signum, signal.SIG_DFL)
