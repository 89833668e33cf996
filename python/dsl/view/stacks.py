"""The taker, a process that finds out what the workers of this machine execute.

On stdin it gets a `Look` and a `RankStatus` for each worker, one a line. On stdout it answers with a
`RankStacks` for each worker, as soon as it is known, and ends. The agent starts a taker when somebody looks,
so it never waits for one itself, and a tool that hangs harms nothing.

Python stacks come from py-spy, which reads the memory of a worker and does not stop it: a process that stops
another one, and is killed in that instant, leaves it stopped. Only native stacks need a stop. The rest comes
from ``/proc``, also for a worker that py-spy cannot read.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeAlias

from dsl._record import Record, replace
from dsl.machine import peer_pid
from dsl.machine.kernel import read_fact
from dsl.model.codec import Lines, to_line
from dsl.model.observation import Frame, Look, RankStacks, RankStatus, ThreadStack
from dsl.view import kernel_view
from dsl.view.kernel_view import Task
from dsl.words import shortage

Take: TypeAlias = Callable[[RankStatus], RankStacks]
"""Finds out what a worker does."""

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
NO_PYTHON = "it is no Python process"
LONGEST_SOURCE = 1 << 20
"""Bytes of a source file that is read."""

DATA_LOADER = "torch/utils/data/dataloader.py"
MEETING = "init_process_group"
WAITS_FOR_CHILD = ("wait4", "waitid", "poll", "select", "read")

# What the program py-spy is asked for.
DUMP_S = 1.5
"""Most time for one stack."""
MOST_FRAMES = 48
"""Most frames of a thread in an answer: the innermost ones."""
LONGEST_NAME = 120
LONGEST_PATH = 300
MOST_BYTES = 16 << 20
"""A longer answer counts as none."""
INSTALL = "pip install py-spy"

# torch tells its last operations at a unix socket if TORCH_FR_BUFFER_SIZE is above 0, `SOCKET` is in the
# environment, and the program runs in `torch.distributed.elastic.control_plane.worker_main`.
SOCKET = "TORCH_WORKER_SERVER_SOCKET"
"""Variable with the path of the socket."""
ANSWER_S = 1.0

# Recorders of CPU and of GPU groups.
HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")

_IDLE = (
    *(ast.While, ast.If, ast.Pass, ast.Continue, ast.Break, ast.Expr),
    *(ast.Constant, ast.Name, ast.Compare, ast.BoolOp, ast.UnaryOp),
    *(ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop),
)
"""Nodes that call nothing and change nothing."""


def main() -> None:
    """Serve one look."""
    serve(lambda look: _Round(is_native=look.what == "native").take, AT_ONCE)


def serve(begin: Callable[[Look], Take], at_once: int) -> None:
    """Answer one look, with so many workers at once. If the agent dies, so does this process.

    ``begin`` returns what finds out about one worker.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    records = Lines(Look, RankStatus).feed(sys.stdin.buffer.read())
    look, ranks = records[0], records[1:]
    signal.alarm(LIFE_S + look.for_s)
    living = [one for one in ranks if one.pid]
    find = begin(look)
    saying = Lock()

    def say(stacks: RankStacks) -> None:
        with saying:
            sys.stdout.buffer.write(to_line(stacks))
            sys.stdout.buffer.flush()

    def take(rank: RankStatus) -> None:
        say(find(rank))

    for rank in ranks:
        if not rank.pid:
            say(RankStacks(rank.rank, rank.local_rank, 0))
    try:
        with ThreadPoolExecutor(at_once) as pool:
            for rank in living:
                pool.submit(take, rank)
    except RuntimeError:  # no more threads
        for rank in living:
            take(rank)


class _Round:
    """One look at some workers: what was known of all of them when it began."""

    def __init__(self, *, is_native: bool) -> None:
        self._is_native = is_native
        self._begin_s = time.monotonic()
        self._processes = kernel_view.read_processes()
        self._tick = 1 / os.sysconf("SC_CLK_TCK")

    def take(self, rank: RankStatus) -> RankStacks:
        """Find out what a worker executes."""
        below = kernel_view.descendants(rank.pid, self._processes.values())
        target = python_of(rank.pid, below)
        threads: Sequence[PythonThread] = ()
        problem = NO_PYTHON
        if target:
            threads, problem = dump(target, self._left_s(STACKS_BY_S))
        pid = target or rank.pid
        if self._is_native and threads:
            native, why = dump_native(pid, self._left_s(NATIVE_BY_S))
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
                threads = dump(process.tid, self._left_s(STACKS_BY_S))[0]
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


