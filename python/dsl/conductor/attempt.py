"""One attempt of a job: who takes part, what they get to know, and how it has ended for each of them."""

from __future__ import annotations

from dsl._record import replace
from dsl.conductor.orders import Speak
from dsl.doctor.job_checks import Examined, free_notices
from dsl.model.job import Notice
from dsl.model.judgement import Absence, Report
from dsl.model.request import DEFAULT_MASTER_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    hosts = [Examined(roster[place].host, roster[place].checked, clock=clocks.get(place)) for place in places]
    said += free_notices(hosts)
    unfit = [place for place, one in enumerate(roster) if one.status == "unfit"]
    return [*[order for place in unfit for order in roster.say_unfit(place)], *[Speak(one) for one in said]]
