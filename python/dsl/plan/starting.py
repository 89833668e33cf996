"""How each worker of a node is started: forked by which fork server, executed, or under a debugger.

A fork server reads its environment before its workers get theirs. So all of its workers must agree in every
variable that may be read early: when an interpreter starts, a library is loaded or a module is imported.
Only variables that tell a worker its place, its meeting or its devices are read late (`is_late`).

``--debug`` runs workers under debugpy, with which editors talk the Debug Adapter Protocol. The port of a
worker is the base and its local rank, so an editor's configuration stays right from run to run.
"""

from __future__ import annotations

from dsl._record import replace
from dsl.devices import ACCELERATORS
from dsl.errors import OptionError, PortError
from dsl.forkserver.preload import OTHER_LIBRARIES, TORCH_PACKAGES, find_imports, package_of
from dsl.model.job import Flavour, ForkServer, Host, Job, NodePlan, Notice, Warm, WorkerPlan
from dsl.model.request import DEFAULT_WARM_BYTES, DEFAULT_WARM_S
from dsl.output.grammar import is_in, parse_ranks
from dsl.plan.remote import PDSH_SSH_ARGS, Remote
from dsl.plan.worker import ATTEMPT_VARIABLE, ELASTIC, REASON_VARIABLE, words_of_interpreter
from dsl.words import BEYOND, LAST_PORT, counted, find_runs, format_ranges, numbered, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dsl.facts import Facts
    from dsl.model.request import DebugRequest, Level, Program
    from dsl.output.grammar import Runs

LATE_VARIABLES = {
    "DSL_JOB_ID",
    REASON_VARIABLE,
    ATTEMPT_VARIABLE,
    *[one.visible_variable for one in ACCELERATORS.values()],
}
"""Variables that are read only when a worker uses devices or meets others; flavours have further ones."""

