"""Elastic jobs of ``dsl``: how many hosts they may have, and which of the available hosts they run on."""

from __future__ import annotations

from dsl._record import replace
from dsl.errors import OptionError
from dsl.lists import counted, first_few
from dsl.model.job import Job, MeetingPoint
from dsl.model.request import DEFAULT_MASTER_PORT, Request
from dsl.plan.worker import ELASTIC

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dsl.facts import Facts
    from dsl.model.remote import Remote

    NodeRange = tuple[int, int]
    """The least and the most nodes."""

DEFAULT_RESTARTS = 100
"""How often failed workers are started again; DeepSpeed's agent has the same default."""

DEFAULT_WAIT_S = 600.0
"""Seconds that a job waits for hosts when there are too few; torch gives its nodes as long to join."""

ROLE = "trainer"
"""What DeepSpeed's elastic agent calls its workers."""

RUN_ID_VARIABLE = "ELASTIC_RUN_ID"
"""Names an elastic job, in the environment of the command."""

BACKEND = "c10d"
"""Backend by which nodes without a head find each other, as with DeepSpeed."""


def node_bounds(request: Request, host_count: int | None) -> NodeRange:
    """The least and the most hosts that the user's options allow.

    ``host_count``: number of hosts that the head can reach; None: there is no head, and any number may come.

    Raises:
        OptionError: the options contradict each other, or allow no number of hosts.
    """
    asked, elastic = request.resources, request.elastic
    least, most = elastic.min_nodes, elastic.max_nodes
    if asked.max_nodes is not None:
        for option, one, other in (
            ("--min_elastic_nodes", least, asked.min_nodes),
            ("--max_elastic_nodes", most, asked.max_nodes),
        ):
            if one is not None and one != other:
                raise OptionError(
                    f"--num_nodes {asked.min_nodes}:{asked.max_nodes} and {option} {one} contradict each "
                    "other, leave one of them out"
                )
        least, most = asked.min_nodes, asked.max_nodes
    there = host_count if host_count is not None else (asked.min_nodes or 1)
    least = 1 if least is None else least
    most = max(there, least if host_count is None else 1) if most is None else most
    if not 1 <= least <= most:
        raise OptionError(
            f"elastic training on {least} to {most} nodes: the least must be at least 1, and the most at "
            "least that"
        )
    if host_count is None:
        return least, most
    if least > host_count:
        are = f"there {'is' if host_count == 1 else 'are'} {counted(host_count, 'host')} to run on"
        raise OptionError(f"elastic training on at least {least} nodes: {are}")
    return least, min(most, host_count)


def elastic_job(job: Job, request: Request, nodes: NodeRange, facts: Facts, *, is_remote: bool) -> Job:
    """Make a job elastic. ``is_remote``: a head reaches the hosts; otherwise the nodes find each other."""
    return replace(
        job,
        flavour=ELASTIC,
        program=replace(job.program, local_rank_option=""),
        meeting=job.meeting if is_remote else _meeting(request, nodes),
        run_id=_run_id(request, facts, is_shared=not is_remote and nodes[1] > 1),
        node_count=job.node_count if is_remote else nodes[1],
        max_restarts=DEFAULT_RESTARTS if request.max_restarts is None else job.max_restarts,
        role=ROLE,
    )


def elastic_remote(remote: Remote, request: Request, job: Job, nodes: NodeRange, facts: Facts) -> Remote:
    """How the hosts of an elastic job are reached, and how many of them it needs.

    Raises:
        OptionError: the job accepts no number of workers that its hosts can have.
    """
    wait_s = request.elastic.wait_s
    return replace(
        remote,
        per_node=True,
        least_nodes=nodes[0],
        most_nodes=nodes[1],
        wait_s=DEFAULT_WAIT_S if wait_s is None else wait_s,
        world_sizes=_accepted_sizes(job, nodes, facts),
        gives_up=request.max_restarts is None,
    )


