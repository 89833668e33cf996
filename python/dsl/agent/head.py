"""The head of a job on several hosts: carries out the conductor's orders over the links to the hosts' agents.

To the agent that runs here, the head is the source of the one plan, a channel, a listener, and the policy.
That agent supervises the programs that reach the hosts (`dsl.agent.starters`).
"""

from __future__ import annotations

import os
import time

from dsl import Ended, SignalReceived, Stopping, __version__
from dsl.agent.elsewhere import Elsewhere
from dsl.agent.policy import GO_ON
from dsl.agent.session import Crew, Hooks, Session
from dsl.agent.starters import KeyTold, Killed, Missing, Starters
from dsl.conductor.conductor import Conductor
from dsl.conductor.orders import Dismiss, Drop, Explain, Reach, Send, Show, Speak
from dsl.conductor.terms import reached_terms, seats_of
from dsl.control.hub import KEY_BYTES, FdStream, allow_connections
from dsl.control.messages import Assignment, Hello, Lost, Recorded, Refused
from dsl.errors import LauncherError, OutputError, ReaderGoneError
from dsl.launchers.table import BY_SSH
from dsl.lists import with_port
from dsl.model.job import Meeting, Notice
from dsl.model.outcome import Decision, Hang, Membership, Outcome
from dsl.model.request import LEVELS
from dsl.printable import printable
from dsl.report.narrator import tell_end
from dsl.report.speak import say, show_text
from dsl.report.verdict import hang_lines, verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl import Supervisor
    from dsl.agent.background import Background
    from dsl.conductor.examination import Examination
    from dsl.control.hub import Hub, Link
    from dsl.facts import Facts
    from dsl.launchers.base import Start
    from dsl.model.job import Job, NodePlan, Pairs
    from dsl.model.outcome import History
    from dsl.model.remote import Remote
    from dsl.report.recorder import Recorder

ENDING_S = 2.0
"""When all agents have ended, ssh and similar programs that still run get this long to obey SIGTERM."""


def run_head(
    job: Job,
    remote: Remote,
    starts: Sequence[Start],
    hub: Hub,
    facts: Facts,
    background: Background | None = None,
    recorder: Recorder | None = None,
    examined: Sequence[Notice] | None = None,
) -> int:
    """Start these programs, conduct the job, and end this process with the job's exit code.

    ``hub``: where the agents will connect. ``background``, ``recorder``: see `Session`. ``examined``: what
    the plan has to say, if the agents only look at their hosts for ``--doctor``; None: they run the job.
    Returns the exit code only if nothing was started.
    """
    node_ranks = [one.node_rank for one in seats_of(job, per_node=remote.per_node)]
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
        examines=examined is not None,
        records=recorder is not None,
    )
    terms = reached_terms(job, remote, assignment)
    conductor: Conductor | Examination
    if examined is None:
        conductor = Conductor(terms, time.monotonic())
    else:
        from dsl.conductor.examination import Examination

        conductor = Examination(terms, time.monotonic(), examined)
    head = Head(
        job, conductor, Starters(job, starts, node_ranks, facts.environ, remote.fanout), hub, recorder
    )

    def crew(_plan: NodePlan) -> Crew:
        return Crew(
            [head],
            [head],
            head.decide,
            hooks=head,
            routine=True,
            elsewhere=head.elsewhere,
            is_visible=examined is None,
            judged=lambda: conductor.judgement,
        )

    return Session(head, crew, background=background, recorder=recorder).run_guarded()


def listen(hub: Hub, job: Job, remote: Remote, facts: Facts) -> tuple[list[str], Pairs]:
    """Let the agents of a job connect: our addresses, and the variables that the agents need.

    Raises:
        LauncherError: the hosts could not reach us.
    """
    port = hub.listen()
    variables: Pairs = ()
    if remote.launcher not in BY_SSH:
        key = os.urandom(KEY_BYTES)
        variables = (("DSL_CONTROL_KEY", key.hex()),)
        hub.expect(None, key, count=len(seats_of(job, per_node=remote.per_node)))
    found = facts.network.addresses_toward([host.name for host in job.hosts], job.meeting.address)
    if not found:
        raise LauncherError(
            "no address of this host is known that the others could reach: give --master_addr, "
            "or --launcher ssh, which needs none"
        )
    return [with_port(one, port) for one in found], variables


