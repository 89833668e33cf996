"""The standard streams of a forked worker, as a fresh interpreter would have them."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_NAMES = ("stdin", "stdout", "stderr")


def flush() -> None:
    """Write what the streams hold: after a fork, both processes would write it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        if stream is not None:
            try:
                stream.flush()
            except (OSError, ValueError):
                continue


def line_buffering() -> dict[str, bool]:
    """By name, whether each stream writes line by line. Missing and unusable streams are left out."""
    first = {name: getattr(sys, f"__{name}__", None) for name in _NAMES}
    return {name: one.line_buffering for name, one in first.items() if one is not None and _is_whole(one)}


def reopen(by_line: Mapping[str, bool] | None = None) -> None:
    """Begin the streams anew on the descriptors 0 to 2, which lead elsewhere now.

    The objects stay the same, because modules that were imported before hold them. Encoding and error handler
    stay the same, too, as environment and locale do. The stream of a closed descriptor becomes None.
    ``by_line``: by name, whether a stream writes line by line, if imported code has chosen that.
    """
    for fd, name in enumerate(_NAMES):
        first = getattr(sys, f"__{name}__", None)
        if first is not None and not _is_whole(first):
            continue
        now = _reopened(first, fd, by_line=(by_line or {}).get(name)) if _is_open(fd) else None
        # A module may have replaced the first stream by one of its own.
        if getattr(sys, name, None) is first:
            setattr(sys, name, now)
        setattr(sys, f"__{name}__", now)


def _is_whole(stream: Any) -> bool:
    """Whether a stream is usable: it is not closed, and still has its buffer."""
    try:
        return not stream.closed
    except ValueError:
        return False


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _reopened(stream: Any, fd: int, *, by_line: bool | None) -> Any:
    if stream is None:
        return None
    from _io import FileIO

    is_written = fd > 0
    is_buffered = hasattr(stream.buffer, "raw")
    encoding, errors, writes_at_once = stream.encoding, stream.errors, stream.write_through
    # A new one, because the object remembers whether it can seek.
    raw: Any = FileIO(fd, "wb" if is_written else "rb", closefd=False)
    raw.name = f"<{_NAMES[fd]}>"
    if by_line is None:
        by_line = not writes_at_once and (raw.isatty() or fd == 2)
    if is_buffered:
        stream.buffer.__init__(raw, _buffer_size(fd))
    stream.__init__(
        stream.buffer if is_buffered else raw,
        encoding,
        errors,
        newline="\n",
        line_buffering=by_line,
        write_through=writes_at_once,
    )
    stream.mode = "w" if is_written else "r"
    return stream


def _buffer_size(fd: int) -> int:
    """The size of a buffer, as `open` chooses it."""
    import io

    block = os.fstat(fd).st_blksize
    if sys.version_info >= (3, 14):
        return max(min(block, 8192 * 1024), io.DEFAULT_BUFFER_SIZE)
    return block if block > 1 else io.DEFAULT_BUFFER_SIZE
