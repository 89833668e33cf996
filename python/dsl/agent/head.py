"""The head of a job on several hosts: carries out the conductor's orders over the links to the hosts' agents.

To the agent that runs here, the head is a channel, a listener, and the decider. That agent supervises the
programs that reach the hosts (`dsl.agent.starters`).
"""

from __future__ import annotations

import os
import time

from dsl import Ended, SignalReceived, Stopping, __version__
from dsl.agent.carrier import Carrier
from dsl.agent.elsewhere import Elsewhere
from dsl.agent.session import Session, Side
from dsl.agent.starters import Starters
from dsl.conductor.conductor import Conductor
from dsl.conductor.terms import reached_terms, seats_of
from dsl.control.hub import KEY_BYTES, FdStream, Hub, allow_connections
from dsl.control.messages import Assignment, Bye, Hello, Lost, Recorded, Refused
from dsl.errors import LauncherError, OutputError, ReaderGoneError
from dsl.launchers.table import BY_SSH, starts_of, uses_streams
from dsl.machine import wait_for
from dsl.model.job import Meeting, Notice
from dsl.model.outcome import GO_ON, AttemptOutcome, Decision, Hang, Outcome
from dsl.model.request import LEVELS
from dsl.report.narrator import tell_end
from dsl.report.speak import say, show_text
from dsl.report.verdict import hang_lines
from dsl.words import printable, with_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl import Supervisor
    from dsl.agent.background import Background
    from dsl.agent.discovery import Discovery
    from dsl.agent.roles import Channel, Listener
    from dsl.conductor.examination import Examination
    from dsl.conductor.listed import ListedConductor
    from dsl.control.hub import Link
    from dsl.facts import Facts
    from dsl.launchers.base import Start
    from dsl.model.job import Job, NodePlan, Pairs
    from dsl.model.judgement import Judgement
    from dsl.plan.job import JobPlan
    from dsl.plan.remote import Remote
    from dsl.report.recorder import Recorder

ENDING_S = 2.0
"""When all agents have ended, ssh and similar programs that still run get this long to obey SIGTERM."""


def run_head(
    planned: JobPlan,
    facts: Facts,
    background: Background | None = None,
    recorder: Recorder | None = None,
    *,
    examines: bool = False,
    looks_first: bool = False,
) -> int:
    """Reach the hosts of a job, conduct it, and end this process with the job's exit code.

    ``background``, ``recorder``: see `Session`. ``examines``: the agents only look at their hosts, for
    ``--doctor``. ``looks_first``: they look before the first attempt. Returns the exit code only if nothing
    was started.

    Raises:
        LauncherError: the hosts cannot be reached.
    """
    job, remote = planned.job, planned.remote
    assert remote is not None
    node_ranks = [one.node_rank for one in seats_of(job, per_node=remote.per_node)]
    hub = Hub(remote.heartbeat_s, show=True)
    addresses: Sequence[str] = ()
    variables: Pairs = ()
    if not uses_streams(job, remote):
        addresses, variables = _listen(hub, job, remote, facts, len(node_ranks))
    folder = f"{facts.names.temp_dir}/dsl_hosts_{os.urandom(8).hex()}"

    def starts(job: Job, remote: Remote) -> Sequence[Start]:
        return starts_of(
            job,
            remote,
            facts,
            is_root=os.geteuid() == 0,
            addresses=addresses,
            variables=variables,
            folder=folder,
        )

    allow_connections(len(node_ranks))
    assignment = Assignment(
        version=__version__,
        job=job,
        node_rank=0,
        cwd=remote.cwd,
        pid=facts.names.pid,
        stamp=facts.names.stamp(),
        token=facts.names.random(),
        stdout=facts.console.stdout,
        stderr=facts.console.stderr,
        is_one=facts.console.is_one,
        checks=remote.checks,
        examines=examines,
        looks_first=looks_first,
        records=recorder is not None,
    )
    terms = reached_terms(job, remote, assignment)
    conductor: Conductor | Examination
    listed: ListedConductor | None = None
    if examines:
        from dsl.conductor.examination import Examination

        conductor = Examination(terms, time.monotonic(), planned.notices)
    elif remote.discover:
        from dsl.conductor.listed import ListedConductor

        conductor = listed = ListedConductor(terms, time.monotonic())
    else:
        conductor = Conductor(terms, time.monotonic())
    starters = Starters(job, starts(job, remote), node_ranks, facts.environ, remote.fanout)
    head = Head(conductor, starters, hub, recorder)
    if listed is not None:
        from dsl.agent.discovery import Discovery

        head.discover(Discovery(listed, starters, assignment, remote, facts, starts))
    head.is_visible = not examines
    return Session(head, background=background, recorder=recorder).run_guarded()