class Head(Hooks):
    """Source, channel, listener and policy of the agent that runs on the host where a job was launched."""

    max_restarts = 0
    """The programs that reach the hosts are not restarted."""

    def __init__(
        self,
        job: Job,
        conductor: Conductor | Examination,
        starters: Starters,
        hub: Hub,
        recorder: Recorder | None = None,
    ) -> None:
        self.job = job
        self._recorder = recorder
        self.conductor = conductor
        self._starters = starters
        self._hub = hub
        hub.share_output(len(conductor.roster))
        self._links: dict[int, Link] = {}
        self.elsewhere = Elsewhere(
            lambda: self._links,
            conductor.roster.name,
            nodes=len(job.hosts),
            workers=sum(len(host.slots) for host in job.hosts),
            words=(job.program.script, *job.program.args),
            tee=hub.tee,
        )
        """What views into the job see."""
        self._dismissal_s: float | None = None
        self._supervisor: Supervisor | None = None
        self._is_orphan = False
        self._guard = 0
        self._has_warned = False
        for place, fd in starters.streams.items():
            self._links[place] = hub.add(FdStream(fd, fd), conductor.roster.name(place))
            self._links[place].place = place

    # ------------------------------------------------------------------ source and policy

    def plan(self, attempt: int) -> NodePlan | None:
        """Plan the programs that reach the hosts, in the only attempt."""
        return None if attempt else self._starters.plan()

    def prepare(self, plan: NodePlan) -> NodePlan:
        """Make the files that the programs need. Raises LauncherError."""
        self._starters.prepare()
        return plan

    def finish(self, *, succeeded: bool) -> None:  # noqa: ARG002  as every source
        """Remove what was made for the programs."""
        self._starters.finish()

    def tidy(self) -> None:
        """There is nothing to remove."""

    def membership(self) -> Membership:
        """All hosts."""
        return Membership(len(self.job.hosts))

    def decide(self, history: History, event: object, membership: Membership) -> Decision:  # noqa: ARG002
        """Decide what follows from an event: the job ends as the conductor says."""
        if isinstance(event, Decision):
            return event
        if isinstance(event, Ended):
            code = self.conductor.code
            return Decision("end", code=1 if code is None else code or int(self._hub.has_lost_output))
        return GO_ON

    # ------------------------------------------------------------------ channel

    def fileno(self) -> int:
        """The descriptor of the hub."""
        return self._hub.fileno()

    @property
    def deadline_s(self) -> float | None:
        """`time.monotonic` when something is due."""
        due = (self.conductor.deadline_s, self._dismissal_s, self._starters.deadline_s)
        return min([one for one in due if one is not None], default=None)

    def read(self) -> list[Decision]:
        """Hear what the agents say, and do what follows. Returns what is decided about the programs."""
        for link, message in self._hub.read():
            self._hear_link(link, message)
        now_s = time.monotonic()
        self._follow(self._starters.go_on(now_s))
        due_s = self.conductor.deadline_s
        if due_s is not None and due_s <= now_s and not self._hub.drain(0.0):
            self.conductor.wait_longer(now_s)
        self._obey(self.conductor.wait_is_over(now_s))
        if self._dismissal_s is None or now_s < self._dismissal_s:
            return []
        self._dismissal_s = None
        return [Decision("stop", grace_s=ENDING_S)]

    def _hear_link(self, link: Link | None, message: object) -> None:
        if link is None:
            if isinstance(message, Notice):
                self._speak(message)
            return
        place = link.place
        if isinstance(message, Hello):
            if place >= len(self.conductor.roster) or not self.conductor.expects(place):
                self._turn_away(link)
                return
            self._links[place] = link
        if self._links.get(place) is not link:
            return  # this link has not greeted us
        if self.elsewhere.hear(place, message):
            return
        if self._recorder is not None and self._record(self._recorder, link, message):
            return
        is_silent = place in self._starters.streams and not self.conductor.roster.has_greeted(place)
        if isinstance(message, Lost) and is_silent:
            return  # its program will end and say why
        if link.clock is not None:
            self.conductor.clocks[place] = link.clock
        self._obey(self.conductor.hear(place, message, time.monotonic()))

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
        return isinstance(message, Recorded)

    def _turn_away(self, link: Link) -> None:
        """Refuse an agent whose place does not exist or is taken. The user hears of the first such agent."""
        if not self._has_warned:
            self._has_warned = True
            text = f"an agent for place {link.place} has connected from {link.name}, where none is expected"
            self._speak(Notice("warning", f"{text}: it was refused"))
        link.close()

    def _obey(self, orders: Sequence[object]) -> None:
        """Carry out the conductor's orders."""
        for order in orders:
            if isinstance(order, Send):
                link = self._links.get(order.place)
                if self._recorder is not None and isinstance(order.message, Meeting):
                    self._recorder.meeting(self.conductor.roster.name(order.place), order.message)
                if link is not None:
                    link.send(order.message)
            elif isinstance(order, Speak):
                self._speak(order.notice)
            elif isinstance(order, Show):
                self._show(order.text)
            elif isinstance(order, Explain):
                for line in verdict(order.judgement)[:1]:
                    self._speak(Notice(order.level, line))
                    if self._recorder is not None:
                        self._recorder.restart(line)
            elif isinstance(order, Reach):
                self._follow(self._starters.reach(order.place))
            elif isinstance(order, Drop):
                link = self._links.pop(order.place, None)
                if link is not None:
                    link.close()
            elif isinstance(order, Dismiss):
                for link in self._links.values():
                    link.close()
                self._dismiss(order.within_s)

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

    def _follow(self, news: Sequence[object]) -> None:
        """Do what follows from what the programs that reach the hosts have said."""
        for one in news:
            now_s = time.monotonic()
            if isinstance(one, KeyTold):
                self._hub.expect(one.place, one.key)
            elif isinstance(one, Notice):
                self._speak(one)
            elif isinstance(one, Missing):
                is_awaited = any(self.conductor.roster.is_awaited(place) for place in one.places)
                self._starters.told.update(one.places if is_awaited else ())
                for line in one.said if is_awaited else ():
                    self._speak(Notice("critical", line))
                self._obey(self.conductor.starter_ended(one.places, one.why, now_s))
            elif isinstance(one, Killed) and self.conductor.has_begun:
                self._obey(self.conductor.starters_lost(one.why, now_s))

    # ------------------------------------------------------------------ listener

    def hear(self, event: object) -> None:
        """Hear what happens here."""
        self._follow(self._starters.hear(event))
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
            if isinstance(self.conductor, Conductor):
                self._obey(self.conductor.hang(event, time.monotonic()))
        elif isinstance(event, Ended):
            self._follow(self._starters.go_on(float("inf")))
            if not self._is_orphan:
                self._hear_out()
            self._show_rest()
            if not self._is_orphan:
                self.read()  # whether that could be shown
        elif isinstance(event, Outcome):
            self._end()

    def _speak(self, notice: Notice) -> None:
        if LEVELS[notice.level] >= LEVELS[self.job.log_level]:
            say(self.job.flavour.command, printable(notice.line))

    # ------------------------------------------------------------------ processes

    def enter(self, supervisor: Supervisor) -> None:
        """Serve the connections, in the agent."""
        self._supervisor = self._starters.supervisor = supervisor
        self._guard = os.getppid()
        self._hub.start()

    def stay(self) -> None:
        """Close the connections in the guard: they belong to the agent."""
        self._hub.disown()
        self._starters.disown()

    def _hear_out(self) -> None:
        """All programs that reach hosts have ended: tell living agents to end, and hear them out."""
        import select

        if self.conductor.roster.is_done:
            return
        supervisor = self._supervisor
        assert supervisor is not None
        self._obey(self.conductor.starters_lost(self._starters.why_lost, time.monotonic()))
        poller = select.poll()
        poller.register(self._hub.fileno(), select.POLLIN)
        poller.register(supervisor.fileno(), select.POLLIN)
        while not self.conductor.roster.is_done:
            due_s = self.conductor.deadline_s
            left_ms = None if due_s is None else max(due_s - time.monotonic(), 0) * 1000 + 1
            poller.poll(left_ms)
            self.read()
            for event in supervisor.wait(0):
                if isinstance(event, SignalReceived):
                    self.hear(event)

    def _show_rest(self) -> None:
        """Wait until all received output is shown, a signal ends the wait, or the guard is gone."""
        while not self._is_orphan and not self._hub.drain(0.5):
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

            judgement = seen_on_screen(judgement, self._hub.recent())

        def say_beside() -> None:
            for notice in self.conductor.notices:
                self._speak(notice)

        if self._recorder is not None:
            self._recorder.beside = tuple([notice.line for notice in self.conductor.notices])
        if not self._is_orphan:
            tell_end(judgement, lambda line: self._speak(Notice("critical", line)), say_beside)
        self._hub.close(0.0)
