"""What `record_golden` asks DeepSpeed. Random inputs come from fixed seeds."""

from __future__ import annotations

import random
import shlex
from typing import TypeAlias

Pool: TypeAlias = dict[str, int]
Decision: TypeAlias = tuple[str | None, dict[str, str], list[str]]


def _lines(text: str) -> list[list[str]]:
    return [shlex.split(line) for line in text.strip().splitlines()]


OPTION_WORDS = _lines("""
    --num_gpus 2
    --num_gpus=2
    --num_acc -1
    -H hosts
    -Hhosts
    -H=h
    --hostf h
    -i a:0,1
    -qi a
    -q
    --quiet
    --mod
    --no_l
    --no_s
    --no_ssh
    --bind_cores
    --bind_core_list 0-3
    --master_port 1
    --ma 1
    --launcher_arg '-x y'
    --launcher_args=--x
    --launcher_args --x
    --
    --n 1
    --log_level debug
    --log_level loud
    --auto run
    --unknown
    -1
    -
    --venv 'a b'
    --v x
    --save
    --enable=d
    --num_nodes x
    '-x y'
    ''
""")
SCRIPT_WORDS = shlex.split("--local_rank -q -- --num_gpus 3 'a b' -H x '' --lr=1e-3 --deepspeed")


def command_lines() -> list[list[str]]:
    """Command lines, more or less right."""
    rng = random.Random(1)
    lines = []
    for _ in range(400):
        options = [word for words in rng.choices(OPTION_WORDS, k=rng.randrange(5)) for word in words]
        script = rng.choice([["train.py"], ["train.py"], []])
        lines.append([*options, *script, *rng.choices(SCRIPT_WORDS, k=rng.randrange(4))])
    return lines


HOSTFILE_LINES = """
worker-0 slots=2
worker-1 slots=2
localhost slots=1
123.23.12.10 slots=2
# note

h slots=4 max_slots=8
h slots=4 # note
h slots = 4
h
this is bad slots=1
missingslots
h max_slots=8 slots=4
h slots=0
h slots=
h slots=-1
h slots=1x
#h slots=1
user@h slots=1
node[1-3] slots=8
h slots=007
""".strip().splitlines()
ODD_HOSTFILE_LINES = ["   ", "\th\tslots=3\r", "h slots=\u0663", "h\u00a0slots=2", "h\x0bslots=1"]


def hostfiles() -> list[list[str]]:
    """Hostfiles as lines."""
    rng = random.Random(2)
    pieces = HOSTFILE_LINES + ODD_HOSTFILE_LINES
    return [
        [],
        *([piece] for piece in pieces),
        *(rng.choices(pieces, k=rng.randrange(5)) for _ in range(150)),
    ]


FILTER_VECTORS = """
    worker-0:1 | worker-0:1,1 | worker-0:1@worker-0:0,1 | worker-0 | worker-1:0,3 | jeff | worker-1:4 | @ | worker-0@
    worker-0:1,2 | worker-0:0,1,2,3 | worker-0:0,1@worker-1:3 | worker-1@worker-0:1@5 | worker-0: | worker-0:x
    worker-0:1:2 | worker-0: 1 | worker-0:+1 | worker-0:1_0 | worker-0:-1 | worker-0:1@worker-0 | worker-0:0-1
"""


def filters() -> list[tuple[Pool, str, str]]:
    """Resource pool, include filter and exclude filter."""
    rng = random.Random(3)
    pool = {"worker-0": 4, "worker-1": 4}
    texts = [text.strip() for line in FILTER_VECTORS.strip().splitlines() for text in line.split(" | ")]
    cases = [(pool, "", ""), (pool, "worker-0", "worker-1")]
    cases += [(pool, *pair) for text in texts for pair in ((text, ""), ("", text))]
    names = ["worker-0", "worker-1", "h"]

    def spec() -> str:
        slots = ",".join(str(rng.randrange(5)) for _ in range(rng.randrange(4)))
        return rng.choice([*names * 4, "jeff"]) + (f":{slots}" if slots else "")

    for _ in range(300):
        pool = {name: rng.choice([4, 4, 3, 1]) for name in rng.sample(names, rng.randrange(1, 4))}
        text = "@".join(spec() for _ in range(rng.randrange(1, 4)))
        cases.append((pool, text, "") if rng.random() < 0.5 else (pool, "", text))
    return cases


