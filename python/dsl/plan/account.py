"""What ``--log_level debug`` logs about a plan: the hosts, the workers' commands, which variables are set.

DeepSpeed's and torch's launchers log the same. Variables are logged without values, which may be secrets.
"""

from __future__ import annotations

from dsl.lists import counted, format_ranges, shorten
from dsl.model.job import Job, Notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dsl.model.job import NodePlan

MOST_COMMANDS = 16
"""Workers whose command is logged; the commands of further workers differ only in their ranks."""

LONGEST_COMMAND = 2000
"""Characters of one logged command."""


def account(job: Job, plan: NodePlan, environ: Mapping[str, str]) -> tuple[Notice, ...]:
    """The lines, at level debug. ``environ`` is the environment that the workers inherit."""
    from shlex import join

    lines = [
        f"host {rank} is {host.name} with slots {format_ranges(host.slots)}"
        for rank, host in enumerate(job.hosts)
    ]
    ranks = format_ranges([worker.rank for worker in plan.workers])
    lines.append(
        f"node {plan.node_rank} of {job.node_count} ({plan.host}) starts ranks {ranks} of {plan.world_size}, "
        f"which meet at {plan.master_addr}:{plan.master_port}"
    )
    limits = f"{counted(job.max_restarts, 'restart')}, {plan.group.grace_s:g} s of grace"
    name = f"run {shorten(job.run_id)}, " if job.run_id else ""
    place = f", files in {plan.run_dirs[0]}" if plan.run_dirs else ""
    lines.append(f"{name}attempt {plan.attempt}, {limits}{place}")
    shared = [name for name, value in plan.env.items() if environ.get(name) != value]
    own = {name for worker in plan.workers for name in worker.env}
    lines.append(f"variables for all workers: {_names(shared)}; for each worker: {_names(own)}")
    lines.append(f"variables that they inherit: {_names(set(environ) & set(plan.env) - set(shared))}")
    lines += [
        f"{worker.label} runs {shorten(join(worker.argv), LONGEST_COMMAND)}"
        for worker in plan.workers[:MOST_COMMANDS]
    ]
    more = len(plan.workers) - MOST_COMMANDS
    if more > 0:
        lines.append(f"{more} more run the same with ranks of their own")
    return tuple([Notice("debug", line) for line in lines])


def _names(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
