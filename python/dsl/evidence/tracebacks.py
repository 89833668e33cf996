"""Finds Python tracebacks in a worker's output, including chained, nested, prefixed and cut-off ones."""

from __future__ import annotations

import re

from dsl._record import replace
from dsl.evidence.crashes import starts_crash
from dsl.evidence.findings import AFTERMATH, HEADER, MAX_DOUBTFUL, Finding, fold, innermost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_EXCEPTION = 300  # characters of an exception's text

GROUP_HEADER = "  + Exception Group "
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# PyTorch puts this before each line of an uncaught exception once a process group exists (2.3 and later).
RANK = r"\[rank\d+\]: "

_FRAME = re.compile(r'  File "(.+)", line (\d+)(?:, in (.+))?$')
_CUT_OFF = re.compile(rf'({RANK}|[ ]{{2,}}\| )?  (?:File "|  +\S)')
_NAME = re.compile(r"([^\W\d][\w.]*(?:\.<locals>\.[\w.<>]+)?)(?:: |:?$)")
_TELLING = re.compile(r"(?:Error|Exception|Exit|Interrupt|Warning|Iteration|Group|Timeout|\berror)$")
_MARGIN = re.compile(r"( *)[|+](?:-| |$)")
_LOGGED = re.compile(r"\[?(?:\d{4}-\d\d-\d\d|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b)|I\d{4} ")


def find_tracebacks(lines: Sequence[str]) -> list[Finding]:
    """Every traceback; chained tracebacks count as one."""
    errors: list[Finding] = []
    index = 0
    while index < len(lines):
        error, after = _traceback_at(lines, index)
        if error is not None and errors and _is_chained(lines, errors[-1], error):
            between = tuple(_unprefixed(line) for line in lines[errors[-1].end : error.start])
            first = errors.pop()
            # The second traceback of an exception from another process only shows where it was awaited.
            where = first.where if first.shown[0].endswith("RemoteTraceback:") else error.where
            shown = first.shown + between + error.shown
            error = replace(error, start=first.start, weight=first.weight, where=where, shown=shown)
        if error is not None:
            errors.append(error)
        index = max(after, index + 1)
    return errors


def _traceback_at(lines: Sequence[str], index: int) -> tuple[Finding | None, int]:
    """The traceback that starts at this line, or None, and the index where the search goes on."""
    line = lines[index]
    has_header = line.endswith(HEADER)
    before = line[: -len(HEADER)] if has_header else ""
    if has_header and before.endswith(GROUP_HEADER):
        return _group_at(lines, index, before[: -len(GROUP_HEADER)])
    if has_header:
        following = lines[index + 1] if index + 1 < len(lines) else ""
        prefix = before if following.startswith(f"{before}  ") else ""
        first = index + 1
    else:
        match = _CUT_OFF.match(line)
        if match is None or not (index <= 1 or "  File " in line):
            return None, index + 1
        prefix, first = match[1] or "", index
    frames, end, found = _frames(lines, first, prefix)
    if not has_header and not (found and _is_whole(frames, lines[end][len(prefix) :])):
        return None, end
    message, after = _message(lines, end, prefix) if found else ([], end)
    start, weight = _led_in(lines, index)
    head = [_unprefixed(text) for text in lines[start:index]]
    if has_header:
        head.append("Original " + HEADER if before.endswith("Original ") else HEADER)
    body = [text[len(prefix) :] for text in lines[first:end]]
    shown = (*head, *body, *fold(message, 10, from_start=True))
    exception = _joined(message) if found else None
    return Finding(start, after, exception, innermost(frames), shown, weight), after


def _frames(lines: Sequence[str], index: int, prefix: str) -> tuple[list[tuple[str, ...]], int, bool]:
    """The frames from this line on, the index behind them, and whether an exception's line is there.

    A few lines of other writers between the frames are skipped.
    """
    frames: list[tuple[str, ...]] = []
    while index < len(lines):
        line = lines[index]
        body = line[len(prefix) :] if line.startswith(prefix) else ""
        if body.startswith("  "):
            match = _FRAME.match(body)
            if match:
                frames.append((match[1], match[2], match[3] or ""))
            index += 1
            continue
        if body and _is_exception(body):
            return frames, index, True
        for ahead in range(index + 1, min(index + 4, len(lines))):
            other = lines[ahead][len(prefix) :] if lines[ahead].startswith(prefix) else ""
            if other.endswith(HEADER):
                return frames, index, False
            is_source = not body and other.startswith("  ")
            if is_source or _FRAME.match(other) or _is_exception(other, surely=True):
                index = ahead
                break
        else:
            return frames, index, False
    return frames, index, False


