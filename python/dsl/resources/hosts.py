"""Where the hosts of a job are named: in a hostfile, or in the variables and files of a scheduler.

A hostfile has ``HOST slots=N`` on each line. The order of the lines becomes the order of the node ranks. The
grammar is DeepSpeed's: blank lines and lines that start with ``#`` are skipped, and words after the number
are ignored (``h slots=4 max_slots=8`` is fine). Only ``python=PATH`` there is our own addition.

Slurm, PBS (and Torque), LSF and Grid Engine each name the hosts in their own way. A host has a number of
slots: its devices if the scheduler counts them (Slurm), else the number of tasks that fit on it.
"""

from __future__ import annotations

from dsl._record import Record
from dsl.errors import HostfileError
from dsl.words import BEYOND, MOST_DIGITS, MOST_NODES, MOST_WORKERS, TASKS, parse_number, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Literal, TypeAlias

    Scheduler: TypeAlias = Literal["slurm", "pbs", "lsf", "sge"]
    Environ: TypeAlias = Mapping[str, str]
    ReadText: TypeAlias = Callable[[str], str | None]


def parse_hostfile(lines: Iterable[str], path: str = "hostfile") -> dict[str, int]:
    """Return host -> number of slots, in the order of the file. ``path`` names the file in errors.

    Raises:
        HostfileError: a malformed line, a host named twice, or no host at all.
    """
    import re

    pattern = re.compile(r"(\S+)\s+slots=(\d+)")
    pool: dict[str, int] = {}
    first_seen: dict[str, int] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        entry = pattern.match(line)
        if entry is None:
            raise HostfileError(
                f"{path} line {number}: hostfile contains a bad entry: {line[:80]!r}, expected 'HOST slots=N'"
            )
        host, digits = entry.groups()
        # Like DeepSpeed's pattern, this one accepts digits of any script.
        slots = int(digits) if len(digits) <= MOST_DIGITS else BEYOND
        if slots > MOST_WORKERS:
            raise HostfileError(
                f"{path} line {number}: slots={digits[:20]} is more than the limit of {MOST_WORKERS}"
            )
        if host in pool:
            raise HostfileError(
                f"{path} line {number}: hostfile contains multiple entries for {host!r}, "
                f"the first in line {first_seen[host]}; keep one"
            )
        pool[host] = slots
        first_seen[host] = number
    if not pool:
        raise HostfileError(
            f"{path}: hostfile is empty or not formatted correctly, expected lines of 'HOST slots=N'"
        )
    return pool


def parse_discovered(lines: Iterable[str]) -> dict[str, int]:
    """Return host -> number of slots, for hosts with slots, from what the program of ``--discover`` prints.

    Like Horovod's programs it may also print ``HOST:N``. Raises HostfileError, as `parse_hostfile` does.
    """
    spelled = []
    for line in lines:
        host, colon, slots = line.strip().rpartition(":")
        spelled.append(f"{host} slots={slots}" if colon and slots.isdecimal() and " " not in host else line)
    if found := {host: slots for host, slots in parse_hostfile(spelled, "--discover").items() if slots}:
        return found
    raise HostfileError("--discover: no host has a slot")


def parse_pythons(lines: Iterable[str], path: str = "hostfile") -> dict[str, str]:
    """Return host -> interpreter, for lines such as ``h slots=4 python=/bin/python``.

    The interpreter is an absolute path, or the name of a program on that host's ``PATH``. Call this only for
    lines that `parse_hostfile` accepts.

    Raises:
        HostfileError: the interpreter is empty, or is a relative path.
    """
    pythons = {}
    for number, raw in enumerate(lines, start=1):
        words = raw.partition("#")[0].split()
        for word in words[2:]:
            key, equals, python = word.partition("=")
            if key != "python" or not equals:
                continue
            if not python or (not python.startswith("/") and "/" in python):
                raise HostfileError(
                    f"{path} line {number}: {word[:80]!r} names no interpreter, expected python=/PATH"
                )
            pythons[words[0]] = python
    return pythons


TASK_COUNTS = tuple([size for _, _, size, _ in TASKS[:-1]])
"""Variables in the tasks of an MPI job. One of several tasks must not start a job on all hosts."""

OWN_JOB = "DSL_JOB_ID"
"""Variable in the workers of dsl. A program in a worker stays on the worker's host."""


class Allocation(Record):
    """The hosts that a scheduler has given to a job."""

    scheduler: Scheduler
    name: str
    """The name in messages: ``Slurm job 12``."""
    hosts: tuple[tuple[str, int], ...]
    """Names and numbers of slots, in the scheduler's order."""
    counts_devices: bool = False
    """The slots are devices; else the user may ask for another number of workers on a host."""
    tasks: tuple[int, ...] = ()
    """The number of tasks that was requested for each host; empty: as many as slots, or unknown."""


