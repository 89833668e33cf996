"""What the user of one node hears where nodes come and go."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.support.events import a_plan, an_attempt, an_exit, end

from dsl._record import replace
from dsl.evidence.reports import failed
from dsl.model.job import Meeting, Notice
from dsl.model.nodes import MeetingRefused, NodesMet, PeerFailure
from dsl.model.outcome import (
    AttemptOutcome,
    AttemptStarted,
    Awaiting,
    Membership,
    MembershipChanged,
    Outcome,
    Restarting,
)
from dsl.report.narrator import Narrator

CAUSE = an_exit(1, code=7)
OWN = an_attempt(a_plan(2), [CAUSE], end(CAUSE))
WELL = an_attempt(a_plan(2), [an_exit(0), an_exit(1)], end())
BESIDE = replace(WELL, plan=replace(WELL.plan, world_size=4))
STOPPED = [an_exit(0, signal=15, by_us=True), an_exit(1, signal=15, by_us=True)]
VICTIM = an_attempt(a_plan(2), STOPPED, end())
PEER = PeerFailure("b", 3, 9, failed(a_plan(4).workers[3], an_exit(3, code=9)), is_final=False)
LAST = replace(PEER, is_final=True)
MEETING = Meeting(0, 0, (2, 2), "a", 7)
MET = NodesMet(MEETING, ("a", "b"))
JOINED = NodesMet(MEETING, ("a", "b", "c"), joined=("c",))
SHRUNK = NodesMet(MEETING, ("a",), left=("b",))
AGAIN_ALONE = "starting all workers again with 1 node"
MEET = Awaiting(OWN, "meeting")


def restart(last: AttemptOutcome, *, counted: bool = True) -> Restarting:
    return Restarting(last, 2, 5, counted)


@pytest.mark.parametrize(
    "events, said",
    [
        (
            [MEET, MET, restart(OWN)],
            [
                "rank 1 (local rank 1, pid 1001, host node7) failed: exit code 7",
                "restart 2 of 5: rank 1 on host node7 failed with 7, starting all workers again with 2 nodes",
            ],
        ),
        (
            [PEER, MET, restart(VICTIM)],
            ["restart 2 of 5: rank 3 on host b failed with 9, starting all workers again with 2 nodes"],
        ),
        (
            [SHRUNK, restart(VICTIM)],
            [
                f"restart 2 of 5: a worker of another node failed, {AGAIN_ALONE}, node b has left",
            ],
        ),
        ([JOINED, restart(VICTIM, counted=False)], ["node c joins: starting all workers again with 3 nodes"]),
        (
            [MembershipChanged(Membership(1), ("b",)), SHRUNK, restart(VICTIM, counted=False)],
            ["node b has left the job", "node b has left: starting all workers again with 1 node"],
        ),
        (
            [MembershipChanged(Membership(2), ("b",)), MembershipChanged(Membership(1), ("b", "c"))],
            ["node b has left the job", "node c has left the job"],
        ),
        (
            [MembershipChanged(Membership(2), ("node7",), has_dropped_us=True)],
            ["the other nodes have missed this one and go on without it"],
        ),
        # Another node on a host of the same name: two containers, or two nodes on one machine.
        ([MembershipChanged(Membership(2), ("node7",))], ["node node7 has left the job"]),
        (
            [MembershipChanged(Membership(2), ("b",)), MembershipChanged(Membership(1), ("b", "b"))],
            ["node b has left the job", "node b has left the job"],
        ),
        ([LAST, Outcome(9, VICTIM)], ["the job is over: rank 3 on host b failed: exit code 9"]),
        (
            [PEER, MeetingRefused("no"), Outcome(9, VICTIM)],
            ["rank 3 on host b failed: exit code 9"],
        ),
        (
            [MembershipChanged(Membership(1, is_closed=True), ("b",)), Outcome(1, VICTIM)],
            ["node b has left the job", "node b has left, the job cannot go on"],
        ),
        (
            [Awaiting(BESIDE, "end")],
            ["all workers of this node ended well, waiting for the other nodes"],
        ),
        ([Awaiting(WELL, "end")], []),
        ([Notice("info", "waiting for 1 of 2 nodes")], ["waiting for 1 of 2 nodes"]),
        (
            [MeetingRefused("it is gone", "lost"), MeetingRefused("it is gone", "lost")],
            ["warning: it is gone; the workers go on, but cannot be started again"],
        ),
        (
            [Awaiting(OWN, "goodbye"), MeetingRefused("it is gone", "lost")],
            [],
        ),
        (
            [LAST, AttemptStarted(a_plan(2)), PEER, replace(LAST, failed=None, rank=-1)],
            [
                "the job is over: rank 3 on host b failed: exit code 9",
                "the job is over: host b cannot go on",
            ],
        ),
    ],
)
def test_what_is_said(events: Sequence[object], said: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator(a_plan(2), has_others=True)
    for event in events:
        narrator.hear(event)
    assert [line.removeprefix("dsl: ") for line in capfd.readouterr().err.splitlines()] == said


def test_a_failure_elsewhere_stands_beside_our_own(capfd: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator(a_plan(2), has_others=True)
    for event in (PEER, Outcome(7, OWN)):
        narrator.hear(event)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("dsl: rank 1 (local rank 1, pid 1001, host node7) failed: ")
    assert lines[-1] == "dsl: also failed: rank 3 on host b failed: exit code 9"
