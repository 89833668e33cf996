"""An error found in a worker's last output, and what the modules that search for errors share."""

from __future__ import annotations

import re

from dsl._record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

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
