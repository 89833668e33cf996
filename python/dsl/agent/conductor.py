"""What the head of a job on several hosts decides: messages in, orders out, no clock of its own.

The job starts when every agent has said that nothing stands in the way on its host. The first worker that
fails ends the attempt everywhere. The conductor decides only then whether another attempt follows. If workers
fail on two hosts, the verdict names the first only if the hosts' clocks can tell (see `Clocks`).
"""

from __future__ import annotations

from dsl._record import record, replace
from dsl.conductor.judge import Clocks, Context, Member, judge
from dsl.control.checks import compare, skew_notice, version_problem
from dsl.control.messages import (
    Assignment,
    Bye,
    Checked,
    Failing,
    Forward,
    Hello,
    Lost,
    Over,
    Refused,
    Running,
    Said,
    Stop,
)
from dsl.model.job import Meeting, Notice
from dsl.model.judgement import Absence, Report
from dsl.model.outcome import REQUEUE_CODE, Tried
from dsl.model.progress import SAME_HOSTS, add, pause_s
from dsl.model.request import DEFAULT_MASTER_PORT
from dsl.report.verdict import verdict
from dsl.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.model.job import Job
    from dsl.model.judgement import Judgement
    from dsl.model.progress import Patience
    from dsl.model.remote import Remote

START_S = 60.0
"""Most time that the hosts get to answer before the job starts."""

TOGETHER_S = 3.0
"""After the first host that cannot take part, other hosts get this long to report their own problems."""

FAREWELL_S = 10.0
"""Most time that an agent gets to end when it has nothing left to do."""

SIGTERM = 15
USAGE = 2
FAILURE = 1


@record
class Place:
    """One agent of the job."""

    node_rank: int
    """Its host."""
    task: int | None
    """The one local rank that the agent starts; None: all ranks of the host."""
    ranks: range
    """The ranks of its workers."""


@record
class Send:
    """An order: tell an agent something."""

    place: int
    message: object


@record
class Speak:
    """An order: tell the user something."""

    notice: Notice


@record
class Dismiss:
    """An order: no message to the agents is left. The programs that started them have ``within_s`` to end."""

    within_s: float


def places_of(job: Job, *, per_node: bool) -> tuple[Place, ...]:
    """The agents of a job in the order of their places: one per host, or one per rank."""
    places, first = [], 0
    for node_rank, host in enumerate(job.hosts):
        count = len(host.slots)
        ranks = range(first, first + count)
        if per_node:
            places.append(Place(node_rank, None, ranks))
        else:
            places += [Place(node_rank, task, ranks[task : task + 1]) for task in range(count)]
        first += count
    return tuple(places)


class _Agent:
    """What is known of one agent."""

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.checked: Checked | None = None
        self.report: Report | None = None
        self.problem = ""
        self.is_gone = False
        self.has_ended = False


