"""Hints for unknown options and variables. A plain launch does not import this module."""

from __future__ import annotations

from dsl.errors import OptionError
from dsl.model.job import Notice
from dsl.model.options import DEEPSPEED, TORCHRUN, dashed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from dsl.model.options import CommandLine, Origin

_NODES = "--nnodes, --node-rank and --master-addr, and start dslrun on each node"
_DEVICES = "CUDA_VISIBLE_DEVICES for the devices, and --nproc-per-node for their number"
_NODES_FILE = "--hostfile, and on each host --no_ssh --node_rank RANK --master_addr ADDRESS"
_PORT = "--master_addr and --master_port"
_NUMBERS = ("--num_gpus", "--nproc-per-node")

INSTEAD = {
    DEEPSPEED: {
        "nnodes": f"--num_nodes with {_NODES_FILE}",
        "nproc_per_node": "--num_gpus",
        "local_addr": "--master_addr",
        "standalone": "nothing to say: without a hostfile it meets nobody",
        **dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"), _PORT),
        "run_path": "nothing to say: a script is run by a new interpreter",
        "numa_binding": "--bind auto or --bind_cores_to_rank",
        "log_line_prefix_template": "the variable TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        "local_rank_arg": "--no_local_rank, else each script gets --local_rank=N",
        "use_env": "--no_local_rank",
    },
    TORCHRUN: {
        **dict.fromkeys(("hostfile", "launcher", "launcher_args", "ssh_port", "venv_script"), _NODES),
        **dict.fromkeys(("include", "exclude"), _DEVICES),
        "num_nodes": "--nnodes",
        "num_gpus": "--nproc-per-node",
        **dict.fromkeys(("min_elastic_nodes", "max_elastic_nodes", "elastic_training"), "--nnodes MIN:MAX"),
        "elastic_wait": "--rdzv-conf join_timeout=SECONDS",
        "no_local_rank": "--local-rank-arg none, which is the default",
        **dict.fromkeys(("bind_cores_to_rank", "bind_core_list"), "--bind auto or --numa-binding"),
        "enable_each_rank_log": "--log-dir DIR --redirects 3",
        "quiet": "--log-level error",
    },
}
"""What each command has in place of options that only the other command has, by the names of their values."""

OTHERS = {
    **dict.fromkeys(
        (
            *("nprocs", "nproc", "np", "-n", "num_procs", "num_processes", "num_workers", "workers"),
            *("ngpus", "gpus", "num_devices", "devices", "ntasks", "ntasks_per_node", "gpus_per_node"),
            "nproc_per_gpu",
        ),
        _NUMBERS,
    ),
    **dict.fromkeys(("hosts", "machinefile", "host", "-f"), ("--hostfile", _NODES)),
    **dict.fromkeys(("num_machines", "nnode", "n_nodes"), ("--num_nodes", "--nnodes")),
    "machine_rank": ("--node_rank", "--node-rank"),
    "main_process_ip": ("--master_addr", "--master-addr"),
    "main_process_port": ("--master_port", "--master-port"),
    **dict.fromkeys(("-v", "verbose"), ("--log_level debug", "--log-level debug")),
    "-V": ("--version", "--version"),
    "-m": ("--module", "--module"),
    "restarts": ("--max-restarts", "--max-restarts"),
    "config_file": tuple([f"options such as {name}, in place of accelerate's file" for name in _NUMBERS]),
}
"""Options of other launchers, and what to use with ``dsl`` and with ``dslrun``."""

GONE = ("prewarm", "import_throttle")
"""Options that earlier versions had."""
_FOR_GONE = "which is gone, use --start-method forkserver or warm: all workers share one import"


def hint(flag: str, origin: Origin, known: Iterable[str]) -> str:
    """What the user most likely meant by an unknown option; empty if there is no good guess.

    ``origin``: the tool that the current command replaces. ``known``: the spellings of the command's options.
    """
    from difflib import get_close_matches

    from dsl.cli import options_deepspeed, options_torch

    lines = [options_deepspeed.COMMAND_LINE, options_torch.COMMAND_LINE]
    own, sister = lines if origin == DEEPSPEED else reversed(lines)
    options = list(known)
    spelled = {_word(name): name for name in reversed(options)}
    theirs = {
        _word(name): one.dest for one in sister.options for name in one.names if _word(name) not in spelled
    }
    word = _word(flag)
    if word in spelled:  # with one dash
        return f"did you mean {spelled[word]}?"
    if word in GONE:
        return _FOR_GONE
    if word in OTHERS:
        return f"did you mean {OTHERS[word][origin == TORCHRUN]}?"
    close = get_close_matches(flag, options, 1, 0.8)
    if word not in theirs and not close:
        word = next(iter(get_close_matches(word, theirs, 1, 0.8)), "")
    if word in theirs:
        text = INSTEAD[origin].get(theirs[word])
        return f"{own.program} has {text}" if text else f"only {sister.program} has it"
    near = close or get_close_matches(flag, options, 1)
    return f"did you mean {near[0]}?" if near else ""


def unknown_variables(environ: Iterable[str], line: CommandLine) -> list[Notice]:
    """A line for each of these variables that looks like the default of an option, and is none.

    Raises:
        OptionError: one is the default of an option that is gone.
    """
    from difflib import get_close_matches

    names = [name for option in line.options for name in option.names if name.startswith("--")]
    known = [line.prefix + _word(name).upper() for name in names]
    notices = []
    for variable in sorted(name for name in environ if name.startswith(line.prefix) and name not in known):
        word = variable.removeprefix(line.prefix).lower()
        if word in GONE:
            raise OptionError(f"{variable}: the default of --{dashed(word)}, {_FOR_GONE}")
        meant = line.prefix + _word(OTHERS.get(word, ("", ""))[1]).upper()
        near = [meant] if meant in known else get_close_matches(variable, known, 1, 0.8)
        text = f", did you mean {near[0]}?" if near else f": {line.program} has no option --{word}"
        notices.append(Notice("warning" if near else "info", f"{variable} has no effect{text}"))
    return notices


def _word(flag: str) -> str:
    """An option without its dashes; ``-n`` keeps its dash, because it is not the same as ``--n``."""
    return flag if len(flag) == 2 and flag[:1] == "-" else flag.lstrip("-").replace("-", "_")
