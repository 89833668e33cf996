"""The two families of launchers as data: what their workers find in the environment and in their arguments.

Sources: the launcher of DeepSpeed 0.19.8 and the agent of torchrun (torch 2.15), whose answers are recorded
in the contract tests. DeepSpeed sets no NODE_RANK, but we do: Lightning reads NODE_RANK, and without it
every node believes that it is the first.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.lists import THREADS_VARIABLE
from dsl.model.job import Flavour

# What torch's agent tells its workers. DeepSpeed's elastic agent is torch's, too.
AGENT = (
    ("GROUP_RANK", "node_rank"),
    ("GROUP_WORLD_SIZE", "node_count"),
    ("LOCAL_WORLD_SIZE", "local_world_size"),
    ("ROLE_WORLD_SIZE", "role_size"),
    ("ROLE_NAME", "role"),
    ("TORCHELASTIC_RESTART_COUNT", "restarts"),
    ("TORCHELASTIC_MAX_RESTARTS", "max_restarts"),
    ("TORCHELASTIC_RUN_ID", "run_id"),
)
# Rank 0 serves the store: our launcher has no torch to serve one.
NO_STORE = (("TORCHELASTIC_USE_AGENT_STORE", "False"),)

DEEPSPEED = Flavour(
    command="dsl",
    group_variables=(
        ("MASTER_ADDR", "master_addr"),
        ("MASTER_PORT", "master_port"),
        ("WORLD_SIZE", "world_size"),
        ("LOCAL_SIZE", "local_world_size"),
        ("CROSS_RANK", "node_rank"),
        ("NODE_RANK", "node_rank"),
        ("CROSS_SIZE", "node_count"),
    ),
    worker_variables=(("RANK", "rank"), ("LOCAL_RANK", "local_rank")),
    shows_slots=True,
    reads_pod=True,
    logs_by_folder=True,
    binds_memory=True,
    tells_bindings=True,
    underscores=True,
)

# DeepSpeed's elastic agent is started with the environment of DeepSpeed's launcher.
ELASTIC = replace(
    DEEPSPEED,
    group_variables=(*DEEPSPEED.group_variables, *AGENT),
    worker_variables=(*DEEPSPEED.worker_variables, ("ROLE_RANK", "role_rank")),
    constants=NO_STORE,
    defaults=(("NCCL_ASYNC_ERROR_HANDLING", "1"),),
)

TORCH = Flavour(
    command="dslrun",
    group_variables=(
        *AGENT,
        ("WORLD_SIZE", "world_size"),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", "stop_signals"),
        ("MASTER_ADDR", "master_addr"),
        ("MASTER_PORT", "master_port"),
    ),
    worker_variables=(
        ("RANK", "rank"),
        ("ROLE_RANK", "role_rank"),
        ("LOCAL_RANK", "local_rank"),
        ("TORCHELASTIC_ERROR_FILE", "error_file"),
    ),
    constants=NO_STORE,
    defaults=(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),),
    crowd_defaults=((THREADS_VARIABLE, "1"),),
    interpreter_variable="PYTHON_EXEC",
    fills_local_rank=True,
    keeps_errors=True,
    hands_on_errors=True,
    has_timers=True,
    logs_by_folder=True,
)

# Called from Python, torch's launcher sets no number of threads, leaves error records to its caller, and
# writes log files only if stream maps ask for them.
FUNCTIONS = replace(TORCH, crowd_defaults=(), hands_on_errors=False, logs_by_folder=False)

FLAVOURS = {"deepspeed": DEEPSPEED, "torch": TORCH, "functions": FUNCTIONS}
"""Flavours by their names in `dsl.model.request.Request.flavour`."""
