"""The commands as functions of a Python program: they run the job in the program's own process."""

from __future__ import annotations

import os
import sys

from dsl._record import replace
from dsl.cli import deepspeed, torchrun
from dsl.cli.command import Options, complete, with_strictness
from dsl.cli.options_torch import COMMAND_LINE
from dsl.errors import HangError, OptionError, UnsupportedError
from dsl.facts import this_machine
from dsl.functions.config import OPTION_NAMES, LaunchConfig, joined_words, refuse_nameless
from dsl.functions.launcher import ChildFailedError, log, run_request
from dsl.model.options import BadValueError, Option
from dsl.plan.meeting_point import STATIC, meeting_kind
from dsl.plan.worker import LOCAL_RANK_MACRO, TORCH, worker_commands
from dsl.report.narrator import to_console
from dsl.report.plan import show_plan
from dsl.resources.exports import named_variables
from dsl.words import parse_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

    from dsl.model.job import NodePlan
    from dsl.model.request import Request
    from dsl.report.narrator import Show

ALIASES = {"shutdown_timeout": "grace"}
"""Names of values in torch's namespace, and their names in ours."""


def run(args: argparse.Namespace) -> None:
    """Run this node's part of the job that the values ask for, in this process, until it has ended.

    Raises:
        OptionError: a value makes no sense.
        UnsupportedError: only the command can do what a value asks for.
        DslError, EngineError: as `dsl.functions.launcher.launch_agent`.
    """
    options = _options(args)
    _refuse_process_matters(options, "dslrun")
    request = torchrun.to_request(options)
    refuse_nameless(request.signals.stop or (), f"signals_to_handle {options.signals_to_handle!r}")
    for notice in torchrun.signal_notices(options):
        log(notice.level, notice.text)
    _start(request)


def run_deepspeed(args: Sequence[str]) -> int:
    """Run the command line of ``dsl`` in this process, with the command's messages; return the exit code.

    Raises:
        SystemExit: 2, for bad usage.
        DslError, EngineError: the job cannot be planned or prepared.
    """
    request, options = deepspeed.read(args, os.environ)
    _refuse_process_matters(options, "dsl")
    try:
        _start(request, to_console)
    except (ChildFailedError, HangError) as error:
        return error.exit_code
    return 0


def _refuse_process_matters(options: Options, command: str) -> None:
    if options.preempt_signal:
        raise UnsupportedError(
            f"preempt_signal: inside of a program signals are the program's own, use the command {command}"
        )
    for name in ("doctor", "doctor_first", "ring"):
        if getattr(options, name):
            raise UnsupportedError(f"{name}: a program starts its job at once, use the command {command}")
    if options.detach:
        raise UnsupportedError(f"detach: a program stays with its job, use the command {command}")


def config_from_args(args: argparse.Namespace) -> tuple[LaunchConfig, str, list[str]]:
    """A config, a program and its arguments for the values, as torch's function of that name makes them."""
    options = _options(args)
    given = vars(options)
    least, most = torchrun.parse_nnodes(options.nnodes)
    fields: dict[str, Any] = {
        name: given.get(OPTION_NAMES.get(name, name)) for name in LaunchConfig.__dataclass_fields__
    }
    fields.update(
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=parse_number(options.nproc_per_node) or options.nproc_per_node,
        rdzv_configs=dict([one.strip().partition("=")[::2] for one in options.rdzv_conf.split(",") if one]),
        start_method="spawn" if options.start_method == "auto" else options.start_method,
        env=named_variables(options.env, os.environ, []),
        local_ranks_filter=[int(one) for one in options.local_ranks_filter.split(",") if one] or None,
        duplicate_stdout_filters=list(filter(None, options.duplicate_stdout_filters.split(","))) or None,
        duplicate_stderr_filters=list(filter(None, options.duplicate_stderr_filters.split(","))) or None,
    )
    if options.rdzv_backend == STATIC:
        fields["rdzv_configs"]["rank"] = options.node_rank
        if options.master_port and not options.rdzv_endpoint:
            fields["rdzv_endpoint"] = f"{options.master_addr}:{options.master_port}"
    program = torchrun.to_request(options).program
    if program.local_rank_option:  # the launch fills in the number
        option = f"{program.local_rank_option}={LOCAL_RANK_MACRO}"
        program = replace(program, local_rank_option="", args=(option, *program.args))
    flavour = replace(TORCH, fills_local_rank=False)
    first, *rest = worker_commands(program, flavour, os.environ, sys.executable, [""])[0]
    given = {name: value for name, value in fields.items() if value not in (None, "")}
    return LaunchConfig(**given), first, rest


def _start(request: Request, show: Show | None = None) -> None:
    """Run the job, or for a dry run only show its plan."""
    request = with_strictness(request, os.environ)
    facts = this_machine()
    least, most = request.resources.min_nodes or 1, request.resources.max_nodes
    nodes = (least, least if most is None else most)
    if (
        request.flavour == "torch"
        and request.show.is_dry
        and meeting_kind(request.meeting, nodes) == "dynamic"
    ):
        raise UnsupportedError("dry_run of nodes that find each other: use the command dslrun")

    def preview(plan: NodePlan) -> bool:
        return show_plan(request.show, plan, facts.environ, lambda line: log("info", line))

    run_request(request, facts, show=show, preview=preview)


def _options(args: argparse.Namespace) -> Options:
    """The values of all options: given values as the option reads them, and defaults for missing ones.

    Programs make the namespace by hand or with torch's parser. It may have numbers as text, and lacks options
    that only dsl has.
    """
    given = {ALIASES.get(name, name): value for name, value in vars(args).items() if value is not None}
    script = given.get(COMMAND_LINE.script)
    if not isinstance(script, (str, os.PathLike)) or not os.fspath(script):
        raise OptionError(
            f"{COMMAND_LINE.script} {script!r}: expected the path of a script, or a module's name"
        )
    values: dict[str, Any] = {COMMAND_LINE.script: os.fspath(script)}
    values[COMMAND_LINE.rest] = [str(word) for word in given.get(COMMAND_LINE.rest, ())]
    for option in COMMAND_LINE.options:
        # Our option has a text value. A bool is another program's: accelerate has a flag --debug of its own.
        is_theirs = option.bare is not None and isinstance(given.get(option.dest), bool)
        if option.dest in given and not is_theirs:
            values[option.dest] = _value(option, given[option.dest])
    try:
        values = complete(COMMAND_LINE, values, os.environ)
    except BadValueError as error:
        raise OptionError(str(error)) from None
    return Options({**values, "log_level_given": False})  # a namespace does not tell


def _value(option: Option, value: Any) -> Any:
    if option.is_flag:
        return bool(value)
    if value == option.default:
        return value
    try:
        if option.repeats:
            return tuple(map(option.value_of, (value,) if isinstance(value, str) else map(str, value)))
        # torch's parser makes a list of the filters.
        return option.value_of(joined_words(value) if isinstance(value, (list, tuple)) else str(value))
    except BadValueError as error:
        raise OptionError(f"{option.dest}: {error}") from None
