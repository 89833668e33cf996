"""The variables that a plug-in of ``--logs-specs`` gets, and its answer as data; see `dsl.output.plugin`."""

from __future__ import annotations

from dsl._record import Record
from dsl.errors import OptionError
from dsl.lists import THREADS_VARIABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any, Literal

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
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
