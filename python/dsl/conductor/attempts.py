"""The attempts of a job: when one begins, with which members, how it ends, and whether another follows."""

from __future__ import annotations

from dsl._record import replace
from dsl.conductor.orders import Explain, Speak
from dsl.conductor.restarts import (
    OTHER_HOSTS,
    SAME_HOSTS,
    Next,
    Tried,
    add,
    after_failure,
    failures_line,
    restart_line,
)
from dsl.errors import UsageError
from dsl.model.job import Meeting, Notice
from dsl.model.judgement import Absence, Report
from dsl.model.request import DEFAULT_MASTER_PORT
from dsl.words import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.conductor.members import Known, Roster
    from dsl.conductor.terms import Terms
    from dsl.control.clock import Clock
    from dsl.control.messages import Failing, Hello
    from dsl.model.job import RestartReason
    from dsl.model.judgement import Judgement

TOGETHER_S = 3.0
"""After the first member that cannot be reached, others get this long to report their own problems."""

MOST_REPLACED = 8
"""So many members whose places others have taken are named at the end."""

USAGE = 2
FAILURE = 1


class Gathering:
    """The time between two attempts, and before the first one."""

    def __init__(self, roster: Roster, now_s: float) -> None:
        self._roster = roster
        self.members: tuple[int, ...] = ()
        """Members of the last attempt, in the order of their ranks; empty before the first attempt."""
        self.replaced: tuple[str, ...] = ()
        """Lines about members whose places others have taken, the last `MOST_REPLACED`."""
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
        wait_s = roster.terms.wait_s
        self._waits_s = None if wait_s is None else now_s + wait_s
        self._has_said_wait = False

    @property
    def _terms(self) -> Terms:
        return self._roster.terms

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
        before = max(chosen) if len(chosen) == terms.most else len(roster)
        may_come = len(chosen) < terms.most if terms.is_open else roster.has("starting", before)
        if self._calls and may_come:
            self._call_s = self._call_s or now_s + terms.last_call_s
            if now_s < self._call_s:
                return None, []
        return (None if self.pause_s else chosen), []

    def _wait(self, now_s: float, *, is_late: bool) -> list[object]:
        """Wait for more members: there are too few. ``is_late``: the wait is over."""
        roster, terms = self._roster, self._terms
        if is_late and terms.is_open:
            self.refusal = [too_few(terms)]
        elif is_late and terms.members_come:
            missing = roster.names(roster.missing())
            self.refusal = [f"after {terms.wait_s:g} s the job is still waiting for {missing}"]
        elif is_late:
            text = f"{roster.shortage()}, and no more came within {terms.wait_s:g} s"
            self.refusal = [text, *roster.problems(awaited=True)]
        if is_late or not terms.is_elastic:
            return []
        self._call_s, self._calls = None, not (terms.offers and self.members)
        if self._waits_s is None:
            self._waits_s = now_s + (terms.wait_s or 0.0)
        elif self.members or self._has_said_wait or terms.is_open or roster.has("starting"):
            return []
        self._has_said_wait = True
        left_s = self._waits_s - now_s
        text = f"{roster.shortage()}: waiting for more, {left_s:.0f} s at most"
        return [Speak(Notice("warning", text))]

    def begin(self, chosen: tuple[int, ...], *, is_again: bool) -> list[object]:
        """Note that an attempt begins with these members. Returns what to tell the user about them."""
        roster, terms, orders = self._roster, self._terms, list[object]()
        is_news = is_again or len(chosen) < len(roster) or terms.offers
        if is_news and set(self.members) != set(chosen):
            workers = sum(roster[place].size for place in chosen)
            listed = len([one for one in roster if one.is_listed])
            count = f"running on {len(chosen)} of {listed} hosts with {counted(workers, 'worker')}"
            if terms.offers:
                count = f"starting {'again ' * is_again}with {counted(len(chosen), 'node')}"
            orders.append(Speak(Notice("info", f"{count}: {roster.hosts(chosen)}")))
            lines = self._replacements(chosen)
            orders += [Speak(Notice("info", line)) for line in lines]
            self.replaced = (*self.replaced, *lines)[-MOST_REPLACED:]
            orders += roster.say_spares([place for place in roster.ready() if place not in chosen])
        for place in chosen:
            roster[place].problem, roster[place].is_spare = "", False
        self.members, self._calls = chosen, False
        self._call_s = self.pause_s = self._waits_s = None
        return orders

    def _replacements(self, chosen: tuple[int, ...]) -> list[str]:
        """A line for each member that takes the place of another, if as many take part as before."""
        roster, lines = self._roster, list[str]()
        is_same = len(chosen) == len(self.members)
        for old, new in zip(self.members, chosen, strict=True) if is_same else ():
            left, heir = roster.name(old), roster.name(new)
            if old != new and roster[old].is_bad:
                lines.append(f"{left} failed first twice in a row: {heir} takes its place")
            elif old != new:
                lines.append(f"{heir} takes the place of {left}")
        return lines

    from dsl.conductor.members import Known, Roster
    from dsl.conductor.terms import Terms
    from dsl.control.clock import Clock
    from dsl.control.messages import Failing
    from dsl.model.job import Meeting