def find_allocation(environ: Environ, read_text: ReadText) -> Allocation | None:
    """The hosts of the scheduler's job in which this process runs; None if there is no such job.

    Also None if this process must not start work on all hosts: it is one of several tasks of a step or of an
    MPI job, or runs in a worker of dsl.

    Raises:
        HostfileError: the scheduler's variables or files are malformed.
    """
    if OWN_JOB in environ or any((parse_number(environ.get(name, "")) or 0) > 1 for name in TASK_COUNTS):
        return None
    for find in (_slurm, _pbs, _lsf, _sge):
        found = find(environ, read_text)
        if found is not None and found.hosts:
            return found
    return None


def _slurm(environ: Environ, _read_text: ReadText) -> Allocation | None:
    variable = "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environ else "SLURM_NODELIST"
    # The steps of interactive shells and of batch scripts have numbers with more digits.
    if parse_number(environ.get("SLURM_STEP_ID", "")) is not None:
        if (parse_number(environ.get("SLURM_STEP_NUM_TASKS", "")) or 1) > 1:
            return None
        variable = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else variable
    if not environ.get(variable):
        return None
    try:
        names = expand_nodes(environ[variable])
    except ValueError as error:
        raise HostfileError(
            f"{variable}={quote(environ[variable])}: {error}; name the hosts with --hostfile"
        ) from None
    tasks = _slurm_tasks(environ, len(names))
    devices = _slurm_devices(environ, names, tasks)
    counts = devices or tasks
    number = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or ""
    return Allocation(
        "slurm",
        f"Slurm job {number}".strip(),
        tuple(zip(names, counts, strict=True)),
        counts_devices=bool(devices),
        tasks=tuple(tasks),
    )


def _slurm_devices(environ: Environ, names: Sequence[str], tasks: Sequence[int]) -> list[int]:
    """Devices of each host: as requested, else as on this host; empty: Slurm counts none."""
    each = [1] * len(names)
    for name, times in (("SLURM_GPUS_PER_NODE", each), ("SLURM_GPUS_PER_TASK", tasks), ("SLURM_GPUS", each)):
        numbers = [parse_number(part.rpartition(":")[2]) for part in environ.get(name, "").split(",")]
        count = sum([number for number in numbers if number is not None])
        if None in numbers or not 0 < count <= MOST_WORKERS:
            continue
        if name == "SLURM_GPUS" and len(names) > 1:
            return _shared_devices(environ, names, count)
        return [min(count * one, MOST_WORKERS) for one in times]
    found = parse_number(environ.get("SLURM_GPUS_ON_NODE", "").rpartition(":")[2]) or 0
    return [found] * len(names) if 0 < found <= MOST_WORKERS else []


