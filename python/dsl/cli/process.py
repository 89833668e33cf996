"""The processes of a command: the guard, which the shell sees, and the agent, which does the work.

Only the commands fork, and end their process. In other programs the caller gets the agent's outcome.
"""

from __future__ import annotations

# The module behind `signal` is a part of the interpreter, so importing it needs no file. It has no stub.
import _signal  # type: ignore[import-not-found]
import os

from dsl import BindingError, EngineError, Guard, SpecError, Supervisor
from dsl.agent.agent import Agent
from dsl.agent.policy import decide
from dsl.errors import DslError
from dsl.report.narrator import Narrator
from dsl.report.speak import complain, flush_output, say
from dsl.report.verdict import survivor
from dsl.signals import signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import NoReturn, Protocol

    from typing_extensions import Self

    from dsl import GuardOutcome
    from dsl.agent.agent import Channel, Listener, Policy, Source
    from dsl.agent.planner import Planner
    from dsl.model.node import NodePlan

    class Plans(Source, Protocol):
        """A source of plans that cleans up after the job."""

        def finish(self, *, succeeded: bool) -> None:
            """Remove the files that were made for the job."""


SIGINT = 2
INTERNAL_ERROR = 70  # sysexits.h: an error of our own


ENDING = (1, 2, 3, 10, 12, 15)
"""SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2 and SIGTERM: they end a process, but a job handles them."""


class HeldSignals:
    """After `hold`, signals that would end this process wait for the guard, or for the end of the block.

    The files of a job are made after `hold`, so that no signal can end the process and leave them behind.
    """

    def __init__(self) -> None:
        self.mask: Collection[int] = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
        """The signals that were blocked before."""

    def __enter__(self) -> Self:
        return self

    def hold(self) -> None:
        """Hold signals back from now on."""
        # Flush while signals still end this process: stdout may block.
        flush_output()
        _signal.pthread_sigmask(_signal.SIG_BLOCK, ENDING)

    def __exit__(self, *_: object) -> None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, self.mask)


class Crew:
    """Listeners, channels and policy of an agent, and hooks for its start and end."""

    def __init__(
        self, listeners: Sequence[Listener], channels: Sequence[Channel] = (), policy: Policy = decide
    ) -> None:
        self.listeners = listeners
        self.channels = channels
        self.policy = policy
        self.routine = False
        """Whether listeners also get starts and clean exits."""
        self.helper: int | None = None
        """Pid of a child that helps the job, and ends by itself."""

    def stay(self) -> None:
        """Called in the guard's process when there is an agent."""

    def enter(self, supervisor: Supervisor) -> None:
        """Called in the agent's process before anything is started."""

    def refuse(self, command: str, text: str, code: int) -> None:  # noqa: ARG002  some have to pass it on
        """Report that the job cannot be run."""
        say(command, f"error: {text}")

    def leave(self, code: int) -> int:
        """Called in the agent's process, after everything else. Returns the exit code of that process."""
        return code


def run_guarded(
    planner: Plans, plan: NodePlan, crew: Crew, held: HeldSignals, *, stdin_is_terminal: bool
) -> int:
    """Run a job whose first attempt is ``plan``; see `guarded`."""
    try:
        # Make objects before the fork: the child's first write to a shared page costs several microseconds.
        agent = Agent(
            planner,
            plan,
            crew.listeners,
            crew.channels,
            policy=crew.policy,
            stdin_is_terminal=stdin_is_terminal,
            routine=crew.routine,
        )
    except EngineError as error:
        return _refuse(crew, plan, error)
    return guarded(planner, plan, crew, held, lambda supervisor: agent.run(supervisor).code)


def guarded(
    planner: Plans, plan: NodePlan, crew: Crew, held: HeldSignals, run: Callable[[Supervisor], int]
) -> int:
    """Run a job under a guard, and end this process with the command's exit code (G2).

    Forks: the caller becomes the guard, the child the agent, which calls ``run``. Returns only if one of them
    cannot be made. ``plan``: what the guard has to know of the first attempt. ``held``: the block around this
    call.
    """
    try:
        guard = Guard(plan.signals, preempt_grace_s=plan.preempt_grace_s, helper=crew.helper, mask=held.mask)
    except EngineError as error:
        return _refuse(crew, plan, error)
    if plan.pid_file is not None:
        from dsl.agent import pid_file  # noqa: F401  both processes need it, even when the package is gone
    try:
        pid = os.fork()
    except OSError as error:
        guard.discard()
        hint = ", raise the limit of processes (ulimit -u, pids.max of the control group)"
        why = f"{error.strerror}{hint if isinstance(error, BlockingIOError) else ''}"
        crew.refuse(plan.command, f"cannot start the process that watches the workers: {why}", 1)
        return 1
    if pid == 0:
        code = INTERNAL_ERROR
        try:
            code = _run_agent(run, planner, plan, guard, crew)
            code = crew.leave(code)
        finally:
            flush_output()
            os._exit(code)
    crew.stay()
    outcome = guard.supervise(pid, plan.grace_s, reopens=plan.has_log_files)
    try:
        if outcome.agent_signal is not None:
            _tidy_up(planner, plan, pid)
        _report_agent(plan, pid, outcome)
    except Exception as error:  # noqa: BLE001  a failing report never changes the exit code
        complain(plan.command, error)
    if outcome.terminal_interrupt and outcome.code == 128 + SIGINT:
        die_of_interrupt()
    flush_output()
    os._exit(1 if outcome.survivors and not outcome.code else outcome.code)


