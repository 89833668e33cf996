"""``--debug``: which workers run under debugpy, on which ports, and how an editor attaches to them.

The port of a worker is the base and its local rank, so an editor's configuration stays right from run to run.
Editors and debugpy talk the Debug Adapter Protocol. The configurations that we print use debugpy's settings.
"""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.errors import OptionError, PortError
from dsl.lists import BEYOND, LAST_PORT, find_runs, parse_range, quote
from dsl.model.job import Host, Job, Notice
from dsl.model.remote import PDSH_SSH_ARGS, Remote
from dsl.plan.worker import words_of_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dsl.facts import Facts
    from dsl.model.job import NodePlan, WorkerPlan
    from dsl.model.request import DebugRequest, Program

ALL = "all"
"""The word for all ranks."""

EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104  what a user may have asked for
"""Addresses that mean every interface: a worker can listen there, but an editor cannot connect to them."""

LOCAL = "127.0.0.1"


class Attach(Record):
    """Where a debugger attaches to one worker."""

    rank: int
    """Its global rank."""
    host: str
    """Host that the editor connects to."""
    port: int
    """Port there."""


def debug_ranks(text: str) -> tuple[tuple[int, int], ...]:
    """Read ``0,2-3`` as runs of ranks, each with its first and last rank; ``all`` is one run of all ranks.

    Raises:
        OptionError: the text is no list of ranks.
    """
    if text == ALL:
        return ((0, BEYOND),)
    found = []
    for part in text.split(","):
        ends = parse_range(part)
        if ends is None or ends[0] > ends[1]:
            raise OptionError(
                f"--debug {quote(text)}: bad range {quote(part)}, expected a rank or FIRST-LAST, or all"
            )
        found.append(ends)
    return tuple(found)


def check_debug(asked: DebugRequest, program: Program, no_python: str) -> None:
    """Refuse what cannot be debugged. ``no_python`` is the spelling of that option in this command.

    Raises:
        OptionError: ranks or address are malformed, or the workers run no Python.
        PortError: the port is out of range.
    """
    debug_ranks(asked.ranks)
    if program.kind == "program":
        raise OptionError(f"--debug needs workers that are run by Python, leave out --debug or {no_python}")
    if not asked.address or any(mark in asked.address for mark in " []/"):
        raise OptionError(f"--debug-address {quote(asked.address)}: expected an address such as {LOCAL}")
    if not 1 <= asked.port <= LAST_PORT:
        raise PortError(f"--debug-port {asked.port} is not a port, expected 1 to {LAST_PORT}")


def is_debugged(asked: DebugRequest, rank: int) -> bool:
    """Whether the worker of this rank runs under a debugger."""
    return any(first <= rank <= last for first, last in debug_ranks(asked.ranks))


def with_debugger(plan: NodePlan, job: Job) -> NodePlan:
    """Return the plan with the chosen workers under debugpy.

    Raises:
        OptionError: the user names a rank that the job does not have.
        PortError: a worker's port would be above the last one.
    """
    if job.meeting.kind != "dynamic":
        _check_ranks(job.debug, plan.world_size)
    ports = [debug_port(job, one.rank, one.local_rank) for one in plan.workers]
    workers = [
        one if port is None else _under_debugger(one, port, job)
        for one, port in zip(plan.workers, ports, strict=True)
    ]
    return replace(plan, workers=tuple(workers))


def check_ports(plan: NodePlan, facts: Facts) -> None:
    """Refuse a port that is taken. Only for the first start: later our own workers hold the ports.

    Raises:
        PortError: a worker's port is taken.
    """
    for worker in plan.workers:
        problem = "" if worker.debug_port is None else port_problem(worker.rank, worker.debug_port, facts)
        if problem:
            raise PortError(problem)


def port_problem(rank: int, port: int, facts: Facts) -> str:
    """Message for a debugged worker that cannot listen on its port on this machine; empty if it can."""
    try:
        if facts.ports.is_free(port):
            return ""
        reason = f"is taken by {facts.ports.holder(port)}"
    except PortError:
        reason = "may not be used by this user"
    return f"port {port}, where rank {rank} is to be debugged, {reason}: give another --debug-port"


def debug_port(job: Job, rank: int, local_rank: int) -> int | None:
    """The port of a worker's debugger; None: the worker runs without one.

    Raises:
        PortError: the port would be above the last one.
    """
    if not is_debugged(job.debug, rank):
        return None
    port = job.debug.port + local_rank
    if port > LAST_PORT:
        raise PortError(
            f"rank {rank} would be debugged at port {port}, above {LAST_PORT}: lower --debug-port"
        )
    return port


def attach_notices(plan: NodePlan, job: Job) -> tuple[Notice, ...]:
    """How to attach to the workers of a node that starts its part itself."""
    address = LOCAL if job.debug.address in EVERYWHERE else job.debug.address
    found = [Attach(one.rank, address, one.debug_port) for one in plan.workers if one.debug_port is not None]
    return _told(found, job.debug)