def _shared_devices(environ: Environ, names: Sequence[str], total: int) -> list[int]:
    """How Slurm has shared devices among the hosts of a job that has asked for a total: no variable says it.

    Raises:
        HostfileError: scontrol does not say it either.
    """
    from subprocess import SubprocessError, run

    counts = dict.fromkeys(names, 0)
    words = ("scontrol", "show", "job", "--details", environ.get("SLURM_JOB_ID", ""))
    try:
        for line in run(words, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines():
            facts = dict([word.partition("=")[::2] for word in line.split()])
            devices = facts.get("GRES", "").split("gpu:")[1:]  # Nodes=a[1-2] ... GRES=gpu:a100:3(IDX:0-2)
            for name in expand_nodes(facts["Nodes"]) if devices and "Nodes" in facts else ():
                counts[name] += sum([int(one.partition("(")[0].rpartition(":")[2]) for one in devices])
    except (OSError, SubprocessError, ValueError, KeyError):
        counts.clear()
    if sum(counts.values()) != total:
        raise HostfileError(
            f"scontrol does not say how {total} GPUs are shared among {len(names)} hosts: "
            "ask Slurm for --gpus-per-node"
        )
    return list(counts.values())


def _slurm_tasks(environ: Environ, host_count: int) -> list[int]:
    """Tasks of each host: as requested, else as Slurm has distributed them, else one."""
    asked = parse_number(environ.get("SLURM_NTASKS_PER_NODE", "")) or 0
    if 0 < asked <= MOST_WORKERS:
        return [asked] * host_count
    counts = expand_counts(environ.get("SLURM_TASKS_PER_NODE", ""), host_count)
    return counts if len(counts) == host_count and all(counts) else [1] * host_count


def expand_counts(text: str, most: int) -> list[int]:
    """``2(x3),1`` -> [2, 2, 2, 1]; empty if the text is malformed or has more than ``most`` numbers."""
    counts: list[int] = []
    for part in text.split(","):
        count, mark, times = part.partition("(x")
        number, repeats = parse_number(count), parse_number(times.removesuffix(")")) if mark else 1
        if number is None or repeats is None or number > MOST_WORKERS or len(counts) + repeats > most:
            return []
        counts += [number] * repeats
    return counts


def expand_nodes(text: str) -> list[str]:
    """The names in Slurm's list of nodes, such as ``a[01-03,5],b``. The last bracket varies fastest.

    Raises:
        ValueError: the list is malformed, or names more hosts than a job can have.
    """
    names: list[str] = []
    for pattern in _split(text):
        found = [""]
        for part, choices in _pieces(pattern):
            found = [f"{name}{part}{choice}" for name in found for choice in choices]
            if len(names) + len(found) > MOST_NODES:
                raise ValueError(f"it names more than {MOST_NODES} hosts")
        names += found
    if not all(names) or len(set(names)) != len(names):
        raise ValueError("it names a host twice, or none")
    return names


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside of brackets."""
    start, depth = 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError("its brackets do not match")
        if letter == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    if depth:
        raise ValueError("its brackets do not match")
    yield text[start:]


def _pieces(pattern: str) -> Iterator[tuple[str, list[str]]]:
    """Each text, and the choices in the bracket after it: ``a[1-2]b`` -> ("a", ["1", "2"]), ("b", [""])."""
    *bracketed, last = pattern.split("]")
    for part in bracketed:
        text, _, ranges = part.partition("[")
        yield text, [number for one in ranges.split(",") for number in _expand_range(one)]
    yield last, [""]


def _expand_range(text: str) -> list[str]:
    """``01-03`` -> 01, 02, 03; a single number is itself. All are as wide as the first number."""
    first, dash, last = text.partition("-")
    low, high = parse_number(first), parse_number(last) if dash else parse_number(first)
    if low is None or high is None or high < low:
        raise ValueError(f"{quote(text)} is no range of numbers")
    if high - low >= MOST_NODES:
        raise ValueError(f"it names more than {MOST_NODES} hosts")
    return [f"{number:0{len(first)}d}" for number in range(low, high + 1)]


def _pbs(environ: Environ, read_text: ReadText) -> Allocation | None:
    """The hosts of PBS: its file has a line for each slot."""
    lines = _lines(environ, "PBS_NODEFILE", read_text)
    return _counted("pbs", "PBS", environ.get("PBS_JOBID", ""), [(words[0], 1) for words in lines])


def _lsf(environ: Environ, read_text: ReadText) -> Allocation | None:
    """The hosts of LSF: from pairs of host and number, else from lists with a host for each slot."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = [(name, parse_number(count) or 0) for name, count in zip(words[::2], words[1::2], strict=False)]
    if not slots or len(words) % 2:
        slots = [(line[0], 1) for line in _lines(environ, "LSB_DJOB_RANKFILE", read_text)]
    slots = slots or [(name, 1) for name in environ.get("LSB_HOSTS", "").split()]
    return _counted("lsf", "LSF", environ.get("LSB_JOBID", ""), slots)


def _sge(environ: Environ, read_text: ReadText) -> Allocation | None:
    """The hosts of Grid Engine: a line has the host, number of slots, queue and processors."""
    lines = _lines(environ, "PE_HOSTFILE", read_text)
    slots = [(words[0], parse_number(words[1]) or 0) for words in lines if len(words) > 1]
    return _counted("sge", "Grid Engine", environ.get("JOB_ID", ""), slots)


def _lines(environ: Environ, variable: str, read_text: ReadText) -> list[list[str]]:
    """Words of each line of the file that a variable names; empty if this machine has no such file."""
    path = environ.get(variable)
    try:
        text = read_text(path) if path else None
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise HostfileError(
            f"{variable}={path} cannot be read: {reason}; name the hosts with --hostfile"
        ) from None
    return [line.split() for line in (text or "").split("\n") if line.strip()]


def _counted(
    scheduler: Scheduler, title: str, number: str, slots: Iterable[tuple[str, int]]
) -> Allocation | None:
    counts: dict[str, int] = {}
    for name, count in slots:
        counts[name] = min(counts.get(name, 0) + count, MOST_WORKERS)
    hosts = tuple([(name, count) for name, count in counts.items() if count])
    return Allocation(scheduler, f"{title} job {number}".strip(), hosts) if hosts else None
