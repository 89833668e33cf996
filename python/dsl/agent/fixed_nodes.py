"""Jobs whose nodes have fixed places (``--node-rank``), with a command or a program on each of them."""

from __future__ import annotations

from dsl.agent.first_node import FirstNode
from dsl.agent.joining import joining_of
from dsl.agent.member import Member
from dsl.agent.other_node import OtherNode
from dsl.agent.planner import Planner
from dsl.agent.session import OneNode, end_by_signals
from dsl.control.messages import Refused
from dsl.machine.check import check_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Supervisor
    from dsl.agent.roles import Channel, Listener
    from dsl.agent.session import Launch
    from dsl.facts import Facts
    from dsl.model.job import NodePlan, Notice
    from dsl.model.judgement import Judgement
    from dsl.plan.job import JobPlan


class FixedNodes(OneNode):
    """This node's part of the job, and its way to the conductor."""

    decider: Member | None = None
    is_judged = True

    def __init__(
        self,
        planned: JobPlan,
        facts: Facts,
        planner: Planner,
        tell: Callable[[Notice], None],
        again: tuple[tuple[str, ...], int] = ((), 0),
    ) -> None:
        """``tell`` shows a notice to the user here. ``again``: see `joining_of`. Raises DslError."""
        super().__init__(planner)
        joining = joining_of(planned, facts, planner.local_world_size, again)
        self._node: FirstNode | OtherNode
        if planned.node_rank:
            self._node = OtherNode(planned.job, joining, tell)
        else:
            self._node = first = FirstNode(planned.job, joining, facts.ports, tell)
            self.elsewhere = first.elsewhere

    def call(self) -> None:
        """Find node 0, unless this node is node 0. Signals of this process end the wait. Raises DslError."""
        self._node.call()

    def awaited(self) -> str:
        """What `call` waits for, in words."""
        return self._node.awaited if isinstance(self._node, OtherNode) else ""

    def enter(self, supervisor: Supervisor | None = None) -> None:  # noqa: ARG002  as of all hooks
        """Serve the connections. From here on this process must not fork and go on in the child."""
        self._node.start()

    def join(self, supervisor: Supervisor | None = None) -> int | None:
        """Wait for the first meeting; an exit code if a signal that ``supervisor`` reports ends the wait.

        Raises:
            RendezvousError: the nodes have not come in time.
        """
        met = self._node.join(supervisor)
        if isinstance(met, int):
            return met
        self.decider = Member(self._node, met, self.planner.job.max_restarts)
        self.planner.meet_by(self.decider)
        return None

    def listeners(self, plan: NodePlan) -> list[Listener]:
        """Those of every node, and the two that tell the conductor."""
        assert self.decider is not None
        return [*super().listeners(plan), self.decider, self._node]

    def channels(self) -> list[Channel]:
        """What the conductor says, and those of every node."""
        assert self.decider is not None
        return [self.decider, *super().channels()]

    def judged(self) -> Judgement | None:
        """How the job has ended on all nodes, see `Member.judgement`."""
        return None if self.decider is None else self.decider.judgement

    def stay(self) -> None:
        """Leave the connections to the agent: when the agent dies, the other nodes see it at once."""
        self._node.disown()

    def refuse(self, command: str, text: str, code: int) -> None:
        """Report it, and tell the conductor that this node has no part in the job."""
        super().refuse(command, text, code)
        self._node.send(Refused(text, code))

    def leave(self, code: int) -> int:
        """Say goodbye to the other nodes."""
        self._node.leave(code)
        return code

    def close(self) -> None:
        """Leave the other nodes, in a program that has run its part or failed to."""
        self.leave(1)


def start(
    planned: JobPlan,
    facts: Facts,
    again: tuple[tuple[str, ...], int],
    tell: Callable[[Sequence[Notice]], None],
    launch: Launch,
    let_go: Callable[[], None],
    *,
    is_dry: bool,
) -> int:
    """Run this node's part of a job with fixed places, or show it if the run ``is_dry``.

    ``again``: see `joining_of`. ``let_go`` is called before the wait for other nodes.
    Returns the command's exit code only if nothing was started.

    Raises:
        DslError: the job cannot be planned or prepared, or the nodes do not meet.
    """
    check_program(planned.job.program, planned.job.flavour, facts.environ)
    tell(planned.notices)
    planner = Planner(planned, facts)
    if is_dry:
        return launch(planner, OneNode(planner), planner.notices).run_guarded()
    sketch = planner.sketch()
    nodes = FixedNodes(planned, facts, planner, lambda notice: tell([notice]), again)
    let_go()
    release = end_by_signals(planned.job.flavour.command, nodes.awaited)
    try:
        nodes.call()
    finally:
        release()
    return launch(planner, nodes, planner.notices).run_joined(sketch, nodes.join)
