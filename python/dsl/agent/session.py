"""One launch of a job, step by step; and the processes of a command.

Commands, agents on other hosts and programs take the steps of `Session`. A command is two processes:
the guard, which the shell sees, and the agent, which does the work. Only commands fork, and end their
process; in other programs the caller gets the agent's outcome.
"""

from __future__ import annotations

# The module behind `signal` is a part of the interpreter, so importing it needs no file. It has no stub.
import _signal  # type: ignore[import-not-found]
import os
import time

from dsl import BindingError, Ended, EngineError, Guard, SpecError, Supervisor, _own_process
from dsl.agent.agent import Agent
from dsl.errors import DslError
from dsl.model.outcome import signal_code
from dsl.report.narrator import Narrator, to_console
from dsl.report.speak import complain, flush_output, optional, say
from dsl.words import ENDING, MORE_PROCESSES, end_on_request, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import TypeAlias, TypeVar

    from dsl import GuardOutcome
    from dsl.agent.background import Background
    from dsl.agent.elsewhere import Elsewhere
    from dsl.agent.planner import Planner
    from dsl.agent.roles import Channel, Decider, Listener, Source
    from dsl.agent.timers import FileTimers
    from dsl.agent.warm import WarmCalls
    from dsl.model.job import Job, NodePlan, Notice
    from dsl.model.judgement import Judgement
    from dsl.model.outcome import Outcome
    from dsl.report.narrator import Show
    from dsl.report.recorder import Recorder

    T = TypeVar("T")
    Launch: TypeAlias = Callable[["Side"], "Session"]
    """Makes a session of its side. The other arguments are known."""


GUARD_MODULES = ("dsl.machine", "dsl.report.verdict")
"""Modules that the guard may need. The package may be gone from disk by then."""

SIGINT, SIGTERM = 2, 15
SILENCE_S = 1.0
"""A running group reports a stop at once; without a report in this time, no group runs."""

INTERNAL_ERROR = 70  # sysexits.h: an error of our own


class Side:
    """What takes part in a job beside the engine, in the two processes of a command or in a program."""

    source: Source
    """Plans the attempts."""
    decider: Decider | None = None
    """See `Agent`."""
    helper: int | None = None
    """Pid of a child that helps the job, and ends by itself."""
    routine = False
    """Listeners also get starts and clean exits."""
    is_visible = True
    """Views into the job call here, not at its head."""
    elsewhere: Elsewhere | None = None
    """What views see of other hosts."""
    is_judged = False
    """A conductor judges the end for all nodes; else this node judges for itself."""

    def listeners(self, plan: NodePlan) -> list[Listener]:  # noqa: ARG002  others need the first plan
        """The listeners of the agent, in the order in which they get its events. Files exist by now."""
        return []

    def channels(self) -> list[Channel]:
        """The channels of the agent, once there are listeners."""
        return []

    def judged(self) -> Judgement | None:
        """How the job has ended, once a conductor has judged that."""
        return None

    def notices(self, plan: NodePlan) -> Sequence[Notice]:  # noqa: ARG002  most tell them in another way
        """What `tell` has to say about the first plan. An error ends the launch."""
        return ()

    def tell(self, plan: NodePlan, notices: Sequence[Notice]) -> None:
        """Tell the user about the first plan: before anything is made, and later where files were made."""

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


class OneNode(Side):
    """A node that shows its user what happens; as it is, the only node of a job."""

    def __init__(self, planner: Planner) -> None:
        self.source = self.planner = planner
        self.show: Show = to_console
        """Shows the narrator's lines."""
        self.has_verdict = True
        """See `Narrator`."""

    def notices(self, plan: NodePlan) -> Sequence[Notice]:
        """What the user should know."""
        return self.planner.notices(plan)

    def tell(self, plan: NodePlan, notices: Sequence[Notice]) -> None:
        """Tell the user about the first plan."""
        for notice in notices:
            Narrator(plan, self.show).note(notice)

    def listeners(self, plan: NodePlan) -> list[Listener]:
        """The narrator, and what else the plan needs."""
        narrator = Narrator(
            plan,
            self.show,
            has_verdict=self.has_verdict,
            judged=self.judged if self.is_judged else None,
        )
        found: list[Listener] = [narrator, *self._timers]
        if plan.handed_file is not None and self.has_verdict:
            from dsl.report.failures import HandedError

            found.insert(0, HandedError(plan.handed_file, narrator.warn))
        return found

    def channels(self) -> list[Channel]:
        """The workers' timers, if any."""
        return [*self._timers]

    @property
    def _timers(self) -> tuple[FileTimers, ...]:
        return () if self.planner.timers is None else (self.planner.timers,)


