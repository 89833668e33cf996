"""``--logs-specs NAME``: a plug-in says where the output and the error files of the workers go.

The contract is torchrun's. NAME is an entry point of the group ``torchrun.logs_specs``. It is called once,
with ``log_dir``, ``redirects``, ``tee`` and ``local_ranks_filter``; what it returns has a method ``reify``.
Before each attempt that gets the variables of each worker by local rank, which it may change, and answers
with mappings from local rank to path,

* ``stdouts`` and ``stderrs``: the file of the stream; empty for the console,
* ``tee_stdouts`` and ``tee_stderrs``: the same file, for streams that the console shows as well,
* ``error_files``: where the worker leaves an account of its end,

and with the paths ``filtered_stdout`` and ``filtered_stderr``, for lines with words that the user looks for.
The plug-in makes the directories. Files are appended to, as all of ours are; torchrun truncates them.

We never import torch: stream maps are made of its ``Std`` if the plug-in has imported it, else of flags with
the same names and values. As the command forks before the workers start, threads of a plug-in stay behind in
the process that waits for the job. They block every signal, as do programs that a plug-in starts.
"""

from __future__ import annotations

import os

from dsl import _own_process
from dsl._record import record, replace
from dsl.errors import OptionError
from dsl.model import INHERIT, Route

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Literal, TypeVar

    from dsl.model import LineFile, NodePlan, OutputRequest, WorkerPlan
    from dsl.output.routes import Console, Kind

    _T = TypeVar("_T")

GROUP = "torchrun.logs_specs"
ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
TORCH_MODULE = "torch.distributed.elastic.multiprocessing.api"
VARIABLES = (
    "GROUP_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "OMP_NUM_THREADS",
)
"""What torchrun tells a plug-in of all workers alike, as far as it is set."""


class LogsPlugin:
    """A plug-in that has been loaded, by the name that the user gave it. It lasts for all attempts."""

    def __init__(self, name: str, specs: Any) -> None:
        """``specs``: an object with torch's ``reify``."""
        self.name = name
        self._specs = specs

    def ask(self, envs: dict[int, dict[str, str]]) -> Any:
        """Its answer for one attempt. Raises OptionError with what it raises."""
        return _guarded(self.name, "reify", lambda: self._specs.reify(envs))


@record
class _Streams:
    """What a plug-in says of one output stream: the file of each local rank, and which are shown as well."""

    files: Mapping[int, str]
    shown: Mapping[int, str]


def load_plugin(name: str, request: OutputRequest) -> LogsPlugin:
    """Import the plug-in of that name and construct it with what the user asked for.

    Raises:
        OptionError: there is none, it cannot be loaded or constructed, or the user's stream maps or list of
            local ranks are malformed.
    """
    from dsl.output.folders import parse_local_ranks

    ranks = set(parse_local_ranks(request.local_ranks)) if request.local_ranks else None
    redirects = _stream_map(request.redirects, "--redirects")
    tee = _stream_map(request.tee, "--tee")
    entry = _entry_point(name)
    _own_process.restore()
    specs = _guarded(name, entry.value, entry.load)
    flags = _stream_flags()

    def construct() -> Any:
        return specs(
            log_dir=request.log_dir, redirects=redirects(flags), tee=tee(flags), local_ranks_filter=ranks
        )

    return LogsPlugin(name, _guarded(name, entry.value, construct))


def without_files(request: OutputRequest) -> OutputRequest:
    """The request for the output that a plug-in leaves to us: all of it on the console, in no file."""
    return replace(request, log_dir=None, redirects="", tee="", local_ranks="")


