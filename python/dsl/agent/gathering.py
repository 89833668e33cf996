"""The hosts of an elastic job, and how an attempt begins with those that are there.

Hosts that cannot be reached, or where something is wrong, are named once and tried again at growing
intervals. Decisions while workers run are in `dsl.agent.elastic_conductor`.
"""

from __future__ import annotations

from dsl._record import record, replace
from dsl.agent.conductor import (
    FAILURE,
    SIGTERM,
    START_S,
    TOGETHER_S,
    USAGE,
    Conductor,
    Send,
    Speak,
    _Agent,
)
from dsl.control.checks import compare, skew_notice, version_problem
from dsl.control.messages import Checked, Hello, Over, Stop
from dsl.model.job import Meeting, Notice
from dsl.model.request import DEFAULT_MASTER_PORT
from dsl.plan.elastic import choose_hosts, few

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.control.messages import Assignment
    from dsl.model.job import Job, RestartReason
    from dsl.model.judgement import Report
    from dsl.model.remote import Remote

LAST_CALL_S = 30.0
"""When enough hosts are there, hosts that are still starting get this long to join the attempt."""

COMPANY_S = 5.0
"""A host that comes while workers run waits this long for other starting hosts, to share one restart."""

RETRY_S = 1.0
"""Time until a host that could not be reached is tried again. It doubles each time."""

LONGEST_RETRY_S = 60.0

MENDED_S = 30.0
"""Time until we retry a host on which the user has to fix something first."""

STEADY_S = 60.0
"""A host that has taken part for this long is tried again with the shortest delay when it is lost."""


@record
class Reach:
    """An order: start the program that reaches a host again, and end what is left of the last one."""

    place: int


@record
class Drop:
    """An order: end the connection to an agent."""

    place: int


class _Host:
    """What is known of reaching one host."""

    def __init__(self) -> None:
        self.is_starting = True
        """The program that reaches the host runs, and the agent has not yet said that all is well."""
        self.due_s: float | None = None
        """While starting: the deadline for its answer. Otherwise: when to try it again; None: it is there."""
        self.retry_s = RETRY_S
        self.problem = ""
        """Why it does not take part, as the user was last told."""
        self.is_unfit = False
        """The host can be reached, but something is wrong there."""
        self.is_spare = False
        """The user was told that it is a spare."""
        self.joined_s = 0.0

    def pause_s(self) -> float:
        """Seconds until the host is tried again. They double for the next time."""
        pause_s, self.retry_s = self.retry_s, min(2 * self.retry_s, LONGEST_RETRY_S)
        return pause_s


