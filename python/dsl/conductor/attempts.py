"""The attempts of a job: when one begins, with which members, how it ends, and whether another follows."""

from __future__ import annotations

from dsl._record import replace
from dsl.conductor.orders import Speak
from dsl.model.job import Notice
from dsl.model.judgement import Absence, Report
from dsl.model.outcome import Tried
from dsl.model.progress import OTHER_HOSTS, SAME_HOSTS, Next, add, after_failure, failures_line, restart_line
from dsl.model.request import DEFAULT_MASTER_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.conductor.members import Known, Roster
    from dsl.conductor.terms import Terms
    from dsl.control.clock import Clock
    from dsl.control.messages import Failing
    from dsl.model.job import Meeting, RestartReason
    from dsl.model.judgement import Judgement

TOGETHER_S = 3.0
"""After the first member that cannot be reached, others get this long to report their own problems."""

LAST_CALL_S = 30.0
"""When enough hosts are there, hosts that are still starting get this long to join the attempt."""

USAGE = 2
FAILURE = 1


class Gathering:
    """The time between two attempts, and before the first one."""

    def __init__(self, terms: Terms, roster: Roster, now_s: float) -> None:
        self._terms, self._roster = terms, roster
        self.members: frozenset[int] = frozenset()
        """Members of the last attempt, which the next one prefers; empty before the first attempt."""
        self.refusal: list[str] = []
        """Why no attempt can begin, once that is certain."""
        self.code = FAILURE
        """The exit code then."""
        self.pause_s: float | None = None
        """When another attempt may begin; None: at once."""
        self._calls = True
        """Wait a moment for starting members before the next attempt."""
        self._call_s: float | None = None
        self._refuse_s: float | None = None
        self._waits_s = None if terms.wait_s is None else now_s + terms.wait_s
        self._has_said_wait = False

    def due(self) -> list[float | None]:
        """When to call `choose` again."""
        return [self.pause_s or self._call_s, self._waits_s, self._refuse_s]

    def hopeless(self) -> list[Known]:
        """The members that stand in the way, if too few others may come before the first attempt."""
        bad = [
            one
            for one in self._roster
            if one.status == "unfit" or (one.status == "missing" and not self._terms.is_elastic)
        ]
        return bad if not self.members and len(self._roster) - len(bad) < self._terms.least else []

    def refuse(self) -> None:
        """Begin no attempt, because of the problems of all members."""
        self.refusal = self._roster.problems(awaited=False)
        self.code = USAGE if all(one.hello is not None for one in self.hopeless()) else FAILURE

    def choose(self, now_s: float) -> tuple[tuple[int, ...] | None, list[object]]:
        """The members of the attempt that begins now, or None; and what to tell the user."""
        roster, terms = self._roster, self._terms
        if self.pause_s is not None and self.pause_s <= now_s:
            self.pause_s = None
        if bad := self.hopeless():
            self._call_s = None
            # A member that has looked and found a problem is no reason to hurry the others.
            is_unheard = any(one.checked is None for one in bad)
            if self._refuse_s is None and (terms.is_elastic or is_unheard):
                self._refuse_s = now_s + TOGETHER_S
            is_due = self._refuse_s is not None and self._refuse_s <= now_s
            if is_due or not roster.has("starting"):
                self.refuse()
            return None, []
        self._refuse_s = None
        chosen = roster.choose(self.members)
        is_late = self._waits_s is not None and self._waits_s <= now_s
        if is_late:
            self._waits_s = None
        if chosen is None:
            return None, self._wait(now_s, is_late=is_late)
        self._calls &= not is_late
        # The first members have priority, if they come in time.
        before = chosen[-1] if len(chosen) == terms.most else len(roster)
        if self._calls and roster.has("starting", before):
            self._call_s = self._call_s or now_s + LAST_CALL_S
            if now_s < self._call_s:
                return None, []
        return (None if self.pause_s else chosen), []

    def _wait(self, now_s: float, *, is_late: bool) -> list[object]:
        """Wait for more members: there are too few. ``is_late``: the wait is over."""
        roster, terms = self._roster, self._terms
        if is_late and terms.members_come:
            missing = roster.names(roster.missing())
            self.refusal = [f"after {terms.wait_s:g} s the job is still waiting for {missing}"]
        elif is_late:
            text = f"{roster.shortage()}, and no more came within {terms.wait_s:g} s"
            self.refusal = [text, *roster.problems(awaited=True)]
        if is_late or not terms.is_elastic:
            return []
        self._call_s, self._calls = None, True
        if self._waits_s is None:
            self._waits_s = now_s + (terms.wait_s or 0.0)
        elif self.members or self._has_said_wait or roster.has("starting"):
            return []
        self._has_said_wait = True
        left_s = self._waits_s - now_s
        text = f"{roster.shortage()}: waiting for more, {left_s:.0f} s at most"
        return [Speak(Notice("warning", text))]

    def begin(self, chosen: tuple[int, ...]) -> None:
        """Note that an attempt begins with these members."""
        for place in chosen:
            self._roster[place].problem, self._roster[place].is_spare = "", False
        self.members, self._calls = frozenset(chosen), False
        self._call_s = self.pause_s = self._waits_s = None

    from dsl.conductor.members import Known, Roster
    from dsl.conductor.terms import Terms
    from dsl.control.clock import Clock
    from dsl.control.messages import Failing
    from dsl.model.job import Meeting


