"""`Job`, `Meeting` -> `NodePlan`: every worker of one node in one attempt. Only this module plans them.

At the end: the meeting of nodes that know beforehand their places.
"""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.engine import LaunchSpec
from dsl.errors import PortError
from dsl.model.job import Host, Meeting, NodePlan, Notice, WorkerPlan
from dsl.model.request import DEFAULT_MASTER_PORT, PlacementRequest
from dsl.output import (
    ERROR_FILE,
    RUN_PREFIX,
    Shown,
    flat_error_file,
    needs_run_dir,
    plan_output,
    run_dirs,
    without_files,
)
from dsl.plan.worker import (
    ERROR_FILE_VARIABLE,
    TIMER_FILE_VARIABLE,
    accelerator_of,
    group_environment,
    inherited_environment,
    pod_variables,
    set_defaults,
    shared_ranks,
    shown_slots,
    worker_commands,
    worker_environment,
)
from dsl.words import LAST_PORT, THREADS_VARIABLE, counted, format_ranges, shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Protocol

    from dsl.binding import Placement
    from dsl.facts import Facts
    from dsl.machine import Names, Ports
    from dsl.model.job import Job
    from dsl.model.request import SignalScope
    from dsl.output import OutputPlan
    from dsl.output.plugin import StreamFiles

    class Rendezvous(Protocol):
        """How the nodes of a job meet."""

        def meet(self, attempt: int, local_world_size: int) -> Meeting:
            """Meet the other nodes for an attempt, counted from 0, as a node with that many workers.

            Raises:
                DslError: the nodes do not meet.
            """


PID_FOLDER = "/tmp"  # noqa: S108  where programs that watch DeepSpeed's launcher look, whatever TMPDIR says
"""Directory of the file of ``--save_pid``."""


class AttemptFiles(Record):
    """Where the files of one attempt lie on this node, decided before its plan."""

    run_dir: str | None
    """Directory of this run, the same in every attempt; None: the run needs none."""
    chosen: StreamFiles | None = None
    """The files that a logs plug-in chose; None: there is no plug-in."""
    timer_file: str | None = None
    """FIFO of the workers' timers, the same in every attempt; None: timers are not switched on."""


def count_workers(job: Job, node_rank: int, facts: Facts) -> int:
    """Number of workers of this node.

    Raises:
        OptionError: the job's word for the number is unknown, or this node has no such device.
    """
    if job.hosts:
        return len(job.hosts[node_rank].slots)
    from dsl.devices.counted import local_world_size

    environ = inherited_environment(job, facts.environ)
    return local_world_size(job.workers, environ, facts, alone=job.placement.virtual_local_rank)


def choose_run_dir(job: Job, node_rank: int, names: Names) -> str | None:
    """Name a new directory for the files of this run on this node; None if no option needs one."""
    asked = job.output
    if job.flavour.keeps_errors:
        # The user's name of the job may have slashes, and be longer than a file name can be.
        if not asked.log_dir:
            return f"{names.temp_dir}/{RUN_PREFIX}{names.random()}"
        # torchrun's has the run id in any case. One that nobody has given would spoil the order by time.
        name = f"{job.given_id.replace('/', '_')[:128]}_" if job.given_id else ""
        return f"{asked.log_dir}/{name}{names.stamp()}_{names.random()[:8]}"
    if asked.each_rank_log is not None or not needs_run_dir(asked):
        return None
    # Nodes that share the directory may be containers that start in the same second with the same pid.
    node = f"_node{node_rank}" if job.node_count > 1 else ""
    earlier = names.count_run()  # a program may launch several runs in one second
    run = f"{names.stamp()}_{names.pid}{node}{f'_{earlier + 1}' if earlier else ''}"
    return f"{names.temp_dir}/dsl_{run}" if asked.log_dir is None else f"{asked.log_dir}/{run}"


def plan_node(job: Job, meeting: Meeting, files: AttemptFiles, facts: Facts, place: int) -> NodePlan:
    """Decide every worker of this node. ``place``: that of its host among `Job.hosts`.

    Raises:
        UsageError: this machine cannot fulfil a wish; the subclass tells the kind of error.
    """
    plan = _Node(job, meeting, files, facts, place).plan()
    if job.debug.ranks:
        from dsl.plan.starting import with_debugger

        plan = with_debugger(plan)
    if job.start.wraps:
        from dsl.plan.wraps import with_wraps

        plan = with_wraps(plan)
    if job.start.method in ("spawn", "fork"):
        return plan
    from dsl.plan.starting import with_fork_servers

    return with_fork_servers(plan, facts)


