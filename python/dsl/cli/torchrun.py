"""``dslrun``: torchrun's command line."""

from __future__ import annotations

import os
import sys

from dsl._record import replace
from dsl.cli.command import Command
from dsl.cli.options import output_request, placement_request
from dsl.cli.torch_options import parse_args
from dsl.errors import OptionError
from dsl.facts import this_machine
from dsl.machine.check import check_program
from dsl.model.UNKNOWN import Restarts, TorchRequest
from dsl.output.folders import make_log_dir, make_run_dirs
from dsl.output.routes import TEMPLATE_VARIABLE
from dsl.plan.torchrun import build_group, plan_attempt, worker_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from dsl.model.request import OutputRequest

COMMAND = Command("dslrun")

# What cannot or must not be taken: end, stop, news of children, a program's own faults, the C library's two.
UNTAKEABLE = (9, 19, 17, 4, 5, 6, 7, 8, 11, 31, 32, 33)
# TSTP, CONT and WINCH belong to the shell and the terminal.
JOB_CONTROL = (20, 18, 28)

# Options that scripts rarely have: after the script they are most likely a slip.
LAUNCHER_FLAGS = (
    "--nnodes",
    "--nproc-per-node",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--max-restarts",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--standalone",
)


def main(
    argv: Sequence[str] | None = None, *, program: str = COMMAND.name, local_rank_arg: str = "none"
) -> int:
    """Run this node's part of a job and return the exit code of the command.

    ``argv`` are the arguments without the program's name (default: those of this process), ``program`` what
    a usage error calls us, ``local_rank_arg`` the default of that option. Mistakes of the user are one line
    on stderr; bad usage exits like argparse does, with 2.
    """
    words = sys.argv[1:] if argv is None else argv
    return COMMAND.run(lambda: _run(words, parse_args(words, program=program, local_rank_arg=local_rank_arg)))


def _run(argv: Sequence[str], namespace: argparse.Namespace) -> int:
    request = to_request(namespace)
    environ = worker_environ(namespace, os.environ)
    host = this_machine()
    group = build_group(request, worker_words(request, environ, host.names.executable), environ, host)
    check_program(request, environ)
    plan = plan_attempt(group, 0, host)
    stray = COMMAND.stray_flags(argv, request.script, request.script_args, LAUNCHER_FLAGS, _with_dashes)
    COMMAND.show((*stray, *plan.notices), request.log_level)
    if request.placement.names_devices:
        from dsl.cli.show import show_plan

        if show_plan(namespace, plan, os.environ, COMMAND.say):
            return 0
    if plan.log_dir is not None:
        make_log_dir(plan.log_dir)
    make_run_dirs(plan.run_dirs)
    from dsl.app import run_node

    restarts = Restarts(
        request.max_restarts,
        lambda number: plan_attempt(group, number, host),
        group.run_dir,
        group.keeps_run_dir,
    )
    return run_node(plan, restarts)