class Session:
    """One launch of a job: plan, tell the user, show, prepare, run, remove the files.

    ``side`` takes part in the job beside the engine. ``preview`` shows the first plan; if it returns true,
    nothing is started. ``stdin_is_terminal``: the worker that reads our stdin gets the terminal.
    ``background``: where the command has gone, and keeps its exit code. ``recorder`` records what happens.
    """

    def __init__(
        self,
        side: Side,
        *,
        preview: Callable[[NodePlan], bool] | None = None,
        stdin_is_terminal: bool = False,
        background: Background | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._source, self._side = side.source, side
        self._background = background
        self._recorder = recorder
        self._preview = preview
        self._stdin_is_terminal = stdin_is_terminal
        self._made: Sequence[Notice] = ()
        """Notices about what is made for the workers."""
        self._calls: WarmCalls | None = None
        """Connections with warm servers, for the agent; the guard ends them if the agent was killed."""

    def run_guarded(self) -> int:
        """Run the job, and end this process with the command's exit code (G2).

        Forks: the caller becomes the guard, the child the agent. Returns only if nothing was started, or if
        others need this process, too.
        """
        plan = self._plan()
        if plan is None:
            return 0
        first = plan

        def launch(mask: Collection[int]) -> int:
            try:
                # Made before the fork: the child's first write to a shared page costs several microseconds.
                agent = self._agent(first, mask)
            except EngineError as error:
                return _refuse(self._side, first, error)
            return self._fork(agent.plan, mask, lambda supervisor: agent.run(supervisor).code)

        return self._hold(launch)

    def run_joined(self, sketch: NodePlan, join: Callable[[], int | None]) -> int:
        """The same for nodes that meet under the guard: all steps of the launch come after the fork.

        ``sketch``: what the guard has to know of the first plan. ``join`` waits for the other nodes; an exit
        code ends the wait and the job.
        """
        pid = os.getpid()

        def run(supervisor: Supervisor) -> int:
            code = join()
            plan = self._plan() if code is None else None
            # Out of reach of this command's guard, no server could be started any more: no signal mask.
            return code or 0 if plan is None else self._agent(plan, None, pid).run(supervisor).code

        return self._hold(lambda mask: self._fork(sketch, mask, run))

    def run_here(self, conclude: Callable[[Outcome], T]) -> T | None:
        """Run the job in this process. ``conclude`` makes the result of the outcome while the files exist.

        Returns None if the preview was all. If an exception is raised during the wait, such as by a signal,
        the workers are stopped before you get it.
        """
        _own_process.fill_standard_streams()
        plan = self._plan()
        if plan is None:
            return None
        succeeded = False
        try:
            agent = self._agent(plan, ())
            flush_output()
            result = conclude(_run_here(agent))
            succeeded = True
        finally:
            if self._calls is not None:
                self._calls.close()
            self._source.finish(succeeded=succeeded)
            self._source.tidy()
        return result

    def _plan(self) -> NodePlan | None:
        """The first plan, once the user knows what is known about it; None: nothing is to be started."""
        plan = self._source.plan(0)
        notices = self._side.notices(plan)
        self._made = [notice for notice in notices if notice.is_made]
        self._side.tell(plan, [notice for notice in notices if not notice.is_made])
        return None if self._preview is not None and self._preview(plan) else plan

    def _agent(self, plan: NodePlan, mask: Collection[int] | None, pid: int = 0) -> Agent:
        """Make what the first plan needs, and its agent. ``pid``: that of the command; 0: of this process.

        Warm servers of the plan that are missing are started with this signal mask, if any.
        """
        side, recorder = self._side, self._recorder
        plan = self._source.prepare(plan)
        side.tell(plan, self._made)
        if any(server.warm is not None for server in plan.fork_servers):
            from dsl.agent.warm import WarmCalls

            self._calls = WarmCalls(plan, mask)
            side.tell(plan, self._calls.notices())
            plan = self._calls.settle(plan)
        beside: list[Listener] = [one for one in (self._background, recorder) if one is not None]
        if recorder is not None and side.is_judged:
            recorder.judged = side.judged
        return Agent(
            self._source,
            plan,
            (*side.listeners(plan), *beside),
            side.channels(),
            decider=side.decider,
            stdin_is_terminal=self._stdin_is_terminal,
            routine=side.routine or plan.timer_file is not None,
            records=recorder is not None,
            command_pid=pid or os.getpid() if side.is_visible else 0,
            elsewhere=side.elsewhere,
            warm_calls=self._calls,
            lasts=self._background is not None,
        )

    def _hold(self, launch: Callable[[Collection[int]], int]) -> int:
        """Run ``launch``, which gets the mask to restore, while signals that would end this process wait.

        They wait for the guard. Files are made meanwhile, so that no signal leaves them behind.
        """
        flush_output()  # while signals still end this process: stdout may block
        mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, ENDING)
        try:
            return launch(mask)
        finally:
            self._source.finish(succeeded=False)  # nothing was started
            _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)

    def _fork(self, plan: NodePlan, mask: Collection[int], run: Callable[[Supervisor], int]) -> int:
        """Become the guard of a child that calls ``run``. Returns if one of them cannot be made.

        It also returns if others need this process, too.
        """
        background, side = self._background, self._side
        if background is not None:
            background.settle()
        try:
            meanings, grace_s = plan.job.signals.meanings, plan.job.signals.preempt_grace_s
            guard = Guard(meanings, preempt_grace_s=grace_s, helper=side.helper, mask=mask)
        except EngineError as error:
            return _refuse(side, plan, error)
        if plan.pid_file is not None:
            from dsl.agent import pid_file  # noqa: F401  both processes need it, even when the package is gone
        try:
            pid = os.fork()
        except OSError as error:
            guard.discard()
            hint = f", {MORE_PROCESSES}" if isinstance(error, BlockingIOError) else ""
            why = f"{error.strerror}{hint}"
            side.refuse(plan.command, f"cannot start the process that watches the workers: {why}", 1)
            return 1
        if pid == 0:
            code = INTERNAL_ERROR
            try:
                code = _run_agent(run, plan, guard, side)
                code = side.leave(code)
            finally:
                flush_output()
                os._exit(code)
        side.stay()
        self._source.tidy()
        _own_process.keep(GUARD_MODULES)
        links = [] if self._calls is None else self._calls.take_all()
        outcome = guard.supervise(pid, plan.group.grace_s, reopens=plan.has_log_files, links=links)
        if outcome.agent_signal is not None:
            optional(plan.command, "files of the job are left", lambda: _tidy_up(self._source, plan, pid))
        what = "the end of the agent is not reported"
        optional(plan.command, what, lambda: _report_agent(plan, pid, outcome))
        code = 1 if outcome.survivors and not outcome.code else outcome.code
        if background is not None:
            background.end(code)
        if _own_process.is_shared():
            return code
        if outcome.terminal_interrupt and code == 128 + SIGINT:
            die_of_interrupt()
        flush_output()
        os._exit(code)