SHELL_VARIABLES = frozenset(
    {
        *("_", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "WINDOWID", "GPG_TTY", "TERM_SESSION_ID"),
        *("SSH_AGENT_PID", "SSH_AUTH_SOCK", "SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "XDG_SESSION_ID"),
        "PYTEST_CURRENT_TEST",
    }
)
"""Variables that change with each command or login. A warm server has none of them."""

SECRET_WORDS = frozenset(
    {
        *("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASS", "PWD", "PASSPHRASE"),
        *("CREDENTIALS", "CREDS"),
        *("PAT", "AUTH", "AUTHORIZATION", "BEARER", "JWT", "SAS", "COOKIE", "DSN"),
    }
)
SECRET_PARTS = (
    *("SECRET", "PASSWORD", "PASSPHRASE", "CREDENTIAL", "APIKEY", "API_KEY", "PRIVATE_KEY", "ACCESS_KEY"),
    *("CONNECTION_STRING", "CONNECTIONSTRING", "WEBHOOK", "SSHPASS"),
)
"""Last words and parts of names of variables that hold secrets. A warm server has none of these variables."""

CPUS = "CPUs that OpenMP binds threads to"
"""A difference beside variables for which workers get separate fork servers; no variable has this name."""


def is_late(name: str, flavour: Flavour) -> bool:
    """Whether a variable tells a worker its place, its meeting or its devices, and so is read late."""
    return (
        name in LATE_VARIABLES
        or name.startswith("TORCHELASTIC_")
        or name.endswith("_VISIBLE_DEVICES")
        or any(name == one for one, _ in (*flavour.group_variables, *flavour.worker_variables))
    )


def may_be_secret(name: str, value: str = "") -> bool:
    """Whether a variable has a name as those that hold passwords and keys, or is a URL with a password."""
    upper = name.upper()
    if upper.rpartition("_")[2] in SECRET_WORDS or any(part in upper for part in SECRET_PARTS):
        return upper != "PWD"
    user, at, _ = value.partition("://")[2].partition("/")[0].rpartition("@")
    return bool(at) and not user.endswith(":") and ":" in user


def with_fork_servers(plan: NodePlan, facts: Facts) -> NodePlan:
    """Add the fork servers that the job asks for, and assign workers to them.

    Notices of one line say which workers start in another way than the user asked for, and what ``auto``
    chose.
    """
    job = plan.job
    why_not = _why_not_forked(plan, facts)
    if job.start.method == "auto":
        if why_not := why_not or _why_executed(plan, facts):
            return with_notice(plan, "detail", f"start method auto: spawn, {why_not}")
        who = counted(len(plan.workers), "worker", "that imports", "that import")
        plan = with_notice(plan, "detail", f"start method auto: forkserver, {who} torch")
    elif why_not:
        return with_notice(plan, "warning", f"start method {job.start.method} has no effect: {why_not}")
    return _divided(plan)


def _why_not_forked(plan: NodePlan, facts: Facts) -> str:
    """What keeps all workers from being forked; empty: nothing that is known before."""
    program, interpreter = plan.job.program, plan.workers[0].argv[0]
    if program.kind == "program":
        return f"{program.name} is started as a program"
    is_script = interpreter != facts.names.executable and facts.files.is_script(interpreter, plan.env)
    return f"{interpreter} is a script that may start each worker in another way" if is_script else ""


def without_fork_servers(plan: NodePlan) -> NodePlan:
    """The same plan, but all workers are executed."""
    if not plan.fork_servers:
        return plan
    workers = [replace(one, fork_server=None, fork_entry=0) for one in plan.workers]
    return replace(plan, workers=tuple(workers), fork_servers=())


def why_no_torch(source: str) -> str:
    """Why a Python program gains nothing from a fork server that imports torch; empty if it gains.

    The text is a clause about the program. ``source`` is what `read_text` returns, in any encoding.
    """
    try:
        # As bytes again: a program may name its encoding in its first lines.
        found = find_imports(source.encode("utf-8", "surrogateescape"), is_program=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "is not read"  # the worker that runs it will say why
    behind = [one.behind for one in found if not one.level and package_of(one.module) in TORCH_PACKAGES]
    if not behind:
        return "does not import torch"
    if min(behind) == OTHER_LIBRARIES:
        return "changes what torch may read in the environment before it imports it"
    return ""


def _why_executed(plan: NodePlan, facts: Facts) -> str:
    """Why a fork server would not pay off; empty if it would."""
    job, name = plan.job, plan.job.program.name
    if len(plan.workers) < 2 and not facts.files.has_warm_server():
        return "there is one worker"
    source = _source(job, facts)
    if source is None:
        return f"the text of {name} was not found"
    why = why_no_torch(source)
    return f"{name} {why}" if why else ""


def _source(job: Job, facts: Facts) -> str | None:
    """The source of the workers' program; None if it is not found."""
    script = job.start.source or job.program.script
    paths = [script, f"{script}/__main__.py"]
    if job.program.kind == "module" and not job.start.source:
        folder = script.replace(".", "/")
        paths = [f"{folder}.py", f"{folder}/__main__.py"]
    for path in paths:
        try:
            text = facts.files.read_text(path)
        except OSError:
            continue
        if text is not None:
            return text
    return None


def _divided(plan: NodePlan) -> NodePlan:
    """Plan a fork server for each class of workers that agree in what is read early.

    If there are several classes, a worker that is alone in its class is executed.
    """
    job, classes = plan.job, dict[tuple[tuple[str, str], ...], list[int]]()
    for index, worker in enumerate(plan.workers):
        if _executed_by(worker):
            continue
        own = sorted([one for one in worker.env.items() if not is_late(one[0], job.flavour)])
        if worker.cpus is not None and _binds_threads({**plan.env, **worker.env}):
            own.append((CPUS, format_ranges(worker.cpus)))
        classes.setdefault(tuple(own), []).append(index)
    shared = {name: value for name, value in plan.env.items() if not is_late(name, job.flavour)}
    servers: list[ForkServer] = []
    workers = list(plan.workers)
    entry = words_of_interpreter(job.program)
    for early, members in classes.items():
        if len(classes) > 1 and len(members) == 1:
            continue
        for index in members:
            workers[index] = replace(workers[index], fork_server=len(servers), fork_entry=entry)
        env = {**shared, **{name: value for name, value in early if name != CPUS}}
        servers.append(_server(workers[members[0]], job, env, binds=CPUS in dict(early)))
    plan = replace(plan, workers=tuple(workers), fork_servers=tuple(servers))
    for option in ("--debug", "--wrap"):
        if ranks := [worker.rank for worker in plan.workers if _executed_by(worker) == option]:
            plan = with_notice(plan, "info", f"{numbered('rank', ranks)} executed, not forked: {option}")
    if len(classes) > 1:
        plan = with_notice(plan, "info", _difference(plan, list(classes)))
    return plan


def _executed_by(worker: WorkerPlan) -> str:
    """The option for which a worker cannot be forked; empty: it can.

    A debugger has to be there before anything is imported, and a command executes what it wraps.
    """
    return "--debug" if worker.debug_port is not None else "--wrap" if worker.wrap else ""


def _binds_threads(env: Mapping[str, str]) -> bool:
    """Whether OpenMP binds threads. It chooses their CPUs from those of the process that loads it."""
    if (bind := env.get("OMP_PROC_BIND")) is not None:
        return bind.strip().lower() != "false"
    return any(name in env for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"))


def _server(worker: WorkerPlan, job: Job, env: Mapping[str, str], *, binds: bool) -> ForkServer:
    """The server of all workers like this one. With ``binds`` it is bound to the CPUs that they share."""
    program, asked = job.program, job.start
    cpus = worker.cpus if binds else None
    warm = None
    if asked.method in ("warm", "auto") and cpus is None:
        known = {**worker.env, **env}
        secrets = sorted([name for name, value in known.items() if may_be_secret(name, value)])
        warm = Warm(
            stay_s=DEFAULT_WARM_S if asked.warm_for_s is None else asked.warm_for_s,
            memory=DEFAULT_WARM_BYTES if asked.warm_memory is None else asked.warm_memory,
            withheld=tuple(secrets),
            left_out=tuple(sorted(SHELL_VARIABLES.intersection(env))),
            only_if_there=asked.method == "auto",
        )
    return ForkServer(
        interpreter=worker.argv[: worker.fork_entry],
        env=env,
        preload=asked.preload,
        script=asked.source or ("" if program.kind == "call" else program.script),
        is_module=program.kind == "module" and not asked.source,
        cpus=cpus,
        warm=warm,
    )


def _difference(plan: NodePlan, classes: Sequence[tuple[tuple[str, str], ...]]) -> str:
    """Why one server is not enough, and which workers are executed because of that."""
    names = sorted({name for early in classes for name, _ in set(early) ^ set(classes[0])})
    alone = [one.rank for one in plan.workers if one.fork_server is None and not _executed_by(one)]
    count = len(plan.fork_servers)
    servers = counted(count, "fork server") if count else "no fork server"
    left = f", {numbered('rank', alone)} executed" if alone else ""
    return f"{servers}{left}: the workers differ in {', '.join(names)}"


def with_notice(plan: NodePlan, level: Level, text: str) -> NodePlan:
    """Add a notice to the plan of the first attempt; later plans stay as they are."""
    return plan if plan.meeting.attempt else replace(plan, notices=(*plan.notices, Notice(level, text)))


ALL = "all"
"""The word for all ranks."""

EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104  what a user may have asked for
"""Addresses that mean every interface: a worker can listen there, but an editor cannot connect to them."""

LOCAL = "127.0.0.1"
Attach = tuple[int, str, int]
"""Rank of a worker, and the host and port where a debugger attaches to it."""


def debug_ranks(text: str) -> Runs:
    """Read ``0,2-3`` as runs of ranks, each with its first and last rank; ``all`` is one run of all ranks.

    Raises:
        OptionError: the text is no list of ranks.
    """
    return ranks_or_all(text, "--debug")


def ranks_or_all(text: str, option: str) -> Runs:
    """The same for any option. Raises OptionError."""
    return ((0, BEYOND),) if text == ALL else parse_ranks(text, option, f", or {ALL}")


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
    return is_in(rank, debug_ranks(asked.ranks))


def with_debugger(plan: NodePlan) -> NodePlan:
    """Return the plan with the chosen workers under debugpy.

    Raises:
        OptionError: the user names a rank that the job does not have.
        PortError: a worker's port would be above the last one.
    """
    job = plan.job
    if keeps_ranks(job):
        check_ranks(job.debug.ranks, "--debug", plan.meeting.world_size)
    address, place = _shown(job.debug.address), words_of_interpreter(job.program)
    waits = ("--wait-for-client",) if job.debug.waits else ()
    workers = list(plan.workers)
    for index, worker in enumerate(workers):
        port = debug_port(job, worker.rank, worker.local_rank)
        if port is None:
            continue
        # debugpy asks for the first two: else it misses breakpoints in modules of the interpreter.
        words = ("-X", "frozen_modules=off", "-m", "debugpy", "--listen", f"{address}:{port}", *waits)
        argv = (*worker.argv[:place], *words, *worker.argv[place:])
        workers[index] = replace(worker, argv=argv, debug_port=port)
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


def attach_notices(plan: NodePlan) -> tuple[Notice, ...]:
    """How to attach to the workers of a node that starts its part itself."""
    asked = plan.job.debug
    address = LOCAL if asked.address in EVERYWHERE else asked.address
    ports = [(worker.rank, worker.debug_port) for worker in plan.workers]
    return _told([(rank, address, port) for rank, port in ports if port is not None], asked)


def attach_everywhere(job: Job, remote: Remote, facts: Facts) -> tuple[Notice, ...]:
    """How to attach from this machine to the workers on all hosts of a job whose hosts stay the same.

    Raises:
        OptionError: the user names a rank that the job does not have, or ranks of several hosts and an
            address that only one host has.
        PortError: a port would be above the last one, on a host or on this machine.
    """
    asked = job.debug
    world_size = sum(len(host.slots) for host in job.hosts)
    check_ranks(asked.ranks, "--debug", world_size)
    is_tunnelled = asked.address.startswith("127.") or asked.address in ("::1", "localhost")
    hosts = [host for host, ranks in _ranks(job) if any(is_debugged(asked, rank) for rank in ranks)]
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
        ports = [(rank, debug_port(job, rank, local)) for local, rank in enumerate(ranks)]
        chosen = [(rank, port) for rank, port in ports if port is not None]
        if here or not is_tunnelled:
            address = host.name if asked.address in EVERYWHERE else asked.address
            found += [(rank, address, port) for rank, port in chosen]
            continue
        # Workers of several hosts use the same port on their hosts; here each needs a port of its own.
        first = asked.port + beyond
        found += [(rank, LOCAL, first + rank) for rank, _ in chosen]
        words = [f"-L {first + rank}:{_shown(asked.address)}:{port}" for rank, port in chosen]
        if words:
            line = " ".join(("ssh", *ssh_words, "-N", *words, host.name))
            tunnels.append(Notice("critical", f"to reach {host.name}: {line}"))
    last = max([port for _, _, port in found], default=0)
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


def keeps_ranks(job: Job) -> bool:
    """Whether all attempts have the same ranks."""
    return job.meeting.kind != "dynamic" and job.flavour != ELASTIC


def check_ranks(text: str, option: str, world_size: int) -> None:
    """Refuse ranks that a job with so many workers does not have. Raises OptionError."""
    if text != ALL and max(last for _, last in parse_ranks(text, option)) >= world_size:
        last = world_size - 1
        there = f"ranks 0 to {last}" if last else "rank 0 alone"
        raise OptionError(f"{option} {quote(text)}: the job has {there}")


def _told(found: Sequence[Attach], asked: DebugRequest) -> tuple[Notice, ...]:
    """A line for each run of ranks at one host, and one for each family of editors."""
    if not found:
        return ()
    from json import dumps

    verb = "wait" if asked.waits else "listen"
    lines = []
    # One line covers neighbouring ranks whose ports are neighbours, too.
    places: dict[tuple[str, int], list[int]] = {}
    for rank, host, port in found:
        places.setdefault((host, port - rank), []).append(rank)
    for (host, offset), ranks in places.items():
        for first, last in find_runs(sorted(ranks)):
            who, ports = f"rank {first} {verb}s", f"{first + offset}"
            if first != last:
                who, ports = f"ranks {first}-{last} {verb}", f"{first + offset}-{last + offset}"
            lines.append(f"{who} for a debugger at {_shown(host)}:{ports}")
    configurations = [
        {
            "name": f"rank {rank}",
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": host, "port": port},
            "justMyCode": False,
        }
        for rank, host, port in found
    ]
    lines.append(f'VS Code, launch.json: "configurations": {dumps(configurations)}')
    rank, host, port = found[0]
    lines.append(
        "Neovim, nvim-dap: "
        f'require("dap").run({{type = "python", request = "attach", name = "rank {rank}", '
        f'connect = {{host = "{host}", port = {port}}}}})'
    )
    lines.append(f"PyCharm: run configuration Attach to DAP, host {host}, port {port}")
    return tuple([Notice("critical", line) for line in lines])


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
