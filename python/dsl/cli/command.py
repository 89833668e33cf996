"""What both commands do with a request: plan the job, show notices, and run it."""

from __future__ import annotations

import os

from dsl import _own_process
from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.agent.session import OneNode, Session
from dsl.cli.reader import Options, read_words
from dsl.errors import DslError, OptionError, ReaderGoneError
from dsl.facts import Facts, this_machine
from dsl.lists import quote
from dsl.machine.check import check_program
from dsl.model.job import Notice
from dsl.model.options import DEFAULT_FORWARD, DEFAULT_STOP, dashed
from dsl.model.request import LEVELS, Level, ProgramKind, Request, ShowRequest
from dsl.plan.job import JobPlan, plan_job
from dsl.report.speak import say
from dsl.signals import parse_signals, shortage, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from dsl.agent.background import Background
    from dsl.agent.roles import Plans
    from dsl.agent.session import Notices, Side
    from dsl.model.job import NodePlan
    from dsl.model.options import CommandLine
    from dsl.report.recorder import Recorder

STRICT_VARIABLE = "DSL_STRICT"
"""With the value 1: the same as ``--strict``."""

USUAL_STOP = (1, 2, 3, 15)
"""SIGHUP, SIGINT, SIGQUIT and SIGTERM end a job, unless the user says more."""


def _with_details(level: Level) -> Level:
    return "detail" if level == "info" else level


