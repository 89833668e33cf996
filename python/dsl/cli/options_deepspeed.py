"""The command line of ``dsl``: the options of all DeepSpeed versions, and those that both commands have."""

from __future__ import annotations

from dsl.model.options import (
    COMMON,
    DEEPSPEED,
    OURS,
    BadValueError,
    CommandLine,
    Option,
    count_or_none,
    flag,
    integer,
    seconds,
    text_or_none,
    unquoted,
)
from dsl.model.request import DEFAULT_HEARTBEAT_S, DEFAULT_HOSTFILE, DEFAULT_MASTER_PORT, LOG_LEVELS
from dsl.words import parse_integer, quote


def node_count(text: str) -> int | str:
    """``N`` as a number; ``MIN:MAX`` stays text until dsl knows whether the job is elastic."""
    counts = [parse_integer(part) for part in text.split(":")]
    if None in counts or len(counts) > 2:
        raise BadValueError(f"invalid int value, nor MIN:MAX: {quote(text)}")
    return text if len(counts) == 2 else counts[0]  # type: ignore[return-value]  # none is None


_OPTIONS = {
    "where to run": (
        Option(
            DEEPSPEED, "-H --hostfile", "PATH",
            "file of lines 'HOST slots=N'; without it the job runs on this machine", DEFAULT_HOSTFILE,
            is_slip=True, into="resources.hostfile",
        ),
        Option(
            DEEPSPEED, "-i --include", "FILTER", "use only HOST[:SLOT,...][@HOST...]", "", read=unquoted,
            into="resources.include",
        ),
        Option(
            DEEPSPEED, "-e --exclude", "FILTER", "use all but HOST[:SLOT,...][@HOST...]", "", read=unquoted,
            into="resources.exclude",
        ),
        Option(
            DEEPSPEED, "--num_nodes", "N",
            "use the first N hosts; MIN:MAX if elastic", -1, read=node_count, is_slip=True,
        ),
        Option(
            DEEPSPEED, "--num_gpus --num_accelerators", "N",
            "workers on each host", -1, read=integer, is_slip=True, into="resources.num_gpus",
            make=count_or_none,
        ),
        Option(
            DEEPSPEED, "--master_port", "PORT",
            "where the workers meet; another is chosen if the default is taken, 0 chooses always",
            # If the user writes the default, it counts as the user's choice.
            DEFAULT_MASTER_PORT, read=integer, given="master_port_given", is_slip=True,
            into="meeting.master_port",
        ),
        Option(
            DEEPSPEED, "--master_addr", "ADDRESS", "address of the first host", "", is_slip=True,
            into="meeting.master_addr",
        ),
        flag(
            DEEPSPEED, "--elastic_training",
            "let hosts join and leave: the workers are started again on those that are there",
            into="elastic.training",
        ),
        Option(
            DEEPSPEED, "--min_elastic_nodes", "N",
            "with --elastic_training: run on so many hosts at least (default: 1)", -1, read=integer,
            into="elastic.min_nodes", make=count_or_none,
        ),
        Option(
            DEEPSPEED, "--max_elastic_nodes", "N",
            "with --elastic_training: run on so many at most; the others are spares (default: all)", -1,
            read=integer, into="elastic.max_nodes", make=count_or_none,
        ),
        Option(
            OURS, "--elastic-wait", "SECONDS",
            "with --elastic_training: wait so long for hosts when there are too few (default: 600)",
            read=seconds, into="elastic.wait_s",
        ),
        Option(
            OURS, "--discover", "WORDS",
            "with --elastic_training: ask this program for the hosts, at the start and while the job runs",
            "", is_text=True, into="elastic.discover",
        ),
        Option(
            DEEPSPEED, "--autotuning", "",
            "look for the best config; run: train with it, too", "", choices=("tune", "run"),
            into="elastic.autotuning",
        ),
    ),
    "several hosts": (
        flag(
            DEEPSPEED, "--no_ssh",
            "start only this host's workers; the same command runs on each host", is_slip=True,
            into="remote.no_ssh",
        ),
        Option(
            DEEPSPEED, "--node_rank", "RANK", "with --no_ssh: place of this host, from 0", -1, read=integer,
            into="meeting.node_rank",
        ),
        flag(DEEPSPEED, "--no_ssh_check", "do not try the hosts first", into="remote.no_ssh_check"),
        flag(
            DEEPSPEED, "--force_multi", "treat even one host as remote", is_slip=True,
            into="remote.force_multi",
        ),
        Option(
            DEEPSPEED, "--launcher", "ssh|pdsh|openmpi|mvapich|slurm|mpich|impi",
            "how hosts are reached (default: slurm in an allocation of Slurm, else pdsh if it is installed, "
            "else ssh)",
            "pdsh", given="launcher_given", into="remote.launcher",
        ),
        Option(
            DEEPSPEED, "--launcher_args", "WORDS", "more arguments for the launcher", "", is_text=True,
            into="remote.launcher_args",
        ),
        Option(
            DEEPSPEED, "--ssh_port", "PORT", "port of the hosts' ssh servers", read=integer,
            into="remote.ssh_port",
        ),
        Option(
            OURS, "--ssh-program", "WORDS",
            "reach hosts by this instead of ssh, such as 'docker exec -i {host} sh -c'", "", is_text=True,
            into="remote.ssh_program",
        ),
        Option(
            OURS, "--wait-hosts", "SECONDS",
            "wait so long for hosts that cannot be reached yet; with --no_ssh: for the commands of the "
            "others, which are one job then",
            read=seconds, into="remote.wait_hosts_s",
        ),
        Option(
            DEEPSPEED, "--venv_script", "PATH", "script to source on each host first",
            into="remote.venv_script",
        ),
        flag(
            OURS, "--one-agent-per-node", "with MPI and Slurm: a task for each node, not for each rank",
            into="remote.per_node",
        ),
        Option(
            OURS, "--heartbeat", "SECONDS",
            "silence after which a host counts as lost", DEFAULT_HEARTBEAT_S, read=seconds,
            into="remote.heartbeat_s",
        ),
    ),
    "workers": (
        Option(
            OURS, "--max-restarts", "N",
            "how often workers that failed are started again (default: 0; with --elastic_training 100)",
            read=integer, into="max_restarts",
        ),
        flag(DEEPSPEED, "--module", "run the script as 'python -m' does"),
        flag(DEEPSPEED, "--no_python", "run the script itself, without python"),
        flag(DEEPSPEED, "--no_local_rank", "do not pass --local_rank=N to the script", is_slip=True),
        flag(
            DEEPSPEED, "--bind_cores_to_rank", "give each worker its own cores and their memory",
            is_slip=True, into="placement.bind_cores_to_rank",
        ),
        Option(
            DEEPSPEED, "--bind_core_list", "LIST", "the cores to give, such as 0-27,32-59", is_slip=True,
            into="placement.core_list",
        ),
        Option(
            DEEPSPEED, "--enable_each_rank_log", "DIR",
            "write the output of each worker to its own file here", "None", is_slip=True,
            into="output.each_rank_log", make=text_or_none,
        ),
        flag(
            DEEPSPEED, "--save_pid", "keep the pid of the supervisor in /tmp/PID.deepspeed", into="save_pid",
        ),
        Option(
            DEEPSPEED, "--log_level", "",
            "how much dsl says about what it does", "info", choices=LOG_LEVELS, given="log_level_given",
        ),
        flag(DEEPSPEED, "-q --quiet", "the same as --log_level error"),
    ),
}  # fmt: skip

COMMAND_LINE = CommandLine(
    "dsl",
    DEEPSPEED,
    {**_OPTIONS, **COMMON},
    "user_script",
    "user_args",
    "Run a training script on every slot of this machine, or of several.",
)
