"""``dsl``: DeepSpeed's command line."""

from __future__ import annotations

import os
import sys

from dsl.cli.command import Command
from dsl.cli.options import deepspeed_parser, output_request, placement_request
from dsl.facts import this_machine
from dsl.machine.check import check_program
from dsl.model.request import Request
from dsl.plan.build import build_node_plan, build_plan
from dsl.resources.filters import parse_num_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from dsl.model.node import NodePlan

COMMAND = Command("dsl")

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
    return COMMAND.run(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    namespace = parse_args(argv)
    request = to_request(namespace)
    stray = COMMAND.stray_flags(argv, request.script, request.script_args, LAUNCHER_FLAGS)
    COMMAND.show(stray, request.log_level)
    plan = make_plan(request)
    COMMAND.show(plan.notices, request.log_level)
    check_program(request, os.environ)
    if request.placement.names_devices:
        from dsl.cli.show import show_plan

        if show_plan(namespace, plan, os.environ, COMMAND.say):
            return 0
    if plan.log_dir is not None or plan.run_dirs:
        from dsl.output.folders import make_log_dir, make_run_dirs

        if plan.log_dir is not None:
            make_log_dir(plan.log_dir)
        make_run_dirs(plan.run_dirs)
    from dsl.app import run_node

    return run_node(plan)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse as DeepSpeed's runner does: the same names, the same defaults. Exits with 2 for bad usage."""
    return deepspeed_parser(COMMAND.name).parse_script_args(argv)


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
    host = this_machine()
    return build_node_plan(request, build_plan(request, os.environ, host), os.environ, host)
