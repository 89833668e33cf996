"""Evidence about a failure: the kernel's log, the end of a log file, and a full disk."""

from __future__ import annotations

import errno
import os

OOM_WORDS = ("oom-kill:", "Killed process", "Out of memory", "Memory cgroup out of memory")

HANDLING = b"\nDuring handling of the above exception, another exception occurred:\n"

# The kernel stamps its log with a clock that differs a little from the one that we can read.
CLOCK_SLACK_S = 2.0


def kernel_log(since_s: float = 0.0) -> list[str]:
    """Lines of the kernel's log about out-of-memory kills; empty if we may not read the log.

    ``since_s`` is a value of `time.monotonic`. Older lines may be about an earlier process with the same pid.
    """
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    lines = []
    try:
        for _ in range(20_000):
            try:
                line = os.read(log, 8192).decode(errors="replace")
            except BrokenPipeError:
                continue  # the oldest lines were overwritten meanwhile
            except OSError:
                break
            if not line:
                break
            if any(word in line for word in OOM_WORDS) and _stamp_s(line) >= since_s - CLOCK_SLACK_S:
                lines.append(line)
    finally:
        os.close(log)
    return lines


def _stamp_s(record: str) -> float:
    """Time of a record, ``PRIORITY,SEQUENCE,MICROSECONDS,...;TEXT``."""
    fields = record.partition(";")[0].split(",")
    return int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdecimal() else float("inf")


def last_bytes(path: str, count: int = 16384) -> bytes:
    """The end of a log file; empty when it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        os.lseek(file, max(0, os.fstat(file).st_size - count), os.SEEK_SET)
        return os.read(file, count)
    except OSError:
        return b""
    finally:
        os.close(file)


def space_problem(path: str) -> str:
    """Why nothing more fits into the directory of this file; empty if there is space, or we cannot try.

    We try by writing to a file without a name: unlike the file system's counters, that includes quotas.
    """
    try:
        file = os.open(os.path.dirname(path) or ".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _if_full(error)
    try:
        os.write(file, bytes(8192))
    except OSError as error:
        return _if_full(error)
    finally:
        os.close(file)
    return ""


def _if_full(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""


def without_lost_record(tail: bytes, error_file: str | None) -> bytes:
    """The last output of a worker, up to where torch's ``@record`` failed to write the error file.

    The directory of that file may have been removed. The exception to record comes before that failure.
    """
    if error_file is None:
        return tail
    lost = tail.rfind(f"No such file or directory: {error_file!r}".encode())
    handling = tail.rfind(HANDLING, 0, max(lost, 0))
    return tail[:handling] if handling >= 0 else tail