def too_few(terms: Terms) -> str:
    """Why no attempt can begin if members may come at any time, and too few have come."""
    point = terms.job.meeting
    return (
        f"too few nodes have come to {point.endpoint or 'the store'} with run id {terms.job.run_id} within "
        f"{terms.wait_s:g} s, it takes {terms.least}: start them with the same run id and endpoint, or raise "
        "join_timeout (dsl: --elastic-wait)"
    )


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


def place_of_rank_0(terms: Terms, roster: Roster, place: int) -> tuple[str, int]:
    """Address and port where rank 0 listens, at the first member of an attempt.

    Raises:
        UsageError: no address is known.
    """
    port, checked = terms.port, roster[place].checked
    address = terms.address or next(iter(checked.addresses if checked else ()), "")
    if not address:
        name = roster.name(place)
        raise UsageError(f"no address of {name} is known that the others could reach: give --master_addr")
    if checked is None:
        return address, port or 0
    if port is None or (terms.is_elastic and port and not checked.is_port_free):
        usual = DEFAULT_MASTER_PORT if port is None else port
        return address, usual if checked.is_port_free else checked.free_port
    return address, port or checked.free_port


def meet(
    terms: Terms,
    members: Sequence[tuple[int, Known]],
    number: int,
    address: str,
    port: int,
    restarts: Restarts,
) -> dict[int, Meeting]:
    """The message for each member of an attempt, by place. ``address`` and ``port``: where rank 0 listens."""
    sizes: dict[int, int] = {}
    before: dict[str, int] = {}
    firsts = {}
    for place, one in members:
        node = terms.seat(place).node_rank
        sizes[node] = sizes.get(node, 0) + one.size
        firsts[place] = before.get(one.role, 0)
        before[one.role] = firsts[place] + one.size
    nodes = list(sizes)
    return {
        place: Meeting(
            number,
            nodes.index(terms.seat(place).node_rank),
            tuple(sizes.values()),
            address,
            port,
            round=number,
            restarts=restarts.count,
            reason=restarts.reason,
            first_role_rank=firsts[place] if terms.members_come else None,
            role_size=before[one.role] if terms.members_come else None,
        )
        for place, one in members
    }


def opening(
    terms: Terms, roster: Roster, chosen: Sequence[int], port: int, clocks: Mapping[int, Clock]
) -> tuple[list[object], list[str]]:
    """Notices before the first attempt: the port, hosts with problems, differences between hosts.

    And errors of ``--doctor-first``, with which it does not begin.
    """
    said = []
    usual = DEFAULT_MASTER_PORT if terms.port is None else terms.port
    if usual and port != usual:
        text = f"master port {usual} is taken on {roster.name(chosen[0])}, using {port}"
        said.append(Notice("info", text))
    nodes = {terms.seat(place).node_rank: place for place in reversed(chosen)}
    places = sorted(nodes.values())
    if clocks or any(roster[place].checked for place in places):
        from dsl.doctor.job_checks import Examined, start_notices  # a node alone does not need it

        said += start_notices(
            [Examined(roster[place].host, roster[place].checked, clock=clocks.get(place)) for place in places]
        )
    unfit = [place for place, one in enumerate(roster) if one.status == "unfit"]
    speaks = [Speak(one) for one in said if one.level != "error"]
    orders = [*[order for place in unfit for order in roster.say_unfit(place)], *speaks]
    return orders, [one.text for one in said if one.level == "error"]


