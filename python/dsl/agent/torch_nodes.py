"""Jobs whose nodes meet by torch's rendezvous: a helper process, the delegate, meets them for this node.

The first meeting comes before there is a guard.
"""

from __future__ import annotations

from contextlib import ExitStack

from dsl import Exited
from dsl._record import replace
from dsl.agent.elastic import Elastic
from dsl.agent.planner import Planner
from dsl.agent.session import Crew, Hooks, crew_of, end_by_signals, listen, timers_of
from dsl.errors import OptionError
from dsl.lists import counted, quote
from dsl.machine.check import check_program
from dsl.model.job import Job, MeetingPoint, Notice, RestartReason
from dsl.model.nodes import MeetingRefused, PeerFailure
from dsl.model.outcome import AttemptStarted, Awaiting
from dsl.plan.meeting_point import LOCAL_ADDRESS, STATIC, STORES
from dsl.rendezvous import dynamic
from dsl.rendezvous.delegate_messages import Finish, Leave
from dsl.report.narrator import CONSOLE
from dsl.report.other_nodes import describe_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Exit
    from dsl.agent.session import Launch
    from dsl.facts import Facts
    from dsl.model.job import NodePlan
    from dsl.model.judgement import Judgement
    from dsl.plan.job import JobPlan
    from dsl.report.narrator import Sink

HANDLERS = "torchrun.handlers"
"""The group of entry points that registers other backends with torch."""


class TorchNodes(Hooks):
    """The delegate of this node, and what takes part in the job besides."""

    def __init__(self, planned: JobPlan, facts: Facts, *, gives_up: bool) -> None:
        """Start the delegate. ``gives_up``: see `Elastic`. Raises RendezvousError: it cannot be started."""
        self._job, self._gives_up = planned.job, gives_up
        shows_errors = planned.job.log_level == "debug"
        self._delegate = dynamic.Delegate(dynamic.delegate_words(), shows_errors=shows_errors)
        self.helper = self._delegate.pid
        self._rendezvous = dynamic.Dynamic(planned.job, facts.names.host, self._delegate)

    def open(self, planner: Planner, tell: Callable[[Notice], None]) -> PeerFailure | MeetingRefused | None:
        """Meet the other nodes for the first time, for this planner; see `Dynamic.open`."""
        self._planner = planner
        planner.meet_by(self._rendezvous)
        return self._rendezvous.open(planner.local_world_size, tell)

    def notices(self, plan: NodePlan) -> tuple[Notice, ...]:
        """What the user should know about the first plan, once the nodes have met."""
        names = self._rendezvous.hosts
        greeting = Notice("info", f"starting with {counted(len(names), 'node')}: {', '.join(names)}")
        return (greeting, *self._planner.notices(plan))

    def crew(self, plan: NodePlan, sink: Sink = CONSOLE) -> Crew:
        """The crew of this node."""
        job, rendezvous = self._job, self._rendezvous
        listeners = [*listen(self._planner, plan, sink, has_others=True), Envoy(plan, rendezvous)]
        least, most = job.meeting.least_nodes, job.node_count
        policy = Elastic(least, most, plan.preempt_signal, gives_up=self._gives_up)
        return Crew(listeners, (rendezvous, *timers_of(self._planner)), policy.decide, hooks=self)

    def judged(self) -> Judgement | None:
        """No conductor judges for all nodes."""
        return None

    def stay(self) -> None:
        """Leave the connection to the delegate to the agent."""
        self._delegate.close()

    def leave(self, code: int) -> int:
        """Let the delegate leave the other nodes, and wait for that."""
        self._delegate.see_off()
        return code

    def close(self) -> None:
        """End the delegate, in the process that has started it."""
        self._delegate.reap()


