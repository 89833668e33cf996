"""How the other hosts of a job are reached, how many an elastic job may have, and on which it runs."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.devices.offered import select_accelerator
from dsl.errors import AcceleratorError, LauncherError, OptionError
from dsl.model.job import Job, MeetingPoint, Notice, Pairs
from dsl.model.request import DEFAULT_HEARTBEAT_S, DEFAULT_MASTER_PORT
from dsl.plan.hosts import LOCAL_NAME
from dsl.plan.worker import ELASTIC, without_ranks
from dsl.words import MOST_NODES, counted, first_few, parse_number, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Literal, TypeAlias

    from dsl.facts import Facts
    from dsl.model.request import RemoteRequest, Request
    from dsl.plan.hosts import ActiveHosts

    LauncherName: TypeAlias = Literal["ssh", "pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"]
    NodeRange: TypeAlias = tuple[int, int]
    """The least and the most nodes."""

LAUNCHERS: tuple[LauncherName, ...] = ("pdsh", "openmpi", "mvapich", "slurm", "mpich", "impi", "ssh")
"""Words of ``--launcher``, in any case. All but ``ssh`` are DeepSpeed's."""

RANK_LAUNCHERS: tuple[LauncherName, ...] = ("openmpi", "mvapich", "slurm", "mpich", "impi")
"""Launchers that start one task for each rank, unless the user asks for one agent per node."""

DEFAULT_FANOUT = 64

HOST = "{host}"
"""Stands for the name of the host in the words of ``--ssh-program``."""

PDSH_SSH_ARGS = "PDSH_SSH_ARGS_APPEND"
"""Variable with the words that pdsh passes to ssh, separated by blanks."""


class Remote(Record):
    """The launcher that starts an agent on every host, and its settings."""

    launcher: LauncherName
    """Its name."""
    args: tuple[str, ...] = ()
    """More words for it (``--launcher_args``)."""
    program: tuple[str, ...] = ()
    """What reaches a host instead of ssh: words with `HOST`, before a command as one word; empty: ssh."""
    hosts_wait_s: float = 0.0
    """Seconds that the job waits until all hosts can be reached."""
    ssh_port: int | None = None
    """Port of the hosts' ssh servers; None: the usual one."""
    venv_script: str | None = None
    """Script to source on each host before its agent starts."""
    cwd: str = ""
    """Directory in which the agents and their workers run: that of the launching command."""
    pythons: tuple[str, ...] = ()
    """The interpreter of each host, by node rank; empty: that of the launching command."""
    per_node: bool = True
    """One agent per node starts that node's workers; False: each rank is a task of the launcher."""
    devices: tuple[int, ...] = ()
    """The devices that Slurm has to hand out on each host, by node rank; empty: it decides."""
    fanout: int = DEFAULT_FANOUT
    """Hosts that ssh reaches at once. With more hosts, agents run on without ssh and connect to the head."""
    checks: bool = True
    """The hosts are checked before anything starts on them."""
    heartbeat_s: float = DEFAULT_HEARTBEAT_S
    """Seconds of silence after which the other side counts as lost."""
    least_nodes: int = 0
    """The least hosts of a job whose hosts come and go; 0: the job needs all of its hosts."""
    most_nodes: int = 0
    """The most hosts that such a job runs with. The others are spares."""
    wait_s: float = 0.0
    """Seconds that the job waits for hosts when there are too few."""
    world_sizes: tuple[int, ...] = ()
    """Numbers of workers that the job accepts; empty: any."""
    discover: tuple[str, ...] = ()
    """The program that prints the hosts of such a job, while it runs, too; empty: they stay the same."""

    @property
    def is_elastic(self) -> bool:
        """Whether hosts come and go."""
        return self.least_nodes > 0


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

FANOUT_VARIABLE = "DSL_SSH_FANOUT"
"""Sets how many hosts ssh reaches at once, as FANOUT does for pdsh."""

PROGRAMS: dict[LauncherName, tuple[str, ...]] = {
    "ssh": ("ssh",),
    "pdsh": ("pdsh",),
    "openmpi": ("mpirun",),
    "mpich": ("mpirun",),
    "impi": ("mpirun",),
    "mvapich": ("mpirun", "mpiname"),
    "slurm": ("srun",),
}
"""Programs that a launcher needs on ``PATH`` of the launching host."""

PACKAGES = {
    "ssh": "OpenSSH's client",
    "pdsh": "pdsh",
    "mpirun": "that MPI",
    "mpiname": "MVAPICH2",
    "srun": "Slurm's client",
}
"""What to install for each of these programs."""