class Restarts:
    """The restarts of a job so far."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.count = 0
        """Restarts because of failures; others cost nothing."""
        self.reason: RestartReason = "start"
        """Why the next attempt begins."""
        self._tried: tuple[Tried, ...] = ()
        self._suspect: Hello | None = None
        """The greeting of the member that failed first in the last failure; None: nobody knows which did."""

    @property
    def _terms(self) -> Terms:
        return self._roster.terms

    def after(self, attempt: Attempt, judgement: Judgement, now_s: float) -> tuple[Next, str, list[object]]:
        """What follows an attempt that has not ended well; a line for the user; and orders that say why."""
        if (attempt.left and self._terms.is_elastic) or (attempt.regroups and not judgement.causes):
            orders: list[object] = [
                Explain(replace(judgement, causes=(one,), stacks=()), "warning")
                if isinstance(one, Report)
                else Speak(one)
                for one in attempt.left.values()
            ]
            return *self._after_change(attempt, now_s), orders
        step, text = self._after_failure(attempt, judgement, now_s)
        return step, text, [Explain(judgement, "error"), Speak(Notice("warning", text))]

    def _after_failure(self, attempt: Attempt, judgement: Judgement, now_s: float) -> tuple[Next, str]:
        """What follows when a worker failed, or a member that the job needs; and a line for the user."""
        job, terms = self._terms.job, self._terms
        rank = judgement.causes[0].rank if judgement.causes else -1
        self._blame(attempt, -1 if judgement.rivals else rank)
        code = judgement.code if judgement.causes else 0
        is_silent = all(report.is_silent for report in attempt.ended.values())
        self._note(attempt, f"rank {rank}, exit code {judgement.code}", now_s, code, is_silent=is_silent)
        left = 0 if attempt.left else job.max_restarts - self.count
        patience = OTHER_HOSTS if terms.can_shrink else SAME_HOSTS
        gives_up = job.gives_up and terms.can_shrink
        step = after_failure(self._tried, patience, left, gives_up=gives_up, policy=job.policy)
        if step.kind == "restart":
            self.count += 1
            self.reason = "failure"
            who = "all nodes" if terms.members_come else "all hosts"
            return step, restart_line(who, self.count, job.max_restarts, self._tried, step.wait_s)
        text = failures_line(self.count + 1, self._tried)
        return step, f"{text}: the job is given up" if step.kind == "futile" else text

    def _blame(self, attempt: Attempt, rank: int) -> None:
        """Note that this rank failed first; -1: nobody knows which. Its member is bad if it did so before."""
        found = [self._roster[place] for place, ranks in attempt.ranks.items() if rank in ranks]
        hello = found[0].hello if found else None
        if hello is not None and hello is self._suspect:
            found[0].is_bad = True
        self._suspect = hello

    def _after_change(self, attempt: Attempt, now_s: float) -> tuple[Next, str]:
        """What follows when members of an elastic job were lost or have come; and a line for the user."""
        lost = self._roster.names(sorted(attempt.left)) if attempt.left else ""
        self._note(attempt, f"{lost} lost" if lost else "", now_s)
        step = after_failure(self._tried, OTHER_HOSTS, 1, gives_up=True)
        if step.kind == "futile":
            return step, f"{lost} was lost over and over as soon as its workers ran: the job is given up"
        self.reason = "membership"
        return step, ""

    def _note(
        self, attempt: Attempt, cause: str, now_s: float, code: int = 0, *, is_silent: bool = False
    ) -> None:
        one = Tried(now_s - attempt.begun_s, cause, code=code, is_silent=is_silent)
        self._tried = add(self._tried, one)