def python_of(pid: int, below: Sequence[Task]) -> int:
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
    return is_bare_loop(read_source(path), line)


@functools.cache
def read_source(path: str) -> str:
    """The text of a source file; empty: it cannot be read, or is too long."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    with open(fd, "rb") as file:
        source = file.read(LONGEST_SOURCE + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    return source.decode("utf-8", "replace") if len(source) <= LONGEST_SOURCE else ""


def _collective(pid: int, shown: Sequence[ThreadStack]) -> Mapping[str, object]:
    """Fields of `RankStacks` about its process group."""
    fields: dict[str, object] = {}
    names = ("MASTER_ADDR", "MASTER_PORT", SOCKET)
    known = kernel_view.variables(pid, names)
    if any(frame.function == MEETING for thread in shown for frame in thread.frames):
        fields["store"] = f"{known.get('MASTER_ADDR', '')}:{known.get('MASTER_PORT', '')}"
    path = known.get(SOCKET)
    if path and shown and shown[0].state not in "TtD":
        with contextlib.suppress(OSError, ValueError):
            last = last_collective(os.path.join(f"/proc/{pid}/cwd", path))
            fields |= last or {}
    return fields


class PythonThread(Record):
    """A thread that has run Python."""

    tid: int
    """Its thread id in the kernel; 0: unknown."""
    name: str
    """Its name in Python."""
    frames: tuple[Frame, ...]
    """Innermost first."""
    signal: int
    """It executes its handler of this signal; 0: none."""


def dump(pid: int, within_s: float) -> tuple[Sequence[PythonThread], str]:
    """The threads of a process, which is not stopped for it; or none, and a clause that says why.

    ``within_s``: how long this may take, `DUMP_S` at most.
    """
    why = "there was no time to look at its Python stack"
    # The arguments of functions show a signal handler. A process that runs may change them as we read.
    threads: Sequence[PythonThread] = ()
    for options in (("--locals",), (), ()):
        if within_s <= 0:
            break
        threads, why = _dump(pid, ("--nonblocking", *options), min(within_s, DUMP_S))
        if threads or not why.startswith("py-spy says"):
            break
    return threads, why


def dump_native(pid: int, within_s: float) -> tuple[Sequence[PythonThread], str]:
    """The same with C frames. The process is stopped for some milliseconds."""
    if read_state(pid) in "Tt" or within_s <= 0:
        return (), "its C frames are unknown: it is stopped" if within_s > 0 else "its C frames took too long"
    threads, why = _dump(pid, ("--native", "--full-filenames"), within_s)
    if read_state(pid) == "T":
        # py-spy was killed while it held the process.
        os.kill(pid, 18)
    return threads, why and f"its C frames are unknown: {why}"


def read_state(pid: int) -> str:
    """The kernel's letter for a process; ``X`` if there is none."""
    return read_fact(f"/proc/{pid}/stat").rpartition(") ")[2][:1] or "X"


def _dump(pid: int, options: Sequence[str], within_s: float) -> tuple[Sequence[PythonThread], str]:
    output, why = py_spy(("dump", "--json", *options, "--pid", str(pid)), within_s)
    try:
        return [_thread(one) for one in json.loads(output or "[]")], why
    except (ValueError, KeyError, TypeError) as error:
        return (), f"py-spy cannot be used: {error}"


def py_spy(
    words: Sequence[str], within_s: float, file: int | None = None, write_s: float = 0.0
) -> tuple[bytes, str]:
    """What py-spy writes to stdout; or nothing, and a clause that says why.

    ``file``: a descriptor for it; ``write_s``: how long it has after ``within_s`` to write what it has found.
    """
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    program = shutil.which("py-spy", path=places)
    if program is None:
        return b"", f"py-spy is not installed here: {INSTALL}"
    fds, pipe = () if file is None else (file,), subprocess.PIPE
    found, told, is_late = b"", b"", False
    try:
        with subprocess.Popen([program, *words], stdout=pipe, stderr=pipe, pass_fds=fds) as process:
            for signum, wait_s in ((signal.SIGINT, within_s), (signal.SIGKILL, write_s)):
                try:
                    found, told = process.communicate(timeout=wait_s)
                    break
                except subprocess.TimeoutExpired:
                    is_late = True
                    process.send_signal(signum)
    except (OSError, ValueError) as error:
        return b"", f"py-spy cannot be used: {shortage(error) or error}"
    if is_late and process.returncode:
        return b"", f"py-spy gave no answer within {within_s:.1f} s"
    if process.returncode == 0 and len(found) <= MOST_BYTES:
        return found, ""
    return b"", _reason(told.decode("utf-8", "replace"))


