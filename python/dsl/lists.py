"""Reads numbers that users write, with the same grammar and bounds everywhere: counts, seconds, sizes, lists.

Also here: names of variables that several rooms read, a check of colons in host names, and addresses with
ports.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
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
    """Address and port as users write them: an IPv6 address stands in brackets."""
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


def find_runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """First and last number of each run of consecutive numbers, in the given order."""
    run: tuple[int, int] | None = None
    for number in numbers:
        if run is not None and number == run[1] + 1:
            run = (run[0], number)
            continue
        if run is not None:
            yield run
        run = (number, number)
    if run is not None:
        yield run


def format_ranges(numbers: Iterable[int]) -> str:
    """[0, 2, 3, 4] -> ``"0,2-4"``. The numbers stay in their order."""
    return ",".join([f"{a}" if a == b else f"{a}-{b}" for a, b in find_runs(numbers)])
