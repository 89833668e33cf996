"""The command on the host where a multi-host job is launched: it starts the agents, and conducts the job."""

from __future__ import annotations

import os

from dsl import __version__
from dsl.agent.head import Head
from dsl.agent.session import Crew, Session
from dsl.agent.starters import BY_SSH, Starters
from dsl.conductor.conductor import Conductor
from dsl.conductor.terms import reached_terms, seats_of
from dsl.control.hub import Hub, allow_connections
from dsl.control.messages import Assignment
from dsl.errors import LauncherError
from dsl.launchers.base import Agents
from dsl.launchers.each import each_host, kept
from dsl.launchers.table import TABLE
from dsl.lists import with_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl import Supervisor
    from dsl.facts import Facts
    from dsl.launchers.base import Start
    from dsl.model.job import Job
    from dsl.model.remote import Remote
    from dsl.model.request import ShowRequest
    from dsl.plan.job import JobPlan

AGENT_WORDS: tuple[str, ...] = ("-m", "dsl.node")


def run_head(planned: JobPlan, show: ShowRequest, facts: Facts) -> int:
    """Start an agent on every host, conduct the job, and end this process with the job's exit code.

    Returns the exit code only if nothing was started.

    Raises:
        DslError: the hosts cannot be reached in the way that the user asked for.
    """
    job, remote = planned.job, planned.remote
    assert remote is not None
    if show.dry_run or show.dry_run_json:
        from dsl.cli.show import show_hosts

        starts = _starts(remote, _agents(job, remote, facts, (), "FOLDER"))
        show_hosts(job, remote, starts, as_json=show.dry_run_json)
        return 0
    head = _head(job, remote, facts)
    return Session(head, lambda _: _HeadCrew(head)).run_guarded()


def _head(job: Job, remote: Remote, facts: Facts) -> Head:
    """The head, with a hub that waits for the agents."""
    from dsl.machine.this_process import temp_dir

    node_ranks = [one.node_rank for one in seats_of(job, per_node=remote.per_node)]
    allow_connections(len(node_ranks))
    hub = Hub(remote.heartbeat_s, show=True)
    addresses: list[str] = []
    variables: tuple[tuple[str, str], ...] = ()
    if not _uses_streams(job, remote):
        port = hub.listen()
        if remote.launcher not in BY_SSH:
            key = os.urandom(32)
            variables = (("DSL_CONTROL_KEY", key.hex()),)
            hub.expect(None, key, count=len(node_ranks))
        found = facts.network.addresses_toward([host.name for host in job.hosts], job.meeting.address)
        if not found:
            raise LauncherError(
                "no address of this host is known that the others could reach: give --master_addr, "
                "or --launcher ssh, which needs none"
            )
        addresses = [with_port(one, port) for one in found]
    folder = f"{temp_dir()}/dsl_hosts_{os.urandom(8).hex()}"
    agents = _agents(job, remote, facts, variables, folder, addresses)
    starts = _starts(remote, agents)
    if remote.is_elastic or _detaches(job, remote):
        starts = (kept(starts, agents, 0 if remote.is_elastic else remote.fanout),)
    starters = Starters(job, starts, node_ranks, facts.environ)
    return Head(job, _conductor(job, remote, facts), starters, hub)


def _detaches(job: Job, remote: Remote) -> bool:
    """Whether an agent runs on when its ssh has ended: there are more hosts than ssh reaches at once."""
    return remote.launcher == "ssh" and not remote.is_elastic and len(job.hosts) > remote.fanout


def _uses_streams(job: Job, remote: Remote) -> bool:
    """Whether the agents talk to the head over the streams of their ssh; else they connect by themselves."""
    return remote.launcher == "ssh" and not remote.is_elastic and not _detaches(job, remote)


def _agents(
    job: Job,
    remote: Remote,
    facts: Facts,
    variables: tuple[tuple[str, str], ...],
    folder: str,
    addresses: Sequence[str] = (),
) -> Agents:
    words = (*AGENT_WORDS, "--heartbeat", f"{remote.heartbeat_s:g}")
    if _uses_streams(job, remote):
        words += ("--stdio",)
    else:
        words += ("--connect", ",".join(addresses) or "ADDRESS:PORT")
        words += ("--detach",) if _detaches(job, remote) else ()
        if remote.launcher not in BY_SSH:
            words += ("--per-node" if remote.per_node else "--per-rank",)
        if remote.launcher == "slurm" and not facts.environ.get("SLURM_JOB_ID"):
            words += ("--own-allocation",)
    return Agents(
        words=words,
        python=facts.names.executable,
        hosts=job.hosts,
        variables=variables,
        folder=folder,
        environ=tuple(facts.environ.items()),
        is_root=os.geteuid() == 0,
        is_cuda=job.accelerator == "cuda",
    )


def _starts(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    return each_host(remote, agents) if remote.is_elastic else TABLE[remote.launcher](remote, agents)


def _conductor(job: Job, remote: Remote, facts: Facts) -> Conductor:
    from time import monotonic

    assignment = Assignment(
        version=__version__,
        job=job,
        node_rank=0,
        cwd=remote.cwd,
        pid=facts.names.pid,
        stamp=facts.names.stamp(),
        token=facts.names.random(),
        stdout=facts.console.stdout,
        stderr=facts.console.stderr,
        checks=remote.checks,
    )
    return Conductor(reached_terms(job, remote, assignment), monotonic())


class _HeadCrew(Crew):
    """The crew of a head."""

    def __init__(self, head: Head) -> None:
        super().__init__([head], [head], head.decide, routine=True)
        self._head = head

    def stay(self) -> None:
        """Leave the connections to the agent."""
        self._head.disown()

    def enter(self, supervisor: Supervisor) -> None:
        """Serve the connections."""
        self._head.enter(supervisor)
