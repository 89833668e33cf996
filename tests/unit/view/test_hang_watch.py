"""What counts as a hang: looks in, verdict out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.view.test_explain import C10D, LOADER, rank_of

from dsl._record import replace
from dsl.model.observation import Frame, NodePulse, NodeStacks, RankPulse, RankStacks, ThreadStack
from dsl.view.hang_watch import SLACK_S, HangWatch, odd_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 80.0
CUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
TRAIN = "/home/u/train.py"
LINE = Frame("train", TRAIN, 88)


def waiting(rank: int, **fields: Any) -> RankStacks:
    """A rank in a collective operation."""
    return rank_of(rank, Frame("all_reduce", C10D, 4000), LINE, **{"call": "futex", **fields})


def locked(rank: int, **fields: Any) -> RankStacks:
    """A rank that waits for a lock."""
    return rank_of(rank, LINE, **{"call": "futex", **fields})


class Job:
    """A job of which all looks find what ``rank`` makes of the seconds so far, and of the number of the rank."""

    def __init__(self, rank: Callable[[float, int], RankStacks], ranks: int = 4) -> None:
        self.watch = HangWatch(TIMEOUT_S, 0.0)
        self.rank, self.ranks = rank, ranks
        self.now_s = 0.0
        self.marks = ["0"] * ranks
        self.missing: tuple[str, ...] = ()
        self.looks: list[str] = []

    def wait(self, duration_s: float) -> list[float]:
        """Look on for so long. The times of the hangs that were said."""
        found, end_s = [], self.now_s + duration_s
        while self.now_s < end_s:
            self.now_s += self.watch.interval_s
            pulse = NodePulse(0, 0, "n", 0, tuple(RankPulse(at, mark) for at, mark in enumerate(self.marks)))
            if self.watch.hear_pulses(self.now_s, [pulse], self.missing):
                self.looks.append(self.watch.sight)
                ranks = tuple(self.rank(self.now_s, number) for number in range(self.ranks))
                if self.watch.hear_stacks(self.now_s, [NodeStacks(0, 0, "n", ranks)], self.missing):
                    found.append(self.now_s)
        return found


def with_odd(odd: Callable[[float], RankStacks]) -> Job:
    """A job of which rank 2 does this, and the others wait in a collective operation."""
    return Job(lambda now_s, rank: odd(now_s) if rank == 2 else waiting(rank))


def test_a_hang_is_said_once_when_the_time_is_over() -> None:
    job = with_odd(lambda _: locked(2))
    assert job.wait(10 * TIMEOUT_S) == [TIMEOUT_S + job.watch.interval_s]
    assert job.watch.still_s >= TIMEOUT_S


def test_the_stacks_are_only_looked_at_when_the_job_was_still_for_half_the_time() -> None:
    job = with_odd(lambda _: locked(2))
    job.wait(TIMEOUT_S / 2)
    assert job.looks == []
    job.wait(TIMEOUT_S)
    assert job.looks


def test_after_progress_another_hang_is_said() -> None:
    job = with_odd(lambda _: locked(2))
    assert len(job.wait(2 * TIMEOUT_S)) == 1
    job.marks[3] = "1"
    assert job.wait(TIMEOUT_S) == []
    assert len(job.wait(TIMEOUT_S)) == 1


def test_a_line_that_moves_after_a_hang_is_progress() -> None:
    job = with_odd(
        lambda now_s: locked(2) if now_s < 200 else rank_of(2, replace(LINE, line=90), call="futex")
    )
    assert len(job.wait(10 * TIMEOUT_S)) == 2


def ended(_: float) -> RankStacks:
    return RankStacks(2, 2, 0)


def polling(now_s: float) -> RankStacks:
    """It waits for its data loader, and looks every five seconds."""
    return rank_of(2, Frame("_try_get_data", LOADER, 5), LINE, call="poll", switches=int(now_s / 5))


def bare(now_s: float) -> RankStacks:
    line = Frame("train", TRAIN, 88 + int(now_s) % 2)
    return rank_of(2, line, state="R", cpu_ms=int(now_s * 1000), is_bare_loop=True)


HANGS = {
    "lock": lambda _: locked(2),
    "other collective": lambda _: rank_of(2, Frame("barrier", C10D, 1), LINE, call="futex"),
    "store": lambda now_s: rank_of(
        2, Frame("init_process_group", C10D, 1), LINE, call="clock_nanosleep", switches=int(now_s * 10)
    ),
    "stopped": lambda _: locked(2, state="T"),
    "state D": lambda _: rank_of(2, LINE, state="D", call="openat(/nfs/a)"),
    "log on a dead file system": lambda _: rank_of(2, LINE, state="D", call="write(stdout)"),
    "stdin": lambda _: rank_of(2, LINE, call="read(stdin)"),
    "ended": ended,
    "no py-spy": lambda _: rank_of(2, call="futex"),
    "data loader": polling,
    "spins in a collective": lambda now_s: waiting(2, state="R", cpu_ms=int(now_s * 1000)),
    "waits for the GPU": lambda now_s: rank_of(
        2, Frame("cuStreamSynchronize", CUDA), LINE, state="R", cpu_ms=int(now_s * 1000)
    ),
    "bare loop": bare,
    "a thread that sleeps again and again": lambda now_s: locked(
        2, threads=[ThreadStack("monitor", (LINE,), call="clock_nanosleep", switches=int(now_s))]
    ),
    "gloo's threads": lambda now_s: locked(2, cpu_ms=int(now_s * 20)),
}


@pytest.mark.parametrize("kind", HANGS)
def test_a_rank_that_gets_nowhere_hangs_the_job(kind: str) -> None:
    assert len(with_odd(HANGS[kind]).wait(3 * TIMEOUT_S)) == 1


def child(**fields: Any) -> ThreadStack:
    return ThreadStack("child", pid=7, **fields)


HEALTHY: dict[str, Callable[[float], RankStacks]] = {
    "computes in one line": lambda now_s: rank_of(2, LINE, state="R", cpu_ms=int(now_s * 1000)),
    "computes in short": lambda now_s: locked(2, cpu_ms=int(now_s * 60)),
    "computes inside a collective": lambda now_s: rank_of(
        2,
        Frame("dumps", "/usr/lib/python3.11/pickle.py", 3),
        Frame("all_gather_object", C10D, 1),
        LINE,
        state="R",
        cpu_ms=int(now_s * 1000),
    ),
    "moves on": lambda now_s: rank_of(2, replace(LINE, line=int(now_s)), call="futex"),
    "downloads": lambda now_s: rank_of(2, LINE, call="recvfrom(10.0.0.1:80)", switches=int(now_s / 9)),
    "sleeps": lambda _: rank_of(2, LINE, call="clock_nanosleep"),
    "waits for a pager": lambda _: rank_of(2, LINE, call="write(stdout)"),
    "a child sleeps": lambda _: locked(2, naps=True),
    "a child computes": lambda _: locked(2, threads=[child(cpu_share=1.0)]),
    "a child is woken": lambda now_s: locked(2, threads=[child(call="recvfrom", switches=int(now_s))]),
    "a thread moves on": lambda now_s: locked(
        2, threads=[ThreadStack("t", (Frame("save", TRAIN, int(now_s)),))]
    ),
    "a thread downloads": lambda now_s: locked(
        2, threads=[ThreadStack("t", (LINE,), call="recvfrom", switches=int(now_s))]
    ),
    "held by a debugger": lambda _: locked(2, state="t"),
    "in pdb": lambda _: rank_of(
        2, Frame("cmdloop", "/usr/lib/python3.11/pdb.py", 3), LINE, call="read(stdin)"
    ),
    "no thread known": lambda _: RankStacks(2, 2, 1002, state="S"),
    "started again": lambda now_s: replace(locked(2), pid=int(now_s)),
    "asks for news too often": lambda now_s: replace(
        polling(now_s), threads=(replace(polling(now_s).threads[0], switches=int(now_s * 10)),)
    ),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_rank_that_may_get_somewhere_is_no_hang(kind: str) -> None:
    assert with_odd(HEALTHY[kind]).wait(5 * TIMEOUT_S) == []


def test_a_job_that_the_user_has_stopped_does_not_hang() -> None:
    assert Job(lambda _, rank: locked(rank, state="T")).wait(5 * TIMEOUT_S) == []


def test_between_two_attempts_no_job_hangs() -> None:
    job = Job(lambda _, rank: locked(rank))
    job.marks = [""] * 4
    assert job.wait(5 * TIMEOUT_S) == []


def test_a_host_that_does_not_answer_is_no_hang() -> None:
    job = Job(lambda _, rank: locked(rank))
    job.missing = ("worker-2",)
    assert job.wait(5 * TIMEOUT_S) == []


def test_the_time_that_we_were_stopped_does_not_count() -> None:
    job = Job(lambda _, rank: locked(rank))
    job.wait(TIMEOUT_S * 0.7)
    job.now_s += 5 * TIMEOUT_S + SLACK_S
    assert job.wait(TIMEOUT_S * 0.7) == []


@given(st.lists(st.floats(0.1, 0.9), max_size=12))
def test_no_job_that_writes_within_each_timeout_hangs(pauses: list[float]) -> None:
    job = Job(lambda _, rank: locked(rank))
    for number, pause in enumerate(pauses):
        job.marks[number % 4] = f"at {job.now_s}"
        assert job.wait(pause * TIMEOUT_S - job.watch.interval_s) == []


@given(
    st.lists(st.sampled_from([*HANGS.values()]), min_size=1, max_size=3),
    st.lists(st.sampled_from([*HEALTHY.values()]), max_size=2),
    st.randoms(use_true_random=False),
)
def test_a_job_hangs_only_if_no_rank_gets_anywhere(
    hanging: list[Callable[[float], RankStacks]],
    healthy: list[Callable[[float], RankStacks]],
    chance: Any,
) -> None:
    kinds = [*hanging, *healthy]
    chance.shuffle(kinds)

    def rank(now_s: float, number: int) -> RankStacks:
        return replace(kinds[number](now_s), rank=number, local_rank=number)

    job = Job(rank, len(kinds))
    if all(kind in (ended, HANGS["stopped"]) for kind in kinds):
        return
    assert bool(job.wait(3 * TIMEOUT_S)) is (not healthy)


@pytest.mark.parametrize(
    "odd, expected",
    [
        (locked(2), (2,)),
        (RankStacks(2, 2, 0), (0,)),
        (rank_of(2, LINE, state="D", call="openat(/nfs/a)"), (2, 0)),
        (waiting(2), (0,)),
    ],
)
def test_the_ranks_that_do_something_else_are_ended_if_a_signal_ends_them(
    odd: RankStacks, expected: tuple[int, ...]
) -> None:
    ranks = [odd if rank == 2 else waiting(rank) for rank in range(4)]
    assert odd_ranks([NodeStacks(0, 0, "n", tuple(ranks))]) == expected