def _listen(hub: Hub, job: Job, remote: Remote, facts: Facts, count: int) -> tuple[list[str], Pairs]:
    """Let so many agents connect: our addresses, and the variables that the agents need.

    Raises:
        LauncherError: the hosts could not reach us.
    """
    port = hub.listen()
    variables: Pairs = ()
    if remote.launcher not in BY_SSH:
        key = os.urandom(KEY_BYTES)
        variables = (("DSL_CONTROL_KEY", key.hex()),)
        hub.expect(None, key, count=count)
    found = facts.network.addresses_toward([host.name for host in job.hosts], job.meeting.address)
    if not found:
        raise LauncherError(
            "no address of this host is known that the others could reach: give --master_addr, "
            "or --launcher ssh, which needs none"
        )
    return [with_port(one, port) for one in found], variables


class Head(Carrier, Side):
    """Channel, listener and decider of the agent that runs on the host where a job was launched."""

    routine = True
    is_judged = True
    _discovery: Discovery | None = None
    """The list of hosts, if it may change."""

    def __init__(
        self,
        conductor: Conductor | Examination,
        starters: Starters,
        hub: Hub,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(conductor, hub)
        self.decider, self.source = self, starters
        self.job, self.hub = starters.job, hub
        self._recorder = recorder
        self._starters = starters
        starters.tell, starters.let_in = self._speak, hub.expect
        starters.miss, starters.lose = self._miss, self._lose
        hub.share_output(len(conductor.roster))
        self.elsewhere = Elsewhere(
            self._taking_part,
            conductor.roster.name,
            nodes=len(self.job.hosts),
            workers=sum(len(host.slots) for host in self.job.hosts),
            tee=hub.tee,
        )
        self._dismissal_s: float | None = None
        self._supervisor: Supervisor | None = None
        self._is_orphan = False
        self._guard = 0
        self._has_warned = False
        for place, fd in starters.streams.items():
            self._links[place] = hub.add(FdStream(fd, fd), conductor.roster.name(place))
            self._links[place].place = place

    def listeners(self, plan: NodePlan) -> list[Listener]:  # noqa: ARG002  the programs need no other
        """The head alone."""
        return [self]

    def channels(self) -> list[Channel]:
        """The head alone."""
        return [self]

    def judged(self) -> Judgement | None:
        """How the job has ended on all hosts."""
        return self.conductor.judgement

    def discover(self, discovery: Discovery) -> None:
        """Follow a list of hosts that changes."""
        self._discovery, discovery.relist = discovery, self._relist

    def _relist(self, job: Job, orders: Sequence[object]) -> None:
        self.job, count = job, len(job.hosts)
        self.hub.share_output(count)
        allow_connections(count)
        if self.elsewhere is not None:
            sizes = [one.size for one in self.conductor.roster if one.is_listed]
            self.elsewhere.nodes, self.elsewhere.workers = len(sizes), sum(sizes)
        self._obey(orders)

    # ------------------------------------------------------------------ decider and channel

    def decide(self, event: object, last: AttemptOutcome | None) -> Decision:
        """Say what follows from an event: the job ends as the conductor says."""
        if last is not None:
            code = self.conductor.code
            return Decision("end", code=1 if code is None else code or int(self.hub.has_lost_output))
        return event if isinstance(event, Decision) else GO_ON

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when something is due."""
        return self._due(self._dismissal_s, self._starters.deadline_s)

    def read(self) -> list[Decision]:
        """Hear what the agents say, and do what follows. Returns what is decided about the programs."""
        self._hear_links()
        now_s = time.monotonic()
        self._starters.go_on(now_s)
        due_s = self.conductor.deadline_s
        if due_s is not None and due_s <= now_s and not self.hub.drain(0.0):
            self.conductor.wait_longer(now_s)
        self._obey(self.conductor.wait_is_over(now_s))
        if self._dismissal_s is None or now_s < self._dismissal_s:
            return []
        self._dismissal_s = None
        return [Decision("stop", grace_s=ENDING_S)]

    def _admit(self, link: Link, hello: Hello) -> bool:  # noqa: ARG002  the place is enough
        """Refuse an agent whose place does not exist or is taken. The user hears of the first such agent."""
        if link.place < len(self.conductor.roster) and self.conductor.expects(link.place):
            return True
        if not self._has_warned:
            self._has_warned = True
            text = f"an agent for place {link.place} has connected from {link.name}, where none is expected"
            self._speak(Notice("warning", f"{text}: it was refused"))
        link.close()
        return False

    def _is_for_conductor(self, link: Link, message: object) -> bool:
        if isinstance(message, Bye):
            self.hub.has_lost_output |= message.has_lost_output
        if self._recorder is not None and self._record(self._recorder, link, message):
            return False
        is_silent = link.place in self._starters.streams and not self.conductor.roster.has_greeted(link.place)
        return not (isinstance(message, Lost) and is_silent)  # its program will end and say why

    def _record(self, recorder: Recorder, link: Link, message: object) -> bool:
        """Record what a member says. Whether that is all that has to be done with it."""
        name = self.conductor.roster.name(link.place)
        if isinstance(message, Recorded):
            clock = link.clock
            recorder.add(message.line, time.time_ns(), None if clock is None else clock.offset_ns)
        elif isinstance(message, Hello):
            recorder.membership(joined=[name])
        elif isinstance(message, Refused):
            recorder.membership(left=[name], why=message.text)
        elif isinstance(message, Lost) and not self.conductor.roster.has_said_goodbye(link.place):
            recorder.membership(left=[name], why=message.reason)
        elif isinstance(message, Bye) and not self.conductor.roster.is_over:
            recorder.membership(left=[name], why="has left")
        return isinstance(message, Recorded)

    def _send(self, place: int, message: object) -> None:
        if isinstance(message, Meeting):
            if self.elsewhere is not None:
                self.elsewhere.meeting = message
            if self._recorder is not None:
                self._recorder.meeting(self.conductor.roster.name(place), message)
        super()._send(place, message)

    def _explain(self, notice: Notice) -> None:
        self._speak(notice)
        if self._recorder is not None:
            self._recorder.restart(notice.line)

    def _reach(self, place: int) -> None:
        self._starters.reach(place)

    def _show(self, text: str) -> None:
        try:
            show_text(text)
        except OutputError as error:
            self.conductor.code = error.exit_code
            if not isinstance(error, ReaderGoneError):
                self._speak(Notice("critical", f"error: {error}"))

    def _dismiss(self, within_s: float) -> None:
        """Give the programs that reach the hosts ``within_s`` to end, if they do so by themselves."""
        roster = self.conductor.roster
        others = [place for place in range(len(roster)) if not roster.has_said_goodbye(place)]
        ends = self._starters.end(others) or roster.is_complete
        self._dismissal_s = time.monotonic() + (within_s if ends else 0.0)

    def _miss(self, places: Sequence[int], why: str, said: Sequence[str]) -> None:
        if any(self.conductor.roster.is_awaited(place) for place in places):
            self._starters.told.update(places)
            for line in said:
                self._speak(Notice("critical", line))
        self._obey(self.conductor.starter_ended(places, why, time.monotonic()))

    def _lose(self, why: str) -> None:
        if self.conductor.has_begun:
            self._obey(self.conductor.starters_lost(why, time.monotonic()))

    # ------------------------------------------------------------------ listener

    def hear(self, event: object) -> None:
        """Hear what happens here."""
        if self._discovery is not None and self._discovery.hear(event):
            return
        self._starters.hear(event)
        if isinstance(event, Stopping):
            if event.reason == "guard_lost":
                self._is_orphan = True
                self._speak(Notice("info", "the guard process is gone: ending the job on all hosts"))
        elif isinstance(event, SignalReceived):
            now_s = time.monotonic()
            self._obey(self.conductor.signal(event.signum, event.action, now_s, is_key=event.from_terminal))
        elif isinstance(event, Hang):
            for line in hang_lines(event):
                self._speak(Notice("error", line))
            self._obey(self.conductor.hang(event, time.monotonic()))
        elif isinstance(event, Ended):
            self._starters.go_on(float("inf"))
            if not self._is_orphan:
                self._hear_out()
            self._show_rest()
            if not self._is_orphan:
                self.read()  # whether that could be shown
        elif isinstance(event, Outcome):
            self._end()

    def _speak_here(self, notice: Notice) -> None:
        if LEVELS[notice.level] >= LEVELS[self.job.log_level]:
            say(self.job.flavour.command, printable(notice.line))

    # ------------------------------------------------------------------ processes

    def enter(self, supervisor: Supervisor) -> None:
        """Serve the connections, in the agent."""
        self._supervisor = self._starters.supervisor = supervisor
        self._guard = os.getppid()
        self.hub.start()

    def stay(self) -> None:
        """Close the connections in the guard: they belong to the agent."""
        self.hub.disown()
        self._starters.disown()

    def _hear_out(self) -> None:
        """All programs that reach hosts have ended: tell living agents to end, and hear them out."""
        if self.conductor.roster.is_done:
            return
        supervisor = self._supervisor
        assert supervisor is not None
        self._obey(self.conductor.starters_lost(self._starters.why_lost, time.monotonic()))
        while not self.conductor.roster.is_done:
            due_s = self.conductor.deadline_s
            left_s = None if due_s is None else max(due_s - time.monotonic(), 0)
            wait_for(self.hub.fileno(), supervisor.fileno(), left_s=left_s)
            self.read()
            for event in supervisor.wait(0):
                if isinstance(event, SignalReceived):
                    self.hear(event)

    def _show_rest(self) -> None:
        """Wait until all received output is shown, a signal ends the wait, or the guard is gone."""
        while not self._is_orphan and not self.hub.drain(0.5):
            self._is_orphan = os.getppid() != self._guard
            for event in () if self._supervisor is None else self._supervisor.wait(0):
                if isinstance(event, SignalReceived) and event.action == "stop":
                    self._obey(self.conductor.cut_output(event.signum))
                    return

    def _end(self) -> None:
        """Say how the job has ended."""
        judgement, roster = self.conductor.judgement, self.conductor.roster
        for line in self._starters.last_words(
            [place for place in range(len(roster)) if roster.is_lost(place)]
        ):
            self._speak(Notice("critical", line))
        if judgement is not None and judgement.causes:
            from dsl.evidence.reports import seen_on_screen

            judgement = seen_on_screen(judgement, self.hub.recent())

        def say_beside() -> None:
            for notice in self.conductor.notices:
                self._speak(notice)

        if self._recorder is not None:
            self._recorder.beside = tuple([notice.line for notice in self.conductor.notices])
        if not self._is_orphan:
            tell_end(judgement, lambda line: self._speak(Notice("critical", line)), say_beside)
        self.hub.close(0.0)
