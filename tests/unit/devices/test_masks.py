"""Variables of visible devices, in the grammar of each vendor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.devices import ACCELERATORS
from dsl.devices.masks import (
    ASCEND,
    CUDA,
    GRAMMARS,
    HABANA,
    LEVEL_ZERO,
    NUMBERS,
    ROCR,
    Grammar,
    count_named,
    count_visible,
    explain_value,
    level_zero_hierarchy,
    read_entries,
    resolve,
    resolve_level_zero,
    resolve_rocm,
    worker_choices,
)
from dsl.errors import FilterError

UUIDS = ("GPU-8932f937", "GPU-8932aaaa", "GPU-77770000")


@pytest.mark.parametrize(
    "value, seen",
    [
        (None, (0, 1, 2)),
        ("", ()),
        (" ", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,1", (2, 1)),
        ("0,2,-1,1", (0, 2)),
        ("0,7,1", (0,)),
        ("0,,1", (0,)),
        (" 2 , 0 ", (2, 0)),
        ("+1", (1,)),
        ("1gpu2,2ampere", (1, 2)),
        ("0-2", (0,)),
        ("1,1", ()),
        ("01,1", ()),
        ("0,-1,0", (0,)),
        ("0,9,9", ()),
        ("9" * 5000, ()),
        ("٣", ()),
        ("GPU-8932f937", (0,)),
        ("GPU-7", (2,)),
        ("GPU-7,GPU-8932f", (2, 0)),
        ("GPU-8932", ()),
        ("GPU-7,GPU-8932,GPU-8932f", (2,)),
        ("GPU-7777,GPU-77", ()),
        ("GPU-7,GPU-7", ()),
        ("GPU-7, GPU-8932f", (2,)),
        ("GPU-7,0", (2,)),
        ("0,GPU-7", (0,)),
        ("gpu-7", ()),
    ],
)
def test_cuda_devices_of_a_machine_with_three(value: str | None, seen: tuple[int, ...]) -> None:
    assert resolve(value, 3, UUIDS) == seen


@pytest.mark.parametrize(
    "grammar, value, entries",
    [
        (ROCR, "0,GPU-dead,2", ("0", "GPU-dead", "2")),
        (ROCR, "GPU-dead, 1", ("GPU-dead", "1")),
        (ROCR, "", ()),
        (ROCR, "MIG-1", ()),
        (LEVEL_ZERO, "", None),
        (LEVEL_ZERO, "1,0", ("1", "0")),
        (LEVEL_ZERO, "0.1, 1.00", ("0.1", "1.0")),
        (LEVEL_ZERO, "-1,x,0.,3", ("3",)),
        (LEVEL_ZERO, "1,1", ("1",)),
        (ASCEND, "1,2,3", ("1", "2", "3")),
        (ASCEND, "1, 2,3", ("1",)),
        (ASCEND, "1,2,-1,3", ("1", "2")),
        (ASCEND, "1,2a,3", ("1",)),
        (ASCEND, "", ()),
        (HABANA, "4,5,6,7", ("4", "5", "6", "7")),
        (HABANA, "all", None),
        (NUMBERS, "1,0", ("1", "0")),
        (NUMBERS, "GPU-1", ()),
        (CUDA, "MIG-1,MIG-2", ("MIG-1", "MIG-2")),
        (CUDA, "MIG-1,GPU-2", ("MIG-1",)),
        (CUDA, "MIG-1,MIG-1", ()),
    ],
)
def test_entries_as_a_vendor_reads_them(
    grammar: Grammar, value: str, entries: tuple[str, ...] | None
) -> None:
    assert read_entries(value, grammar) == entries


def test_every_variable_of_an_accelerator_has_a_grammar() -> None:
    assert {each.visible_variable for each in ACCELERATORS.values()} <= set(GRAMMARS)


def test_cuda_devices_are_counted_as_torch_counts_them() -> None:
    """Recorded by `record_masks`. Where torch differs from CUDA it is torch that the scripts ask."""
    path = Path(__file__).parent / "fixtures" / "cuda_visible.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    counts = data["counts"]
    assert len(counts) > 250
    assert {value: len(resolve(value, 4, data["uuids"])) for value in counts} == counts


def test_level_zero_keeps_its_own_order_and_skips_what_is_not_there() -> None:
    assert resolve("3,9,1", 4, (), LEVEL_ZERO) == (1, 3)
    assert resolve("1.1,0.2,1.0", 2, (), LEVEL_ZERO) == (0, 1)


@pytest.mark.parametrize(
    "value, alone, count",
    [
        ("MIG-a,MIG-b", False, 1),
        ("MIG-a,MIG-b", True, 2),
        ("MIG-GPU-1/2/0", False, 1),
        ("GPU-a,GPU-b", False, 2),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", False, 4),
        ("GPU-a,GPU-a", False, 0),
        ("3,1", False, 2),
        ("", False, 0),
        (None, False, 4),
    ],
)
def test_devices_are_counted_without_knowing_their_names(
    value: str | None, *, alone: bool, count: int
) -> None:
    assert count_visible(value, 4, alone=alone) == count


@pytest.mark.parametrize(
    "environ, positions",
    [
        ({}, (0, 1, 2, 3)),
        ({"ROCR_VISIBLE_DEVICES": ""}, ()),
        ({"ROCR_VISIBLE_DEVICES": "3,GPU-1"}, (3, 0)),
        ({"ROCR_VISIBLE_DEVICES": "GPU-2,0"}, (1, 0)),
        ({"ROCR_VISIBLE_DEVICES": "1,2,3"}, (1, 2, 3)),
        ({"ROCR_VISIBLE_DEVICES": "1,2,3", "HIP_VISIBLE_DEVICES": "0,2"}, (1, 3)),
        ({"HIP_VISIBLE_DEVICES": "3"}, (3,)),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0,1,2"}, (3,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, (0, 1, 2)),
        ({"ROCR_VISIBLE_DEVICES": "3,1,2", "HIP_VISIBLE_DEVICES": "2,0"}, (2, 3)),
        ({"ROCR_VISIBLE_DEVICES": "3,1,2", "CUDA_VISIBLE_DEVICES": "1"}, (1,)),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, (1,)),
        ({"ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "1"}, ()),
        ({"ROCR_VISIBLE_DEVICES": "3", "HIP_VISIBLE_DEVICES": "3"}, ()),
    ],
)
def test_amd_devices_are_numbered_anew_by_each_variable(
    environ: dict[str, str], positions: tuple[int, ...]
) -> None:
    assert resolve_rocm(environ, ("GPU-1", "GPU-2", "GPU-3", "GPU-4")) == positions


@pytest.mark.parametrize(
    "mask, hierarchy, meant, seen",
    [
        (None, None, "FLAT", (0, 1, 2, 3)),
        ("", "COMPOSITE", "COMPOSITE", (0, 1, 2, 3)),
        ("3,0,9", None, "FLAT", (0, 3)),
        ("1.1,0,1.0", None, "COMPOSITE", (0, 1)),
        ("1.1,0,1.0", "COMPOSITE", "COMPOSITE", (0, 1)),
        ("1.1,0,1.0", "FLAT", "FLAT", (0,)),
        ("1.1", "COMBINED", "FLAT", ()),
        ("1.1", "flat", "COMPOSITE", (1,)),
    ],
)
def test_tiles_are_devices_of_their_own_or_parts(
    mask: str | None, hierarchy: str | None, meant: str, seen: tuple[int, ...]
) -> None:
    given = {"ZE_AFFINITY_MASK": mask, "ZE_FLAT_DEVICE_HIERARCHY": hierarchy}
    environ = {name: value for name, value in given.items() if value is not None}
    assert level_zero_hierarchy(environ) == meant
    assert resolve_level_zero(environ, 4) == seen


@pytest.mark.parametrize(
    "mask, workers, shown",
    [
        ("1.0,0.1,1.1,0.0", 2, ["0.0,0.1", "1.0,1.1"]),
        ("1.0,0.1,1.1,0.0", 3, ["0.0", "0.1", "1.0", "1.1"]),
        ("1.10,1.9", 2, ["1.9", "1.10"]),
        ("0.1,0,1.1", 2, ["0", "1.1"]),
        ("0.1,0,1.1", 3, ["0", "1.1"]),
        ("0.1,7.0", 1, ["0.1"]),
    ],
)
def test_a_worker_gets_a_whole_device_or_a_part_if_there_are_too_few(
    mask: str, workers: int, shown: list[str]
) -> None:
    environ = {"ZE_AFFINITY_MASK": mask, "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    assert worker_choices("ZE_AFFINITY_MASK", environ, 4, workers) == shown


@pytest.mark.parametrize(
    "variable, value, said",
    [
        ("MLU_VISIBLE_DEVICES", "1, 2,-1", None),
        ("MLU_VISIBLE_DEVICES", "", None),
        ("MLU_VISIBLE_DEVICES", "1.0", "'1.0' is no device"),
        ("ZE_AFFINITY_MASK", "1.0,2", None),
        ("ZE_AFFINITY_MASK", "1,0-1", "write 0,1"),
        ("ASCEND_RT_VISIBLE_DEVICES", "1, 2", "' 2' is no device"),
    ],
)
def test_the_first_entry_that_is_no_device_is_explained(variable: str, value: str, said: str | None) -> None:
    message = explain_value(variable, value)
    assert message is None if said is None else message is not None and said in message


def test_a_range_is_explained() -> None:
    said = "'0-3' is a range, which CUDA_VISIBLE_DEVICES does not take, write 0,1,2,3"
    with pytest.raises(FilterError, match=re.escape(said)):
        count_named("CUDA_VISIBLE_DEVICES", ["0-3"], 4)
    with pytest.raises(FilterError, match=r"'x' is no device, give numbers alone$"):
        count_named("MLU_VISIBLE_DEVICES", ["x"], 4)


ENTRY = st.one_of(
    st.integers(-2, 12).map(str),
    st.sampled_from(["GPU-", "GPU-8", "GPU-8932f937", "GPU-77", "MIG-1", "0.1", "", " ", "x", "0-3"]),
    st.text(max_size=4).filter(lambda text: "," not in text),
)
VALUES = st.lists(ENTRY, max_size=6).map(",".join)
ALL_GRAMMARS = st.sampled_from(sorted(set(GRAMMARS)))


@given(value=VALUES, variable=ALL_GRAMMARS, count=st.integers(0, 8))
def test_any_value_shows_devices_of_the_machine_each_once(value: str, variable: str, count: int) -> None:
    seen = resolve(value, count, UUIDS, GRAMMARS[variable])
    assert len(set(seen)) == len(seen)
    assert all(0 <= position < count for position in seen)
    assert 0 <= count_visible(value, count, UUIDS, GRAMMARS[variable]) <= max(count, 1)


@given(value=VALUES, variable=ALL_GRAMMARS)
def test_entries_read_once_read_the_same_again(value: str, variable: str) -> None:
    grammar = GRAMMARS[variable]
    entries = read_entries(value, grammar)
    assert entries is None or read_entries(",".join(entries), grammar) in (
        entries,
        entries or None,
    )


@given(numbers=st.lists(st.integers(0, 7), unique=True), variable=ALL_GRAMMARS)
def test_numbers_show_just_those_devices(numbers: list[int], variable: str) -> None:
    grammar = GRAMMARS[variable]
    seen = resolve(",".join(map(str, numbers)), 8, (), grammar)
    if numbers or not grammar.empty_shows_all:
        assert sorted(seen) == sorted(numbers)
        assert grammar.parts or list(seen) == numbers
    else:
        assert seen == tuple(range(8))


@given(order=st.permutations(range(3)), cut=st.integers(9, 12))
def test_shortened_names_mean_the_same_as_whole_ones(order: list[int], cut: int) -> None:
    names = [UUIDS[position] for position in order]
    assert resolve(",".join([name[:cut] for name in names]), 3, UUIDS) == tuple(order)


@given(value=VALUES, variable=ALL_GRAMMARS, total=st.integers(0, 6), count=st.integers(1, 6))
def test_what_workers_are_shown_is_different_and_seen_alone(
    value: str, variable: str, total: int, count: int
) -> None:
    shown = worker_choices(variable, {variable: value}, total, count)
    assert len(set(shown)) == len(shown)
    assert len(shown) >= min(count, len(resolve(value, total, (), GRAMMARS[variable])))
    for one in shown:
        assert len(resolve(one, total, (), GRAMMARS[variable])) == 1
