"""``dsl-attach`` and ``dsl-wait``: follow the output of a job, and wait for jobs in the background."""

from __future__ import annotations

import argparse
import os
import signal
import time

from dsl.agent.session import die_of_interrupt
from dsl.cli.tool import Tool, ToolParser
from dsl.errors import DslError, JobFormatError, UsageError
from dsl.lists import parse_number, quote
from dsl.output.job_folders import KILLED, JobFolders
from dsl.report.speak import unwritten
from dsl.signals import ENDING
from dsl.view.jobs import RunningJob, call_jobs, find_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from dsl.output.job_folders import BackgroundJob

JOB_HELP = "pid of the job (default: the newest that runs, or else the newest)"

PAUSE_S = 0.1
"""How often we look whether a silent job has written something."""

READ_BYTES = 1 << 16


class Detached(BaseException):
    """A signal has ended the command, not the job."""


# ---------------------------------------------------------------------- dsl-wait


def _wait_for_all(options: argparse.Namespace) -> int:
    """Wait for the jobs. Returns the first exit code that is not 0, in their order."""
    folders = JobFolders(os.environ)
    jobs = [folders.find(word) or no_such_job(word) for word in options.jobs or [""]]
    codes = [_wait(job, WAIT) for job in jobs]
    return next((code for code in codes if code), 0)


def no_such_job(word: str) -> NoReturn:
    """Raise UsageError."""
    which = f"no job {quote(word)}" if word else "no job"
    raise UsageError(f"{which} of yours has gone to the background on this host (dsl --detach)")


def _wait(job: BackgroundJob, tool: Tool) -> int:
    """Wait for a job, and return its exit code. ``tool`` says why a job has none."""
    job.wait()
    end = job.end()
    if end is None:
        tool.say(f"job {job.pid} has left no exit code: its guard was killed")
        return KILLED
    return end.code


WAIT = Tool(
    "dsl-wait",
    "[OPTIONS] [JOB ...]",
    "Wait for jobs that dsl --detach has started, and end with their exit code.",
    lambda parser: parser.add_job(JOB_HELP, name="jobs", nargs="*"),
    _wait_for_all,
    "The exit code is the first that is not 0, in the order of the jobs; 2 if there is no such job.",
)


# ---------------------------------------------------------------------- dsl-attach


def _attach(options: argparse.Namespace) -> int:
    """Show the output of a job. Returns its exit code, 0 for a job that a shell waits for.

    A signal ends this process alone, with the exit code of that signal.
    """
    found = _find(options.job or "")
    if isinstance(found, RunningJob):
        return _until_signal(found.view.pid, lambda: _follow(found))
    return _until_signal(found.pid, lambda: _show_all(found, options.lines))


def _find(word: str) -> BackgroundJob | RunningJob:
    """The job that the user means: in the background, or else one that runs elsewhere. Raises DslError."""
    kept = JobFolders(os.environ).find(word)
    if kept is not None and not kept.is_over():
        return kept
    jobs, silent = call_jobs(word, ATTACH.say)
    running = [job for job in jobs if word in ("", str(job.view.pid))]
    is_silent = any(word in ("", str(job.pid)) for job in silent)
    is_here = running or (is_silent and kept is None)
    found = find_job(word, running, silent) if is_here else kept or no_such_job(word)
    for job in jobs:
        if job is not found:
            job.close()
    return found


def _until_signal(pid: int, work: Callable[[], int]) -> int:
    for signum in ENDING:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _detach)
    try:
        return work()
    except Detached as detached:
        signum = int(detached.args[0])
        ATTACH.say(f"job {pid} runs on; dsl-attach {pid} comes back to it")
        if signum == signal.SIGINT:
            die_of_interrupt()
        return 128 + signum


def _follow(job: RunningJob) -> int:
    """Write what a job shows from now on, after its last lines. Its exit code is for its own shell."""
    try:
        for data in job.follow():
            _write(data)
    except (OSError, JobFormatError) as error:
        raise DslError(f"job {job.view.pid} cannot be followed any more: {error}") from None
    ATTACH.say(f"job {job.view.pid} has ended; the shell that has started it has its exit code")
    return 0


def _show_all(job: BackgroundJob, lines: int | None) -> int:
    show(job, lines)
    return _wait(job, ATTACH)


def show(job: BackgroundJob, lines: int | None) -> None:
    """Write the output of a job to stdout until the job is over; ``lines``: begin with the last ones.

    Raises:
        UsageError: the folder of the job is gone.
        OutputError: stdout cannot be written.
    """
    try:
        output = job.open_output()
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise UsageError(f"the output of job {job.pid} cannot be read: {reason}") from None
    if lines is not None:
        os.lseek(output, start_of(output, lines), os.SEEK_SET)
    is_whole = True
    while True:
        is_over = job.is_over()  # asked first: then all that it has written is there
        while data := os.read(output, READ_BYTES):
            _write(data)
            is_whole = data.endswith(b"\n")
        if is_over:
            words = job.words()
            _write(words if is_whole or not words else b"\n" + words)
            return
        time.sleep(PAUSE_S)


def start_of(output: int, lines: int, block_bytes: int = READ_BYTES) -> int:
    """Where the last so many lines of a file begin. ``block_bytes`` are read at a time, from the end."""
    at = os.fstat(output).st_size
    if lines == 0 or at == 0:
        return at
    at -= os.pread(output, 1, at - 1) == b"\n"  # it ends the last line, and begins none
    while at:
        begin = max(0, at - block_bytes)
        block = os.pread(output, at - begin, begin)
        end = len(block)
        while (end := block.rfind(b"\n", 0, end)) >= 0:
            lines -= 1
            if lines == 0:
                return begin + end + 1
        at = begin
    return 0


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError as error:
        raise unwritten(error) from None


def _detach(signum: int, _frame: object) -> None:
    raise Detached(signum)


def _add_attach(parser: ToolParser) -> None:
    parser.add_job(JOB_HELP)
    parser.add_argument("-n", "--lines", metavar="N", type=_count, help="begin with the last N lines")


def _count(text: str) -> int:
    number = parse_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"expected a number of lines: {quote(text)}")
    return number


ATTACH = Tool(
    "dsl-attach",
    "[OPTIONS] [JOB]",
    "Follow the output of a job. Ctrl-C does not end the job.",
    _add_attach,
    _attach,
)
