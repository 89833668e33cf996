"""Where the output of each worker goes, and which worker reads stdin."""

from __future__ import annotations

import posixpath

from dsl._record import Record, replace
from dsl.errors import OptionError
from dsl.model.job import Route
from dsl.words import parse_number, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal, TypeAlias

    from dsl.machine import Console, Kind
    from dsl.model.job import LineFile
    from dsl.model.request import OutputRequest

    Pair: TypeAlias = tuple[Route, Route | None]

RUN_PREFIX = "dslrun_"
"""Start of the name of a run's directory, if the user has named no place for it."""

ERROR_FILE = "error.json"
"""Name of the error file in a worker's directory, as with torchrun."""

# The terminal's colours that are readable on black and on white, without red, which means trouble.
COLOURS = (36, 32, 35, 34, 33)
TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


class Shown(Record):
    """The workers whose output is planned, what decides how it looks, and where log files lie."""

    ranks: Sequence[int]
    """Global ranks of the workers of this node, by local rank."""
    world_size: int
    """Number of workers of the job."""
    environ: Mapping[str, str]
    """``NO_COLOR``, ``FORCE_COLOR``, ``TERM`` and the prefix template are read from it."""
    role: str = "default"
    """What a prefix template calls the workers."""
    host: str = ""
    """What a prefix template calls this node."""
    run_dir: str | None = None
    """New directory of this run for log files; None: the run has none."""
    attempt: int = 0
    """How often the workers were started before."""
    each_rank_logs: tuple[str, ...] = ()
    """Files of ``--enable_each_rank_log``, one for each worker."""


class OutputPlan(Record):
    """Where the output of a node's workers goes, by local rank, and which worker reads stdin."""

    routes: tuple[tuple[Route, Route | None], ...]
    """Routes of stdout and stderr; None for stderr: it is joined to stdout."""
    prefixes: tuple[str, ...]
    """Prefix of each line on the console."""
    stdin: int | None = None
    """Local rank of the worker that reads our stdin."""
    line_files: tuple[LineFile, ...] = ()
    """Files for lines that have one of the user's words."""
    tee_prefixes: tuple[str, ...] = ()
    """Prefix on the console of lines that also go to a file; empty: as ``prefixes``."""


SHOWN = [Route(console=1), Route(console=2)]
"""Streams of a worker that are shown and go nowhere else."""


def plan_output(request: OutputRequest, shown: Shown, console: Console) -> OutputPlan:
    """Decide where the output of one node's workers goes. ``console`` tells what our own streams are.

    Raises:
        OptionError: a stream map, a list of ranks or ``stdin`` makes no sense for this job.
    """
    stdin = _stdin(request.stdin, shown.ranks, shown.world_size)
    seen = _shown(request, shown.ranks)
    if console.stdin_is_terminal and stdin is not None and not seen[stdin]:
        if request.stdin:  # nobody would see its prompt
            seen[stdin] = True
        elif True in seen:
            stdin = seen.index(True)
    words = _words(request)
    attempt_dir = None if shown.run_dir is None else f"{shown.run_dir}/attempt_{shown.attempt}"
    tee_prefixes = _tee_prefixes(request, shown)
    routes: Sequence[Pair]
    if shown.each_rank_logs:
        routes = _joined_routes(request, seen, shown, console, tee_prefixes)
    else:
        searched = {stream for stream, _, _ in words}
        routes = _routes(request, seen, shown.ranks, console, attempt_dir, searched, tee_prefixes)
    return OutputPlan(
        routes=tuple(routes),
        prefixes=_prefixes(request, shown, console, plain=bool(words)),
        stdin=stdin,
        line_files=tuple(
            [(stream, f"{attempt_dir}/filtered_{name}.log", some) for stream, name, some in words]
        ),
        tee_prefixes=tee_prefixes,
    )


def without_files(request: OutputRequest) -> OutputRequest:
    """The request for the output that a plug-in, which knows local ranks alone, leaves to us: in no file."""
    return replace(request, log_dir=None, redirects="", tee="", local_ranks="")


def needs_run_dir(request: OutputRequest) -> bool:
    """Whether the user asks for files in a directory of this run."""
    maps = [text for text in (request.redirects, request.tee) if text != "0"]
    return any((request.log_dir, *maps, request.stdout_words, request.stderr_words))


