"""What a worker's last output says about its end: the exception, where it was raised, and lines to show.

Imported only when a worker has failed. The text comes from any program, so no input makes this module raise,
its work is linear in the size of the text, and its results hold no control character but the tab.
"""

from __future__ import annotations

import re

from dsl._record import Record, replace
from dsl.words import printable, without_sequences

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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


HEADER = "Traceback (most recent call last):"
MAX_DOUBTFUL = 8  # lines that we count as part of a message, though they may be other output

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d|/python\d+\.zip/|^<")
# What a process may still write after its last error: warnings, C++ log lines and stacks, other threads.
AFTERMATH = re.compile(
    r"(?:\[rank\d+\]:)?\[?[WEF]\d{4} |[^ ]+:\d+: \w*Warning: |[\w.-]+:\d+:\d+ \[\d+\] |\[[Gg]loo\]"
    r"|frame #\d+:|Exception (?:raised from|ignored|in thread) |(?:Current thread|Thread) 0x"
    r"|Extension modules: |wandb: |note: "
)


class Finding(Record):
    """One error found in the text: the lines it takes, and what it says."""

    start: int
    end: int
    exception: str | None
    where: str | None
    shown: tuple[str, ...]
    weight: int = 2  # 2: of the program, 1: of one of its threads or children, 0: ignored by Python itself
    is_crash: bool = False
    is_idle: bool = True  # of a crash: no Python code was running


def innermost(frames: Sequence[tuple[str, ...]]) -> str | None:
    """The innermost frame of the user's code, else the innermost frame of all."""
    if not frames:
        return None
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    path, line, function = (own or frames)[-1]
    folder, _, name = path.rpartition("/")
    if name in {"__init__.py", "__main__.py"} and folder:
        name = f"{folder.rpartition('/')[2]}/{name}"
    return f"{name}:{line} in {function}" if function else f"{name}:{line}"


def fold(lines: Sequence[str], limit: int, head: int = 1, *, from_start: bool = False) -> list[str]:
    """At most ``limit`` lines: the first ``head`` ones, how many are left out, and the last ones.

    ``from_start`` keeps the first lines only.
    """
    if len(lines) <= limit:
        return list(lines)
    if limit < 3:
        return list(lines[:limit] if from_start else lines[len(lines) - max(limit, 0) :])
    kept = limit - 1 if from_start else min(head, limit - 2)
    last = limit - 1 - kept
    left_out = f"... {len(lines) - kept - last} lines left out ..."
    return [*lines[:kept], left_out, *lines[len(lines) - last :]]


_FRAME_OF_DUMP = re.compile(r'  File "(.+)", line (\d+) in (.+)$')
_ABORTED = re.compile(
    r"double free or corruption|corrupted (?:size vs|double-linked)|\*\*\* .{1,40} detected \*\*\*"
    r"|(?:free|[cm]alloc|realloc|memalign|munmap_chunk|mremap_chunk|unlink_chunk|malloc_consolidate|sysmalloc"
    r"|tcache_thread_shutdown)\(\): |libc\+\+abi: terminating|==\d+==ERROR: \w+Sanitizer"
)
_PANIC = re.compile(r"thread '[^']*'(?: \(\d+\))? panicked at (.+)$")


def find_crashes(lines: Sequence[str], ordinary: Sequence[int]) -> Iterator[Finding]:
    """Every crash outside of Python's exceptions: of the interpreter, C++, Rust or the C library."""
    starts = [index for index, line in enumerate(lines) if starts_crash(line)]
    for start, limit in zip(starts, [*starts, len(lines)][1:], strict=True):
        first = lines[start]
        end = start + 1
        while (
            end < limit
            and HEADER not in lines[end]
            and ordinary[start + 1] - ordinary[end + 1] <= MAX_DOUBTFUL
        ):
            end += 1
        part = lines[start:end]
        panic = _PANIC.search(first)
        where: str | None = None
        is_idle = True
        if "Fatal Python error: " in first:
            said = first[first.index("Fatal Python error: ") :]
            part, frames = _current_thread(part)
            where, is_idle = innermost(frames), not frames
        elif panic:
            message, _, where = panic[1].rpartition(", ") if panic[1].startswith("'") else ("", "", panic[1])
            said = "panic: " + (message.strip("'") or "".join(part[1:2]))
            where = where.rstrip(":")
        elif "terminate called " in first:
            said = first[first.index("terminate called ") :]
            thrown = re.search(r"instance of '(.+)'", said)
            reason = next((line for line in part[1:4] if line.startswith("  what():")), "")
            said = ": ".join(filter(None, (thrown[1], reason[10:].strip()))) if thrown else said
        else:
            said = first
        yield Finding(start, end, said, where, tuple(part), is_crash=True, is_idle=is_idle)


def starts_crash(line: str) -> bool:
    """Whether this line begins such a crash."""
    return (
        "Fatal Python error: " in line
        or "terminate called " in line
        or _ABORTED.match(line) is not None
        or _PANIC.match(line) is not None
        or (": Assertion `" in line and line.endswith(" failed."))
    )


def _current_thread(part: Sequence[str]) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """The dump's head and the thread that crashed, and the frames of that thread, outermost first."""
    start = next((at for at, line in enumerate(part) if line.startswith("Current thread ")), None)
    if start is None:
        return part, []
    end = next((at for at in range(start + 1, len(part)) if not part[at].startswith("  ")), len(part))
    found = (_FRAME_OF_DUMP.match(line) for line in part[start + 1 : end])
    frames: list[tuple[str, ...]] = [match.groups() for match in found if match]
    between = [line for line in part[1:start] if line and not line.startswith(("  ", "Thread "))]
    return [part[0], *between, *part[start:end]], frames[::-1]


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