def _reason(text: str) -> str:
    """A clause for the words of py-spy."""
    if "ermission" in text or "not permitted" in text:
        scope = read_fact("/proc/sys/kernel/yama/ptrace_scope")
        if scope == "1":
            return (
                "kernel.yama.ptrace_scope is 1, and a wrapper started the process: let the wrapper `exec` "
                "Python, or run `sysctl kernel.yama.ptrace_scope=0`"
            )
        if scope in ("2", "3"):
            return f"kernel.yama.ptrace_scope is {scope}, which forbids it: root has to set it to 1"
        return "py-spy may not read the process: a container needs the capability SYS_PTRACE for that"
    if "python version" in text:
        return NO_PYTHON
    lines = [line.strip() for line in text.partition("Stack backtrace")[0].splitlines() if line.strip()]
    return f"py-spy says: {lines[-1] if lines else 'nothing'}"


def _thread(found: dict[str, Any]) -> PythonThread:
    frames = found["frames"]
    shown = frames[:MOST_FRAMES]
    return PythonThread(
        tid=int(found["os_thread_id"] or 0),
        name=str(found["thread_name"] or "")[:LONGEST_NAME],
        frames=tuple([_frame(one) for one in shown]),
        signal=max([_signal(one) for one in frames], default=0),
    )


def _frame(found: dict[str, Any]) -> Frame:
    name, path = str(found["name"])[:LONGEST_NAME], str(found["filename"])[-LONGEST_PATH:]
    return Frame(name, path, max(int(found["line"]), 0))


def _signal(frame: dict[str, Any]) -> int:
    """Number of the signal if a frame is a handler: its arguments are a number and the interrupted frame."""
    arguments = [str(one["repr"]) for one in frame["locals"] or () if one["arg"]][-2:]
    if len(arguments) < 2 or not arguments[1].startswith("<frame at"):
        return 0
    return int(arguments[0]) if arguments[0].isdecimal() and 0 < int(arguments[0]) <= 64 else 0


def last_collective(path: str) -> Mapping[str, object] | None:
    """The fields of `RankStacks` about it; None: no operation is recorded.

    Raises:
        OSError: the worker does not answer, or another process than one of this user here does.
        ValueError: its answer is not torch's.
    """
    newest: tuple[int, dict[str, object]] | None = None
    for handler in HANDLERS:
        for entry in _entries(path, handler)[-1:]:
            name = str(entry.get("profiling_name", "")).rpartition(":")[2]
            number, made = entry.get("collective_seq_id", 0), entry.get("time_created_ns", 0)
            group = entry.get("process_group") or ("",)
            if name and isinstance(number, int) and isinstance(made, int) and isinstance(group, list):
                fields = {"collective": name, "sequence": max(number, 0), "process_group": str(group[-1])}
                newest = max(newest or (0, {}), (made, fields), key=lambda one: one[0])
    return newest[1] if newest else None


def _entries(path: str, handler: str) -> list[dict[str, object]]:
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection("localhost", timeout=ANSWER_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(ANSWER_S)
        connection.sock.connect(path)
        peer_pid(connection.sock.fileno())
        connection.request("POST", f"/handler/{handler}")
        found = json.loads(connection.getresponse().read(MOST_BYTES))
    except HTTPException as error:
        raise ValueError(str(error)) from None
    finally:
        connection.close()
    entries = found.get("entries", []) if isinstance(found, dict) else []
    return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []


def is_bare_loop(source: str, line: int) -> bool:
    """Whether the innermost loop around a line is a ``while`` whose test and body do nothing."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.While, ast.For, ast.AsyncFor))
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    innermost = max(loops, key=lambda node: (node.lineno, node.col_offset), default=None)
    return innermost is not None and all(isinstance(node, _IDLE) for node in ast.walk(innermost))