def _run_here(agent: Agent) -> Outcome:
    supervisor, plan = Supervisor(), agent.plan
    try:
        return _with_pid_file(plan, lambda: agent.run(supervisor))
    except (DslError, EngineError):
        raise  # nothing runs
    except BaseException as error:
        # Stop the workers in order. Another exception kills them at once, in `close`.
        usual = SIGINT if isinstance(error, KeyboardInterrupt) else SIGTERM
        _stop_group(supervisor, int(getattr(error, "sigval", usual)), plan.group.grace_s)
        raise
    finally:
        supervisor.close()


def _stop_group(supervisor: Supervisor, signum: int, grace_s: float) -> None:
    """Stop the workers after an exception in `Agent.run`, and wait until nothing of them is left."""
    supervisor.stop(signum=signum, grace_s=grace_s)
    deadline_s = time.monotonic() + grace_s + SILENCE_S
    events = supervisor.wait(SILENCE_S)
    while events and not any(isinstance(event, Ended) for event in events):
        events = supervisor.wait(max(0.0, deadline_s - time.monotonic()))


def end_by_signals(job: Job, awaited: Callable[[], str], close: Callable[[], None]) -> Callable[[], None]:
    """While there is no guard, let a signal end this process, which waits for other nodes.

    The last words say what is ``awaited``. ``close`` is called before the end. Returns the call after which
    signals end the process as they did before.
    """

    def end(signum: int, _frame: object) -> None:
        preempt = job.signals.preempt
        how = end_on_request(signum, is_key=False, is_preemption=signum == preempt)
        say(job.flavour.command, f"{how} while waiting for {awaited()}")
        close()
        if signum != preempt:
            _signal.signal(signum, _signal.SIG_DFL)
            _signal.raise_signal(signum)
        # It may be the first process of a container, which no signal ends.
        os._exit(signal_code(signum, preempt))

    def release() -> None:
        for signum in taken:
            _signal.signal(signum, _signal.SIG_DFL)

    taken = [one for one in ENDING if _signal.getsignal(one) == _signal.SIG_DFL]
    for signum in taken:
        _signal.signal(signum, end)
    return release


