"""The options of ``dslrun``: torchrun's, in both spellings and with ``PET_*`` defaults, and ours."""

from __future__ import annotations

import argparse
import os

from dsl._record import record
from dsl.cli.options import Parser, add_common_options, add_script, seconds, spellings
from dsl.model.request import LEVELS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

ENVIRONMENT_PREFIX = "PET_"
DEFAULT_STOP = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
DEFAULT_FORWARD = "SIGUSR1,SIGUSR2"

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

# Of the options that both commands have these are torchrun's, and may be shortened as there.
SHARED_WITH_TORCHRUN = (
    "shutdown-timeout",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
)


@record
class _Inherited:
    """What a variable of the environment says of an option; read only if the command line says nothing."""

    variable: str
    text: str

    def __str__(self) -> str:
        return f"{self.text}, from {self.variable}"


def parse_args(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    program: str = "dslrun",
    local_rank_arg: str = "none",
) -> argparse.Namespace:
    """Parse as torchrun does; ``PET_NAME`` is the default of ``--name``. Exits with 2 for bad usage.

    ``program`` is what the command is called in messages; ``local_rank_arg`` the default of that option.
    """
    parser = torchrun_parser(program, environ, local_rank_arg)
    options = parser.parse_script_args(argv)
    for action in parser.actions():
        value = getattr(options, action.dest)
        if isinstance(value, _Inherited):
            setattr(options, action.dest, _read_inherited(parser, action, value))
    return options


def torchrun_parser(program: str, environ: Mapping[str, str], local_rank_arg: str = "none") -> Parser:
    """The parser of torchrun: every flag with its default or what the environment says instead."""
    parser = Parser(
        program,
        usage="%(prog)s [OPTIONS] SCRIPT [ARGUMENTS]",
        description="Run a training script in several workers on this machine, as one of the nodes of a job.",
        rest="training_script_args",
    )
    _add_group_options(parser)
    _add_meeting_options(parser)
    _add_worker_options(parser, local_rank_arg)
    add_common_options(parser)
    for name in SHARED_WITH_TORCHRUN:
        parser.allow_shortening(f"--{name}")
    _add_signal_options(parser)
    add_script(parser, "training_script", "training_script_args")
    _inherit(parser, environ)
    return parser


def _adder(parser: Parser, title: str) -> Any:
    group = parser.add_argument_group(title)
    return lambda *names, **facts: group.add_argument(*spellings(*names), **facts)


def _add_group_options(parser: Parser) -> None:
    add = _adder(parser, "where to run")
    add("--nnodes", default="1:1", metavar="N", help="number of nodes, or MIN:MAX")
    add(
        "--nproc-per-node",
        default="1",
        metavar="N",
        help="workers on this node: a number, auto, cpu, gpu or the name of a device",
    )
    add("--node-rank", type=int, default=0, metavar="RANK", help="place of this node among them, from 0")
    add("--role", default="default", metavar="NAME", help="what the workers are called")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often a group that failed is started again",
    )
    add(
        "--monitor-interval",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="has no effect: a failure is noticed at once",
    )


def _add_meeting_options(parser: Parser) -> None:
    add = _adder(parser, "where to meet")
    add("--master-addr", default="127.0.0.1", metavar="ADDRESS", help="address of node 0")
    add(
        "--master-port",
        type=int,
        default=None,
        metavar="PORT",
        help="port there; on one node a free one is chosen, on several it is 29500",
    )
    add("--local-addr", default=None, metavar="ADDRESS", help="address of this node")
    add(
        "--standalone",
        action="store_true",
        help="one node that meets nobody: a free port and an id of its own",
    )
    add("--rdzv-backend", default="static", metavar="NAME", help="how nodes find each other: static")
    add(
        "--rdzv-endpoint", default="", metavar="HOST:PORT", help="the same as --master-addr and --master-port"
    )
    add("--rdzv-id", default="none", metavar="ID", help="name of the job")
    add("--rdzv-conf", default="", metavar="KEY=VALUE,...", help="settings of the backend")


