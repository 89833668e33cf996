"""A node that calls the one that conducts its job: the conversation of its part with the conductor there."""

from __future__ import annotations

import time

from dsl._record import Record, replace
from dsl.agent.joining import WAITING
from dsl.agent.leading import FAILURE, FAREWELL_S, REMIND_S, Joins
from dsl.control.hub import Hub, connect
from dsl.control.messages import Bye, Lost, MeetByTorch, Moved, Over, Refused, Said
from dsl.errors import ControlError, DslError, RefusedLinkError, RendezvousError
from dsl.machine import wait_for
from dsl.machine.network import resolve
from dsl.model.job import Meeting, Notice
from dsl.model.judgement import Absence, Judgement, Report
from dsl.words import with_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl import Supervisor
    from dsl.agent.joining import Joining
    from dsl.control.hub import Link
    from dsl.control.messages import Checked

ANSWER_S = 10.0
"""Time that node 0 has to answer a call, and time after which we look up its name again."""

PAUSE_S = 0.2
"""Pause before another call, if node 0 has ended the last one."""

LEAST_CALL_S = 0.05
"""A call takes at least this long, also at the end of the wait."""
NONSENSE = "has sent something that no node of a job says"


class OtherNode:
    """A node that connects to node 0: the conversation of its part with the conductor there."""

    deadline_s = None
    conductor = "node 0"
    """What the user calls the node that conducts."""

    def __init__(
        self, joining: Joining, tell: Callable[[Notice], None], offer: Callable[[], Checked] | None = None
    ) -> None:
        """``tell`` shows a notice to the user here.

        ``offer`` makes what this node says about itself before each attempt; None: its greeting says enough.
        """
        self._joining, self._tell, self._offer = joining, tell, offer
        self._hub = Hub(joining.silence_s)
        self._link: Link | None = None
        self._first_host = ""
        """Name of the host of node 0."""
        self._meeting: Meeting | None = None
        self._is_over = False
        self.awaited = self.conductor
        """What this node waits for before the first meeting, in words."""
        now_s = time.monotonic()
        self._remind_s, self._expire_s = now_s + REMIND_S, now_s + joining.timeout_s
        self._is_spare = False
        """The job runs without this node, which waits for a place."""
        self._lost = ""
        """How this node, a spare, has lost node 0; empty: it has not."""

    def call(self) -> Meeting | Over:
        """Find node 0, and wait for the first meeting, or the end of a job that does not need this node.

        Signals of this process end the wait.

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
                        return self._met(found)
                    if isinstance(found, Over) and (found.has_succeeded or found.judgement is not None):
                        return found
                problem = f"it {NONSENSE}"
            except RefusedLinkError:
                raise
            except ControlError as error:
                problem = str(error)
            self._hub.disown()
            self.awaited = self.conductor
            self._wait_longer(problem)

    def _wait_longer(self, problem: str) -> None:
        """Wait for another call, if there is time for one. Raises RendezvousError if there is not."""
        now_s, joining = time.monotonic(), self._joining
        if self._is_spare:
            self._is_spare, self._lost = False, problem
            self._remind_s, self._expire_s = float("inf"), now_s + joining.silence_s
        elif now_s >= self._expire_s:
            text = f"still waiting for {self.conductor} after {joining.timeout_s:g} s"
            if self._lost:
                text = f"{self._lost}, and cannot be reached again within {joining.silence_s:g} s"
            raise RendezvousError(f"{text}: {problem}")
        if now_s >= self._remind_s:
            self._remind()
        time.sleep(PAUSE_S)

    def _call(self, port: int) -> object:
        """Introduce this node at a port of node 0; the first answer that is more than a text for the user."""
        silence_s = self._joining.silence_s
        link = self._connect(port)
        while isinstance(message := link.receive(silence_s, while_heard=True), Said):
            self._tell(message.notice)
            self._is_spare |= message.has_begun
            if message.notice.text.startswith(WAITING):
                self.awaited = message.notice.text.removeprefix(WAITING)
        if isinstance(message, Refused):
            self._hub.disown()
            raise self._refusal(message)
        return message

    def _connect(self, port: int) -> Link:
        """Say who this node is at a port of node 0. Raises ControlError."""
        joining = self._joining
        now_s = time.monotonic()
        left_s = max(min(self._remind_s, self._expire_s, now_s + ANSWER_S) - now_s, LEAST_CALL_S)
        addresses = [with_port(one, port) for one in resolve(joining.address) or (joining.address,)]
        stream = connect(addresses, joining.key, joining.hello.place, left_s, keyed=joining.is_keyed)
        self._hub = Hub(joining.silence_s)
        link = self._link = self._hub.add(stream, self.conductor)
        link.send_now(joining.hello)
        if self._offer is not None:
            link.send_now(self._offer())
        return link

    def _refusal(self, message: Refused) -> DslError:
        if message.code == FAILURE:
            return RendezvousError(message.text)
        where = f"{self.conductor} at {self._joining.meeting_point}"
        return RefusedLinkError(f"{where} refuses this node: {message.text}")

    def _remind(self) -> None:
        self._remind_s = float("inf")
        joining = self._joining
        command = joining.command_of(0)
        where = f"nobody answers at {joining.meeting_point} yet"
        if not resolve(joining.address):
            where = f"{joining.address} is not known here"
        advice = f"; type there: {command}" if command else ""
        text = f"waiting for {self.conductor} for up to {joining.timeout_s:g} s: {where}{advice}"
        self._tell(Notice("info", text))

    def start(self, supervisor: Supervisor | None = None) -> None:  # noqa: ARG002  others need it
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
                self._is_over |= isinstance(message, (Over, MeetByTorch))
                found.append(message)
            elif not self._is_over:
                self._is_over = True
                found.append(self._lose(message.reason if isinstance(message, Lost) else NONSENSE))
        return found

    def _lose(self, reason: str) -> object:
        """What follows when the conductor is lost."""
        return Over(self._loss(reason))

    def _fits(self, meeting: Meeting) -> bool:
        """Whether a meeting gives this node the place and the workers that it has."""
        own = self._joining.hello
        place, nodes = meeting.node_rank, meeting.node_count
        is_own = bool(own.spares) or place == own.place
        return is_own and nodes == own.nodes and meeting.local_world_size == own.workers

    def _met(self, meeting: Meeting) -> Meeting:
        """A meeting, at the address by which this node knows node 0 if rank 0 is there."""
        is_fixed = not self._joining.hello.spares
        self._meeting = replace(meeting, address=self._joining.address) if is_fixed else meeting
        return self._meeting

    def _loss(self, reason: str) -> Judgement:
        """What follows for this node when node 0 is lost: no other node judges any more."""
        meeting, host = self._meeting, self._first_host
        # With spares, another node may have its ranks.
        sizes = () if meeting is None or self._joining.hello.spares else meeting.local_world_sizes
        count = sizes[0] if sizes else 0
        absence = Absence(f"node 0 ({host})", f"it {reason}", is_lost=bool(sizes), rank_count=count)
        return self._judged(Report(0 if meeting is None else meeting.attempt, FAILURE, host, absence=absence))

    def _judged(self, report: Report) -> Judgement:
        job = self._joining.job
        return Judgement(FAILURE, job.flavour.command, job.node_count, (report,))

    def send(self, message: object) -> None:
        """Tell the conductor something."""
        if self._link is not None:
            self._link.send(message)

    def hear(self, event: object) -> None:
        """Listen to our own agent: node 0 hears in its report what it has to know."""

    def leave(self) -> None:
        """End, when our part has ended."""
        self.send(Bye())
        self._hub.close(FAREWELL_S)


class Orphaned(Record):
    """The conductor is lost, or another one has come: the members have to find who conducts now."""

    reason: str


class Calling(OtherNode, Joins):
    """A node that calls the one that conducts."""

    conductor = "the node that conducts the job"

    def __init__(
        self, joining: Joining, offer: Callable[[], Checked], tell: Callable[[Notice], None]
    ) -> None:
        """``offer`` makes what this node says about itself before each attempt."""
        super().__init__(joining, tell, offer)
        self._inbox = []

    def start(self, supervisor: Supervisor | None = None) -> None:  # noqa: ARG002  others need it
        """Call the conductor. From here on this process must not fork and go on in the child."""
        try:
            self._connect(self._joining.port)
        except ControlError as error:
            self._inbox = [Orphaned(str(error))]
        else:
            self._hub.start()

    @property
    def deadline_s(self) -> float | None:  # type: ignore[override]
        """`time.monotonic` when `receive` returns something even if nothing is readable."""
        return 0.0 if self._inbox else None

    def fileno(self) -> int:
        """The descriptor of the hub."""
        return -1 if self._inbox else super().fileno()

    def receive(self) -> list[object]:
        """The messages that have arrived for our part."""
        inbox, self._inbox = self._inbox, []
        return inbox or super().receive()

    def _wait(self, *others: int) -> None:
        wait_for(self.fileno(), *others, left_s=self.deadline_s)

    def hang_up(self) -> None:
        """End the link, once it is not needed any more."""
        self._hub.close(FAREWELL_S)

    def _fits(self, meeting: Meeting) -> bool:
        return meeting.local_world_size == self._joining.hello.workers

    def _met(self, meeting: Meeting) -> Meeting:
        self._meeting = meeting
        return meeting

    def _lose(self, reason: str) -> object:
        claimed = self._joining.claimed
        if self._meeting is None or claimed is None or not claimed.hosts_store:
            return Orphaned(f"{self.conductor} {reason}")
        return super()._lose(reason)

    def _loss(self, reason: str) -> Judgement:
        name = f"{self.conductor} ({self._joining.meeting_point})"
        attempt = 0 if self._meeting is None else self._meeting.attempt
        absence = Absence(name, f"it {reason}, and the store is gone with it", is_lost=False)
        return self._judged(Report(attempt, FAILURE, self._joining.address, absence=absence))
