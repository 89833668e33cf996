"""Which fork server forks which workers of a node; the other workers are executed.

A fork server reads its environment before its workers get theirs. So all of its workers must agree in every
variable that may be read early: when an interpreter starts, a library is loaded or a module is imported.
Only variables that tell a worker its place, its meeting or its devices are read late (`is_late`).
"""

from __future__ import annotations

from dsl._record import replace
from dsl.devices.accelerators import ACCELERATORS
from dsl.forkserver.guess import OTHER_LIBRARIES, TORCH_PACKAGES, find_imports, package_of
from dsl.lists import counted, format_ranges, numbered
from dsl.model.job import Flavour, ForkServer, Job, NodePlan, Notice, Warm, WorkerPlan
from dsl.model.request import DEFAULT_WARM_BYTES, DEFAULT_WARM_S
from dsl.plan.worker import ATTEMPT_VARIABLE, REASON_VARIABLE, words_of_interpreter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dsl.facts import Facts
    from dsl.model.request import Level

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

LATE_PREFIX = "TORCHELASTIC_"
LATE_SUFFIX = "_VISIBLE_DEVICES"

CPUS = "CPUs that OpenMP binds threads to"
"""A difference beside variables for which workers get separate fork servers; no variable has this name."""


def is_late(name: str, flavour: Flavour) -> bool:
    """Whether a variable tells a worker its place, its meeting or its devices, and so is read late."""
    return (
        name in LATE_VARIABLES
        or name.startswith(LATE_PREFIX)
        or name.endswith(LATE_SUFFIX)
        or any(name == one for one, _ in (*flavour.group_variables, *flavour.worker_variables))
    )


def may_be_secret(name: str, value: str = "") -> bool:
    """Whether a variable has a name as those that hold passwords and keys, or is a URL with a password."""
    upper = name.upper()
    if upper.rpartition("_")[2] in SECRET_WORDS or any(part in upper for part in SECRET_PARTS):
        return upper != "PWD"
    user, at, _ = value.partition("://")[2].partition("/")[0].rpartition("@")
    return bool(at) and not user.endswith(":") and ":" in user


def with_fork_servers(plan: NodePlan, job: Job, facts: Facts) -> NodePlan:
    """Add the fork servers that the job asks for, and assign workers to them.

    Notices of one line say which workers start in another way than the user asked for, and what ``auto``
    chose.
    """
    if job.start.method == "auto":
        if why_not := _why_executed(plan, job, facts):
            return with_notice(plan, "detail", f"start method auto: spawn, {why_not}")
        text = f"start method auto: forkserver, {len(plan.workers)} workers that import torch"
        plan = with_notice(plan, "detail", text)
    elif job.program.kind == "program":
        text = (
            f"start method {job.start.method} has no effect on {job.program.name}, which is not run by Python"
        )
        return with_notice(plan, "warning", text)
    return _divided(plan, job)


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


def _why_executed(plan: NodePlan, job: Job, facts: Facts) -> str:
    """Why a fork server would not pay off; empty if it would."""
    name = job.program.name
    if job.program.kind == "program":
        return f"{name} is not run by Python"
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


def _divided(plan: NodePlan, job: Job) -> NodePlan:
    """Plan a fork server for each class of workers that agree in what is read early.

    If there are several classes, a worker that is alone in its class is executed.
    """
    classes: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for index, worker in enumerate(plan.workers):
        if worker.debug_port is not None:
            continue  # a debugger has to be there before anything is imported
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
    debugged = [worker.rank for worker in plan.workers if worker.debug_port is not None]
    if debugged:
        plan = with_notice(plan, "info", f"{numbered('rank', debugged)} executed, not forked: --debug")
    if len(classes) > 1:
        plan = with_notice(plan, "info", _difference(plan, list(classes)))
    return plan


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
    alone = [one.rank for one in plan.workers if one.fork_server is None and one.debug_port is None]
    count = len(plan.fork_servers)
    servers = counted(count, "fork server") if count else "no fork server"
    left = f", {numbered('rank', alone)} executed" if alone else ""
    return f"{servers}{left}: the workers differ in {', '.join(names)}"


def with_notice(plan: NodePlan, level: Level, text: str) -> NodePlan:
    """Add a notice to the plan of the first attempt; later plans stay as they are."""
    return plan if plan.attempt else replace(plan, notices=(*plan.notices, Notice(level, text)))
