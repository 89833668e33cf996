"""Workers that failed: their error files, which failed first, and the summary of torchrun (torch 2.15).

Imported only when a worker has failed. Any program may have written an error file, so reading it never
blocks and never raises, whatever it contains.

People and their log parsers know this summary. Where torch can say the same, our bytes are the same, with
these exceptions:

- Failures within the same second show the fraction of the second.
- Evidence about the root cause stands below torch's text, or replaces its advice on how to get tracebacks.
- A worker that never started says why.
- A record without a time has the time of its file, or of the worker's death.
- A record with an empty traceback shows its message; an empty record counts as no record.
- Failures beyond `MAX_OTHERS` are counted instead of shown, very long texts lose their middle, and control
  characters are made harmless.
"""

from __future__ import annotations

import os
import sys

from dsl.model.judgement import ErrorRecord, Failure
from dsl.model.outcome import Outcome
from dsl.report.verdict import name_workers, reason
from dsl.words import SIGNALS, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from dsl import Exit
    from dsl.model.job import NodePlan


MAX_BYTES = 8 << 20
"""A longer error file counts as damaged."""

TRUSTED_NS = 1_000_000_000
"""How far a file's time may lie outside of its worker's life; a time beyond that is from another clock."""

# One day before the end of `datetime`'s range, so that the time is valid in every time zone.
MAX_TIME_S = 253_402_214_400.0

MAX_OTHERS = 15
"""Failures that are shown besides the root cause."""

MAX_TEXT = 1 << 16
"""Characters of a traceback that are shown."""

TOLD = 200
"""Characters of a message that we compare to recognize it."""

MAX_WIDTH = 60
NOT_AVAILABLE = "<N/A>"
HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def collect(plan: NodePlan, exits: Sequence[Exit], stopped_ns: int = 0) -> list[Failure]:
    """Every worker that failed by itself, in the order in which they died.

    A worker that we stopped counts, too, if it recorded an exception before the first worker died, or before
    ``stopped_ns``, when all were stopped because of a failure elsewhere.
    """
    error_files = [worker.error_file for worker in plan.workers]
    found = []
    first_ns = stopped_ns or None
    for exit_ in sorted(exits, key=lambda exit_: exit_.order):
        if exit_.status == 0:
            continue
        if not exit_.caused_by_stop:
            first_ns = min(exit_.ended_ns, first_ns or exit_.ended_ns)
            found.append(_failure(plan, exit_, error_files[exit_.worker]))
        elif first_ns is not None and error_files[exit_.worker] is not None:
            failure = _failure(plan, exit_, error_files[exit_.worker])
            if failure.recorded_ns is not None and failure.moment_ns < first_ns:
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
    earliest = min(failures, key=lambda failure: (failure.moment_ns, failure.order))
    is_sooner = earliest.recorded_ns is not None and earliest.moment_ns < first.time_ns
    return earliest if is_sooner else first


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

    from dsl.machine.files import write_output

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


def addition(name: str, failures: Sequence[Failure], root: Failure, told: str) -> str:
    """The summary to show after a verdict; empty if it would add nothing.

    ``told`` is the exception that the verdict has already quoted with its traceback. If the workers have
    recorded nothing, a summary would only repeat it, or the exit of a worker that has failed alone.
    Otherwise the summary shows it without its traceback.
    """
    if (told or len(failures) == 1) and not any(failure.recorded for failure in failures):
        return ""
    return format_summary(name, failures, root, told=told)


def format_summary(
    name: str,
    failures: Sequence[Failure],
    root: Failure,
    evidence: Sequence[str] = (),
    *,
    border: str = "=",
    section: str = "-",
    told: str = "",
) -> str:
    """The text of torch's ``ChildFailedError``, with an empty line in front and no line end behind.

    ``name`` is what has failed. ``failures`` are numbered in the given order, and ``root`` is one of them.
    ``evidence``: lines that tell more about the root cause. ``border`` and ``section`` are the characters of
    the rules. ``told``: as for `addition`. Raises ValueError if ``root`` is not in ``failures``.
    """
    at = failures.index(root)
    others = [index for index in range(len(failures)) if index != at]
    seconds = [seconds_of(failure) for failure in failures]
    accounts = {index: _account(failures[index], has_traceback=bool(told)) for index in others[:MAX_OTHERS]}
    accounts[at] = told if told and _repeats(root, told) else _account(root, evidence)
    blocks = {
        index: _block(index, failures[index], account, with_fraction=seconds.count(seconds[index]) > 1)
        for index, account in accounts.items()
    }
    rest = [str(failures[index].rank) for index in others[MAX_OTHERS:]]
    shown = [blocks[index] for index in others[:MAX_OTHERS]] or ["  <NO_OTHER_FAILURES>"]
    if rest:
        shown.append(f"  ... and {len(rest)} more: {name_workers(rest)}")
    title = f"{printable(name)} FAILED"
    lines = [title, *(line for block in blocks.values() for line in block.split("\n"))]
    width = min(max(map(len, lines)), MAX_WIDTH)
    return "\n".join(
        [
            "",
            border * width,
            title,
            section * width,
            "Failures:",
            *shown,
            section * width,
            "Root Cause (first observed failure):",
            blocks[at],
            border * width,
        ]
    )


