"""A program that launches functions of its own from Python, in the way its first argument says."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import sys
import time

from dsl.functions.launcher import LaunchConfig, SignalException, elastic_launch, launch


class Point:
    """Known to the workers as ``__mp_main__.Point``."""

    def __init__(self, x: int) -> None:
        self.x = x


def shift(point: Point) -> Point:
    """Next to it."""
    return Point(point.x + 1)


def polite(folder: str, *, is_deaf: bool = False) -> None:
    """Says that it is there, and by which signal it was asked to go, which it does unless it is deaf."""

    def note(number: int, _frame: object) -> None:
        pathlib.Path(folder, f"heard{os.environ['RANK']}").write_text(str(number))
        if not is_deaf:
            sys.exit(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    pathlib.Path(folder, f"ready{os.environ['RANK']}").touch()
    while True:
        time.sleep(0.05)  # a signal that comes just before a sleep does not end it


def main() -> None:
    """``point``, ``lambda``, ``deaf DIR GRACE_S``, ``polite DIR``, ``caught DIR``, ``raising DIR``."""
    manner = sys.argv[1]
    if manner == "point":
        print([type(point) is Point and point.x for point in launch(shift, Point(4), nproc_per_node=2)])
    elif manner == "lambda":
        print(launch(lambda x: x * 2, 21))
    elif manner == "deaf":
        deaf = functools.partial(polite, is_deaf=True)
        elastic_launch(LaunchConfig(1, 1, 2, grace_s=float(sys.argv[3])), deaf)(sys.argv[2])
    elif manner == "polite":
        elastic_launch(LaunchConfig(1, 1, 2), polite)(sys.argv[2])
    elif manner == "caught":
        try:
            launch(polite, sys.argv[2])
        except SignalException as error:
            print(error, error.sigval == 15, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
    elif manner == "raising":
        signal.signal(signal.SIGALRM, fail)
        launch(polite, sys.argv[2], nproc_per_node=2)


def fail(_number: int, _frame: object) -> None:
    """A handler of the program's own."""
    raise TimeoutError("too long")


if __name__ == "__main__":
    main()