def _is_whole(frames: Sequence[tuple[str, ...]], exception: str) -> bool:
    """Whether frames without a header, together with the line behind them, are a traceback."""
    if frames and not frames[-1][2]:
        return exception.startswith(("SyntaxError", "IndentationError", "TabError"))
    return _is_exception(exception, surely=True)


def _is_exception(body: str, *, surely: bool = False) -> bool:
    match = _NAME.match(body)
    if match is None:
        return False
    if "." in match[1] or _TELLING.search(match[1]):
        return True
    return not surely and (match[1] != body or body[0].isupper())


def _message(lines: Sequence[str], index: int, prefix: str) -> tuple[list[str], int]:
    """All lines of an exception's message without the prefix, and the index behind them."""
    message = [lines[index][len(prefix) :]]
    end = index + 1
    doubtful = 0
    for at in range(end, min(end + 200, len(lines))):
        line = lines[at]
        inside = line.startswith(prefix) or line == prefix.rstrip()
        body = line[len(prefix) :]
        if not inside or HEADER in line or body in CHAINED or starts_crash(line):
            break
        if AFTERMATH.match(line) or _LOGGED.match(line):
            break
        if body and not prefix and not body[0].isspace():
            doubtful += 1
            if not lines[at - 1] or doubtful > MAX_DOUBTFUL:
                break
        message.append(body)
        end = at + 1
    while len(message) > 1 and not message[-1]:
        message.pop()
        end -= 1
    return message, end


def _led_in(lines: Sequence[str], index: int) -> tuple[int, int]:
    """The index where the lines that introduce a traceback begin, and the weight that they give it."""
    if index == 0:
        return index, 2
    line = _unprefixed(lines[index - 1])
    if line == '"""' and index > 1 and lines[index - 2].endswith("RemoteTraceback:"):
        return index - 2, 2
    if line.startswith(("Exception ignored", "Error in atexit", "--- Logging error", "future: <")):
        return index - 1, 0
    if line.startswith("Exception in thread ") or re.match(r"Process \S+:$", line):
        return index - 1, 1
    return index, 2


def _is_chained(lines: Sequence[str], first: Finding, second: Finding) -> bool:
    """Whether the second traceback continues the first: it is chained to it, or part of its message."""
    between = [line for line in map(_unprefixed, lines[first.end : second.start]) if line]
    if second.shown[0].startswith("Original "):
        return not between
    return bool(between) and (between[-1] in CHAINED or between[-1].startswith("-- Process "))


def _group_at(lines: Sequence[str], index: int, prefix: str) -> tuple[Finding, int]:
    """An exception group as one finding; its text is the group's own line and its first member's line."""
    parts: list[tuple[str, list[tuple[str, ...]]]] = []
    frames: list[tuple[str, ...]] = []
    is_due = True
    end = index + 1
    while end < len(lines):
        body = lines[end][len(prefix) :] if lines[end].startswith(prefix) else ""
        margin = _MARGIN.match(body)
        if margin is None:
            break
        inner = body[len(margin[1]) + 2 :]
        frame = _FRAME.match(inner)
        if frame:
            frames.append((frame[1], frame[2], frame[3] or ""))
        elif inner.endswith(HEADER) or body.lstrip().startswith("+-"):
            frames, is_due = [], True
        elif is_due and _is_exception(inner):
            parts.append((inner, frames))
            is_due = False
        end += 1
    group = next((part for part in parts if "sub-exception" in part[0]), None)
    member = next((part for part in parts if "sub-exception" not in part[0]), None)
    said = [part[0] for part in (group, member) if part]
    where = innermost((member and member[1]) or (group and group[1]) or [])
    start, weight = _led_in(lines, index)
    head = tuple(_unprefixed(line) for line in lines[start:index])
    shown = head + tuple(line[len(prefix) :] for line in lines[index:end])
    return Finding(start, end, ", first ".join(said) or None, where, shown, weight), end


def _joined(message: Sequence[str]) -> str:
    """A message as one line: its first line, joined with the lines that continue it."""
    text = message[0].strip()
    for line in message[1:]:
        if not line:
            continue
        if len(text) > MAX_EXCEPTION or not (line[0].isspace() or text.endswith(":")):
            break
        text = f"{text} {line.strip()}"
    return text


def _unprefixed(line: str) -> str:
    return re.sub(f"^{RANK.rstrip()} ?", "", line)
