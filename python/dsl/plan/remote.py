"""How the other hosts of a job are reached: `Request` -> `Remote`. Imported only where hosts are reached."""

from __future__ import annotations

from dsl.devices.accelerators import ACCELERATORS
from dsl.devices.offered import select_accelerator
from dsl.errors import AcceleratorError, LauncherError, OptionError
from dsl.lists import parse_number, quote
from dsl.model.job import Notice, Pairs
from dsl.model.remote import DEFAULT_FANOUT, LAUNCHERS, RANK_LAUNCHERS, Remote
from dsl.plan.worker import without_ranks
from dsl.resources.exports import (
    DEFAULT_NAME,
    GENERAL,
    NAME_VARIABLE,
    choose_exports,
    env_file_paths,
    read_env_files,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.facts import Facts
    from dsl.model.remote import LauncherName
    from dsl.model.request import RemoteRequest, Request
    from dsl.plan.hosts import ActiveHosts, Pool

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
        OptionError: ``--launcher_args`` cannot be split into words as a shell does.
    """
    asked = request.remote
    pool, hosts = active.pool, active.hosts
    assert pool is not None
    launcher = _choose_launcher(asked, facts, source=pool.source)
    named, executable = _pythons(pool), facts.names.executable
    pythons = tuple([named.get(host.name) or executable for host in hosts])
    has_room = pool.tasks is None or all(len(one.slots) <= pool.tasks[one.name] for one in hosts)
    return Remote(
        launcher=launcher,
        args=_launcher_words(asked.launcher_args),
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


def _pythons(pool: Pool) -> dict[str, str]:
    """The interpreters of hosts that have another one than this command."""
    if "python=" not in pool.text:
        return {}
    from dsl.resources.hosts import parse_pythons

    return parse_pythons(pool.text.split("\n"), pool.name)


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


def _launcher_words(text: str) -> tuple[str, ...]:
    if not text.strip():
        return ()
    from shlex import split

    try:
        return tuple(split(text))
    except ValueError as error:
        problem = str(error)
        raise OptionError(
            f"--launcher_args {quote(text)} are no words of a shell: {problem[:1].lower()}{problem[1:]}"
        ) from None


def remote_variables(own: Pairs, facts: Facts) -> tuple[Pairs, list[Notice]]:
    """The variables that go to the workers of all hosts, and what the user should know about them.

    They come from the environment of this command, the files of variables, and ``own``, the job's variables.
    A later source wins.

    Raises:
        EnvFileError: a file cannot be read, or a line of it is malformed.
        AcceleratorError: ``DS_ACCELERATOR`` names no accelerator.
    """
    environ, notices = facts.environ, []
    variables = choose_exports(without_ranks(environ), facts.files.cwd, _export_prefixes(facts))
    name = environ.get(NAME_VARIABLE) or DEFAULT_NAME
    paths = env_file_paths(name, facts.files.home, facts.files.cwd)
    files = read_env_files(paths, facts.files.read_text)
    if not files and NAME_VARIABLE in environ:
        notices.append(Notice("warning", f"there is no {' nor '.join(paths)}, which {NAME_VARIABLE} names"))
    for path, entries in files.items():
        variables.update(entries)
        names = ", ".join(dict(entries))
        notices.append(Notice("info", f"variables of {path} go to all hosts: {names or 'none'}"))
    variables.update(own)
    return tuple(variables.items()), notices


def _export_prefixes(facts: Facts) -> tuple[str, ...]:
    """Prefixes of the accelerator's variables; those of all accelerators if this machine has none."""
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
