"""Words that users write and read: numbers, sizes, lists, signals, addresses; and text safe for a terminal.

Each has one grammar and the same bounds everywhere. Also here: names of variables that several rooms read,
threads that get no signal, and the words for what a process cannot get: such a thread, a file, memory.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    TaskNames: TypeAlias = tuple[str, str, str, tuple[str, ...]]

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Sets how many threads OpenMP, and so torch, starts in a worker."""

TASKS: tuple[TaskNames, ...] = (
    (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_MCA_ess", "OMPI_MCA_orte_", "OMPI_MCA_pmix"),
    ),
    ("PMIX_RANK", "PMIX_LOCAL_RANK", "PMIX_SIZE", ("PMIX_",)),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", ("PMI_", "MPI_LOCAL")),
    ("PALS_RANKID", "PALS_LOCAL_RANKID", "PALS_SIZE", ("PALS_",)),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_",)),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_",)),
    ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", ("FLUX_TASK_", "FLUX_JOB_SIZE")),
    (
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
        (
            *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASK", "SLURM_GTIDS"),
            *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS"),
        ),
    ),
)
"""How the launchers of tasks number them: the variables of the rank, the local rank and the number of tasks,
and how the names of all variables begin that hold for one task alone. Slurm's are the last."""

MOST_DIGITS = 9
"""Most digits of a number; Python itself refuses to read numbers of thousands of digits."""

BEYOND = 10**MOST_DIGITS
"""Stands for every number with more digits."""

MOST_WORKERS = 65_536
"""Most workers of a node, and most slots of a host. A plan of so many takes a second and 100 MB, so a typing
mistake does no harm."""

MOST_NODES = 65_536
"""Most nodes of a job."""

MOST_SECONDS = BEYOND - 1
"""Longest duration: 31 years."""

LAST_PORT = 65_535

LONGEST_SHOWN = 80
"""Most characters of a user's word that a message repeats."""


def with_port(address: str, port: int) -> str:
    """Address and port as users write them: an IPv6 address is in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse_number(text: str) -> int | None:
    """A number in a list: at most `MOST_DIGITS` ASCII digits. None if the text is no such number."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def parse_integer(text: str) -> int | None:
    """A whole number, with an optional sign and blanks around it. None if the text is no such number."""
    word = text.strip()
    number = parse_number(word[1:] if word[:1] in ("-", "+") else word)
    return -number if number is not None and word[0] == "-" else number


