"""``dsl-wait``: wait for jobs in the background, and end with their exit code."""

from __future__ import annotations

import os

from dsl.cli.command import Command
from dsl.errors import UsageError
from dsl.lists import quote
from dsl.observe.job_folders import KILLED, JobFolders

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from dsl.cli.help import ToolParser
    from dsl.observe.job_folders import BackgroundJob

COMMAND = Command("dsl-wait")

JOB_HELP = "pid of the job (default: the newest that runs, or else the newest)"


def main(argv: Sequence[str] | None = None) -> int:
    """Wait for the jobs. Returns the first exit code that is not 0, in their order; 2: no such job."""
    return COMMAND.run(lambda: _run(make_parser().parse_args(argv).jobs))


def _run(words: Sequence[str]) -> int:
    folders = JobFolders(os.environ)
    jobs = [folders.find(word) or no_such_job(word) for word in words or [""]]
    codes = [wait(job, COMMAND) for job in jobs]
    return next((code for code in codes if code), 0)


def no_such_job(word: str) -> NoReturn:
    """Raise UsageError."""
    which = f"no job {quote(word)}" if word else "no job"
    raise UsageError(f"{which} of yours has gone to the background on this host (dsl --detach)")


def wait(job: BackgroundJob, command: Command) -> int:
    """Wait for a job, and return its exit code. ``command`` says why a job has none."""
    job.wait()
    end = job.end()
    if end is None:
        command.say(f"job {job.pid} has left no exit code: its guard was killed")
        return KILLED
    return end.code


def make_parser() -> ToolParser:
    """The parser of the options."""
    from dsl.cli.help import ToolParser

    parser = ToolParser(
        COMMAND.name,
        "[OPTIONS] [JOB ...]",
        "Wait for jobs that dsl --detach has started, and end with their exit code.",
        "The exit code is the first that is not 0, in the order of the jobs; 2 if there is no such job.",
    )
    parser.add_job(JOB_HELP, name="jobs", nargs="*")
    return parser