def _run_agent(run: Callable[[Supervisor], int], plan: NodePlan, guard: Guard, side: Side) -> int:
    code = INTERNAL_ERROR
    try:
        try:
            guard.enter_agent(len(plan.workers))
            supervisor = Supervisor(guard=guard)
            side.enter(supervisor)
            code = _with_pid_file(plan, lambda: run(supervisor))
        finally:
            what = "files of the job are left"
            optional(plan.command, what, lambda: side.source.finish(succeeded=code == 0))
    except EngineError as error:
        return _refuse(side, plan, error)
    except DslError as error:
        side.refuse(plan.command, str(error), error.exit_code)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 -- the last resort: users never see a traceback of ours
        complain(plan.command, error, "the job ends")
        return INTERNAL_ERROR
    return code


def _with_pid_file(plan: NodePlan, run: Callable[[], T]) -> T:
    """Run with the file that tells others our pid, if the user wants one."""
    if plan.pid_file is None:
        return run()
    from dsl.agent.pid_file import pid_file

    with pid_file(plan.pid_file):
        return run()


def _refuse(side: Side, plan: NodePlan, error: EngineError) -> int:
    code = 2 if isinstance(error, (BindingError, SpecError)) else 1
    side.refuse(plan.command, str(error), code)
    return code


def _tidy_up(source: Source, plan: NodePlan, pid: int) -> None:
    """Remove the files of an agent that was killed: the next job may need the same names."""
    if plan.pid_file is not None:
        from dsl.agent.pid_file import remove

        remove(plan.pid_file, pid)
    from dsl.machine import remove_sockets_of

    remove_sockets_of(os.getpid())
    source.finish(succeeded=False)


def _report_agent(plan: NodePlan, pid: int, outcome: GuardOutcome) -> None:
    if outcome.agent_signal is not None:
        name = signal_name(outcome.agent_signal)
        say(plan.command, f"the agent (pid {pid}) was killed by {name}: its workers were ended")
    # An agent that ended with a verdict has reported the survivors.
    is_told = outcome.agent_signal is None and outcome.code not in (0, INTERNAL_ERROR)
    if outcome.survivors and not is_told:
        from dsl.report.verdict import survivor

        for one in outcome.survivors:
            say(plan.command, survivor(*one))


def die_of_interrupt() -> None:
    """End as Ctrl-C ends a program, so that a shell's loop stops, too. Pid 1 cannot end so, and goes on."""
    flush_output()
    _signal.signal(SIGINT, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {SIGINT})
    os.kill(os.getpid(), SIGINT)