class _Node:
    """This node in one attempt: what is decided for it, step by step."""

    def __init__(self, job: Job, meeting: Meeting, files: AttemptFiles, facts: Facts, place: int) -> None:
        self._job, self._meeting, self._files, self._facts = job, meeting, files, facts
        self._inherited = inherited_environment(job, facts.environ)
        self._own: tuple[Mapping[str, str], ...] = ()
        """For each worker the variables that show it one device."""
        if job.placement.virtual_local_rank:
            from dsl.devices.counted import own_devices

            count = meeting.local_world_size
            self._own = own_devices(job.workers, self._inherited, count, facts.devices)
        self._host = job.hosts[place] if job.hosts else Host(facts.names.host, ())
        self._is_flat = (
            job.flavour.keeps_errors and job.program.kind != "call" and not needs_run_dir(job.output)
        )
        """Error files lie side by side in the run's directory, because no other files need a place."""

    def plan(self) -> NodePlan:
        """The plan, without debuggers and fork servers."""
        job, meeting, files, facts = self._job, self._meeting, self._files, self._facts
        flavour, count = job.flavour, meeting.local_world_size
        env = group_environment(job, meeting, {**self._inherited, **pod_variables(job, facts)})
        if count == 1:
            env = {**shared_ranks(facts.environ, meeting, 0), **env}
        if flavour.shows_slots:
            env.update(shown_slots(job, self._host.slots, self._inherited, facts))
        placement = self._place(env)
        if placement is not None and placement.node_threads is not None:
            env[THREADS_VARIABLE] = str(placement.node_threads)
        if files.timer_file is not None:
            env[TIMER_FILE_VARIABLE] = files.timer_file
        set_defaults(env, flavour, count)
        output = self._output()
        workers = self._workers(placement, output)
        log_dir, run_folders = self._folders()
        return NodePlan(
            job,
            meeting,
            host=self._host.name,
            workers=workers,
            env=env,
            group=LaunchSpec(
                (),
                on_failure="report" if job.stacks_on_failure else "stop",
                grace_s=job.signals.grace_s,
                signal_scope=job.signals.scope or _usual_scope(workers, facts),
                binding=job.placement.rule(binds_memory=flavour.binds_memory),
                log_max_bytes=job.output.max_bytes,
                collapse=job.output.collapse,
                line_files=output.line_files,
                partial_after_s=job.output.partial_after_s,
            ),
            pid_file=f"{PID_FOLDER}/{facts.names.pid}.deepspeed" if job.save_pid else None,
            log_dir=log_dir,
            run_dirs=run_folders,
            notices=() if meeting.attempt else self._notices(placement, output),
            handed_file=(self._inherited.get(ERROR_FILE_VARIABLE) or None)
            if flavour.hands_on_errors
            else None,
            timer_file=files.timer_file,
        )

    def _workers(self, placement: Placement | None, output: OutputPlan) -> tuple[WorkerPlan, ...]:
        flavour, meeting, files = self._job.flavour, self._meeting, self._files
        base = f"{files.run_dir}/attempt_{meeting.attempt}"
        folders = [f"{base}/{local_rank}" for local_rank in range(meeting.local_world_size)]
        executable = self._facts.names.executable
        commands = worker_commands(self._job.program, flavour, self._inherited, executable, folders)
        workers = []
        for local_rank, rank in enumerate(meeting.ranks):
            error_file = None
            if flavour.keeps_errors and files.run_dir is not None:
                flat = flat_error_file(files.run_dir, meeting.attempt, local_rank)
                error_file = flat if self._is_flat else f"{folders[local_rank]}/{ERROR_FILE}"
            env = worker_environment(flavour, meeting, local_rank, error_file or "")
            if self._own:
                env["LOCAL_RANK"] = "0"
                env.update(self._own[local_rank])
            binding = device = None
            if placement is not None:
                if placement.threads:
                    env[THREADS_VARIABLE] = str(placement.threads[local_rank])
                binding = placement.bindings[local_rank] if placement.bindings else None
                device = placement.devices[local_rank] if placement.devices else None
            if files.chosen is not None:
                error_file = files.chosen.workers[local_rank].error_file
                env.update(files.chosen.workers[local_rank].env)
            stdout, stderr = output.routes[local_rank]
            workers.append(
                WorkerPlan(
                    rank=rank,
                    local_rank=local_rank,
                    argv=commands[local_rank],
                    env=env,
                    cpus=binding.cpus if binding else None,
                    mempolicy=binding.mempolicy if binding else None,
                    stdin=local_rank == output.stdin,
                    stdout=stdout,
                    stderr=stderr,
                    prefix=output.prefixes[local_rank],
                    error_file=error_file,
                    device=device,
                )
            )
        return tuple(workers)

    def _place(self, env: Mapping[str, str]) -> Placement | None:
        """Cores, memory and devices of the workers; nothing is looked up for a job that asks for nothing."""
        job, meeting = self._job, self._meeting
        if job.placement == PlacementRequest(virtual_local_rank=job.placement.virtual_local_rank):
            return None
        from dsl.binding import NodeGroup, place

        tells = job.flavour.tells_bindings
        group = NodeGroup(
            count=meeting.local_world_size,
            env=env,
            own=self._own,
            accelerator=accelerator_of(job, env, self._facts) if job.hosts else "",
            workers=job.workers,
            first_rank=meeting.ranks.start if tells else 0,
            noun="rank" if tells else "local rank",
            announces=tells,
        )
        return place(job.placement, group, self._facts)

    def _output(self) -> OutputPlan:
        job, meeting, files, facts = self._job, self._meeting, self._files, self._facts
        asked = job.output
        if asked.logs_specs is not None:
            asked = without_files(asked)
        elif not job.flavour.logs_by_folder:
            # Without stream maps torch's functions write no files, even with a log directory.
            asked = replace(asked, log_dir=None)
        each_rank_logs: tuple[str, ...] = ()
        if asked.each_rank_log is not None:
            from dsl.output import rank_log_path

            stamp = facts.names.stamp()
            each_rank_logs = tuple(
                [rank_log_path(asked.each_rank_log, stamp, rank) for rank in meeting.ranks]
            )
        shown = Shown(
            *(meeting.ranks, meeting.world_size, self._inherited, job.role, self._host.name),
            *(files.run_dir, meeting.attempt, each_rank_logs),
        )
        output = plan_output(asked, shown, facts.console)
        if files.chosen is None:
            return output
        from dsl.output.plugin import with_stream_files

        return with_stream_files(output, files.chosen, facts.console)

    def _folders(self) -> tuple[str | None, tuple[str, ...]]:
        """The directory to make if it is missing, and those of the run.

        A plug-in puts logs elsewhere, but a call leaves its results in the directory of the run.
        """
        asked, run_dir = self._job.output, self._files.run_dir
        if self._files.chosen is not None and (run_dir is None or self._job.program.kind != "call"):
            return None, ()
        if run_dir is None:
            return asked.each_rank_log, ()
        if self._is_flat:
            return None, (run_dir,)
        made = run_dirs(run_dir, self._meeting.attempt, self._meeting.local_world_size)
        return asked.each_rank_log or asked.log_dir, made

    def _notices(self, placement: Placement | None, output: OutputPlan) -> tuple[Notice, ...]:
        """What the user should know before the first attempt."""
        threads: list[Notice] = []
        if self._meeting.local_world_size > 1 and not (placement and placement.threads):
            threads = [
                Notice(
                    "detail", f"{name}={value} for each worker, set it to choose another number of threads"
                )
                for name, value in self._job.flavour.crowd_defaults
                if name not in self._inherited
            ]
        placed = placement.notices if placement else ()
        return (*self._meeting.notices, *threads, *placed, *self._log_notices(output))

    def _log_notices(self, output: OutputPlan) -> list[Notice]:
        flavour, asked = self._job.flavour, self._job.output
        if asked.logs_specs is not None or asked.each_rank_log is not None:
            return []
        routes = [route for both in output.routes for route in both if route is not None]
        if output.line_files or any(route.path is not None for route in routes):
            return [Notice("info", f"log files are in {self._files.run_dir}", is_made=True)]
        notices = []
        is_filtered = (asked.local_ranks or asked.global_ranks) and self._meeting.node_count == 1
        if is_filtered and not any(one.console or one.inherit for one in routes):
            last = self._meeting.world_size - 1
            text = f"no output is shown: the filter names no rank of this job, which has 0 to {last}"
            notices.append(Notice("warning", text))
        if asked.log_dir is not None and not (flavour.logs_by_folder or asked.redirects or asked.tee):
            text = f"no output goes to {asked.log_dir}: that takes tee, or redirects"
            notices.append(Notice("info", text, is_made=True))
        if asked.max_bytes is not None and flavour.keeps_errors:
            text = "--log-max-size has no effect without log files, such as --log-dir"
            notices.append(Notice("warning", text))
        return notices


