"""The files of a tuning: results and descriptions of experiments, each whole or not there.

A folder that dsl has made, or found empty, holds a marker, and only such a one is ever emptied: of what an
earlier tuning has written, and of nothing else. The marker is locked as long as a tuning uses the folder.
"""

from __future__ import annotations

import fcntl
import os
from json import dumps, loads
from shutil import rmtree

from dsl.autotune.experiment import Result
from dsl.errors import AutotuningError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.autotune.experiment import Experiment

MARKER = ".dsl-autotuning"
RESULT = "result.json"
DESCRIPTION = "exp.json"
CONFIG = "ds_config.json"
OPTIMAL_CONFIG = "ds_config_optimal.json"
OPTIMAL_COMMAND = "cmd_optimal.txt"
SCRATCH = ".dsl-exp-"
"""Begin of the name of a folder that is being made or removed."""

TABLES = (OPTIMAL_CONFIG, OPTIMAL_COMMAND, "summary.txt", "summary.json", "summary.png")
"""What stands beside the folders of the experiments when a tuning has ended."""

TAIL_BYTES = 65536
"""Of the output of an experiment, as much is looked at."""

_KEPT = ("ok", "oom", "crash", "timeout", "no metric", "torn metric")
"""Outcomes that are known; an experiment that was stopped runs again."""