WORLDS: list[dict[str, list[int]]] = [
    {"localhost": [0, 1]},
    {"worker-0": [0, 1], "worker-1": [0, 1]},
    {"b": [3], "a": []},
    {"h\u00f6st": [0]},
    {"node-7.example": list(range(16))},
    {"???>>>": [1]},
]


def core_lists() -> list[str]:
    """Core lists, many of them malformed."""
    rng = random.Random(4)
    texts = ["0,2-4,6,8-9", "0,2-6,5-9", "8,2-6", "1,6-2", "1,1", "a", "", "3-", "-3", "1-2-3", "0-27,32-59"]
    texts += ["0-0"]
    return texts + ["".join(rng.choices("0123456789,,--", k=rng.randrange(1, 9))) for _ in range(300)]


def _cpus(*core_lists: str) -> list[list[int]]:
    """``"0-3 8"`` -> [0, 1, 2, 3, 8] each."""
    table: list[list[int]] = []
    for text in core_lists:
        ends = [part.partition("-")[::2] for part in text.split()]
        table.append([cpu for first, last in ends for cpu in range(int(first), int(last or first) + 1)])
    return table


NUMA_TABLES = [
    _cpus("0-3 8-11", "4-7 12-15"),
    _cpus(),
    _cpus("0-3", "4-7", "", ""),
    _cpus("0-3", "4-7", ""),
    _cpus("0-3", "0-3", "4-7", "4-7"),
    _cpus("0-7"),
    _cpus("0-3", "0-3", "4-7"),
    _cpus("", "0-3", "", "4-7"),
    _cpus("0-1", "0-1", "", "2-7"),
]
BOUND_CORES = [None, "0-1,4-5,8,10", "0-7", "4-7", "0-3,6-7", "2,4,6"]
LOCAL_WORLD_SIZES = [1, 2, 3, 4, 8, 16]
COUNTED_NUMA_TABLES = [
    _cpus(),
    _cpus("0-1"),
    _cpus("0", "1"),
    _cpus("0-1", "0-1", "2-3", "2-3"),
    _cpus("0", "1", "", ""),
    _cpus("0", "0", ""),
    _cpus("", "0", "1"),
]

ONE_HOST = "alpha slots=4\n"
TWO_HOSTS = "alpha slots=4\nbeta slots=2\n"
VISIBLE_SETTINGS = ["", "0", "2,3", "3,1", "1,1", "GPU-1a", "7"]
VISIBLE_OPTIONS = _lines("""
    ''
    --num_gpus 2
    --num_nodes 1
    -i localhost:1
    -e localhost:0
""")
LOCAL_OPTIONS = _lines("""
    ''
    --num_gpus 9
    --num_gpus 0
    --num_nodes 2
    --num_nodes 0
    --master_addr m
    --master_port 7
    -e localhost
    -i x
    -i a -e b
    --no_ssh
    --no_ssh --node_rank 0
    --no_ssh --node_rank 1
    --launcher bogus
    --no_python --module
""")
HOST_OPTIONS = _lines("""
    --no_ssh --node_rank 0 --master_addr m
    --no_ssh --node_rank 2 --master_addr m
    --no_ssh --node_rank 1 --master_addr m --num_gpus 2
    --no_ssh --master_addr m
    --no_ssh --node_rank 0 --master_addr m --num_nodes 1
    --no_ssh --node_rank 0 --master_addr m --num_nodes 5
    --no_ssh --node_rank 0 --master_addr m -i beta
    --no_ssh --node_rank 1 --master_addr m -e alpha:0,2
    -i gamma
    -i beta:3
    --num_nodes 1 --include alpha
""")