class Command:
    """A command, and the name that its messages start with."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, work: Callable[[], int]) -> int:
        """Run ``work`` and return its exit code. All commands end here.

        A mistake of the user, and an answer that cannot be written, are one line on stderr.
        """
        try:
            return work()
        except ReaderGoneError as error:
            return error.exit_code
        except DslError as error:
            self.say(f"error: {error}")
            return error.exit_code
        except (OSError, RuntimeError, MemoryError) as error:
            why = shortage(error)
            if not why:
                raise
            self.say(f"error: {why}")
            return 1
        except KeyboardInterrupt:
            return 130

    def say(self, text: str) -> None:
        """Write one line to stderr."""
        say(self.name, text)

    def show(self, notices: Sequence[Notice], log_level: str) -> None:
        """Say the notices of this level or above."""
        for notice in notices:
            if LEVELS[notice.level] >= LEVELS[log_level]:
                self.say(notice.line)

    def start(
        self,
        request: Request,
        show: ShowRequest,
        facts: Facts | None = None,
        *,
        argv: tuple[str, ...] = (),
    ) -> int:
        """Plan a job and run this node's part of it, or show what would be started.

        ``argv``: what the user has typed, with the program's name. Returns the command's exit code only if
        nothing was started, or if the job runs in the background: a job ends this process.

        Raises:
            DslError: the job cannot be planned or prepared.
        """
        facts = this_machine() if facts is None else facts
        if show.doctor:
            from dsl.cli.doctor import examine

            return examine(request, facts, lambda planned: _start_on_hosts(planned, show, facts, None, None))
        if not request.detaches or show.is_dry:
            return self._start(request, show, facts, argv)
        from dsl.agent.background import Background, leave_shell

        _own_process.fill_standard_streams()
        background = Background(self.name, argv)
        pid = leave_shell(background.pass_signals)
        if pid:
            return background.see_off(pid)
        facts.console = background.enter()
        code = self.run(lambda: self._start(request, show, facts, argv, background))
        background.end(code)
        return code

    def _start(
        self,
        request: Request,
        show: ShowRequest,
        facts: Facts,
        argv: tuple[str, ...],
        background: Background | None = None,
    ) -> int:
        if show.is_asked:
            request = replace(request, log_level=_with_details(request.log_level))
        level = request.log_level
        planned = plan_job(request, facts)
        if _own_process.is_shared() and _may_stay(request, planned, background):
            return self._start_here(request, show, facts, argv)

        def tell(notices: Sequence[Notice]) -> None:
            self.show(notices, level)

        recorder: Recorder | None = None
        if request.events is not None and not show.is_dry:
            from dsl.report.recorder import record_job

            def warn(text: str) -> None:
                tell([Notice("warning", text)])

            recorder, _ = record_job(request.events, planned, argv, facts, warn)

        def preview(plan: NodePlan) -> bool:
            from dsl.report.plan import show_plan

            return show_plan(show, plan, facts.environ, self.say)

        def launch(source: Plans, side: Side, notices: Notices) -> Session:
            return Session(
                source,
                side,
                notices=notices,
                tell=lambda _, notices: tell(notices),
                preview=preview if show.is_asked else None,
                stdin_is_terminal=facts.console.stdin_is_terminal,
                background=background,
                recorder=recorder,
            )

        let_go = (lambda: None) if background is None else background.let_go
        if planned.remote is not None:
            tell(planned.notices)
            return _start_on_hosts(planned, show, facts, background, recorder)
        if planned.job.meeting.way == "port":
            from dsl.agent import fixed_nodes
            from dsl.agent.joining import without_place

            again = without_place(argv, request.program, facts.environ)
            return fixed_nodes.start(planned, facts, again, tell, launch, let_go, is_dry=show.is_dry)
        if planned.job.meeting.way == "store":
            from dsl.agent import torch_nodes

            gives_up = request.max_restarts is None
            return torch_nodes.start(
                planned, facts, tell, launch, let_go, is_dry=show.is_dry, gives_up=gives_up
            )
        check_program(planned.job.program, planned.job.flavour, facts.environ)
        planner = Planner(planned, facts)
        notices = planned.notices
        return launch(
            planner, OneNode(planner), lambda plan: (*notices, *planner.notices(plan))
        ).run_guarded()

    def _start_here(self, request: Request, show: ShowRequest, facts: Facts, argv: tuple[str, ...]) -> int:
        """Run the job in this process alone, which a debugger or a profiler needs to its normal end."""
        from dsl.functions.launcher import ChildFailedError, run_request
        from dsl.functions.signals import HandledSignals
        from dsl.report.narrator import CONSOLE
        from dsl.report.plan import show_plan

        def preview(plan: NodePlan) -> bool:
            return show_plan(show, plan, facts.environ, self.say)

        try:
            with HandledSignals(request.signals.stop or USUAL_STOP):
                run_request(request, facts, sink=CONSOLE, preview=preview, argv=argv)
        except ChildFailedError as error:
            return error.exit_code
        return 0

    def stray_flags(
        self,
        argv: Sequence[str],
        script: str,
        script_args: Sequence[str],
        flags: Collection[str],
    ) -> list[Notice]:
        """A warning for the first of ``flags`` that comes after the script, but not also before it.

        ``script_args``: the last words of ``argv``. ``flags``: with both spellings of each option.
        """
        own = {dashed(word.partition("=")[0]) for word in argv[: len(argv) - len(script_args)]}
        for word in script_args:
            written = word.partition("=")[0]
            if written in flags and dashed(written) not in own:
                mend = f"put it before the script if it was meant for {self.name}"
                return [Notice("warning", f"{written} comes after the script and goes to {script}, {mend}")]
        return []


def _may_stay(request: Request, planned: JobPlan, background: Background | None) -> bool:
    """Whether a job can be run without a guard and an agent of its own."""
    return planned.remote is None and background is None and request.signals.preempt is None


def _start_on_hosts(
    planned: JobPlan,
    show: ShowRequest,
    facts: Facts,
    background: Background | None,
    recorder: Recorder | None,
) -> int:
    """Run or examine a job on other hosts, or show how they would be reached.

    Raises:
        LauncherError: they cannot be reached.
    """
    from dsl.launchers.table import starts_of, uses_streams

    job, remote = planned.job, planned.remote
    assert remote is not None
    is_root = os.geteuid() == 0
    if show.is_dry:
        from dsl.report.plan import show_hosts

        starts = starts_of(job, remote, facts, is_root=is_root, is_dry=True)
        show_hosts(job, remote, starts, as_json=show.dry_run_json)
        return 0
    from dsl.agent.head import listen, run_head
    from dsl.control.hub import Hub

    hub = Hub(remote.heartbeat_s, show=True)
    addresses, variables = ((), ()) if uses_streams(job, remote) else listen(hub, job, remote, facts)
    folder = f"{facts.names.temp_dir}/dsl_hosts_{os.urandom(8).hex()}"
    starts = starts_of(
        job, remote, facts, is_root=is_root, addresses=addresses, variables=variables, folder=folder
    )
    examined = planned.notices if show.doctor else None
    return run_head(job, remote, starts, hub, facts, background, recorder, examined)


def read_line(argv: Sequence[str], line: CommandLine, environ: Mapping[str, str]) -> Options:
    """The values of a command line; ``environ`` may have defaults. Exits with 2 for bad usage."""
    options = read_words(argv, line, environ)
    if options is not None:
        return options
    from dsl.cli.parser import Parser

    return Options(vars(Parser(line, environ).parse_script_args(argv)))


def program_kind(*, module: bool, no_python: bool, flag: str) -> ProgramKind:
    """The kind of a program. Raises OptionError for both; ``flag``: how the command spells the second one."""
    if module and no_python:
        raise OptionError(f"don't use both the '{flag}' flag and the '--module' flag at the same time")
    return "module" if module else "program" if no_python else "script"


def own_fields(options: Options | argparse.Namespace) -> dict[str, Any]:
    """The fields that both commands take from several options."""
    shows_devices = options.report_bindings or options.dry_run or options.dry_run_json
    return {"placement": {"names_devices": shows_devices}, "log_level": log_level(options)}


def signal_fields(preempt_words: str, stop_words: str, forward_words: str) -> dict[str, Any]:
    """The meaning of each signal. A signal that the user names loses its default meaning.

    Raises:
        OptionError: dsl cannot handle a signal, a signal has two meanings, or a word of ``--forward-signals``
            or ``--preempt-signal`` is no signal.
    """
    stop = parse_signals(stop_words, "--signals-to-handle", warnings=[])
    forward = parse_signals(forward_words, "--forward-signals", job_control="")
    preempt = parse_signals(preempt_words, "--preempt-signal")
    if len(preempt) > 1:
        raise OptionError(f"--preempt-signal {preempt_words!r}: name one signal")
    if forward_words != DEFAULT_FORWARD and stop_words == DEFAULT_STOP:
        stop = tuple([one for one in stop if one not in forward])
    if forward_words == DEFAULT_FORWARD:
        forward = tuple([one for one in forward if one not in (*stop, *preempt)])
    if stop_words == DEFAULT_STOP:
        stop = tuple([one for one in stop if one not in preempt])
    twice = {*stop} & {*forward} | {*preempt} & {*stop, *forward}
    if twice:
        raise OptionError(
            f"{signal_name(min(twice))} is named for two meanings, of --signals-to-handle, --forward-signals "
            "and --preempt-signal"
        )
    return {"stop": stop, "forward": forward, "preempt": preempt[0] if preempt else None}


def with_strictness(request: Request, environ: Mapping[str, str]) -> Request:
    """The request, made strict if ``DSL_STRICT`` is 1. Raises OptionError for values other than 0 and 1."""
    text = environ.get(STRICT_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise OptionError(f"{STRICT_VARIABLE}={quote(text)}: expected 0 or 1")
    if text != "1" and not request.is_strict:
        return request
    asked = request.placement
    placement = replace(asked, strict=asked.strict or asked.bind == "auto")
    return replace(request, is_strict=True, placement=placement)


def log_level(options: Options | argparse.Namespace) -> Level:
    """The log level. If the user gives the default level ``info``, it includes the details."""
    level: Level = options.log_level
    return _with_details(level) if options.log_level_given else level


def show_request(options: Options | argparse.Namespace) -> ShowRequest:
    """The parts of the plan that the user wants to see."""
    return ShowRequest(options.report_bindings, options.dry_run, options.dry_run_json, options.doctor)
