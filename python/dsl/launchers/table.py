"""The launchers by their names for ``--launcher``, and what each has to start for a job."""

from __future__ import annotations

from dsl._record import replace
from dsl.launchers.base import FIRST_PLACE, Agents, Start
from dsl.launchers.mpirun import impi, mpich, mvapich, openmpi, slurm
from dsl.launchers.ssh import pdsh, ssh
from dsl.machine.network import is_loopback

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsl.facts import Facts
    from dsl.launchers.base import Launcher
    from dsl.model.job import Host, Job, Pairs
    from dsl.plan.remote import LauncherName, Remote

TABLE: dict[LauncherName, Launcher] = {
    "ssh": ssh,
    "pdsh": pdsh,
    "openmpi": openmpi,
    "mpich": mpich,
    "impi": impi,
    "mvapich": mvapich,
    "slurm": slurm,
}
"""Name -> launcher. The first word of a launcher's command is the program that it needs."""

BY_SSH = ("ssh", "pdsh")
"""Programs whose exit code and last words are those of an ssh, if they reach one host."""

OF_ALL = ("mpirun", "srun")
"""Programs whose lines may come from anywhere, even if they reach one host."""


def starts_of(
    job: Job,
    remote: Remote,
    facts: Facts,
    *,
    is_root: bool,
    is_dry: bool = False,
    addresses: Sequence[str] = ("ADDRESS:PORT",),
    variables: Pairs = (),
    folder: str = "FOLDER",
) -> tuple[Start, ...]:
    """The programs that reach the hosts of a job, and start an agent on each.

    ``is_dry``: the user wants to see them, each program for itself and with these default values.
    ``addresses``: where agents connect to the head, unless they talk over the streams of their ssh. The
    other arguments are fields of `Agents`.

    Raises:
        HostNameError: the launcher cannot be given the name of a host.
        LauncherError: the user's words for the launcher do not fit.
    """
    detaches = _detaches(job, remote)
    words: tuple[str, ...] = ("-m", "dsl_launcher.node", "--heartbeat", f"{remote.heartbeat_s:g}")
    if uses_streams(job, remote):
        words += ("--stdio",)
    else:
        words += ("--connect", ",".join(addresses))
        words += ("--detach",) if detaches else ()
        if remote.launcher not in BY_SSH:
            words += ("--per-node" if remote.per_node else "--per-rank",)
        if remote.launcher == "slurm" and not facts.environ.get("SLURM_JOB_ID"):
            words += ("--own-allocation",)
    agents = Agents(
        words=words,
        python=facts.names.executable,
        hosts=_named_for(remote.launcher, job.hosts, facts.names.host),
        variables=variables,
        folder=folder,
        own_name=facts.names.host,
        environ=tuple(facts.environ.items()),
        is_root=is_root,
        is_cuda=job.accelerator == "cuda",
    )
    starts = each_host(remote, agents) if remote.is_elastic else TABLE[remote.launcher](remote, agents)
    if is_dry or not (remote.is_elastic or detaches):
        return starts
    return tuple([replace(start, speaks=False, detaches=detaches) for start in starts])


def _named_for(launcher: LauncherName, hosts: tuple[Host, ...], own: str) -> tuple[Host, ...]:
    """The hosts. In mpirun's list this one needs its own name, by which the others reach it."""
    if launcher in BY_SSH:
        return hosts
    return tuple([replace(one, name=own) if is_loopback(one.name) else one for one in hosts])


def _detaches(job: Job, remote: Remote) -> bool:
    """Whether an agent runs on when its ssh has ended: there are more hosts than ssh reaches at once."""
    return remote.launcher == "ssh" and not remote.is_elastic and len(job.hosts) > remote.fanout


def uses_streams(job: Job, remote: Remote) -> bool:
    """Whether the agents talk to the head over the streams of their ssh; else they connect by themselves."""
    return remote.launcher == "ssh" and not remote.is_elastic and not _detaches(job, remote)


def each_host(remote: Remote, agents: Agents) -> tuple[Start, ...]:
    """One command for each host, in the order of the hosts, so that one host can be reached alone.

    A program that reaches all hosts at once may end when it loses the first host, as mpirun does. And no such
    program starts an agent again on a lost host.

    Raises:
        HostNameError: the launcher cannot be given the name of a host.
    """
    starts = []
    for place, host in enumerate(agents.hosts):
        mine = replace(
            agents,
            hosts=(host,),
            words=(*agents.words, FIRST_PLACE, str(place)),
            folder=f"{agents.folder}_{place}",
        )
        own = slice(place, place + 1)
        one = replace(remote, pythons=remote.pythons[own], devices=remote.devices[own])
        (start,) = TABLE[remote.launcher](one, mine)
        labels = tuple([(label, place) for label, _ in start.labels])
        starts.append(replace(start, node_rank=place, labels=labels))
    return tuple(starts)