def _joined_routes(
    request: OutputRequest,
    seen: Sequence[bool],
    shown: Shown,
    console: Console,
    tee_prefixes: Sequence[str],
) -> list[Pair]:
    """Routes to one file for both streams of a worker; the console shows both if the map names either."""
    from dsl.output.grammar import parse_streams

    tee = parse_streams(request.tee or "0", "--tee")
    paths, prefixes = shown.each_rank_logs, tee_prefixes or (None,) * len(seen)
    return [
        (route(path, seen[local_rank] and tee(local_rank, rank) != 0, 1, console.stdout, prefix), None)
        for local_rank, (rank, path, prefix) in enumerate(zip(shown.ranks, paths, prefixes, strict=True))
    ]


def _routes(
    request: OutputRequest,
    shown: Sequence[bool],
    ranks: Sequence[int],
    console: Console,
    folder: str | None,
    searched: set[Literal[1, 2]],
    tee_prefixes: Sequence[str],
) -> list[Pair]:
    """``searched`` are the streams that we search for words: we have to read their lines."""
    count = len(shown)
    files = _files(request, ranks, folder)
    # A variable for prefixes may be set for all jobs of a user; a single worker keeps the terminal then.
    asks_prefix = request.tag == "always" or (request.tag == "auto" and request.template != "")
    alone = count == 1 and not console.is_relayed and not asks_prefix and not searched
    joins = console.is_one and not searched

    def pair(is_shown: bool, own: Sequence[tuple[str | None, bool]], tee_prefix: str | None) -> Pair:  # noqa: FBT001
        streams = []
        for stream, kind, (path, tee) in ((1, console.stdout, own[0]), (2, console.stderr, own[1])):
            show = is_shown and (path is None or tee)
            direct = alone or (kind == "null" and stream not in searched)
            inherits = path is None and show and direct
            ours = Route(inherit=True, terminal=kind == "terminal")
            prefix = tee_prefix if path is not None and tee else None
            hidden = Route(path=path, prefix=prefix)  # the file for words has its lines, too
            goes = route(path, show, stream, kind, prefix) if show else hidden
            streams.append(ours if inherits else goes)
        # One pipe keeps the order of what the worker writes to both.
        is_one = joins and streams == SHOWN
        return streams[0], None if is_one else streams[1]

    made: dict[object, Pair] = {}
    routes = []
    for local_rank in range(count):
        facts = (shown[local_rank], files[local_rank], tee_prefixes[local_rank] if tee_prefixes else None)
        if (known := made.get(facts)) is None:
            known = made[facts] = pair(*facts)
        routes.append(known)
    return routes


def route(path: str | None, show: bool, stream: int, kind: Kind, prefix: str | None) -> Route:  # noqa: FBT001  three words
    """Where one stream of a worker goes: to a file, to the console (``show``), or to both."""
    if not show or kind == "null":
        return Route(path=path)
    return Route(path=path, console=1 if stream == 1 else 2, terminal=kind == "terminal", prefix=prefix)


def _files(
    request: OutputRequest, ranks: Sequence[int], folder: str | None
) -> list[tuple[tuple[str | None, bool], ...]]:
    """For each worker and stream: its file, and whether the console shows it as well."""
    if folder is None or not (request.log_dir or request.redirects or request.tee):
        return [((None, True), (None, True))] * len(ranks)
    from dsl.output.grammar import parse_streams

    redirects = parse_streams(request.redirects or "0", "--redirects")
    tee = parse_streams(request.tee or "0", "--tee")
    if request.log_dir is not None and not request.redirects and not request.tee:
        tee = parse_streams("3", "--tee")
    files = []
    for local_rank, rank in enumerate(ranks):
        both = []
        for stream, name in ((1, "stdout"), (2, "stderr")):
            is_tee = bool(tee(local_rank, rank) & stream)
            path = f"{folder}/{local_rank}/{name}.log"
            both.append((path if is_tee or redirects(local_rank, rank) & stream else None, is_tee))
        files.append(tuple(both))
    return files


def run_dirs(run_dir: str | None, attempt: int, count: int) -> tuple[str, ...]:
    """Directories to make before an attempt, outermost first: of the run (once), the attempt, each worker."""
    if run_dir is None:
        return ()
    folder = f"{run_dir}/attempt_{attempt}"
    own = [f"{folder}/{local_rank}" for local_rank in range(count)]
    return (folder, *own) if attempt else (run_dir, folder, *own)


def flat_error_file(run_dir: str, attempt: int, local_rank: int) -> str:
    """The error file of a worker in a run that has no directories within its own."""
    return f"{run_dir}/attempt_{attempt}_{local_rank}_{ERROR_FILE}"


