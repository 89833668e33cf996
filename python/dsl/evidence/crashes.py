"""Finds crashes outside of Python's exceptions in a worker's output."""

from __future__ import annotations

import re

from dsl.evidence.findings import HEADER, MAX_DOUBTFUL, Finding, innermost

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
