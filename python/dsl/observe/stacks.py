"""The taker, a process that finds out what the workers of this machine execute.

On stdin it gets a `Look` and a `RankStatus` for each worker, one a line. On stdout it answers with a
`RankStacks` for each worker, as soon as it is known, and ends. The agent starts a taker when somebody looks,
so it never waits for one itself, and a tool that hangs harms nothing.

Python stacks come from py-spy, which reads the memory of a worker and does not stop it: a process that stops
another one, and is killed in that instant, leaves it stopped. Only native stacks need a stop. The rest comes
from ``/proc``, also for a worker that py-spy cannot read.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import stat
import sys
import threading
import time

from dsl._record import replace
from dsl.model.codec import to_line
from dsl.model.lines import Lines
from dsl.model.observation import Look, RankStacks, RankStatus, ThreadStack
from dsl.observe import flight_recorder, kernel_view, py_spy
from dsl.observe.bare_loop import is_bare_loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.observe.kernel_view import Task
    from dsl.observe.py_spy import PythonThread

PR_SET_PDEATHSIG = 1
LIFE_S = 6
"""The kernel ends a taker after this time."""
STACKS_BY_S = 3.0
NATIVE_BY_S = 4.0
"""Stacks that are not there by then are left out: the kernel's view of all workers comes in time."""
LOOK_S = 0.2
"""Time between two looks at the CPU time."""
AT_ONCE = 8
"""Workers whose stacks are taken at the same time."""
MOST_THREADS = 24
"""Most threads of a worker in an answer."""
MOST_CHILDREN = 4
"""Python descendants of a worker at whose stacks we look."""
BUSY = 0.1
"""A descendant that uses more of a CPU works."""
LONGEST_SOURCE = 1 << 20
"""Bytes of a source file that is read."""

DATA_LOADER = "torch/utils/data/dataloader.py"
MEETING = "init_process_group"
WAITS_FOR_CHILD = ("wait4", "waitid", "poll", "select", "read")


