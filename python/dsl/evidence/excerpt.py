"""What a worker's last output says about its end: the exception, where it was raised, and lines to show.

Imported only when a worker has failed. The text comes from any program, so no input makes this module raise,
its work is linear in the size of the text, and its results hold no control character but the tab.
"""

from __future__ import annotations

import re

from dsl._record import Record, replace
from dsl.evidence.crashes import find_crashes
from dsl.evidence.findings import AFTERMATH, Finding, fold
from dsl.evidence.tracebacks import MAX_EXCEPTION, find_tracebacks
from dsl.printable import printable, without_sequences

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


MAX_TAIL = 64 << 10  # bytes looked at, from the end
MAX_LINE = 500  # characters of a shown line
STALE_AFTER = 30  # lines of ordinary output; with more of them after an error, the error was not the cause

# A last line with which argparse, click or the interpreter itself refuses to run.
_COMPLAINT = re.compile(
    r"[^\s:]+: error: \S|Error: \S"
    r"|\S*python[\d.]*: (?:can't open file |can't find '__main__'|No module named |Error while finding )"
)


class Excerpt(Record):
    """What the output tells: None and no lines if the worker wrote nothing.

    ``exception`` is the last line of the last traceback (``ValueError: bad batch``), or the message of a
    crash outside of Python. ``where`` is ``train.py:41 in step``: the innermost frame of the user's own
    code, else the innermost frame of all. ``lines`` are the lines to show, without line ends.
    """

    exception: str | None
    where: str | None
    lines: tuple[str, ...]


def excerpt(tail: bytes, *, max_lines: int = 30) -> Excerpt:
    """Read the last output of a worker that failed.

    ``tail`` is the end of the output and may begin in the middle of a line. The result has at most
    ``max_lines`` lines of at most 500 characters each. Never raises.
    """
    lines = _clean(tail)
    ordinary = _ordinary_after(lines)
    errors = sorted([*find_tracebacks(lines), *find_crashes(lines, ordinary)], key=lambda error: error.start)
    error = _cause([error for error in errors if error.weight], ordinary)
    if error is None:
        complaint = next((line for line in lines[-1:] if _COMPLAINT.match(line)), None)
        return Excerpt(
            complaint and _cut(complaint, MAX_EXCEPTION), None, _show(lines[-max_lines:], max_lines)
        )
    if ordinary[error.end] > STALE_AFTER:
        shown = fold(error.shown, max(max_lines * 2 // 3 - 1, 1), from_start=error.is_crash)
        rest = lines[error.end :]
        return Excerpt(None, None, _show(fold([*shown, *rest], max_lines, len(shown)), max_lines))
    folded = fold(error.shown, max_lines, from_start=error.is_crash)
    exception = error.exception and _cut(error.exception, MAX_EXCEPTION)
    return Excerpt(exception, error.where and _cut(error.where, MAX_LINE), _show(folded, max_lines))


def _clean(tail: bytes) -> list[str]:
    """The lines as a terminal would show them: only the text after each line's last carriage return."""
    text = tail[-MAX_TAIL:].decode("utf-8", "replace")
    lines = [
        printable(without_sequences(line).rstrip("\r").rpartition("\r")[2]).rstrip()
        for line in text.split("\n")
    ]
    while lines and not lines[-1]:
        lines.pop()
    first = next((index for index, line in enumerate(lines) if line), 0)
    return lines[first:]


def _ordinary_after(lines: Sequence[str]) -> list[int]:
    """For each index, how many lines from there on are neither blank, indented nor an aftermath."""
    counts = [0] * (len(lines) + 1)
    for index in range(len(lines) - 1, -1, -1):
        line = lines[index]
        plain = bool(line) and not line[0].isspace() and not AFTERMATH.match(line)
        counts[index] = counts[index + 1] + plain
    return counts


def _cause(errors: Sequence[Finding], ordinary: Sequence[int]) -> Finding | None:
    """The error that ended the worker: the last, unless it is a crash in the teardown after another."""
    fresh = [error for error in errors if ordinary[error.end] <= STALE_AFTER] or errors
    if not fresh:
        return None
    heaviest = max(error.weight for error in fresh)
    *earlier, last = [error for error in fresh if error.weight == heaviest]
    before = earlier[-1] if earlier else None
    if before is None or not last.is_crash:
        return last
    if before.is_crash and (last.exception or "").endswith(" error: Aborted"):
        return replace(
            before, end=last.end, shown=(*before.shown, *last.shown), where=before.where or last.where
        )
    # An uncaught exception is followed by the teardown, which may crash; a handled one by further output.
    is_teardown = last.is_idle and ordinary[before.end] - ordinary[last.start] <= 5
    return before if is_teardown and not before.is_crash else last


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _show(lines: Sequence[str], max_lines: int) -> tuple[str, ...]:
    return tuple(_cut(line, MAX_LINE) for line in lines[: max(max_lines, 0)])
