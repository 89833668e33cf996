"""`Request` -> `Job`: what is decided once for the whole job, for both flavours."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.errors import OptionError, PortError, UnsupportedError
from dsl.lists import BEYOND, LAST_PORT, MOST_SECONDS, parse_number, quote
from dsl.model.job import Job, MeetingPoint, Notice, refuse_fallbacks
from dsl.model.request import DebugRequest
from dsl.output.routes import TEMPLATE_VARIABLE, needs_run_dir
from dsl.plan.worker import FLAVOURS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from dsl.facts import Facts
    from dsl.model.remote import Remote
    from dsl.model.request import OutputRequest, Request

LEAST_HEARTBEAT_S = 1
"""Silence of less than a second is common on a busy network."""

SHARED = (
    *("role", "signals", "output", "placement", "start", "debug", "log_level", "save_pid", "is_strict"),
    *("stacks_on_failure", "hang_timeout_s", "hang_action", "metrics"),
)
"""Fields that a job takes from its request as they are."""

UNUSED_DEBUG = "--debug-port, --debug-address and --debug-wait have no effect without --debug"


class JobPlan(Record):
    """A job, and what only the host that plans it needs to know."""

    job: Job
    """The same on every node."""
    node_rank: int
    """Place of this node in it."""
    notices: tuple[Notice, ...] = ()
    """What the user should know about the decisions."""
    remote: Remote | None = None
    """How all hosts of the job are reached, this machine too; None: this node starts its part itself."""


def plan_job(request: Request, facts: Facts) -> JobPlan:
    """Decide what is the same on every node.

    Raises:
        UsageError: the request makes no sense, or cannot be met; the subclass tells the kind of error.
    """
    if request.events is not None or request.metrics is not None:
        from dsl.plan.outputs import check_outputs

        check_outputs(request, facts)
    planned = _with_hosts(request, facts) if request.flavour == "deepspeed" else _with_nodes(request, facts)
    if request.is_strict:
        refuse_fallbacks(planned.notices)
    return planned


def _wishes(request: Request) -> dict[str, Any]:
    """The fields of a job that come straight from the request. Raises OptionError for a senseless value."""
    restarts = request.max_restarts or 0
    if not 0 <= restarts < BEYOND:
        bound = "0 or more" if restarts < 0 else f"at most {BEYOND - 1}"
        raise OptionError(f"--max-restarts {restarts}: it must be {bound}")
    for name in request.start.preload:
        if not all(part.isidentifier() for part in name.split(".")):
            raise OptionError(f"--preload {quote(name)}: expected modules, such as torch,numpy.linalg")
    flavour = FLAVOURS[request.flavour]
    if request.debug.ranks:
        from dsl.plan.debugging import check_debug

        check_debug(request.debug, request.program, flavour.spell("--no-python"))
    template, program = request.output.template, request.program
    return {
        **{name: getattr(request, name) for name in SHARED},
        "flavour": flavour,
        "program": replace(program, name=program.name or program.script),
        "env": (*request.env, (TEMPLATE_VARIABLE, template)) if template else request.env,
        "max_restarts": restarts,
    }


def _with_hosts(request: Request, facts: Facts) -> JobPlan:
    """Plan a job with named hosts and slots, as DeepSpeed's runner does."""
    from dsl.plan.hosts import choose_hosts

    if request.elastic.autotuning:
        raise UnsupportedError("--autotuning runs many jobs, not one: use the command dsl")
    _check_host_options(request)
    if request.output.each_rank_log is not None:
        _check_each_rank_log(request.output)
    unused = _unused_host_options(request)
    active = choose_hosts(request, facts)
    job = Job(
        meeting=MeetingPoint("static", active.address, request.meeting.master_port),
        hosts=active.hosts,
        node_count=len(active.hosts),
        accelerator=active.accelerator,
        visible_devices=active.visible_devices,
        **_wishes(request),
    )
    is_elastic = request.elastic.training
    if is_elastic:
        from dsl.plan import elastic

        nodes = elastic.node_bounds(request, len(active.hosts) if active.is_remote else None)
        job = elastic.elastic_job(job, request, nodes, facts, is_remote=active.is_remote)
    notices = (*unused, *active.notices)
    if not active.is_remote:
        asked = request.resources
        if active.accelerator and not (asked.include or asked.min_nodes or request.remote.no_ssh):
            mend = "name the hosts with --hostfile, or give --num_nodes 1"
            notices = (*notices, *_alone(facts.environ, mend))
        if len(active.hosts) > 1:
            job, told = _unwatched(job, "with --no_ssh")
            notices = (*notices, *told)
        return JobPlan(job, active.node_rank, notices)
    from dsl.model.remote import RANK_LAUNCHERS
    from dsl.plan.remote import plan_remote, remote_variables

    remote = plan_remote(request, active, facts)
    if remote.launcher in RANK_LAUNCHERS:  # with DeepSpeed their tasks run the script, with the same words
        job = replace(job, program=replace(job.program, local_rank_option=""))
    if job.debug.ranks and not is_elastic:
        from dsl.plan.debugging import attach_everywhere

        notices = (*notices, *attach_everywhere(job, remote, facts))
    env, told = remote_variables(job.env, facts)
    job = replace(job, env=env)
    if is_elastic:
        remote = elastic.elastic_remote(remote, request, job, nodes, facts)
    if remote.launcher == "slurm" and remote.ssh_port is not None:
        text = "--ssh_port has no effect with --launcher slurm, which uses no ssh"
        told.append(Notice("warning", text))
    if request.output.stdin not in ("", "none"):
        text = (
            "--stdin has no effect where other hosts take part: no worker reads the command's standard input"
        )
        notices = (*notices, Notice("warning", text))
    return JobPlan(job, 0, (*notices, *told), remote)