def worker_environ(options: argparse.Namespace, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment that the workers inherit: our own, and the template of prefixes if one was given."""
    if not options.log_line_prefix_template:
        return environ
    return {**environ, TEMPLATE_VARIABLE: options.log_line_prefix_template}


def to_request(options: argparse.Namespace) -> TorchRequest:
    """What torchrun's namespace asks for.

    Raises:
        OptionError: nodes or signals are not written as they must be.
    """
    least, most = parse_nnodes(options.nnodes)
    stop, forward, preempt = parse_signal_options(options)
    # It takes precedence over the other two. Each worker is an interpreter of its own here.
    runs_path = options.run_path
    local_rank_arg = "none" if options.use_env else options.local_rank_arg
    if options.no_python and not runs_path and local_rank_arg != "none":
        raise OptionError("--no-python: a program is not told its local rank by an option, give --use-env")
    if options.logs_specs is not None and (options.dry_run or options.dry_run_json):
        raise OptionError(
            "--dry-run cannot ask the plug-in of --logs-specs, which may make files, leave one of them out"
        )
    return TorchRequest(
        script=options.training_script,
        script_args=tuple(options.training_script_args),
        module=options.module and not runs_path,
        no_python=options.no_python and not runs_path,
        run_path=runs_path,
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=options.nproc_per_node,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port,
        local_addr=options.local_addr,
        rdzv_backend=options.rdzv_backend,
        rdzv_endpoint=options.rdzv_endpoint,
        rdzv_id=options.rdzv_id,
        rdzv_conf=options.rdzv_conf,
        standalone=options.standalone,
        role=options.role,
        max_restarts=options.max_restarts,
        virtual_local_rank=options.virtual_local_rank,
        local_rank_arg=local_rank_arg,
        numa_binding=options.numa_binding,
        logs_specs=options.logs_specs,
        stop_signals=stop,
        forward_signals=forward,
        preempt_signal=preempt,
        preempt_grace_s=options.preempt_grace,
        log_level=options.log_level,
        grace_s=options.grace,
        output=_output(options),
        placement=placement_request(options),
    )


def _output(options: argparse.Namespace) -> OutputRequest:
    output = output_request(options)
    # torchrun's word for no log files at all.
    return replace(output, log_dir=None, redirects="", tee="") if output.log_dir == os.devnull else output


def parse_nnodes(text: str) -> tuple[int, int]:
    """``N`` or ``MIN:MAX`` as two numbers. Raises OptionError."""
    parts = [part.strip() for part in text.split(":")]
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise OptionError(f"--nnodes {text!r}: expected a number of nodes, or MIN:MAX")
    return int(parts[0]), int(parts[-1])


def parse_signal_options(options: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
    """Signals that stop the job, that are only forwarded, and the one that preempts it.

    A signal that the user names for one of these is taken out of the defaults of the others.

    Raises:
        OptionError: a name is no signal, or one is named for two.
    """
    stop = parse_signals(options.signals_to_handle, "--signals-to-handle")
    forward = parse_signals(options.forward_signals, "--forward-signals")
    preempt = parse_signals(options.preempt_signal or "", "--preempt-signal")
    if len(preempt) > 1:
        raise OptionError(f"--preempt-signal {options.preempt_signal!r}: name one signal")
    from dsl.cli.torch_options import DEFAULT_FORWARD, DEFAULT_STOP

    if options.forward_signals != DEFAULT_FORWARD and options.signals_to_handle == DEFAULT_STOP:
        stop = tuple([one for one in stop if one not in forward])
    if options.forward_signals == DEFAULT_FORWARD:
        forward = tuple([one for one in forward if one not in (*stop, *preempt)])
    if options.signals_to_handle == DEFAULT_STOP:
        stop = tuple([one for one in stop if one not in preempt])
    twice = {*stop} & {*forward} | {*preempt} & {*stop, *forward}
    if twice:
        from dsl.signals import signal_name

        raise OptionError(
            f"{signal_name(min(twice))} is named for two meanings, of --signals-to-handle, --forward-signals "
            "and --preempt-signal"
        )
    return stop, forward, preempt[0] if preempt else None


def parse_signals(text: str, option: str) -> tuple[int, ...]:
    """``SIGUSR1,USR2,34`` as numbers, each once.

    Raises:
        OptionError: an item is no signal, or one that cannot be taken.
    """
    from dsl.signals import SIGNALS

    numbers = {name: number for number, name in SIGNALS.items()}
    found: dict[int, None] = {}
    for item in text.split(","):
        word = item.strip().upper()
        if not word:
            continue
        number = numbers.get(word if word.startswith("SIG") else f"SIG{word}", 0)
        if word.isascii() and word.isdecimal() and len(word) < 4:
            number = int(word)
        if not 1 <= number <= 64:
            raise OptionError(
                f"{option} {text!r}: {item.strip()!r} is no signal, expected names such as SIGUSR1"
            )
        if number in UNTAKEABLE or (number in JOB_CONTROL and option != "--forward-signals"):
            why = "is always forwarded" if number in JOB_CONTROL else "cannot be taken"
            raise OptionError(f"{option} {text!r}: {SIGNALS.get(number, number)} {why}")
        found[number] = None
    return tuple(found)


def _with_dashes(option: str) -> str:
    return f"--{option[2:].replace('_', '-')}" if option.startswith("--") else option