def _usual_scope(workers: tuple[WorkerPlan, ...], facts: Facts) -> SignalScope:
    """Who hears signals if the user does not say it.

    A program that is not our interpreter may be a wrapper, such as a shell, and keep the signals to itself.
    """
    return "rank" if all(one.argv[0] == facts.names.executable for one in workers) else "group"


MOST_COMMANDS = 16
"""Workers whose command is logged; the commands of further workers differ only in their ranks."""

LONGEST_COMMAND = 2000
"""Characters of one logged command."""


def account(plan: NodePlan, environ: Mapping[str, str]) -> tuple[Notice, ...]:
    """What ``--log_level debug`` logs about a plan, as DeepSpeed's and torch's launchers do.

    Variables are logged without values, which may be secrets. ``environ``: what the workers inherit.
    """
    from shlex import join

    job, meeting = plan.job, plan.meeting
    lines = [
        f"host {rank} is {host.name} with slots {format_ranges(host.slots)}"
        for rank, host in enumerate(job.hosts)
    ]
    ranks = format_ranges([worker.rank for worker in plan.workers])
    lines.append(
        f"node {meeting.node_rank} of {job.node_count} ({plan.host}) starts ranks {ranks} of "
        f"{meeting.world_size}, which meet at {meeting.address}:{meeting.port}"
    )
    limits = f"{counted(job.max_restarts, 'restart')}, {plan.group.grace_s:g} s of grace"
    name = f"run {shorten(job.run_id)}, " if job.run_id else ""
    place = f", files in {plan.run_dirs[0]}" if plan.run_dirs else ""
    lines.append(f"{name}attempt {meeting.attempt}, {limits}{place}")
    shared = [name for name, value in plan.env.items() if environ.get(name) != value]
    own = {name for worker in plan.workers for name in worker.env}
    inherited = set(environ) & set(plan.env) - set(shared)
    told = [", ".join(sorted(names)) or "none" for names in (shared, own, inherited)]
    lines.append(f"variables for all workers: {told[0]}; for each worker: {told[1]}")
    lines.append(f"variables that they inherit: {told[2]}")
    lines += [
        f"{worker.label} runs {shorten(join(worker.command), LONGEST_COMMAND)}"
        for worker in plan.workers[:MOST_COMMANDS]
    ]
    more = len(plan.workers) - MOST_COMMANDS
    if more > 0:
        lines.append(f"{more} more run the same with ranks of their own")
    return tuple([Notice("debug", line) for line in lines])