class Gathering(Conductor):
    """What an elastic job knows of its hosts, and how it begins an attempt with those that are there."""

    def __init__(self, job: Job, remote: Remote, assignment: Assignment, now_s: float) -> None:
        """As `Conductor`."""
        super().__init__(job, remote, replace(assignment, is_elastic=True), now_s)
        self._deadline_s = None
        self._hosts = [_Host() for _ in self.places]
        self._starts_in_time = remote.launcher != "slurm"  # whose queue may be long
        for host in self._hosts:
            host.due_s = now_s + START_S if self._starts_in_time else None
        self._members: dict[int, Report | None] = {}
        """How the attempt has ended on each host that takes part; empty without an attempt."""
        self._gone: dict[int, str] = {}
        """Members that do not take part in the next attempt, each with a line for the user."""
        self._last_lines: tuple[str, ...] = ()
        """The last attempt's lines, if it ended because hosts were lost."""
        self._regroups = False
        """The workers are being stopped because more hosts have come."""
        self._count = 0
        """Number of attempts begun."""
        self._reason: RestartReason = "start"
        self._calls = True
        """Wait a moment for starting hosts before the next attempt."""
        self._call_s: float | None = None
        self._company_s: float | None = None
        self._waits_s: float | None = now_s + remote.wait_s
        self._has_said_wait = False
        self._refuse_s: float | None = None
        self._preferred: frozenset[int] = frozenset()
        """Hosts of the last attempt."""

    @property
    def deadline_s(self) -> float | None:
        """When to call `wait_is_over`; None: nothing is due."""
        due = [self._deadline_s]
        if not self._is_over:
            due += [self._pause_s or self._call_s, self._company_s, self._waits_s, self._refuse_s]
            due += [host.due_s for host in self._hosts]
        return min([one for one in due if one is not None], default=None)

    @property
    def is_complete(self) -> bool:
        """Whether every agent that is there has said that it ends."""
        return all(agent.has_ended or agent.is_gone for agent in self._agents)

    @property
    def _runs(self) -> bool:
        return bool(self._members) and not self._is_over

    # ------------------------------------------------------------------ hosts that come

    def expects(self, place: int) -> bool:
        """Whether an agent may greet us: one at a time per place."""
        agent = self._agents[place]
        return agent.hello is None or agent.is_gone or agent.has_ended

    def _greet_host(self, place: int, hello: Hello) -> list[object]:
        agent = self._agents[place] = _Agent()
        agent.hello = hello
        if self._is_over:
            agent.is_gone = True
            return [Send(place, Over())]
        problem = version_problem(hello, self._assignment.version)
        if problem:
            return self._find_unfit(place, (problem,))
        return [Send(place, replace(self._assignment, node_rank=place))]

    def _hear_checked(self, place: int, checked: Checked) -> list[object]:
        if self._is_over:
            return []
        if checked.problems:
            return self._find_unfit(place, checked.problems)
        host = self._hosts[place]
        orders: list[object] = []
        if host.problem:
            orders.append(Speak(Notice("info", f"{self.name(place)} is there now")))
        host.is_starting, host.is_unfit, host.due_s, host.problem = False, False, None, ""
        host.joined_s = self._now_s
        if not self._runs:
            return [*orders, *self._try_to_begin()]
        return [*orders, *self._take_in()]

    def _take_in(self, *, is_late: bool = False) -> list[object]:
        """While workers run: stop them if the job can go on with more hosts.

        ``is_late``: do not wait for starting hosts any more.
        """
        if self._is_stopping or not self._runs:
            return []
        spares = [place for place in self._ready() if place not in self._members]
        chosen = self._choose([*self._members, *spares])
        has_ended = any(report is not None for report in self._members.values())
        if has_ended or chosen is None or len(chosen) <= len(self._members):
            return self._say_spares(spares)
        new = [place for place in chosen if place not in self._members]
        is_starting = any(host.is_starting for host in self._hosts)
        if is_starting and len(chosen) < self._remote.most_nodes and not is_late:
            self._company_s = self._company_s or self._now_s + COMPANY_S
            return []
        self._company_s = None
        self._regroups = True
        text = (
            f"{self._names(new)} {'has' if len(new) == 1 else 'have'} come: starting again with all of them"
        )
        return [Speak(Notice("info", text)), *self._stop_members("hosts have come")]

    def _is_news(self, place: int, what: str) -> bool:
        host = self._hosts[place]
        is_news, host.problem = host.problem != what, what
        return is_news

    def _say_spares(self, places: Sequence[int]) -> list[object]:
        new = [place for place in places if not self._hosts[place].is_spare]
        for place in new:
            self._hosts[place].is_spare = True
        if not new:
            return []
        text = f"{self._names(new)} {'is a spare' if len(new) == 1 else 'are spares'}"
        return [Speak(Notice("info", f"{text}, in case that another is lost"))]

    def _find_unfit(self, place: int, problems: Sequence[str]) -> list[object]:
        """Something is wrong on a host: end its agent, and start it again later."""
        host = self._hosts[place]
        is_news = self._is_news(place, "\n".join(problems))
        host.is_starting, host.is_unfit, host.due_s = False, True, self._now_s + MENDED_S
        self._agents[place].is_gone = True
        orders: list[object] = [Send(place, Over())]
        if self._count == 0:
            return [*orders, *self._try_to_begin()]
        if is_news:
            orders += [
                Speak(Notice("warning", f"{self.name(place)} cannot take part: {one}")) for one in problems
            ]
        return orders

    def _miss(self, place: int, why: str, *, at_once: bool = False) -> list[object]:
        """A host is not there: try it again later."""
        host = self._hosts[place]
        self._agents[place].is_gone = True
        is_news = self._is_news(place, why)
        host.is_starting, host.is_unfit = False, False
        host.due_s = self._now_s + host.pause_s()
        orders: list[object] = []
        if is_news and not at_once:
            orders.append(Speak(Notice("warning", f"{self.name(place)}: {why}; it is tried again")))
        return orders if self._runs else [*orders, *self._try_to_begin()]

    def _try_host(self, place: int, host: _Host) -> list[object]:
        """A host has not answered in time, or it is time to try it again."""
        if host.is_starting:
            host.due_s = None
            return [Drop(place), *self._miss(place, f"has not answered within {START_S:g} s")]
        self._agents[place] = _Agent()
        host.is_starting = True
        host.due_s = self._now_s + START_S if self._starts_in_time else None
        return [Drop(place), Reach(place)]

    # ------------------------------------------------------------------ who takes part

    def _ready(self) -> list[int]:
        """Hosts that can take part now."""
        return [
            place
            for place, agent in enumerate(self._agents)
            if agent.checked is not None
            and not agent.checked.problems
            and not agent.is_gone
            and not agent.has_ended
        ]

    def _choose(self, ready: Sequence[int]) -> tuple[int, ...] | None:
        """The largest set of hosts that the job may run on, preferring those of the last attempt; or None."""
        known = self._preferred | set(self._members)
        ordered = sorted(set(ready), key=lambda place: (place not in known, place))
        return choose_hosts(
            [(place, self._sizes[place]) for place in ordered],
            self._remote.least_nodes,
            self._remote.most_nodes,
            self._remote.world_sizes,
        )

    def _try_to_begin(self) -> list[object]:
        if self._runs or self._is_over:
            return []
        if self._count == 0 and self._is_hopeless():
            return []
        chosen = self._choose(self._ready())
        if chosen is None:
            return self._begin_to_wait()
        if self._pause_s is not None and self._now_s < self._pause_s:
            return []
        # The first hosts of the hostfile have priority, if they come in time.
        before = chosen[-1] if len(chosen) == self._remote.most_nodes else len(self._hosts)
        if self._calls and any(host.is_starting for host in self._hosts[:before]):
            if self._call_s is None:
                self._call_s = self._now_s + LAST_CALL_S
            if self._now_s < self._call_s:
                return []
        return self._begin_with(chosen)

    def _begin_to_wait(self) -> list[object]:
        """Wait for more hosts: there are too few."""
        self._call_s = None
        self._calls = True
        if self._waits_s is None:
            self._waits_s = self._now_s + self._remote.wait_s
        elif self._count or self._has_said_wait or any(host.is_starting for host in self._hosts):
            return []
        self._has_said_wait = True
        left_s = self._waits_s - self._now_s
        return [Speak(Notice("warning", f"{self._shortage()}: waiting for more, {left_s:.0f} s at most"))]

    def _shortage(self) -> str:
        there, least = len(self._ready()), self._remote.least_nodes
        if there < least:
            return f"{there} of at least {least} hosts {'is' if there == 1 else 'are'} there"
        sizes = few(self._remote.world_sizes)
        return f"{there} hosts are there, but none of them make a number of workers that is valid ({sizes})"

    def _begin_with(self, chosen: tuple[int, ...]) -> list[object]:
        first = self._agents[chosen[0]].checked
        assert first is not None
        address = next(iter(first.addresses), "")
        if not address:
            text = f"error: no address of {self.name(chosen[0])} is known that the others could reach"
            self._verdict.append(Notice("critical", text))
            return self._give_up(USAGE)
        orders: list[object] = []
        port = self._job.meeting.port
        if port is None or (port and not first.is_port_free):
            usual = DEFAULT_MASTER_PORT if port is None else port
            port = usual if first.is_port_free else first.free_port
            if port != usual and not self._count:
                text = f"master port {usual} is taken on {self.name(chosen[0])}, using {port}"
                orders.append(Speak(Notice("info", text)))
        attempt, self._count = self._count, self._count + 1
        sizes = tuple([self._sizes[place] for place in chosen])
        self._meeting = meeting = Meeting(
            attempt,
            0,
            sizes,
            address,
            port or first.free_port,
            round=attempt,
            restarts=self._restarts,
            reason=self._reason,
        )
        if not attempt:
            orders += [
                Speak(Notice("warning", f"{self.name(place)} cannot take part: {line}"))
                for place, host in enumerate(self._hosts)
                for line in (host.problem.split("\n") if host.is_unfit else ())
            ]
            orders += [Speak(notice) for notice in self._compared_of(chosen)]
        if self._preferred != frozenset(chosen) and (attempt or len(chosen) < len(self.places)):
            orders += self._say_members(chosen)
        for place in chosen:
            self._hosts[place].problem, self._hosts[place].is_spare = "", False
        self._members = dict.fromkeys(chosen)
        self._preferred = frozenset(chosen)
        self._gone, self._failing, self._last_lines = {}, {}, ()
        self._is_stopping = self._regroups = self._calls = False
        self._begun_by = self._call_s = self._pause_s = self._waits_s = self._company_s = None
        self._begun_s = self._now_s
        return [
            *orders,
            *[Send(place, replace(meeting, node_rank=rank, host=place)) for rank, place in enumerate(chosen)],
        ]

    def _say_members(self, chosen: tuple[int, ...]) -> list[object]:
        """Say which hosts take part."""
        names = self._names(chosen).partition(" ")[2]
        workers = sum(self._sizes[place] for place in chosen)
        text = f"running on {len(chosen)} of {len(self.places)} hosts with {workers} workers: {names}"
        spares = [place for place in self._ready() if place not in chosen]
        return [Speak(Notice("info", text)), *self._say_spares(spares)]

    def _compared_of(self, chosen: tuple[int, ...]) -> list[Notice]:
        """What the user should know about the hosts in comparison."""
        names = {place: self._job.hosts[place].name for place in chosen}
        found = [(names[place], checked) for place in chosen if (checked := self._agents[place].checked)]
        clocks = [
            skew_notice(names[place], clock.offset_ns, clock.error_ns)
            for place in chosen
            if (clock := self.clocks.get(place)) is not None
        ]
        return [*compare(found), *[notice for notice in clocks if notice is not None]]

    # ------------------------------------------------------------------ too few hosts

    def _is_hopeless(self) -> bool:
        """Before the first attempt: whether too few hosts without problems are left.

        All problems are reported together, once every host had time to report its own.
        """
        unfit = [host for host in self._hosts if host.is_unfit]
        if not unfit or len(self._hosts) - len(unfit) >= self._remote.least_nodes:
            self._refuse_s = None
            return False
        if self._refuse_s is None:
            is_all = not any(host.is_starting for host in self._hosts)
            self._refuse_s = self._now_s + (0.0 if is_all else TOGETHER_S)
        return True

    def _refuse_unfit(self) -> list[object]:
        for host in self._hosts:
            host.is_starting = False  # we did not wait for this host
        self._say_problems()
        return self._give_up(USAGE)

    def _end_waiting(self) -> list[object]:
        """Begin with the hosts that are there, or give up: the wait is over."""
        if self._runs:
            return []
        if self._choose(self._ready()) is not None:
            self._calls = False
            return self._try_to_begin()
        self._verdict += [Notice("critical", line) for line in self._last_lines]
        text = f"{self._shortage()}, and no more came within {self._remote.wait_s:g} s"
        self._verdict.append(Notice("critical", f"error: {text}"))
        self._say_problems()
        return self._give_up(FAILURE)

    def _say_problems(self) -> None:
        """Add what stands in the way on each host to the verdict, one line per problem."""
        names: dict[str, list[int]] = {}
        for place, host in enumerate(self._hosts):
            for line in host.problem.split("\n") if host.problem else ():
                names.setdefault(line, []).append(place)
            if host.is_starting and not host.problem:
                names.setdefault("has not answered", []).append(place)
        for line, places in names.items():
            self._verdict.append(Notice("critical", f"error: {self._names(places)}: {line}"))

    def _stop_members(self, why: str, but: int = -1) -> list[object]:
        if self._is_stopping:
            return []
        self._is_stopping = True
        stop = Stop(SIGTERM, self._job.signals.grace_s, why=why)
        return [one for one in self._to_all(stop) if isinstance(one, Send) and one.place != but]


def is_due(due_s: float | None, now_s: float) -> bool:
    """Whether something is due; None: never."""
    return due_s is not None and due_s <= now_s
