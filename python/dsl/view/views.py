"""Answers views into a running job. Imported when somebody looks; each view has a thread of its own.

The main thread of the agent only takes the callers. What a view does or leaves undone delays only itself.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dsl import EngineError, Supervisor, __version__
from dsl._core import vitals
from dsl._record import Record
from dsl.agent.elsewhere import Elsewhere
from dsl.devices.nvidia import GpuUse
from dsl.errors import JobFormatError
from dsl.model.codec import Lines, to_line
from dsl.model.job import NodePlan, WorkerPlan
from dsl.model.observation import (
    Follow,
    Followed,
    JobView,
    Look,
    Looked,
    NoAnswer,
    NodePulse,
    NodeStacks,
    NodeStatus,
    RankPulse,
    RankStatus,
    Relayed,
    Signalled,
    SignalRank,
    gather,
)
from dsl.report.speak import optional, say
from dsl.words import printable, shortage, start_thread

MOST_VIEWS = 16
"""Views into a job at a time. Further ones are turned away."""

MOST_WORDS = 64
IDLE_S = 600.0
"""A view that asks nothing for so long is ended."""
SEND_S = 10.0
"""A view that takes nothing for so long is ended."""
CHUNK = 1 << 16
PART = 128
"""Ranks in one message, which may have a mebibyte."""

LONGEST_SAID = 160
"""Characters of a line of output."""

LONGEST_LOG = 500
"""Characters of the path of a log file."""

MASK = "CUDA_VISIBLE_DEVICES"


class State(Record):
    """Where the job of an agent stands."""

    plan: NodePlan
    """The plan of the present attempt."""
    started_ns: int
    """CLOCK_REALTIME when the first attempt began."""
    begin_s: float
    """`time.monotonic` when the present attempt began."""


class Views:
    """The views into the job of one agent."""

    def __init__(
        self,
        supervisor: Supervisor,
        state: Callable[[], State],
        command_pid: int,
        elsewhere: Elsewhere | None,
    ) -> None:
        """``state`` returns where the job stands."""
        from threading import Semaphore

        self._supervisor, self._state = supervisor, state
        self._command_pid, self._elsewhere = command_pid, elsewhere
        self._gpus = GpuUse()
        self._waits: dict[int, int] = {}  # by pid, when last sampled
        self._free = Semaphore(MOST_VIEWS)

    def welcome(self) -> None:
        """Serve those who have called."""
        import socket

        for fd in self._supervisor.callers():
            caller = socket.socket(fileno=fd)
            self._begin(partial(self._serve, caller), partial(self._refuse, caller), caller.close)

    def answer(self, look: Look | SignalRank, reply: Callable[[object], None]) -> None:
        """Answer the question of the head of the job."""

        def tell() -> None:
            for answer in self._own(look):
                if isinstance(answer, NodeStatus):
                    line = to_line(answer).decode("ascii").rstrip("\n")
                    reply(Relayed(look.number, line))
                else:
                    reply(answer)
            reply(Looked(look.number))

        self._begin(tell, lambda _: reply(Looked(look.number, (self._state().plan.host,))))

    def ask(self, look: Look) -> tuple[list[Any], tuple[str, ...]]:
        """The answers of all nodes of the job, as `gather` puts them together."""
        return gather(map(_read, self._all(look)))

    def explain(self) -> None:
        """Tell the user, who has pressed Ctrl-backslash once, what the workers do."""

        def tell() -> None:
            command = self._state().plan.command
            say(command, "Ctrl-\\: looking at what the workers do; press it again within 5 s to end the job")
            from dsl.view.explain import explain_stacks

            for line in explain_stacks(*self.ask(Look(0, "stacks"))):
                say(command, line)

        self._begin(tell, lambda _: None)

    def _begin(
        self,
        work: Callable[[], None],
        refuse: Callable[[str], None],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """Do it on a thread of its own. ``refuse`` gets the reason if that fails; ``close`` is last."""
        command, what = self._state().plan.command, "somebody who looks at this job gets no answer"

        def end() -> None:
            self._free.release()
            close()

        def run() -> None:
            try:
                optional(command, what, lambda: _unless_over(work), refuse)
            finally:
                end()

        def turn_away(why: str) -> None:
            refuse(why)
            end()

        if self._free.acquire(blocking=False):
            optional(command, what, lambda: start_thread(run, "dsl-view"), turn_away)
        else:
            refuse(f"{MOST_VIEWS} others look at it already")
            close()

    def _refuse(self, caller: socket.socket, why: str) -> None:
        """Say what the job is, and why there is no more to be seen."""
        with suppress(OSError):  # it has gone, or takes nothing: nobody waits for it
            caller.setblocking(False)
            caller.sendall(to_line(self.view()) + to_line(NoAnswer(why)))

    def _serve(self, caller: socket.socket) -> None:
        def send(message: object) -> None:
            caller.settimeout(SEND_S)
            if isinstance(message, Relayed):
                # It stays one line, whatever the other host has sent. The view checks what it says.
                caller.sendall(message.line.replace("\n", "").encode("ascii", "replace") + b"\n")
            else:
                caller.sendall(to_line(message))

        send(self.view())
        lines = Lines(Look, SignalRank, Follow)
        while True:
            caller.settimeout(IDLE_S)
            data = caller.recv(CHUNK)
            if not data:
                return
            for asked in lines.feed(data):
                if isinstance(asked, Follow):
                    self._follow(caller)
                    return
                for answer in self._all(asked):
                    send(answer)

    def _follow(self, caller: socket.socket) -> None:
        """Copy the output to a view until it goes."""
        tee: Callable[[int], None] = self._supervisor.tee
        problem = ""
        workers = self._state().plan.workers
        routes = [one for worker in workers for one in (worker.stdout, worker.stderr) if one is not None]
        if self._elsewhere is not None and self._elsewhere.tee is not None:
            tee = self._elsewhere.tee
        elif not any(route.console is not None for route in routes):
            problem = (
                "its workers write past dsl to where it was started, unless you give it --tag-output always"
                if any(route.inherit for route in routes)
                else "it shows no output of its workers: --redirects keeps it in files, or a filter hides it"
            )
        caller.sendall(to_line(Followed(problem)))
        if not problem:
            tee(caller.fileno())
            caller.settimeout(None)
            while caller.recv(CHUNK):
                continue

    def view(self) -> JobView:
        """What the job is."""
        state = self._state()
        plan = state.plan
        elsewhere = self._elsewhere
        meeting, workers, nodes = plan.meeting, plan.meeting.world_size, 1
        if elsewhere is not None:
            meeting = elsewhere.meeting or meeting
            workers = workers if elsewhere.workers is None else elsewhere.workers
            nodes = elsewhere.nodes
        return JobView(
            version=__version__,
            command=plan.command,
            words=_program(plan)[:MOST_WORDS],
            pid=self._command_pid,
            cwd=_cwd(),
            host=os.uname().nodename,
            started_ns=state.started_ns,
            attempt=meeting.attempt,
            restarts=meeting.restarts,
            nodes=nodes,
            workers=workers,
            is_whole=elsewhere is not None or plan.meeting.world_size == len(plan.workers),
        )

    def _all(self, look: Look | SignalRank) -> Iterator[object]:
        if self._elsewhere is None:
            yield from self._own(look)
            yield Looked(look.number)
            return
        others = self._elsewhere.look(look)
        if self._elsewhere.has_own():
            yield from self._own(look)
        yield from others

    def _own(self, look: Look | SignalRank) -> Iterator[object]:
        """What the workers of this node do."""
        state = self._state()
        plan = state.plan
        if isinstance(look, SignalRank):
            if self._has_signalled(look, plan):
                yield Signalled(look.number)
            return
        pids = self._supervisor.pids() or [0] * len(plan.workers)  # between two attempts there are none
        if look.what == "status":
            yield from self._statuses(look, state, pids)
        elif look.what == "pulse":
            from dsl.view.kernel_view import pulses

            pairs = zip(plan.workers, pulses(pids), strict=False)
            marks = tuple([RankPulse(worker.local_rank, mark) for worker, mark in pairs])
            yield NodePulse(look.number, plan.meeting.node_rank, plan.host, plan.meeting.attempt, marks)
        else:
            from dsl.view.lookout import take_stacks

            ranks = [
                RankStatus(worker.rank, worker.local_rank, pid)
                for worker, pid in zip(plan.workers, pids, strict=False)
            ]
            for stacks in take_stacks(look, ranks):
                if stacks.sampled is not None:
                    from dsl.view.stragglers import spent_by

                    spent = spent_by(plan.host, stacks)
                    self._waits[stacks.pid] = round(spent.waits * 100) if spent else -1
                yield NodeStacks(look.number, plan.meeting.node_rank, plan.host, (stacks,))

    def _has_signalled(self, asked: SignalRank, plan: NodePlan) -> bool:
        """Whether the worker is one of ours, and still has the pid that the view has seen."""
        if asked.node_rank != plan.meeting.node_rank:
            return False
        for index, (worker, pid) in enumerate(zip(plan.workers, self._supervisor.pids(), strict=False)):
            if worker.local_rank == asked.local_rank and pid and pid == asked.pid:
                self._supervisor.signal(asked.signum, index)
                return True
        return False

    def _statuses(self, look: Look, state: State, pids: Sequence[int]) -> Iterator[NodeStatus]:
        """The answers to a question, with all workers of the node."""
        plan, meeting = state.plan, state.plan.meeting
        lines = self._supervisor.last_lines()
        masks = [(worker.local_rank, worker.env.get(MASK, plan.env.get(MASK))) for worker in plan.workers]
        age_ms = int((time.monotonic() - state.begin_s) * 1000)
        rows = zip(plan.workers, pids, vitals(pids), self._gpus.of(pids, masks), strict=False)
        found = [
            RankStatus(
                worker.rank,
                worker.local_rank,
                pid if uses else 0,
                *(uses or ("", 0, 0, 0)),
                printable(lines.get(index, b"").decode("utf-8", "replace")).strip()[:LONGEST_SAID],
                *gpu,
                _log(worker)[:LONGEST_LOG] if look.with_logs else "",
                self._waits.get(pid, -1),
            )
            for index, (worker, pid, uses, gpu) in enumerate(rows)
        ]
        for first in range(0, len(found), PART):
            part = tuple(found[first : first + PART])
            yield NodeStatus(
                look.number, meeting.node_rank, plan.host, meeting.attempt, part, meeting.restarts, age_ms
            )


def _unless_over(work: Callable[[], None]) -> None:
    """Do it. That the view or the job ends meanwhile is no error."""
    try:
        work()
    except (OSError, EngineError, JobFormatError) as error:
        if shortage(error):
            raise


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it is gone


def _read(answer: object) -> object:
    """An answer; of one that only views read, what it says. One that cannot be read counts as none."""
    if not isinstance(answer, Relayed):
        return answer
    try:
        found = Lines(NodeStatus).feed(answer.line.replace("\n", "").encode("ascii", "replace") + b"\n")
    except JobFormatError:
        return None
    return found[0] if found else None


def _program(plan: NodePlan) -> tuple[str, ...]:
    """What the user runs, with its arguments: no interpreter, and a function alone."""
    program = plan.job.program
    words = (program.script, *program.args)
    return words[words.index(program.name) :] if program.name in words else (program.name,)


def _log(worker: WorkerPlan) -> str:
    """The log file to which a worker has written last; empty: it has none."""
    found = []
    for route in (worker.stdout, worker.stderr):
        if route is not None and route.path is not None:
            try:
                about = os.stat(route.path)
            except OSError:
                continue
            found.append((about.st_size > 0, about.st_mtime_ns, route.path))
    return max(found)[2] if found else ""