def plan_remote(request: Request, active: ActiveHosts, facts: Facts) -> Remote:
    """Decide how the hosts are reached.

    Raises:
        LauncherError: the launcher is not installed here, or it cannot do what the user asks for.
        OptionError: ``--launcher_args`` or ``--ssh-program`` cannot be split into words as a shell does.
    """
    asked = request.remote
    pool, hosts = active.pool, active.hosts
    assert pool is not None
    launcher = _choose_launcher(asked, facts, source=pool.source)
    named, executable = pool.pythons(), facts.names.executable
    pythons = tuple([named.get(host.name) or executable for host in hosts])
    has_room = pool.tasks is None or all(len(one.slots) <= pool.tasks[one.name] for one in hosts)
    return Remote(
        launcher=launcher,
        args=option_words("--launcher_args", asked.launcher_args),
        program=_ssh_program(asked, facts),
        hosts_wait_s=asked.wait_hosts_s or 0.0,
        ssh_port=asked.ssh_port,
        venv_script=asked.venv_script,
        cwd=facts.files.cwd,
        pythons=() if set(pythons) == {executable} else pythons,
        per_node=asked.per_node or launcher not in RANK_LAUNCHERS or not has_room,
        devices=() if facts.environ.get("DS_ACCELERATOR") == "cpu" else _devices(request, active),
        fanout=_fanout(facts.environ),
        checks=not asked.no_ssh_check,
        heartbeat_s=asked.heartbeat_s,
    )


def _devices(request: Request, active: ActiveHosts) -> tuple[int, ...]:
    """Devices that Slurm has to give to the job's step on each host; empty: it decides."""
    pool, num_gpus = active.pool, request.resources.num_gpus
    if pool is not None and pool.source == "slurm":
        given = [len(pool.slots[host.name]) for host in active.hosts]
        return tuple([num_gpus or count for count in given]) if pool.counts_devices else ()
    return (num_gpus,) * len(active.hosts) if num_gpus else ()


def _fanout(environ: Mapping[str, str]) -> int:
    text = environ.get(FANOUT_VARIABLE, "")
    if not text:
        return DEFAULT_FANOUT
    fanout = parse_number(text)
    if not fanout:
        raise LauncherError(f"{FANOUT_VARIABLE}={quote(text)}: expected how many hosts ssh reaches at once")
    return fanout


def launcher_word(asked: RemoteRequest) -> LauncherName | None:
    """The launcher that the user names, in small letters; None if none is named. Raises LauncherError."""
    if asked.launcher is None:
        return None
    for word in LAUNCHERS:
        if asked.launcher.lower() == word:
            return word
    raise LauncherError(f"unknown launcher {quote(asked.launcher)}, expected one of {', '.join(LAUNCHERS)}")


def _choose_launcher(asked: RemoteRequest, facts: Facts, *, source: str) -> LauncherName:
    """The launcher that the user names, else the best launcher on this machine.

    ``source`` tells where the hosts come from.
    """
    launcher = launcher_word(asked)
    if launcher is None and asked.ssh_program.strip():
        return "ssh"
    if launcher is None:
        if source == "slurm" and facts.files.has_program("srun"):
            launcher = "slurm"
        else:
            launcher = "pdsh" if facts.files.has_program("pdsh") else "ssh"
    for program in PROGRAMS[launcher]:
        if not facts.files.has_program(program):
            raise LauncherError(_missing(launcher, program, given=asked.launcher is not None))
    return launcher


def _missing(launcher: LauncherName, program: str, *, given: bool) -> str:
    mend = f"install {PACKAGES[program]}"
    if not given:
        return (
            f"other hosts need ssh, which is not on PATH, {mend}, or start the command on each with --no_ssh"
        )
    way_out = "" if program == "ssh" else ", or leave --launcher out"
    return f"launcher '{launcher}' not installed: {program} is not on PATH, {mend}{way_out}"


def _ssh_program(asked: RemoteRequest, facts: Facts) -> tuple[str, ...]:
    """The words of ``--ssh-program``, with `HOST` last if they do not have it. Raises LauncherError."""
    words = option_words("--ssh-program", asked.ssh_program)
    if not words:
        return ()
    if launcher_word(asked) not in (None, "ssh"):
        raise OptionError("--ssh-program takes the place of ssh: leave --launcher out")
    if not facts.files.has_program(words[0]):
        raise LauncherError(f"--ssh-program {quote(words[0])} names no program that can be executed")
    return words if any(HOST in word for word in words) else (*words, HOST)


def option_words(option: str, text: str) -> tuple[str, ...]:
    """The words of an option's value, split as a shell does. Raises OptionError."""
    if not text.strip():
        return ()
    from dsl.output.grammar import shell_words

    return shell_words(text, option)


