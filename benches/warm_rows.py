"""The second launch of a job with a warm fork server, against torchrun and a plain start. Needs torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benches.forkserver_rows import (
    DDP,
    STAMP,
    count_words,
    to_last_start,
    torchrun_words,
    trained_s,
    write_script,
)
from benches.measure import Bars, Row, in_turns, medians, spread, wall_s

from dsl._core import warm_answer, warm_call

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benches.programs import Programs

WARM = ("--start-method", "warm")
ANSWER_S = 10.0
FIRST, SECOND = "dslrun warm, 1st start", "dslrun warm, 2nd start"
LAUNCHES = """
import os, sys, time
from dsl.functions import warm_launch
if __name__ == "__main__":
    with warm_launch(nproc_per_node=int(sys.argv[1]), preload="torch") as launch:
        launch(os.getpid)
        for _ in range(int(sys.argv[2])):
            begin = time.monotonic()
            launch(os.getpid)
            print(time.monotonic() - begin)
"""


@contextmanager
def _own_servers() -> Iterator[str]:
    """Give warm servers a folder for their sockets, and end them all at last. Returns another folder."""
    before = {name: os.environ.pop(name, None) for name in ("XDG_RUNTIME_DIR", "TMPDIR")}
    with tempfile.TemporaryDirectory() as sockets, tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = sockets
        try:
            yield folder
        finally:
            _end_servers()
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _end_servers() -> None:
    """End the warm servers whose sockets are in the folder of `_own_servers`."""
    for path in Path(os.environ["TMPDIR"]).glob("dsl-*/*.warm"):
        warm_answer(warm_call(path.parent, path.name, "stop"), ANSWER_S)


def training(programs: Programs, workers: int, bar: float, ours_runs: int, theirs_runs: int) -> Row:
    """Three steps of DDP over gloo: the whole command, and with a warm server its second start."""
    with _own_servers() as folder:
        script = write_script(folder, DDP)
        plain = [programs.dslrun, *count_words(workers)]
        ours = [*plain, *WARM, script]

        def first_s() -> float:
            _end_servers()
            return trained_s(ours)

        takers = {
            "torchrun": lambda: trained_s([*torchrun_words(), *count_words(workers), script]),
            "dslrun": lambda: trained_s([*plain, script]),
            FIRST: first_s,
            SECOND: lambda: trained_s(ours),
        }
        values = in_turns(takers, ours_runs, slow={"torchrun": theirs_runs, "dslrun": theirs_runs})
    middle = medians(values)
    detail = f"{spread(values['torchrun'], 1, 's')} against {spread(values[SECOND], 1, 's')}"
    detail += f"; {spread(values['dslrun'], 1, 's')} without a server"
    detail += f", {spread(values[FIRST], 1, 's')} with a new one"
    name = f"second launch of {workers} ranks of DDP over gloo, torchrun / dslrun with a warm server"
    bars = Bars("training", f"{workers} ranks of DDP over gloo, on {os.cpu_count()} CPUs", middle)
    return Row(name, middle["torchrun"] / middle[SECOND], "x", bar, False, detail, bars)


def single(programs: Programs, bar: float, repeats: int) -> Row:
    """A script that imports torch: by Python itself, and by the second launch with a warm server."""
    with _own_servers() as folder:
        script = write_script(folder, "import torch")
        ours = [programs.dsl, "--num_gpus", "1", *WARM, script]
        wall_s(ours)
        takers = {"dsl": lambda: wall_s(ours), "python": lambda: wall_s([sys.executable, script])}
        values = in_turns(takers, repeats)
    middle = medians(values)
    detail = f"{spread(values['python'], 1, 's')} against {spread(values['dsl'], 1000, 'ms')}"
    name = "second launch of a script that imports torch, python / dsl with a warm server"
    return Row(name, middle["python"] / middle["dsl"], "x", bar, False, detail)


def functions(workers: int, bar: float, repeats: int) -> Row:
    """A launch from Python of a function that returns at once, in workers that have torch, but the first."""
    with _own_servers() as folder:
        # A program of its own: each worker imports the main program.
        words = [sys.executable, write_script(folder, LAUNCHES), str(workers), str(repeats)]
        ended = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    values = sorted(map(float, ended.stdout.split()))
    name = f"second launch of a function in {workers} workers that import torch"
    return Row(name, values[len(values) // 2], "s", bar, True, spread(values, 1000, "ms"))


def starts(programs: Programs, workers: int, bar: float, repeats: int) -> Row:
    """From the start of the command to the first line of the last worker, at the second launch."""

    def take(script: str) -> float:
        with tempfile.TemporaryDirectory() as stamps:
            command = [programs.dslrun, *count_words(workers), *WARM, script, stamps]
            return to_last_start(command, Path(stamps), workers)

    with _own_servers() as folder:
        script = write_script(folder, STAMP)
        take(script)
        values = sorted(take(script) for _ in range(repeats))
    name = f"second launch of {workers} workers that import torch, to the last first line"
    return Row(name, values[len(values) // 2], "s", bar, True, spread(values, 1000, "ms"))
