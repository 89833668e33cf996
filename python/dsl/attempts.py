"""Runs a group of workers to its end, once, and says whether it is worth another try."""

from __future__ import annotations

import sys
import time

from dsl import Ended, Exited
from dsl.spec import launch_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Event, Exit, Supervisor
    from dsl.report.failures import Failure

    Listener = Callable[[Event, int], None]
    from dsl.model import NodePlan

CRASH_LOOP_S = 60.0
"""A worker that fails sooner after its start has hardly made progress."""

REQUEUE_CODE = 75
"""Exit code of a job that was preempted (``EX_TEMPFAIL`` of sysexits.h): start it again."""


class Attempt:
    """How a group of workers ended. ``begin_s`` is `time.monotonic` just before its first start."""

    def __init__(
        self, plan: NodePlan, exits: Sequence[Exit], ended: Ended, begin_s: float, duration_s: float
    ) -> None:
        self.plan = plan
        self.exits = exits
        self.ended = ended
        self.begin_s = begin_s
        self.duration_s = duration_s
        self._failures: list[Failure] | None = None

    def cause(self) -> Exit | None:
        """The failure that the others follow from; None if no worker failed by itself."""
        failures = self.failures()
        if not failures:
            return self.ended.first_failure
        from dsl.report.failures import root_cause

        order = root_cause(failures).order
        return next(exit_ for exit_ in self.exits if exit_.order == order)

    def failures(self) -> list[Failure]:
        """Workers that failed by themselves, if they were told where to leave an account of it."""
        if self.ended.first_failure is None or self.plan.workers[0].error_file is None:
            return []
        if self._failures is None:
            from dsl.report.failures import collect

            files = [worker.error_file for worker in self.plan.workers]
            self._failures = collect(self.plan, self.exits, files)
        return self._failures

    @property
    def is_preempted(self) -> bool:
        """The scheduler had announced the end, and no worker failed before."""
        return self.ended.stop_signal is not None and self.ended.stop_signal == self.plan.preempt_signal

    @property
    def can_be_restarted(self) -> bool:
        """A worker failed, nobody asked for an end, and nothing of the group is left."""
        return (
            self.ended.first_failure is not None
            and self.ended.stop_signal is None
            and not self.ended.survivors
        )


def run_attempt(
    supervisor: Supervisor,
    plan: NodePlan,
    prepare: Callable[[], Listener],
    *,
    stdin_is_terminal: bool = False,
) -> Attempt:
    """Start the workers and wait until nothing of them is left.

    ``prepare`` is called once while the first workers start; what it returns hears of every event but exits
    and the end, with the number of workers that have ended. Raises what `Supervisor.start` raises, before
    anything is started.
    """
    begin_s = time.monotonic()
    supervisor.start(launch_spec(plan, stdin_is_terminal=stdin_is_terminal))
    listen = prepare()
    exits: list[Exit] = []
    while True:
        for event in supervisor.wait(routine=False):
            if isinstance(event, Exited):
                exits.append(event.exit)
            elif isinstance(event, Ended):
                return Attempt(plan, exits, event, begin_s, time.monotonic() - begin_s)
            else:
                listen(event, len(exits))


def flush_output() -> None:
    """What this program has written so far comes before what the workers write, and is written once."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue  # nobody reads it


def crash_loop(attempts: Sequence[Attempt]) -> str:
    """One clause if the last attempts failed alike, soon after their start: another is unlikely to help.

    ``attempts`` are those of the job so far, in order. Empty if there is no such pattern.
    """
    if not attempts:
        return ""
    last = _failure(attempts[-1])
    alike = 0
    for attempt in reversed(attempts):
        if _failure(attempt) != last or attempt.duration_s > CRASH_LOOP_S:
            break
        alike += 1
    if alike < 2:
        return ""
    longest_s = max(attempt.duration_s for attempt in attempts[-alike:])
    return (
        f"crash loop: {alike} attempts in a row failed the same way within {longest_s:.2g} s of their start"
    )


def _failure(attempt: Attempt) -> tuple[int, int] | None:
    cause = attempt.ended.first_failure
    return None if cause is None else (attempt.plan.workers[cause.worker].rank, cause.status)
