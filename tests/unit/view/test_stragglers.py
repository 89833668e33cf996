"""Which ranks hold the others up, judged by samples of what all ranks do."""

from __future__ import annotations

from typing import Any

import pytest

from dsl.model.observation import Frame, NodeStacks, RankStacks, Sampled, StackSample
from dsl.view.sampling import parse, waiting_call
from dsl.view.stragglers import all_spent, collapsed, count_slow, explain_samples, kind_of, rows_of

TORCH = "/env/lib/python3.11/site-packages/torch/"
REDUCE = Frame("all_reduce", TORCH + "distributed/distributed_c10d.py", 4000)
BACKWARD = Frame("Tensor.backward", TORCH + "_tensor.py", 600)
FETCH = Frame("fetch", TORCH + "utils/data/_utils/fetch.py", 54)
LOADER = Frame("_get_data", TORCH + "utils/data/dataloader.py", 1250)
WORKER = Frame("_worker_loop", TORCH + "utils/data/_utils/worker.py", 350)
LINEAR = Frame("linear", TORCH + "nn/functional.py", 10)


def user(line: int = 88, function: str = "step", file: str = "/home/u/train.py") -> Frame:
    return Frame(function, file, line)


ITEM = user(40, "__getitem__", "/home/u/data.py")


def seen(count: int, *frames: Frame, **fields: Any) -> StackSample:
    return StackSample(frames, count, **fields)


def rank_of(rank: int, *samples: StackSample, **fields: Any) -> RankStacks:
    return RankStacks(rank, rank, 1000 + rank, sampled=Sampled(samples, **fields))


def reducing(rank: int, count: int = 58, **fields: float) -> RankStacks:
    """A rank that waits in so many of a hundred samples."""
    return rank_of(rank, seen(count, REDUCE, user()), seen(100 - count, user(90)), **fields)


def verdict(*ranks: RankStacks, hosts: int = 1) -> str:
    size = len(ranks) // hosts
    nodes = [NodeStacks(1, at, f"n{at}", ranks[at * size : (at + 1) * size]) for at in range(hosts)]
    return explain_samples(nodes)[0]


@pytest.mark.parametrize(
    "waits, count",
    [
        ([], 0),
        ([0.3, 0.35, 0.55, 0.6], 0),  # two of four, by chance
        ([0.0], 0),
        ([0.02, 0.6], 1),
        ([0.02, 0.5, 0.55, 0.6], 1),
        ([0.02, 0.05, 0.55, 0.6], 2),
        ([0.02, 0.1, 0.11, 0.6], 0),  # the one that waits most is fast, and holds nobody up
        ([0.3, 0.35, 0.4, 0.44], 0),
        ([0.35, 0.6, 0.62, 0.7], 1),  # all wait for a slow network, too
        ([0.0, 0.17, 0.18, 0.19], 0),  # they wait too little
        ([0.1] * 4 + [0.5] * 12, 4),
        ([0.1] * 12 + [0.5] * 4, 0),
    ],
)
def test_the_slow_ranks_are_those_that_wait_clearly_less(waits: list[float], count: int) -> None:
    assert count_slow(waits, ["n0"] * len(waits), 100) == count


def test_the_ranks_of_one_host_need_no_wider_gap() -> None:
    waits = [0.3, 0.33, 0.55, 0.6]
    assert count_slow(waits, ["n1", "n1", "n0", "n0"], 100) == 2
    assert count_slow(waits, ["n1", "n0", "n1", "n0"], 100) == 0


def test_few_samples_need_a_wider_gap() -> None:
    assert [count_slow([0.3, 0.55], ["n0", "n0"], samples) for samples in (50, 100)] == [0, 1]


@pytest.mark.parametrize(
    "slow, words",
    [
        (
            rank_of(2, seen(61, ITEM, FETCH, user(70)), seen(39, user(90))),
            "rank 2 holds the others up: 61 % in __getitem__ (data.py:40)",
        ),
        (
            rank_of(2, seen(30, user(41, "load")), seen(31, user(42, "load")), seen(39, user(90))),
            "rank 2 holds the others up: 61 % in load (train.py:42)",
        ),
        (
            rank_of(
                2,
                seen(70, LOADER, user(70)),
                seen(30, user(90)),
                seen(45, ITEM, WORKER, is_child=True),
                seen(5, WORKER, is_child=True),
            ),
            "rank 2 holds the others up: 70 % for its data loader (train.py:70), whose workers are 90 % in __getitem__ (data.py:40)",
        ),
        (
            rank_of(2, seen(95, user(90)), seen(5, REDUCE, user()), delayed=0.5),
            "rank 2 holds the others up: 95 % in step (train.py:90), 50 % of the time without a free CPU",
        ),
    ],
)
def test_the_reason_is_what_the_slow_rank_does_more_than_the_others(slow: RankStacks, words: str) -> None:
    assert (
        verdict(reducing(0), reducing(1), slow, reducing(3))
        == f"{words}; the others wait 58 % in all_reduce (train.py:88)"
    )


def test_all_ranks_of_a_slow_host_are_named_with_it() -> None:
    ranks = [reducing(rank, 10 if rank in (2, 3) else 60) for rank in range(8)]
    assert verdict(*ranks, hosts=4) == (
        "ranks 2-3 (host n1) hold the others up: 90 % in step (train.py:90); the others wait 60 % in all_reduce (train.py:88)"
    )


def test_nobody_is_named_where_all_wait_alike() -> None:
    assert verdict(*[reducing(rank, 30 + 3 * rank) for rank in range(4)]) == (
        "no rank holds the others up: they wait 30 % to 39 % of the time for each other"
    )


