"""A node of a job whose nodes find each other through a store, used by a helper process, the delegate.

One of the nodes conducts the job, and the nodes meet under their guards. If that node is lost, the others
find the next one. As soon as a node under torchrun is there, and with registered backends, the nodes meet by
torch's own rendezvous instead (`torch_rounds`).
"""

from __future__ import annotations

import os
import time

from dsl import SignalReceived, Stopping
from dsl.agent.calling import Calling, Orphaned
from dsl.agent.fixed_nodes import SeveralNodes
from dsl.agent.joining import KEY_BYTES, awaited, store_joining
from dsl.agent.leading import Leading, listening_hub
from dsl.agent.member import Member, Nobody
from dsl.agent.torch_rounds import TorchRounds
from dsl.control.messages import Checked, MeetByTorch, Over
from dsl.errors import RendezvousError
from dsl.machine import wait_for
from dsl.model.job import Meeting, Notice
from dsl.model.judgement import Absence, Judgement, Report
from dsl.model.outcome import END_ACTIONS, AttemptOutcome, Awaiting, Decision
from dsl.plan.meeting_point import LOCAL_ADDRESS
from dsl.rendezvous.delegate_messages import ByTorch, Claim, Claimed, Leave, MeetingRefused, Outranked
from dsl.rendezvous.dynamic import Delegate
from dsl.rendezvous.settings import number
from dsl.report.narrator import Narrator, judge_attempt

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl.agent.fixed_nodes import Ending
    from dsl.agent.member import Conversation
    from dsl.agent.planner import Planner
    from dsl.agent.roles import Channel, Listener
    from dsl.control.hub import Hub
    from dsl.facts import Facts
    from dsl.model.job import NodePlan
    from dsl.plan.job import JobPlan

PAUSE_S = 0.2
"""Pause before the conductor is called again."""

NOBODY = Nobody()


