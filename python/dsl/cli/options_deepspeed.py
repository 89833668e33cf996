"""The command line of ``dsl``: the options of all DeepSpeed versions, and those that both commands have."""

from __future__ import annotations

from dsl.cli.options import (
    COMMON,
    DEEPSPEED,
    JOB,
    LAUNCHER,
    NODE,
    OURS,
    BadValueError,
    CommandLine,
    flag,
    integer,
    seconds,
    value,
)
from dsl.lists import parse_integer, quote
from dsl.model.request import DEFAULT_HEARTBEAT_S, DEFAULT_HOSTFILE, DEFAULT_MASTER_PORT, LOG_LEVELS


def node_count(text: str) -> int | str:
    """``N`` as a number; ``MIN:MAX`` stays text until dsl knows whether the job is elastic."""
    counts = [parse_integer(part) for part in text.split(":")]
    if None in counts or len(counts) > 2:
        raise BadValueError(f"invalid int value, nor MIN:MAX: {quote(text)}")
    return text if len(counts) == 2 else counts[0]  # type: ignore[return-value]  # none is None


_WHERE = "where to run"
_HOSTS = "several hosts"
_WORKERS = "workers"

_OPTIONS = (
    value(
        DEEPSPEED, LAUNCHER, _WHERE, "-H --hostfile", "PATH",
        "file of lines 'HOST slots=N'; without it the job runs on this machine",
        DEFAULT_HOSTFILE, is_slip=True,
    ),
    value(
        DEEPSPEED, LAUNCHER, _WHERE, "-i --include", "FILTER", "use only HOST[:SLOT,...][@HOST...]", "",
    ),
    value(
        DEEPSPEED, LAUNCHER, _WHERE, "-e --exclude", "FILTER", "use all but HOST[:SLOT,...][@HOST...]", "",
    ),
    value(
        DEEPSPEED, LAUNCHER, _WHERE, "--num_nodes", "N", "use the first N hosts; MIN:MAX if elastic",
        -1, read=node_count, is_slip=True,
    ),
    value(
        DEEPSPEED, LAUNCHER, _WHERE, "--num_gpus --num_accelerators", "N", "workers on each host",
        -1, read=integer, is_slip=True,
    ),
    value(
        DEEPSPEED, JOB, _WHERE, "--master_port", "PORT",
        "where the workers meet; another is chosen if the default is taken, 0 chooses always",
        # If the user writes the default, it counts as the user's choice.
        DEFAULT_MASTER_PORT, read=integer, given="master_port_given", is_slip=True,
    ),
    value(
        DEEPSPEED, JOB, _WHERE, "--master_addr", "ADDRESS", "address of the first host", "", is_slip=True,
    ),
    flag(
        DEEPSPEED, JOB, _WHERE, "--elastic_training",
        "let hosts join and leave: the workers are started again on those that are there",
    ),
    value(
        DEEPSPEED, JOB, _WHERE, "--min_elastic_nodes", "N",
        "with --elastic_training: run on so many hosts at least (default: 1)", -1, read=integer,
    ),
    value(
        DEEPSPEED, JOB, _WHERE, "--max_elastic_nodes", "N",
        "with --elastic_training: run on so many at most; the others are spares (default: all)",
        -1, read=integer,
    ),
    value(
        OURS, LAUNCHER, _WHERE, "--elastic-wait", "SECONDS",
        "with --elastic_training: wait so long for hosts when there are too few (default: 600)",
        read=seconds,
    ),
    value(
        DEEPSPEED, LAUNCHER, _WHERE, "--autotuning", "", "look for the best config; run: train with it, too",
        "", choices=("tune", "run"),
    ),
    flag(
        DEEPSPEED, LAUNCHER, _HOSTS, "--no_ssh",
        "start only this host's workers; the same command runs on each host", is_slip=True,
    ),
    value(
        DEEPSPEED, NODE, _HOSTS, "--node_rank", "RANK",
        "with --no_ssh: place of this host, from 0", -1, read=integer,
    ),
    flag(DEEPSPEED, LAUNCHER, _HOSTS, "--no_ssh_check", "do not try the hosts first"),
    flag(DEEPSPEED, LAUNCHER, _HOSTS, "--force_multi", "treat even one host as remote", is_slip=True),
    value(
        DEEPSPEED, LAUNCHER, _HOSTS, "--launcher", "NAME",
        "ssh, pdsh, openmpi, mvapich, slurm, mpich or impi (default: slurm in an allocation of Slurm, else "
        "pdsh if it is installed, else ssh)",
        "pdsh", given="launcher_given",
    ),
    value(
        DEEPSPEED, LAUNCHER, _HOSTS, "--launcher_args", "WORDS", "more arguments for the launcher", "",
        is_text=True,
    ),
    value(
        DEEPSPEED, LAUNCHER, _HOSTS, "--ssh_port", "PORT", "port of the hosts' ssh servers", read=integer,
    ),
    value(
        DEEPSPEED, LAUNCHER, _HOSTS, "--venv_script", "PATH", "script to source on each host first",
    ),
    flag(
        OURS, LAUNCHER, _HOSTS, "--one-agent-per-node",
        "with MPI and Slurm: a task for each node, not for each rank",
    ),
    value(
        OURS, LAUNCHER, _HOSTS, "--heartbeat", "SECONDS",
        "silence after which a host counts as lost", DEFAULT_HEARTBEAT_S, read=seconds,
    ),
    value(
        OURS, JOB, _WORKERS, "--max-restarts", "N",
        "how often workers that failed are started again (default: 0; with --elastic_training 100)",
        read=integer,
    ),
    flag(DEEPSPEED, JOB, _WORKERS, "--module", "run the script as 'python -m' does"),
    flag(DEEPSPEED, JOB, _WORKERS, "--no_python", "run the script itself, without python"),
    flag(
        DEEPSPEED, JOB, _WORKERS, "--no_local_rank", "do not pass --local_rank=N to the script",
        is_slip=True,
    ),
    flag(
        DEEPSPEED, JOB, _WORKERS, "--bind_cores_to_rank",
        "give each worker its own cores and their memory", is_slip=True,
    ),
    value(
        DEEPSPEED, JOB, _WORKERS, "--bind_core_list", "LIST",
        "the cores to give, such as 0-27,32-59", is_slip=True,
    ),
    value(
        DEEPSPEED, JOB, _WORKERS, "--enable_each_rank_log", "DIR",
        "write the output of each worker to its own file here", "None", is_slip=True,
    ),
    flag(
        DEEPSPEED, JOB, _WORKERS, "--save_pid",
        "keep the pid of the supervisor in /tmp/PID.deepspeed",
    ),
    value(
        DEEPSPEED, JOB, _WORKERS, "--log_level", "", "how much dsl says about what it does",
        "info", choices=LOG_LEVELS, given="log_level_given",
    ),
    flag(DEEPSPEED, JOB, _WORKERS, "-q --quiet", "the same as --log_level error"),
)  # fmt: skip

COMMAND_LINE = CommandLine(
    "dsl",
    DEEPSPEED,
    (*_OPTIONS, *COMMON),
    "user_script",
    "user_args",
    "Run a training script on every slot of this machine, or of several.",
)
