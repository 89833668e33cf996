"""The command line of ``dslrun``: the options of all torchrun versions, ours, and those of both commands."""

from __future__ import annotations

from dsl._record import replace
from dsl.model.options import (
    COMMON,
    DEFAULT_FORWARD,
    DEFAULT_STOP,
    OURS,
    SHELLS,
    TORCHRUN,
    CommandLine,
    Option,
    flag,
    integer,
    seconds,
    unquoted,
)
from dsl.model.request import LOG_LEVELS

ENVIRONMENT_PREFIX = "PET_"
"""``PET_NAME`` is the default of ``--name``."""

LOCAL_RANK_OPTIONS = {"none": "", "dash": "--local-rank", "underscore": "--local_rank"}
"""Values of ``--local-rank-arg``, and the option that passes the local rank to a script."""

_OPTIONS = {
    "where to run": (
        Option(
            TORCHRUN, "--nnodes", "N",
            "number of nodes; MIN:MAX for nodes that come and go", "1:1", read=unquoted, is_slip=True,
        ),
        Option(
            TORCHRUN, "--nproc-per-node", "N|auto|cpu|gpu",
            "workers on this node; also the name of a device", "1", read=unquoted, is_slip=True,
            into="resources.nproc_per_node",
        ),
        Option(
            TORCHRUN, "--node-rank", "RANK",
            "place of this node among them, from 0", 0, read=integer, is_slip=True, into="meeting.node_rank",
        ),
        Option(
            OURS, "--spares", "N",
            "so many more nodes wait, and take the places of nodes that are lost, leave or are bad",
            0, read=integer, into="resources.spares",
        ),
        Option(TORCHRUN, "--role", "NAME", "what the workers are called", "default", into="role"),
        Option(
            TORCHRUN, "--max-restarts", "N",
            "how often a group that failed is started again", 0, read=integer, is_slip=True,
            into="max_restarts",
        ),
        Option(
            TORCHRUN, "--monitor-interval", "SECONDS",
            "has no effect: a failure is noticed at once", 0.1, read=seconds,
        ),
        Option(
            OURS, "--exit-barrier-timeout", "SECONDS",
            "has no effect: nodes end as soon as the job has ended on all of them", read=seconds,
        ),
    ),
    "where to meet": (
        Option(
            TORCHRUN, "--master-addr", "ADDRESS", "address of node 0", "127.0.0.1", read=unquoted,
            is_slip=True, into="meeting.master_addr",
        ),
        Option(
            TORCHRUN, "--master-port", "PORT",
            "port there; on one node a free one is chosen, on several it is 29500", read=integer,
            is_slip=True, into="meeting.master_port",
        ),
        Option(
            TORCHRUN, "--local-addr", "ADDRESS", "address of this node", read=unquoted,
            into="meeting.local_addr",
        ),
        flag(
            TORCHRUN, "--standalone",
            "one node that meets nobody: a free port and an id of its own", is_slip=True,
            into="meeting.standalone",
        ),
        Option(
            TORCHRUN, "--rdzv-backend", "static|c10d|etcd|etcd-v2|NAME",
            "how nodes find each other; NAME: a backend that is registered with torch",
            "static", read=unquoted, is_slip=True, into="meeting.backend",
        ),
        Option(
            TORCHRUN, "--rdzv-endpoint", "HOST:PORT",
            "where the store is; with static the same as --master-addr and --master-port", "", read=unquoted,
            is_slip=True, into="meeting.endpoint",
        ),
        Option(TORCHRUN, "--rdzv-id", "ID", "name of the job", "none", is_slip=True, into="meeting.run_id"),
        Option(
            TORCHRUN, "--rdzv-conf", "KEY=VALUE,...", "settings of the backend", "", read=unquoted,
            into="meeting.settings",
        ),
    ),
    "workers": (
        flag(TORCHRUN, "-m --module", "run the script as 'python -m' does"),
        flag(TORCHRUN, "--no-python", "run the script itself, without python"),
        flag(TORCHRUN, "--run-path", "the same as without: a new interpreter runs the script"),
        flag(
            TORCHRUN, "--virtual-local-rank", "each worker sees its own device alone, as number 0",
            into="placement.virtual_local_rank",
        ),
        Option(
            TORCHRUN, "--numa-binding", "",
            "bind each worker to the cores beside its device",
            choices=("node", "socket", "exclusive", "core-complex"), into="placement.numa_binding",
        ),
        Option(
            TORCHRUN, "--logs-specs", "NAME", "plug-in of the group torchrun.logs_specs",
            into="output.logs_specs",
        ),
        Option(TORCHRUN, "--event-log-handler", "NAME", "has no effect", "null"),
        Option(
            OURS, "--local-rank-arg", "",
            "pass --local-rank=N or --local_rank=N to the script, as torch.distributed.launch does", "none",
            choices=tuple(LOCAL_RANK_OPTIONS),
        ),
        flag(OURS, "--use-env", "the same as --local-rank-arg none"),
        Option(TORCHRUN, "--print-completion", "", "the same as --completion", choices=SHELLS),
    ),
}  # fmt: skip

_SIGNAL_OPTIONS = {
    "signals": (
        Option(
            TORCHRUN, "--signals-to-handle", "SIGNAL,...",
            "signals that are passed on and end the job", DEFAULT_STOP,
        ),
        Option(
            OURS, "--forward-signals", "SIGNAL,...",
            "signals that are passed on, and no more", DEFAULT_FORWARD,
        ),
        Option(
            OURS, "--log-level", "",
            "how much dslrun says about what it does", "info", choices=LOG_LEVELS, given="log_level_given",
        ),
    ),
}  # fmt: skip

COMMAND_LINE = CommandLine(
    "dslrun",
    TORCHRUN,
    {**_OPTIONS, **COMMON, **_SIGNAL_OPTIONS},
    "training_script",
    "training_script_args",
    "Run a training script in several workers, as one of the nodes of a job.",
    ENVIRONMENT_PREFIX,
    (("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "grace"),),
)


def command_line(program: str = COMMAND_LINE.program, local_rank_arg: str = "none") -> CommandLine:
    """The command line under this name, with this default of ``--local-rank-arg``."""
    if (program, local_rank_arg) == (COMMAND_LINE.program, "none"):
        return COMMAND_LINE

    def with_default(option: Option) -> Option:
        return replace(option, default=local_rank_arg) if option.dest == "local_rank_arg" else option

    groups = {title: tuple(map(with_default, group)) for title, group in COMMAND_LINE.groups.items()}
    return replace(COMMAND_LINE, program=program, groups=groups)
