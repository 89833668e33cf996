"""Jobs whose nodes meet by torch's rendezvous: a helper process, the delegate, meets them for this node.

The first meeting comes before there is a guard.
"""

from __future__ import annotations

from contextlib import ExitStack

from dsl import Exited, SignalReceived, Stopping
from dsl._record import replace
from dsl.agent.elastic import Elastic, History, Step
from dsl.agent.planner import Planner
from dsl.agent.session import OneNode, end_by_signals
from dsl.errors import OptionError
from dsl.lists import counted, quote
from dsl.machine.check import check_program
from dsl.model.job import Job, MeetingPoint, Notice, RestartReason
from dsl.model.nodes import MeetingRefused, PeerFailure
from dsl.model.outcome import (
    GO_ON,
    AttemptOutcome,
    AttemptStarted,
    Awaiting,
    Decision,
    MembershipChanged,
    RestartFailed,
    Restarting,
)
from dsl.model.progress import with_attempt
from dsl.plan.meeting_point import LOCAL_ADDRESS, STATIC, STORES
from dsl.rendezvous import dynamic
from dsl.rendezvous.delegate_messages import Finish, Leave
from dsl.report.other_nodes import describe_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Exit
    from dsl.agent.roles import Channel, Listener
    from dsl.agent.session import Launch
    from dsl.facts import Facts
    from dsl.model.job import NodePlan
    from dsl.plan.job import JobPlan

HANDLERS = "torchrun.handlers"
"""The group of entry points that registers other backends with torch."""


class TorchNodes(OneNode):
    """The delegate of this node, and what takes part in the job besides."""

    has_others = True

    def __init__(self, planned: JobPlan, facts: Facts, *, gives_up: bool) -> None:
        """Start the delegate. ``gives_up``: see `Elastic`. Raises RendezvousError: it cannot be started."""
        self._job, self._gives_up = planned.job, gives_up
        self.release: Callable[[], object] = lambda: None
        """Called when signals are held back for the guard: who has handled them so far does no more."""
        shows_errors = planned.job.log_level == "debug"
        self._delegate = dynamic.Delegate(dynamic.delegate_words(), shows_errors=shows_errors)
        self.helper = self._delegate.pid
        self._rendezvous = dynamic.Dynamic(planned.job, facts.names.host, self._delegate)

    def open(self, planner: Planner, tell: Callable[[Notice], None]) -> PeerFailure | MeetingRefused | None:
        """Meet the other nodes for the first time, for this planner; see `Dynamic.open`."""
        super().__init__(planner)
        planner.meet_by(self._rendezvous)
        return self._rendezvous.open(planner.local_world_size, tell)

    def notices(self, plan: NodePlan) -> tuple[Notice, ...]:
        """What the user should know about the first plan, once the nodes have met."""
        names = self._rendezvous.hosts
        greeting = Notice("info", f"starting with {counted(len(names), 'node')}: {', '.join(names)}")
        return (greeting, *self.planner.notices(plan))

    def listeners(self, plan: NodePlan) -> list[Listener]:
        """Those of every node, and the one that tells the others."""
        self.release()
        job, point = self._job, self._job.meeting
        elastic = Elastic(point.least_nodes, job.node_count, plan.preempt_signal, gives_up=self._gives_up)
        self.decider = envoy = Envoy(plan, self._rendezvous, elastic, job.max_restarts)
        return [*super().listeners(plan), envoy]

    def channels(self) -> list[Channel]:
        """What the delegate says, and those of every node."""
        return [self._rendezvous, *super().channels()]

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


NEWS = (SignalReceived, PeerFailure, MeetingRefused, MembershipChanged)
"""Events that matter to later decisions."""


class Envoy:
    """Decider and listener of a node that torch's rendezvous joins with others, to which it sends orders."""

    def __init__(
        self, plan: NodePlan, rendezvous: dynamic.Dynamic, elastic: Elastic, max_restarts: int
    ) -> None:
        self._plan = plan
        self._rendezvous = rendezvous
        self._elastic = elastic
        self._history = History(max_restarts)
        self._leaving: Step | None = None
        self._count = 0
        """How many attempts have ended."""
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

    def decide(self, event: object, last: AttemptOutcome | None) -> Decision:
        """Say what follows from an event."""
        history = self._history
        if isinstance(event, AttemptOutcome):
            self._count += 1
            history = replace(history, last=event, news=event.news, tried=with_attempt(history.tried, event))
        elif isinstance(event, RestartFailed):
            event, history = last, replace(history, max_restarts=0, gives_up=True, awaits="")
        elif isinstance(event, NEWS) or (isinstance(event, Stopping) and event.reason == "guard_lost"):
            history = replace(history, news=(*history.news, event))
        self._history = history
        step = self._elastic.decide(history, event, self._rendezvous.membership())
        if step.kind == "go_on":
            return GO_ON
        if last is None:
            return Decision("stop")
        if self._leaving is not None:
            step = replace(self._leaving, kind="end")
        if step.kind == "end":
            return Decision("end", code=step.code, why=step.why)
        return self._again(step, last) if step.kind == "restart" else self._await(step, last)

    def _again(self, step: Step, last: AttemptOutcome) -> Decision:
        history = self._history
        restarts = history.restarts + step.counted if step.restarts is None else step.restarts
        self._history = replace(history, restarts=restarts, news=(), awaits="")
        told = Restarting(last, restarts, history.max_restarts, step.counted)
        return Decision("start", attempt=self._count, restarts=restarts, told=told)

    def _await(self, step: Step, last: AttemptOutcome) -> Decision:
        """Order what this node waits for. The decision on how it ends is made before it leaves."""
        rendezvous, within_s = self._rendezvous, step.within_s
        self._history = replace(self._history, awaits=step.kind)
        if step.kind == "finish":
            rendezvous.send(Finish())
            return Decision("go_on", told=Awaiting(last, "end"))
        if step.kind == "doubt":
            rendezvous.wait(within_s)
            return Decision("go_on", told=Awaiting(last, "loss", within_s))
        if step.kind == "leave":
            self._leaving = step
            if step.closes:
                lost = PeerFailure(rendezvous.host, -1, step.code or 1, None, is_final=True)
                rendezvous.send(lost if last.cause is None else self._failure(last.cause, is_final=True))
            elif step.code:
                rendezvous.send(Leave())
            rendezvous.wait(within_s, for_goodbye=True)
            return Decision("go_on", told=Awaiting(last, "goodbye", within_s))
        why: RestartReason = "failure" if step.counted else "membership"
        rendezvous.join(self._history.restarts + step.counted, why, within_s)
        return Decision("go_on", told=Awaiting(last, "meeting", within_s))

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

        nodes.release = handlers.close
        return launch(planner, nodes, nodes.notices).run_guarded()


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
    return launch(planner, OneNode(planner), lambda _: notices).run_guarded()


def _meeting_line(job: Job) -> str:
    """How the nodes will meet, in one line."""
    point = job.meeting
    least, most = point.least_nodes, job.node_count
    count = counted(most, "node") if least == most else f"{least} to {most} nodes"
    where = f" at {point.endpoint}" if point.endpoint else ""
    return (
        f"{count} will meet through {point.backend}{where} as job {job.run_id}; this node alone would start:"
    )
