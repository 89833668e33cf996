"""`Request` -> `Job`: what is decided once for the whole job, for both flavours."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.errors import EventsFileError, MetricsError, OptionError, PortError, UnsupportedError
from dsl.model.job import Job, MeetingPoint, Notice, refuse_fallbacks
from dsl.model.request import DEFAULT_HEARTBEAT_S, DebugRequest
from dsl.output import TEMPLATE_VARIABLE, needs_run_dir
from dsl.plan.worker import ERROR_FILE_VARIABLE, FLAVOURS
from dsl.words import BEYOND, LAST_PORT, MOST_SECONDS, parse_number, quote, shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from dsl.facts import Facts
    from dsl.model.job import Pairs
    from dsl.model.request import OutputRequest, RemoteRequest, Request
    from dsl.plan.hosts import ActiveHosts
    from dsl.plan.remote import Remote


LEAST_HEARTBEAT_S = 1
"""Silence of less than a second is common on a busy network."""

SHARED = (
    *("policy", "role", "signals", "output", "start", "debug", "log_level", "save_pid", "is_strict"),
    *("stacks_on_failure", "hang_timeout_s", "hang_action", "metrics"),
)
"""Fields that a job takes from its request as they are."""


class JobPlan(Record):
    """A job, and what only the host that plans it needs to know."""

    job: Job
    """The same on every node."""
    node_rank: int
    notices: tuple[Notice, ...] = ()
    remote: Remote | None = None
    """How all hosts of the job are reached, this machine too; None: this node starts its part itself."""
    ranks: tuple[int, ...] = ()
    """See `ActiveHosts.ranks`."""
    argv: tuple[str, ...] = ()
    """What the user has typed, with the command's name; empty: a program launches the job."""


def plan_job(request: Request, facts: Facts, argv: tuple[str, ...] = ()) -> JobPlan:
    """Decide what is the same on every node. ``argv``: see `JobPlan`.

    Raises:
        UsageError: the request makes no sense, or cannot be met; the subclass tells the kind of error.
    """
    if request.events is not None or request.metrics is not None:
        check_outputs(request, facts)
    told: list[Notice] = []
    if request.variables:
        from dsl.resources.exports import named_variables

        named = named_variables(request.variables, facts.environ, told)
        request = replace(request, env=(*request.env, *named.items()))
    planned = _with_hosts(request, facts) if request.flavour == "deepspeed" else _with_nodes(request, facts)
    if request.variables:
        told += _overruled(request, planned.job)
    planned = replace(planned, notices=(*planned.notices, *told))
    if request.is_strict:
        refuse_fallbacks(planned.notices)
    return replace(planned, argv=argv)


