"""`Job`, `Meeting` -> `NodePlan`: every worker of one node in one attempt. Only this module plans them."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.lists import THREADS_VARIABLE
from dsl.model.job import NodePlan, Notice, WorkerPlan
from dsl.model.request import PlacementRequest
from dsl.output.routes import (
    ERROR_FILE,
    RUN_PREFIX,
    Shown,
    flat_error_file,
    needs_run_dir,
    plan_output,
    run_dirs,
    with_stream_files,
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
from dsl.spec import LaunchSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.binding.placement import Placement
    from dsl.facts import Facts
    from dsl.machine.this_process import Names
    from dsl.model.job import Job, Meeting, SignalMeaning
    from dsl.model.request import SignalScope
    from dsl.output.plugin import StreamFiles
    from dsl.output.routes import OutputPlan

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
    from dsl.devices.nproc import local_world_size

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


def plan_node(job: Job, meeting: Meeting, files: AttemptFiles, facts: Facts) -> NodePlan:
    """Decide every worker of this node.

    Raises:
        UsageError: this machine cannot fulfil a wish; the subclass tells the kind of error.
    """
    flavour, count = job.flavour, meeting.local_world_size
    inherited = inherited_environment(job, facts.environ)
    own: tuple[Mapping[str, str], ...] = ()  # for each worker the variables that show it one device
    if job.placement.virtual_local_rank:
        from dsl.devices.nproc import own_devices

        own = own_devices(job.workers, inherited, count, facts.devices)
    env = group_environment(job, meeting, {**inherited, **pod_variables(job, facts)})
    if count == 1:
        env = {**shared_ranks(facts.environ, meeting, 0), **env}
    if flavour.shows_slots:
        env.update(shown_slots(job, job.hosts[meeting.host_index].slots, inherited, facts))
    placement = _place(job, meeting, env, own, facts)
    if placement is not None and placement.node_threads is not None:
        env[THREADS_VARIABLE] = str(placement.node_threads)
    if files.timer_file is not None:
        env[TIMER_FILE_VARIABLE] = files.timer_file
    set_defaults(env, flavour, count)
    output = _plan_output(job, meeting, files, inherited, facts)
    log_dir, run_folders = _folders(job, meeting, files)
    workers = _workers(job, meeting, files, inherited, own, placement, output, facts)
    plan = NodePlan(
        host=_host_name(job, meeting, facts),
        node_rank=meeting.node_rank,
        workers=workers,
        env=env,
        master_addr=meeting.address,
        master_port=meeting.port,
        world_size=meeting.world_size,
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
        log_level=job.log_level,
        notices=() if meeting.attempt else _notices(job, meeting, files, inherited, placement, output),
        command=flavour.command,
        name=job.program.name,
        attempt=meeting.attempt,
        handed_file=(inherited.get(ERROR_FILE_VARIABLE) or None) if flavour.hands_on_errors else None,
        timer_file=files.timer_file,
        signals=signal_meanings(job),
        preempt_signal=job.signals.preempt,
        preempt_grace_s=job.signals.preempt_grace_s,
        stacks_on_failure=job.stacks_on_failure,
        hang_timeout_s=job.hang_timeout_s,
        hang_action=job.hang_action,
        metrics=job.metrics,
    )
    if job.debug.ranks:
        from dsl.plan.debugging import with_debugger

        plan = with_debugger(plan, job)
    if job.start.method in ("spawn", "fork"):
        return plan
    from dsl.plan.starting import with_fork_servers

    return with_fork_servers(plan, job, facts)


def _workers(
    job: Job,
    meeting: Meeting,
    files: AttemptFiles,
    inherited: Mapping[str, str],
    own: tuple[Mapping[str, str], ...],
    placement: Placement | None,
    output: OutputPlan,
    facts: Facts,
) -> tuple[WorkerPlan, ...]:
    flavour = job.flavour
    base = f"{files.run_dir}/attempt_{meeting.attempt}"
    folders = [f"{base}/{local_rank}" for local_rank in range(meeting.local_world_size)]
    commands = worker_commands(job.program, flavour, inherited, facts.names.executable, folders)
    is_flat = _is_flat(job)
    workers = []
    for local_rank, rank in enumerate(meeting.ranks):
        error_file = None
        if flavour.keeps_errors and files.run_dir is not None:
            flat = flat_error_file(files.run_dir, meeting.attempt, local_rank)
            error_file = flat if is_flat else f"{folders[local_rank]}/{ERROR_FILE}"
        env = worker_environment(flavour, meeting, local_rank, error_file or "")
        if own:
            env["LOCAL_RANK"] = "0"
            env.update(own[local_rank])
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


def _host_name(job: Job, meeting: Meeting, facts: Facts) -> str:
    return job.hosts[meeting.host_index].name if job.hosts else facts.names.host


def _place(
    job: Job, meeting: Meeting, env: Mapping[str, str], own: tuple[Mapping[str, str], ...], facts: Facts
) -> Placement | None:
    """Cores, memory and devices of the workers; nothing is looked up for a job that asks for nothing."""
    if job.placement == PlacementRequest(virtual_local_rank=job.placement.virtual_local_rank):
        return None
    from dsl.binding.placement import NodeGroup, place

    tells = job.flavour.tells_bindings
    group = NodeGroup(
        count=meeting.local_world_size,
        env=env,
        own=own,
        accelerator=accelerator_of(job, env, facts) if job.hosts else "",
        workers=job.workers,
        first_rank=meeting.ranks.start if tells else 0,
        noun="rank" if tells else "local rank",
        announces=tells,
    )
    return place(job.placement, group, facts)


def _plan_output(
    job: Job, meeting: Meeting, files: AttemptFiles, inherited: Mapping[str, str], facts: Facts
) -> OutputPlan:
    asked = job.output
    if asked.logs_specs is not None:
        asked = without_files(asked)
    elif not job.flavour.logs_by_folder:
        # Without stream maps torch's functions write no files, even with a log directory.
        asked = replace(asked, log_dir=None)
    each_rank_logs: tuple[str, ...] = ()
    if asked.each_rank_log is not None:
        from dsl.output.grammar import rank_log_path

        stamp = facts.names.stamp()
        each_rank_logs = tuple([rank_log_path(asked.each_rank_log, stamp, rank) for rank in meeting.ranks])
    output = plan_output(
        asked,
        Shown(
            meeting.ranks,
            meeting.world_size,
            inherited,
            job.role,
            _host_name(job, meeting, facts),
            files.run_dir,
            meeting.attempt,
            each_rank_logs,
        ),
        facts.console,
    )
    return output if files.chosen is None else with_stream_files(output, files.chosen, facts.console)


def _folders(job: Job, meeting: Meeting, files: AttemptFiles) -> tuple[str | None, tuple[str, ...]]:
    """The directory to make if it is missing, and those of the run.

    A plug-in puts logs elsewhere, but a call leaves its results in the directory of the run.
    """
    if files.chosen is not None and (files.run_dir is None or job.program.kind != "call"):
        return None, ()
    if files.run_dir is None:
        return job.output.each_rank_log, ()
    if _is_flat(job):
        return None, (files.run_dir,)
    made = run_dirs(files.run_dir, meeting.attempt, meeting.local_world_size)
    return job.output.each_rank_log or job.output.log_dir, made


def _is_flat(job: Job) -> bool:
    """Whether error files lie side by side in the run's directory, because no other files need a place."""
    return job.flavour.keeps_errors and job.program.kind != "call" and not needs_run_dir(job.output)


