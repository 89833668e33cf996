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
from dsl.agent.policy import decide
from dsl.errors import DslError
from dsl.model.job import Notice
from dsl.report.narrator import CONSOLE, Narrator
from dsl.report.speak import complain, flush_output, optional, say
from dsl.signals import ENDING, MORE_PROCESSES, end_on_request, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import TypeAlias, TypeVar

    from dsl import GuardOutcome
    from dsl.agent.background import Background
    from dsl.agent.elsewhere import Elsewhere
    from dsl.agent.planner import Planner
    from dsl.agent.roles import Channel, Listener, Plans, Policy
    from dsl.agent.timers import FileTimers
    from dsl.agent.warm import WarmCalls
    from dsl.model.job import NodePlan
    from dsl.model.judgement import Judgement
    from dsl.model.outcome import Outcome
    from dsl.report.narrator import Sink
    from dsl.report.recorder import Recorder

    T = TypeVar("T")
    Notices: TypeAlias = Callable[[NodePlan], Sequence[Notice]]

    CrewMaker: TypeAlias = Callable[[NodePlan], "Crew"]
    Launch: TypeAlias = Callable[[Plans, CrewMaker, Notices], "Session"]
    """Makes a session of its source, crew and notices. The other arguments are known."""


GUARD_MODULES = ("dsl.machine.sockets", "dsl.report.verdict")
"""Modules that the guard may need. The package may be gone from disk by then."""

SIGINT, SIGTERM = 2, 15
SILENCE_S = 1.0
"""A running group reports a stop at once; without a report in this time, no group runs."""

INTERNAL_ERROR = 70  # sysexits.h: an error of our own


class Hooks:
    """Calls at the start and the end of a command's two processes."""

    helper: int | None = None
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


