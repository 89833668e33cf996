"""How a job that was launched from Python may end: failed workers as a typed error, and signals.

The error has the names and attributes that users of ``ChildFailedError`` read, the class of
torch.distributed.elastic.multiprocessing.errors (torch 2.15). We do not import torch: unless your program has
imported torch's class, name the class of this module in ``except``.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, NoReturn

from dsl.errors import DslError
from dsl.model.outcome import SIGNAL_CODES, AttemptOutcome, own_code
from dsl.report.failures import (
    NOT_AVAILABLE,
    collect,
    file_data,
    format_summary,
    generic_message,
    iso_time,
    root_cause,
    seconds_of,
    signal_name,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

    from dsl.model.judgement import Failure

TORCHS_ERRORS = "torch.distributed.elastic.multiprocessing.errors"

__all__ = ["ChildFailedError", "ProcessFailure"]


def __getattr__(name: str) -> Any:
    return name_of_torch(name, TORCHS_ERRORS, globals())


class ProcessFailure:
    """One failed worker, as torch shows it. ``failure`` has everything that is known about it."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure

    def __repr__(self) -> str:
        return f"ProcessFailure({self.failure!r})"

    def __eq__(self, other: object) -> bool:
        return self.failure == other.failure if isinstance(other, ProcessFailure) else NotImplemented

    def __hash__(self) -> int:
        return hash((ProcessFailure, self.failure))

    @property
    def local_rank(self) -> int:
        """Index within its node."""
        return self.failure.local_rank

    @property
    def pid(self) -> int:
        """Process id; 0 if it never started."""
        return self.failure.pid

    @property
    def exitcode(self) -> int:
        """Exit code, or minus the number of the signal that ended it."""
        return self.failure.exitcode

    @property
    def error_file(self) -> str:
        """Path of its record; ``<N/A>`` without a readable record."""
        return self.failure.error_file or NOT_AVAILABLE

    @property
    def error_file_data(self) -> dict[str, Any]:
        """The record in the shape of the file, without keys that torch does not write."""
        recorded = self.failure.recorded
        if recorded is not None:
            return file_data(recorded)
        data: dict[str, Any] = {"message": "<NONE>"}
        if self.exitcode >= 0:
            data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
        return data

    @property
    def message(self) -> str | dict[str, Any]:
        """The record's ``message``: the parts of an exception, or text. Without a record, torch's text."""
        recorded = self.failure.recorded
        message: str | dict[str, Any] = file_data(recorded)["message"] if recorded is not None else ""
        return message or generic_message(self.failure)

    @property
    def timestamp(self) -> int:
        """Seconds since the epoch: from its record, the record's file, or its death."""
        return seconds_of(self.failure)

    def signal_name(self) -> str:
        """``SIGKILL``; ``<N/A>`` if no signal with a name ended it."""
        return signal_name(self.failure)

    def timestamp_isoformat(self) -> str:
        """``2026-01-02_03:04:05`` in local time."""
        return iso_time(self.failure)


