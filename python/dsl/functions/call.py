"""Sends a function to the workers and reads its results, through files that only this user may read."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

from dsl._record import replace
from dsl.errors import DslError, UsageError
from dsl.functions import _worker
from dsl.functions.errors import ChildFailedError
from dsl.model.job import NodePlan
from dsl.plan.worker import CALL_FILE, RESULT_FILE, WORKER_FILE

WORKER_PATH = os.path.abspath(_worker.__file__)


class EntrypointError(UsageError, TypeError):
    """The function or an argument cannot be sent to a worker, or the entrypoint cannot be started."""


class ResultError(DslError):
    """A worker ended well, but its result is missing or cannot be read here."""


class Call:
    """A function and its arguments for the workers of the run whose directory is ``run_dir``."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], run_dir: str) -> None:
        self.function = function
        self.args = args
        self.run_dir = run_dir
        # A restart needs the source, and the package may be removed before that.
        with open(_worker.__file__, "rb") as file:
            self._worker_source = file.read()

    def write(self) -> None:
        """Write the call to the file where the workers look for it.

        Raises:
            EntrypointError: the function or an argument cannot be pickled.
            DslError: the file cannot be written.
        """
        preparation, knows_main = _preparation()
        module = getattr(_inner(self.function), "__module__", None)
        if not knows_main and not _worker.cloudpickle() and module == "__main__":
            raise EntrypointError(
                f"{entrypoint_name(self.function)} is defined in a program that the workers cannot import; "
                "move it to a module, or install cloudpickle"
            )
        path = f"{self.run_dir}/{CALL_FILE}"
        try:
            with _worker.open_private(path) as file:
                pickle.dump(preparation, file, pickle.HIGHEST_PROTOCOL)
                self._dump(file, by_value=not knows_main)
        except OSError as error:
            raise DslError(f"cannot write {path}: {error.strerror}") from None

    def is_written(self) -> bool:
        """Whether the file of the call still exists: a directory for temporary files may be cleaned."""
        return os.path.exists(f"{self.run_dir}/{CALL_FILE}")

    def with_worker(self, plan: NodePlan) -> NodePlan:
        """The plan with a worker program that exists: our own, else a copy beside the call.

        Raises:
            DslError: the copy cannot be written.
        """
        if os.path.exists(WORKER_PATH):
            return plan
        path = f"{self.run_dir}/{WORKER_FILE}"
        try:
            if not os.path.exists(path):
                with _worker.open_private(path) as file:
                    file.write(self._worker_source)
        except OSError as error:
            raise DslError(f"cannot write {path}: {error.strerror}") from None
        workers = [
            replace(worker, argv=tuple([path if word == WORKER_PATH else word for word in worker.argv]))
            for worker in plan.workers
        ]
        return replace(plan, workers=tuple(workers))

    def _dump(self, file: Any, *, by_value: bool) -> None:
        try:
            _worker.dump((self.function, self.args), file, by_value=by_value)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  pickling runs code of the user
            culprit, is_function = self._culprit()
            mend = "define it at the top level of a module" if is_function else "pass what can be pickled"
            mend += "" if _worker.cloudpickle() else ", or install cloudpickle"
            raise EntrypointError(
                f"{culprit} cannot be sent to the workers: {_worker.one_line(error)}; {mend}"
            ) from None

    def _culprit(self) -> tuple[str, bool]:
        name = entrypoint_name(self.function)
        for position, value in enumerate((self.function, *self.args)):
            try:
                pickle.dumps(value)
            except Exception:  # noqa: BLE001  as above
                return (f"argument {position} of {name}", False) if position else (name, True)
        return f"the call of {name}", False

    def result(self, attempt: int, local_rank: int, rank: int) -> Any:
        """What the function returned in one worker.

        Raises:
            ResultError: there is no result, or it cannot be unpickled.
        """
        try:
            with open(self._result_path(attempt, local_rank), "rb") as file:
                return pickle.load(file)  # noqa: S301  written by our own worker
        except FileNotFoundError:
            raise ResultError(
                f"rank {rank} of {entrypoint_name(self.function)} ended with exit code 0 before the function "
                "had returned, so there is no result"
            ) from None
        except Exception as error:
            raise ResultError(
                f"the result of rank {rank} of {entrypoint_name(self.function)} cannot be read here: "
                f"{_worker.one_line(error)}"
            ) from error

    def remove(self, last_attempt: int, count: int) -> None:
        """Remove the files. ``count``: number of workers in each attempt."""
        results = [
            self._result_path(attempt, local_rank)
            for attempt in range(last_attempt + 1)
            for local_rank in range(count)
        ]
        passed = [f"{self.run_dir}/{name}" for name in (CALL_FILE, WORKER_FILE)]
        for path in (*passed, *results, *[f"{path}.part" for path in results]):
            try:
                os.unlink(path)
            except OSError:
                continue  # it was never written

    def _result_path(self, attempt: int, local_rank: int) -> str:
        return f"{self.run_dir}/attempt_{attempt}/{local_rank}/{RESULT_FILE}"


