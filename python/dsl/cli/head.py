"""The command on the host where a multi-host job is launched: it starts the agents, and conducts the job."""

from __future__ import annotations

import os

from dsl import __version__
from dsl.agent.conductor import Conductor, places_of
from dsl.agent.head import Head, decide_for
from dsl.cli.process import Crew, HeldSignals, run_guarded
from dsl.control.hub import Hub
from dsl.control.messages import Assignment
from dsl.errors import LauncherError
from dsl.launchers.base import Agents, Start
from dsl.launchers.table import TABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dsl import Supervisor
    from dsl.facts import Facts
    from dsl.model.job import Job
    from dsl.model.remote import Remote
    from dsl.model.request import ShowRequest
    from dsl.plan.job import JobPlan

FEW = 256
"""Number of agents for which every usual limit of descriptors is enough."""

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
    _allow_connections(len(places_of(job, per_node=remote.per_node)))
    hub = Hub(remote.heartbeat_s, show=True)
    key = os.urandom(32)
    addresses: tuple[str, ...] = ()
    if not _uses_streams(job, remote):
        port = hub.listen()
        if not _tells_key(remote):
            hub.expect(None, key, count=len(places_of(job, per_node=remote.per_node)))
        found = facts.network.addresses_toward([host.name for host in job.hosts], job.meeting.address)
        if not found:
            raise LauncherError(
                "no address of this host is known that the others could reach: give --master_addr, "
                "or --launcher ssh, which needs none"
            )
        addresses = tuple([f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in found])
    folder = _Folder()
    is_keyed = bool(addresses) and not _tells_key(remote)
    variables = (("DSL_CONTROL_KEY", key.hex()),) if is_keyed else ()
    starts = _starts(remote, _agents(job, remote, facts, variables, folder.path, addresses))
    if remote.is_elastic:
        starts = (_kept(starts, facts.names.executable, folder.path),)
    with HeldSignals() as held:
        held.hold()
        try:
            folder.fill(starts)
            head = _head(job, remote, starts, hub, facts)
            plan = head.plan(0)
            assert plan is not None
            crew = _HeadCrew(head, head.conductor)
            head.on_finish = folder.remove
            return run_guarded(head, plan, crew, held, stdin_is_terminal=False)
        finally:
            folder.remove()


def _head(job: Job, remote: Remote, starts: Sequence[Start], hub: Hub, facts: Facts) -> Head:
    assignment = _assignment(job, remote, facts)
    if not remote.is_elastic:
        return Head(job, Conductor(job, remote, assignment, _now_s()), starts, hub, facts.environ)
    from dsl.agent.elastic_conductor import ElasticConductor
    from dsl.agent.elastic_head import ElasticHead

    conductor = ElasticConductor(job, remote, assignment, _now_s())
    head = ElasticHead(job, conductor, starts, hub, facts.environ)
    head.launcher = remote.launcher
    return head


def _uses_streams(job: Job, remote: Remote) -> bool:
    """Whether the agents talk to the head over the streams of their ssh; else they connect by themselves."""
    return remote.launcher == "ssh" and len(job.hosts) <= remote.fanout and not remote.is_elastic


def _tells_key(remote: Remote) -> bool:
    """Whether each agent makes a key of its own, and sends it back through the program that started it."""
    return remote.launcher == "pdsh" or (remote.is_elastic and remote.launcher == "ssh")


def _kept(starts: Sequence[Start], python: str, folder: str) -> Start:
    """One program that runs all these programs. They inherit its environment, with the key."""
    from json import dumps

    path = f"{folder}/commands.json"
    text = dumps({"commands": [list(start.argv) for start in starts]})
    return Start(
        argv=(python, "-m", "dsl.fanout", "--orders", path),
        env=starts[0].env,
        unset=starts[0].unset,
        files=((path, text), *[file for start in starts for file in start.files]),
    )


def _allow_connections(count: int) -> None:
    """Raise the limit of descriptors to one for each agent, as far as allowed. The hub reports it if not."""
    if count < FEW:
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * count + FEW
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def _now_s() -> float:
    import time

    return time.monotonic()


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
        if remote.launcher not in ("ssh", "pdsh"):
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
    if remote.is_elastic:
        from dsl.launchers.each import each_host

        return each_host(remote, agents)
    return TABLE[remote.launcher](remote, agents)


def _assignment(job: Job, remote: Remote, facts: Facts) -> Assignment:
    return Assignment(
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


class _Folder:
    """The directory of the files that a launcher reads; it is made only if there are such files."""

    def __init__(self) -> None:
        from dsl.machine.process import temp_dir

        self.path = f"{temp_dir()}/dsl_hosts_{os.urandom(8).hex()}"
        self._files: list[str] = []
        self._folders: list[str] = []

    def fill(self, starts: Sequence[Start]) -> None:
        """Write the files, readable for this user alone. Raises LauncherError."""
        files = [entry for start in starts for entry in start.files]
        if not files:
            return
        try:
            for folder in dict.fromkeys([self.path, *[os.path.dirname(path) for path, _ in files]]):
                os.mkdir(folder, 0o700)
                self._folders.append(folder)
            for path, text in files:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                self._files.append(path)
                with open(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(text)
        except OSError as error:
            raise LauncherError(
                f"cannot write {error.filename or self.path} for the launcher: {error.strerror}"
            ) from None

    def remove(self) -> None:
        """Remove the files and directories."""
        for path in self._files:
            _try_to(os.unlink, path)
        for folder in reversed(self._folders):
            _try_to(os.rmdir, folder)


def _try_to(call: Callable[[str], None], path: str) -> None:
    try:
        call(path)
    except OSError:
        return


class _HeadCrew(Crew):
    """The crew of a head."""

    def __init__(self, head: Head, conductor: Conductor) -> None:
        super().__init__([head], [head], decide_for(conductor))
        self.routine = True
        self._head = head

    def stay(self) -> None:
        """Leave the connections to the agent."""
        self._head.disown()

    def enter(self, supervisor: Supervisor) -> None:
        """Serve the connections."""
        self._head.enter(supervisor)