def _wishes(request: Request) -> dict[str, Any]:
    """The fields of a job that come straight from the request. Raises OptionError for a senseless value."""
    restarts = request.max_restarts or 0
    if not 0 <= restarts < BEYOND:
        bound = "0 or more" if restarts < 0 else f"at most {BEYOND - 1}"
        raise OptionError(f"--max-restarts {restarts}: it must be {bound}")
    for name in request.start.preload:
        if not all(part.isidentifier() for part in name.split(".")):
            raise OptionError(f"--preload {quote(name)}: expected modules, such as torch,numpy.linalg")
    if request.output.global_ranks:
        from dsl.output.grammar import parse_ranks

        parse_ranks(request.output.global_ranks, "--ranks-filter")
    flavour = FLAVOURS[request.flavour]
    if request.debug.ranks:
        from dsl.plan.starting import check_debug

        check_debug(request.debug, request.program, flavour.spell("--no-python"))
    template, program = request.output.template, request.program
    placement = request.placement
    return {
        **{name: getattr(request, name) for name in SHARED},
        "placement": replace(placement, names_devices=True) if request.show.is_asked else placement,
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
    is_elastic, listed = request.elastic.training, None
    if is_elastic and request.elastic.discover:
        from dsl.plan.listed import first_list

        listed = first_list(request, facts)
    notices = _unused_host_options(request)
    if is_elastic:
        waits = ("--wait-hosts", request.remote.wait_hosts_s or None)
        notices += _idle(True, "with --elastic_training, which has --elastic-wait", waits)
        request = replace(request, remote=replace(request.remote, wait_hosts_s=None))
    active = choose_hosts(request, facts, listed)
    notices += active.notices
    meeting = MeetingPoint("static", active.address, request.meeting.master_port)
    is_connected = request.remote.is_connected
    if is_connected and len(active.hosts) > 1:
        from dsl.plan.meeting_point import agreed_point

        meeting = agreed_point(active.address, meeting.port, len(active.hosts), _patience(request.remote))
    job = Job(
        meeting=meeting,
        hosts=active.hosts,
        node_count=len(active.hosts),
        accelerator=active.accelerator,
        visible_devices=active.visible_devices,
        **_wishes(request),
    )
    if is_elastic:
        from dsl.plan.remote import elastic_job, node_bounds

        nodes = node_bounds(request, len(active.hosts), is_remote=active.is_remote)
        job = elastic_job(job, request, nodes, facts, is_remote=active.is_remote)
    if job.start.wraps:
        from dsl.plan.wraps import check_wrapped

        check_wrapped(job, sum(len(host.slots) for host in job.hosts))
    if not active.is_remote:
        asked = request.resources
        notices += [*_unused_ways(request.remote, len(active.hosts)), *_other_python(active, facts)]
        if active.accelerator and not (asked.include or asked.min_nodes or request.remote.no_ssh):
            notices += _alone(facts.environ, "name the hosts with --hostfile, or give --num_nodes 1")
        if len(active.hosts) > 1 and not is_connected:
            job = _unwatched(job, notices)
        return JobPlan(job, active.node_rank, tuple(notices), ranks=active.ranks)
    from dsl.plan.remote import RANK_LAUNCHERS, elastic_remote, plan_remote, remote_variables

    remote = plan_remote(request, active, facts)
    if remote.launcher in RANK_LAUNCHERS:  # with DeepSpeed their tasks run the script, with the same words
        job = replace(job, program=replace(job.program, local_rank_option=""))
    if job.debug.ranks and not is_elastic:
        from dsl.plan.starting import attach_everywhere

        notices += attach_everywhere(job, remote, facts)
    env, told = remote_variables(job.env, facts)
    job = replace(job, env=env)
    if is_elastic:
        remote = elastic_remote(remote, request, job, nodes, facts)
    port, waits = ("--ssh_port", remote.ssh_port), ("--wait-hosts", remote.hosts_wait_s or None)
    if remote.launcher == "slurm":
        told += _idle(True, "with --launcher slurm, which uses no ssh", port, waits)
        remote = replace(remote, hosts_wait_s=0.0)
    told += _idle(remote.program, "with --ssh-program", port, ("--launcher_args", remote.args))
    if request.output.stdin not in ("", "none"):
        why = "no worker reads the command's standard input"
        notices.append(_warning(f"--stdin has no effect where other hosts take part: {why}"))
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
    others = {
        "--log-dir": asked.log_dir,
        "--redirects": asked.redirects,
        "--duplicate-stdout-filters": asked.stdout_words,
        "--duplicate-stderr-filters": asked.stderr_words,
    }
    if given := [option for option, value in others.items() if value]:
        raise OptionError(
            f"--enable_each_rank_log cannot be used with {given[0]}, leave one of them out "
            "(--log-dir DIR keeps the streams of each worker in files of their own)"
        )


def _unused_host_options(request: Request) -> list[Notice]:
    """Warnings for options of `dsl` that have no effect as they are given."""
    is_bound, cores = request.placement.bind_cores_to_rank, request.placement.core_list
    remote, elastic, output = request.remote, request.elastic, request.output
    has_files = output.each_rank_log is not None or needs_run_dir(output)
    return [
        *_idle(not remote.no_ssh, "without --no_ssh", ("--node_rank", request.meeting.node_rank)),
        *_idle(not is_bound, "without --bind_cores_to_rank", ("--bind_core_list", cores)),
        *_unused_options(request),
        *_idle(
            not elastic.training,
            "without --elastic_training",
            ("--min_elastic_nodes", elastic.min_nodes),
            ("--max_elastic_nodes", elastic.max_nodes),
            ("--elastic-wait", elastic.wait_s),
            ("--discover", elastic.discover),
        ),
        *_idle(not has_files, "without log files, such as --log-dir", ("--log-max-size", output.max_bytes)),
    ]


def _unused_options(request: Request) -> list[Notice]:
    """Warnings for options of both commands that have no effect as they are given."""
    start, debug, policy = request.start, request.debug, request.policy
    preempt, grace_s = request.signals.preempt, request.signals.preempt_grace_s
    is_once = not (request.max_restarts or request.elastic.training)
    hang_action = None if request.hang_action == "report" else request.hang_action
    codes = (("--restart-on", policy.restart_on), ("--give-up-on", policy.give_up_on))
    warmth = (("--warm-for", start.warm_for_s), ("--warm-memory", start.warm_memory))
    is_executed, stdin = start.method in ("spawn", "fork"), request.output.stdin
    found = [
        *_idle(preempt is None, "without --preempt-signal", ("--preempt-grace", grace_s)),
        *_idle(is_once, "without --max-restarts", *codes),
        *_idle(is_executed, "without --start-method forkserver", ("--preload", start.preload)),
        *_idle(start.method != "warm", "without --start-method warm", *warmth),
        *_idle(request.hang_timeout_s is None, "without --hang-timeout", ("--hang-action", hang_action)),
        *_idle(request.detaches and stdin != "none", "with --detach", ("--stdin", stdin)),
    ]
    if debug != DebugRequest(ranks=debug.ranks) and not debug.ranks:
        text = "--debug-port, --debug-address and --debug-wait have no effect without --debug"
        found.append(_warning(text))
    return found


def _overruled(request: Request, job: Job) -> list[Notice]:
    """Warnings for variables that the user gives a value, though the launcher gives them another."""
    from dsl.devices import ACCELERATORS

    flavour, given = job.flavour, [word.partition("=")[0] for word in request.variables if "=" in word]
    told = {name for name, _ in (*flavour.group_variables, *flavour.worker_variables, *flavour.constants)}
    if flavour.shows_slots:
        told.add(ACCELERATORS[job.accelerator or "cuda"].visible_variable)
    told.discard(ERROR_FILE_VARIABLE)  # the error is handed on to that file
    text = f"has no effect: {flavour.command} gives it a value of its own"
    return [_warning(f"-x {name} {text}") for name in given if name in told]


def _unused_ways(asked: RemoteRequest, host_count: int) -> list[Notice]:
    """Warnings for options that say how other hosts are reached, where this command reaches none."""
    names = ("force_multi", "launcher", "launcher_args", "ssh_port", "no_ssh_check", "venv_script")
    found: list[tuple[str, object]] = [(f"--{name}", getattr(asked, name)) for name in names]
    found += [("--ssh-program", asked.ssh_program), ("--one-agent-per-node", asked.per_node)]
    if not asked.is_connected or host_count == 1:
        has_own = asked.heartbeat_s != DEFAULT_HEARTBEAT_S
        found += [("--wait-hosts", asked.wait_hosts_s or None), ("--heartbeat", has_own)]
    return _idle(True, "with --no_ssh" if asked.no_ssh else "in a job on this machine alone", *found)


def _other_python(active: ActiveHosts, facts: Facts) -> list[Notice]:
    """A warning if the hostfile names another interpreter for this host, where it starts no agent."""
    host, named = active.hosts[active.node_rank].name, active.pool.pythons() if active.pool else {}
    if named.get(host) in (None, facts.names.executable):
        return []
    why = "this command starts the workers of this machine itself, start it with that interpreter"
    return [_warning(f"python={shorten(named[host])} of host {quote(host)} has no effect: {why}")]


def _alone(environ: Mapping[str, str], mend: str) -> list[Notice]:
    """A warning if a scheduler counts several nodes or workers; not in a worker, nor in a step of Slurm."""
    if "LOCAL_RANK" in environ or parse_number(environ.get("SLURM_STEP_ID", "")) is not None:
        return []
    names = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
    for name in ("WORLD_SIZE", *names) if "RANK" in environ and "MASTER_ADDR" in environ else names:
        if (parse_number(environ.get(name, "")) or 0) > 1:
            where = f"{name}={environ[name]}, but this job runs on this node alone"
            return [_warning(f"{where}: {mend} if that is meant")]
    return []


def _unwatched(job: Job, notices: list[Notice]) -> Job:
    """The job without a watch for hangs: each of its nodes sees only its own ranks."""
    if job.hang_timeout_s is not None:
        option, why = job.flavour.spell("--no-ssh"), "no node sees the ranks of the others"
        mend = "give --wait-hosts SECONDS"
        notices.append(_warning(f"--hang-timeout has no effect with {option}: {why}, {mend}"))
    return replace(job, hang_timeout_s=None)


def _patience(asked: RemoteRequest) -> Pairs:
    """How long nodes that reach each other wait for each other, as settings of their meeting."""
    return (
        ("timeout", f"{asked.wait_hosts_s:f}"),
        ("keep_alive_interval", f"{asked.heartbeat_s:f}"),
        ("keep_alive_max_attempt", "1"),
    )


def _warning(text: str) -> Notice:
    return Notice("warning", text)


def _idle(is_idle: object, how: str, *options: tuple[str, object]) -> list[Notice]:
    """Warnings for options that have no effect in this way, each with its value; 0 is one, empty is none."""
    given = [name for name, value in options if value or (value == 0 and value is not False)]
    return [_warning(f"{name} has no effect {how}") for name in given if is_idle]


def _with_nodes(request: Request, facts: Facts) -> JobPlan:
    """Plan a job by its number of nodes; each node counts its own workers, as torchrun's agent does."""
    from dsl.plan.meeting_point import STATIC_RUN_ID, check_meeting, meeting_notices, meeting_point, run_id

    asked = request.meeting
    least, most = request.resources.min_nodes, request.resources.max_nodes
    least = 1 if least is None else least
    nodes = (least, least if most is None else most)
    spares = request.resources.spares
    check_meeting(asked, nodes, spares)
    name = run_id(asked, nodes, facts.names.random)
    is_usual = asked.run_id == STATIC_RUN_ID and name != asked.run_id
    job = Job(
        meeting=meeting_point(asked, nodes, spares),
        run_id=name,
        given_id="" if is_usual else asked.run_id,
        node_count=1 if asked.standalone else nodes[1],
        workers="1" if request.resources.nproc_per_node is None else request.resources.nproc_per_node,
        **_wishes(request),
    )
    notices = [*meeting_notices(asked, nodes), *_unused_options(request)]
    if request.resources.min_nodes is None and not asked.standalone and request.flavour == "torch":
        notices += _alone(facts.environ, "give --nnodes and start it on each node, or --nnodes 1")
    is_placed = job.meeting.kind == "static" and job.node_count > 1
    node_rank = (asked.node_rank or 0) if is_placed else 0
    return JobPlan(job, node_rank, tuple(notices))


THIS_MACHINE = "127.0.0.1"


def read_target(text: str) -> tuple[str, int] | None:
    """The host and the port that a value of ``--metrics`` names; None: it is a file.

    A value with a slash is a file. Another one is an address if it has a colon, or begins with a digit, a
    sign or a blank, so a mistyped address makes no file. Raises MetricsError: it is neither.
    """
    first = text[:1]
    is_number = first in "+-" or first.isdigit() or first.isspace()  # "" counts, too
    if "/" in text or (":" not in text and not is_number):
        return None
    host, colon, port = text.rpartition(":")
    number = parse_number(port)
    if number is not None and not 1 <= number <= LAST_PORT:
        raise MetricsError(f"--metrics: {number} is no port, give a number from 1 to {LAST_PORT}")
    name = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    if number is None or (colon and not name) or name.split() != [name] * bool(colon):
        hint = f", or {quote('./' + text)} for a file of this name" if text.strip() else ""
        raise MetricsError(f"--metrics {quote(text)} is no address: give PORT or HOST:PORT{hint}")
    return name or THIS_MACHINE, number


def check_outputs(request: Request, facts: Facts) -> None:
    """Refuse a file that cannot be written, before anything is made. Raises EventsFileError, MetricsError."""
    path, target = request.events, request.metrics
    if path is not None:
        why = facts.files.why_not_written(path) if path.strip() else "it names no file"
        if why:
            raise EventsFileError(f"--events {path!r} cannot be written: {why}, choose another file")
    if target is not None and read_target(target) is None:
        why = facts.files.why_not_written(target, read_again=True)
        if why:
            raise MetricsError(f"--metrics {target!r} cannot be written: {why}, choose another file")