def attach_everywhere(job: Job, remote: Remote, facts: Facts) -> tuple[Notice, ...]:
    """How to attach from this machine to the workers on all hosts of a job whose hosts stay the same.

    Raises:
        OptionError: the user names a rank that the job does not have, or ranks of several hosts and an
            address that only one host has.
        PortError: a port would be above the last one, on a host or on this machine.
    """
    asked = job.debug
    world_size = sum(len(host.slots) for host in job.hosts)
    _check_ranks(asked, world_size)
    is_tunnelled = asked.address.startswith("127.") or asked.address in ("::1", "localhost")
    hosts = [host for host, ranks in _ranks(job) if any(is_debugged(asked, one) for one in ranks)]
    if len(hosts) > 1 and not is_tunnelled and asked.address not in EVERYWHERE:
        raise OptionError(
            f"--debug-address {quote(asked.address)} is of one host, and ranks of {len(hosts)} hosts are "
            f"to be debugged: give {EVERYWHERE[0]}, or name ranks of one host"
        )
    found: list[Attach] = []
    tunnels: list[Notice] = []
    # A tunnel to a rank starts at base + rank here. If this machine runs other ranks than the first ones, its
    # own workers may have that port: then all tunnels start beyond the ports of its workers.
    is_here = [facts.names.is_this_machine(host.name) for host in job.hosts]
    beyond = world_size if any(is_here) and not is_here[0] else 0
    ssh_words = _ssh_words(remote, facts.environ)
    for here, (host, ranks) in zip(is_here, _ranks(job), strict=True):
        ports = [(one, debug_port(job, one, local)) for local, one in enumerate(ranks)]
        chosen = [(one, port) for one, port in ports if port is not None]
        if here or not is_tunnelled:
            address = host.name if asked.address in EVERYWHERE else asked.address
            found += [Attach(one, address, port) for one, port in chosen]
            continue
        # Workers of several hosts use the same port on their hosts; here each needs a port of its own.
        first = asked.port + beyond
        found += [Attach(one, LOCAL, first + one) for one, _ in chosen]
        words = [f"-L {first + one}:{_shown(asked.address)}:{port}" for one, port in chosen]
        if words:
            line = " ".join(("ssh", *ssh_words, "-N", *words, host.name))
            tunnels.append(Notice("critical", f"to reach {host.name}: {line}"))
    last = max([one.port for one in found], default=0)
    if last > LAST_PORT:
        raise PortError(
            f"the last rank to debug would be reached at port {last} of this machine, above {LAST_PORT}: "
            "lower --debug-port"
        )
    return (*tunnels, *_told(found, asked))


def _ranks(job: Job) -> Iterator[tuple[Host, range]]:
    """The hosts of a job, each with its ranks."""
    rank = 0
    for host in job.hosts:
        yield host, range(rank, rank + len(host.slots))
        rank += len(host.slots)


def _ssh_words(remote: Remote, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The user's words for ssh, quoted for a shell; the launcher reaches the hosts with the same words."""
    from shlex import quote as shell_word

    words = remote.args if remote.launcher == "ssh" else ()
    if remote.launcher == "pdsh":  # pdsh splits the words at blanks, even inside quotes
        words = tuple(environ.get(PDSH_SSH_ARGS, "").split())
    port = () if remote.ssh_port is None or remote.launcher == "slurm" else ("-p", str(remote.ssh_port))
    return tuple(map(shell_word, (*words, *port)))


def _check_ranks(asked: DebugRequest, world_size: int) -> None:
    if asked.ranks != ALL and max(last for _, last in debug_ranks(asked.ranks)) >= world_size:
        last = world_size - 1
        there = f"ranks 0 to {last}" if last else "rank 0 alone"
        raise OptionError(f"--debug {quote(asked.ranks)}: the job has {there}")


def _under_debugger(worker: WorkerPlan, port: int, job: Job) -> WorkerPlan:
    """Insert debugpy's words between the interpreter with its flags and the rest of the command."""
    address = _shown(job.debug.address)
    waits = ("--wait-for-client",) if job.debug.waits else ()
    # debugpy asks for the first two: else it misses breakpoints in modules that are part of the interpreter.
    words = ("-X", "frozen_modules=off", "-m", "debugpy", "--listen", f"{address}:{port}", *waits)
    place = words_of_interpreter(job.program)
    return replace(worker, argv=(*worker.argv[:place], *words, *worker.argv[place:]), debug_port=port)


def _told(found: Sequence[Attach], asked: DebugRequest) -> tuple[Notice, ...]:
    """A line for each run of ranks at one host, and one for each family of editors."""
    if not found:
        return ()
    from json import dumps

    verb = "wait" if asked.waits else "listen"
    lines = []
    # One line covers neighbouring ranks whose ports are neighbours, too.
    places: dict[tuple[str, int], list[int]] = {}
    for one in found:
        places.setdefault((one.host, one.port - one.rank), []).append(one.rank)
    for (host, offset), ranks in places.items():
        for first, last in find_runs(sorted(ranks)):
            who, ports = f"rank {first} {verb}s", f"{first + offset}"
            if first != last:
                who, ports = f"ranks {first}-{last} {verb}", f"{first + offset}-{last + offset}"
            lines.append(f"{who} for a debugger at {_shown(host)}:{ports}")
    configurations = [
        {
            "name": f"rank {one.rank}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": one.host, "port": one.port},
            "justMyCode": False,
        }
        for one in found
    ]
    lines.append(f'VS Code, launch.json: "configurations": {dumps(configurations)}')
    one = found[0]
    lines.append(
        "Neovim, nvim-dap: "
        f'require("dap").run({{type = "python", request = "attach", name = "rank {one.rank}", '
        f'connect = {{host = "{one.host}", port = {one.port}}}}})'
    )
    lines.append(f"PyCharm: run configuration Attach to DAP, host {one.host}, port {one.port}")
    return tuple([Notice("critical", line) for line in lines])


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
