"""Where the output of each worker goes, and which worker reads stdin."""

from __future__ import annotations

from dsl._record import Record, replace
from dsl.errors import OptionError
from dsl.model.job import Route

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal

    from dsl.machine.this_process import Console, Kind
    from dsl.model.job import LineFile
    from dsl.model.request import OutputRequest
    from dsl.output.plugin import StreamFile, StreamFiles

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
    count = len(shown.ranks)
    stdin = _stdin(request.stdin, shown.ranks, shown.world_size)
    if console.stdin_is_terminal and stdin is not None:
        seen = _shown(request, count)
        if not seen[stdin] and request.stdin:  # nobody would see its prompt
            request = replace(request, local_ranks=f"{request.local_ranks},{stdin}")
        elif not seen[stdin] and True in seen:
            stdin = seen.index(True)
    words = _words(request)
    attempt_dir = None if shown.run_dir is None else f"{shown.run_dir}/attempt_{shown.attempt}"
    tee_prefixes = _tee_prefixes(request, shown)
    routes: Sequence[tuple[Route, Route | None]]
    if shown.each_rank_logs:
        routes = _joined_routes(request, shown.each_rank_logs, console, tee_prefixes)
    else:
        searched = {stream for stream, _, _ in words}
        routes = _routes(request, count, console, attempt_dir, searched, tee_prefixes)
    return OutputPlan(
        routes=tuple(routes),
        prefixes=_prefixes(request, shown, console, plain=bool(words)),
        stdin=stdin,
        line_files=tuple(
            [(stream, f"{attempt_dir}/filtered_{name}.log", some) for stream, name, some in words]
        ),
        tee_prefixes=tee_prefixes,
    )


def with_stream_files(output: OutputPlan, files: StreamFiles, console: Console) -> OutputPlan:
    """Replace our files by those of a plug-in. Where the plug-in names the console, the routes stay.

    ``output`` is made for `without_files` of the request.
    """
    routes = []
    prefixes = output.tee_prefixes or (None,) * len(output.routes)
    for (stdout, stderr), worker, prefix in zip(output.routes, files.workers, prefixes, strict=True):
        if worker.stdout.on_console and worker.stderr.on_console:
            routes.append((stdout, stderr))
            continue
        ours = Route(console=2) if stderr is None else stderr
        routes.append(
            (
                _plugin_route(stdout, worker.stdout, 1, console.stdout, prefix),
                _plugin_route(ours, worker.stderr, 2, console.stderr, prefix),
            )
        )
    paths = {1: files.filtered_stdout, 2: files.filtered_stderr}
    return replace(
        output,
        routes=tuple(routes),
        line_files=tuple([(stream, paths[stream], words) for stream, _, words in output.line_files]),
    )


def _plugin_route(ours: Route, file: StreamFile, stream: int, kind: Kind, prefix: str | None) -> Route:
    return ours if file.on_console else _route(file.path, file.is_shown, stream, kind, prefix)


def without_files(request: OutputRequest) -> OutputRequest:
    """The request for the output that a plug-in leaves to us: all of it on the console, in no file."""
    return replace(request, log_dir=None, redirects="", tee="", local_ranks="")


def needs_run_dir(request: OutputRequest) -> bool:
    """Whether the user asks for files in a directory of this run."""
    maps = [text for text in (request.redirects, request.tee) if text != "0"]
    return any((request.log_dir, *maps, request.stdout_words, request.stderr_words))


def _joined_routes(
    request: OutputRequest, paths: Sequence[str], console: Console, tee_prefixes: Sequence[str]
) -> list[tuple[Route, Route | None]]:
    """Routes to one file for both streams of a worker; the console shows both if the map names either."""
    from dsl.output.grammar import parse_streams

    tee = parse_streams(request.tee or "0", "--tee")
    shown = _shown(request, len(paths))
    prefixes = tee_prefixes or (None,) * len(paths)
    return [
        (_route(path, shown[local_rank] and tee(local_rank) != 0, 1, console.stdout, prefix), None)
        for local_rank, (path, prefix) in enumerate(zip(paths, prefixes, strict=True))
    ]


def _routes(
    request: OutputRequest,
    count: int,
    console: Console,
    folder: str | None,
    searched: set[Literal[1, 2]],
    tee_prefixes: Sequence[str],
) -> list[tuple[Route, Route | None]]:
    """``searched`` are the streams that we search for words: we have to read their lines."""
    shown = _shown(request, count)
    files = _files(request, count, folder)
    alone = count == 1 and not console.is_relayed and request.tag != "always" and not searched
    joins = console.is_one and not searched
    routes: list[tuple[Route, Route | None]] = []
    for local_rank in range(count):
        streams = []
        for stream, kind in ((1, console.stdout), (2, console.stderr)):
            path, tee = files[local_rank][stream - 1]
            show = shown[local_rank] and (path is None or tee)
            direct = alone or (kind == "null" and stream not in searched)
            inherits = path is None and show and direct
            ours = Route(inherit=True, terminal=kind == "terminal")
            prefix = tee_prefixes[local_rank] if tee_prefixes and path is not None and tee else None
            streams.append(ours if inherits else _route(path, show, stream, kind, prefix))
        # One pipe keeps the order of what the worker writes to both.
        is_one = joins and streams == SHOWN
        routes.append((streams[0], None if is_one else streams[1]))
    return routes


def _route(path: str | None, show: bool, stream: int, kind: Kind, prefix: str | None) -> Route:  # noqa: FBT001  private
    if not show or kind == "null":
        return Route(path=path)
    return Route(path=path, console=1 if stream == 1 else 2, terminal=kind == "terminal", prefix=prefix)


def _files(request: OutputRequest, count: int, folder: str | None) -> list[list[tuple[str | None, bool]]]:
    """For each worker and stream: its file, and whether the console shows it as well."""
    if folder is None or not (request.log_dir or request.redirects or request.tee):
        return [[(None, True)] * 2] * count
    from dsl.output.grammar import parse_streams

    redirects = parse_streams(request.redirects or "0", "--redirects")
    tee = parse_streams(request.tee or "0", "--tee")
    if request.log_dir is not None and not request.redirects and not request.tee:
        tee = parse_streams("3", "--tee")
    files: list[list[tuple[str | None, bool]]] = []
    for local_rank in range(count):
        both = []
        for stream, name in ((1, "stdout"), (2, "stderr")):
            is_tee = bool(tee(local_rank) & stream)
            path = f"{folder}/{local_rank}/{name}.log"
            both.append((path if is_tee or redirects(local_rank) & stream else None, is_tee))
        files.append(both)
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


def _shown(request: OutputRequest, count: int) -> list[bool]:
    if not request.local_ranks:
        return [True] * count
    from dsl.output.grammar import parse_local_ranks

    chosen = parse_local_ranks(request.local_ranks)
    return [local_rank in chosen for local_rank in range(count)]


def _words(request: OutputRequest) -> list[tuple[Literal[1, 2], str, tuple[str, ...]]]:
    if not (request.stdout_words or request.stderr_words):
        return []
    from dsl.output.grammar import parse_words

    found: list[tuple[Literal[1, 2], str, tuple[str, ...]]] = []
    if words := parse_words(request.stdout_words):
        found.append((1, "stdout", words))
    if words := parse_words(request.stderr_words):
        found.append((2, "stderr", words))
    return found


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
    from dsl.lists import parse_number, quote

    rank = parse_number(text)
    if rank is None or rank >= world_size:
        raise OptionError(f"--stdin {quote(text)}: it must be a rank, 0 to {world_size - 1}, or none")
    return ranks.index(rank) if rank in ranks else None
