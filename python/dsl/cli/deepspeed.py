"""``dsl``: DeepSpeed's command line."""

from __future__ import annotations

import os
import sys

from dsl.cli.options import deepspeed_parser, output_request, placement_request
from dsl.errors import DslError
from dsl.model import LEVELS, Notice, Request
from dsl.plan.build import build_node_plan, build_plan
from dsl.plan.filters import parse_num_nodes
from dsl.plan.host import this_host
from dsl.plan.program import check_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from dsl.model import NodePlan

# Options that scripts rarely have: after the script they are most likely a slip.
LAUNCHER_FLAGS = (
    "--bind_core_list",
    "--bind_cores_to_rank",
    "--enable_each_rank_log",
    "--force_multi",
    "--hostfile",
    "--master_addr",
    "--master_port",
    "--no_local_rank",
    "--no_ssh",
    "--num_accelerators",
    "--num_gpus",
    "--num_nodes",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job and return the exit code of the command.

    ``argv`` are the arguments without the program's name (default: those of this process). Mistakes of the
    user are one line on stderr; bad usage exits like argparse does, with 2.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except DslError as error:
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(argv: Sequence[str]) -> int:
    namespace = parse_args(argv)
    request = to_request(namespace)
    _show(stray_flags(argv, namespace), request.log_level)
    plan = make_plan(request)
    _show(plan.notices, request.log_level)
    check_program(request, os.environ)
    if request.placement.names_devices:
        from dsl.cli.show import show_plan

        if show_plan(namespace, plan, os.environ, _say):
            return 0
    if plan.log_dir is not None or plan.run_dirs:
        from dsl.plan.logs import make_log_dir, make_run_dirs

        if plan.log_dir is not None:
            make_log_dir(plan.log_dir)
        make_run_dirs(plan.run_dirs)
    from dsl.app import run_node

    return run_node(plan)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse as DeepSpeed's runner does: the same names, the same defaults. Exits with 2 for bad usage."""
    return deepspeed_parser("dsl").parse_script_args(argv)


def to_request(options: argparse.Namespace) -> Request:
    """What DeepSpeed's namespace asks for; its stand-ins for "not said" (-1, "None") become None.

    Raises:
        NumNodesError: MIN:MAX without elastic training.
    """
    least, most = parse_num_nodes(str(options.num_nodes), options.elastic_training)
    is_range = isinstance(options.num_nodes, str)
    return Request(
        script=options.user_script,
        script_args=tuple(options.user_args),
        module=options.module,
        no_python=options.no_python,
        no_local_rank=options.no_local_rank,
        hostfile=options.hostfile,
        include=options.include,
        exclude=options.exclude,
        num_nodes=least if is_range else _given(least),
        max_nodes=most if is_range else None,
        num_gpus=_given(options.num_gpus),
        master_addr=options.master_addr,
        master_port=options.master_port if options.master_port_given else None,
        node_rank=None if options.node_rank == -1 else options.node_rank,
        launcher=options.launcher,
        launcher_args=options.launcher_args,
        no_ssh=options.no_ssh,
        no_ssh_check=options.no_ssh_check,
        force_multi=options.force_multi,
        ssh_port=options.ssh_port,
        venv_script=options.venv_script,
        save_pid=options.save_pid,
        log_dir=None if options.enable_each_rank_log in ("", "None") else options.enable_each_rank_log,
        autotuning=options.autotuning,
        elastic_training=options.elastic_training,
        min_elastic_nodes=_given(options.min_elastic_nodes),
        max_elastic_nodes=_given(options.max_elastic_nodes),
        bind_cores_to_rank=options.bind_cores_to_rank,
        bind_core_list=options.bind_core_list,
        log_level="error" if options.quiet else options.log_level,
        grace_s=options.grace,
        output=output_request(options),
        placement=placement_request(options),
    )


def _given(count: int) -> int | None:
    return None if count < 0 else count


def make_plan(request: Request) -> NodePlan:
    """Plan this machine's part of the job. Raises the `UsageError` that fits."""
    host = this_host()
    return build_node_plan(request, build_plan(request, os.environ, host), os.environ, host)


def stray_flags(argv: Sequence[str], options: argparse.Namespace) -> list[Notice]:
    """A warning for the first option of ours that stands after the script and not before it."""
    own = {word.partition("=")[0] for word in argv[: len(argv) - len(options.user_args)]}
    for word in options.user_args:
        flag = word.partition("=")[0]
        if flag in LAUNCHER_FLAGS and flag not in own:
            text = f"{flag} comes after the script and goes to {options.user_script}"
            return [Notice("warning", f"{text}, put it before the script if it was meant for dsl")]
    return []


def _show(notices: Sequence[Notice], log_level: str) -> None:
    for notice in notices:
        if LEVELS[notice.level] >= LEVELS[log_level]:
            _say(f"{notice.level}: {notice.text}" if notice.level == "warning" else notice.text)


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    line = " ".join(text.split("\n"))
    try:
        print(f"dsl: {line}", file=sys.stderr, flush=True)
    except OSError:
        return  # nobody reads it
