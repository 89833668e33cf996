"""The words for what the ranks of a job do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.model.observation import Frame, NodeStacks, RankStacks, ThreadStack
from dsl.view.explain import explain_stacks, group

TORCH = "/env/lib/python3.11/site-packages/torch/"
LOADER = TORCH + "utils/data/dataloader.py"
C10D = TORCH + "distributed/distributed_c10d.py"
WRAPPER = Frame("_exception_logger.<locals>.wrapper", TORCH + "distributed/c10d_logger.py", 83)


def user(line: int = 88, function: str = "main", file: str = "/home/u/train.py") -> Frame:
    return Frame(function, file, line)


def rank_of(rank: int, *frames: Frame, threads: Sequence[ThreadStack] = (), **fields: Any) -> RankStacks:
    """A rank whose main thread has these frames; fields of its thread go there."""
    names = ("call", "channel", "signal", "switches", "is_bare_loop")
    mine = {name: fields.pop(name) for name in names if name in fields}
    main = ThreadStack("MainThread", frames, is_main=True, state=fields.get("state", "S"), **mine)
    return RankStacks(rank, rank, 1000 + rank, (main, *threads), **{"state": "S", **fields})


def waiting(rank: int, operation: str = "all_reduce", line: int = 88, **fields: Any) -> RankStacks:
    frames = (Frame(operation, C10D, 4000), WRAPPER, user(line))
    return rank_of(rank, *frames, **{"call": "futex", **fields})


def node(*ranks: RankStacks, host: str = "n0", number: int = 0) -> NodeStacks:
    return NodeStacks(1, number, host, ranks)


def first_line(odd: RankStacks) -> str:
    """The first line where three more ranks wait in all_reduce."""
    return explain_stacks([node(*[waiting(rank) for rank in range(4) if rank != odd.rank], odd)])[0]


CROWD = "3 of 4 ranks wait in all_reduce (train.py:88); "


@pytest.mark.parametrize(
    "odd, words",
    [
        (waiting(2, "barrier", 90), "rank 2 waits in barrier (train.py:90)"),
        (RankStacks(2, 2, 0), "rank 2 has ended"),
        (rank_of(2, user(), state="Z"), "rank 2 has ended"),
        (waiting(2, state="T"), "rank 2 is stopped by a signal (SIGCONT lets it go on) (train.py:88)"),
        (waiting(2, state="t"), "rank 2 is held by a debugger (train.py:88)"),
        (
            rank_of(2, user(7, "on_signal"), user(30), signal=10, call="clock_nanosleep"),
            "rank 2 is in its handler of SIGUSR1, in sleep() (train.py:7)",
        ),
        (
            rank_of(2, user(12, file="/home/u/data.py"), state="D", call="openat(/nfs/a.bin)", channel="wait_on"),
            "rank 2 is in open() of /nfs/a.bin, stuck in state D: a disk, a file system or a driver does not answer (data.py:12)",
        ),
        (
            rank_of(2, user(5), state="D", channel="folio_wait_bit"),
            "rank 2 is in the kernel (folio_wait_bit), stuck in state D: a disk, a file system or a driver does not answer (train.py:5)",
        ),
        (
            rank_of(2, user(5), state="D", major_faults=900),
            "rank 2 is short of memory: it waits for pages from disk again and again (train.py:5)",
        ),
        (rank_of(2, user(5), call="read(stdin)"), "rank 2 waits for input on stdin (train.py:5)"),
        (rank_of(2, user(5), call="futex"), "rank 2 waits for a lock (train.py:5)"),
        (rank_of(2, user(5), call="clock_nanosleep"), "rank 2 is in sleep() (train.py:5)"),
        (
            rank_of(2, user(5), call="connect(10.0.0.1:29500)"),
            "rank 2 is in connect() of 10.0.0.1:29500 (train.py:5)",
        ),
        (
            rank_of(2, user(5, "Net.<locals>.crunch"), state="R", cpu_share=1.0),
            "rank 2 computes in Net.crunch() (train.py:5)",
        ),
        (
            rank_of(2, Frame("match", "/usr/lib/python3.11/re/__init__.py", 166), user(5), state="R", cpu_share=1.0),
            "rank 2 computes in match() (train.py:5)",
        ),
        (
            waiting(2, "init_process_group", 9, store="10.0.0.9:29500"),
            "rank 2 waits in init_process_group, store 10.0.0.9:29500 (train.py:9)",
        ),
        (
            rank_of(2, Frame("_shutdown", "/usr/lib/python3.11/threading.py", 1500), call="futex"),
            "rank 2 has ended its program and waits for its threads",
        ),
        (
            rank_of(2, call="futex", problem="py-spy is not installed here"),
            "rank 2 is in futex()",
        ),
        (RankStacks(2, 2, 7, problem="no answer"), "rank 2 is in an unknown place: no answer"),
    ],
)  # fmt: skip
def test_the_odd_rank_is_named_with_what_it_does(odd: RankStacks, words: str) -> None:
    assert first_line(odd) == CROWD + words


def test_a_deadlock_names_both_threads() -> None:
    other = ThreadStack("second", (user(75),), state="S", call="futex")
    odd = rank_of(2, user(81), call="futex", threads=[other])
    assert first_line(odd) == (
        CROWD
        + 'rank 2 waits for a lock (train.py:81), while its thread "second" waits for a lock (train.py:75): '
        "each may hold the lock of the other"
    )


def test_a_joined_thread_is_named() -> None:
    other = ThreadStack("saver", (user(75),), state="S", call="fsync(/nfs/a)")
    join = Frame("Thread.join", "/usr/lib/python3.11/threading.py", 1100)
    odd = rank_of(2, join, user(81), call="futex", threads=[other])
    assert first_line(odd) == (
        CROWD
        + 'rank 2 waits in Thread.join() (train.py:81); its thread "saver" is in fsync() of /nfs/a (train.py:75)'
    )


def test_a_wait_for_the_data_loader_is_explained_by_its_worker() -> None:
    # The worker is forked from the rank: it has the frames of the loop, too.
    frames = (Frame("_try_get_data", LOADER, 1300), Frame("__next__", LOADER, 700), user(59))
    below = ThreadStack(
        "pt_data_worker", (user(12, file="/u/data.py"), *frames), state="S", call="read(pipe)", pid=77
    )
    odd = rank_of(2, *frames, threads=[below], call="poll(pipe)")
    assert first_line(odd) == (
        CROWD + "rank 2 waits for its data loader (train.py:59); "
        "its child pt_data_worker (pid 77) is in read() of pipe (data.py:12)"
    )


def test_a_child_that_works_is_named() -> None:
    below = ThreadStack("nvcc", state="R", pid=77, cpu_share=0.97)
    wait = Frame("Popen.wait", "/usr/lib/python3.11/subprocess.py", 1264)
    odd = rank_of(2, wait, user(59), threads=[below], call="wait4(pid 77)", cpu_share=0.97)
    assert first_line(odd) == (
        CROWD + "rank 2 waits in Popen.wait() (train.py:59); its child nvcc (pid 77) uses 1.0 CPUs"
    )


def test_the_host_is_named_where_there_are_several_and_so_are_hosts_without_an_answer() -> None:
    nodes = [
        node(*[waiting(rank) for rank in range(4)], host="w-0"),
        node(waiting(4), rank_of(5, user(12), call="openat(/x)"), host="w-1", number=1),
    ]
    lines = explain_stacks(nodes, ["w-2"])
    assert (
        lines[0]
        == "5 of 6 ranks wait in all_reduce (train.py:88); rank 5 is in open() of /x (train.py:12, host w-1)"
    )
    assert "host w-2 has not answered" in lines
    assert explain_stacks([], ["w-2"]) == ["no rank has answered", "host w-2 has not answered"]


def test_ranks_that_all_do_the_same_are_one_group() -> None:
    lines = explain_stacks([node(*[waiting(rank) for rank in range(4)])])
    assert lines == [
        "all 4 ranks wait in all_reduce (train.py:88)",
        "",
        "ranks 0-3 (4 ranks): wait in all_reduce (train.py:88)",
        "    kernel: futex",
        "    all_reduce (torch/distributed/distributed_c10d.py:4000)",
        "    main (/home/u/train.py:88)",
    ]


def test_many_groups_are_counted_in_the_first_line_and_shown_below() -> None:
    lines = explain_stacks([node(*[waiting(rank, line=rank + 1) for rank in range(9)])])
    assert lines[0].startswith("rank 0 waits in all_reduce (train.py:1); rank 1 ")
    assert lines[0].endswith("; 5 more do other things, see below")
    assert sum(line.startswith("rank ") for line in lines[1:]) == 9


def test_the_flight_recorder_says_who_is_behind() -> None:
    fields: dict[str, Any] = {"collective": "all_reduce", "process_group": "default_pg"}
    ranks = [waiting(rank, sequence=4 if rank != 2 else 3, **fields) for rank in range(4)]
    assert explain_stacks([node(*ranks)])[1] == (
        "collective operations of default_pg: 4 begun, last all_reduce; rank 2 has begun 3, last all_reduce"
    )


def test_a_problem_is_told_once_for_each_group() -> None:
    ranks = [rank_of(rank, call="futex", problem="py-spy is not installed here") for rank in range(4)]
    lines = explain_stacks([node(*ranks)])
    assert lines[0] == "all 4 ranks are in futex()"
    assert lines.count("  Python stack unknown: py-spy is not installed here") == 1


def test_nothing_that_a_worker_named_reaches_the_terminal_as_it_is() -> None:
    odd = rank_of(2, user(5, "\x1b[2Jf\n", "/u/\x1b]0;x\x07.py"), call="read(/tmp/\x1b[31m\n)")
    assert all(line.isprintable() for line in explain_stacks([node(odd)]))


FRAMES = st.lists(
    st.builds(
        Frame,
        st.sampled_from(["main", "all_reduce", "wrapper", "Thread.join", "", "<module>"]),
        st.sampled_from(["/u/a.py", C10D, LOADER, "/lib/x.so", "<string>", "", "/usr/lib/python3.11/re.py"]),
        st.integers(0, 9),
    ),
    max_size=5,
).map(tuple)
THREADS = st.builds(
    ThreadStack,
    st.just("t"),
    FRAMES,
    is_main=st.booleans(),
    state=st.sampled_from(["", *"RSDTtZ"]),
    channel=st.sampled_from(["", "pipe_read"]),
    call=st.sampled_from(["", "futex", "read(stdin)", "openat(/a)", "wait4(pid 3)", "read(", "x(y)z)"]),
    pid=st.sampled_from([0, 7]),
    signal=st.sampled_from([0, 10, 40]),
)
STACKS = st.builds(
    RankStacks,
    st.just(0),
    st.just(0),
    st.sampled_from([0, 5, 6]),
    st.lists(THREADS, max_size=3).map(tuple),
    state=st.sampled_from(["", *"RSDTtZ"]),
    cpu_share=st.sampled_from([0.0, 1.0]),
    major_faults=st.sampled_from([0, 500]),
    sequence=st.integers(0, 2),
    process_group=st.sampled_from(["", "g"]),
    problem=st.sampled_from(["", "why"]),
)


@given(st.lists(STACKS, min_size=1, max_size=12), st.integers(1, 4), st.randoms())
def test_each_rank_is_in_one_group_and_the_order_of_answers_changes_nothing(
    stacks: list[RankStacks], hosts: int, chance: random.Random
) -> None:
    ranks = [
        RankStacks(
            **{name: getattr(one, name) for name in one.__match_args__} | {"rank": at, "local_rank": at}
        )
        for at, one in enumerate(stacks)
    ]
    nodes = [node(*ranks[at::hosts], host=f"n{at}", number=at) for at in range(hosts)]
    members = [one.rank for each in group(nodes) for _, one in each.members]
    assert sorted(members) == list(range(len(ranks)))
    expected = explain_stacks(nodes)
    mixed = [
        node(*chance.sample(one.ranks, len(one.ranks)), host=one.host, number=one.node_rank) for one in nodes
    ]
    chance.shuffle(mixed)
    assert explain_stacks(mixed) == expected