def become(words: Sequence[str]) -> NoReturn:
    """Replace this process by another program. Raises OSError if it cannot be executed."""
    flush_output()
    os.execv(words[0], list(words))  # noqa: S606  there is no shell, on purpose


def fill_standard_streams() -> None:
    """Open /dev/null for closed standard streams: else the next opened file would take the place of one."""
    while (null := os.open(os.devnull, os.O_RDWR | os.O_NOCTTY)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)


def stay_behind() -> None:
    """Go on in a child with its own session and /dev/null as streams, and end this process with 0."""
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def crew_of(planner: Planner, plan: NodePlan) -> Crew:
    """The crew of a job on this host alone."""
    return Crew(listen(planner, plan, Narrator(plan)), channels_of(planner))


def channels_of(planner: Planner) -> tuple[Channel, ...]:
    """Sources of events of this machine besides the engine."""
    return () if planner.timers is None else (planner.timers,)


def listen(planner: Planner, plan: NodePlan, narrator: Narrator) -> list[Listener]:
    """The listeners of a job, in the order in which they get its events."""
    listeners: list[Listener] = [narrator]
    if planner.timers is not None:
        listeners.append(planner.timers)
    if plan.handed_file is not None:
        from dsl.report.handed import HandedError

        listeners.insert(0, HandedError(plan.handed_file, narrator.warn))
    return listeners


def _run_agent(
    run: Callable[[Supervisor], int], planner: Plans, plan: NodePlan, guard: Guard, crew: Crew
) -> int:
    code = INTERNAL_ERROR
    try:
        try:
            guard.enter_agent()
            code = _run_job(run, plan, guard, crew)
        finally:
            _finish(planner, plan, succeeded=code == 0)
    except EngineError as error:
        return _refuse(crew, plan, error)
    except DslError as error:
        crew.refuse(plan.command, str(error), error.exit_code)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 -- the last resort: users never see a traceback of ours
        complain(plan.command, error)
        return INTERNAL_ERROR
    return code


def _finish(planner: Plans, plan: NodePlan, *, succeeded: bool) -> None:
    try:
        planner.finish(succeeded=succeeded)
    except Exception as error:  # noqa: BLE001  a failing cleanup never changes the exit code
        complain(plan.command, error)


def _run_job(run: Callable[[Supervisor], int], plan: NodePlan, guard: Guard, crew: Crew) -> int:
    supervisor = Supervisor(guard=guard)
    crew.enter(supervisor)
    if plan.pid_file is None:
        return run(supervisor)
    from dsl.agent.pid_file import PidFile

    with PidFile(plan.pid_file):
        return run(supervisor)


def _refuse(crew: Crew, plan: NodePlan, error: EngineError) -> int:
    code = 2 if isinstance(error, (BindingError, SpecError)) else 1
    crew.refuse(plan.command, str(error), code)
    return code


def _tidy_up(planner: Plans, plan: NodePlan, pid: int) -> None:
    """Remove the files of an agent that was killed: the next job may need the same names."""
    if plan.pid_file is not None:
        from dsl.agent.pid_file import remove

        remove(plan.pid_file, pid)
    planner.finish(succeeded=False)


def _report_agent(plan: NodePlan, pid: int, outcome: GuardOutcome) -> None:
    if outcome.agent_signal is not None:
        name = signal_name(outcome.agent_signal)
        say(plan.command, f"the agent (pid {pid}) was killed by {name}: its workers were ended")
    # An agent that ended with a verdict has reported the survivors.
    is_told = outcome.agent_signal is None and outcome.code not in (0, INTERNAL_ERROR)
    for one in () if is_told else outcome.survivors:
        say(plan.command, survivor(*one))


def die_of_interrupt() -> None:
    """End as Ctrl-C ends a program, so that a shell's loop stops, too. Pid 1 cannot end so, and goes on."""
    flush_output()
    _signal.signal(SIGINT, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {SIGINT})
    os.kill(os.getpid(), SIGINT)
