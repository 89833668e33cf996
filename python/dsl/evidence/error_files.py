"""Workers that failed by themselves: what the engine saw, what their error files say, which was first.

Imported only when a worker has failed. Any program may have written an error file, so reading it never
blocks and never raises, whatever it contains.
"""

from __future__ import annotations

import os

from dsl.model.judgement import ErrorRecord, Failure
from dsl.model.outcome import Outcome
from dsl.report.verdict import reason

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from dsl import Exit
    from dsl.model.job import NodePlan

MAX_BYTES = 8 << 20
"""A longer error file counts as damaged."""

COARSE_NS = 10_000_000
"""Times of files lag behind the clock by up to a tick of the kernel, at most 10 ms."""

TRUSTED_NS = 1_000_000_000
"""How far a file's time may lie outside of its worker's life; a time beyond that is from another clock."""

# One day before the end of `datetime`'s range, so that the time is valid in every time zone.
MAX_TIME_S = 253_402_214_400.0


def collect(plan: NodePlan, exits: Sequence[Exit]) -> list[Failure]:
    """Every worker that failed by itself, in the order in which they died.

    A worker that we stopped counts, too, if it recorded an exception before the first worker died.
    """
    error_files = [worker.error_file for worker in plan.workers]
    found = []
    first_ns = None
    for exit_ in sorted(exits, key=lambda exit_: exit_.order):
        if exit_.status == 0:
            continue
        if not exit_.caused_by_stop:
            first_ns = exit_.ended_ns if first_ns is None else first_ns
            found.append(_failure(plan, exit_, error_files[exit_.worker]))
        elif first_ns is not None and error_files[exit_.worker] is not None:
            failure = _failure(plan, exit_, error_files[exit_.worker])
            if failure.recorded_ns is not None and first_ns - failure.recorded_ns > COARSE_NS:
                found.append(failure)
    return found


def _failure(plan: NodePlan, exit_: Exit, path: str | None) -> Failure:
    worker = plan.workers[exit_.worker]
    # A worker that never ran did not write the file.
    found = load_error_file(path) if path is not None and exit_.pid else None
    recorded, recorded_ns = found or (None, None)
    if recorded_ns is not None and not (
        exit_.started_ns - TRUSTED_NS <= recorded_ns <= exit_.ended_ns + TRUSTED_NS
    ):
        recorded_ns = None
    return Failure(
        rank=worker.rank,
        local_rank=worker.local_rank,
        host=plan.host,
        pid=exit_.pid,
        exitcode=-exit_.signal if exit_.signal is not None else exit_.status,
        time_ns=exit_.ended_ns,
        order=exit_.order,
        error_file=path if recorded is not None else None,
        recorded=recorded,
        recorded_ns=recorded_ns,
        reason=reason(exit_),
        is_stopped=exit_.caused_by_stop,
    )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others: the first death, in the kernel's order (G3).

    A worker may raise an exception, record it, and clean up for a while. Meanwhile its peers die because
    their connections to it break. So the earliest record counts instead if it is clearly older than the
    first death. Raises ValueError without failures.
    """
    first = min(failures, key=lambda failure: failure.order)
    times = [
        (failure.recorded_ns, failure.order, failure)
        for failure in failures
        if failure.recorded_ns is not None
    ]
    if not times:
        return first
    recorded_ns, _, earliest = min(times, key=lambda entry: entry[:2])
    return earliest if first.time_ns - recorded_ns > COARSE_NS else first


class HandedError:
    """A listener that writes the cause's record, when the job has failed, to a file as torchrun leaves it.

    An operator of Kubernetes reads it there. ``warn`` is called if it cannot be written.
    """

    def __init__(self, path: str, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, warn

    def hear(self, event: object) -> None:
        """Act on the outcome."""
        if isinstance(event, Outcome) and event.last.failures:
            try:
                _hand_on(root_cause(event.last.failures), self._path)
            except OSError as error:
                self._warn(f"cannot write the error file {self._path}: {error.strerror}")


def _hand_on(failure: Failure, path: str) -> None:
    """Write the record, with the exit code added; without a record write nothing, as torchrun does."""
    import json

    from dsl.machine.output_files import write_output

    found = None if failure.error_file is None else _read(failure.error_file)
    if failure.recorded is None or found is None:
        return
    data = json.loads(found[0].decode("utf-8-sig", "replace"), strict=False)
    if failure.exitcode and isinstance(data["message"], dict):
        data["message"]["errorCode"] = failure.exitcode
    write_output(path, json.dumps(data).encode())


def file_data(recorded: ErrorRecord) -> dict[str, Any]:
    """A record in the shape of the file, without keys that torch does not write."""
    stamp = {} if recorded.time_s is None else {"timestamp": str(int(recorded.time_s))}
    if recorded.is_text:
        return {"message": recorded.message, **stamp}
    message: dict[str, Any] = {
        "message": recorded.message,
        "extraInfo": {"py_callstack": recorded.traceback, **stamp},
    }
    if recorded.exit_code is not None:
        message["errorCode"] = recorded.exit_code
    return {"message": message}


def load_error_file(path: str) -> tuple[ErrorRecord, int] | None:
    """Read what ``@record`` of torch.distributed.elastic.multiprocessing.errors wrote (torch 2.15).

    The record, and when its file was last written, in nanoseconds; None if there is no regular file (links
    are not followed), or if it holds no whole record. Values of the wrong type are left out. Never raises,
    never waits for a writer.
    """
    found = _read(path)
    if found is None:
        return None
    text = found[0].decode("utf-8-sig", "replace")
    parsed = _parse(text)
    return (parsed, found[1]) if parsed is not None else None


def _read(path: str) -> tuple[bytes, int] | None:
    import stat

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)

    try:
        with open(path, "rb", opener=opener) as file:
            facts = os.fstat(file.fileno())
            return (file.read(MAX_BYTES), facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else None
    except (OSError, ValueError):  # a path with a NUL is a ValueError
        return None


def _parse(text: str) -> ErrorRecord | None:
    import json

    try:
        data = json.loads(text, strict=False)
    except (ValueError, RecursionError, MemoryError):
        return None
    message = data.get("message") if isinstance(data, dict) else None
    if isinstance(message, str):
        return ErrorRecord(_text(message), "", _time_s(data.get("timestamp")), None, is_text=True)
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    code = message.get("errorCode")
    return ErrorRecord(
        message=_text(message.get("message")),
        traceback=_text(extra.get("py_callstack")),
        time_s=_time_s(extra.get("timestamp")),
        exit_code=code if isinstance(code, int) and not isinstance(code, bool) else None,
    )


def _text(value: Any) -> str:
    """The value if it is text, else empty. Lone surrogates, which JSON can hold, become ``?``."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _time_s(value: Any) -> float | None:
    """Seconds since the epoch, which torch writes as text."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds <= MAX_TIME_S else None