class Static:
    """A job whose nodes never change. It may have only one node.

    The default port 29500 is used if it is free, and replaced if not. A port that the user names is used, or
    refused with the name of its holder.

    Named hosts say how many workers each has. Without them no node can ask another node, so each assumes that
    all have as many workers as itself, as torchrun's static rendezvous does.
    """

    def __init__(self, job: Job, node_rank: int, ports: Ports) -> None:
        self._job = job
        self._node_rank = node_rank
        self._ports = ports

    def meet(self, attempt: int, local_world_size: int) -> Meeting:
        """The meeting of one attempt.

        Raises:
            PortError: the port that the user named is taken, or no port is free.
        """
        job = self._job
        sizes = tuple([len(host.slots) for host in job.hosts]) or (local_world_size,) * job.node_count
        port, stands_in = self._port(attempt)
        notices: tuple[Notice, ...] = ()
        if stands_in:
            notices = (Notice("info", f"master port {DEFAULT_MASTER_PORT} is taken, using {port}"),)
        return Meeting(
            attempt=attempt,
            node_rank=self._node_rank,
            local_world_sizes=sizes,
            address=job.meeting.address,
            port=port,
            round=attempt,
            restarts=attempt,
            notices=notices,
        )

    def _port(self, attempt: int) -> tuple[int, bool]:
        """The port of one attempt, and whether it replaces the default port."""
        asked, shared = self._job.meeting.port, self._job.node_count > 1
        if attempt and asked and not shared and not self._ports.is_free(asked):
            # The job has used this port before. It does not end because another process has taken the port
            # since.
            return self._ports.pick(), False
        return choose_port(asked, shared=shared, ports=self._ports, here=self._node_rank == 0)


def choose_port(asked: int | None, *, shared: bool, ports: Ports, here: bool = True) -> tuple[int, bool]:
    """Return the master port, and whether it replaces the default port because that is taken.

    ``asked`` is the user's port (None: not given; 0: any free one). ``shared``: other nodes must find the
    same port by themselves, so we cannot choose another. ``here``: rank 0 listens on this node; on other
    nodes the port may be in use.

    Raises:
        PortError: not a port, taken, not permitted, or 0 though it is shared.
    """
    if asked is not None and not 0 <= asked <= LAST_PORT:
        raise PortError(f"master port {asked} is none, expected 1 to {LAST_PORT}, or 0 for any free one")
    if asked == 0 and shared:
        raise PortError("master port 0: a job on several nodes needs the same port on each, name one")
    if asked == 0:
        return ports.pick(), False
    port = DEFAULT_MASTER_PORT if asked is None else asked
    if not here or ports.is_free(port):
        return port, False
    if asked is None and not shared:
        return ports.pick(), True
    advice = "choose another, the same on every node" if shared else "choose another, or 0 for any free one"
    raise PortError(f"master port {port} is taken by {ports.holder(port)}; {advice}")
