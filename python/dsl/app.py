"""Strings plan, engine and report together: runs this node's part of a job."""

from __future__ import annotations

import os
import sys
import time

from dsl import (
    BindingError,
    Ended,
    EngineError,
    Exited,
    Guard,
    Killing,
    LogNotice,
    SignalReceived,
    SpecError,
    Stopping,
    Supervisor,
)
from dsl.errors import DslError, PidFileError
from dsl.model import LEVELS
from dsl.spec import launch_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl import Event, Exit, GuardOutcome
    from dsl.model import NodePlan

SIGINT = 2
INTERNAL_ERROR = 70  # sysexits.h: an error of our own
STALL_MS = 500


def run_node(plan: NodePlan) -> int:
    """Start the workers of one node, watch them, end them. Returns the command's exit code (G2).

    Forks: the caller becomes the guard, the child (the agent) does the work and never returns from here.
    """
    try:
        guard = Guard()
    except EngineError as error:
        return _refuse(error)
    _flush()
    pid = os.fork()
    if pid == 0:
        code = INTERNAL_ERROR
        try:
            code = _agent(plan, guard)
        finally:
            _flush()
            os._exit(code)
    outcome = guard.supervise(pid, plan.grace_s, reopens=plan.has_log_files)
    _report_agent(pid, outcome)
    if outcome.terminal_interrupt and outcome.code == 128 + SIGINT:
        _die_of_interrupt()
    _flush()
    os._exit(outcome.code)


def _agent(plan: NodePlan, guard: Guard) -> int:
    try:
        guard.enter_agent()
        with PidFile(plan.pid_file):
            return _run(plan, Supervisor(guard=guard))
    except EngineError as error:
        return _refuse(error)
    except DslError as error:
        _say(f"error: {error}")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 -- the last resort: users never see a traceback of ours
        _say(f"internal error: {type(error).__name__}: {error}, please report it")
        return INTERNAL_ERROR


def _refuse(error: EngineError) -> int:
    _say(f"error: {error}")
    return 2 if isinstance(error, (BindingError, SpecError)) else 1


class PidFile:
    """A file with the agent's pid for as long as the job runs; nothing without a path."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def __enter__(self) -> None:
        if self._path is None:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            file = os.open(self._path, flags, 0o600)
        except OSError as error:
            message = (
                f"cannot write the pid file {self._path}: {error.strerror}, remove it if it is a leftover"
            )
            raise PidFileError(message) from error
        os.write(file, str(os.getpid()).encode())
        os.close(file)

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            try:
                os.unlink(self._path)
            except OSError:
                return  # somebody has tidied up before us


def _run(plan: NodePlan, supervisor: Supervisor) -> int:
    begin_s = time.monotonic()
    supervisor.start(launch_spec(plan, stdin_is_terminal=_is_terminal()))
    # What is needed at the end is made ready while the workers start.
    from dsl.evidence import oom_kills
    from dsl.report import exit_code

    kills_before = oom_kills()
    exits: list[Exit] = []
    while True:
        for event in supervisor.wait(routine=False):
            if isinstance(event, Exited):
                exits.append(event.exit)
            elif isinstance(event, Ended):
                _show_verdict(plan, exits, event, begin_s, kills_before)
                return exit_code(exits, event)
            elif isinstance(event, LogNotice):
                if LEVELS["warning"] >= LEVELS[plan.log_level]:
                    _say(f"warning: {_describe(event)}")
            elif LEVELS["info"] >= LEVELS[plan.log_level]:
                _narrate(plan, event, len(exits))


def _describe(notice: LogNotice) -> str:
    if notice.kind == "file_failed":
        reason = os.strerror(notice.errno or 0)
        return f"cannot write {notice.path}: {reason}, the job goes on without what does not fit"
    if notice.kind == "bytes_lost":
        return f"{notice.path} lacks {notice.count} bytes that could not be written"
    if notice.kind == "console_closed":
        return "nobody reads the output any more, the job goes on"
    return f"{notice.count} lines were not shown, because nobody read them in time"


def _narrate(plan: NodePlan, event: Event, ended: int) -> None:
    from dsl.report import signal_name

    if isinstance(event, SignalReceived) and event.action != "forward":
        left = len(plan.workers) - ended
        name = signal_name(event.signum)
        if event.action == "stop":
            _say(
                f"{name} received: stopping {left} worker{'s' if left != 1 else ''} "
                f"(grace {plan.grace_s:g} s, a second signal kills at once)"
            )
        elif event.action == "reopen":
            _say(f"{name} received: log files were opened anew")
        else:
            _say(f"{name} received: already stopping, a second signal kills at once")
    elif isinstance(event, Killing) and event.workers:
        _say(f"killing {len(event.workers)} worker{'s' if len(event.workers) != 1 else ''} still alive")
    elif isinstance(event, Stopping) and event.reason == "guard_lost":
        _say("the guard process is gone: killing the job")


def _show_verdict(plan: NodePlan, exits: list[Exit], ended: Ended, begin_s: float, kills_before: int) -> None:
    from dsl.report import verdict

    evidence, tail, path = "", ended.tail, None
    cause = ended.first_failure
    if cause is not None:
        path = plan.workers[cause.worker].log_path
        if path is not None and not tail:
            from dsl.evidence import last_bytes

            tail = last_bytes(path)
    if cause is not None and cause.signal == 9:
        from dsl.evidence import kernel_log, oom_kills
        from dsl.report import memory_evidence

        evidence = memory_evidence(cause, kernel_log(begin_s), oom_kills() - kills_before)
    for line in verdict(plan, exits, ended, evidence, tail, path):
        _say(line)


def _report_agent(pid: int, outcome: GuardOutcome) -> None:
    if outcome.agent_signal is not None:
        from dsl.report import signal_name

        name = signal_name(outcome.agent_signal)
        _say(f"the agent (pid {pid}) was killed by {name}: its workers were ended")
    for survivor, state, name in outcome.survivors:
        _say(f"process {survivor} ({name}, state {state}) did not die of SIGKILL")


def _die_of_interrupt() -> None:
    """End as Ctrl-C ends a program, so that a shell's loop stops too. Pid 1 cannot, and goes on."""
    import signal

    _flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.kill(os.getpid(), signal.SIGINT)


def _is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            continue  # nobody reads it


def _say(text: str) -> None:
    """One line on stderr, unless nobody takes it: a stopped terminal or pager must not hold the job."""
    import select

    rest = f"dsl: {' '.join(text.splitlines())}\n".encode(errors="backslashreplace")
    try:
        poller = select.poll()
        poller.register(2, select.POLLOUT)
        while rest and poller.poll(STALL_MS):
            rest = rest[os.write(2, rest[: select.PIPE_BUF]) :]
    except OSError:
        return  # nobody reads it