class ChildFailedError(DslError):
    """Workers failed. Unlike other errors, this one has a text of many lines: the failure summary.

    ``failures`` has an entry for each rank that failed by itself, ``evidence`` more lines about the root
    cause. ``exit_code`` is what the command would have returned. If the program has imported torch's error of
    this name, this error is also an instance of torch's class. Raises ValueError without failures.
    """

    def __new__(cls, *_args: object, **_kwargs: object) -> Self:
        """Choose the class: also a subclass of torch's, if the program has imported it."""
        kind: Any = _as_torchs() if cls is ChildFailedError else cls
        made: Self = super().__new__(kind)
        return made

    def __init__(
        self, name: str, failures: Mapping[int, ProcessFailure], evidence: Sequence[str] = ()
    ) -> None:
        if not failures:
            raise ValueError("a ChildFailedError needs a failure")
        self.name = name
        self.failures = dict(failures)
        self.evidence = tuple(evidence)
        _, first = self.get_first_failure()
        status = first.exitcode if first.exitcode >= 0 else SIGNAL_CODES - first.exitcode
        self.exit_code = own_code(status, is_stopped=first.failure.is_stopped)
        DslError.__init__(self, self.format_msg())  # not the __init__ of torch's class, which may be a base

    @classmethod
    def of(cls, name: str, failures: Sequence[Failure], evidence: Sequence[str] = ()) -> ChildFailedError:
        """The error for the failures that `dsl.report.failures.collect` found."""
        return cls(name, {failure.rank: ProcessFailure(failure) for failure in failures}, evidence)

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self)
        return _common.get(kind, kind), (self.name, self.failures, self.evidence)

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Rank and failure of the root cause."""
        root = root_cause([failure.failure for failure in self.failures.values()])
        return next((rank, entry) for rank, entry in self.failures.items() if entry.failure == root)

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """The failure summary; the arguments are the characters of its rules."""
        failures = [failure.failure for failure in self.failures.values()]
        return format_summary(
            self.name,
            failures,
            root_cause(failures),
            self.evidence,
            border=boarder_delim,
            section=section_delim,
        )


_common: dict[type[ChildFailedError], type[ChildFailedError]] = {}
"""The classes made by `_as_torchs`, each with the class that it is pickled as."""


def _as_torchs() -> type[ChildFailedError]:
    """A subclass of our error and torch's, if this program has imported torch's; else our error itself."""
    torchs = getattr(sys.modules.get(TORCHS_ERRORS), "ChildFailedError", None)
    if not isinstance(torchs, type) or not issubclass(torchs, Exception):
        return ChildFailedError
    for known in _common:
        if issubclass(known, torchs):
            return known
    made: type[ChildFailedError] = type(
        "ChildFailedError", (ChildFailedError, torchs), {"__module__": __name__}
    )
    _common[made] = ChildFailedError
    return made


def failure_of(name: str, attempt: AttemptOutcome) -> ChildFailedError:
    """The error of an attempt with a first failure. ``name``: what was started."""
    # If a plug-in gives the workers no error files, the failures have not been collected yet.
    failures = attempt.failures or tuple(collect(attempt.plan, attempt.exits))
    root = root_cause(failures)
    evidence: list[str] = []
    if attempt.report is not None and attempt.report.rank == root.rank:
        found = attempt.report.evidence
        evidence = [found.known] if root.recorded is not None else [found.known, found.said]
    return ChildFailedError.of(name, failures, [line for line in evidence if line])


# Public names of torch's modules that we do not have ourselves come from a copy of torch's module, whose
# functions call ours where we have them: the module itself may be replaced by ours in `sys.modules`.
_copies: dict[str, ModuleType] = {}


def name_of_torch(name: str, module: str, ours: Mapping[str, Any]) -> Any:
    """The object of that name in this module of torch; ``ours`` are the names in the module that asks.

    Nothing is imported before somebody asks.

    Raises:
        AttributeError: there is no such name, or no torch.
    """
    where = f"module {ours['__name__']!r} has no attribute {name!r}"
    if name.startswith("_"):  # as each import asks for `__path__`
        raise AttributeError(where)
    try:
        copy = _copies.get(module) or _copy(module, ours)
    except ImportError as error:
        raise AttributeError(f"{where}, and there is no {module}: {error}") from None
    if name not in vars(copy):
        raise AttributeError(where)
    return getattr(copy, name)


def _copy(module: str, ours: Mapping[str, Any]) -> ModuleType:
    from importlib import import_module
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    package = import_module(module.rpartition(".")[0])
    spec = PathFinder.find_spec(module, package.__path__)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module {module}")
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    functions: Any = import_module("dsl.functions")
    for name in vars(copy).keys() & {*functions.__all__, *ours["__all__"]}:
        setattr(copy, name, ours[name] if name in ours else getattr(functions, name))
    _copies[module] = copy
    return copy


class SignalException(SystemExit):
    """A signal asked for the end of the job, and its workers have ended.

    ``sigval`` is the signal. A program that does not catch it ends with 128 + the number of the signal.
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
