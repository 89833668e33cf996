"""Signals that end a job launched from Python, handled while it runs, unless the program handles them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn


class SignalException(SystemExit):
    """A signal asked for the end of the job, and its workers have ended.

    ``sigval`` is the signal. A program that does not catch it ends with 128 + the signal's number (G2).
    """

    def __init__(self, sigval: signal.Signals) -> None:
        super().__init__(128 + sigval)
        self.sigval = sigval

    def __str__(self) -> str:
        return f"{self.sigval.name} ended the job"

    def __reduce__(self) -> tuple[type[SignalException], tuple[signal.Signals]]:
        return type(self), (self.sigval,)


class HandledSignals:
    """While the block runs, these signals raise `SignalException` in the main thread.

    Signals that the program handles or ignores (nohup) are left alone. In other threads, this does nothing.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._taken: list[int] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._taken.append(number)
                signal.signal(number, _raise)

    def __exit__(self, *_: object) -> None:
        for number in self._taken:
            if signal.getsignal(number) is _raise:
                signal.signal(number, signal.SIG_DFL)


def _raise(number: int, _frame: FrameType | None) -> NoReturn:
    raise SignalException(signal.Signals(number))