def interpreter_words() -> tuple[str, ...]:
    """The first words of the command of a worker that runs a call; the plan adds the worker's files.

    Raises:
        DslError: the interpreter of this program is unknown.
    """
    from multiprocessing import spawn
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]

    executable = spawn.get_executable()
    if not executable:
        raise DslError("the Python interpreter is unknown, name it with multiprocessing.set_executable")
    flags = [flag for flag in _args_from_interpreter_flags() if flag != "-u"]
    return (os.fsdecode(executable), *flags, "-u", WORKER_PATH)


def entrypoint_name(entrypoint: object) -> str:
    """The name of a function or another callable."""
    return str(getattr(_inner(entrypoint), "__name__", type(entrypoint).__name__))


def source_of(entrypoint: object) -> str:
    """The file of a function's module, whose imports the workers will need; empty if there is none."""
    module = sys.modules.get(getattr(_inner(entrypoint), "__module__", None) or "")
    path = getattr(module, "__file__", None) or ""
    return os.path.abspath(path) if path.endswith(".py") else ""


def refuse_while_importing() -> None:
    """Raise if this process is a worker, or a child of multiprocessing, that imports the main program.

    Raises:
        EntrypointError: the call is not under ``if __name__ == "__main__":``, so each worker would start
            workers.
    """
    from multiprocessing import process

    if not getattr(process.current_process(), "_inheriting", False):
        return
    line, place = sys._getframe(), "the main program"  # noqa: SLF001  no other call gives line and module
    while line.f_back is not None:
        line = line.f_back
        if line.f_code.co_name == "<module>" and line.f_globals.get("__name__") == "__mp_main__":
            place = f"{line.f_code.co_filename}:{line.f_lineno}"
    raise EntrypointError(f"{place} {_worker.UNGUARDED}")


def unguarded(error: ChildFailedError) -> EntrypointError | None:
    """What a worker has recorded if it failed by `refuse_while_importing`, and has not shown itself."""
    for one in error.failures.values():
        said = one.failure.recorded.message if one.failure.recorded is not None else ""
        if said.endswith(_worker.UNGUARDED):
            return EntrypointError(said.partition(": ")[2])
    return None


def _preparation() -> tuple[dict[str, Any], bool]:
    """The data for `multiprocessing.spawn.prepare` in a worker, and whether it can import the main module.

    We do not call `multiprocessing.spawn.get_preparation_data`: it fixes the start method of this process.
    """
    from multiprocessing import process

    main = sys.modules["__main__"]
    data: dict[str, Any] = {
        "authkey": bytes(process.current_process().authkey),
        "sys_path": [os.fspath(entry) for entry in sys.path],
        "sys_argv": list(sys.argv),
    }
    with contextlib.suppress(FileNotFoundError):  # it was removed
        data["dir"] = os.getcwd()
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    if name is not None:
        data["init_main_from_name"] = name
        return data, name.rpartition(".")[2] != "__main__"
    if path is not None and os.path.isfile(path):
        data["init_main_from_path"] = os.path.abspath(path)
        return data, True
    return data, False


def _inner(entrypoint: object) -> object:
    return getattr(entrypoint, "func", entrypoint)  # functools.partial