def decisions() -> list[Decision]:
    """Hostfile text (None: no file), environment and options."""
    cases: list[Decision] = [
        (None, {"CUDA_VISIBLE_DEVICES": setting}, options)
        for setting in VISIBLE_SETTINGS
        for options in VISIBLE_OPTIONS
    ]
    cases += [
        (None, {}, [f"--{what}", number, f"--{which}", "localhost:0"])
        for what in ("num_nodes", "num_gpus")
        for number in ("0", "1", "2")
        for which in ("include", "exclude")
    ]
    cases += [(None, {}, options) for options in LOCAL_OPTIONS]
    cases += [(TWO_HOSTS, {}, options) for options in HOST_OPTIONS]
    cases.append((TWO_HOSTS, {"CUDA_VISIBLE_DEVICES": "2,3"}, HOST_OPTIONS[0]))
    cases += [(ONE_HOST, {}, HOST_OPTIONS[0]), ("nonsense\n", {}, [])]
    return [(text, env, [word for word in options if word]) for text, env, options in cases]


WORKERS: list[tuple[dict[str, list[int]], int, list[str]]] = [
    ({"localhost": [0, 1]}, 0, []),
    ({"localhost": [2, 3]}, 0, ["--no_local_rank"]),
    ({"a": [0, 1, 2], "b": [0, 1]}, 0, []),
    ({"a": [0, 1], "b": [1, 3]}, 1, []),
    ({"a": [0, 1, 2], "b": [0, 1]}, 1, []),
    ({"localhost": [0, 1]}, 0, ["--module"]),
    ({"localhost": [0]}, 0, ["--no_python"]),
]


LIVELY = {
    "MLFLOW_URI": "http://m",
    "PYTHONUNBUFFERED": "1",
    "MV2_X": "64(x2)",
    "UCX_NET_DEVICES": "mlx5_0:1",
    "UCXX": "y z",
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_HCA": "mlx5",
    "PATH": "/bin:/usr/bin",
    "PATHS": "p",
    "LD_LIBRARY_PATH": "/l",
    "ASCEND_HOME": "/a",
    "HCCL_X": "h",
    "NEUWARE_HOME": "n",
    "CNCL_X": "c",
    "BCCL_X": "b",
    "BIREN_X": "b",
    "SUPA_X": "s",
    "BKCL_X": "k",
    "XPU_X": "x",
    "XMLIR_X": "m",
    "HOME": "/h",
    "MY_PYTHON": "no",
    "EMPTY_NCCL": "",
}
"""An environment with a variable for each rule of what travels."""

EXPORTS: list[tuple[str, dict[str, str], dict[str, str]]] = [
    *[
        (name, LIVELY, {})
        for name in ("cuda", "cpu", "npu", "mlu", "sdaa", "supa", "klxpu", "xpu", "hpu", "mps")
    ],
    ("cuda", {**LIVELY, "AISC_JOB_NAME": "j"}, {}),
    ("cpu", {"PYTHONPATH": "/a:/b"}, {}),
    ("cpu", {"PYTHONUTF8": "1"}, {"HOME": "A=1\nPYTHONUTF8=0\n"}),
    ("cpu", {}, {"HOME": "A=1\nB=home\n", "CWD": "B=cwd\nC = x=y \n"}),
    ("cpu", {}, {"CWD": "A=b # c\nB='q'\nC=$HOME\nD=\n"}),
    ("cuda", {"AISC_JOB_NAME": "j"}, {"CWD": "NCCL_IB_HCA=mine\n"}),
    ("cpu", {"DS_ENV_FILE": "my.env"}, {"HOME": "A=1\n", "HOME/my.env": "A=2\n", "CWD/my.env": "B=3\n"}),
    ("cpu", {"DS_ENV_FILE": "ABSOLUTE"}, {"HOME": "A=1\n", "ABSOLUTE": "A=2\n"}),
    ("cpu", {}, {"CWD": "A=1\n\nB=2\n"}),
    ("cpu", {}, {"CWD": "# note\n"}),
    ("cpu", {}, {"CWD": "PYTHONPATH=/only\n"}),
]
"""Accelerator, environment, and env files: ``HOME`` and ``CWD`` stand for the default file there."""
