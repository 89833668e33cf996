"""What node 0 of fixed nodes says: places, sizes and roles of a round, agreed restarts, and how a job ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dsl.errors import PortError
from dsl.rendezvous.delegate_messages import (
    Changed,
    Fail,
    FailingRank,
    Finish,
    Finished,
    Leave,
    Meet,
    Met,
    NotMet,
    PeerFailed,
    Remark,
)
from dsl.rendezvous.leader import Leader

if TYPE_CHECKING:
    from dsl.rendezvous.delegate_messages import Answer

    Told = dict[int, list[Answer]]


def told(says: list[tuple[int, Answer]]) -> Told:
    found: Told = {}
    for place, answer in says:
        found.setdefault(place, []).append(answer)
    return found


def leader_of(count: int, *, met: bool = True) -> Leader:
    """A leader whose nodes n0, n1, ... have come, and have met once with a worker each."""
    leader = Leader(count, "10.0.0.1", lambda number: 29500 + number)
    for place in range(count):
        leader.come(place, f"n{place}")
    if met:
        meet_all(leader)
    return leader


def meet_all(leader: Leader, restarts: int = 0) -> Told:
    says = [leader.hear(place, meet(restarts=restarts)) for place in leader.seats]
    assert not any(says[:-1]), "nobody is told before all have come"
    return told(says[-1])


def meet(size: int = 1, role: str = "default", restarts: int = 0, reason: str = "start") -> Meet:
    return Meet(size, role, restarts, reason)  # type: ignore[arg-type]


def test_a_round_counts_ranks_over_unequal_nodes_and_role_ranks_within_each_role() -> None:
    leader = leader_of(4, met=False)
    sizes = [(2, "train"), (3, "serve"), (1, "train"), (4, "serve")]
    for place in (3, 1, 0):
        assert leader.hear(place, meet(*sizes[place])) == []
    found = told(leader.hear(2, meet(*sizes[2])))
    hosts = ("n0", "n1", "n2", "n3")
    assert found == {
        place: [
            Met(
                0,
                place,
                (2, 3, 1, 4),
                first,
                size,
                "10.0.0.1",
                29500,
                restarts=0,
                reason="start",
                hosts=hosts,
                nodes=("0", "1", "2", "3"),
            )
        ]
        for place, (first, size) in enumerate([(0, 3), (0, 7), (2, 3), (3, 7)])
    }


@pytest.mark.parametrize(
    "reasons, restarts, reason",
    [
        (("failure", "failure"), (1, 1), "failure"),
        (("membership", "failure"), (0, 1), "failure"),
        (("membership", "membership"), (0, 0), "membership"),
    ],
)
def test_nodes_count_alike_what_any_of_them_knows(
    reasons: tuple[str, str], restarts: tuple[int, int], reason: str
) -> None:
    leader = leader_of(2)
    leader.hear(0, meet(1, "default", restarts[0], reasons[0]))
    found = told(leader.hear(1, meet(1, "default", restarts[1], reasons[1])))
    for place in (0, 1):
        (met,) = found[place]
        assert isinstance(met, Met)
        assert (met.round, met.restarts, met.reason, met.port) == (1, max(restarts), reason, 29501)


def test_a_node_that_counts_too_much_costs_one_restart_a_round_at_most() -> None:
    leader = leader_of(2, met=False)
    agreed = []
    for _ in range(3):
        leader.hear(0, meet())
        (met,) = told(leader.hear(1, meet(restarts=999_999_999)))[0]
        assert isinstance(met, Met)
        agreed.append(met.restarts)
    assert agreed == [0, 1, 2]


def test_a_failure_is_told_to_the_others_at_once() -> None:
    leader = leader_of(3)
    assert told(leader.hear(1, FailingRank(1, 7))) == {
        place: [PeerFailed("n1", 1, 7, None, final=False)] for place in (0, 2)
    }


def test_a_final_failure_ends_the_others_also_those_who_wait() -> None:
    leader = leader_of(4)
    leader.hear(0, Finish())
    leader.hear(2, meet(restarts=1))
    final = PeerFailed("n1", 5, 9, None, final=True)
    assert told(leader.hear(1, Fail(5, 9))) == {
        0: [final, Finished()],
        2: [final, NotMet("closed", "node 1 (n1) has failed")],
        3: [final],
    }
    assert leader.hear(3, meet()) == [(3, NotMet("closed", "node 1 (n1) has failed"))]


@pytest.mark.parametrize(
    "lost, text, level",
    [
        (True, "node 2 (n2) is lost: the connection has ended", "warning"),
        (False, "node 2 (n2) has left the job", "info"),
    ],
)
def test_a_node_that_goes_ends_the_job_and_is_named(lost: bool, text: str, level: str) -> None:  # noqa: FBT001
    leader = leader_of(3)
    leader.hear(0, meet(restarts=1))
    says = leader.lose(2, "the connection has ended") if lost else leader.hear(2, Leave())
    gone = [Remark(level, text), Changed(2, 0, closed=True, left=("n2",))]
    assert told(says) == {0: [*gone, NotMet("closed", text)], 1: gone}
    # Nothing of it is told twice, and a second loss is no news.
    assert leader.lose(2, "again") == []
    assert leader.lose(1, "the connection has ended") == []


def test_the_exit_barrier_opens_when_all_have_finished_or_gone() -> None:
    leader = leader_of(3)
    assert leader.hear(0, Finish()) == []
    assert leader.hear(2, Finish()) == []
    assert told(leader.hear(1, Finish())) == {0: [Finished()], 1: [Finished()], 2: [Finished()]}
    # Those who go afterwards have finished.
    assert leader.lose(1, "the connection has ended") == []


def test_a_node_that_has_finished_starts_anew_with_the_others() -> None:
    leader = leader_of(2)
    leader.hear(0, Finish())
    assert told(leader.hear(1, FailingRank(1, 1))) == {0: [PeerFailed("n1", 1, 1, None, final=False)]}
    assert leader.hear(1, meet(restarts=1)) == []
    found = told(leader.hear(0, meet(restarts=1)))
    assert [type(answer) for answers in found.values() for answer in answers] == [Met, Met]
    assert leader.hear(0, Finish()) == []


def test_before_the_first_round_a_place_is_free_again_when_its_node_goes() -> None:
    leader = leader_of(3, met=False)
    leader.hear(0, meet())
    leader.hear(2, meet())
    text = "node 2 (n2) is lost: the connection has ended, before the job has begun"
    assert told(leader.lose(2, "the connection has ended")) == {
        place: [Remark("info", text)] for place in (0, 1)
    }
    assert not leader.is_taken(2)
    leader.come(2, "other")
    leader.hear(1, meet())
    (met,) = told(leader.hear(2, meet()))[0]
    assert isinstance(met, Met)
    assert met.hosts == ("n0", "n1", "other")


def test_whoever_waits_when_time_is_up_is_told_for_whom() -> None:
    leader = Leader(4, "a", lambda _: 1)
    leader.come(0, "n0")
    leader.come(2, "n2")
    assert leader.expire(9) == []
    leader.hear(0, meet())
    text = "after 9 s the job is still waiting for 3 of 4 nodes: nodes 1-3"
    assert leader.expire(9) == [(0, NotMet("timeout", text))]
    # It may try again.
    leader.hear(0, meet())
    leader.come(3, "n3")
    leader.hear(3, meet())
    leader.come(1, "n1")
    leader.hear(2, meet())
    assert leader.waiting() == "waiting for 1 of 4 nodes: node 1 (n1)"
    assert len(leader.hear(1, meet())) == 4
    assert leader.expire(9) == []


def test_a_round_without_a_port_is_refused_on_all_nodes() -> None:
    def no_port(_number: int) -> int:
        raise PortError("no free master port")

    leader = Leader(2, "a", no_port)
    leader.come(0, "n0")
    leader.come(1, "n1")
    leader.hear(0, meet())
    refused = [NotMet("other", "no free master port")]
    assert told(leader.hear(1, meet())) == {0: refused, 1: refused}


def test_nothing_follows_from_the_words_of_who_has_no_place() -> None:
    leader = leader_of(2)
    assert leader.hear(7, Finish()) == []
    assert leader.lose(7, "x") == []
    leader.hear(1, Leave())
    assert leader.hear(1, FailingRank(1, 1)) == []
