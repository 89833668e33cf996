"""``--logs-specs NAME``: a plug-in says where the output and the error files of the workers go.

The contract is torchrun's. NAME is an entry point of the group ``torchrun.logs_specs``. We call it once, with
``log_dir``, ``redirects``, ``tee`` and ``local_ranks_filter``, and get an object with a method ``reify``.
Before each attempt we call ``reify`` with the variables of each worker by local rank. The plug-in may change
the variables. It answers with mappings from local rank to path,

* ``stdouts`` and ``stderrs``: the file of the stream; empty for the console,
* ``tee_stdouts`` and ``tee_stderrs``: the same file, for streams that the console shows as well,
* ``error_files``: the file where the worker records its error,

and with the paths ``filtered_stdout`` and ``filtered_stderr``, for lines with the user's words. The plug-in
makes the directories. We append to the files, as to all of our log files; torchrun truncates them.

We never import torch: stream maps are made of torch's ``Std`` if the plug-in has imported torch, else of
flags with the same names and values. The command forks before the workers start, so threads of a plug-in stay
in the process that waits for the job. These threads block every signal, and so do programs that a plug-in
starts.
"""

from __future__ import annotations

from dsl import _own_process
from dsl._record import Record, replace
from dsl.errors import OptionError
from dsl.model.job import Route
from dsl.output import route
from dsl.output.grammar import GLOBAL, parse_local_ranks, parse_streams
from dsl.words import THREADS_VARIABLE, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Any, Literal, TypeVar

    from dsl.machine import Console, Kind
    from dsl.model.job import NodePlan
    from dsl.model.request import OutputRequest
    from dsl.output import OutputPlan

    _T = TypeVar("_T")

GROUP = "torchrun.logs_specs"
TORCH_MODULE = "torch.distributed.elastic.multiprocessing.api"


class LogsPlugin:
    """A loaded plug-in, under the name that the user gave. One object serves all attempts."""

    def __init__(self, name: str, specs: Any) -> None:
        """``specs``: an object with torch's ``reify``."""
        self.name = name
        self._specs = specs

    def ask(self, plan: NodePlan) -> StreamFiles:
        """The plug-in's answer for one attempt. ``plan`` is made with `dsl.output.without_files`.

        Raises:
            OptionError: the plug-in raises an error, or its answer is malformed.
        """
        variables = {worker.local_rank: told(plan.env, worker.env) for worker in plan.workers}
        searched = [stream for stream, _, _ in plan.group.line_files]
        envs = {local_rank: dict(env) for local_rank, env in variables.items()}
        answer = _guarded(self.name, "reify", lambda: self._specs.reify(envs))
        return read_answer(self.name, answer, variables, envs, searched)


def load_plugin(name: str, request: OutputRequest) -> LogsPlugin:
    """Import the plug-in of this name and construct it with what the user asked for.

    Raises:
        OptionError: there is no such plug-in, it cannot be loaded or constructed, or the user's stream maps
            or list of local ranks are malformed.
    """
    ranks = set(parse_local_ranks(request.local_ranks)) if request.local_ranks else None
    redirects = _stream_map(request.redirects, "--redirects")
    tee = _stream_map(request.tee, "--tee")
    entry = _entry_point(name)
    specs = _guarded(name, entry.value, entry.load)
    flags = _stream_flags()
    asked = {"redirects": redirects(flags), "tee": tee(flags), "local_ranks_filter": ranks}
    made = _guarded(name, entry.value, lambda: specs(log_dir=request.log_dir, **asked))
    return LogsPlugin(name, made)


def _entry_point(name: str) -> Any:
    from importlib.metadata import entry_points

    found = entry_points(group=GROUP)
    for entry in found:
        if entry.name == name:
            return entry
    known = ", ".join(sorted(found.names)) or "none"
    raise OptionError(
        f"--logs-specs {name!r}: no installed package has an entry point of that name in the group {GROUP}, "
        f"known: {known}"
    )


