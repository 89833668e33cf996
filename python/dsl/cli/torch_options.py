"""The options of ``dslrun``: torchrun's, in both spellings and with ``PET_*`` defaults, and ours."""

from __future__ import annotations

import argparse
import os

from dsl.cli.options import Parser, add_common_options, add_script, seconds, spellings
from dsl.model import LEVELS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

ENVIRONMENT_PREFIX = "PET_"
DEFAULT_STOP = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
DEFAULT_FORWARD = "SIGUSR1,SIGUSR2"

# Options that scripts rarely have: after the script they are most likely a slip.
LAUNCHER_FLAGS = (
    "--nnodes",
    "--nproc-per-node",
    "--nproc_per_node",
    "--node-rank",
    "--node_rank",
    "--master-addr",
    "--master_addr",
    "--master-port",
    "--master_port",
    "--max-restarts",
    "--max_restarts",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--standalone",
)
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"

# torchrun has these too, and lets them be shortened.
SHARED_WITH_TORCHRUN = (
    "shutdown-timeout",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
)


def parse_args(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """Parse as torchrun does; ``PET_NAME`` is the default of ``--name``. Exits with 2 for bad usage."""
    return torchrun_parser("dslrun", environ).parse_script_args(argv)


def torchrun_parser(prog: str, environ: Mapping[str, str]) -> Parser:
    """The parser of torchrun: every flag with its default or what the environment says instead."""
    parser = Parser(
        prog,
        usage="%(prog)s [OPTIONS] SCRIPT [ARGUMENTS]",
        description="Run a training script in several workers on this machine, as one of the nodes of a job.",
        rest="training_script_args",
    )
    _add_group_options(parser)
    _add_meeting_options(parser)
    _add_worker_options(parser)
    add_common_options(parser)
    for name in SHARED_WITH_TORCHRUN:
        parser.allow_shortening(f"--{name}")
    _add_signal_options(parser)
    add_script(parser, "training_script", "training_script_args")
    _apply_environment(parser, environ)
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


def _add_worker_options(parser: Parser) -> None:
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
    add("--event-log-handler", default="null", metavar="NAME", help="has no effect")
    parser.never_shorten(
        add(
            "--local-rank-arg",
            default="none",
            choices=["none", "dash", "underscore"],
            help="pass --local-rank=N or --local_rank=N to the script, as torch.distributed.launch does",
        )
    )
    parser.never_shorten(
        add(
            "--use-env", action="store_true", help="has no effect: scripts find LOCAL_RANK in the environment"
        )
    )


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


def _apply_environment(parser: Parser, environ: Mapping[str, str]) -> None:
    shutdown = environ.get(SHUTDOWN_VARIABLE)
    if shutdown is not None:
        _set_default(parser, parser.option("--grace"), SHUTDOWN_VARIABLE, shutdown)
    for action in parser.actions():
        for option in action.option_strings:
            variable = ENVIRONMENT_PREFIX + option.lstrip("-").replace("-", "_").upper()
            if option.startswith("--") and variable in environ:
                _set_default(parser, action, variable, environ[variable])


def _set_default(parser: Parser, action: argparse.Action, variable: str, text: str) -> None:
    """Make ``text`` the default of an option, checked as if it stood on the command line."""
    if action.nargs == 0:
        try:
            action.default = bool(int(text))
        except ValueError:
            parser.error(f"{variable}={text!r}: expected 0 or 1")
        return
    try:
        value = text if action.type is None else action.type(text)  # type: ignore[operator]
    except argparse.ArgumentTypeError as error:
        parser.error(f"{variable}: {error}")
    except ValueError:
        parser.error(f"{variable}={text!r}: invalid {getattr(action.type, '__name__', 'value')} value")
    if action.choices is not None and value not in action.choices:
        parser.error(f"{variable}={text!r}: expected one of {', '.join(map(str, action.choices))}")
    action.default = value
