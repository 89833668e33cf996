"""Strings plan, engine and report together: runs this node's part of a job."""

from __future__ import annotations

import os

from dsl import BindingError, EngineError, Guard, SpecError, Supervisor
from dsl.attempts import REQUEUE_CODE, flush_output, run_attempt
from dsl.errors import DslError, PidFileError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dsl import GuardOutcome
    from dsl.attempts import Attempt, Listener
    from dsl.model import NodePlan, Restarts
    from dsl.narrator import Narrator

SIGINT = 2
INTERNAL_ERROR = 70  # sysexits.h: an error of our own


def run_node(plan: NodePlan, restarts: Restarts | None = None) -> int:
    """Start the workers of one node, watch them, end them. Returns the command's exit code (G2).

    ``restarts``: what is done when they fail (None: nothing). Forks: the caller becomes the guard, the child
    (the agent) does the work and never returns from here.
    """
    try:
        guard = Guard(plan.signals, preempt_grace_s=plan.preempt_grace_s)
    except EngineError as error:
        return _refuse(plan, error)
    flush_output()
    pid = os.fork()
    if pid == 0:
        code = INTERNAL_ERROR
        try:
            code = _agent(plan, restarts, guard)
        finally:
            flush_output()
            os._exit(code)
    outcome = guard.supervise(pid, plan.grace_s, reopens=plan.has_log_files)
    _report_agent(plan, pid, outcome)
    if outcome.terminal_interrupt and outcome.code == 128 + SIGINT:
        _die_of_interrupt()
    flush_output()
    os._exit(outcome.code)


def _agent(plan: NodePlan, restarts: Restarts | None, guard: Guard) -> int:
    try:
        guard.enter_agent()
        with PidFile(plan.pid_file):
            return _run(plan, restarts, Supervisor(guard=guard))
    except EngineError as error:
        return _refuse(plan, error)
    except DslError as error:
        _say(plan, f"error: {error}")
        return error.exit_code
    except Exception as error:  # noqa: BLE001 -- the last resort: users never see a traceback of ours
        _say(plan, f"internal error: {type(error).__name__}: {error}, please report it")
        return INTERNAL_ERROR


def _refuse(plan: NodePlan, error: EngineError) -> int:
    _say(plan, f"error: {error}")
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


def _run(plan: NodePlan, restarts: Restarts | None, supervisor: Supervisor) -> int:
    attempts: list[Attempt] = []
    code = 1
    try:
        narrator = _run_attempts(plan, restarts, supervisor, attempts)
        from dsl.report import exit_code

        last = attempts[-1]
        code = REQUEUE_CODE if last.is_preempted else exit_code(last.exits, last.ended, last.cause())
        narrator.end(attempts)
        return code
    finally:
        if restarts is not None and not restarts.keeps_run_dir:
            from dsl.plan.logs import remove_run_dir

            remove_run_dir(restarts.run_dir, len(attempts), len(plan.workers), succeeded=code == 0)


def _run_attempts(
    plan: NodePlan, restarts: Restarts | None, supervisor: Supervisor, attempts: list[Attempt]
) -> Narrator:
    """Start the workers until they end well or no restart is left; every attempt goes to ``attempts``."""
    narrators: list[Narrator] = []

    def prepare() -> Listener:
        # Whoever speaks is made ready while the workers start.
        from dsl.narrator import Narrator

        if not narrators:
            narrators.append(Narrator(plan))
        return narrators[0].prepare()

    while True:
        attempt = run_attempt(supervisor, plan, prepare, stdin_is_terminal=_is_terminal())
        attempts.append(attempt)
        narrator = narrators[0]
        if restarts is None or plan.attempt >= restarts.maximum or not attempt.can_be_restarted:
            return narrator
        from dsl.plan.logs import make_run_dirs

        try:
            plan = restarts.plan(plan.attempt + 1)
            make_run_dirs(plan.run_dirs)
        except DslError as error:
            narrator.say(f"error: the workers cannot be started again: {error}")
            return narrator
        narrator.restart(attempts, restarts.maximum)


def _report_agent(plan: NodePlan, pid: int, outcome: GuardOutcome) -> None:
    if outcome.agent_signal is not None:
        from dsl.signals import signal_name

        name = signal_name(outcome.agent_signal)
        _say(plan, f"the agent (pid {pid}) was killed by {name}: its workers were ended")
    if outcome.survivors:
        from dsl.report import survivor

        for one in outcome.survivors:
            _say(plan, survivor(*one))


def _die_of_interrupt() -> None:
    """End as Ctrl-C ends a program, so that a shell's loop stops too. Pid 1 cannot, and goes on."""
    import signal

    flush_output()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.kill(os.getpid(), signal.SIGINT)


def _is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def _say(plan: NodePlan, text: str) -> None:
    from dsl.narrator import say

    say(plan.command, text)