def main() -> None:
    """Serve one look. If the agent dies, so does this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(LIFE_S)
    records = Lines(Look, RankStatus).feed(sys.stdin.buffer.read())
    look, ranks = records[0], records[1:]
    rounds = _Round([one for one in ranks if one.pid], is_native=look.what == "native")
    saying = threading.Lock()

    def say(stacks: RankStacks) -> None:
        with saying:
            sys.stdout.buffer.write(to_line(stacks))
            sys.stdout.buffer.flush()

    for one in ranks:
        if not one.pid:
            say(RankStacks(one.rank, one.local_rank, 0))
    queue = list(reversed(rounds.ranks))

    def work() -> None:
        while True:
            try:
                one = queue.pop()
            except IndexError:
                return
            say(rounds.take(one))

    others = [threading.Thread(target=work, daemon=True) for _ in range(AT_ONCE - 1)]
    with contextlib.suppress(RuntimeError):  # no more threads: those that there are do the work
        for thread in others:
            thread.start()
    work()
    for thread in others:
        if thread.ident is not None:
            thread.join()


class _Round:
    """One look at some workers: what was known of all of them when it began."""

    def __init__(self, ranks: Sequence[RankStatus], *, is_native: bool) -> None:
        self.ranks = ranks
        self._is_native = is_native
        self._begin_s = time.monotonic()
        self._processes = kernel_view.read_processes()
        self._tick = 1 / os.sysconf("SC_CLK_TCK")

    def take(self, rank: RankStatus) -> RankStacks:
        """Find out what a worker executes."""
        below = kernel_view.descendants(rank.pid, self._processes.values())
        target = _python_of(rank.pid, below)
        threads: Sequence[PythonThread] = ()
        problem = "it is no Python process"
        if target:
            threads, problem = py_spy.dump(target, self._left_s(STACKS_BY_S))
        pid = target or rank.pid
        if self._is_native and threads:
            native, why = py_spy.dump_native(pid, self._left_s(NATIVE_BY_S))
            threads, problem = native or threads, why
        shown = self._shown(pid, threads)
        if pid != rank.pid:
            below = kernel_view.descendants(pid, self._processes.values())
        shown += self._descendants(shown, below)
        found = RankStacks(rank.rank, rank.local_rank, rank.pid, problem=problem)
        return self._with_figures(replace(found, **_collective(pid, shown)), shown, pid, below)

    def _left_s(self, until_s: float) -> float:
        """Seconds until this time after the begin of the look."""
        return self._begin_s + until_s - time.monotonic()

    def _shown(self, pid: int, threads: Sequence[PythonThread]) -> list[ThreadStack]:
        """The threads of a process: those of Python, and others that work or hang; all if none is known."""
        calls = kernel_view.CallReader(pid)
        tasks = kernel_view.read_tasks(pid)
        # Before Python 3.11 py-spy knows no ids of threads.
        unknown = -1
        pythons = {}
        for one in threads:
            tid = one.tid or (pid if one.name == "MainThread" else unknown)
            pythons[tid] = one
            unknown -= tid < 0
        others = [tid for tid, task in tasks.items() if not threads or task.state in "RD"]
        chosen = sorted({*pythons, *others}, key=lambda tid: (tid != pid, tid not in pythons, tid))
        shown = []
        for tid in chosen[:MOST_THREADS]:
            task, python = tasks.get(tid), pythons.get(tid)
            shown.append(
                ThreadStack(
                    name=python.name if python else task.name if task else "",
                    frames=python.frames if python else (),
                    is_main=tid == pid,
                    state=task.state if task else "",
                    channel=kernel_view.channel(pid, tid) if task else "",
                    call=calls.read(tid) if task else "",
                    signal=python.signal if python else 0,
                    switches=kernel_view.switches(pid, tid) if task else 0,
                    is_bare_loop=tid == pid and _is_idle(task, python),
                )
            )
        return shown

    def _descendants(self, shown: Sequence[ThreadStack], below: Sequence[Task]) -> list[ThreadStack]:
        """Main threads of descendants that work, or for which the main thread waits."""
        main = shown[0] if shown else ThreadStack("")
        is_loading = any(frame.file.endswith(DATA_LOADER) for frame in main.frames)
        waits = is_loading or main.call.partition("(")[0] in WAITS_FOR_CHILD
        found: list[ThreadStack] = []
        for process in below:
            share = self._share_of(process, kernel_view.read_task(f"/proc/{process.tid}"))
            if len(found) == MOST_CHILDREN or not (waits or share > BUSY):
                continue
            threads: Sequence[PythonThread] = ()
            if kernel_view.is_python(process.tid):
                threads = py_spy.dump(process.tid, self._left_s(STACKS_BY_S))[0]
            main_of = self._shown(process.tid, threads)[:1]
            found += [
                replace(one, is_main=False, pid=process.tid, name=process.name, cpu_share=share)
                for one in main_of
            ]
        return found

    def _share_of(self, before: Task | None, now: Task | None) -> float:
        """CPUs that a thread or a process used since the look began."""
        if before is None or now is None:
            return 0.0
        span_s = max(time.monotonic() - self._begin_s, self._tick)
        return round(max(now.cpu_ticks - before.cpu_ticks, 0) * self._tick / span_s, 2)

    def _with_figures(
        self, found: RankStacks, shown: Sequence[ThreadStack], pid: int, below: Sequence[Task]
    ) -> RankStacks:
        """Add what the kernel counted between the begin of the look and now."""
        time.sleep(max(self._left_s(LOOK_S), 0.0))
        now = kernel_view.read_task(f"/proc/{pid}")
        before = self._processes.get(pid)
        if now is None or now.state in "ZX":
            return replace(found, pid=0, threads=(), problem="")
        share = self._share_of(before, now)
        ticks = now.cpu_ticks
        for process in below:
            later = kernel_view.read_task(f"/proc/{process.tid}")
            share += self._share_of(process, later)
            ticks += later.cpu_ticks if later else 0
        faults = now.major_faults - before.major_faults if before else 0
        span_s = time.monotonic() - self._begin_s
        return replace(
            found,
            threads=tuple(shown),
            state=now.state,
            cpu_share=min(share, 1e6),
            cpu_ms=int(ticks * self._tick * 1000),
            naps=any(kernel_view.naps(process.tid) for process in below),
            major_faults=int(max(faults, 0) / span_s),
        )


def _python_of(pid: int, below: Sequence[Task]) -> int:
    """The Python process of a worker: itself, or the nearest below a wrapper such as a shell; 0: none."""
    return next((one for one in (pid, *[process.tid for process in below]) if kernel_view.is_python(one)), 0)


def _is_idle(task: Task | None, python: PythonThread | None) -> bool:
    """Whether a thread runs, and its source says that it does nothing."""
    if task is None or task.state != "R" or python is None or not python.frames:
        return False
    frame = next((one for one in python.frames if one.line), python.frames[0])
    return _is_bare_loop(frame.file, frame.line)


@functools.cache  # many ranks are at the same line
def _is_bare_loop(path: str, line: int) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return False
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        source = file.read(LONGEST_SOURCE + 1)
    return len(source) <= LONGEST_SOURCE and is_bare_loop(source.decode("utf-8", "replace"), line)


def _collective(pid: int, shown: Sequence[ThreadStack]) -> Mapping[str, object]:
    """Fields of `RankStacks` about its process group."""
    fields: dict[str, object] = {}
    names = ("MASTER_ADDR", "MASTER_PORT", flight_recorder.SOCKET)
    known = kernel_view.variables(pid, names)
    if any(frame.function == MEETING for thread in shown for frame in thread.frames):
        fields["store"] = f"{known.get('MASTER_ADDR', '')}:{known.get('MASTER_PORT', '')}"
    path = known.get(flight_recorder.SOCKET)
    if path and shown and shown[0].state not in "TtD":
        with contextlib.suppress(OSError, ValueError):
            last = flight_recorder.last_collective(os.path.join(f"/proc/{pid}/cwd", path))
            fields |= last or {}
    return fields