def parse_seconds(text: str) -> float | None:
    """A number of seconds. The caller checks that it lies in 0 to `MOST_SECONDS`. None if it is no number."""
    try:
        return float(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def parse_size(text: str) -> int | None:
    """A size in bytes; K, M or G behind the number multiply by powers of 1024. None if it is no size."""
    factor = 1
    if text[-1:].upper() in ("K", "M", "G"):
        text, factor = text[:-1], 1024 ** ("KMG".index(text[-1].upper()) + 1)
    # Sizes need more digits than counts.
    digits = text.lstrip("0") or text[-1:]
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= 2 * MOST_DIGITS
    return int(digits) * factor if is_number else None


def shorten(text: str, longest: int = LONGEST_SHOWN) -> str:
    """A user's word, short enough for a message: a long word loses its middle."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def quote(text: str) -> str:
    """A user's word, shortened like `shorten` does, in quotation marks."""
    return repr(shorten(text))


def show(value: object) -> str:
    """A value of a config on one line, short enough for a message."""
    return shorten(" ".join(repr(value).split()))


def has_odd_colon(name: str) -> bool:
    """Whether a name contains ``:`` and is no IPv6 address: it has a port, or a word for a launcher."""
    if ":" not in name:
        return False
    from _socket import AF_INET6, inet_pton  # `socket` takes ten times as long to import

    address, percent, zone = name.partition("%")
    try:
        inet_pton(AF_INET6, address)
    except OSError:
        return True
    return bool(percent) and (not zone or ":" in zone)


def parse_range(text: str) -> tuple[int, int] | None:
    """First and last number of ``FIRST-LAST``; a single number is both. Blanks around numbers do not matter.

    The last may be below the first. None if the text is no range.
    """
    ends = [end.strip() for end in text.split("-")]
    if len(ends) > 2 or not all(end.isascii() and end.isdecimal() for end in ends):
        return None
    numbers = [parse_number(end) for end in ends]
    first, last = [BEYOND if number is None else number for number in (numbers[0], numbers[-1])]
    return first, last


def counted(number: int, noun: str, is_one: str = "", are_many: str = "") -> str:
    """``1 worker``, ``3 workers``; with a verb for each: ``1 worker has``, ``3 workers have``."""
    verb = is_one if number == 1 else are_many
    return f"{number} {noun}{'' if number == 1 else 's'}{' ' if verb else ''}{verb}"


def name_few(names: Sequence[str], most: int = 4) -> str:
    """The first names: ``n1, n2 and 3 more``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0,2-4``."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {format_ranges(numbers)}"


def first_few(items: Sequence[object], most: int = 8) -> str:
    """The first of the items, as text: ``0, 2, 4, ...``."""
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def find_runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last number of each run of consecutive numbers, in the given order."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def format_ranges(numbers: Iterable[int]) -> str:
    """[0, 2, 3, 4] -> ``"0,2-4"``. The numbers stay in their order."""
    return ",".join([f"{a}" if a == b else f"{a}-{b}" for a, b in find_runs(numbers)])


# Linux numbers; the signal module would take a millisecond of every launch.
SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    16: "SIGSTKFLT", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP", 20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU",
    23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO",
    30: "SIGPWR", 31: "SIGSYS",
}  # fmt: skip

KEYS = {2: "Ctrl-C", 3: "Ctrl-\\"}
"""Keys of a terminal, by the signal that each of them sends."""

LAST_SIGNAL = 64
"""Real-time signals up to this one have a number and no name."""

UNTAKEABLE = (9, 19, 17, 4, 5, 6, 7, 8, 11, 31, 32, 33)
"""Signals that dsl cannot or must not handle: SIGKILL, SIGSTOP, SIGCHLD, a program's faults, two of libc."""

ENDING = (1, 2, 3, 10, 12, 15)
"""SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2 and SIGTERM: they end a process, but a job handles them."""

JOB_CONTROL = (20, 18, 28)
"""SIGTSTP, SIGCONT and SIGWINCH, which belong to the shell and the terminal."""

MORE_PROCESSES = "raise the limit of processes (ulimit -u, pids.max of the control group)"

SHORTAGES = {
    11: f"no process or thread can be started here, {MORE_PROCESSES}",
    12: "no memory is left, raise the limit of memory (ulimit -v, memory.max of the control group)",
    23: "too many files are open on this machine, raise fs.file-max",
    24: "too many files are open, raise the limit of open files (ulimit -n)",
    28: "no space is left on the disk, free some of it",
    122: "no space is left of your quota on the disk, free some of it",
}
"""What a process cannot get, by the number of the error, and how to mend it."""


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 40`` for a number without a name."""
    return SIGNALS.get(number, f"signal {number}")


def signal_word(number: int) -> str:
    """The signal as `parse_signals` reads it: ``SIGKILL`` for 9, ``40`` for a number without a name."""
    return SIGNALS.get(number, str(number))


def end_on_request(signum: int, *, is_key: bool, is_preemption: bool = False) -> str:
    """What ended a job: ``interrupted (Ctrl-C)``, ``terminated (SIGTERM)``.

    ``is_key``: a key of the terminal sent the signal. ``is_preemption``: the signal announced a preemption.
    """
    name = KEYS.get(signum) if is_key else None
    what = "interrupted" if SIGNALS.get(signum) == "SIGINT" else "terminated"
    return f"{'preempted' if is_preemption else what} ({name or signal_name(signum)})"


def parse_signals(
    text: str,
    option: str,
    *,
    job_control: str = "is always forwarded",
    warnings: list[str] | None = None,
) -> tuple[int, ...]:
    """``SIGUSR1,usr2,34`` as numbers, each once.

    ``option``: name of the text in messages. ``job_control``: why the signals of `JOB_CONTROL` are refused;
    empty: they are allowed. ``warnings``: gets a line for each item that is no signal, and the item is
    skipped; None: such an item is refused.

    Raises:
        OptionError: an item is no signal, or a signal that dsl cannot handle.
    """
    numbers = {name: number for number, name in SIGNALS.items()}
    found: dict[int, None] = {}
    for item in text.split(","):
        word = item.strip().upper()
        if not word:
            continue
        number = numbers.get(word if word.startswith("SIG") else f"SIG{word}", 0)
        if number == 0:
            number = parse_number(word) or 0
        why = "cannot be taken" if number in UNTAKEABLE else ""
        if number in JOB_CONTROL:
            why = job_control
        problem = f"{signal_word(number)} {why}" if why else ""
        if not 1 <= number <= LAST_SIGNAL:
            if warnings is not None:
                why = "is no signal and has no effect, expected names such as SIGUSR1"
                warnings.append(f"{option} {quote(text)}: {quote(item.strip())} {why}")
                continue
            problem = f"{quote(item.strip())} is no signal, expected names such as SIGUSR1"
        if problem:
            from dsl.errors import OptionError

            raise OptionError(f"{option} {quote(text)}: {problem}")
        found[number] = None
    return tuple(found)


def start_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread to which no signal of the process goes: they are for its other threads.

    Raises RuntimeError: there are as many as there may be.
    """
    import signal
    from threading import Thread

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        Thread(target=work, daemon=True, name=name).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def shortage(error: Exception) -> str:
    """What this process cannot get, as a clause; empty: the error has another reason."""
    if isinstance(error, ImportError) or _is_of_import(error):
        return "a file of dsl or of its Python is gone or has changed since the start"
    number = getattr(error, "errno", None)
    if isinstance(error, MemoryError):
        number = 12
    elif isinstance(error, RuntimeError) and "start new thread" in str(error):
        number = 11
    return SHORTAGES.get(number or 0, "")


def _is_of_import(error: Exception) -> bool:
    """Whether the code of a module has raised it while it was imported, as one of another version may."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "<module>":
            return True
        step = step.tb_next
    return False


_ESCAPE = (
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b\r]*(?:\x07|\x1b\\)?|[PX^_][^\x1b\r]*(?:\x1b\\)?"
    r"|[ -/]*[0-Z\\`-~]?)|\x9b[0-?]*[ -/]*[@-~]?"
)


def printable(text: str) -> str:
    r"""Remove terminal sequences and control characters; tabs stay, other white space becomes a space.

    Bytes that are no text, which Python holds as lone surrogates, are shown as ``\xff``.
    """
    if text.isprintable():
        return text
    return "".join([_shown(char) for char in without_sequences(text)])


def _shown(char: str) -> str:
    if char.isprintable() or char == "\t":
        return char
    if "\udc80" <= char <= "\udcff":
        return f"\\x{ord(char) - 0xDC00:02x}"
    return " " if char.isspace() else ""


def without_sequences(text: str) -> str:
    """The text without terminal sequences, complete or cut off."""
    if "\x1b" not in text and "\x9b" not in text:
        return text
    import re

    return re.sub(_ESCAPE, "", text)
