"""Shows a plan to the user: ``--dry-run``, ``--dry-run-json`` and ``--report-bindings``.

Of the environment, only the variables that the job changes are shown: the others may hold secrets.
"""

from __future__ import annotations

from os import fsdecode

from dsl.report.speak import show_text
from dsl.words import THREADS_VARIABLE, counted, format_ranges, numbered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from dsl.launchers.base import Start
    from dsl.model.job import ForkServer, Job, NodePlan, WorkerPlan
    from dsl.model.request import ShowRequest
    from dsl.plan.remote import Remote

NOTHING = "-"


def show_plan(
    asked: ShowRequest, plan: NodePlan, environ: Mapping[str, str], say: Callable[[str], None]
) -> bool:
    """Print what the user asked for. True for a dry run, after which nothing is started.

    ``environ``: the environment that the command was started in. ``say``: writes a line to stderr.
    """
    for line in bindings_table(plan) if asked.bindings else ():
        say(line)
    if asked.is_dry:
        show_text(plan_json(plan, environ) if asked.dry_run_json else "\n".join(plan_text(plan, environ)))
    return asked.is_dry


def show_hosts(job: Job, remote: Remote, starts: Sequence[Start], *, as_json: bool) -> None:
    """Print the commands that would reach the hosts of a job, without starting them."""
    show_text(hosts_json(job, remote, starts) if as_json else "\n".join(hosts_text(job, remote, starts)))


def bindings_table(plan: NodePlan) -> list[str]:
    """Lines of a table with a row for each worker: what it is bound to."""
    head: tuple[str, ...] = ("rank", "device", "pci address", "numa node", "cores", "memory", "threads")
    rows = [head, *[_binding_row(plan, worker) for worker in plan.workers]]
    if plan.fork_servers:
        servers = [worker.fork_server for worker in plan.workers]
        starts = ["executed" if server is None else f"fork server {server}" for server in servers]
        rows = [(*row, start) for row, start in zip(rows, ["start", *starts], strict=True)]
    return _table(rows)


def _binding_row(plan: NodePlan, worker: WorkerPlan) -> tuple[str, ...]:
    device = worker.device
    node = None if device is None else device.numa_node
    return (
        str(worker.rank),
        NOTHING if device is None else device.name,
        (device.pci_address if device is not None else "") or NOTHING,
        NOTHING if node is None else str(node),
        "all" if worker.cpus is None else format_ranges(worker.cpus),
        memory_words(worker),
        worker.env.get(THREADS_VARIABLE) or plan.env.get(THREADS_VARIABLE) or NOTHING,
    )


def memory_words(worker: WorkerPlan) -> str:
    """The worker's memory policy: ``preferred 0``, ``bind 0-1``, ``default``."""
    if worker.mempolicy is None:
        return "default"
    mode, nodes = worker.mempolicy
    return f"{mode} {format_ranges(sorted(nodes))}".rstrip()


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=True)]) for row in rows]
    return [line.rstrip() for line in lines]


def plan_text(plan: NodePlan, environ: Mapping[str, str]) -> list[str]:
    """The plan of this node, for people. ``environ`` is the environment that the command was started in."""
    from shlex import join, quote

    count = len(plan.workers)
    ranks = [worker.rank for worker in plan.workers]
    place = f"meeting at {plan.meeting.address}:{plan.meeting.port}"
    workers = f"{count} of {counted(plan.meeting.world_size, 'worker')}, {numbered('rank', ranks)}"
    lines = [
        f"node {plan.meeting.node_rank} ({plan.host}): {workers}, {place}",
        "environment of all workers, beside yours:",
        *[f"  {name}={quote(value)}" for name, value in sorted(_changes(plan, environ).items())],
    ]
    lines.extend(f"  {name} is not passed on" for name in _removed(plan, environ))
    lines.extend(
        f"fork server {number}: {_server_words(one)}" for number, one in enumerate(plan.fork_servers)
    )
    for worker in plan.workers:
        own = " ".join([f"{name}={quote(value)}" for name, value in sorted(worker.env.items())])
        lines.append(f"rank {worker.rank}: {own}")
        lines.append(f"  command: {join(worker.command)}")
        if worker.fork_server is not None:
            lines.append(f"  forked by: fork server {worker.fork_server}")
        lines.extend(f"  {line}" for line in _placement(worker))
    lines.extend(f"filtered lines: {fsdecode(path)}" for _, path, _ in plan.group.line_files)
    return lines


def _server_words(server: ForkServer) -> str:
    from shlex import join

    loads = ", ".join(server.preload) or f"what {server.script or 'they run'} imports"
    where = "" if server.cpus is None else f" on CPUs {format_ranges(server.cpus)}"
    stays = "" if server.warm is None or server.warm.only_if_there else ", and stays for the next job"
    return f"{join(server.interpreter)}, which imports {loads}{where}{stays}"