def plan_with_plugin(plugin: LogsPlugin, plan: NodePlan, console: Console) -> NodePlan:
    """The plan of one attempt with the files that the plug-in wants.

    ``plan`` is made for `without_files` of the request: its routes stay where the plug-in names the console.
    ``console`` is what the command's own streams are.

    Raises:
        OptionError: the plug-in raises, or its answer is not as it must be.
    """
    before = {worker.local_rank: _variables(plan.env, worker.env) for worker in plan.workers}
    envs = {local_rank: dict(env) for local_rank, env in before.items()}
    answer = plugin.ask(envs)
    stdout = _streams(plugin.name, answer, "stdouts", len(before))
    stderr = _streams(plugin.name, answer, "stderrs", len(before))
    error_files = _paths(plugin.name, answer, "error_files")
    workers = []
    for worker in plan.workers:
        local_rank = worker.local_rank
        error_file = _file(error_files.get(local_rank, ""))
        changes = _changes(plugin.name, envs[local_rank], before[local_rank])
        changes.setdefault(ERROR_FILE_VARIABLE, error_file or "")
        workers.append(
            replace(
                worker,
                env={**worker.env, **changes},
                stdout=_route(worker, stdout, 1, console.stdout),
                stderr=_route(worker, stderr, 2, console.stderr),
                error_file=error_file,
            )
        )
    return replace(
        plan,
        workers=tuple(workers),
        log_dir=None,
        run_dirs=(),
        line_files=tuple([_line_file(plugin.name, answer, one) for one in plan.line_files]),
    )


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
    """Call the plug-in's code. Its threads, such as those that importing torch starts, block every signal.

    A signal to the job would else reach one of them and end the command, which takes signals in its own way.
    """
    import signal

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
    """From 0, 1, 2 or 3 to the flags that a plug-in expects."""
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
    """Makes flags for all local ranks, or by local rank if the user gave a list."""
    from dsl.output.folders import parse_streams

    streams = parse_streams(text or "0", option)
    if ":" not in text:
        return lambda flags: flags(streams(0))
    ranks = [int(item.partition(":")[0]) for item in text.split(",")]
    return lambda flags: {rank: flags(streams(rank)) for rank in ranks}


def _variables(env: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    variables = {name: env[name] for name in VARIABLES if name in env}
    variables.update(own)
    variables.pop(ERROR_FILE_VARIABLE, None)
    return variables


def _changes(name: str, env: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    changes = {variable: value for variable, value in env.items() if before.get(variable) != value}
    for variable, value in changes.items():
        if not isinstance(value, str):
            raise OptionError(f"--logs-specs {name!r}: reify set {variable} to {value!r}, which is no text")
    return changes


def _paths(name: str, answer: Any, field: str) -> dict[int, str]:
    """A mapping of the plug-in's answer, from local rank to path."""
    try:
        return {int(rank): os.fsdecode(path) for rank, path in getattr(answer, field).items()}
    except (AttributeError, TypeError, ValueError):
        found = getattr(answer, field, None)
        raise OptionError(
            f"--logs-specs {name!r}: the {field} of reify must map local ranks to paths, got {found!r:.80}"
        ) from None


def _streams(name: str, answer: Any, field: Literal["stdouts", "stderrs"], count: int) -> _Streams:
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
    return _Streams(files, shown)


def _file(path: str) -> str | None:
    return None if path in ("", os.devnull) else path


def _route(worker: WorkerPlan, streams: _Streams, stream: Literal[1, 2], kind: Kind) -> Route:
    path = streams.files[worker.local_rank]
    if path == "":
        return (worker.stdout if stream == 1 else worker.stderr) or INHERIT
    is_shown = _file(streams.shown.get(worker.local_rank, "")) is not None and kind != "null"
    if not is_shown:
        return Route(_file(path))
    return Route(path, console=stream, terminal=kind == "terminal")


def _line_file(name: str, answer: Any, line_file: LineFile) -> LineFile:
    stream, _, words = line_file
    field = "filtered_stdout" if stream == 1 else "filtered_stderr"
    path = getattr(answer, field, "")
    if not path:
        raise OptionError(f"--logs-specs {name!r}: reify has no {field}, leave out the words to look for")
    return stream, os.fsdecode(path), words
