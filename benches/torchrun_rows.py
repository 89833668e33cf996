"""`dslrun` against torchrun: launch, restart, failure to end, stubborn workers, and who is blamed."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benches.measure import Bars, Row, in_turns, medians, spread, wall_s
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benches.programs import Programs

TRUE = "/bin/true"
# Each worker is a shell that becomes one of two programs, by the number of the attempt.
FAIL_ONCE = """
if [ "$TORCHELASTIC_RESTART_COUNT" = 1 ]; then exec "$CHILD" stamp "$DIR/start.$RANK"; fi
if [ "$RANK" = 0 ]; then exec "$CHILD" note "$DIR/ready" %p wait "$DIR/go" stamp "$DIR/fail" exit 1; fi
exec "$CHILD" note "$DIR/ready" %p pause
"""
# The victim ends a given time after the death of the cause, whose rank is higher: whoever looks in rank order
# is wrong.
CAUSE_AND_VICTIM = """
if [ "$RANK" = 3 ]; then exec "$CHILD" touch "$DIR/cause" wait "$DIR/go" exit 7; fi
if [ "$RANK" = 0 ]; then
    exec "$CHILD" wait "$DIR/cause" touch "$DIR/go" waitpid "$DIR/cause" sleep "$DELAY_MS" exit 9
fi
exec "$CHILD" pause
"""


class Command(NamedTuple):
    """A torchrun: ours or the real one."""

    name: str
    path: str

    def line(self, workers: int, program: Sequence[str], *options: str) -> list[str]:
        """The words that run a program in some workers."""
        return [self.path, "--no-python", "--nproc-per-node", str(workers), *options, *program]


def both(programs: Programs, scripts: Path) -> tuple[Command, Command]:
    """Our command and the real one."""
    return Command("dslrun", programs.dslrun), Command("torchrun", str(scripts / "torchrun"))


def launches(programs: Programs, scripts: Path, workers: int, bar: float, repeats: int) -> Row:
    """Workers that end at once, the whole command."""
    ours, theirs = both(programs, scripts)
    name = f"{workers} x true, torchrun / dslrun"
    chart = ("workers", workers)
    return _ratio(name, bar, repeats, ours, theirs, lambda one: wall_s(one.line(workers, [TRUE])), chart)


def restart(programs: Programs, scripts: Path, workers: int, repeats: int) -> Row:
    """From the end of the worker that fails to the first instruction of the next attempt's first worker."""
    ours, theirs = both(programs, scripts)

    def take(command: Command) -> float:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            _fail(programs, command, workers, folder, "--max-restarts", "1", code=0)
            starts = [int((folder / f"start.{rank}").read_text()) for rank in range(workers)]
            return (min(starts) - int((folder / "fail").read_text())) / 1e9

    name = f"one of {workers} fails to next attempt, torchrun / dslrun"
    return _ratio(name, 10.0, repeats, ours, theirs, take)


def failure_to_end(programs: Programs, scripts: Path, workers: int, bar: float, repeats: int) -> Row:
    """From the end of the worker that fails to the end of the command."""
    ours, theirs = both(programs, scripts)

    def take(command: Command) -> float:
        with tempfile.TemporaryDirectory() as directory:
            end_ns = _fail(programs, command, workers, Path(directory), code=1)
            return (end_ns - int((Path(directory) / "fail").read_text())) / 1e9

    name = f"one of {workers} fails to end, torchrun / dslrun"
    return _ratio(name, bar, repeats, ours, theirs, take, ("failure", workers))


def stubborn(programs: Programs, scripts: Path, repeats: int) -> Row:
    """One of four fails, three ignore SIGTERM, three seconds of grace. torchrun takes its turn once."""
    ours, theirs = both(programs, scripts)
    words = [
        programs.testchild,
        "ignore",
        "TERM",
        "only",
        "1",
        "[",
        "sleep",
        "100",
        "exit",
        "4",
        "]",
        "pause",
    ]
    options = ("--shutdown-timeout", "3")

    def take(command: Command, code: int) -> float:
        return wall_s(command.line(4, words, *options), code=code)

    values = [take(ours, 4) for _ in range(repeats)]
    reference = take(theirs, 1)
    detail = f"{spread(values, 1, 's')}, torchrun {reference:.3g} s (whole command)"
    return Row("one of 4 fails, 3 are deaf, timeout 3 s", max(values), "s", 3.5, True, detail)


def blame(programs: Programs, scripts: Path, delay_ms: int, ours_runs: int, theirs_runs: int) -> Row:
    """How often the rank that failed first is named, when another one fails a little later."""
    ours, theirs = both(programs, scripts)

    def right(command: Command) -> int:
        with tempfile.TemporaryDirectory() as directory:
            environ = {**os.environ, "CHILD": programs.testchild, "DIR": directory, "DELAY_MS": str(delay_ms)}
            line = command.line(4, ["sh", "-c", CAUSE_AND_VICTIM])
            process = subprocess.Popen(
                line, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            text = process.communicate(timeout=120)[1].decode(errors="replace")
            if command is ours:
                return int("dslrun: rank 3 (local rank 3, " in text.partition(" failed first: ")[0])
            blamed = text.partition("Root Cause (first observed failure):")[2]
            return int("rank      : 3 (local_rank: 3)" in blamed)

    named = sum(right(ours) for _ in range(ours_runs))
    reference = sum(right(theirs) for _ in range(theirs_runs))
    detail = f"{named} of {ours_runs}, torchrun {reference} of {theirs_runs}"
    name = f"right root cause, victim {delay_ms} ms later"
    return Row(name, 100 * named / ours_runs, "%", 100.0, False, detail)


def _fail(programs: Programs, command: Command, workers: int, folder: Path, *options: str, code: int) -> int:
    """Run a job in which rank 0 fails once all workers are there; CLOCK_MONOTONIC ns of the command's end."""
    environ = {**os.environ, "CHILD": programs.testchild, "DIR": str(folder)}
    process = subprocess.Popen(
        command.line(workers, ["sh", "-c", FAIL_ONCE], *options),
        env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ready = folder / "ready"
    try:
        until(lambda: ready.exists() and len(ready.read_bytes().splitlines()) == workers, 120)
        (folder / "go").touch()
        ended_with = process.wait()  # with a timeout it would sleep and look, up to 50 ms apart
        end_ns = time.monotonic_ns()
    finally:
        process.terminate()
        process.wait(120)
    if ended_with != code:
        raise RuntimeError(f"{command.name} ended with {ended_with}, not {code}")
    return end_ns


def _ratio(
    name: str,
    bar: float,
    repeats: int,
    ours: Command,
    theirs: Command,
    take: Callable[[Command], float],
    chart: tuple[str, int] | None = None,
) -> Row:
    """A row of both medians; a chart shows them in its group for that number of workers."""
    takers = {ours.name: lambda: take(ours), theirs.name: lambda: take(theirs)}
    values = in_turns(takers, repeats, slow={theirs.name: max(3, repeats // 3)})
    middle = medians(values)
    detail = f"{spread(values[theirs.name], 1, 's')} against {spread(values[ours.name], 1000, 'ms')}"
    bars = chart and Bars(chart[0], f"{chart[1]} worker{'s' * (chart[1] > 1)}", middle)
    return Row(name, middle[theirs.name] / middle[ours.name], "x", bar, False, detail, bars)