class TorchNodes(SeveralNodes):
    """The delegate of this node, and its way into the job: a link to the conductor, or torch's rendezvous."""

    node: Leading | Calling | None

    def __init__(self, planned: JobPlan, facts: Facts, tell: Callable[[Notice], None]) -> None:
        """Start the delegate. ``tell`` shows a notice to the user here.

        Raises:
            RendezvousError: the delegate cannot be started.
        """
        self._planned, self._job, self._facts, self._tell = planned, planned.job, facts, tell
        self._delegate = Delegate(planned.job, facts.names.host, self._handle)
        self.helper = self._delegate.pid
        self._hub: Hub | None = None
        """Where the others would call this node, while it looks for who conducts."""
        self._claimed: Claimed | None = None
        self._sought: tuple[Meeting | None, float] = None, 0.0
        """The meeting since which this node looks for another conductor, and until when it does."""
        self._narrator: Narrator | None = None

    # ------------------------------------------------------------------ who conducts

    def open(self, planner: Planner, first: Meeting | None = None) -> NodePlan:
        """Expect as few nodes as the job needs, all like this one."""
        point = self._job.meeting
        sizes = (planner.local_world_size,) * point.least_nodes
        first = first or Meeting(0, 0, sizes, point.local_address or LOCAL_ADDRESS, 0)
        return super().open(planner, first)

    def awaited(self) -> str:
        """What `find` waits for, in words."""
        return awaited(self._job)

    def find(self) -> Ending | None:
        """Find the node that conducts, or meet the others by torch's own rendezvous."""
        found = self._delegate.ask(self._claim(), (Claimed, ByTorch), self._tell, self._wait_for_delegate)
        if isinstance(found, int):
            return None, found
        if isinstance(found, Claimed):
            self._take_part(found)
            return None
        self._end_search()
        return self.meet()

    def _claim(self) -> Claim:
        """Listen for other nodes, and make the order to find who conducts."""
        key = os.urandom(KEY_BYTES)
        self._end_search()
        self._hub, port = listening_hub(self._job, key)
        return Claim(port, key.hex(), 0 if self._claimed is None else self._claimed.number)

    def _end_search(self) -> None:
        if self._hub is not None:
            self._hub.disown()
        self._hub = None

    def _take_part(self, claimed: Claimed) -> Leading | Calling:
        """Conduct the job, or make a way to the node that does."""
        member = self.member
        self._claimed = claimed
        last = None if member is None else member.meeting
        joining = store_joining(self._planned, claimed, self.planner.local_world_size, self._facts, last)
        if claimed.conducts:
            assert self._hub is not None
            self.node = leading = Leading(joining, self._hub, self.offer, self._tell)
            leading.delegate, self.elsewhere, self._hub = self._delegate, leading.elsewhere, None
        else:
            self._end_search()
            self.node = Calling(joining, self.offer, self._tell)
        if member is not None:
            member.conversation = self.node
        return self.node

    def _cut(self) -> None:
        """The conductor that `node` leads to is lost, or another one has come."""
        if self.member is not None:
            self.member.conversation = NOBODY

    def offer(self) -> Checked:
        """What this node says before each attempt: where its rank 0 would listen."""
        assert self._claimed is not None
        return Checked(addresses=(self._claimed.address,), free_port=self._facts.ports.pick())

    def _wait_for_delegate(self) -> int:
        """Wait until the delegate has said something; an exit code if a signal ends the wait, else 0."""
        supervisor, node = self.supervisor, self.node
        while supervisor is not None and node is not None:
            ready = wait_for(supervisor.fileno(), self._delegate.fileno(), left_s=None)
            code = node.end_of_wait(supervisor)
            if code is not None or self._delegate.fileno() in ready:
                return code or 0
        return 0

    # ------------------------------------------------------------------ the first meeting

    def meet(self) -> Ending | None:
        """Meet the other nodes by torch's own rendezvous for the first time."""
        rounds = self._by_torch()
        over = rounds.open(self._wait_for_delegate)
        self.node = self.elsewhere = None
        if isinstance(over, int):
            return None, over
        self.planner.meet_by(rounds)
        self.decider = rounds
        return None if over is None else (Notice("info", over.text), 0)

    def _by_torch(self, restarts: int = 0) -> TorchRounds:
        why = "the nodes meet by torch's own rendezvous, so no node"
        if self._job.hang_timeout_s is not None:
            self._tell(Notice("warning", f"--hang-timeout has no effect: {why} sees the ranks of the others"))
        if self._job.meeting.spares:
            text = f"--spares has no effect: {why} knows which one failed first"
            self._tell(Notice("warning", f"{text}; a node beyond the most still waits for a place"))
        size = self.planner.local_world_size
        return TorchRounds(self._job, self._delegate, size, self._tell, restarts=restarts)

    def join(self) -> Ending | None:
        """Wait for the first meeting under the conductor, or under torch if it hands over."""
        end_s, over = time.monotonic() + number(self._job.meeting.settings, "join_timeout"), None
        while over is None and (node := self.node) is not None:
            met = node.join(self.supervisor)
            if isinstance(met, (int, Over, Meeting)):
                return self._take(met)
            node.hang_up()
            if isinstance(met, MeetByTorch):
                over = self.meet()
            elif isinstance(met, Orphaned) and time.monotonic() > end_s:
                raise RendezvousError(met.reason)
            else:
                time.sleep(PAUSE_S)
                over = self.find()
                if over is None and self.node is not None:
                    self.node.start(self.supervisor)
        return over

    def new_member(self, met: Meeting) -> Member:
        """What decides from the first meeting on."""
        assert self.node is not None
        return StoreMember(self, self.node, met)

    # ------------------------------------------------------------------ another conductor

    def seek(self, last: Meeting) -> bool:
        """Find who conducts now. False: that has been tried in vain for long since the last meeting."""
        now_s = time.monotonic()
        if self._sought[0] is not last:
            self._sought = last, now_s + number(self._job.meeting.settings, "join_timeout")
        if now_s > self._sought[1]:
            return False
        self._cut()
        self._delegate.send(self._claim(), PAUSE_S)
        return True

    def _handle(self, event: object) -> list[object]:
        """What follows for the member from an event of the delegate."""
        node, member, is_seeking = self.node, self.member, self._hub is not None
        if node is None:
            return [event]
        if isinstance(event, Notice):
            self._tell(event)
        elif isinstance(event, Outranked):
            self._cut()
            node.hang_up()
            return [Orphaned("another node has come to conduct the job")]
        elif isinstance(event, (Claimed, ByTorch)) and is_seeking:
            assert member is not None
            if isinstance(event, ByTorch):
                self._end_search()
                return [MeetByTorch(member.meeting.restarts)]
            node.hang_up()
            self._take_part(event).start(self.supervisor)
        elif isinstance(event, MeetingRefused) and is_seeking:
            self._end_search()
            absence = Absence("the job", event.text, is_lost=False)
            report = Report(0 if member is None else member.meeting.attempt, 1, absence=absence)
            command = self._job.flavour.command
            return [Over(Judgement(1, command, self._job.node_count, (report,)))]
        elif isinstance(event, ByTorch) and isinstance(node, Leading):
            node.meet_by_torch()
        elif isinstance(event, MeetingRefused) and isinstance(node, Leading):
            self._tell(Notice("warning", f"{event.text}: no other node can join"))
        return []

    # ------------------------------------------------------------------ the job

    def listeners(self, plan: NodePlan) -> list[Listener]:
        """Those of every node, and those that tell the conductor."""
        self.release()
        found = super().listeners(plan)
        self._narrator = next((one for one in found if isinstance(one, Narrator)), None)
        return found

    def yield_to_torch(self, order: MeetByTorch) -> TorchRounds:
        """Leave the conductor, and join the others in torch's rendezvous."""
        assert self.node is not None
        self.node.hang_up()
        self.node = None
        self._cut()
        rounds = self._by_torch(order.restarts)
        self.planner.meet_by(rounds)
        if self._narrator is not None:
            self._narrator.judge_here()
        rounds.join("membership")
        return rounds

    def channels(self) -> list[Channel]:
        """What conductor and delegate say, and those of every node."""
        return [*super().channels(), self._delegate]

    def judged(self) -> Judgement | None:
        """How the job has ended on all nodes, or here if this node has left it before."""
        member = self.member
        if not isinstance(member, StoreMember) or member.judgement is not None or member.has_succeeded:
            return super().judged()
        if member.last is None:
            return None
        return judge_attempt(member.last) if member.last.final_code else None

    def stay(self) -> None:
        """Leave the connections to the agent."""
        self._delegate.close()
        super().stay()

    def leave(self, code: int) -> int:
        """Let this node leave the others, and wait for that."""
        self._leave(code)
        self._delegate.see_off()
        return code

    def _leave(self, code: int) -> None:
        if self.member is not None and self.member.conversation is NOBODY:
            return
        super().leave(code)
        node = self.node
        if isinstance(node, Leading) and node.conductor.has_begun and node.conductor.roster.is_over:
            self._delegate.send(Leave(closes=True))  # nodes that come later hear of it

    def close(self) -> None:
        """Leave the others, in the process that has started the delegate."""
        self._leave(1)
        self._delegate.reap()