class Crew:
    """What takes part in a job beside the engine.

    ``routine``: listeners also get starts and clean exits. ``elsewhere``: what views see of other hosts.
    ``is_visible``: views into the job call here, not at its head. ``judged``: how the job has ended, if a
    conductor judges that.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        channels: Sequence[Channel] = (),
        policy: Policy = decide,
        *,
        hooks: Hooks | None = None,
        routine: bool = False,
        elsewhere: Elsewhere | None = None,
        is_visible: bool = True,
        judged: Callable[[], Judgement | None] | None = None,
    ) -> None:
        self.judged = judged
        self.elsewhere = elsewhere
        self.is_visible = is_visible
        self.listeners = listeners
        self.channels = channels
        self.policy = policy
        self.hooks = hooks or Hooks()
        self.routine = routine


class Session:
    """One launch of a job: plan, tell the user, show, prepare, run, remove the files.

    ``source`` plans the attempts. ``crew`` takes the prepared first plan and returns who takes part in the
    job beside the engine. ``notices`` takes the first plan and returns what the user should know about it;
    an error of it ends the launch. ``tell`` gets the plan and these notices: first what is known before
    anything is made, later where files were made. ``preview`` shows the first plan; if it returns true,
    nothing is started. ``stdin_is_terminal``: the worker that reads our stdin gets the terminal.
    ``background``: where the command has gone, and keeps its exit code. ``recorder`` records what happens.
    """

    def __init__(
        self,
        source: Plans,
        crew: CrewMaker,
        *,
        notices: Notices | None = None,
        tell: Callable[[NodePlan, Sequence[Notice]], None] | None = None,
        preview: Callable[[NodePlan], bool] | None = None,
        stdin_is_terminal: bool = False,
        background: Background | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._source = source
        self._crew = crew
        self._background = background
        self._recorder = recorder
        self._notices = notices
        self._tell = tell
        self._preview = preview
        self._stdin_is_terminal = stdin_is_terminal
        self._told: Sequence[Notice] = ()

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
            plan = self._prepare(first)
            plan, calls = self._call_warm(plan, mask)
            crew = self._crew(plan)
            try:
                # Made before the fork: the child's first write to a shared page costs several microseconds.
                agent = self._agent(plan, crew)
            except EngineError as error:
                return _refuse(crew.hooks, plan, error)
            agent.warm_calls = calls
            return self._fork(plan, crew.hooks, mask, lambda supervisor: agent.run(supervisor).code, calls)

        return self._hold(launch)

    def run_joined(self, sketch: NodePlan, hooks: Hooks, join: Callable[[Supervisor], int | None]) -> int:
        """The same for nodes that meet under the guard: all steps of the launch come after the fork.

        ``sketch``: what the guard has to know of the first plan. ``hooks``: those of the crew to come.
        ``join`` waits for the other nodes; an exit code ends the wait and the job.
        """

        def run(supervisor: Supervisor) -> int:
            code = join(supervisor)
            plan = self._plan() if code is None else None
            if plan is None:
                return code or 0
            # Out of reach of this command's guard, no server could be started any more.
            plan, calls = self._call_warm(self._prepare(plan), None)
            agent = self._agent(plan, self._crew(plan), pid)
            agent.warm_calls = calls
            return agent.run(supervisor).code

        pid = os.getpid()
        return self._hold(lambda mask: self._fork(sketch, hooks, mask, run))

    def run_here(self, conclude: Callable[[Outcome], T]) -> T | None:
        """Run the job in this process. ``conclude`` makes the result of the outcome while the files exist.

        Returns None if the preview was all. If an exception is raised during the wait, such as by a signal,
        the workers are stopped before you get it.
        """
        _own_process.fill_standard_streams()
        plan = self._plan()
        if plan is None:
            return None
        succeeded, calls = False, None
        try:
            plan = self._prepare(plan)
            is_followed = _own_process.is_followed()
            if is_followed:
                plan = self._follow(plan)
            plan, calls = self._call_warm(plan, ())
            crew = self._crew(plan)
            flush_output()
            agent = self._agent(plan, crew)
            agent.warm_calls = calls
            if is_followed:
                agent.change = self._follow
            result = conclude(_run_here(agent, plan))
            succeeded = True
        finally:
            if calls is not None:
                calls.close()
            self._source.finish(succeeded=succeeded)
            self._source.tidy()
        return result

    def _plan(self) -> NodePlan | None:
        """The first plan, once the user knows what is known about it; None: nothing is to be started."""
        plan = self._source.plan(0)
        assert plan is not None
        if self._notices is not None:
            self._told = self._notices(plan)
        self._say(plan, is_made=False)
        if self._preview is not None and self._preview(plan):
            return None
        return plan

    def _prepare(self, plan: NodePlan) -> NodePlan:
        plan = self._source.prepare(plan)
        self._say(plan, is_made=True)
        return plan

    def _follow(self, plan: NodePlan) -> NodePlan:
        """The plan as the tools of this process start it."""
        from dsl.agent.followed import as_followed

        if plan.fork_servers and not plan.attempt and self._tell is not None:
            text = "the workers are executed, not forked: a tool of this process follows what it starts"
            self._tell(plan, [Notice("info", text)])
        return as_followed(plan)

    def _call_warm(self, plan: NodePlan, mask: Collection[int] | None) -> tuple[NodePlan, WarmCalls | None]:
        """Call the warm servers of the plan, and start those that are missing with this signal mask, if any.

        Returns the plan with the fork servers that are of use, and the calls.
        """
        if not any(one.warm is not None for one in plan.fork_servers):
            return plan, None
        from dsl.agent.warm import WarmCalls

        calls = WarmCalls(plan, mask)
        if self._tell is not None:
            self._tell(plan, calls.notices())
        return calls.settle(plan), calls

    def _say(self, plan: NodePlan, *, is_made: bool) -> None:
        if self._tell is not None:
            self._tell(plan, [notice for notice in self._told if notice.is_made == is_made])

    def _agent(self, plan: NodePlan, crew: Crew, pid: int = 0) -> Agent:
        """``pid``: that of the command; 0: it is this process."""
        beside: list[Listener] = [one for one in (self._background, self._recorder) if one is not None]
        if self._recorder is not None:
            self._recorder.judged = crew.judged
        return Agent(
            self._source,
            plan,
            (*crew.listeners, *beside),
            crew.channels,
            policy=crew.policy,
            stdin_is_terminal=self._stdin_is_terminal,
            routine=crew.routine,
            records=self._recorder is not None,
            command_pid=pid or os.getpid() if crew.is_visible else 0,
            elsewhere=crew.elsewhere,
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

    def _fork(
        self,
        plan: NodePlan,
        hooks: Hooks,
        mask: Collection[int],
        run: Callable[[Supervisor], int],
        calls: WarmCalls | None = None,
    ) -> int:
        """Become the guard of a child that calls ``run``. Returns if one of them cannot be made.

        It also returns if others need this process, too.

        ``calls`` are the child's, and the guard's when the child was killed.
        """
        background = self._background
        if background is not None:
            background.settle()
        try:
            guard = Guard(plan.signals, preempt_grace_s=plan.preempt_grace_s, helper=hooks.helper, mask=mask)
        except EngineError as error:
            return _refuse(hooks, plan, error)
        if plan.pid_file is not None:
            from dsl.agent import pid_file  # noqa: F401  both processes need it, even when the package is gone
        try:
            pid = os.fork()
        except OSError as error:
            guard.discard()
            hint = f", {MORE_PROCESSES}" if isinstance(error, BlockingIOError) else ""
            why = f"{error.strerror}{hint}"
            hooks.refuse(plan.command, f"cannot start the process that watches the workers: {why}", 1)
            return 1
        if pid == 0:
            code = INTERNAL_ERROR
            try:
                code = _run_agent(run, self._source, plan, guard, hooks)
                code = hooks.leave(code)
            finally:
                flush_output()
                os._exit(code)
        hooks.stay()
        self._source.tidy()
        _own_process.keep(GUARD_MODULES)
        links = [] if calls is None else calls.take_all()
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


def _run_here(agent: Agent, plan: NodePlan) -> Outcome:
    supervisor = Supervisor()
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


def end_by_signals(
    command: str, awaited: Callable[[], str], close: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """While there is no guard, let a signal end this process, which waits for other nodes.

    The last words say what is ``awaited``. ``close`` is called before the end. Returns the call after which
    signals end the process as they did before.
    """

    def end(signum: int, _frame: object) -> None:
        say(command, f"{end_on_request(signum, is_key=False)} while waiting for {awaited()}")
        close()
        _signal.signal(signum, _signal.SIG_DFL)
        _signal.raise_signal(signum)
        os._exit(128 + signum)  # this is the first process of a container, which no signal ends

    def release() -> None:
        for signum in taken:
            _signal.signal(signum, _signal.SIG_DFL)

    taken = [one for one in ENDING if _signal.getsignal(one) == _signal.SIG_DFL]
    for signum in taken:
        _signal.signal(signum, end)
    return release


def crew_of(planner: Planner, plan: NodePlan, sink: Sink = CONSOLE) -> Crew:
    """The crew of a job on this host alone."""
    return Crew(listen(planner, plan, sink), timers_of(planner))


def timers_of(planner: Planner) -> tuple[FileTimers, ...]:
    """The workers' timers, if any: they are a channel, and listen to the start of workers."""
    return () if planner.timers is None else (planner.timers,)


