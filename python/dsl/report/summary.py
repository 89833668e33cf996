"""The failure summary in the shape of torchrun's (torch 2.15), which people and their log parsers know.

Where torch can say the same, our bytes are the same, with these exceptions:

- Failures within the same second show the fraction of the second.
- Evidence about the root cause stands below torch's text, or replaces its advice on how to get tracebacks.
- A worker that never started says why.
- A record without a time has the time of its file, or of the worker's death.
- A record with an empty traceback shows its message; an empty record counts as no record.
- Failures beyond `MAX_OTHERS` are counted instead of shown, very long texts lose their middle, and control
  characters are made harmless.
"""

from __future__ import annotations

import sys

from dsl.printable import printable
from dsl.report.verdict import name_workers
from dsl.signals import SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.model.judgement import Failure

MAX_OTHERS = 15
"""Failures that are shown besides the root cause."""

MAX_TEXT = 1 << 16
"""Characters of a traceback that are shown."""

TOLD = 200
"""Characters of a message that we compare to recognize it."""

MAX_WIDTH = 60
NOT_AVAILABLE = "<N/A>"
HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


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
