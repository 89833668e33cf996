"""The jobs of this user in the background, those that run and those that have ended: a folder for each.

``$XDG_STATE_HOME/dsl/jobs/PID-RANDOM`` holds ``job.json`` (a `JobStart`), ``output`` (what the job wrote to
stdout and stderr, as it came) and at the end ``exit.json`` (a `JobEnd`); ``words`` has the lines of dsl for
which the disk had no room. The processes that supervise the
job hold a lock on ``job.json``, so the kernel itself says when the last of them is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from dsl._record import Record
from dsl.errors import JobFolderError, JobFormatError
from dsl.model.codec import LONGEST_SHOWN, from_line, to_line
from dsl.model.request import Code, Count, Moment, Shown
from dsl.words import quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeVar

    _T = TypeVar("_T")

KEPT = 20
"""So many jobs that have ended keep their folders."""

KILLED = 128 + 9
"""The exit code of a job whose guard was killed before it could keep one."""

BEGIN, OUTPUT, WORDS, END = "job.json", "output", "words", "exit.json"
UNFINISHED = ".new"
"""Ends the name of a file that is renamed when it is whole."""

END_BYTES = 256
"""Size of the last file, which takes its room at the start: the job may fill the disk."""

WORDS_BYTES = 16 << 10
"""Room that is taken at the start for lines of dsl."""

FULL = b"[dsl: the disk was full, so lines above may be missing; these lines of dsl were kept elsewhere:]\n"
"""Comes before the first of these lines."""

MOST_WORDS = 64
"""Most words of a command that are kept."""

LONGEST_BYTES = 1 << 20
"""Most bytes that are read of a file about a job: more than such a file has."""


class JobStart(Record):
    """How a job in the background began."""

    pid: Count
    """Pid of the command."""
    words: tuple[Shown, ...]
    """The command that the user typed, or its first words."""
    cwd: Shown
    """The directory where that was; empty: it was gone."""
    host: Shown
    """Name of the machine."""
    started_ns: Moment
    """CLOCK_REALTIME when it went to the background."""


class JobEnd(Record):
    """How it ended."""

    code: Code
    """Exit code of the command."""
    ended_ns: Moment
    """CLOCK_REALTIME."""


class JobFolders:
    """The folder of all these folders, which no other user can enter."""

    def __init__(self, environ: Mapping[str, str], *, make: bool = False) -> None:
        """Open the folder, or ``make`` it if it is missing.

        Raises:
            JobFolderError: it cannot be made or opened, or is not for this user alone.
        """
        base = environ.get("XDG_STATE_HOME", "")
        if not base.startswith("/"):  # the specification says that others do not count
            base = os.path.expanduser("~/.local/state")
        self.path = f"{base}/dsl/jobs"
        self._fd = -1
        try:
            if make:
                os.makedirs(base, 0o700, exist_ok=True)
            self._fd = self._open(base, make=make)
        except OSError as error:
            if make or not isinstance(error, FileNotFoundError):
                raise self._failure(error) from None

    def _open(self, base: str, *, make: bool) -> int:
        fd = os.open(base, os.O_DIRECTORY | os.O_CLOEXEC)
        for name, closed_to_others in (("dsl", 0o022), ("jobs", 0o077)):
            above = fd
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=above)
                fd = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
            finally:
                os.close(above)
            about = os.fstat(fd)
            if about.st_uid != os.geteuid() or about.st_mode & closed_to_others:
                os.close(fd)
                raise PermissionError(0, "another user owns it, or may change it")
        return fd

    def _failure(self, error: OSError) -> JobFolderError:
        reason = (error.strerror or "").lower()
        return JobFolderError(
            f"the output of jobs cannot be kept in {quote(self.path)}: {reason}, "
            "mend that, or set XDG_STATE_HOME to another directory"
        )

    def jobs(self) -> list[BackgroundJob]:
        """The jobs of this machine, the newest first."""
        if self._fd < 0:
            return []
        own = os.uname().nodename
        found = [self.read(name) for name in os.listdir(self._fd)]
        jobs = [job for job in found if job is not None and job.begun.host == own]
        return sorted(jobs, key=lambda job: job.begun.started_ns, reverse=True)

    def read(self, name: str) -> BackgroundJob | None:
        """The job whose folder has this name; None: there is no such folder, or no job in it."""
        begun = _read_record(self._fd, f"{name}/{BEGIN}", JobStart)
        return None if begun is None else BackgroundJob(self._fd, name, begun)

    def find(self, pid: str = "") -> BackgroundJob | None:
        """The newest job that runs, or else the newest, of those with this pid if there is one."""
        jobs = [job for job in self.jobs() if pid in ("", str(job.pid))]
        running = (job for job in jobs if not job.is_over())
        return next(running, jobs[0] if jobs else None)

    def begin(self, words: Sequence[str], name: str) -> OwnFolder:
        """Make the folder of this process's job, and remove those of old jobs.

        Raises:
            JobFolderError: it cannot be made, or the file system has no locks or no room.
        """
        for job in [job for job in self.jobs() if job.is_over()][KEPT:]:
            job.remove()
        shown = tuple([word[:LONGEST_SHOWN] for word in words[:MOST_WORDS]])
        try:
            cwd = os.getcwd()
        except OSError:
            cwd = ""  # it is gone
        begun = JobStart(os.getpid(), shown, cwd, os.uname().nodename, time.time_ns())
        try:
            return OwnFolder(self._fd, name, begun)
        except OSError as error:
            BackgroundJob(self._fd, name, begun).remove()
            raise self._failure(error) from None


class BackgroundJob:
    """A job that runs in the background, or has run there."""

    def __init__(self, top: int, name: str, begun: JobStart) -> None:
        """``top``: descriptor of the folder in which the job's folder is."""
        self._top = top
        self._name = name
        self.begun = begun
        self.pid = begun.pid
        """Pid of the command, by which the user knows the job."""

    def is_over(self) -> bool:
        """Whether nothing supervises the job any more."""
        return self._lock(fcntl.LOCK_SH | fcntl.LOCK_NB)

    def wait(self) -> None:
        """Wait until nothing supervises the job any more."""
        self._lock(fcntl.LOCK_SH)

    def end(self) -> JobEnd | None:
        """How it ended, once it is over; None: its guard was killed."""
        return _read_record(self._top, f"{self._name}/{END}", JobEnd)

    def open_output(self) -> int:
        """Open its output for reading. Raises OSError: its folder is gone."""
        return _open_file(self._top, f"{self._name}/{OUTPUT}")

    def words(self) -> bytes:
        """The lines of dsl for which the disk had no room, once it is over."""
        try:
            with open(_open_file(self._top, f"{self._name}/{WORDS}"), "rb") as file:
                return file.read(WORDS_BYTES).rstrip(b"\0")
        except OSError:
            return b""

    def remove(self) -> None:
        """Remove its files, unless it runs, or somebody waits for it. Other files are left there."""
        if self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            with contextlib.suppress(OSError):
                for name in (BEGIN + UNFINISHED, END + UNFINISHED, END, WORDS, OUTPUT, BEGIN):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(f"{self._name}/{name}", dir_fd=self._top)
                os.rmdir(self._name, dir_fd=self._top)

    def _lock(self, operation: int) -> bool:
        """Take the lock for an instant; false: the job has it. Where there is no file, nobody holds it."""
        try:
            fd = _open_file(self._top, f"{self._name}/{BEGIN}")
        except OSError:
            return True
        try:
            fcntl.flock(fd, operation)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True


