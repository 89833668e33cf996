"""A worker that failed by itself, and what it recorded about its failure."""

from __future__ import annotations

from dsl._record import Record


class ErrorRecord(Record):
    """What a worker recorded about the exception that ended it. Texts are as written, with line ends."""

    message: str
    """What the exception says, or the whole text of the file."""
    traceback: str
    """Its stack; empty if there is none."""
    time_s: float | None
    """Seconds since the epoch, as recorded."""
    exit_code: int | None
    """Exit code of a process below the worker, if the worker took the record over from that process."""
    is_text: bool = False
    """The file holds a plain message, not the parts of an exception."""


class Failure(Record):
    """A worker that failed by itself."""

    rank: int
    """Global rank."""
    local_rank: int
    """Index within its node."""
    host: str
    """Name of the node."""
    pid: int
    """Process id; 0 if it never started."""
    exitcode: int
    """Exit code; for a signal, minus its number; 126 or 127 if the worker could not be executed."""
    time_ns: int
    """CLOCK_REALTIME when its death was noticed."""
    order: int
    """Position among the deaths of the group as the kernel reported them."""
    error_file: str | None
    """Path of its record, if it left one that can be read."""
    recorded: ErrorRecord | None
    """That record."""
    recorded_ns: int | None
    """CLOCK_REALTIME of the file, if that time is plausible."""
    reason: str
    """Why it failed, as one clause."""
    is_stopped: bool = False
    """It recorded its failure before the first death, and was still cleaning up when we stopped the group."""
