"""What both commands do: read a plain command line, plan the job, show notices, and run it."""

from __future__ import annotations

import os

from dsl import _own_process
from dsl._record import replace
from dsl.agent.planner import Planner, check_job
from dsl.agent.session import SIGINT, OneNode, Session, die_of_interrupt
from dsl.errors import DslError, OptionError, ReaderGoneError
from dsl.facts import Facts, this_machine
from dsl.model.job import Notice
from dsl.model.options import DEFAULT_FORWARD, DEFAULT_STOP, BadValueError, dashed
from dsl.model.request import LEVELS, Level, ProgramKind, Request
from dsl.plan.job import JobPlan, plan_job
from dsl.report.speak import say
from dsl.words import ENDING, end_on_request, parse_signals, quote, shortage, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Container, Mapping, Sequence
    from typing import Any

    from dsl.agent.background import Background
    from dsl.agent.session import Side
    from dsl.model.job import Job, NodePlan
    from dsl.model.options import CommandLine, Option
    from dsl.model.request import Program, ShowRequest
    from dsl.plan.remote import Remote
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

    def answers(self, argv: Sequence[str]) -> bool:
        """Whether a command line asks for something in place of a job, and has got it."""
        option = dashed(argv[0].partition("=")[0]) if argv else ""
        if option in ("--stand-in", "--make-links"):
            from dsl.stand_in import reply
        elif option == "--completion" or (option == "--print-completion" and self.name != "dsl"):
            from dsl.cli.completion import reply
        else:
            return False
        return reply(argv)

    def start(
        self,
        request: Request,
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
        if request.show.ring:
            from dsl.cli.doctor import ring_request

            request = ring_request(request)
        if request.show.doctor:
            from dsl.cli.doctor import examine

            return examine(request, facts, lambda planned: _reach(planned, request.show, facts))
        if not request.detaches or request.show.is_dry:
            return self._start(request, facts, argv)
        from dsl.agent.background import Background, leave_shell

        _own_process.fill_standard_streams()
        background = Background(self.name, argv)
        pid = leave_shell(background.pass_signals)
        if pid:
            return background.see_off(pid)
        facts.console = background.enter()
        code = self.run(lambda: self._start(request, facts, argv, background))
        background.end(code)
        return code

    def _start(
        self,
        request: Request,
        facts: Facts,
        argv: tuple[str, ...],
        background: Background | None = None,
    ) -> int:
        show = request.show
        if show.is_asked:
            request = replace(request, log_level=_with_details(request.log_level))
        level = request.log_level
        planned = plan_job(request, facts, argv)
        if show.doctor_first and planned.remote is None and not show.is_dry:
            from dsl.cli.doctor import look_first

            look_first(planned, facts, lambda notices: self.show(notices, level))
        may_stay = planned.remote is None and background is None and request.signals.preempt is None
        if may_stay and _own_process.is_shared():
            return self._start_here(request, facts, argv)

        def tell(notices: Sequence[Notice]) -> None:
            self.show(notices, level)

        recorder: Recorder | None = None
        if request.events is not None and not show.is_dry:
            from dsl.report.recorder import record_job

            def warn(text: str) -> None:
                tell([Notice("warning", text)])

            recorder, _ = record_job(request.events, planned, facts, warn)

        def launch(side: Side) -> Session:
            return Session(
                side,
                preview=self._preview(show, facts) if show.is_asked else None,
                stdin_is_terminal=facts.console.stdin_is_terminal,
                background=background,
                recorder=recorder,
            )

        let_go = (lambda: None) if background is None else background.let_go
        if planned.remote is not None:
            tell(planned.notices)
            return _reach(planned, show, facts, background, recorder)
        if planned.job.meeting.way != "alone":
            from dsl.agent import several_nodes

            return several_nodes.start(planned, facts, tell, launch, let_go, recorder, is_dry=show.is_dry)
        check_job(planned.job, facts)
        return launch(OneNode(Planner(planned, facts))).run_guarded()

    def _start_here(self, request: Request, facts: Facts, argv: tuple[str, ...]) -> int:
        """Run the job in this process alone, which a debugger or a profiler needs to its normal end."""
        from dsl.functions.errors import HandledSignals
        from dsl.functions.launcher import ChildFailedError, run_request
        from dsl.report.narrator import to_console

        try:
            with HandledSignals(request.signals.stop or USUAL_STOP):
                preview = self._preview(request.show, facts)
                run_request(request, facts, show=to_console, preview=preview, argv=argv)
        except ChildFailedError as error:
            return error.exit_code
        return 0

    def _preview(self, show: ShowRequest, facts: Facts) -> Callable[[NodePlan], bool]:
        """What shows the first plan, if the user asked for that; see `Session`."""
        from dsl.report.plan import show_plan

        return lambda plan: show_plan(show, plan, facts.environ, self.say)

    def stray_flags(self, argv: Sequence[str], program: Program, line: CommandLine) -> list[Notice]:
        """A warning for the first slip of the line that comes after the script, but not also before it."""
        slips = {name for option in line.options if option.is_slip for name in option.names if len(name) > 2}
        own = {dashed(word.partition("=")[0]) for word in argv[: len(argv) - len(program.args)]}
        for word in program.args:
            written = word.partition("=")[0]
            if written in slips and dashed(written) not in own:
                goes = f"comes after the script and goes to {program.script}"
                mend = f"put it before the script if it was meant for {self.name}"
                return [Notice("warning", f"{written} {goes}, {mend}")]
        return []


def _reach(
    planned: JobPlan,
    show: ShowRequest,
    facts: Facts,
    background: Background | None = None,
    recorder: Recorder | None = None,
) -> int:
    """Run or examine a job on other hosts, or show how they would be reached. Raises LauncherError."""
    job, remote = planned.job, planned.remote
    if remote is not None and show.is_dry:
        from dsl.launchers.table import starts_of
        from dsl.report.plan import show_hosts

        starts = starts_of(job, remote, facts, is_root=os.geteuid() == 0, is_dry=True)
        show_hosts(job, remote, starts, as_json=show.dry_run_json)
        return 0
    if remote is not None and remote.hosts_wait_s and not show.doctor:
        code = _wait_for_hosts(job, remote, facts)
        if code == 128 + SIGINT and background is None:
            die_of_interrupt()
        if code:
            return code
    from dsl.agent.head import run_head

    looks_first = show.doctor_first and not show.doctor
    return run_head(planned, facts, background, recorder, examines=show.doctor, looks_first=looks_first)


def _wait_for_hosts(job: Job, remote: Remote, facts: Facts) -> int:
    """Wait until the hosts can be reached. Returns the exit code if a signal has ended the wait, else 0."""
    from dsl.agent.hosts import wait_for_hosts
    from dsl.functions.errors import HandledSignals, SignalException
    from dsl.model.outcome import signal_code
    from dsl.report.verdict import name_workers

    names = [host.name for host in job.hosts]
    awaited = name_workers(names, "host")

    def tell(missing: str, text: str) -> None:
        nonlocal awaited
        awaited = missing
        if LEVELS[job.log_level] <= LEVELS["info"]:
            say(job.flavour.command, text)

    try:
        with HandledSignals(ENDING):
            wait_for_hosts(names, remote, facts, tell)
    except SignalException as ended:
        signum, preempt = ended.sigval, job.signals.preempt
        how = end_on_request(signum, is_key=False, is_preemption=signum == preempt)
        say(job.flavour.command, f"{how} while waiting for {awaited}")
        return signal_code(signum, preempt)
    return 0


def program_kind(*, module: bool, no_python: bool, flag: str) -> ProgramKind:
    """The kind of a program. Raises OptionError for both; ``flag``: how the command spells the second one."""
    if module and no_python:
        raise OptionError(f"don't use both the '{flag}' flag and the '--module' flag at the same time")
    return "module" if module else "program" if no_python else "script"


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


class Options:
    """The values of all options, the script and its arguments, as attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def read_words(
    argv: Sequence[str], line: CommandLine, environ: Mapping[str, str] | None = None
) -> Options | None:
    """The values of a plain command line, without argparse, whose import costs half a launch.

    None: it is not plain (abbreviations, joined flags, help, mistakes), and `dsl.cli.parser` has to read it.
    Whatever is read here, the parser reads alike.
    """
    environ = environ or {}
    if line.prefix and any(name.startswith(line.prefix) for name in environ):
        return None
    by_name = {name: option for option in line.options for name in option.names}
    given: dict[str, Any] = {}

    def take(option: Option, text: str) -> None:
        given[option.dest] = option.taken(text, given.get(option.dest, ()))

    words = iter(argv)
    try:
        for word in words:
            option = by_name.get(word)
            if option is None and not _is_value(word):
                name, equals, text = word.partition("=")
                option = by_name.get(name)
                # argparse takes a lone "--" for a separator even here.
                if option is None or option.is_flag or not equals or name[:2] != "--" or text == "--":
                    return None
                take(option, text)
            elif option is None:
                given[line.script] = word
                break
            elif option.is_flag:
                given[option.dest] = True
            elif option.bare is not None:
                take(option, option.bare)
            else:
                text = next(words, "--")
                if not _is_value(text) and not (option.is_text and is_free_text(text, by_name)):
                    return None
                take(option, text)
        else:
            return None  # there is no script
        rest = list(words)
        given[line.rest] = rest[1:] if rest[:1] == ["--"] else rest
        return Options(complete(line, given, environ))
    except BadValueError:
        return None


def variables_of(line: CommandLine, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set and hold defaults, by the names of the values."""
    found = {dest: name for name, dest in line.variables if name in environ}
    if line.prefix and any(name.startswith(line.prefix) for name in environ):
        for option in line.options:
            for name in option.names:
                variable = line.prefix + name[2:].replace("-", "_").upper()
                if name[:2] == "--" and variable in environ:
                    found[option.dest] = variable
    return found


def complete(line: CommandLine, given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """All values: the given ones, those of the environment, and defaults. Raises `BadValueError`."""
    variables = variables_of(line, environ)
    values = dict(given)
    for option in line.options:
        dest = option.dest
        if dest not in given and dest in variables:
            try:
                values[dest] = option.taken(environ[variables[dest]])
            except BadValueError as error:
                raise BadValueError(f"{variables[dest]}: {error}") from None
        if option.given:
            values[option.given] = dest in values
        values.setdefault(dest, option.default)
    return values


def is_free_text(word: str, known: Container[str]) -> bool:
    """Whether a word that begins with a dash is the value of the free-text option before it.

    Like argparse, it is a value if it has a blank and is no option with a value after ``=``. Unlike here,
    argparse reads ``-t 7 -u 30`` as ``-t`` with a value, if there is a ``-t``. ``known``: the spellings of
    all options.
    """
    return " " in word and word.partition("=")[0] not in known


def _is_value(word: str) -> bool:
    """Whether argparse surely reads the word as a value or a script."""
    return word[:1] != "-" or (word[1:].isascii() and word[1:].isdecimal())
