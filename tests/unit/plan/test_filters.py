"""Include and exclude filters, and counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.outcome import assert_one_line, error_of

from dsl.devices.offered import slots_text
from dsl.errors import FilterError
from dsl.plan.hosts import apply_filters, trim

POOL = {"worker-0": range(4), "worker-1": range(4)}
hosts = st.sampled_from(["worker-0", "worker-1"])
specs = st.one_of(
    hosts,
    st.builds(
        lambda host, slots: f"{host}:{','.join(map(str, slots))}",
        hosts,
        st.lists(st.integers(0, 3), min_size=1),
    ),
)
filters = st.lists(specs, min_size=1, max_size=4).map("@".join)


@given(filters)
def test_include_and_exclude_of_one_filter_share_out_the_pool(text: str) -> None:
    included = apply_filters(POOL, text, "")
    excluded = apply_filters(POOL, "", text)
    for host, slots in POOL.items():
        parts = included.get(host, []) + excluded.get(host, [])
        assert sorted(parts) == list(slots)


@given(text=filters, include=st.booleans())
def test_the_result_keeps_the_order_of_the_pool_and_no_empty_host(text: str, *, include: bool) -> None:
    active = apply_filters(POOL, text if include else "", "" if include else text)
    assert list(active) == [host for host in POOL if host in active]
    assert all(slots == sorted(set(slots)) and slots for slots in active.values())


@pytest.mark.guarantee("G8")
@given(st.text(st.sampled_from("ab01,:@- _+") | st.characters(), max_size=20))
def test_any_text_gives_resources_or_a_filter_error(text: str) -> None:
    pool = {"a": range(2), "b": range(2)}
    error = error_of(FilterError, apply_filters, pool, text, "")
    if error:
        assert_one_line(error)
    else:
        active = apply_filters(pool, text, "")
        assert all(set(slots) <= {0, 1} for slots in active.values())


@pytest.mark.parametrize(
    "include, message",
    [
        ("worker-00", "hostname 'worker-00' not found in hostfile, did you mean 'worker-0'?"),
        ("jeff", "hostname 'jeff' not found in hostfile, known: worker-0, worker-1"),
        ("worker-1:4", "no slot '4' specified on host 'worker-1', which has slots 0 to 3"),
        (
            "worker-1:x",
            "bad filter 'worker-1:x', expected HOST or HOST:SLOT,SLOT with whole numbers as slots",
        ),
    ],
)
def test_an_error_names_what_there_is(include: str, message: str) -> None:
    with pytest.raises(FilterError) as caught:
        apply_filters(POOL, include, "")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "slots, text",
    [([], "no slots"), ([2], "only slot 2"), ([1, 2], "slots 1 to 2"), ([0, 2], "slots 0, 2")],
)
def test_slots_in_words(slots: list[int], text: str) -> None:
    assert slots_text(slots) == text


@pytest.mark.parametrize(
    "num_nodes, num_gpus, expected",
    [
        (None, None, {"a": [1, 3], "b": [0]}),
        (0, 0, {"a": [1, 3], "b": [0]}),
        (1, None, {"a": [1, 3]}),
        (2, 1, {"a": [1], "b": [0]}),
    ],
)
def test_counts_keep_the_first_hosts_and_slots(
    num_nodes: int | None, num_gpus: int | None, expected: dict[str, list[int]]
) -> None:
    assert trim({"a": [1, 3], "b": [0]}, num_nodes, num_gpus, checked=True, source="H") == expected


def test_counts_beyond_the_pool_are_refused_unless_slots_are_no_devices() -> None:
    with pytest.raises(FilterError, match="--num_nodes 2 is more than the hosts that H leaves: 1"):
        trim({"a": [0]}, 2, None, checked=False, source="H")
    with pytest.raises(FilterError, match="--num_gpus 2 is too many: host 'a' has only slot 0"):
        trim({"a": [0]}, None, 2, checked=True, source="H")
    assert trim({"a": [0]}, None, 2, checked=False, source="H") == {"a": [0, 1]}
