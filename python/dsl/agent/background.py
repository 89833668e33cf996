"""How a command leaves its shell for the background, and what the shell hears (``--detach``).

The process that the shell has started only waits. Its child is the command: it has a session of its own, and
what it writes goes to the folder of the job (`dsl.output.job_folders`).
"""

from __future__ import annotations

import contextlib
import os
import signal

from dsl.errors import DslError
from dsl.machine import Console, use_null
from dsl.model.outcome import AttemptStarted, Outcome
from dsl.output.job_folders import JobFolders, OwnFolder
from dsl.report import speak
from dsl.report.speak import flush_output, optional, say, write
from dsl.words import ENDING, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from dsl.model.job import NodePlan


NOTE_BYTES = 32
"""Room for the number in the note to the process that waits."""

MOST_SHOWN = 1 << 20
"""Most bytes of output that the shell gets."""


class Background:
    """One command on its way to the background; a listener, because the shell waits for the first attempt."""

    def __init__(self, command: str, words: Sequence[str]) -> None:
        """``words``: what the user typed. Raises JobFolderError: the job's output cannot be kept."""
        self._command = command
        self._words = words
        self._random = os.urandom(8).hex()
        self._folders = JobFolders(os.environ, make=True)
        self._folder: OwnFolder | None = None
        self._note: int | None
        self._answer, self._note = os.pipe()
        self._said = -1

    def _name_of(self, pid: int) -> str:
        return f"{pid}-{self._random}"

    # ------------------------------------------------------------------ the process that waits

    def pass_signals(self, pid: int) -> None:
        """Pass the signals of this process on to the command, which has left the terminal."""
        for signum in ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, lambda number, _: _send(pid, number))

    def see_off(self, pid: int) -> int:
        """Wait until the job runs, and return the exit code for the shell.

        If the command ends before that, its words and its exit code become ours. Raises KeyboardInterrupt if
        Ctrl-C has ended it.
        """
        assert self._note is not None
        os.close(self._note)
        note = os.read(self._answer, NOTE_BYTES)
        job = self._folders.read(self._name_of(pid))
        if job is not None:
            with contextlib.suppress(OSError):
                said = os.pread(job.open_output(), int(note) if note else MOST_SHOWN, 0)
                write(said.decode("utf-8", "backslashreplace"))
        if note:
            known = f"dsl-attach {pid} follows it, dsl-wait {pid} waits for it"
            say(self._command, f"job {pid} runs in the background; {known}")
            return 0
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if job is not None:
            job.remove()
        if code == -signal.SIGINT:
            raise KeyboardInterrupt
        return code if code >= 0 else 128 - code

    # ------------------------------------------------------------------ the command

    def enter(self) -> Console:
        """Make the folder of the job, and write there from now on. Raises JobFolderError."""
        os.close(self._answer)
        self._folder = self._folders.begin(self._words, self._name_of(os.getpid()))
        use_null(0)
        for fd in (1, 2):
            os.dup2(self._folder.output, fd)
        speak.keep = self._folder.keep
        return Console()

    def let_go(self) -> None:
        """Give the shell its answer, before a wait for other nodes. A signal ends the wait."""
        for signum in ENDING:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, _end_wait)
        self.settle()
        self._tell_shell()

    def settle(self) -> None:
        """From here on, lines of ours go to the job's output alone, not to the shell."""
        if self._said < 0:
            self._said = os.fstat(1).st_size

    def hear(self, event: object) -> None:
        """Give the shell its answer when the first attempt begins; say if the disk is full at the end."""
        if isinstance(event, AttemptStarted):
            self._tell_shell()
        elif isinstance(event, Outcome):
            self._look_at_room(event.last.plan)

    def _look_at_room(self, plan: NodePlan) -> None:
        """Say what workers may have lost that write straight to the job's output."""
        routes = [route for worker in plan.workers for route in (worker.stdout, worker.stderr)]
        if any(route is not None and route.inherit for route in routes):
            from dsl.evidence.reports import space_problem
            from dsl.report.verdict import last_words

            path = os.readlink("/proc/self/fd/1")
            if problem := space_problem(path):
                say(self._command, last_words(path, problem))

    def _tell_shell(self) -> None:
        if self._note is not None:
            with contextlib.suppress(OSError):  # the shell has gone
                os.write(self._note, str(self._said).encode())
            os.close(self._note)
            self._note = None

    def end(self, code: int) -> None:
        """Keep the command's exit code."""
        if (folder := self._folder) is not None:
            optional(self._command, "the exit code is not kept", lambda: folder.end(code))


class _WaitEndedError(DslError):
    """A signal has ended the wait for other nodes, before there is a guard."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal_name(signum)} has ended the wait for the other nodes")
        self.exit_code = 128 + signum


def _end_wait(signum: int, _frame: object) -> None:
    raise _WaitEndedError(signum)


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def leave_shell(attend: Callable[[int], None]) -> int:
    """Go on in a child with its own session: returns 0 there, and here the child's pid.

    ``attend`` is called here with the pid, while signals that would end this process wait. Raises DslError.
    """
    flush_output()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        pid = os.fork()
        if pid:
            attend(pid)
        else:
            os.setsid()
    except OSError as error:
        raise DslError(f"cannot start a process in the background: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def stay_behind() -> None:
    """Go on in a child with its own session and /dev/null as streams, and end this process with 0."""
    if os.fork():
        os._exit(0)
    os.setsid()
    use_null(0, 1, 2)


def become(words: Sequence[str]) -> NoReturn:
    """Replace this process by another program. Raises OSError if it cannot be executed."""
    flush_output()
    os.execv(words[0], list(words))  # noqa: S606  there is no shell, on purpose
