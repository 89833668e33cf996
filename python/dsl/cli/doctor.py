"""``--doctor``: what would go wrong with a job on its hosts, before anything is started."""

from __future__ import annotations

from collections.abc import Callable

from dsl._record import replace
from dsl.agent.planner import Planner
from dsl.agent.preflight import file_problems
from dsl.control.messages import Checked
from dsl.doctor.job_checks import Examined, exit_code, find_all, page
from dsl.doctor.look import look_here
from dsl.doctor.ways import knock
from dsl.errors import DslError
from dsl.facts import Facts
from dsl.lists import parse_number
from dsl.model.health import MeetingLook
from dsl.model.job import Job, MeetingPoint, Notice
from dsl.model.request import DEFAULT_MASTER_PORT, Request
from dsl.plan.job import JobPlan, plan_job
from dsl.plan.worker import FLAVOURS, inherited_environment
from dsl.report.speak import show_text

STORE_PORT = 29400
"""Where the store of torch's rendezvous listens if the user names no port."""


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
    workers = 1
    if not problems:
        try:
            workers, told = _plan_here(planned, facts)
            notices = (*notices, *told)
        except DslError as error:
            problems.append(str(error))
    cwd = facts.files.cwd
    job, environ = planned.job, inherited_environment(planned.job, facts.environ)
    problems += [one for one in file_problems(job, environ, cwd) if one and one not in problems]
    health = look_here(job, facts.environ, facts, node_rank=planned.node_rank, workers=workers, cwd=cwd)
    health = replace(health, meeting=_look_at_meeting(planned, facts))
    findings = find_all([Examined("", Checked(tuple(problems), health=health))], notices)
    show_text("\n".join(page(findings, (), workers)))
    return exit_code(findings)


def _plan_here(planned: JobPlan, facts: Facts) -> tuple[int, tuple[Notice, ...]]:
    """The workers of this node, and what their plan has to say. Raises DslError."""
    planner = Planner(planned, facts)
    if planned.job.meeting.kind == "dynamic":
        return planner.local_world_size, ()  # the nodes have to meet before they can plan
    plan = planner.sketch()
    return planner.local_world_size, planner.notices(plan)


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