def _check_host_options(request: Request) -> None:
    if request.elastic.training and not request.meeting.master_addr:
        raise OptionError("master addr is required when elastic training is enabled, give --master_addr")
    if request.elastic.training and not request.program.local_rank_option:
        raise OptionError("--no_local_rank cannot be used with --elastic_training, leave one of them out")
    port, ssh_port = request.meeting.master_port, request.remote.ssh_port
    if port is not None and not 0 <= port <= LAST_PORT:
        raise PortError(
            f"--master_port {port} is not a port, expected 1 to {LAST_PORT}, or 0 for any free one"
        )
    if ssh_port is not None and not 1 <= ssh_port <= LAST_PORT:
        raise PortError(f"--ssh_port {ssh_port} is not a port, expected 1 to {LAST_PORT}")
    if request.remote.launcher is not None:
        from dsl.plan.remote import launcher_word

        launcher_word(request.remote)
    heartbeat_s = request.remote.heartbeat_s
    if not LEAST_HEARTBEAT_S <= heartbeat_s <= MOST_SECONDS:
        raise OptionError(
            f"--heartbeat {heartbeat_s:g}: it must be {LEAST_HEARTBEAT_S} to {MOST_SECONDS} seconds"
        )
    least, most = request.resources.min_nodes, request.resources.max_nodes
    if most is not None and (least is None or not 1 <= least <= most):
        raise OptionError(f"--num_nodes {least}:{most}: MIN must be at least 1, and MAX at least MIN")


def _check_each_rank_log(asked: OutputRequest) -> None:
    """Refuse ``--enable_each_rank_log`` beside options for single streams: its files join both streams."""
    others = (
        ("--log-dir", asked.log_dir),
        ("--redirects", asked.redirects),
        ("--duplicate-stdout-filters", asked.stdout_words),
        ("--duplicate-stderr-filters", asked.stderr_words),
    )
    for option, value in others:
        if value:
            raise OptionError(
                f"--enable_each_rank_log cannot be used with {option}, leave one of them out "
                "(--log-dir DIR keeps the streams of each worker in files of their own)"
            )


def _unused_host_options(request: Request) -> list[Notice]:
    """Warnings for options of `dsl` that have no effect as they are given."""
    remote, cores, elastic, output = request.remote, request.placement, request.elastic, request.output
    is_fixed, has_files = not elastic.training, output.each_rank_log is not None or needs_run_dir(output)
    return [
        *_idle("--no_ssh", ("--node_rank", request.meeting.node_rank, not remote.no_ssh)),
        *_idle("--bind_cores_to_rank", ("--bind_core_list", cores.core_list, not cores.bind_cores_to_rank)),
        *_unused_options(request),
        *_idle(
            "--elastic_training",
            ("--min_elastic_nodes", elastic.min_nodes, is_fixed),
            ("--max_elastic_nodes", elastic.max_nodes, is_fixed),
            ("--elastic-wait", elastic.wait_s, is_fixed),
        ),
        *_idle("log files, such as --log-dir", ("--log-max-size", output.max_bytes, not has_files)),
    ]


