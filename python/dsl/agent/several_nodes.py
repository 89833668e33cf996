"""Jobs of several nodes with a command or a program on each: with fixed places, or through a store."""

from __future__ import annotations

from contextlib import ExitStack

from dsl._record import replace
from dsl.agent.fixed_nodes import FixedNodes
from dsl.agent.planner import Planner, check_job
from dsl.agent.session import OneNode, end_by_signals
from dsl.errors import OptionError
from dsl.model.job import MeetingPoint, Notice
from dsl.plan.meeting_point import LOCAL_ADDRESS, STATIC, STORES
from dsl.plan.worker import inherited_environment
from dsl.words import counted, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl.agent.fixed_nodes import Ending, SeveralNodes
    from dsl.agent.session import Launch
    from dsl.facts import Facts
    from dsl.model.job import Job, NodePlan
    from dsl.plan.job import JobPlan
    from dsl.report.recorder import Recorder

HANDLERS = "torchrun.handlers"
"""The group of entry points that registers other backends with torch."""


def nodes_of(planned: JobPlan, facts: Facts, tell: Callable[[Notice], None]) -> SeveralNodes:
    """This node's part of a job. ``tell`` shows a notice to the user here.

    Raises:
        RendezvousError: the helper process cannot be started.
    """
    if planned.job.meeting.way == "port":
        return FixedNodes(planned, facts, tell)
    from dsl.agent.torch_nodes import TorchNodes

    return TorchNodes(planned, facts, tell)


def start(
    planned: JobPlan,
    facts: Facts,
    tell: Callable[[Sequence[Notice]], None],
    launch: Launch,
    let_go: Callable[[], None],
    recorder: Recorder | None,
    *,
    is_dry: bool,
) -> int:
    """Run this node's part of a job of several nodes, or show it if the run ``is_dry``.

    ``let_go`` is called before the wait for other nodes. ``recorder`` records the job. Returns the command's
    exit code only if nothing was started.

    Raises:
        DslError: the job cannot be planned or prepared, or the nodes do not meet.
    """
    job = planned.job
    if job.meeting.way == "store":
        _check_backend(job.meeting.backend)
    if is_dry:
        return _show(planned, facts, tell, launch)
    nodes = nodes_of(planned, facts, lambda one: tell([one]))
    with ExitStack() as stack:
        stack.callback(nodes.close)  # nothing was started
        check_job(job, facts)
        if job.debug.ranks and job.meeting.way == "store":
            from dsl.agent.preflight import need_debugger

            need_debugger(job, inherited_environment(job, facts.environ), facts)
        planner = Planner(replace(planned, notices=()), facts)
        tell(planned.notices)
        sketch = nodes.open(planner)
        let_go()
        handlers = stack.enter_context(ExitStack())
        handlers.callback(end_by_signals(job, nodes.awaited, nodes.close))

        def code_of(over: Ending | None) -> int | None:
            if over is None:
                return None
            notice, code = over
            if notice is not None:
                tell([notice])
                if recorder is not None:
                    recorder.end(code, [notice.text] if code else [])
            return code

        if (code := code_of(nodes.find())) is not None:
            return code
        session = launch(nodes)
        if nodes.node is not None:
            handlers.close()
            return session.run_joined(sketch, lambda: code_of(nodes.join()))
        nodes.release = handlers.close
        return session.run_guarded()


def _check_backend(name: str) -> None:
    """Refuse an unregistered backend before torch is asked for it."""
    if name in STORES:
        return
    from importlib.metadata import entry_points

    registered = sorted({one.name for one in entry_points(group=HANDLERS)})
    if name not in registered:
        known = ", ".join((STATIC, *STORES, *registered))
        raise OptionError(f"--rdzv-backend {quote(name)}: expected one of {known}")


def _show(planned: JobPlan, facts: Facts, tell: Callable[[Sequence[Notice]], None], launch: Launch) -> int:
    """Show the plan of this node, as if it were alone if the nodes still have to find each other."""
    job = planned.job
    check_job(job, facts)
    if job.meeting.way == "port" and planned.node_rank < job.node_count:
        return launch(OneNode(Planner(planned, facts))).run_guarded()
    point = MeetingPoint("alone", job.meeting.local_address or LOCAL_ADDRESS, 0)
    own = job.hosts[planned.node_rank : planned.node_rank + 1]
    alone = replace(planned, node_rank=0, job=replace(job, node_count=1, hosts=own, meeting=point))
    tell((*planned.notices, Notice("critical", _meeting_line(job))))
    return launch(_Silent(Planner(alone, facts))).run_guarded()


class _Silent(OneNode):
    """A node that stands for one of several: what it would be told is not known yet."""

    def notices(self, plan: NodePlan) -> Sequence[Notice]:  # noqa: ARG002  as others
        """Nothing."""
        return ()


def _meeting_line(job: Job) -> str:
    """How the nodes will meet, in one line."""
    point = job.meeting
    least, most = point.least_nodes, job.node_count
    count = counted(most, "node") if least == most else f"{least} to {most} nodes"
    count += f" and {counted(point.spares, 'spare')}" * bool(point.spares)
    where = f" at {point.endpoint}" if point.endpoint else ""
    return (
        f"{count} will meet through {point.backend}{where} as job {job.run_id}; this node alone would start:"
    )