def _placement(worker: WorkerPlan) -> list[str]:
    lines = []
    if worker.device is not None:
        lines.append(f"device: {worker.device.name} {worker.device.pci_address}".rstrip())
    if worker.cpus is not None:
        lines.append(f"cores: {format_ranges(worker.cpus)}, memory: {memory_words(worker)}")
    for name, route in (("stdout", worker.stdout), ("stderr", worker.stderr)):
        if route is not None and route.path is not None:
            lines.append(f"{name}: {route.path}{' and the console' if route.console else ''}")
    return lines


def plan_json(plan: NodePlan, environ: Mapping[str, str]) -> str:
    """The plan of this node as one JSON object, for programs."""
    from json import dumps

    return dumps(
        {
            "node_rank": plan.meeting.node_rank,
            "host": plan.host,
            "world_size": plan.meeting.world_size,
            "master_addr": plan.meeting.address,
            "master_port": plan.meeting.port,
            "grace_s": plan.group.grace_s,
            "environment": _changes(plan, environ),
            "removed": _removed(plan, environ),
            "filtered_lines": [path for _, path, _ in plan.group.line_files],
            "fork_servers": [
                {"interpreter": one.interpreter, "preload": one.preload or None, "cpus": one.cpus}
                for one in plan.fork_servers
            ],
            "workers": [_worker_facts(worker) for worker in plan.workers],
        },
        indent=2,
    )


def hosts_text(job: Job, remote: Remote, starts: Sequence[Start]) -> list[str]:
    """The ranks of each host of a job, and the commands that would start its hosts, for people."""
    from shlex import join, quote

    lines = []
    if remote.is_elastic:
        lines.append(f"runs on {remote.least_nodes} to {remote.most_nodes} of these hosts; on all of them:")
    first = 0
    for node_rank, host in enumerate(job.hosts):
        ranks = range(first, first + len(host.slots))
        first = ranks.stop
        slots = format_ranges(host.slots)
        lines.append(f"node {node_rank} ({host.name}): ranks {format_ranges(ranks)} on slots {slots}")
    lines.append(f"the workers run: {_command(job)}")
    if job.env:
        lines.append("variables that travel to them:")
        lines.extend(f"  {name}" for name, _ in sorted(job.env))
    for start in starts:
        own = "".join([f"{name}={quote(value)} " for name, value in start.env if not is_secret(name)])
        lines.append(f"cmd = {own}{join(start.argv)}")
        for path, text in start.files:
            lines.append(f"  {path}:")
            lines.extend(f"    {line}" for line in text.splitlines())
    return lines


def _command(job: Job) -> str:
    from shlex import join

    program = job.program
    head = {"program": (), "module": ("python", "-u", "-m")}.get(program.kind, ("python", "-u"))
    option = (f"{program.local_rank_option}=LOCAL_RANK",) if program.local_rank_option else ()
    return join((*head, program.script, *option, *program.args))


def is_secret(name: str) -> bool:
    """Whether the value of a variable must not be shown."""
    return name.startswith("DSL_CONTROL_")


def hosts_json(job: Job, remote: Remote, starts: Sequence[Start]) -> str:
    """What `hosts_text` shows, as one JSON object for programs."""
    from json import dumps

    hosts, first = [], 0
    for node_rank, host in enumerate(job.hosts):
        count = len(host.slots)
        ranks = list(range(first, first + count))
        hosts.append({"node_rank": node_rank, "name": host.name, "slots": list(host.slots), "ranks": ranks})
        first += count
    program = job.program
    return dumps(
        {
            "hosts": hosts,
            "world_size": first,
            "least_hosts": remote.least_nodes if remote.is_elastic else len(job.hosts),
            "most_hosts": remote.most_nodes if remote.is_elastic else len(job.hosts),
            "master_addr": job.meeting.address or None,
            "master_port": job.meeting.port,
            "program": {"kind": program.kind, "script": program.script, "arguments": list(program.args)},
            "variables": sorted(name for name, _ in job.env),
            "commands": [
                {
                    "host": None if start.node_rank is None else job.hosts[start.node_rank].name,
                    "command": list(start.argv),
                    "environment": {name: value for name, value in start.env if not is_secret(name)},
                    "files": dict(start.files),
                }
                for start in starts
            ],
        },
        indent=2,
    )


def _worker_facts(worker: WorkerPlan) -> dict[str, Any]:
    device = worker.device
    memory = worker.mempolicy
    return {
        "rank": worker.rank,
        "local_rank": worker.local_rank,
        "command": list(worker.command),
        "environment": dict(worker.env),
        "device": None
        if device is None
        else {"name": device.name, "pci_address": device.pci_address, "numa_node": device.numa_node},
        "cores": None if worker.cpus is None else list(worker.cpus),
        "memory": None if memory is None else {"mode": memory[0], "nodes": list(memory[1])},
        "fork_server": worker.fork_server,
        "stdout": worker.stdout.path,
        "stderr": None if worker.stderr is None else worker.stderr.path,
    }


def _removed(plan: NodePlan, environ: Mapping[str, str]) -> list[str]:
    return sorted(set(environ).difference(plan.env))


def _changes(plan: NodePlan, environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in plan.env.items() if environ.get(name) != value}
