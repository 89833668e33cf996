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
    value,
)
from dsl.model.request import LOG_LEVELS

ENVIRONMENT_PREFIX = "PET_"
"""``PET_NAME`` is the default of ``--name``."""

LOCAL_RANK_OPTIONS = {"none": "", "dash": "--local-rank", "underscore": "--local_rank"}
"""Values of ``--local-rank-arg``, and the option that passes the local rank to a script."""

_OPTIONS = {
    "where to run": (
        value(
            TORCHRUN, "--nnodes", "N",
            "number of nodes; MIN:MAX for nodes that come and go", "1:1", read=unquoted, is_slip=True,
        ),
        value(
            TORCHRUN, "--nproc-per-node", "N|auto|cpu|gpu",
            "workers on this node; also the name of a device", "1", read=unquoted, is_slip=True,
            into="resources.nproc_per_node",
        ),
        value(
            TORCHRUN, "--node-rank", "RANK",
            "place of this node among them, from 0", 0, read=integer, is_slip=True, into="meeting.node_rank",
        ),
        value(TORCHRUN, "--role", "NAME", "what the workers are called", "default", into="role"),
        value(
            TORCHRUN, "--max-restarts", "N",
            "how often a group that failed is started again", 0, read=integer, is_slip=True,
            into="max_restarts",
        ),
        value(
            TORCHRUN, "--monitor-interval", "SECONDS",
            "has no effect: a failure is noticed at once", 0.1, read=seconds,
        ),
        value(
            OURS, "--exit-barrier-timeout", "SECONDS",
            "has no effect: nodes end as soon as the job has ended on all of them", read=seconds,
        ),
    ),
    "where to meet": (
        value(
            TORCHRUN, "--master-addr", "ADDRESS", "address of node 0", "127.0.0.1", read=unquoted,
            is_slip=True, into="meeting.master_addr",
        ),
        value(
            TORCHRUN, "--master-port", "PORT",
            "port there; on one node a free one is chosen, on several it is 29500", read=integer,
            is_slip=True, into="meeting.master_port",
        ),
        value(
            TORCHRUN, "--local-addr", "ADDRESS", "address of this node", read=unquoted,
            into="meeting.local_addr",
        ),
        flag(
            TORCHRUN, "--standalone",
            "one node that meets nobody: a free port and an id of its own", is_slip=True,
            into="meeting.standalone",
        ),
        value(
            TORCHRUN, "--rdzv-backend", "static|c10d|etcd|etcd-v2|NAME",
            "how nodes find each other; NAME: a backend that is registered with torch",
            "static", read=unquoted, is_slip=True, into="meeting.backend",
        ),
        value(
            TORCHRUN, "--rdzv-endpoint", "HOST:PORT",
            "where the store is; with static the same as --master-addr and --master-port", "", read=unquoted,
            is_slip=True, into="meeting.endpoint",
        ),
        value(TORCHRUN, "--rdzv-id", "ID", "name of the job", "none", is_slip=True, into="meeting.run_id"),
        value(
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
        value(
            TORCHRUN, "--numa-binding", "",
            "bind each worker to the cores beside its device",
            choices=("node", "socket", "exclusive", "core-complex"), into="placement.numa_binding",
        ),
        value(
            TORCHRUN, "--logs-specs", "NAME", "plug-in of the group torchrun.logs_specs",
            into="output.logs_specs",
        ),
        value(
            TORCHRUN, "--log-line-prefix-template", "TEXT",
            "put before each line on the console: ${role_name}, ${rank}, ${local_rank}, ${hostname}", "",
            is_text=True, into="output.template",
        ),
        value(TORCHRUN, "--event-log-handler", "NAME", "has no effect", "null"),
        value(
            OURS, "--local-rank-arg", "",
            "pass --local-rank=N or --local_rank=N to the script, as torch.distributed.launch does", "none",
            choices=tuple(LOCAL_RANK_OPTIONS),
        ),
        flag(OURS, "--use-env", "the same as --local-rank-arg none"),
        value(TORCHRUN, "--print-completion", "", "the same as --completion", choices=SHELLS),
    ),
}  # fmt: skip

_SIGNAL_OPTIONS = {
    "signals": (
        value(
            TORCHRUN, "--signals-to-handle", "SIGNAL,...",
            "signals that are passed on and end the job", DEFAULT_STOP,
        ),
        value(
            OURS, "--forward-signals", "SIGNAL,...",
            "signals that are passed on, and no more", DEFAULT_FORWARD,
        ),
        value(
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