def _unused_options(request: Request) -> list[Notice]:
    """Warnings for options of both commands that have no effect as they are given."""
    start, signals, debug = request.start, request.signals, request.debug
    hang_action = None if request.hang_action == "report" else request.hang_action
    is_executed = start.method in ("spawn", "fork")
    found = [
        *_idle("--preempt-signal", ("--preempt-grace", signals.preempt_grace_s, signals.preempt is None)),
        *_idle("--start-method forkserver", ("--preload", start.preload or None, is_executed)),
        *_idle(
            "--start-method warm",
            ("--warm-for", start.warm_for_s, start.method != "warm"),
            ("--warm-memory", start.warm_memory, start.method != "warm"),
        ),
        *_idle("--hang-timeout", ("--hang-action", hang_action, request.hang_timeout_s is None)),
    ]
    if debug != DebugRequest(ranks=debug.ranks) and not debug.ranks:
        found.append(Notice("warning", UNUSED_DEBUG))
    return found


def _alone(environ: Mapping[str, str], mend: str) -> list[Notice]:
    """A warning if a scheduler counts several nodes or workers; not in a worker, nor in a step of Slurm."""
    if "LOCAL_RANK" in environ or parse_number(environ.get("SLURM_STEP_ID", "")) is not None:
        return []
    names = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    for name in ("WORLD_SIZE", *names) if "RANK" in environ and "MASTER_ADDR" in environ else names:
        if (parse_number(environ.get(name, "")) or 0) > 1:
            text = f"{name}={environ[name]}, but this job runs on this node alone: {mend} if that is meant"
            return [Notice("warning", text)]
    return []


def _unwatched(job: Job, where: str) -> tuple[Job, list[Notice]]:
    """The job without a watch for hangs: each of its nodes sees only its own ranks."""
    if job.hang_timeout_s is None:
        return job, []
    text = f"--hang-timeout has no effect {where}: no node sees the ranks of the others"
    return replace(job, hang_timeout_s=None), [Notice("warning", text)]


def _idle(needed: str, *options: tuple[str, object, bool]) -> list[Notice]:
    """Warnings for options, each with its value (None: not given), and whether it lacks what it needs."""
    return [
        Notice("warning", f"{name} has no effect without {needed}")
        for name, value, lacks in options
        if value is not None and lacks
    ]


def _with_nodes(request: Request, facts: Facts) -> JobPlan:
    """Plan a job by its number of nodes; each node counts its own workers, as torchrun's agent does."""
    from dsl.plan.meeting_point import STATIC_RUN_ID, check_meeting, meeting_notices, meeting_point, run_id

    asked = request.meeting
    least, most = request.resources.min_nodes, request.resources.max_nodes
    least = 1 if least is None else least
    nodes = (least, least if most is None else most)
    check_meeting(asked, nodes)
    name = run_id(asked, nodes, facts.names.random)
    is_usual = asked.run_id == STATIC_RUN_ID and name != asked.run_id
    job = Job(
        meeting=meeting_point(asked, nodes),
        run_id=name,
        given_id="" if is_usual else asked.run_id,
        node_count=1 if asked.standalone else nodes[1],
        workers="1" if request.resources.nproc_per_node is None else request.resources.nproc_per_node,
        **_wishes(request),
    )
    notices = [*meeting_notices(asked, nodes), *_unused_options(request)]
    if request.resources.min_nodes is None and not asked.standalone and request.flavour == "torch":
        notices += _alone(facts.environ, "give --nnodes and start it on each node, or --nnodes 1")
    if job.meeting.kind == "dynamic":
        job, told = _unwatched(job, "on nodes that meet by --rdzv-backend")
        notices += told
    is_placed = job.meeting.kind == "static" and job.node_count > 1
    node_rank = (asked.node_rank or 0) if is_placed else 0
    return JobPlan(job, node_rank, tuple(notices))
