"""A rank that needs a helper of its process group to save its work, as a training needs its data loaders.

As a program without RANK it launches two such ranks as functions. The last argument is the folder of the notes.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from subprocess import PIPE


def ask(helper: subprocess.Popen[bytes]) -> str:
    """Whether the helper answers."""
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        helper.stdin.write(b"next\n")
        helper.stdin.flush()
    except BrokenPipeError:
        return "alone"
    return "helped" if helper.stdout.readline() else "alone"


def train(folder: str) -> None:
    """Note each SIGUSR1 and whether the helper answers then; save after SIGTERM, once the file ``may_save`` exists."""
    place, rank = pathlib.Path(folder), os.environ["RANK"]
    told: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: told.append(number))

    def note(name: str, text: object) -> None:
        with (place / name).open("a") as file:
            file.write(f"{rank} {text}\n")

    with contextlib.suppress(BrokenPipeError), subprocess.Popen(["cat"], stdin=PIPE, stdout=PIPE) as helper:
        note("ready", os.getpid())
        heard = 0
        while signal.SIGTERM not in told:
            if told.count(signal.SIGUSR1) > heard:
                heard += 1
                note("heard", ask(helper))
            if rank == "1" and (place / "may_fail").exists():
                os._exit(3)
            time.sleep(0.01)
        note("stopping", told.count(signal.SIGTERM))
        while not (place / "may_save").exists():
            time.sleep(0.01)
        note("saved", ask(helper))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[-1])
    else:
        from dsl.functions import launch

        launch(train, sys.argv[-1], nproc_per_node=2)
