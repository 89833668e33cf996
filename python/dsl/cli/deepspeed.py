"""``dsl``: DeepSpeed's command line."""

from __future__ import annotations

import os
import sys

from dsl.cli.command import (
    Command,
    common_fields,
    log_level,
    output_request,
    placement_request,
    program_kind,
    show_request,
    signal_request,
    with_strictness,
)
from dsl.cli.options_deepspeed import COMMAND_LINE
from dsl.cli.reader import Options, read_line
from dsl.model.request import (
    ElasticRequest,
    MeetingRequest,
    Program,
    RemoteRequest,
    Request,
    ResourceRequest,
    SignalRequest,
)
from dsl.resources.filters import parse_num_nodes

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

COMMAND = Command("dsl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job and return the exit code of the command.

    ``argv``: the arguments without the program's name (default: those of this process). A mistake of the user
    is one line on stderr; bad usage exits with 2, like argparse.
    """
    return COMMAND.run(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    if argv and argv[0].startswith("--completion"):
        from dsl.cli.completion import reply

        if reply(argv):
            return 0
    request, options = read(argv, os.environ)
    program = request.program
    stray = COMMAND.stray_flags(argv, program.script, program.args, COMMAND_LINE.slips)
    COMMAND.show(stray, request.log_level)
    if options.autotuning:
        from dsl.cli.autotuning import start_tuning

        return start_tuning(request, options)
    return COMMAND.start(request, show_request(options), argv=(COMMAND.name, *argv))


def read(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Request, Options]:
    """The request of the command line, and the values of its options. Exits with 2 for bad usage.

    Raises:
        UsageError: an option has a bad value.
    """
    options = read_line(argv, COMMAND_LINE, environ)
    return with_strictness(to_request(options), environ), options


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse as DeepSpeed's runner does: the same names, the same defaults. Exits with 2 for bad usage."""
    from dsl.cli.parser import Parser

    return Parser(COMMAND_LINE).parse_script_args(argv)


def to_request(options: Options | argparse.Namespace) -> Request:
    """Make the request of the options; DeepSpeed's values for "not given" (-1, "None", "") become None.

    Raises:
        NumNodesError: MIN:MAX without elastic training.
    """
    return Request(
        flavour="deepspeed",
        program=Program(
            program_kind(module=options.module, no_python=options.no_python, flag="--no_python"),
            options.user_script,
            tuple(options.user_args),
            local_rank_option="" if options.no_local_rank else "--local_rank",
        ),
        resources=_resources(options),
        meeting=MeetingRequest(
            master_addr=options.master_addr or None,
            master_port=options.master_port if options.master_port_given else None,
            node_rank=None if options.node_rank == -1 else options.node_rank,
        ),
        remote=RemoteRequest(
            launcher=options.launcher if options.launcher_given else None,
            launcher_args=options.launcher_args,
            no_ssh=options.no_ssh,
            no_ssh_check=options.no_ssh_check,
            force_multi=options.force_multi,
            ssh_port=options.ssh_port,
            venv_script=options.venv_script,
            per_node=options.one_agent_per_node,
            heartbeat_s=options.heartbeat,
        ),
        signals=_signals(options),
        output=output_request(
            options,
            each_rank_log=None
            if options.enable_each_rank_log in ("", "None")
            else options.enable_each_rank_log,
        ),
        placement=placement_request(
            options,
            bind_cores_to_rank=options.bind_cores_to_rank,
            core_list=options.bind_core_list,
        ),
        elastic=ElasticRequest(
            autotuning=options.autotuning,
            training=options.elastic_training,
            min_nodes=_given(options.min_elastic_nodes),
            max_nodes=_given(options.max_elastic_nodes),
            wait_s=options.elastic_wait,
        ),
        log_level="error" if options.quiet else log_level(options),
        save_pid=options.save_pid,
        **common_fields(options),
    )


def _signals(options: Options | argparse.Namespace) -> SignalRequest:
    """The meaning of the signals: the defaults, unless ``--preempt-signal`` is given. Raises OptionError."""
    if options.preempt_signal:
        return signal_request(options)
    return SignalRequest(
        grace_s=options.grace, preempt_grace_s=options.preempt_grace, scope=options.signal_scope
    )


def _resources(options: Options | argparse.Namespace) -> ResourceRequest:
    least, most = parse_num_nodes(str(options.num_nodes), options.elastic_training)
    is_range = isinstance(options.num_nodes, str)
    return ResourceRequest(
        hostfile=options.hostfile,
        include=options.include,
        exclude=options.exclude,
        min_nodes=least if is_range else _given(least),
        max_nodes=most if is_range else None,
        num_gpus=_given(options.num_gpus),
    )


def _given(count: int) -> int | None:
    return None if count < 0 else count
