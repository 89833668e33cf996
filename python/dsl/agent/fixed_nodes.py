"""A node's part in a job of several nodes: its way to the others, for commands and for programs.

Here for nodes with fixed places, in `torch_nodes` for nodes that find each other through a store.
"""

from __future__ import annotations

from dsl.agent.calling import OtherNode
from dsl.agent.joining import joining_of
from dsl.agent.leading import FirstNode
from dsl.agent.member import Member
from dsl.agent.session import OneNode
from dsl.control.messages import Checked, Over, Refused
from dsl.model.job import Meeting, Notice
from dsl.report.verdict import verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from dsl import Supervisor
    from dsl.agent.calling import Calling
    from dsl.agent.leading import Leading
    from dsl.agent.planner import Planner
    from dsl.agent.roles import Channel, Listener
    from dsl.facts import Facts
    from dsl.model.job import Job, NodePlan
    from dsl.model.judgement import Judgement
    from dsl.plan.job import JobPlan

    Ending: TypeAlias = tuple[Notice | None, int]
    """How a job has ended without this node, for the user here, and the exit code."""


class SeveralNodes(OneNode):
    """This node's part of the job, and its way to the conductor."""

    member: Member | None = None
    """What decides under a conductor, once the nodes have met."""
    node: FirstNode | OtherNode | Leading | Calling | None = None
    """The way to the conductor; None: there is none."""
    supervisor: Supervisor | None = None
    """That of the agent's process; None: there is no agent of its own."""
    is_serving = False
    """This process serves the connections."""

    @property
    def is_judged(self) -> bool:  # type: ignore[override]
        """A conductor judges for all nodes."""
        return self.node is not None

    def open(self, planner: Planner, first: Meeting | None = None) -> NodePlan:
        """Make what the others need to find this node. Raises DslError.

        ``first`` stands for the first meeting. Returns what the guard has to know of the first plan.
        """
        super().__init__(planner)
        self.release: Callable[[], object] = lambda: None
        """Called when signals are held back for the guard: who has handled them so far does no more."""
        return planner.sketch(first)

    def find(self) -> Ending | None:
        """Find the node that conducts. Signals of this process end the wait.

        Returns how the job has ended if it did not need this node. Raises DslError: the nodes do not meet.
        """
        raise NotImplementedError

    def awaited(self) -> str:
        """What `find` waits for, in words."""
        raise NotImplementedError

    def enter(self, supervisor: Supervisor | None = None) -> None:
        """Serve the connections. From here on this process must not fork and go on in the child."""
        self.supervisor, self.is_serving = supervisor, True
        if self.node is not None:
            self.node.start(supervisor)

    def join(self) -> Ending | None:
        """Wait for the first meeting under the conductor.

        Returns how the job has ended, or that a signal has ended the wait. Raises DslError.
        """
        raise NotImplementedError

    def _take(self, met: object) -> Ending | None:
        """Take part from the first meeting, unless something else is the end of the wait for it."""
        if isinstance(met, int):
            return None, met
        if isinstance(met, Over):
            return ended_without_us(self.planner.job, met)
        assert isinstance(met, Meeting)
        self.decider = self.member = self.new_member(met)
        self.planner.meet_by(self.member)
        return None

    def new_member(self, met: Meeting) -> Member:
        """What decides from the first meeting on."""
        assert self.node is not None
        return Member(self.node, met)

    def listeners(self, plan: NodePlan) -> list[Listener]:
        """Those of every node, and the member."""
        return [*super().listeners(plan), *([] if self.member is None else [self.member])]

    def channels(self) -> list[Channel]:
        """What the conductor says, and those of every node."""
        return [*([] if self.member is None else [self.member]), *super().channels()]

    def judged(self) -> Judgement | None:
        """How the job has ended on all nodes, see `Member.judgement`."""
        return None if self.member is None else self.member.judgement

    def stay(self) -> None:
        """Leave the connections to the agent: when the agent dies, the other nodes see it at once."""
        if self.node is not None:
            self.node.disown()

    def refuse(self, command: str, text: str, code: int) -> None:
        """Report it, and tell the conductor that this node has no part in the job."""
        super().refuse(command, text, code)
        if self.node is not None:
            self.node.send(Refused(text, code))

    def leave(self, code: int) -> int:
        """Say goodbye to the other nodes."""
        if self.node is not None and self.is_serving:
            self.node.leave()
        return code

    def close(self) -> None:
        """Leave the other nodes, in a program that has run its part or failed to."""
        self.leave(1)


class FixedNodes(SeveralNodes):
    """A node with a fixed place: the others connect at a port of node 0, whose address all know."""

    node: FirstNode | OtherNode
    _offer: Callable[[], Checked] | None = None
    _first: Meeting | None = None
    """The first meeting, if this node is not node 0 and has called that."""

    def __init__(self, planned: JobPlan, facts: Facts, tell: Callable[[Notice], None]) -> None:
        """``tell`` shows a notice to the user here."""
        self._planned, self._facts, self._tell = planned, facts, tell

    def open(self, planner: Planner, first: Meeting | None = None) -> NodePlan:
        """Listen, if this is node 0. Raises DslError."""
        job, size = self._planned.job, planner.local_world_size
        if self._planned.node_rank >= job.node_count:  # a spare: nobody knows yet whose place it will have
            first = first or Meeting(0, 0, (size,) * job.node_count, job.meeting.address, 0)
        sketch = super().open(planner, first)
        joining = joining_of(self._planned, self._facts, size)
        self._offer = self._own_place if job.meeting.spares else None
        if self._planned.node_rank:
            self.node = OtherNode(joining, self._tell, self._offer)
        else:
            self.node = node = FirstNode(joining, self._facts.ports, self._tell, self._offer)
            self.elsewhere = node.elsewhere
        return sketch

    def _own_place(self) -> Checked:
        """Where rank 0 would listen on this node."""
        point, facts = self._planned.job.meeting, self._facts
        own = point.local_address
        addresses = (own,) if own else facts.network.addresses_toward((point.address,), point.address)
        return Checked(addresses=addresses[:1], free_port=facts.ports.pick())

    def new_member(self, met: Meeting) -> Member:
        """What decides from the first meeting on."""
        member = Member(self.node, met, self._offer)
        member.stays = isinstance(self.node, FirstNode)
        return member

    def find(self) -> Ending | None:
        """Call node 0, unless this node is node 0."""
        if isinstance(self.node, OtherNode):
            found = self.node.call()
            if isinstance(found, Over):
                self.node.disown()  # a program goes on
                return self._take(found)
            self._first = found
        return None

    def awaited(self) -> str:
        """What `find` waits for, in words."""
        return self.node.awaited if isinstance(self.node, OtherNode) else ""

    def join(self) -> Ending | None:
        """Wait for the first meeting."""
        node = self.node
        return self._take(node.join(self.supervisor) if isinstance(node, FirstNode) else self._first)


def ended_without_us(job: Job, over: Over) -> Ending:
    """The notice about a job that ended while this node was a spare, and the exit code."""
    judgement = over.judgement
    if judgement is None or not judgement.code:
        return Notice("info", f"the job {job.run_id} has ended without this node, which was a spare"), 0
    return Notice("error", f"the job is over: {verdict(judgement)[0]}"), judgement.code
