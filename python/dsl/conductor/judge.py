"""Judges the end of an attempt: which failure was first in the whole job, and the exit code. Pure."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.model.judgement import MOST_STACKS, Judgement
from dsl.model.observation import NodeStacks
from dsl.model.outcome import HANG_CODE, REQUEUE_CODE, SIGNAL_CODES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.control.clock import Clock
    from dsl.model.judgement import Report

FAILURE = 1


class Judged(Record):
    """A member as the judge sees it."""

    name: str
    """What messages call it: ``host n1``."""
    host: int
    """Its host: members with the same number have one clock."""


class Context(Record):
    """What the conductor knows about the end besides the reports."""

    command: str = "dsl"
    """What messages call the command that stops workers."""
    signum: int | None = None
    """The signal by which the user ended the job."""
    is_key: bool = False
    """A key of the terminal sent it."""
    is_preempted: bool = False
    """The scheduler announced the end."""
    preempt_signal: int | None = None
    """The signal by which it does that."""
    fault: str = ""
    """Why no member could be reached any more; empty: they could."""
    hang: str = ""
    """The hang for which the job is ended, as a clause; empty: it did not hang."""
    begun_by: int | None = None
    """The member whose end we heard of first; None: we had told all members to stop before."""
    sees_all: bool = True
    """The members run all workers of the job."""

    @property
    def is_asked(self) -> bool:
        """Whether the user or a scheduler has asked for the end, or wants it because the job hangs."""
        return self.signum is not None or self.is_preempted or bool(self.hang)


ALONE = Judged("", 0)


def judge_alone(report: Report, context: Context) -> Judgement:
    """Judge the end of an attempt that one member knows all about."""
    return judge({0: report}, {0: ALONE}, {}, context)


def judge(
    reports: Mapping[int, Report],
    members: Mapping[int, Judged],
    clocks: Mapping[int, Clock],
    context: Context,
) -> Judgement:
    """Judge the end of an attempt from the reports of all members.

    Reports, members and compared clocks are given by place. The order in which the reports came has no
    influence. A member without a compared clock may have failed at any time.
    """
    places = sorted(reports)
    causes = sorted(
        [place for place in places if reports[place].is_cause],
        key=lambda place: _moment(reports[place], clocks.get(place)),
    )
    rivals = [place for place in causes[1:] if _may_be_first(causes[0], place, reports, members, clocks)]
    ordered = [*causes[:1], *rivals, *[place for place in causes[1:] if place not in rivals]]
    is_alone = len(members) == 1 and all(report.ended == 1 for report in reports.values())
    judgement = Judgement(
        code=reports[causes[0]].code if causes else 0,
        command=context.command,
        members=len(members),
        causes=tuple(
            [
                replace(reports[place], stacks=()) if place == ordered[0] else _brief(reports[place])
                for place in ordered
            ]
        ),
        rivals=len(rivals),
        scope="node" if not context.sees_all else "worker" if is_alone else "job",
        after=tuple([one for place in places for one in reports[place].after]),
        survivors=tuple([one for place in places for one in reports[place].survivors]),
        fault=context.fault,
        stacks=_stacks(reports),
    )
    if context.fault:
        judgement = replace(judgement, code=FAILURE)
    elif context.hang and not causes and context.signum is None:
        judgement = replace(judgement, code=HANG_CODE, fault=context.hang)
    elif not causes:
        judgement = _without_cause(judgement, reports, members, clocks, context)
    if context.is_preempted and not any(report.rank >= 0 for report in reports.values()):
        judgement = replace(judgement, code=REQUEUE_CODE, is_preempted=True)
    return judgement


def _stacks(reports: Mapping[int, Report]) -> tuple[NodeStacks, ...]:
    """The stacks of all members, as far as there is room."""
    found = []
    room = MOST_STACKS
    for place in sorted(reports):
        stacks = reports[place].stacks[:room]
        room -= len(stacks)
        if stacks:
            found.append(NodeStacks(0, place, reports[place].host, stacks))
    return tuple(found)


def _without_cause(
    judgement: Judgement,
    reports: Mapping[int, Report],
    members: Mapping[int, Judged],
    clocks: Mapping[int, Clock],
    context: Context,
) -> Judgement:
    """The judgement of an attempt in which no member failed by itself."""
    failed = [reports[place] for place in sorted(reports) if reports[place].code]
    signals = [report.stop_signal for report in failed if report.stop_signal is not None]
    if context.signum is not None:
        code = SIGNAL_CODES + context.signum
        return replace(judgement, code=code, signum=context.signum, is_key=context.is_key)
    if signals:  # the user knows which host received it
        return replace(judgement, code=SIGNAL_CODES + signals[0], signum=signals[0])
    if context.begun_by is not None and context.begun_by in reports:
        first = _first_to_stop(context.begun_by, reports, clocks)
        return replace(judgement, code=reports[first].code, quitter=members[first].name)
    signum = context.preempt_signal if context.is_preempted else None
    return replace(judgement, code=failed[0].code if failed else 0, signum=signum)


def _first_to_stop(begun_by: int, reports: Mapping[int, Report], clocks: Mapping[int, Clock]) -> int:
    """The member that stopped first: that of the first report, unless another is known to be earlier."""
    from dsl.control.clock import is_earlier  # a node alone does not need it

    first = begun_by
    for place in sorted(reports):
        one, other = reports[place], reports[first]
        if place != first and one.code and one.stopped_ns and other.stopped_ns:
            sooner = is_earlier(one.stopped_ns, clocks.get(place), other.stopped_ns, clocks.get(first))
            first = place if sooner else first
    return first


def _brief(report: Report) -> Report:
    """A report without the details that a verdict gives only about the first cause."""
    return replace(
        report,
        evidence=replace(report.evidence, lines=()),
        others=(),
        more=(),
        after=(),
        survivors=(),
        stacks=(),
    )


def _moment(report: Report, clock: Clock | None) -> tuple[bool, int]:
    """When a member failed, by our clock. Lost hosts come last: we notice a loss later than a failure."""
    return report.failed_ns == 0, report.failed_ns - (0 if clock is None else clock.offset_ns)


def _may_be_first(
    first: int,
    other: int,
    reports: Mapping[int, Report],
    members: Mapping[int, Judged],
    clocks: Mapping[int, Clock],
) -> bool:
    """Whether ``other`` may have failed before ``first``, though its time is later."""
    if not reports[first].failed_ns or not reports[other].failed_ns:
        return False
    if members[first].host == members[other].host:
        return False  # one clock
    from dsl.control.clock import is_earlier  # a node alone does not need it

    at_ns, other_ns = reports[first].failed_ns, reports[other].failed_ns
    return is_earlier(at_ns, clocks.get(first), other_ns, clocks.get(other)) is not True
