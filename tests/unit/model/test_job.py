"""How the nodes of a job share its ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsl.model.job import Meeting


@given(st.lists(st.integers(0, 9), min_size=1).map(tuple))
def test_ranks_count_through_the_nodes_in_order(sizes: tuple[int, ...]) -> None:
    meetings = [Meeting(0, node_rank, sizes, "127.0.0.1", 29500) for node_rank in range(len(sizes))]
    assert [len(meeting.ranks) for meeting in meetings] == list(sizes)
    assert [rank for meeting in meetings for rank in meeting.ranks] == list(range(sum(sizes)))
    assert {(meeting.world_size, meeting.node_count) for meeting in meetings} == {(sum(sizes), len(sizes))}
