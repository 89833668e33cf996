"""Jobs whose nodes have fixed places (``--node-rank``), with a command or a program on each of them."""

from __future__ import annotations

import time

from dsl._record import replace
from dsl.agent.first_node import FirstNode
from dsl.agent.joining import WAITING, joining_of
from dsl.agent.member import Member
from dsl.agent.planner import Planner
from dsl.agent.session import OneNode, end_by_signals
from dsl.control.hub import Hub, connect
from dsl.control.messages import Bye, Lost, Moved, Over, Refused, Said
from dsl.errors import ControlError, RefusedLinkError, RendezvousError
from dsl.lists import with_port
from dsl.machine.check import check_program
from dsl.machine.network import resolve
from dsl.model.job import Meeting, Notice
from dsl.model.judgement import Absence, Judgement, Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Supervisor
    from dsl.agent.joining import Joining
    from dsl.agent.roles import Channel, Listener
    from dsl.agent.session import Launch
    from dsl.control.hub import Link
    from dsl.facts import Facts
    from dsl.model.job import Job, NodePlan
    from dsl.plan.job import JobPlan

REMIND_S = 2.0
"""After this time the user hears that node 0 is not there."""

ANSWER_S = 10.0
"""Time that node 0 has to answer a call, and time after which we look up its name again."""

PAUSE_S = 0.2
"""Pause before another call, if node 0 has ended the last one."""

LEAST_CALL_S = 0.05
"""A call takes at least this long, also at the end of the wait."""

FAREWELL_S = 5.0
FAILURE = 1
NONSENSE = "has sent something that no dslrun says"


class OtherNode:
    """A node that connects to node 0: the conversation of its part with the conductor there."""

    deadline_s = None

    def __init__(self, job: Job, joining: Joining, tell: Callable[[Notice], None]) -> None:
        """``tell`` shows a notice to the user here."""
        self._command, self._joining, self._tell = job.flavour.command, joining, tell
        self._hub = Hub(joining.silence_s)
        self._link: Link | None = None
        self._first_host = ""
        self._meeting: Meeting | None = None
        self._is_over = False
        self.awaited = "node 0"
        """What this node waits for before the first meeting, in words."""
        now_s = time.monotonic()
        self._remind_s, self._expire_s = now_s + REMIND_S, now_s + joining.timeout_s

    def call(self) -> None:
        """Find node 0, and wait for the first meeting. Signals of this process end the wait.

        Raises:
            RefusedLinkError: node 0 refuses this node.
            RendezvousError: the nodes have not come in time.
        """
        while True:
            try:
                moved = self._call(self._joining.port)
                if isinstance(moved, Moved):
                    self._first_host = moved.host
                    self._hub.disown()
                    self.awaited = "the other nodes"
                    found = self._call(moved.port)
                    if isinstance(found, Meeting) and self._fits(found):
                        self._met(found)
                        return
                problem = f"it {NONSENSE}"
            except RefusedLinkError:
                raise
            except ControlError as error:
                problem = str(error)
            self._hub.disown()
            self.awaited = "node 0"
            self._wait_longer(problem)

    def join(self, supervisor: Supervisor | None = None) -> Meeting:  # noqa: ARG002  as `FirstNode.join`
        """The first meeting, which `call` has found."""
        assert self._meeting is not None
        return self._meeting

    def _wait_longer(self, problem: str) -> None:
        """Wait for another call, if there is time for one. Raises RendezvousError if there is not."""
        now_s = time.monotonic()
        if now_s >= self._expire_s:
            text = f"still waiting for node 0 after {self._joining.timeout_s:g} s: {problem}"
            raise RendezvousError(text)
        if now_s >= self._remind_s:
            self._remind()
        time.sleep(PAUSE_S)

    def _call(self, port: int) -> object:
        """Introduce this node at a port of node 0; the first answer that is more than a text for the user."""
        joining = self._joining
        now_s = time.monotonic()
        left_s = max(min(self._remind_s, self._expire_s, now_s + ANSWER_S) - now_s, LEAST_CALL_S)
        addresses = [with_port(one, port) for one in resolve(joining.address) or (joining.address,)]
        stream = connect(addresses, joining.key, joining.hello.place, left_s, keyed=joining.is_keyed)
        self._hub = Hub(joining.silence_s)
        link = self._link = self._hub.add(stream, "node 0")
        link.send_now(joining.hello)
        while isinstance(message := link.receive(joining.silence_s, while_heard=True), Said):
            self._tell(message.notice)
            if message.notice.text.startswith(WAITING):
                self.awaited = message.notice.text.removeprefix(WAITING)
        if isinstance(message, Refused):
            self._hub.disown()
            if message.code == FAILURE:
                raise RendezvousError(message.text)
            raise RefusedLinkError(f"node 0 at {joining.meeting_point} refuses this node: {message.text}")
        return message

    def _remind(self) -> None:
        self._remind_s = float("inf")
        joining = self._joining
        command = joining.command_of(0)
        where = f"nobody answers at {joining.meeting_point} yet"
        if not resolve(joining.address):
            where = f"{joining.address} is not known here"
        advice = f"; type there: {command}" if command else ""
        text = f"waiting for node 0 for up to {joining.timeout_s:g} s: {where}{advice}"
        self._tell(Notice("info", text))

    def start(self) -> None:
        """Begin to serve the connection. From here on this process must not fork and go on in the child."""
        self._hub.start()

    def disown(self) -> None:
        """Close the connection in this process alone."""
        self._hub.disown()

    def fileno(self) -> int:
        """The descriptor of the hub."""
        return self._hub.fileno()

    def receive(self) -> list[object]:
        """The messages that have arrived for our part."""
        found: list[object] = []
        for _, message in self._hub.read():
            if isinstance(message, Said):
                self._tell(message.notice)
            elif isinstance(message, Meeting) and self._fits(message):
                found.append(self._met(message))
            elif not isinstance(message, (Lost, Meeting)):
                self._is_over |= isinstance(message, Over)
                found.append(message)
            elif not self._is_over:
                self._is_over = True
                found.append(Over(self._loss(message.reason if isinstance(message, Lost) else NONSENSE)))
        return found

    def _fits(self, meeting: Meeting) -> bool:
        """Whether a meeting gives this node the place and the workers that it has."""
        own = self._joining.hello
        place, nodes = meeting.node_rank, meeting.node_count
        return (place, nodes) == (own.place, own.nodes) and meeting.local_world_size == own.workers

    def _met(self, meeting: Meeting) -> Meeting:
        """A meeting, at the address by which this node knows node 0."""
        self._meeting = replace(meeting, address=self._joining.address)
        return self._meeting

    def _loss(self, reason: str) -> Judgement:
        """What follows for this node when node 0 is lost: no other node judges any more."""
        meeting, host = self._meeting, self._first_host
        count = 0 if meeting is None else meeting.local_world_sizes[0]
        absence = Absence(f"node 0 ({host})", f"it {reason}", rank_count=count)
        report = Report(0 if meeting is None else meeting.attempt, FAILURE, host, absence=absence)
        return Judgement(FAILURE, self._command, self._joining.hello.nodes, (report,))

    def send(self, message: object) -> None:
        """Tell the conductor something."""
        if self._link is not None:
            self._link.send(message)

    def hear(self, event: object) -> None:
        """Listen to our own agent: node 0 hears in its report what it has to know."""

    def leave(self, code: int) -> None:
        """End, when our part has ended."""
        self.send(Bye(code))
        self._hub.close(FAREWELL_S)


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
