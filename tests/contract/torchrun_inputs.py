"""What torchrun is asked for the goldens of ``record_torchrun``."""

from __future__ import annotations

import re
from typing import Any

# Command lines that the parser sees, with the variables of its environment.
OPTION_LINES: list[tuple[str, dict[str, str]]] = [
    ("t.py", {}),
    ("t.py a -b --c=d", {}),
    ("--nnodes 2 --nproc-per-node 4 t.py", {}),
    ("--nnodes=1:4 --nproc_per_node=auto t.py", {}),
    ("--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 t.py", {}),
    ("--nnodes 2 --node_rank 1 --master_addr [::1] --master_port 29501 t.py", {}),
    ("--rdzv-backend c10d --rdzv-endpoint h:29400 --rdzv-id 42 --rdzv-conf a=1,b=2 t.py", {}),
    ("--rdzv_backend etcd --rdzv_endpoint h --rdzv_id j --rdzv_conf timeout=9 t.py", {}),
    ("--standalone --nproc-per-node gpu t.py", {}),
    ("--max-restarts 3 --monitor-interval 1.5 --start-method fork t.py", {}),
    ("--max_restarts 3 --monitor_interval 5 --start_method forkserver t.py", {}),
    ("--role trainer --event-log-handler console t.py", {}),
    ("--event_log_handler null --local-addr 10.0.0.9 t.py", {}),
    ("--local_addr 10.0.0.9 t.py", {}),
    ("-m pkg.mod --x 1", {}),
    ("--module pkg.mod", {}),
    ("--no-python ./prog -a", {}),
    ("--no_python ./prog -a", {}),
    ("--run-path /abs/t.py x", {}),
    ("--run_path /abs/t.py x", {}),
    ("--log-dir /d -r 3 -t 0:1,1:2 t.py", {}),
    ("--log_dir /d --redirects 1 --tee 2 t.py", {}),
    ("-r3 -t2 t.py", {}),
    ("-r=3 t.py", {}),
    ("-mr3 pkg.mod", {}),
    ("-mpkg.mod", {}),
    ("-mm pkg.mod", {}),
    ("--local-ranks-filter 0,2 t.py", {}),
    ("--local_ranks_filter=0,2 t.py", {}),
    ("--duplicate-stdout-filters a,b --duplicate-stderr-filters c,,d t.py", {}),
    ("--duplicate_stdout_filters a --duplicate_stderr_filters c t.py", {}),
    ("--logs-specs mine t.py", {}),
    ("--logs_specs mine t.py", {}),
    ("--numa-binding node t.py", {}),
    ("--numa_binding socket t.py", {}),
    ("--numa-binding exclusive t.py", {}),
    ("--numa-binding core-complex t.py", {}),
    ("--signals-to-handle SIGTERM,SIGUSR1 t.py", {}),
    ("--signals_to_handle SIGTERM t.py", {}),
    ("--shutdown-timeout 3 t.py", {}),
    ("--shutdown_timeout 3 t.py", {}),
    ("--virtual-local-rank t.py", {}),
    ("--virtual_local_rank t.py", {}),
    ("--log-line-prefix-template ${hostname}:${rank} t.py", {}),
    ("--log_line_prefix_template=-x t.py", {}),
    ("t.py", {"PET_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}),
    # Several times, and values that look like something else.
    ("--nnodes 2 --nnodes 3 t.py", {}),
    ("--max-restarts -1 t.py", {}),
    ("--master-port -1 t.py", {}),
    ("--rdzv-id -3 t.py", {}),
    ("--rdzv-id= t.py", {}),
    ("--rdzv-id=a=b t.py", {}),
    # Words that are shortened.
    ("--nn 2 t.py", {}),
    ("--stand t.py", {}),
    ("--rol x t.py", {}),
    ("--red 3 t.py", {}),
    ("--modul pkg", {}),
    ("--te 3 t.py", {}),
    ("--nnode=2 t.py", {}),
    # What follows the script, and separators.
    ("t.py --nnodes 2", {}),
    ("t.py --lr -1 -2.5", {}),
    ("t.py -- a", {}),
    ("-- t.py a", {}),
    ("-- -x a", {}),
    ("--nnodes 2 -- t.py -- a", {}),
    ("t.py a -- b", {}),
    ("-m pkg.mod --help", {}),
    ("t.py -h", {}),
    ("- a", {}),
    ("-1 a", {}),
    # The environment: a default that the command line beats.
    ("t.py", {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "gpu", "PET_NODE_RANK": "1"}),
    ("t.py", {"PET_MASTER_ADDR": "h", "PET_MASTER_PORT": "29501", "PET_LOCAL_ADDR": "l"}),
    (
        "t.py",
        {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "h:1", "PET_RDZV_ID": "j", "PET_RDZV_CONF": "a=1"},
    ),
    ("t.py", {"PET_MAX_RESTARTS": "2", "PET_MONITOR_INTERVAL": "7", "PET_START_METHOD": "fork"}),
    ("t.py", {"PET_ROLE": "r", "PET_EVENT_LOG_HANDLER": "console", "PET_LOG_DIR": "/d"}),
    ("t.py", {"PET_REDIRECTS": "3", "PET_TEE": "1", "PET_LOCAL_RANKS_FILTER": "0"}),
    ("t.py", {"PET_DUPLICATE_STDOUT_FILTERS": "a,b", "PET_DUPLICATE_STDERR_FILTERS": "c"}),
    ("t.py", {"PET_SIGNALS_TO_HANDLE": "SIGTERM", "PET_SHUTDOWN_TIMEOUT": "4"}),
    ("t.py", {"PET_STANDALONE": "1", "PET_MODULE": "1", "PET_RUN_PATH": "1"}),
    ("t.py", {"PET_STANDALONE": "0", "PET_NO_PYTHON": "1", "PET_VIRTUAL_LOCAL_RANK": "2"}),
    ("--standalone t.py", {"PET_STANDALONE": "0"}),
    ("--nnodes 1 t.py", {"PET_NNODES": "5"}),
    ("--master-port 5 t.py", {"PET_MASTER_PORT": "x"}),
    ("t.py", {"PET_MASTER_PORT": "x"}),
    ("t.py", {"PET_MASTER_PORT": ""}),
    ("t.py", {"PET_MAX_RESTARTS": "1.5"}),
    ("t.py", {"PET_STANDALONE": "yes"}),
    ("t.py", {"PET_STANDALONE": ""}),
    ("t.py", {"PET_ROLE": ""}),
    ("t.py", {"PET_N": "2", "PET_M": "1", "PET_R": "3"}),
    # Bad usage.
    ("", {}),
    ("--nnodes", {}),
    ("--nnodes 2", {}),
    ("--unknown t.py", {}),
    ("-x t.py", {}),
    ("-nnodes 2 t.py", {}),
    ("--start-method thread t.py", {}),
    ("--numa-binding all t.py", {}),
    ("--master-port many t.py", {}),
    ("--max-restarts 1.5 t.py", {}),
    ("--module=1 t.py", {}),
    ("--standalone=1 t.py", {}),
    ("--node-rank t.py", {}),
    ("--r 3 t.py", {}),
    ("--no t.py", {}),
]

# Command lines of which the words of a worker are recorded, with the variables of the environment.
WORD_LINES: list[tuple[str, dict[str, str]]] = [
    ("t.py a -b --c=d", {}),
    ("t.py", {"PYTHON_EXEC": "/opt/other/python"}),
    ("-m pkg.mod --x 1", {}),
    ("-m pkg.mod", {"PYTHON_EXEC": "/opt/other/python"}),
    ("--no-python ./prog -a", {}),
    ("--no-python ./prog -a", {"PYTHON_EXEC": "/opt/other/python"}),
    ("t.py --rank ${local_rank} $local_rank ${rank}", {}),
    ("--module --no-python x", {}),
]

# The same for `torch.distributed.launch`.
LAUNCH_LINES: list[tuple[str, dict[str, str]]] = [
    ("t.py a", {}),
    ("--use-env t.py a", {}),
    ("--use_env t.py a", {}),
    ("--use t.py a", {}),
    ("-m pkg.mod a", {}),
    ("-m --use-env pkg.mod a", {}),
    ("--no-python ./prog a", {}),
    ("--no-python --use-env ./prog a", {}),
    ("--nproc_per_node=2 --node_rank=0 t.py", {}),
    ("t.py --use-env", {}),
    ("--use-env=True t.py", {}),
]

# Jobs of 4 workers whose environment is recorded: name, options, variables that the launcher inherits.
ENVIRONMENTS: list[tuple[str, str, dict[str, str]]] = [
    ("plain", "", {}),
    ("standalone", "--standalone", {}),
    ("standalone and more", "--standalone --rdzv-id mine --master-port 29671 --node-rank 0", {}),
    ("c10d", "--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0", {}),
    ("c10d with an id", "--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id job7", {}),
    ("c10d with an address", "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1", {}),
    ("static", "--master-addr 127.0.0.1 --master-port 29672", {}),
    ("static with a name", "--master-addr localhost --master-port 29673 --rdzv-id job8", {}),
    ("static with IPv6", "--master-addr [::1] --master-port 29674", {}),
    ("static by an endpoint", "--rdzv-backend static --rdzv-endpoint 127.0.0.1:29675", {}),
    ("master address alone", "--master-addr 10.1.2.3", {}),
    ("role", "--role trainer", {}),
    ("restarts", "--max-restarts 3", {}),
    ("signals", "--signals-to-handle SIGTERM,SIGUSR2", {}),
    ("virtual local rank", "--virtual-local-rank", {}),
    ("virtual local rank of some", "--virtual-local-rank", {"CUDA_VISIBLE_DEVICES": "7, 5,3,GPU-1"}),
    (
        "virtual local rank on AMD",
        "--virtual-local-rank",
        {"HIP_VISIBLE_DEVICES": "6, 2,1,0", "CUDA_VISIBLE_DEVICES": "0,1"},
    ),
    (
        "virtual local rank without HIP's devices",
        "--virtual-local-rank",
        {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "3,2,1,0"},
    ),
    ("devices", "", {"CUDA_VISIBLE_DEVICES": "7,5,3,1"}),
    ("threads", "", {"OMP_NUM_THREADS": "3"}),
    ("errors of NCCL", "", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
    (
        "inherited",
        "",
        {
            "TORCHELASTIC_RESTART_COUNT": "7",
            "TORCHELASTIC_RUN_ID": "theirs",
            "TORCHELASTIC_ERROR_FILE": "/nowhere/error.json",
            "TORCHELASTIC_USE_AGENT_STORE": "no",
            "RANK": "9",
            "WORLD_SIZE": "99",
            "MASTER_ADDR": "nowhere",
            "MASTER_PORT": "1",
            "LOCAL_RANK": "9",
            "GROUP_RANK": "9",
        },
    ),
    ("from the environment", "", {"PET_ROLE": "of-env", "PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1"}),
]

WORKERS = 4

# The same for jobs of two nodes with two workers each, `--node-rank` 0 and 1 started beside one another.
NODES: list[tuple[str, str, dict[str, str]]] = [
    ("two nodes", "--nnodes 2 --master-addr 127.0.0.1 --master-port 29681", {}),
    ("two nodes by an endpoint", "--nnodes=2:2 --rdzv-endpoint localhost:29682 --rdzv-id j --role r", {}),
    ("a range of nodes", "--nnodes 1:2 --master-addr 127.0.0.1 --master-port 29683", {}),
]

# The same for nodes that differ: name, options of all, and those of each node, `--node-rank` 0, 1 and so on.
UNEQUAL: list[tuple[str, str, list[str]]] = [
    ("two and three", "--nnodes 2 --master-addr 127.0.0.1 --master-port 29684", ["2", "3"]),
    (
        "roles across nodes",
        "--nnodes 4 --master-addr localhost --master-port 29685 --rdzv-id j --max-restarts 2",
        ["2 --role train", "3 --role serve", "1 --role train", "1 --role serve"],
    ),
]


def normal(name: str, value: str, options: str) -> str:
    """The value of a variable without what differs from run to run: ports that were not asked for, ids, paths."""
    if name == "MASTER_PORT" and value not in options:
        return "PORT"
    if name == "TORCHELASTIC_ERROR_FILE":
        return "FOLDER" + value[value.index("/attempt_") :] if "/attempt_" in value else value
    if name == "TORCHELASTIC_RUN_ID" and re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value):
        return "UUID"
    return value


def cases(lines: list[tuple[str, dict[str, str]]]) -> list[tuple[list[str], dict[str, Any]]]:
    """Lines as arguments."""
    return [(line.split(), env) for line, env in lines]


ALONE = {"localhost": "127.0.0.1"}
"""A node that meets nobody: the address needs no resolver, which may say ::1. A name that was asked for stays."""


def as_torchrun(worker: dict[str, str]) -> dict[str, str]:
    """What torchrun gives a worker, with our differences, which compat.md documents."""
    ours = dict(worker)
    # Rank 0 holds the store: the launcher has no torch to hold it with.
    ours["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    # A port of its choice means that the node meets nobody.
    if worker["MASTER_PORT"] == "PORT":
        ours["MASTER_ADDR"] = ALONE.get(worker["MASTER_ADDR"], worker["MASTER_ADDR"])
    # Without a log directory no directories are made for the files of ranks.
    folder, *within = worker["TORCHELASTIC_ERROR_FILE"].split("/")
    ours["TORCHELASTIC_ERROR_FILE"] = f"{folder}/{'_'.join(within)}"
    return ours