class Attempt:
    """An attempt that has begun."""

    def __init__(self, number: int, members: Sequence[tuple[int, Known]], now_s: float) -> None:
        self.number = number
        self.ranks: dict[int, range] = {}
        """The ranks of each member's workers, by place."""
        first = 0
        for place, one in members:
            self.ranks[place] = range(first, first + one.size)
            first += one.size
        self.reports: dict[int, Report | None] = dict.fromkeys(self.ranks)
        """How the attempt has ended at each member; None: its workers still run."""
        self.failing: dict[int, Failing] = {}
        """The first failure at each member that has announced one."""
        self.preempted: set[int] = set()
        """Members whose scheduler has announced a preemption there."""
        self.left: dict[int, Notice | Report] = {}
        """Members that cannot take part in the next attempt, and what the user hears about each."""
        self.is_stopping = False
        self.begun_by: int | None = None
        """The member whose end made us stop the others."""
        self.regroups = False
        """The workers are being stopped because more members have come."""
        self.begun_s = now_s

    def awaits(self, place: int, number: int) -> bool:
        """Whether a member's workers run in the attempt of that number."""
        return number == self.number and place in self.reports and self.reports[place] is None

    def lose(self, place: int, name: str, why: str, code: int, *, is_lost: bool) -> Report:
        """Make a report for a member that sends none. ``is_lost``: it is gone; else it refused its part."""
        ranks, known = self.ranks[place], self.failing.get(place)
        absence = Absence(name, why, is_lost, ranks.start, len(ranks))
        if known is not None:
            code = known.status
            absence = replace(absence, rank=known.rank, status=code, ended_ns=known.ended_ns)
        report = self.reports[place] = Report(self.number, code, absence=absence)
        return report

    @property
    def running(self) -> list[int]:
        """The members that have not reported."""
        return [place for place, report in self.reports.items() if report is None]

    @property
    def ended(self) -> dict[int, Report]:
        """The reports so far, by place."""
        return {place: report for place, report in self.reports.items() if report is not None}


def choose_port(terms: Terms, first: Known) -> int:
    """The port where rank 0 listens, at the first member of an attempt."""
    port, checked = terms.port, first.checked
    if checked is None:
        return port or 0
    if port is None or (terms.is_elastic and port and not checked.is_port_free):
        usual = DEFAULT_MASTER_PORT if port is None else port
        return usual if checked.is_port_free else checked.free_port
    return port or checked.free_port