class Conductor:
    """Decides for a whole job. Times are `time.monotonic` seconds."""

    def __init__(self, job: Job, remote: Remote, assignment: Assignment, now_s: float) -> None:
        """``assignment`` is that of node 0; the other agents' assignments differ only in their place."""
        self._job = job
        self._remote = remote
        self._assignment = assignment
        self.places = places_of(job, per_node=remote.per_node)
        self._agents = [_Agent() for _ in self.places]
        self._sizes = tuple([len(host.slots) for host in job.hosts])
        self._deadline_s: float | None = now_s + START_S
        self._now_s = now_s
        self._meeting: Meeting | None = None
        self._restarts = 0
        self._tried: tuple[Tried, ...] = ()
        self._begun_s = now_s
        self._pause_s: float | None = None
        """When another attempt may begin; None: at once."""
        self._failing: dict[int, Failing] = {}
        self._is_stopping = False
        self._is_over = self._is_abandoned = False
        self._has_failed_to_start = False
        self._fault = ""
        self._begun_by: int | None = None
        self._user_signal: int | None = None
        self._is_key = False
        self._is_preempted = False
        self._verdict: list[Notice] = []
        self.judgement: Judgement | None = None
        """What all agents have reported about the last attempt, once the job is over."""
        self.code: int | None = None
        """Exit code of the job, once decided."""
        self.clocks: dict[int, Clocks] = {}
        """Compared clocks of the agents, by place."""

    @property
    def deadline_s(self) -> float | None:
        """When to call `wait_is_over`; None: nothing is due."""
        return self._deadline_s if self._pause_s is None or self._is_over else self._pause_s

    @property
    def verdict(self) -> tuple[Notice, ...]:
        """What to tell the user about the end, once all output has been shown."""
        return tuple(self._verdict)

    @property
    def has_begun(self) -> bool:
        """Whether the agents have been sent into an attempt."""
        return self._meeting is not None

    @property
    def is_done(self) -> bool:
        """Whether nothing more can come from any agent."""
        return self._is_over and all(agent.is_gone or agent.has_ended for agent in self._agents)

    @property
    def is_complete(self) -> bool:
        """Whether every agent has said goodbye: then the programs that started them end by themselves."""
        return all(agent.has_ended for agent in self._agents)

    def expects(self, place: int) -> bool:
        """Whether an agent may still greet us: one per place."""
        return not self.has_greeted(place)

    def has_greeted(self, place: int) -> bool:
        """Whether the agent has greeted us."""
        return self._agents[place].hello is not None

    def has_said_goodbye(self, place: int) -> bool:
        """Whether the agent has said that it ends."""
        return self._agents[place].has_ended

    def is_awaited(self, place: int) -> bool:
        """Whether the agent has not greeted us, and still may."""
        return self._agents[place].hello is None and not self._agents[place].is_gone and not self._is_over

    def name(self, place: int) -> str:
        """The name of an agent: ``host n1``, or ``rank 3 on host n1``."""
        one = self.places[place]
        host = self._job.hosts[one.node_rank].name
        return f"host {host}" if one.task is None else f"rank {one.ranks.start} on host {host}"

    def _names(self, places: Sequence[int]) -> str:
        """Several agents: ``hosts n1, n2``, or ``ranks 0-3``."""
        if len(places) == 1:
            return self.name(places[0])
        hosts = {self._job.hosts[self.places[place].node_rank].name: None for place in places}
        shown = ", ".join(list(hosts)[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
        return f"host{'s' if len(hosts) > 1 else ''} {shown}"

    def hear(self, place: int, message: object, now_s: float) -> list[object]:
        """What follows from what an agent says."""
        self._now_s = now_s
        agent = self._agents[place]
        if isinstance(message, Hello):
            return self._greet(place, agent, message)
        if isinstance(message, Checked):
            agent.checked = message
            agent.problem = "\n".join(message.problems)
            return self._try_to_begin()
        if isinstance(message, Refused):
            agent.problem = agent.problem or message.text
            return self._part_failed(place, message.code)
        if isinstance(message, Said):
            return [Speak(message.notice)]
        if isinstance(message, Failing):
            return self._hear_failing(place, message)
        if isinstance(message, Report):
            return self._hear_report(place, agent, message)
        if isinstance(message, Bye):
            orders = [] if self._is_over else self._hear_lost(place, agent, "has ended before its time")
            agent.has_ended = True
            return [*orders, *self._finish_if_done()]
        if isinstance(message, Lost):
            return self._hear_lost(place, agent, message.reason)
        assert isinstance(message, Running), message
        return []

    def starter_ended(self, places: Sequence[int], why: str, now_s: float) -> list[object]:
        """The programs that started these agents have ended: agents that have not answered never will."""
        self._now_s = now_s
        orders: list[object] = []
        for place in places:
            agent = self._agents[place]
            if agent.hello is None and not agent.is_gone:
                agent.is_gone = True
                agent.problem = agent.problem or why
                orders += self._part_failed(place, FAILURE)
        return orders

    def starters_lost(self, why: str, now_s: float) -> list[object]:
        """All programs that started the agents have ended before the agents: no agent can be trusted.

        Agents that can still be reached get the grace period to end.
        """
        self._now_s = now_s
        if self._is_over:
            return []
        if not self._runs:
            if self._meeting is None and any(agent.problem for agent in self._agents):
                self._has_failed_to_start = True
                return self._refuse_to_begin()
            self._verdict.append(Notice("critical", f"error: {why}"))
            return self._give_up(FAILURE)
        self._is_abandoned = True
        grace_s = self._job.signals.grace_s
        self._deadline_s = now_s + grace_s + FAREWELL_S
        if not (self._failing or self._user_signal is not None or self._is_preempted):
            self._fault = why
        if self._is_stopping:
            return []
        self._is_stopping = True
        return self._to_all(Stop(SIGTERM, grace_s, why=why))

    def signal(self, signum: int, action: str, now_s: float, *, is_key: bool = False) -> list[object]:
        """Act on a signal of the user or a scheduler. ``is_key``: it comes from a key of the terminal."""
        self._now_s = now_s
        job = self._job
        if action == "forward":
            return self._to_all(Forward(signum)) if self._runs else []
        if action == "preempt":
            if self._is_stopping or not self._runs:
                return []
            self._is_preempted = self._is_stopping = True
            grace_s = job.signals.preempt_grace_s
            grace_s = job.signals.grace_s if grace_s is None else grace_s
            text = f"{signal_name(signum)} received: the workers have {grace_s:g} s to save their work"
            stop = Stop(signum, grace_s, is_preemption=True)
            return [Speak(Notice("info", text)), *self._to_all(stop)]
        if action != "stop":
            return []
        if self._is_over:
            return [] if self.is_done else self.cut_output(signum)
        name = signal_name(signum)
        insists = self._user_signal is not None
        if not insists:
            self._user_signal, self._is_key = signum, is_key
        self._is_stopping = True
        if not self._runs:
            return self._give_up(128 + signum)
        if insists:
            text = f"{name} received again: the grace is over"
            return [Speak(Notice("info", text)), *self._to_all(Stop(signum, 0.0))]
        grace_s = job.signals.grace_s
        text = f"{name} received: stopping all hosts (grace {grace_s:g} s, a second signal kills at once)"
        return [Speak(Notice("info", text)), *self._to_all(Stop(signum, grace_s))]

    def wait_longer(self, now_s: float) -> None:
        """Extend the deadline: the user's side does not read the output, so agents cannot send the rest."""
        if self._is_over and self._deadline_s is not None:
            self._deadline_s = now_s + FAREWELL_S

    def cut_output(self, signum: int) -> list[object]:
        """End at once: the user no longer waits for the output of an ended job to be read."""
        self.code = self.code or 128 + signum
        for agent in self._agents:
            agent.is_gone = True
        if self._meeting is None:
            return self._finish_if_done()
        text = f"{signal_name(signum)} received: output that nobody has read is lost"
        return [Speak(Notice("warning", text)), *self._finish_if_done()]

    def wait_is_over(self, now_s: float) -> list[object]:
        """What follows when `deadline_s` has passed."""
        self._now_s = now_s
        if self._pause_s is not None and not self._is_over:
            return self._meet() if now_s >= self._pause_s else []
        if self._deadline_s is None or now_s < self._deadline_s:
            return []
        self._deadline_s = None
        if self._is_over:
            for agent in self._agents:
                agent.is_gone = True
            return self._finish_if_done()
        if self._meeting is None:
            return self._refuse_to_begin()
        return self._abandon() if self._is_abandoned else []

    def _abandon(self) -> list[object]:
        """Count agents without a report as lost."""
        orders: list[object] = []
        for place, agent in enumerate(self._agents):
            if agent.report is None:
                orders += self._hear_lost(place, agent, "has not answered any more")
        return orders

    # ------------------------------------------------------------------ before the start

    @property
    def _runs(self) -> bool:
        return self._meeting is not None and not self._is_over and self._pause_s is None

    def _greet(self, place: int, agent: _Agent, hello: Hello) -> list[object]:
        agent.hello = hello
        own = self._assignment.version
        one = self.places[place]
        if self._is_over:
            return [Send(place, Over())]
        problem = version_problem(hello, own)
        if problem:
            agent.problem = problem
            return self._part_failed(place, USAGE)
        if hello.is_task and hello.local_rank != one.task:
            agent.problem = (
                f"is local rank {hello.local_rank} there, expected {one.task}: "
                "leave options that place ranks out of --launcher_args"
            )
            return self._part_failed(place, USAGE)
        assignment = replace(self._assignment, node_rank=one.node_rank, task=one.task)
        return [Send(place, assignment)]

    def _part_failed(self, place: int, code: int) -> list[object]:
        """An agent cannot take part."""
        if self._meeting is not None:
            return self._fail_running(place, code)
        if self._is_over:
            return self._finish_if_done()
        if not self._has_failed_to_start:
            self._has_failed_to_start = True
            self._deadline_s = min(self._deadline_s or self._now_s, self._now_s) + TOGETHER_S
        return self._try_to_begin()

    def _try_to_begin(self) -> list[object]:
        if self._meeting is not None or self._is_over:
            return []
        if any(agent.checked is None and not agent.problem and not agent.is_gone for agent in self._agents):
            return []
        if any(agent.problem for agent in self._agents):
            return self._refuse_to_begin()
        return self._begin()

    def _begin(self) -> list[object]:
        self._deadline_s = None
        address = self._job.meeting.address or self._found_address()
        if not address:
            host = self._job.hosts[0].name
            text = (
                f"error: no address of host {host} is known that the others could reach: give --master_addr"
            )
            self._verdict.append(Notice("critical", text))
            return self._give_up(USAGE)
        first = self._agents[0].checked
        assert first is not None
        port = self._job.meeting.port
        orders: list[object] = []
        if port is None:
            port = DEFAULT_MASTER_PORT
            if not first.is_port_free:
                port = first.free_port
                host = self._job.hosts[0].name
                text = f"master port {DEFAULT_MASTER_PORT} is taken on host {host}, using {port}"
                orders.append(Speak(Notice("info", text)))
        orders += [Speak(notice) for notice in self._compared()]
        self._meeting = Meeting(0, 0, self._sizes, address, port or first.free_port)
        return [*orders, *self._meet()]

    def _compared(self) -> list[Notice]:
        """What the user should know about the hosts in comparison."""
        hosts = {one.node_rank: place for place, one in reversed(list(enumerate(self.places)))}
        found = []
        clocks = []
        for node_rank, place in sorted(hosts.items()):
            name, checked = self._job.hosts[node_rank].name, self._agents[place].checked
            assert checked is not None
            found.append((name, checked))
            clock = self.clocks.get(place)
            if clock is not None:
                clocks.append(skew_notice(name, clock.offset_ns, clock.error_ns))
        return [*compare(found), *[notice for notice in clocks if notice is not None]]

    def _found_address(self) -> str:
        first = self._agents[0].checked
        return first.addresses[0] if first is not None and first.addresses else ""

    def _meet(self) -> list[object]:
        """Send all agents into the attempt."""
        assert self._meeting is not None
        self._failing, self._is_stopping, self._begun_by = {}, False, None
        self._pause_s, self._begun_s = None, self._now_s
        for agent in self._agents:
            agent.report = None
        return [
            Send(place, replace(self._meeting, node_rank=one.node_rank))
            for place, one in enumerate(self.places)
        ]

    def _refuse_to_begin(self) -> list[object]:
        """End the job and say what stands in the way on every host, one line per problem."""
        code = USAGE
        names: dict[str, list[int]] = {}
        for place, agent in enumerate(self._agents):
            if agent.checked is None and not agent.problem:
                if self._has_failed_to_start:
                    continue  # we did not wait for this agent
                agent.problem = f"has not answered within {START_S:g} s"
            if agent.checked is None and agent.hello is None and agent.problem:
                code = FAILURE
            for line in agent.problem.split("\n") if agent.problem else ():
                names.setdefault(line, []).append(place)
        for line, places in names.items():
            self._verdict.append(Notice("critical", f"error: {self._names(places)}: {line}"))
        return self._give_up(code)

    def _give_up(self, code: int) -> list[object]:
        """End a job of which no worker runs."""
        self.code = code if self.code is None else self.code
        return self._end()

    # ------------------------------------------------------------------ while it runs

    def _hear_failing(self, place: int, message: Failing) -> list[object]:
        meeting = self._meeting
        if meeting is None or message.attempt != meeting.attempt:
            return []
        self._failing.setdefault(place, message)
        return self._stop_others(place)

    def _stop_others(self, place: int) -> list[object]:
        """Stop all workers except those of ``place``, whose agent stops them itself."""
        if self._is_stopping:
            return []
        self._is_stopping, self._begun_by = True, place
        stop = Stop(SIGTERM, self._job.signals.grace_s, why=f"{self.name(place)} has failed")
        return [one for one in self._to_all(stop) if isinstance(one, Send) and one.place != place]

    def _hear_report(self, place: int, agent: _Agent, report: Report) -> list[object]:
        meeting = self._meeting
        if meeting is None or report.attempt != meeting.attempt:
            return []
        agent.report = report
        orders = self._stop_others(place) if report.code else []
        return [*orders, *self._decide()]

    def _fail_running(self, place: int, code: int) -> list[object]:
        """An agent ends without a report."""
        agent = self._agents[place]
        meeting = self._meeting
        assert meeting is not None
        if agent.report is None:
            absence = Absence(self.name(place), agent.problem, is_lost=False)
            agent.report = Report(meeting.attempt, code, absence=absence)
        orders = self._stop_others(place)
        return [*orders, *self._decide()]

    def _hear_lost(self, place: int, agent: _Agent, reason: str) -> list[object]:
        if agent.is_gone or agent.has_ended:
            agent.is_gone = True
            return self._finish_if_done()
        agent.is_gone = True
        agent.problem = agent.problem or reason
        if self._meeting is None:
            return self._part_failed(place, FAILURE)
        if self._is_over:
            if agent.report is None or not agent.report.code:
                text = f"{self.name(place)} {reason}: the end of its output may be missing"
                return [Speak(Notice("warning", text)), *self._finish_if_done()]
            return self._finish_if_done()
        orders: list[object] = []
        if agent.report is None:
            agent.report = self._report_of_lost(place, f"it {reason}", self.places[place].ranks)
            orders = self._stop_others(place)
        return [*orders, *self._decide()]

    def _report_of_lost(self, place: int, why: str, ranks: range, code: int = FAILURE) -> Report:
        """The report of an agent that was lost while its workers ran."""
        assert self._meeting is not None
        absence = Absence(self.name(place), why, first_rank=ranks.start, rank_count=len(ranks))
        known = self._failing.get(place)
        if known is not None:
            code = known.status
            absence = replace(absence, rank=known.rank, status=code, ended_ns=known.ended_ns)
        return Report(self._meeting.attempt, code, absence=absence)

    def _decide(self) -> list[object]:
        """When the attempt has ended on every host: start another attempt, or end the job."""
        reports = [agent.report for agent in self._agents]
        if self._is_over or any(report is None for report in reports):
            return []
        ended = [report for report in reports if report is not None]
        failed = any(report.code for report in ended)
        was_stopped = self._user_signal is not None or self._is_preempted or bool(self._fault)
        if not failed and not was_stopped:
            self.code = 0
            return self._end()
        judgement = self._judge()
        may_restart = (
            self._restarts < self._job.max_restarts
            and failed
            and not self._is_abandoned
            and self._user_signal is None
            and not self._is_preempted
            and not any(agent.is_gone for agent in self._agents)
            and not any(report.survivors or report.stop_signal is not None for report in ended)
        )
        if not may_restart:
            self._end_with(judgement)
            if self._meeting is not None and self._meeting.attempt and failed:
                self._verdict.append(Notice("error", f"{self._meeting.attempt + 1} attempts have failed"))
            return self._end()
        assert self._meeting is not None
        self._note_attempt(_cause_of(judgement))
        self._restarts += 1
        attempt = self._meeting.attempt + 1
        self._meeting = replace(self._meeting, attempt=attempt, round=attempt, restarts=self._restarts)
        said = self._say_restart(judgement, self._pause(SAME_HOSTS))
        return said if self._pause_s is not None else [*said, *self._meet()]

    def _note_attempt(self, cause: str) -> None:
        """Keep what later pauses depend on: how long the attempt took, and how it failed."""
        self._tried = add(self._tried, Tried(self._now_s - self._begun_s, cause))

    def _end_with(self, judgement: Judgement) -> None:
        """Note how the job ends: its exit code, and what the user has to know."""
        self.judgement, self.code = judgement, judgement.code
        if judgement.is_preempted:
            text = f"the job was preempted, exit code {REQUEUE_CODE}: it can be queued again"
            self._verdict.append(Notice("info", text))
        self._verdict += [Notice("critical", line) for line in verdict(judgement)]

    def _pause(self, patience: Patience) -> float:
        """Make the next attempt wait if it has to. Returns the pause in seconds."""
        wait_s = pause_s(self._tried, patience)
        self._pause_s = self._now_s + wait_s if wait_s else None
        return wait_s

    def _say_restart(self, judgement: Judgement, wait_s: float) -> list[object]:
        text = f"starting all hosts again, restart {self._restarts} of {self._job.max_restarts}"
        if wait_s:
            text += f", in {wait_s:g} s"
        said: list[object] = [Speak(Notice("error", line)) for line in verdict(judgement)[:1]]
        return [*said, Speak(Notice("warning", text))]

    def _reports(self) -> dict[int, Report]:
        """The known reports on how the attempt has ended, by place."""
        return {place: agent.report for place, agent in enumerate(self._agents) if agent.report is not None}

    def _judge(self) -> Judgement:
        """What follows from all reports."""
        reports = self._reports()
        members = {place: Member(self.name(place), self.places[place].node_rank) for place in reports}
        context = Context(
            self._job.flavour.command,
            self._user_signal,
            is_key=self._is_key,
            is_preempted=self._is_preempted,
            preempt_signal=self._job.signals.preempt,
            fault=self._fault,
            begun_by=self._begun_by,
        )
        return judge(reports, members, self.clocks, context)

    # ------------------------------------------------------------------ the end

    def _end(self) -> list[object]:
        """Tell all agents that the job is over."""
        if self._is_over:
            return []
        self._is_over = True
        self._deadline_s = self._now_s + FAREWELL_S
        return [*self._to_all(Over()), *self._finish_if_done()]

    def _finish_if_done(self) -> list[object]:
        for agent in self._agents:
            if self._is_over and agent.hello is None:
                agent.is_gone = True  # this agent will never come
        if not self.is_done:
            return []
        self._deadline_s = None
        return [Dismiss(FAREWELL_S)]

    def _to_all(self, message: object) -> list[object]:
        return [
            Send(place, message)
            for place, agent in enumerate(self._agents)
            if agent.hello is not None and not agent.is_gone and not agent.has_ended
        ]


def _cause_of(judgement: Judgement) -> str:
    """How an attempt failed, in words that are equal for equal failures."""
    rank = judgement.causes[0].rank if judgement.causes else -1
    return f"rank {rank}, exit code {judgement.code}"


def clocks_of(found: Mapping[int, tuple[int, int]]) -> dict[int, Clocks]:
    """Clocks by place, from (offset, error) in nanoseconds."""
    return {place: Clocks(offset, error) for place, (offset, error) in found.items()}
