"""What is launched from Python to compare with torch: configs, entrypoints and arguments, and what came of them.

The functions run in workers, which import this module: it imports little.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock


def add(first: int, second: int) -> int:
    return first + second + int(os.environ["RANK"])


def echo(*args: Any) -> tuple[Any, ...]:
    return args


def fail(how: str) -> None:
    """End as a word says."""
    if how == "raise":
        raise ValueError("on purpose")
    if how == "kill":
        signal.raise_signal(signal.SIGKILL)
    if how == "leave":
        os._exit(5)
    sys.exit({"zero": 0, "none": None, "three": 3}.get(how, how))


def fail_in_rank_0() -> None:
    """The other rank waits to be stopped."""
    if os.environ["RANK"] == "0":
        raise ValueError("on purpose")
    signal.pause()


def count_restarts() -> str:
    """Fail in the first life."""
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if count == "0":
        sys.exit(3)
    return count


def make_lock(*_: Any) -> Any:
    return threading.Lock()


SCRIPT = ("-S", "-c")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (add, echo, fail, fail_in_rank_0, count_restarts, make_lock)
}
BASE = {
    "min_nodes": 1,
    "max_nodes": 1,
    "nproc_per_node": 1,
    "max_restarts": 0,
    "run_id": "job",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": "localhost:0",
}
TWO_NODES = {"max_nodes": 2, "rdzv_configs": {"last_call_timeout": 1}}
"""Fields of a job of two nodes; the second node never comes."""
STATIC = {"rdzv_backend": "static", "rdzv_configs": {"rank": 0}}
ADD = ("add", (1, 2))
HAS_7_AND_NONE = "import sys; sys.exit(sys.argv[1:] != ['7', 'None'])"

# name: (fields of the config, entrypoint, arguments). A word with `=` in front is a program, `{python}` the interpreter,
# `{folder}` an empty folder but for what `prepare` puts there. `log_dir` is torch's DefaultLogsSpecs.
CASES: dict[str, tuple[dict[str, Any], Any, tuple[Any, ...]]] = {
    "a function": ({"nproc_per_node": 2}, *ADD),
    "arguments": ({}, "echo", (1, "a b", "${local_rank}", "$$", "$x", None)),
    "a program": ({"nproc_per_node": 2}, "={python}", (*SCRIPT, "pass")),
    "a program gets text": ({}, "={python}", (*SCRIPT, HAS_7_AND_NONE, 7, None)),
    "a program that fails": ({}, "={python}", (*SCRIPT, "raise SystemExit(3)")),
    "a program that is not on PATH": ({}, "=dsl-no-such-program", ()),
    "a program on a path that is not there": ({}, "={folder}/nosuch", ()),
    "a program that may not be executed": ({}, "={folder}/plain", ()),
    "a program that is a folder": ({}, "={folder}", ()),
    "a program without an interpreter": ({}, "={folder}/headless", ()),
    "a program without a name": ({}, "=", ()),
    "no entrypoint": ({}, None, ()),
    "an entrypoint that is a number": ({}, 5, ()),
    "a function that raises": ({}, "fail", ("raise",)),
    "a function that exits with 3": ({}, "fail", ("three",)),
    "a function that exits with a text": ({}, "fail", ("a text",)),
    "a function that exits with 0": ({}, "fail", ("zero",)),
    "a function that exits with None": ({}, "fail", ("none",)),
    "a function that is killed": ({}, "fail", ("kill",)),
    "a function that leaves with 5": ({}, "fail", ("leave",)),
    "a function of which one rank fails": ({"nproc_per_node": 2}, "fail_in_rank_0", ()),
    "a restart": ({"max_restarts": 1}, "count_restarts", ()),
    "a function that cannot be pickled": ({}, "lambda", ()),
    "an argument that cannot be pickled": ({}, "echo", ("lock",)),
    "a result that cannot be pickled": ({}, "make_lock", ()),
    "a log_dir that is new": ({"log_dir": "{folder}/a/b"}, *ADD),
    "a log_dir that is a file": ({"log_dir": "{folder}/plain"}, *ADD),
    "a log_dir in a file": ({"log_dir": "{folder}/plain/logs"}, *ADD),
    "no run_id": ({"run_id": ""}, *ADD),
    "no run_id, two nodes": ({"run_id": "", **TWO_NODES}, *ADD),
    "two nodes, of which one comes": (TWO_NODES, *ADD),
    "a static endpoint": ({**STATIC, "rdzv_endpoint": "localhost:{port}"}, *ADD),
    "a static endpoint without a host": ({"rdzv_backend": "static", "rdzv_endpoint": ""}, *ADD),
    "a static endpoint without a port": ({**STATIC, "rdzv_endpoint": "localhost"}, *ADD),
    "a backend that nobody knows": ({"rdzv_backend": "nosuch"}, *ADD),
    "two nodes and a backend that nobody knows": ({"rdzv_backend": "nosuch", "max_nodes": 2}, *ADD),
    "more nodes at least than at most": ({"min_nodes": 2}, *ADD),
    "no node": ({"min_nodes": 0}, *ADD),
    "no worker": ({"nproc_per_node": 0}, *ADD),
    "less than no restart": ({"max_restarts": -1}, *ADD),
    "an interval of none": ({"monitor_interval": 0}, *ADD),
    "a start method that nobody knows": ({"start_method": "thread"}, *ADD),
    "a timeout below 0": ({"shutdown_timeout": -1}, *ADD),
    "a timeout of the environment that is no number": (
        {"environ": {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}},
        *ADD,
    ),
    "a signal that cannot be handled": ({"signals_to_handle": "SIGKILL"}, *ADD),
    "a signal that is none": ({"signals_to_handle": "SIGFOO"}, *ADD),
    "a field that there is not": ({"nosuch": 1}, *ADD),
}


def observe(
    name: str,
    make_config: Callable[[dict[str, Any]], Any],
    launch: Callable[[Any, Any, list[Any]], dict[int, Any]],
    child_failed: type[Any],
    folder: Path,
) -> dict[str, Any]:
    """Launch a case: its ``results``, or what it ``raises`` and where; and whether somebody was ``warned``.

    ``child_failed`` is the class of errors that have ``failures``.
    """
    fields, entrypoint, args = CASES[name]
    _prepare(folder)
    fields = _fill({**BASE, **fields}, folder)
    environ = fields.pop("environ", {})
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(one) for one in ("dsl", "torch.distributed.launcher.api")]
    found: dict[str, Any] = {"at": "config"}
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with mock.patch.dict(os.environ, environ):
            config = make_config(fields)
            found["at"] = "launch"
            results = launch(config, _entrypoint(entrypoint, folder), [_argument(arg) for arg in args])
        found = {"results": {str(rank): _shown(result) for rank, result in results.items()}}
        if not fields["run_id"]:
            found["run_id"] = "made up" if config.run_id else "none"
            found["warned"] = any("run_id" in line for line in lines)
    except Exception as error:  # noqa: BLE001  whatever it raises is the answer
        found["raises"] = [
            kind.__name__
            for kind in type(error).__mro__
            if kind.__module__ == "builtins" or kind is child_failed
        ][:-3]
        if isinstance(error, child_failed):
            found["name"] = error.name.replace(str(folder), "FOLDER")
            found["failures"] = {
                str(rank): [
                    one.exitcode,
                    one.local_rank,
                    type(one.message).__name__,
                    one.error_file != "<N/A>",
                ]
                for rank, one in sorted(error.failures.items())
            }
            found["first"] = error.get_first_failure()[0]
        else:
            found["says"] = str(error).replace(str(folder), "FOLDER").split("\n")[0]
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    return found


def _prepare(folder: Path) -> None:
    (folder / "plain").write_text("no program")
    (folder / "headless").write_text("no program")
    (folder / "headless").chmod(0o755)


def _fill(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _fill(one, folder) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    if "{port}" in value:
        import socket

        with socket.socket() as free:
            free.bind(("localhost", 0))
            value = value.replace("{port}", str(free.getsockname()[1]))
    return value.replace("{folder}", str(folder)).replace("{python}", sys.executable)


def _entrypoint(word: Any, folder: Path) -> Any:
    if word == "lambda":
        return lambda: None
    if isinstance(word, str) and word.startswith("="):
        return _fill(word[1:], folder)
    return FUNCTIONS.get(word, word)


def _argument(value: Any) -> Any:
    return threading.Lock() if value == "lock" else value


def _shown(result: Any) -> Any:
    return list(result) if isinstance(result, tuple) else result