def _add_worker_options(parser: Parser, local_rank_arg: str) -> None:
    add = _adder(parser, "workers")
    add("-m", "--module", action="store_true", help="run the script as 'python -m' does")
    add("--no-python", action="store_true", help="run the script itself, without python")
    add("--run-path", action="store_true", help="the same as without: a new interpreter runs the script")
    add(
        "--start-method",
        default="spawn",
        choices=["spawn", "fork", "forkserver"],
        help="has no effect on scripts: each is a new process",
    )
    add(
        "--virtual-local-rank",
        action="store_true",
        help="each worker sees its own device alone, as number 0",
    )
    add(
        "--numa-binding",
        default=None,
        choices=["node", "socket", "exclusive", "core-complex"],
        help="bind each worker to the cores beside its device",
    )
    add("--logs-specs", default=None, metavar="NAME", help="plug-in of the group torchrun.logs_specs")
    parser.never_shorten(
        add(
            "--log-line-prefix-template",
            default="",
            metavar="TEXT",
            help="put before each line on the console: ${role_name}, ${rank}, ${local_rank}, ${hostname}",
        )
    )
    add("--event-log-handler", default="null", metavar="NAME", help="has no effect")
    parser.never_shorten(
        add(
            "--local-rank-arg",
            default=local_rank_arg,
            choices=["none", "dash", "underscore"],
            help="pass --local-rank=N or --local_rank=N to the script, as torch.distributed.launch does",
        )
    )
    parser.never_shorten(add("--use-env", action="store_true", help="the same as --local-rank-arg none"))


def _add_signal_options(parser: Parser) -> None:
    group = parser.add_argument_group("signals")
    group.add_argument(
        *spellings("--signals-to-handle"),
        default=DEFAULT_STOP,
        metavar="NAMES",
        help="signals that are passed on and end the job",
    )

    def add(*names: str, **facts: Any) -> None:
        parser.never_shorten(group.add_argument(*spellings(*names), **facts))

    add(
        "--forward-signals",
        default=DEFAULT_FORWARD,
        metavar="NAMES",
        help="signals that are passed on, and no more",
    )
    add(
        "--preempt-signal",
        default=None,
        metavar="NAME",
        help="signal by which a scheduler announces the end: passed on, for a checkpoint",
    )
    add(
        "--preempt-grace",
        type=seconds,
        default=None,
        metavar="SECONDS",
        help="time for that checkpoint (default: --grace)",
    )
    add(
        "--log-level",
        default="info",
        choices=list(LEVELS),
        help="how much dslrun says about what it does",
    )


def _inherit(parser: Parser, environ: Mapping[str, str]) -> None:
    shutdown = environ.get(SHUTDOWN_VARIABLE)
    if shutdown is not None:
        parser.option("--grace").default = _Inherited(SHUTDOWN_VARIABLE, shutdown)
    if not any(name.startswith(ENVIRONMENT_PREFIX) for name in environ):
        return
    for action in parser.actions():
        for option in action.option_strings:
            variable = ENVIRONMENT_PREFIX + option.lstrip("-").replace("-", "_").upper()
            if option.startswith("--") and variable in environ:
                action.default = _Inherited(variable, environ[variable])


def _read_inherited(parser: Parser, action: argparse.Action, inherited: _Inherited) -> Any:
    """The value of an option, checked as if it stood on the command line."""
    text, shown = inherited.text, f"{inherited.variable}={inherited.text!r}"
    try:
        if action.nargs == 0:
            return bool(int(text))
        value = text if action.type is None else action.type(text)  # type: ignore[operator]
    except argparse.ArgumentTypeError as error:
        parser.error(f"{inherited.variable}: {error}")
    except ValueError:
        kind = "value, expected 0 or 1" if action.nargs == 0 else f"{action.type.__name__} value"  # type: ignore[union-attr]
        parser.error(f"{shown}: invalid {kind}")
    if action.choices is not None and value not in action.choices:
        parser.error(f"{shown}: invalid choice, expected one of {', '.join(map(str, action.choices))}")
    return value