class OwnFolder:
    """The folder of this process's own job. The lock goes with the last process that has this object."""

    def __init__(self, top: int, name: str, begun: JobStart) -> None:
        """Make the folder and its files. Raises OSError."""
        self._top = top
        self._name = name
        os.mkdir(name, 0o700, dir_fd=top)
        self.output = self._make(OUTPUT, os.O_APPEND)
        """Descriptor of the file for the output."""
        self._end = self._make(END + UNFINISHED)
        os.write(self._end, b" " * END_BYTES)
        self._words = self._make(WORDS)
        _fill(self._words, WORDS_BYTES)
        self._lock = self._make(BEGIN + UNFINISHED)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, to_line(begun))
        self._finish(BEGIN)

    def keep(self, words: bytes) -> None:
        """Keep lines of dsl for which the disk has no room. What is too much is dropped."""
        at = os.lseek(self._words, 0, os.SEEK_CUR)  # guard and agent share it
        words = words if at else FULL + words
        os.write(self._words, words[: WORDS_BYTES - at])

    def end(self, code: int) -> None:
        """Keep the exit code. Raises OSError."""
        if not os.lseek(self._words, 0, os.SEEK_CUR):
            os.unlink(f"{self._name}/{WORDS}", dir_fd=self._top)
        os.pwrite(self._end, to_line(JobEnd(code, time.time_ns())), 0)
        self._finish(END)

    def _make(self, name: str, more_flags: int = 0) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | more_flags
        return os.open(f"{self._name}/{name}", flags, 0o600, dir_fd=self._top)

    def _finish(self, name: str) -> None:
        path = f"{self._name}/{name}"
        os.rename(path + UNFINISHED, path, src_dir_fd=self._top, dst_dir_fd=self._top)


def _fill(fd: int, size: int) -> None:
    """Take room on the disk. Raises OSError: there is too little."""
    zeros = bytes(size)
    while zeros:
        zeros = zeros[os.write(fd, zeros) :]
    os.lseek(fd, 0, os.SEEK_SET)


def _open_file(top: int, path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=top)


def _read_record(top: int, path: str, kind: type[_T]) -> _T | None:
    """The record in a file; None if there is none, or something else."""
    try:
        with open(_open_file(top, path), "rb") as file:
            found: _T = from_line(file.read(LONGEST_BYTES), {kind.__name__: kind})
    except (OSError, JobFormatError):
        return None
    return found
