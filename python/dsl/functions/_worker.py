"""Runs a function for `dsl.functions.launcher`, as ``python _worker.py CALL RESULT LOCAL_RANK``.

This file stands alone: it imports nothing of dsl. `multiprocessing` imports the main module of the launching
program here, by the rules of its start method ``spawn``.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from typing import Any, BinaryIO

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
LOCAL_RANK_MACRO = "${local_rank}"
UNGUARDED = (
    "launches workers whenever it is imported, and every worker imports it: put that line under "
    "if __name__ == '__main__':"
)
"""What is wrong with a program that launches without a guard, behind its file and line. The launching program
says it once for all workers."""


def main(argv: Sequence[str]) -> None:
    """Read the call from one file, run it, and write its result to another file.

    If the function raises an exception, we record it where torch's ``@record`` would, show it on stderr, and
    exit with 1. A SystemExit keeps its exit code.
    """
    call_path, result_path, local_rank = argv
    try:
        _run(call_path, result_path, local_rank)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  whatever it is, it ends the worker
        error.__traceback__ = _without_our_frames(error.__traceback__)
        if not (_record(error) and one_line(error).endswith(UNGUARDED)):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _run(call_path: str, result_path: str, local_rank: str) -> None:
    _show_faults()
    result = None
    try:
        function, args = _read_call(call_path)
        result = _heard(function)(
            *[arg.replace(LOCAL_RANK_MACRO, local_rank) if type(arg) is str else arg for arg in args]
        )
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    with open_private(f"{result_path}.part") as file:
        try:
            dump(result, file)
        except Exception as error:  # noqa: BLE001  pickling runs code of the user
            raise TypeError(
                f"the result cannot be sent back: {one_line(error)}; return what can be pickled"
            ) from None
    os.replace(f"{result_path}.part", result_path)


def _read_call(path: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import pickle
    from multiprocessing import process, spawn

    current: Any = process.current_process()
    # As in a child of multiprocessing: a main module without a guard must not start workers from here.
    current._inheriting = True  # noqa: SLF001
    try:
        with open(path, "rb") as file:
            spawn.prepare(pickle.load(file))  # noqa: S301  written by our parent
            function, args = pickle.load(file)  # noqa: S301  as above
    finally:
        del current._inheriting  # noqa: SLF001
    return function, args


def _heard(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch's ``@record`` has it, if the site has an error handler of its own there.

    A site replaces ``get_error_handler`` of torch. If the call has imported no torch, nobody has.
    """
    errors: Any = sys.modules.get("torch.distributed.elastic.multiprocessing.errors")
    handler = None if errors is None else errors.get_error_handler()
    is_usual = errors is None or type(handler) is errors.ErrorHandler
    return function if is_usual else errors.record(function, handler)


def open_private(path: str) -> BinaryIO:
    """Open a new file for writing that only this user may read. Raises OSError if the file exists."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return open(fd, "w+b")


def dump(value: object, file: BinaryIO, *, by_value: bool = False) -> None:
    """Pickle into a file. If installed, cloudpickle does what pickle cannot do, and everything ``by_value``.

    Raises what pickle raises, which may be anything.
    """
    import pickle

    start = file.tell()
    try:
        if not (by_value and cloudpickle()):
            pickle.dump(value, file, pickle.HIGHEST_PROTOCOL)
            return
    except Exception:
        if not cloudpickle():
            raise
    file.seek(start)
    file.truncate()
    cloudpickle().dump(value, file)


def cloudpickle() -> Any:
    """The module cloudpickle, or None if it is not installed."""
    import importlib

    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return None


def one_line(error: BaseException) -> str:
    """The type and the text of an error in one line, even if the text cannot be made."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001  a class of the user
        text = "<its text cannot be shown>"
    return f"{type(error).__name__}: {text}"


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _record(error: BaseException) -> bool:
    """Write the record that torch's ``@record`` writes (torch 2.15), unless there already is one.

    Returns whether it was written.
    """
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path or os.path.lexists(path):
        return False
    import json
    import time
    import traceback

    stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  a class of the user
        text = one_line(error)
    extra = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    part = f"{path}.{os.getpid()}"
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
        os.replace(part, path)
    except OSError:
        return False
    return True


def _show_faults() -> None:
    """Let a worker that dies of a fault show where, as torch's workers do."""
    import faulthandler

    try:
        faulthandler.enable()
    except (AttributeError, OSError, RuntimeError, ValueError):
        return  # there is no stderr


if __name__ == "__main__":
    # The directory of this file holds modules with common names, which no import should find.
    if sys.path and os.path.abspath(sys.path[0]) == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    main(sys.argv[1:])