def _accepted_sizes(job: Job, nodes: NodeRange, facts: Facts) -> tuple[int, ...]:
    """Numbers of workers that the job's own ``elasticity`` section accepts; empty: any."""
    from dsl.elasticity.solver import job_world_sizes

    sizes = [(place, len(host.slots)) for place, host in enumerate(job.hosts)]
    total = sum(size for _, size in sizes)
    environ = {**facts.environ, **dict(job.env)}
    accepted = job_world_sizes(environ, job.program.args, facts.files.read_text, total)
    if accepted is None:
        return ()
    if not accepted or choose_hosts(sizes, *nodes, accepted) is None:
        which = f"it accepts {first_few(accepted)}" if accepted else f"it accepts none up to {total}"
        raise OptionError(
            f"no {nodes[0]} to {nodes[1]} hosts make a number of workers that the elasticity section "
            f"of the job's configuration accepts: {which}"
        )
    return accepted


def _meeting(request: Request, nodes: NodeRange) -> MeetingPoint:
    """Where nodes without a head find each other: a store at the master address."""
    address = request.meeting.master_addr or ""
    if ":" in address and not address.startswith("["):
        address = f"[{address}]"
    port = DEFAULT_MASTER_PORT if request.meeting.master_port is None else request.meeting.master_port
    wait_s = request.elastic.wait_s
    return MeetingPoint(
        "dynamic",
        "",
        None,
        backend=BACKEND,
        endpoint=f"{address}:{port}",
        settings=() if wait_s is None else (("join_timeout", f"{max(wait_s, 1):.0f}"),),
        least_nodes=nodes[0],
    )


def _run_id(request: Request, facts: Facts, *, is_shared: bool) -> str:
    """The user's name of the job, or a name that no other job has.

    ``is_shared``: several commands make up one job. Each of them must find the same name by itself, so the
    name comes from what the commands have in common.
    """
    named = facts.environ.get(RUN_ID_VARIABLE, "")
    if named:
        return named
    if not is_shared:
        return facts.names.random() + facts.names.random()
    from hashlib import sha256

    meeting, program = request.meeting, request.program
    common = (meeting.master_addr, meeting.master_port, program.script, *program.args)
    return sha256("\0".join(map(str, common)).encode("utf-8", "surrogateescape")).hexdigest()[:32]


def choose_hosts(
    ready: Sequence[tuple[int, int]], least: int, most: int, world_sizes: Sequence[int] = ()
) -> tuple[int, ...] | None:
    """Choose as many hosts as possible, ``least`` to ``most``: their places, ascending; None: impossible.

    ``ready`` holds the place and the number of workers of each host, preferred hosts first. ``world_sizes``
    are the accepted totals of workers; empty: any. The first hosts are taken if their total is accepted,
    otherwise the accepted combination of as many hosts that has the most workers.
    """
    accepted = frozenset(world_sizes)
    for count in range(min(most, len(ready)), least - 1, -1):
        if not accepted or sum(size for _, size in ready[:count]) in accepted:
            return tuple(sorted(place for place, _ in ready[:count]))
        sizes = sorted({size for _, size in ready}, reverse=True)
        there = [sum(1 for _, one in ready if one == size) for size in sizes]

        def workers(mix: Sequence[int], sizes: Sequence[int] = sizes) -> int:
            return sum(size * some for size, some in zip(sizes, mix, strict=True))

        found = [mix for mix in _mixes(there, count) if workers(mix) in accepted]
        if found:
            best = max(found, key=workers)
            chosen = []
            for size, some in zip(sizes, best, strict=True):
                chosen += [place for place, one in ready if one == size][:some]
            return tuple(sorted(chosen))
    return None


def _mixes(there: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """All ways to take ``count`` hosts, as numbers of hosts of each size; ``there`` has the greatest ones."""
    if len(there) == 1:
        if count <= there[0]:
            yield (count,)
        return
    for some in range(min(there[0], count) + 1):
        for rest in _mixes(there[1:], count - some):
            yield (some, *rest)