class Folders:
    """The two folders of a tuning, locked against another one. Close it, or let the process end."""

    def __init__(self, results_dir: str, exps_dir: str) -> None:
        """Make or take both.

        Raises:
            AutotuningError: one cannot be made, holds what dsl has not written, or is in use.
        """
        self.results_dir = os.path.abspath(results_dir)
        self.exps_dir = os.path.abspath(exps_dir)
        self._locks = [_claim("results_dir", self.results_dir)]
        try:
            if self.exps_dir != self.results_dir:
                self._locks.append(_claim("exps_dir", self.exps_dir))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others use the folders."""
        for fd in self._locks:
            os.close(fd)
        self._locks.clear()

    def is_finished(self) -> bool:
        """Whether the last tuning here came to its end."""
        return _read(f"{self.results_dir}/{MARKER}") == "finished\n"

    def mark(self, *, is_finished: bool) -> None:
        """Note whether the tuning has come to its end."""
        os.ftruncate(self._locks[0], 0)
        os.pwrite(self._locks[0], b"finished\n" if is_finished else b"unfinished\n", 0)

    def empty(self) -> None:
        """Remove what tunings have written, and nothing else.

        Raises:
            AutotuningError: something of it cannot be removed.
        """
        try:
            for entry in list(os.scandir(self.results_dir)):
                if entry.is_dir(follow_symlinks=False) and os.path.exists(f"{entry.path}/{DESCRIPTION}"):
                    rmtree(entry.path)
                    _remove(f"{self.exps_dir}/{entry.name}.json")
                elif entry.name.startswith(SCRATCH) and entry.is_dir(follow_symlinks=False):
                    rmtree(entry.path)
                elif entry.name in TABLES:
                    os.unlink(entry.path)
        except OSError as error:
            raise _refusal(error, error.filename or self.results_dir) from None

    def folder(self, experiment: Experiment) -> str:
        """Where the files of an experiment lie."""
        return f"{self.results_dir}/{experiment.name}"

    def written(self, experiment: Experiment) -> str:
        """The file that an experiment has to write."""
        name = "model_info.json" if experiment.kind == "profile" else "metrics.json"
        return f"{self.folder(experiment)}/{name}"

    def begin(
        self,
        experiment: Experiment,
        description: Mapping[str, object],
        exp: Mapping[str, object],
        command: str,
    ) -> None:
        """Write down an experiment before it runs. What an earlier one of its name has left is removed.

        ``description`` goes to the folder of descriptions, ``exp`` is the same with all that is known of the
        run, ``command`` a line for a shell.

        Raises:
            AutotuningError: the files cannot be written.
        """
        folder = self.folder(experiment)
        new, old = [f"{self.results_dir}/{SCRATCH}{word}-{experiment.name}" for word in ("new", "old")]
        try:
            for path in (new, old):
                if os.path.lexists(path):
                    rmtree(path)
            os.mkdir(new)
            write(f"{new}/{DESCRIPTION}", _json(exp))
            write(f"{new}/{CONFIG}", _json(description["ds_config"]))
            write(f"{new}/cmd.txt", command + "\n")
            write(f"{self.exps_dir}/{experiment.name}.json", _json(description))
            if os.path.lexists(folder):
                if not os.path.exists(f"{folder}/{DESCRIPTION}"):
                    raise AutotuningError(
                        f"{folder} is not of a tuning, move it away or name another results_dir"
                    )
                os.rename(folder, old)
                rmtree(old)
            os.rename(new, folder)
        except OSError as error:
            raise _refusal(error, error.filename or folder) from None

    def save(self, experiment: Experiment, fingerprint: str, result: Result) -> None:
        """Keep what became of an experiment. Raises AutotuningError if it cannot be written."""
        if result.outcome not in _KEPT:
            return
        known = {
            "fingerprint": fingerprint,
            "outcome": result.outcome,
            "metrics": dict(result.metrics),
            "reason": result.reason,
            "exit_code": result.exit_code,
            "elapsed_s": result.elapsed_s,
        }
        path = f"{self.folder(experiment)}/{RESULT}"
        try:
            write(path, _json(known))
        except OSError as error:
            raise _refusal(error, path) from None

    def load(self, experiment: Experiment, fingerprint: str) -> Result | None:
        """What became of an experiment of the same content; None: it has not run, or its end is not known."""
        text = _read(f"{self.folder(experiment)}/{RESULT}")
        try:
            known = loads(text or "null")
            if known["fingerprint"] != fingerprint or known["outcome"] not in _KEPT:
                return None
            return Result(
                known["outcome"],
                dict(known["metrics"]),
                known["reason"],
                known["exit_code"],
                known["elapsed_s"],
            )
        except (ValueError, TypeError, KeyError):
            return None

    def began(self, experiment: Experiment, fingerprint: str) -> bool:
        """Whether an experiment of the same content was begun here."""
        try:
            known = loads(_read(f"{self.folder(experiment)}/{DESCRIPTION}") or "null")
            return bool(known["fingerprint"] == fingerprint)
        except (ValueError, TypeError, KeyError):
            return False

    def text(self, experiment: Experiment) -> str | None:
        """What an experiment has written; None: nothing."""
        return _read(self.written(experiment))

    def tail(self, experiment: Experiment, stream: str) -> str:
        """The last part of its ``stdout`` or ``stderr``."""
        try:
            with open(f"{self.folder(experiment)}/{stream}.log", "rb") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
                return file.read(TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def save_optimal(self, config: Mapping[str, object], command: str) -> None:
        """Write the best config, and the command that trains with it. Raises AutotuningError."""
        try:
            write(f"{self.results_dir}/{OPTIMAL_CONFIG}", _json(config))
            write(f"{self.results_dir}/{OPTIMAL_COMMAND}", command + "\n")
        except OSError as error:
            raise _refusal(error, error.filename or self.results_dir) from None


def write(path: str, text: str) -> None:
    """Write a file that is whole or not there. Raises OSError."""
    scratch = f"{path}.new"
    try:
        with open(scratch, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.replace(scratch, path)
    except BaseException:
        _remove(scratch)
        raise


def _claim(name: str, path: str) -> int:
    """Make or take a folder, and lock its marker, whose descriptor this is."""
    marker = f"{path}/{MARKER}"
    try:
        os.makedirs(path, exist_ok=True)
        if not os.path.exists(marker) and os.listdir(path):
            raise AutotuningError(
                f"{path} holds files that no tuning has written, name another folder as autotuning.{name}"
            )
        fd = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise _refusal(error, path) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise AutotuningError(
            f"another command is tuning in {path}, wait for it or name another folder as autotuning.{name}"
        ) from None
    return fd


def _refusal(error: OSError, path: object) -> AutotuningError:
    return AutotuningError(f"cannot write {path}: {error.strerror}")


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def _json(value: object) -> str:
    return dumps(value, indent=2) + "\n"