def listen(
    planner: Planner,
    plan: NodePlan,
    sink: Sink = CONSOLE,
    *,
    has_others: bool = False,
    judged: Callable[[], Judgement | None] | None = None,
) -> list[Listener]:
    """The listeners of a job, in the order in which they get its events. The arguments are the narrator's."""
    narrator = Narrator(plan, sink, has_others=has_others, judged=judged)
    listeners: list[Listener] = [narrator, *timers_of(planner)]
    if plan.handed_file is not None and sink.has_verdict:
        from dsl.evidence.error_files import HandedError

        listeners.insert(0, HandedError(plan.handed_file, narrator.warn))
    return listeners


def _run_agent(
    run: Callable[[Supervisor], int], source: Plans, plan: NodePlan, guard: Guard, hooks: Hooks
) -> int:
    code = INTERNAL_ERROR
    try:
        try:
            guard.enter_agent()
            supervisor = Supervisor(guard=guard)
            hooks.enter(supervisor)
            code = _with_pid_file(plan, lambda: run(supervisor))
        finally:
            _finish(source, plan, succeeded=code == 0)
    except EngineError as error:
        return _refuse(hooks, plan, error)
    except DslError as error:
        hooks.refuse(plan.command, str(error), error.exit_code)
        return error.exit_code
    except Exception as error:  # noqa: BLE001 -- the last resort: users never see a traceback of ours
        complain(plan.command, error, "the job ends")
        return INTERNAL_ERROR
    return code


def _finish(source: Plans, plan: NodePlan, *, succeeded: bool) -> None:
    optional(plan.command, "files of the job are left", lambda: source.finish(succeeded=succeeded))


def _with_pid_file(plan: NodePlan, run: Callable[[], T]) -> T:
    """Run with the file that tells others our pid, if the user wants one."""
    if plan.pid_file is None:
        return run()
    from dsl.agent.pid_file import PidFile

    with PidFile(plan.pid_file):
        return run()


def _refuse(hooks: Hooks, plan: NodePlan, error: EngineError) -> int:
    code = 2 if isinstance(error, (BindingError, SpecError)) else 1
    hooks.refuse(plan.command, str(error), code)
    return code


def _tidy_up(source: Plans, plan: NodePlan, pid: int) -> None:
    """Remove the files of an agent that was killed: the next job may need the same names."""
    if plan.pid_file is not None:
        from dsl.agent.pid_file import remove

        remove(plan.pid_file, pid)
    from dsl.machine.sockets import remove_sockets_of

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
