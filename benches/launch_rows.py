"""Whole commands: against torchrun and deepspeed; bound workers; first worker; time to stop."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from benches.measure import Bars, Row, in_turns, medians, spread, wall_s
from tests.kit.waiting import until

if TYPE_CHECKING:
    from benches.programs import Programs

TRUE = "/bin/true"
# So that 64 workers are not too many for the devices of a machine that has some.
NO_DEVICES = {"CUDA_VISIBLE_DEVICES": ""}


def against_peers(programs: Programs, scripts: Path, repeats: int) -> list[Row]:
    """64 workers that end at once, the whole command."""
    torchrun = [str(scripts / "torchrun"), "--no-python", "--nproc-per-node", "64", TRUE]
    deepspeed = [str(scripts / "deepspeed"), "--no_python", "--no_local_rank", "--num_gpus", "64", TRUE]
    takers = {
        "dsl": lambda: wall_s(programs.launch(64, TRUE)),
        "torchrun": lambda: wall_s(torchrun),
        "deepspeed": lambda: wall_s(deepspeed),
    }
    slow = {"torchrun": max(3, repeats // 3), "deepspeed": max(3, repeats // 3)}
    values = in_turns(takers, repeats, slow=slow)
    middle = medians(values)
    rows = []
    for name, bar in (("torchrun", 25.0), ("deepspeed", 70.0)):
        detail = f"{spread(values[name], 1, 's')} against {spread(values['dsl'], 1000, 'ms')}"
        ratio = middle[name] / middle["dsl"]
        bars = Bars("launch", "64 workers", middle)
        rows.append(Row(f"64 x true, {name} / dsl", ratio, "x", bar, False, detail, bars))
    return rows


def bound(programs: Programs, repeats: int) -> list[Row]:
    """64 workers that end at once, bound to cores and memory against unbound: median of the turns' ratios."""
    launch = programs.launch(64)
    torchrun = [programs.dslrun, "--no-python", "--nproc-per-node=64"]
    rows = [_bound_row("dsl", launch, ["--bind=auto"], repeats)]
    with mock.patch.dict(os.environ, NO_DEVICES):
        rows.extend(
            _bound_row("dslrun", torchrun, [option], repeats)
            for option in ("--numa-binding=node", "--bind=auto")
        )
    return rows


def _bound_row(name: str, command: list[str], options: list[str], repeats: int) -> Row:
    takers = {
        "unbound": lambda: wall_s([*command, TRUE]),
        "bound": lambda: wall_s([*command, *options, TRUE]),
    }
    values = in_turns(takers, repeats)
    ratio = statistics.median(
        [bound / unbound for bound, unbound in zip(values["bound"], values["unbound"], strict=True)]
    )
    detail = f"{spread(values['bound'], 1000, 'ms')} against {spread(values['unbound'], 1000, 'ms')}"
    return Row(f"64 x true, {name} {' '.join(options)} / unbound", ratio, "x", 1.03, True, detail)


def first_exec(programs: Programs, repeats: int) -> Row:
    """From the start of the command to the first instruction of the first of 64 workers."""

    def take() -> float:
        with tempfile.TemporaryDirectory() as directory:
            stamp = Path(directory) / "stamp"
            begin_ns = time.monotonic_ns()
            wall_s(programs.launch(64, programs.testchild, "only", "0", "[", "stamp", str(stamp), "]"))
            return (int(stamp.read_text()) - begin_ns) / 1e6

    values = in_turns({"dsl": take}, repeats)
    return Row(
        "start to first worker", medians(values)["dsl"], "ms", 40.0, True, spread(values["dsl"], 1, "ms")
    )


def failure_to_end(programs: Programs, workers: int, repeats: int) -> Row:
    """One worker is killed: until the command has ended, against a bare kill-and-reap loop."""

    def ours() -> float:
        with tempfile.TemporaryDirectory() as directory:
            ready = Path(directory) / "ready"
            words = ["note", str(ready), "%r %p", "pause"]
            command = programs.launch(workers, programs.testchild, *words)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                until(lambda: ready.exists() and len(ready.read_bytes().splitlines()) == workers, 120)
                ranks = dict(line.split() for line in ready.read_text().splitlines())
                settle(process.pid)
                begin = time.monotonic()
                os.kill(int(ranks["0"]), signal.SIGKILL)
                process.wait()  # with a timeout it would sleep and look, up to 50 ms apart
                return time.monotonic() - begin
            finally:
                process.terminate()
                process.wait(120)

    def floor() -> float:
        command = [programs.floor, "kill", str(workers), programs.testchild, "pause"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        end_ns = time.monotonic_ns()
        return (end_ns - int(result.stdout.split()[0])) / 1e9

    values = in_turns({"dsl": ours, "floor": floor}, repeats)
    middle = medians(values)
    detail = f"{spread(values['dsl'], 1000, 'ms')} against {spread(values['floor'], 1000, 'ms')}"
    name = f"one of {workers} fails to end, dsl / floor"
    return Row(name, middle["dsl"] / middle["floor"], "x", 1.5, True, detail)


def settle(pid: int) -> None:
    """Wait until the processes of a job have nothing left to do: no context switch for 50 ms."""
    from tests.kit import processes

    def quiet() -> bool:
        family = [pid, *processes.children(pid)]
        before = [processes.context_switches(one) for one in family]
        time.sleep(0.05)
        return before == [processes.context_switches(one) for one in family]

    until(quiet, 60)