def signal_meanings(job: Job) -> dict[int, SignalMeaning] | None:
    """What a signal to the job means, by number; None: the engine's usual table."""
    asked = job.signals
    if asked.stop is None:
        return None
    signals: dict[int, SignalMeaning] = dict.fromkeys(asked.stop, "stop")
    signals.update(dict.fromkeys(asked.forward, "forward"))
    if asked.preempt is not None:
        signals[asked.preempt] = "preempt"
    return signals


def _usual_scope(workers: tuple[WorkerPlan, ...], facts: Facts) -> SignalScope:
    """Who hears signals if the user does not say it.

    A program that is not our interpreter may be a wrapper, such as a shell, and keep the signals to itself.
    """
    return "rank" if all(one.argv[0] == facts.names.executable for one in workers) else "group"


def _notices(
    job: Job,
    meeting: Meeting,
    files: AttemptFiles,
    inherited: Mapping[str, str],
    placement: Placement | None,
    output: OutputPlan,
) -> tuple[Notice, ...]:
    """What the user should know before the first attempt."""
    flavour = job.flavour
    threads: list[Notice] = []
    if not (placement and placement.threads):
        crowd = flavour.crowd_defaults if meeting.local_world_size > 1 else ()
        threads = [
            Notice("detail", f"{name}={value} for each worker, set it to choose another number of threads")
            for name, value in crowd
            if name not in inherited
        ]
    placed = placement.notices if placement else ()
    return (*meeting.notices, *threads, *placed, *_log_notices(job, files, output))


def _log_notices(job: Job, files: AttemptFiles, output: OutputPlan) -> list[Notice]:
    asked = job.output
    if asked.logs_specs is not None or asked.each_rank_log is not None:
        return []
    routes = [route for both in output.routes for route in both if route is not None]
    if output.line_files or any(route.path is not None for route in routes):
        return [Notice("info", f"log files are in {files.run_dir}", is_made=True)]
    notices = []
    if asked.log_dir is not None and not (job.flavour.logs_by_folder or asked.redirects or asked.tee):
        text = f"no output goes to {asked.log_dir}: that takes tee, or redirects"
        notices.append(Notice("info", text, is_made=True))
    if asked.max_bytes is not None and job.flavour.keeps_errors:
        notices.append(Notice("warning", "--log-max-size has no effect without log files, such as --log-dir"))
    return notices