def test_a_rank_that_was_not_sampled_is_told_with_the_reason() -> None:
    """Whichever rank answers first."""
    no = "py-spy says: no"
    ranks = (
        reducing(0),
        RankStacks(3, 3, 8, problem=no),
        RankStacks(1, 1, 7, problem=no),
        RankStacks(2, 2, 0),
    )
    assert explain_samples([NodeStacks(1, 0, "n0", ranks)], ["n1"]) == [
        "nothing can be compared: 1 of the ranks could be sampled",
        "host n1 has not answered",
        "ranks 1,3: no samples: py-spy says: no",
        "rank 2: no samples: it has ended",
    ]


@pytest.mark.parametrize(
    "sample, kind",
    [
        (seen(1, REDUCE, user()), "collective"),
        (seen(1, user(), call="wait"), "collective"),
        (seen(1, user(), call="item"), "sync"),
        (seen(1, Frame("Stream.synchronize", TORCH + "cuda/streams.py", 9), user()), "sync"),
        (seen(1, BACKWARD, user()), "backward"),
        (seen(1, LINEAR, user()), "device"),
        (seen(1, ITEM, FETCH, user()), "data"),
        (seen(1, LOADER, user()), "data"),
        (seen(1, Frame("open", "/env/lib/python3.11/site-packages/PIL/Image.py", 3), ITEM, user()), "data"),
        (seen(1, user()), "python"),
        (seen(1), "python"),
    ],
)
def test_what_a_stack_stands_for(sample: StackSample, kind: str) -> None:
    assert kind_of(sample) == kind


@pytest.mark.parametrize(
    "sleeps, has_gpu, figures",
    [
        (0.5, False, {"collective": 0.5, "device": 0.3, "waits": 0.5}),
        (0.0, False, {"collective": 0.1, "device": 0.7, "waits": 0.1}),
        (0.0, True, {"collective": 0.1, "device": 0.7, "waits": 0.8}),
    ],
)
def test_a_main_thread_that_sleeps_in_backward_waits_for_other_ranks(
    sleeps: float, *, has_gpu: bool, figures: dict[str, float]
) -> None:
    rank = rank_of(
        0,
        seen(1, REDUCE, user()),
        seen(7, BACKWARD, user(60)),
        seen(2, user()),
        sleeps=sleeps,
        has_gpu=has_gpu,
    )
    (spent,) = all_spent([NodeStacks(1, 0, "n0", (rank,))])
    found: dict[str, float] = {str(kind): share for kind, share in spent.kinds.items()}
    found["waits"] = spent.waits
    assert {name: round(found[name], 6) for name in figures} == figures
    assert sum(spent.kinds.values()) == pytest.approx(1.0)


def test_the_table_begins_with_the_rank_that_waits_least() -> None:
    spent = all_spent([NodeStacks(1, 0, "n0", (reducing(0), reducing(1, 5, delayed=0.25)))])
    assert rows_of(spent) == [
        ("1", "n0", "5 %", "0 %", "0 %", "95 %", "25 %", "95 % in step (train.py:90)"),
        ("0", "n0", "58 %", "0 %", "0 %", "42 %", "0 %", "58 % in all_reduce (train.py:88)"),
    ]


def test_flame_graphs_get_the_outermost_frame_first() -> None:
    rank = rank_of(3, seen(5, REDUCE, user()), seen(2, WORKER, is_child=True), seen(1))
    assert collapsed([NodeStacks(1, 0, "n0", (rank,))]).splitlines() == [
        f"rank 3 (host n0);step (/home/u/train.py:88);all_reduce ({REDUCE.file}:4000) 5",
        f"rank 3 (host n0);descendants;_worker_loop ({WORKER.file}:350) 2",
        "rank 3 (host n0);rare stacks 1",
    ]


RAW = """
process 7:"python train.py";thread (7): MainThread;<module> (/u/train.py:9);load (/u/data.py:5) 37
process 7:"python train.py";thread (9): pool;run (/lib/threading.py:3) 59
process 7:"python train.py";process 8:"python -c 'a;b'";thread (8): MainThread;work (/u/a b (1).py:7) 20
second line of a command";thread (7): MainThread;<module> (<frozen x>) 2
py-spy> anything
"""


def test_the_stacks_of_main_threads_are_read_from_the_collapsed_format() -> None:
    assert parse(RAW, 7) == [
        seen(37, Frame("load", "/u/data.py", 5), Frame("<module>", "/u/train.py", 9)),
        seen(20, Frame("work", "/u/a b (1).py", 7), is_child=True),
        seen(2, Frame("<module>", "<frozen x>", 0)),
    ]


def test_a_script_that_has_never_imported_threading_has_a_main_thread_without_a_name() -> None:
    lines = [f'process 7:"x";thread ({thread});f (/u/a.py:3) 19' for thread in (7, 9)]
    assert parse("\n".join(lines), 7) == [seen(19, Frame("f", "/u/a.py", 3))]


def test_rare_stacks_are_one_sample_without_frames() -> None:
    lines = [f'process 7:"x";thread (0x7F): MainThread;f (/u/a.py:{line}) 1' for line in range(130)]
    found = parse("\n".join(lines), 7)
    assert (len(found), found[-1]) == (101, seen(30))


SOURCE = """
work = reduce(x)
work.wait()
loss = (
    net(x)
    .item()
)
wait(x)
"""


@pytest.mark.parametrize("line, name", [(2, ""), (3, "wait"), (5, "item"), (8, ""), (99, "")])
def test_a_line_tells_which_function_without_a_frame_waits(line: int, name: str) -> None:
    assert waiting_call(SOURCE, line) == name
    assert waiting_call("no python :", line) == ""