class StoreMember(Member):
    """What such a node does: what the conductor orders, until that hands over to torch's rendezvous."""

    def __init__(self, nodes: TorchNodes, conversation: Conversation, first: Meeting) -> None:
        super().__init__(conversation, first, nodes.offer)
        self._nodes = nodes
        self._heir: TorchRounds | None = None
        self.last: AttemptOutcome | None = None
        """The last attempt that has ended here."""

    def decide(self, event: object, last: AttemptOutcome | None) -> Decision:
        """Say what follows from an event."""
        if self._heir is not None:
            return self._heir.decide(event, last)
        if last is None:
            if isinstance(event, Orphaned):
                return Decision("stop", why=event.reason)
            return super().decide(event, last)
        if isinstance(event, MeetByTorch):
            self._heir = self._nodes.yield_to_torch(event)
            return Decision("go_on", told=Awaiting(last, "meeting"))
        news = last.news if event is last else (event,)
        if any(isinstance(one, Orphaned) for one in news):
            return self._seek(last)
        return super().decide(event, last)

    def _seek(self, last: AttemptOutcome) -> Decision:
        """The conductor is lost: this node goes on under the next one, unless its part was to end."""
        is_asked = any(
            isinstance(one, Stopping) or (isinstance(one, SignalReceived) and one.action in END_ACTIONS)
            for one in last.news
        )
        if is_asked or last.ended.stop_signal is not None or last.ended.survivors:
            return Decision("end", code=last.final_code)
        if not self._nodes.seek(self.meeting):
            return Decision("end", code=last.final_code or 1, why="the node that conducts cannot be reached")
        return Decision("go_on", told=Awaiting(last, "meeting"))

    def hear(self, event: object) -> None:
        """Tell the conductor."""
        if isinstance(event, AttemptOutcome):
            self.last = event
        if self._heir is None:
            super().hear(event)