def _block(index: int, failure: Failure, account: str, *, with_fraction: bool) -> str:
    name = signal_name(failure)
    return "\n".join(
        [
            f"[{index}]:",
            f"  time      : {iso_time(failure, with_fraction=with_fraction)}",
            f"  host      : {printable(failure.host)}",
            f"  rank      : {failure.rank} (local_rank: {failure.local_rank})",
            f"  exitcode  : {failure.exitcode} (pid: {failure.pid}) "
            + (f" ({name})" if name != NOT_AVAILABLE else ""),
            f"  error_file: {printable(failure.error_file or NOT_AVAILABLE)}",
            f"  traceback : {account}",
        ]
    )


def _repeats(failure: Failure, told: str) -> bool:
    """Whether the worker recorded the exception in ``told``, or nothing."""
    if failure.recorded is None:
        return True
    first, _, _ = failure.recorded.message.partition("\n")
    return bool(first) and told.startswith(first.strip()[:TOLD])


def _account(failure: Failure, evidence: Sequence[str] = (), *, has_traceback: bool = False) -> str:
    """The text after ``traceback :``. As in torch, further lines are indented unless the record is text.

    ``has_traceback``: the reader has seen a traceback and needs no advice on how to get one.
    """
    known = [printable(line) for text in evidence for line in text.splitlines()]
    account = _own_account(failure)
    if account.startswith(HINT) and (known or has_traceback):
        rest = account[len(HINT) :].lstrip()
        known = [*([rest] if rest else []), *known]
        account = known.pop(0) if known else NOT_AVAILABLE
    return "\n  ".join([account, *known])


def _own_account(failure: Failure) -> str:
    account = _plain_account(failure)
    errors = sys.modules.get("torch.distributed.elastic.multiprocessing.errors")
    if errors is None or failure.exitcode >= 0:
        return account
    try:  # a site's handler may know more of a death by a signal; older versions of torch do not ask it
        path = failure.error_file or NOT_AVAILABLE
        told = errors.get_error_handler().maybe_enrich_signal_failure_message(account, path)
        return "\n".join([printable(line) for line in told.split("\n")])
    except Exception:  # noqa: BLE001  code of the site, which must not hide the failure
        return account


def _plain_account(failure: Failure) -> str:
    recorded = failure.recorded
    text = recorded and (recorded.traceback or recorded.message)
    if recorded is None or not text:
        why = failure.reason
        is_told = failure.exitcode < 0 or why in {"", f"exit code {failure.exitcode}"}
        return generic_message(failure) + ("" if is_told or not failure.pid else f"\n  {printable(why)}")
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        left_out = f"... {len(text) - 2 * half} characters left out, see the error file ..."
        text = f"{text[:half]}\n{left_out}\n{text[-half:]}"
    lines = [printable(line.rstrip("\r")) for line in text.split("\n")]
    return ("\n" if recorded.is_text else "\n  ").join(lines)


def generic_message(failure: Failure) -> str:
    """torch's text for a worker that recorded nothing; the reason for a worker that never started."""
    if failure.exitcode < 0:
        return f"Signal {-failure.exitcode} ({signal_name(failure)}) received by PID {failure.pid}"
    if not failure.pid and failure.reason:
        return printable(failure.reason)
    return HINT


def signal_name(failure: Failure) -> str:
    """``SIGKILL``, or ``<N/A>`` for a failure without a signal and a signal without a name."""
    if failure.exitcode >= 0:
        return NOT_AVAILABLE
    name = SIGNALS.get(-failure.exitcode)
    if name is not None:
        return name
    import signal

    try:
        return signal.Signals(-failure.exitcode).name
    except ValueError:
        return NOT_AVAILABLE


def seconds_of(failure: Failure) -> int:
    """Time of a failure in whole seconds since the epoch: from its record, its error file or its death."""
    if failure.recorded is not None and failure.recorded.time_s is not None:
        return int(failure.recorded.time_s)
    time_ns = failure.time_ns if failure.recorded_ns is None else failure.recorded_ns
    return time_ns // 10**9


def iso_time(failure: Failure, *, with_fraction: bool = False) -> str:
    """``2026-01-02_03:04:05`` in local time, with microseconds on demand if they are known."""
    from datetime import datetime

    seconds = seconds_of(failure)
    time_ns = failure.time_ns if failure.recorded is None else failure.recorded_ns
    # A record's time is in whole seconds, and its file may be written in the next second.
    if with_fraction and time_ns is not None and 0 <= time_ns - seconds * 10**9 < 2 * 10**9:
        whole_s, rest_ns = divmod(time_ns, 10**9)
        moment = datetime.fromtimestamp(whole_s).replace(microsecond=rest_ns // 1000)  # noqa: DTZ006
        return moment.isoformat(sep="_", timespec="microseconds")
    return datetime.fromtimestamp(seconds).isoformat(sep="_")  # noqa: DTZ006  as torch
