"""The environment of a worker: what it inherits, and the facts of its job that a flavour has names for."""

from __future__ import annotations

from dsl.signals import SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.model.job import Flavour, Job, Meeting

POD_ENVIRONMENT_PATH = "/dlts-runtime/env/pod.env"
"""Where DLTS clusters describe a pod to its processes."""

POD_VARIABLES = ("FC_TASKROLE_NAME", "FC_TASK_INDEX")
"""What is taken from it."""

EXPORT_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX")
"""Variables whose names start with one of these go to every node, besides those of the accelerator."""

EXPORT_EXCLUSIONS = {"AISC_JOB_NAME": ("NCCL_IB_HCA", "UCX_NET_DEVICES")}
"""When the variable on the left is set, those on the right differ from node to node and stay at home."""


def parse_pod_environment(text: str) -> dict[str, str]:
    """``FC_TASKROLE_NAME`` and ``FC_TASK_INDEX`` from ``export NAME=VALUE``; other lines are skipped."""
    found = {}
    for line in text.splitlines():
        words = line.split(maxsplit=1)
        if len(words) == 2 and words[0] == "export":
            name, equals, value = words[1].partition("=")
            if equals and name in POD_VARIABLES:
                found[name] = value.strip().strip("\"'")
    return found


def inherited_environment(job: Job, environ: Mapping[str, str]) -> Mapping[str, str]:
    """What the workers of a node inherit: the environment of its agent, and the job's variables over it."""
    return {**environ, **dict(job.env)} if job.env else environ


def group_environment(job: Job, meeting: Meeting, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment that all workers of a node share, but for defaults (see `set_defaults`)."""
    facts = group_facts(job, meeting)
    env = dict(inherited)
    env.update([(name, facts[fact]) for name, fact in job.flavour.group_variables])
    env.update(job.flavour.constants)
    return env


def set_defaults(env: dict[str, str], flavour: Flavour, local_world_size: int) -> None:
    """Add the variables that the flavour sets where neither the user nor a binding has chosen."""
    crowd = flavour.crowd_defaults if local_world_size > 1 else ()
    for name, value in (*flavour.defaults, *crowd):
        env.setdefault(name, value)


def group_facts(job: Job, meeting: Meeting) -> dict[str, str]:
    """What variables can tell all workers of a node, by the names that flavours use."""
    return {
        "master_addr": meeting.address,
        "master_port": str(meeting.port),
        "world_size": str(meeting.world_size),
        "local_world_size": str(meeting.local_world_size),
        "node_rank": str(meeting.node_rank),
        "node_count": str(meeting.node_count),
        "attempt": str(meeting.attempt),
        "max_restarts": str(job.max_restarts),
        "run_id": job.run_id,
        "role": job.role,
        "stop_signals": ",".join([SIGNALS.get(number, str(number)) for number in job.signals.stop or ()]),
    }


def worker_environment(flavour: Flavour, rank: int, local_rank: int, error_file: str = "") -> dict[str, str]:
    """What one worker's environment has over that of its node."""
    facts = {"rank": str(rank), "local_rank": str(local_rank), "error_file": error_file}
    return {name: facts[fact] for name, fact in flavour.worker_variables}