def _guarded(name: str, what: str, call: Callable[[], _T]) -> _T:
    """Call the plug-in's code. The threads that it starts, as importing torch does, block every signal.

    Otherwise a signal to the job could reach such a thread and end the command, which takes signals in its
    own way.
    """
    import signal

    _own_process.restore()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return call()
    except Exception as error:
        lines = str(error).splitlines()
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise OptionError(f"--logs-specs {name!r}: {what} raised {text.rstrip('.')}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stream_flags() -> Callable[[int], Any]:
    """The function that turns 0, 1, 2 or 3 into the flags that a plug-in expects."""
    from sys import modules

    if TORCH_MODULE in modules:
        of_torch: Callable[[int], Any] = modules[TORCH_MODULE].Std
        return of_torch
    from enum import IntFlag

    class Std(IntFlag):
        NONE = 0
        OUT = 1
        ERR = 2
        ALL = 3

    return Std


def _stream_map(text: str, option: str) -> Callable[[Callable[[int], Any]], Any]:
    """The function that makes flags for all local ranks, or by local rank if the user gave a list."""
    streams = parse_streams(text or "0", option)
    if ":" not in text:
        return lambda flags: flags(streams(0, 0))
    if GLOBAL in text:
        raise OptionError(
            f"{option} {quote(text)}: a plug-in takes local ranks alone, leave out --logs-specs"
        )
    ranks = [int(item.partition(":")[0]) for item in text.split(",")]
    return lambda flags: {rank: flags(streams(rank, rank)) for rank in ranks}


ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
VARIABLES = (
    *("GROUP_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    THREADS_VARIABLE,
)
"""Variables of all workers that torchrun passes to a plug-in, if they are set."""


class StreamFile(Record):
    """Where one output stream of a worker goes, as a plug-in wants it."""

    path: str | None = None
    """Its file; None: it goes to no file."""
    is_shown: bool = False
    """The console shows it as well."""
    on_console: bool = False
    """The console shows it, and there is no file."""


class WorkerFiles(Record):
    """A plug-in's answer for one worker."""

    stdout: StreamFile
    stderr: StreamFile
    error_file: str | None
    """File where the worker records its error; None: no file."""
    env: Mapping[str, str]
    """Variables for the worker: those that the plug-in has changed, and the one that names the error file."""


class StreamFiles(Record):
    """A plug-in's answer for one attempt."""

    workers: tuple[WorkerFiles, ...]
    """By local rank."""
    filtered_stdout: str = ""
    """File for lines of stdout that have one of the user's words; empty: the user gave no words."""
    filtered_stderr: str = ""
    """The same for stderr."""


def told(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables of one worker that a plug-in gets: some of those for all workers, and its ``own``."""
    variables = {name: env[name] for name in VARIABLES if name in env}
    variables.update(own)
    variables.pop(ERROR_FILE_VARIABLE, None)
    return variables


def read_answer(
    name: str,
    answer: Any,
    before: Mapping[int, Mapping[str, str]],
    after: Mapping[int, Mapping[str, str]],
    searched: Collection[Literal[1, 2]],
) -> StreamFiles:
    """Read what ``reify`` of the plug-in ``name`` has returned.

    ``before`` and ``after`` are the variables of each local rank before and after the call. ``searched`` are
    the streams that the user wants searched for words.

    Raises:
        OptionError: the answer is malformed.
    """
    stdouts = _streams(name, answer, "stdouts", len(before))
    stderrs = _streams(name, answer, "stderrs", len(before))
    error_files = _paths(name, answer, "error_files")
    workers = []
    for local_rank, env in sorted(before.items()):
        error_file = _file(error_files.get(local_rank, ""))
        changes = _changes(name, after[local_rank], env)
        changes.setdefault(ERROR_FILE_VARIABLE, error_file or "")
        workers.append(WorkerFiles(stdouts[local_rank], stderrs[local_rank], error_file, changes))
    return StreamFiles(
        tuple(workers),
        _filtered(name, answer, "filtered_stdout") if 1 in searched else "",
        _filtered(name, answer, "filtered_stderr") if 2 in searched else "",
    )


def _changes(name: str, env: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    changes = {variable: value for variable, value in env.items() if before.get(variable) != value}
    for variable, value in changes.items():
        if not isinstance(value, str):
            raise OptionError(f"--logs-specs {name!r}: reify set {variable} to {value!r}, which is no text")
    return changes


def _paths(name: str, answer: Any, field: str) -> dict[int, str]:
    """A mapping of the plug-in's answer, from local rank to path."""
    try:
        return {int(rank): _text(path) for rank, path in getattr(answer, field).items()}
    except (AttributeError, TypeError, ValueError):
        found = getattr(answer, field, None)
        raise OptionError(
            f"--logs-specs {name!r}: the {field} of reify must map local ranks to paths, got {found!r:.80}"
        ) from None


def _text(path: Any) -> str:
    """A path as text, like `os.fsdecode` if file names are UTF-8. Raises TypeError if it is no path."""
    if hasattr(path, "__fspath__"):
        path = path.__fspath__()
    if isinstance(path, bytes):
        return path.decode("utf-8", "surrogateescape")
    if not isinstance(path, str):
        raise TypeError(f"{path!r} is no path")
    return path


def _streams(name: str, answer: Any, field: Literal["stdouts", "stderrs"], count: int) -> list[StreamFile]:
    files = _paths(name, answer, field)
    missing = [rank for rank in range(count) if rank not in files]
    if missing:
        raise OptionError(f"--logs-specs {name!r}: the {field} of reify lack local rank {missing[0]}")
    shown = _paths(name, answer, f"tee_{field}")
    for rank, path in shown.items():
        if _file(path) is not None and files.get(rank) != path:
            raise OptionError(
                f"--logs-specs {name!r}: tee_{field} of reify must name files of {field}, but has {path!r} "
                f"for local rank {rank}"
            )
    return [
        StreamFile(_file(files[rank]), _file(shown.get(rank, "")) is not None, on_console=files[rank] == "")
        for rank in range(count)
    ]


def _file(path: str) -> str | None:
    return None if path in ("", "/dev/null") else path


def _filtered(name: str, answer: Any, field: str) -> str:
    path = getattr(answer, field, "")
    if not path:
        raise OptionError(f"--logs-specs {name!r}: reify has no {field}, leave out the words to look for")
    return _text(path)


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
    is_hidden = ours == Route()  # its rank is not in the list of global ranks
    return (
        ours if file.on_console else route(file.path, file.is_shown and not is_hidden, stream, kind, prefix)
    )