class Envoy:
    """A listener that tells the other nodes what happens here, by orders to the rendezvous."""

    def __init__(self, plan: NodePlan, rendezvous: dynamic.Dynamic) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._has_told = False

    def hear(self, event: object) -> None:
        """Pass on what the other nodes have to know."""
        if isinstance(event, AttemptStarted):
            self._plan, self._has_told = event.plan, False
        elif isinstance(event, Exited):
            exit_ = event.exit
            if exit_.status and not exit_.caused_by_stop and not self._has_told:
                self._has_told = True
                self._rendezvous.send(self._failure(exit_, is_final=False))
        elif isinstance(event, Awaiting):
            self._await(event)

    def _await(self, event: Awaiting) -> None:
        decision, history = event.decision, event.history
        if decision.kind == "finish":
            self._rendezvous.send(Finish())
        elif decision.kind == "doubt":
            self._rendezvous.wait(decision.within_s)
        elif decision.kind == "leave":
            if decision.closes:
                cause = history.attempts[-1].cause
                lost = PeerFailure(self._rendezvous.host, -1, decision.code or 1, None, is_final=True)
                self._rendezvous.send(lost if cause is None else self._failure(cause, is_final=True))
            elif decision.code:
                self._rendezvous.send(Leave())
            self._rendezvous.wait(decision.within_s, for_goodbye=True)
        else:
            restarts = history.restarts + decision.counted
            why: RestartReason = "failure" if decision.counted else "membership"
            self._rendezvous.join(restarts, why, decision.within_s)

    def _failure(self, exit_: Exit, *, is_final: bool) -> PeerFailure:
        from dsl.evidence.reports import failed

        facts = failed(self._plan.workers[exit_.worker], exit_)
        return PeerFailure(self._rendezvous.host, facts.rank, facts.status, facts, is_final)


def start(
    planned: JobPlan,
    facts: Facts,
    tell: Callable[[Sequence[Notice]], None],
    launch: Launch,
    let_go: Callable[[], None],
    *,
    is_dry: bool,
    gives_up: bool,
) -> int:
    """Run this node's part of a job whose nodes come and go, or show what is known of it beforehand.

    ``let_go`` is called before the wait for other nodes. ``gives_up``: see `Elastic`. Returns the command's
    exit code only if nothing was started.

    Raises:
        DslError: the job cannot be planned or prepared, or the nodes do not meet.
    """
    job = planned.job
    _check_backend(job.meeting.backend)
    if is_dry:
        return _show(planned, facts, launch)
    nodes = TorchNodes(planned, facts, gives_up=gives_up)
    with ExitStack() as stack:
        stack.callback(nodes.close)  # nothing was started
        handlers = stack.enter_context(ExitStack())
        place = f" at {job.meeting.endpoint}" if job.meeting.endpoint else ""
        awaited = f"the nodes with run id {job.run_id}{place}"
        handlers.callback(end_by_signals(job.flavour.command, lambda: awaited, nodes.close))
        check_program(job.program, job.flavour, facts.environ)
        if job.debug.ranks:
            from dsl.agent.preflight import need_debugger

            need_debugger(job, facts.environ, facts)
        planner = Planner(planned, facts)
        tell(planned.notices)
        let_go()
        over = nodes.open(planner, lambda one: tell([one]))
        if over is not None:
            notice, code = describe_end(over)
            tell([notice])
            return code

        def crew(plan: NodePlan) -> Crew:
            handlers.close()  # signals are held back by now, and the guard will handle them
            return nodes.crew(plan)

        return launch(planner, crew, nodes.notices).run_guarded()


def _check_backend(name: str) -> None:
    """Refuse an unregistered backend before torch is asked for it."""
    if name in STORES:
        return
    from importlib.metadata import entry_points

    registered = sorted({one.name for one in entry_points(group=HANDLERS)})
    if name not in registered:
        known = ", ".join((STATIC, *STORES, *registered))
        raise OptionError(f"--rdzv-backend {quote(name)}: expected one of {known}")


def _show(planned: JobPlan, facts: Facts, launch: Launch) -> int:
    """Show the plan of this node as if it were alone: which nodes take part is known only after they met."""
    job = planned.job
    check_program(job.program, job.flavour, facts.environ)
    point = MeetingPoint("alone", job.meeting.local_address or LOCAL_ADDRESS, 0)
    own = job.hosts[planned.node_rank : planned.node_rank + 1]
    alone = replace(planned, node_rank=0, job=replace(job, node_count=1, hosts=own, meeting=point))
    planner = Planner(alone, facts)
    notices = (*planned.notices, Notice("critical", _meeting_line(job)))
    return launch(planner, lambda plan: crew_of(planner, plan), lambda _: notices).run_guarded()


def _meeting_line(job: Job) -> str:
    """How the nodes will meet, in one line."""
    point = job.meeting
    least, most = point.least_nodes, job.node_count
    count = counted(most, "node") if least == most else f"{least} to {most} nodes"
    where = f" at {point.endpoint}" if point.endpoint else ""
    return (
        f"{count} will meet through {point.backend}{where} as job {job.run_id}; this node alone would start:"
    )
