"""The environment of a worker.

The names are DeepSpeed's (``LOCAL_SIZE``, ``CROSS_RANK``, ``CROSS_SIZE``) and torchrun's
(``LOCAL_WORLD_SIZE``, ``GROUP_RANK``, ``NODE_RANK``): scripts written for either find what they look for.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.model import Plan

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


def node_environment(
    plan: Plan,
    environ: Mapping[str, str],
    *,
    visible_variable: str,
    pod: Mapping[str, str],
    threads: int | None = None,
) -> dict[str, str]:
    """Environment that all workers of a node share: the inherited one and the job's variables over it.

    ``threads`` becomes ``OMP_NUM_THREADS`` (cores of a worker, when workers are bound; None: left alone).
    """
    node = plan.nodes[plan.node_rank]
    visible = plan.visible_devices
    env = dict(environ)
    env.update(pod)
    env["MASTER_ADDR"] = plan.master_addr
    env["MASTER_PORT"] = str(plan.master_port)
    env["WORLD_SIZE"] = str(plan.world_size)
    env["LOCAL_SIZE"] = env["LOCAL_WORLD_SIZE"] = str(len(node.slots))
    env["CROSS_RANK"] = env["GROUP_RANK"] = env["NODE_RANK"] = str(plan.node_rank)
    env["CROSS_SIZE"] = str(len(plan.nodes))
    env[visible_variable] = ",".join(map(str, node.slots)) if visible is None else visible
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    return env


def worker_environment(rank: int, local_rank: int) -> dict[str, str]:
    """What one worker's environment has over that of its node."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