def is_error_file(name: str) -> bool:
    """Whether a file in the directory of a run, or of a worker, has the name of an error file of ours."""
    words = name.split("_")
    is_flat = len(words) == 4 and words[0] == "attempt" and (words[1] + words[2]).isdecimal()
    return words[-1] == ERROR_FILE and (is_flat or len(words) == 1)


def _shown(request: OutputRequest, ranks: Sequence[int]) -> list[bool]:
    """Whether the console shows each worker: both lists have to name it, if both are given."""
    seen = [True] * len(ranks)
    if request.local_ranks:
        from dsl.output.grammar import parse_local_ranks

        chosen = parse_local_ranks(request.local_ranks)
        seen = [local_rank in chosen for local_rank in range(len(ranks))]
    if request.global_ranks:
        from dsl.output.grammar import is_in, parse_ranks

        runs = parse_ranks(request.global_ranks, "--ranks-filter")
        seen = [one and is_in(rank, runs) for one, rank in zip(seen, ranks, strict=True)]
    return seen


def _words(request: OutputRequest) -> list[tuple[Literal[1, 2], str, tuple[str, ...]]]:
    both: tuple[tuple[Literal[1, 2], str, str], ...]
    both = ((1, "stdout", request.stdout_words), (2, "stderr", request.stderr_words))
    return [(stream, name, words) for stream, name, text in both if (words := parse_words(text))]


def parse_words(text: str) -> tuple[str, ...]:
    """torchrun's comma list of words, in which two commas stand for a comma in a word."""
    words = text.replace(",,", "\0").split(",")
    return tuple([word.replace("\0", ",") for word in words if word])


def _tee_prefixes(request: OutputRequest, shown: Shown) -> tuple[str, ...]:
    """torchrun's prefixes, which ``--tee`` and plug-ins use unless the user asks for other prefixes."""
    if not (request.tee or request.logs_specs) or request.tag != "auto" or TEMPLATE_VARIABLE in shown.environ:
        return ()
    return tuple([f"[{shown.role}{local_rank}]:" for local_rank in range(len(shown.ranks))])


def _prefixes(request: OutputRequest, shown: Shown, console: Console, *, plain: bool) -> tuple[str, ...]:
    """``plain``: without colours, as lines also go to files."""
    ranks, environ = shown.ranks, shown.environ
    template = environ.get(TEMPLATE_VARIABLE, "")
    on_terminal = console.stdout == "terminal"
    seen = shown.world_size if console.is_relayed else len(ranks)
    wanted = request.tag == "always" or (
        request.tag == "auto" and ((on_terminal and seen > 1) or template != "")
    )
    if not wanted:
        return ("",) * len(ranks)
    if template:
        from dsl.output.grammar import fill_template

        return tuple(
            [
                fill_template(template, shown.role, rank, local_rank, shown.host)
                for local_rank, rank in enumerate(ranks)
            ]
        )
    width = len(str(shown.world_size - 1 if console.is_relayed else max(ranks)))
    texts = [f"[rank {rank:{width}}]" for rank in ranks]
    if plain or not may_colour(environ, is_terminal=on_terminal and console.stderr != "other"):
        return tuple([f"{text} " for text in texts])
    return tuple(
        [
            f"\x1b[{COLOURS[rank % len(COLOURS)]}m{text}\x1b[0m "
            for rank, text in zip(ranks, texts, strict=True)
        ]
    )


def may_colour(environ: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Whether text for the user has colours: on a terminal, and with ``FORCE_COLOR`` anywhere."""
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or (is_terminal and environ.get("TERM", "dumb") != "dumb")


def _stdin(text: str, ranks: Sequence[int], world_size: int) -> int | None:
    """Local rank of the worker that reads our stdin: the first one, unless the user names another one."""
    if text == "":
        return 0
    if text == "none":
        return None
    rank = parse_number(text)
    if rank is None or rank >= world_size:
        raise OptionError(f"--stdin {quote(text)}: it must be a rank, 0 to {world_size - 1}, or none")
    return ranks.index(rank) if rank in ranks else None


def rank_log_path(log_dir: str, stamp: str, rank: int) -> str:
    """DeepSpeed's name, ``DIR/YYYYmmddHHMMSS_rankN.log``; ``stamp`` is the local time of the launch."""
    return posixpath.join(log_dir, f"{stamp}_rank{rank}.log")