def remote_variables(own: Pairs, facts: Facts) -> tuple[Pairs, list[Notice]]:
    """The variables that go to the workers of all hosts, and what the user should know about them.

    They come from the environment of this command, the files of variables, and ``own``, the job's variables.
    A later source wins.

    Raises:
        EnvFileError: a file cannot be read, or a line of it is malformed.
        AcceleratorError: ``DS_ACCELERATOR`` names no accelerator.
    """
    from dsl.resources import exports

    environ, notices = facts.environ, []
    variables = exports.choose_exports(without_ranks(environ), facts.files.cwd, _export_prefixes(facts))
    name = environ.get(exports.NAME_VARIABLE) or exports.DEFAULT_NAME
    paths = exports.env_file_paths(name, facts.files.home, facts.files.cwd)
    files = exports.read_env_files(paths, facts.files.read_text)
    if not files and exports.NAME_VARIABLE in environ:
        text = f"there is no {' nor '.join(paths)}, which {exports.NAME_VARIABLE} names"
        notices.append(Notice("warning", text))
    for path, entries in files.items():
        variables.update(entries)
        names = ", ".join(dict(entries))
        notices.append(Notice("info", f"variables of {path} go to all hosts: {names or 'none'}"))
    variables.update(own)
    return tuple(variables.items()), notices


def _export_prefixes(facts: Facts) -> tuple[str, ...]:
    """Prefixes of the accelerator's variables; those of all accelerators if this machine has none."""
    from dsl.devices import ACCELERATORS
    from dsl.resources.exports import GENERAL

    named = facts.environ.get("DS_ACCELERATOR") or ""
    if named in ACCELERATORS:
        return ACCELERATORS[named].export_prefixes
    try:
        name = select_accelerator(facts.environ, facts.devices)[0]
    except AcceleratorError:
        if named:
            raise
        name = "cpu"  # there are devices, but they cannot be counted
    if name != "cpu":
        return ACCELERATORS[name].export_prefixes
    found = [prefix for one in ACCELERATORS.values() for prefix in one.export_prefixes]
    return tuple([prefix for prefix in dict.fromkeys(found) if prefix not in GENERAL])


def node_bounds(request: Request, host_count: int, *, is_remote: bool) -> NodeRange:
    """The least and the most hosts that the user's options allow.

    ``host_count``: number of hosts to choose from. ``is_remote``: a head reaches them; else more may come.

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
    least = 1 if least is None else least
    if elastic.discover:  # more hosts may come
        host_count = MOST_NODES
        most = host_count if most is None else most
    most = max(host_count, 1 if is_remote else least) if most is None else most
    if not 1 <= least <= most:
        raise OptionError(
            f"elastic training on {least} to {most} nodes: the least must be at least 1, and the most at "
            "least that"
        )
    if not is_remote:
        return least, most
    if least > host_count:
        are = f"there {'is' if host_count == 1 else 'are'} {counted(host_count, 'host')} to run on"
        raise OptionError(f"elastic training on at least {least} nodes: {are}")
    return least, min(most, host_count)


def elastic_job(job: Job, request: Request, nodes: NodeRange, facts: Facts, *, is_remote: bool) -> Job:
    """Make a job elastic. ``is_remote``: a head reaches the hosts; otherwise the nodes find each other."""
    if not is_remote and nodes[1] > 1 and job.hosts[0].name == LOCAL_NAME:  # users of other hosts hear of it
        job = replace(job, hosts=(replace(job.hosts[0], name=facts.names.host),))
    return replace(
        job,
        flavour=ELASTIC,
        program=replace(job.program, local_rank_option=""),
        meeting=job.meeting if is_remote else _meeting(request, nodes),
        run_id=_run_id(request, facts, is_shared=not is_remote and nodes[1] > 1),
        node_count=job.node_count if is_remote else nodes[1],
        max_restarts=DEFAULT_RESTARTS if request.max_restarts is None else job.max_restarts,
        gives_up=request.max_restarts is None,
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
        world_sizes=accepted_sizes(job, facts, None if request.elastic.discover else nodes),
        discover=option_words("--discover", request.elastic.discover),
    )


def accepted_sizes(job: Job, facts: Facts, nodes: NodeRange | None = None) -> tuple[int, ...]:
    """Numbers of workers that the job's own ``elasticity`` section accepts; empty: any.

    Raises:
        OptionError: it accepts none that ``nodes`` of its hosts can have; None: more hosts may come.
    """
    from dsl.elasticity.solver import job_world_sizes

    sizes = [(place, len(host.slots)) for place, host in enumerate(job.hosts)]
    total = sum(size for _, size in sizes)
    environ = {**facts.environ, **dict(job.env)}
    accepted = job_world_sizes(environ, job.program.args, facts.files.read_text, total)
    if accepted is None:
        return ()
    if nodes is None:
        return accepted or (0,)  # no number yet
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
