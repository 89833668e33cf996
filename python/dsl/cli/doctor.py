"""What would go wrong with a job on its hosts: ``--doctor``, ``--doctor-first`` and ``--doctor --ring``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.agent.preflight import file_problems
from dsl.control.messages import Checked
from dsl.doctor.job_checks import Examined, exit_code, find_all, page, start_notices
from dsl.errors import DslError, OptionError, UsageError
from dsl.facts import Facts
from dsl.model.health import MeetingLook
from dsl.model.job import Job, MeetingPoint, Notice
from dsl.model.request import (
    DEFAULT_MASTER_PORT,
    NO_POLICY,
    DebugRequest,
    ElasticRequest,
    OutputRequest,
    Program,
    Request,
    StartRequest,
)
from dsl.plan.job import JobPlan, plan_job
from dsl.plan.node import count_workers
from dsl.plan.worker import FLAVOURS, inherited_environment
from dsl.report.speak import show_text
from dsl.view import knock, look_here
from dsl.words import counted, parse_number

STORE_PORT = 29400
"""Where the store of torch's rendezvous listens if the user names no port."""

RING = "dsl_launcher.ring"
"""The module that the workers run with ``--ring``."""


def ring_request(request: Request) -> Request:
    """The same job with the measurement of ``--ring`` in place of the script, behind a look at its hosts.

    Raises:
        OptionError: ``--doctor`` is not there.
    """
    if not request.show.doctor:
        raise OptionError("--ring starts no script: give it with --doctor")
    return replace(
        request,
        program=Program("module", RING),
        output=OutputRequest(tag="never"),
        elastic=ElasticRequest(),
        start=StartRequest(wraps=request.start.wraps),
        debug=DebugRequest(),
        show=replace(request.show, doctor=False, doctor_first=True, ring=False),
        max_restarts=0,
        policy=NO_POLICY,
        hang_timeout_s=None,
        hang_action="report",
    )


def look_first(planned: JobPlan, facts: Facts, tell: Callable[[Sequence[Notice]], None]) -> None:
    """Look at this node before the first attempt, and tell the user what is found.

    Raises:
        UsageError: the doctor has found errors.
    """
    job, node_rank = planned.job, planned.node_rank
    workers = count_workers(job, node_rank, facts)
    health = look_here(job, facts.environ, facts, node_rank=node_rank, workers=workers, cwd=facts.files.cwd)
    found = start_notices([Examined("", Checked(health=health))])
    errors = [replace(one, text=f"error: {one.text}") for one in found if one.level == "error"]
    tell([*errors, *[one for one in found if one.level != "error"]])
    if errors:
        raise UsageError(
            f"--doctor-first has found {counted(len(errors), 'error')} here: nothing was started"
        )


def examine(request: Request, facts: Facts, reach: Callable[[JobPlan], int]) -> int:
    """Look at the hosts of a job and print what would go wrong. Returns 0, 1 with warnings, or 2 with errors.

    ``reach`` examines the job on the hosts that it has to reach. A job that cannot be planned is examined on
    this host alone.
    """
    request = replace(request, output=replace(request.output, logs_specs=None))  # a plug-in may make files
    problems: list[str] = []
    try:
        planned = plan_job(request, facts)
    except DslError as error:
        problems.append(str(error))
        flavour = FLAVOURS[request.flavour]
        job = Job(flavour, request.program, MeetingPoint("alone", "", None), output=request.output)
        planned = JobPlan(job, 0)
    if planned.remote is not None:
        remote = replace(planned.remote, per_node=True, least_nodes=0, checks=True)
        return reach(replace(planned, remote=remote))
    notices = planned.notices
    workers = 0  # unknown
    if not problems:
        try:
            planner = Planner(planned, facts)
            # Nodes that find each other have to meet before they can plan.
            is_dynamic = planned.job.meeting.kind == "dynamic"
            notices = notices if is_dynamic else planner.notices(planner.sketch())
            workers = planner.local_world_size
        except DslError as error:
            problems.append(str(error))
    cwd = facts.files.cwd
    job, environ = planned.job, inherited_environment(planned.job, facts.environ)
    problems += [text for text in file_problems(job, environ, cwd) if text and text not in problems]
    node_rank = planned.node_rank
    health = look_here(job, facts.environ, facts, node_rank=node_rank, workers=workers or 1, cwd=cwd)
    health = replace(health, meeting=_look_at_meeting(planned, facts))
    findings = find_all([Examined("", Checked(tuple(problems), health=health))], notices)
    show_text("\n".join(page(findings, (), workers)))
    return exit_code(findings)


def _look_at_meeting(planned: JobPlan, facts: Facts) -> MeetingLook | None:
    """Look at the place where nodes meet that come by themselves; None: there is no such place."""
    point = planned.job.meeting
    spell = planned.job.flavour.spell
    if point.kind == "dynamic":
        name, _, text = point.endpoint.partition(",")[0].rpartition(":")
        port = parse_number(text)
        if not name:
            name, port = point.endpoint, STORE_PORT
        option, is_first = spell("--rdzv-endpoint"), False
    elif planned.job.node_count > 1:
        name, option, is_first = point.address, spell("--master-addr"), planned.node_rank == 0
        port = DEFAULT_MASTER_PORT if point.port is None else point.port
    else:
        return None
    name = name.rpartition("/")[2].strip("[]")
    if not name or port is None:
        return None
    network = facts.network
    found = network.resolve(name)
    is_own = any(map(network.is_own, found))
    look = MeetingLook(name, port, is_first, option, found, is_own)
    if not is_own:
        return replace(look, answer=knock(found, port)) if found else look
    try:
        return look if facts.ports.is_free(port) else replace(look, holder=facts.ports.holder(port))
    except DslError:
        return look  # the plan says so