def meet(terms: Terms, members: Sequence[tuple[int, Known]], meeting: Meeting) -> dict[int, Meeting]:
    """The message for each member of an attempt, by place. ``meeting`` has what is the same for all."""
    sizes: dict[int, int] = {}
    before: dict[str, int] = {}
    firsts = {}
    for place, one in members:
        node = terms.seats[place].node_rank
        sizes[node] = sizes.get(node, 0) + one.size
        firsts[place] = before.get(one.role, 0)
        before[one.role] = firsts[place] + one.size
    nodes = list(sizes)
    return {
        place: replace(
            meeting,
            node_rank=nodes.index(terms.seats[place].node_rank),
            local_world_sizes=tuple(sizes.values()),
            host=terms.seats[place].node_rank if terms.is_elastic else None,
            first_role_rank=firsts[place] if terms.members_come else None,
            role_size=before[one.role] if terms.members_come else None,
        )
        for place, one in members
    }


def opening(
    terms: Terms, roster: Roster, chosen: Sequence[int], port: int, clocks: Mapping[int, Clock]
) -> list[object]:
    """Notices before the first attempt: the port, hosts with problems, differences between hosts."""
    said = []
    usual = DEFAULT_MASTER_PORT if terms.port is None else terms.port
    if usual and port != usual:
        text = f"master port {usual} is taken on {roster.name(chosen[0])}, using {port}"
        said.append(Notice("info", text))
    nodes = {terms.seats[place].node_rank: place for place in reversed(chosen)}
    places = sorted(nodes.values())
    if clocks or any(roster[place].checked for place in places):
        from dsl.doctor.job_checks import Examined, free_notices  # a node alone does not need it

        said += free_notices(
            [Examined(roster[place].host, roster[place].checked, clock=clocks.get(place)) for place in places]
        )
    unfit = [place for place, one in enumerate(roster) if one.status == "unfit"]
    return [*[order for place in unfit for order in roster.say_unfit(place)], *[Speak(one) for one in said]]


class Restarts:
    """The restarts of a job so far."""

    def __init__(self, terms: Terms, roster: Roster) -> None:
        self._terms, self._roster = terms, roster
        self.count = 0
        """Restarts because of failures; others cost nothing."""
        self.reason: RestartReason = "start"
        """Why the next attempt begins."""
        self._tried: tuple[Tried, ...] = ()

    def after_failure(self, attempt: Attempt, judgement: Judgement, now_s: float) -> tuple[Next, str]:
        """What follows when a worker failed, or a member that the job needs; and a line for the user."""
        job, terms = self._terms.job, self._terms
        rank = judgement.causes[0].rank if judgement.causes else -1
        self._note(attempt, f"rank {rank}, exit code {judgement.code}", now_s)
        left = 0 if attempt.left else job.max_restarts - self.count
        patience = OTHER_HOSTS if terms.is_elastic else SAME_HOSTS
        step = after_failure(self._tried, patience, left, gives_up=terms.gives_up)
        if step.kind == "restart":
            self.count += 1
            self.reason = "failure"
            who = "all nodes" if terms.members_come else "all hosts"
            return step, restart_line(who, self.count, job.max_restarts, self._tried, step.wait_s)
        text = failures_line(self.count + 1, self._tried)
        return step, f"{text}: the job is given up" if step.kind == "futile" else text

    def after_change(self, attempt: Attempt, now_s: float) -> tuple[Next, str]:
        """What follows when members of an elastic job were lost or have come; and a line for the user."""
        lost = self._roster.names(sorted(attempt.left)) if attempt.left else ""
        self._note(attempt, f"{lost} lost" if lost else "", now_s)
        step = after_failure(self._tried, OTHER_HOSTS, 1, gives_up=True)
        if step.kind == "futile":
            return step, f"{lost} was lost over and over as soon as its workers ran: the job is given up"
        self.reason = "membership"
        return step, ""

    def _note(self, attempt: Attempt, cause: str, now_s: float) -> None:
        self._tried = add(self._tried, Tried(now_s - attempt.begun_s, cause))
