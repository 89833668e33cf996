"""The files of a tuning: results and descriptions of experiments, each whole or not there.

A folder that dsl has made, or found empty, holds a marker, and only such a one is ever emptied: of what an
earlier tuning has written, and of nothing else. The marker is locked as long as a tuning uses the folder.

An experiment of another content keeps its files when its name is wanted: they move to ``NAME@`` with the
begin of its fingerprint, and back when it is asked for again.
"""

from __future__ import annotations

import os
from contextlib import suppress
from shutil import rmtree

from dsl._record import record
from dsl.autotune.experiment import Result
from dsl.autotune.files import MARKER, as_json, check, claim, clear, read, read_object, refusal, remove, write
from dsl.autotune.section import AUTOTUNING
from dsl.errors import AutotuningError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.autotune.experiment import Experiment

RESULT = "result.json"
DESCRIPTION = "exp.json"
CONFIG = "ds_config.json"
OPTIMAL_CONFIG = "ds_config_optimal.json"
OPTIMAL_COMMAND = "cmd_optimal.txt"
SCRATCH = ".dsl-exp-"
"""Begin of the name of a folder that is being made or removed."""

TABLES = (OPTIMAL_CONFIG, OPTIMAL_COMMAND, "summary.txt", "summary.json", "summary.png")
"""What stands beside the folders of the experiments when a tuning has ended."""

PATH_KEYS = {"run": "metric_path", "profile": "model_info_path"}
"""Where the section names the file that an experiment has to write."""

PAUSED = "paused"
"""A file beside those of a run that has stood still: what it measures of time is wrong."""

TAIL_BYTES = 65536
"""Of the output of an experiment, as much is looked at."""

_KEPT = ("ok", "oom", "crash", "timeout", "no metric", "torn metric")
"""Outcomes that are known; an experiment that was stopped runs again."""

_ASIDE = "@"
"""Behind the name of an experiment whose folder has made room. No name of an experiment has it."""

_ASIDE_LETTERS = 8


@record
class _Mark:
    """What the marker of the results says of the last tuning."""

    state: str
    """``finished`` or ``unfinished``; empty: there was none."""
    round: int
    """How often all has failed before and is tried again."""
    memory: tuple[str, ...]
    """A word for what was tuned, and how many bytes of a device were free then, if known; or nothing."""


class Folders:
    """The two folders of a tuning, locked against another one. Close it, or let the process end."""

    def __init__(self, results_dir: str, exps_dir: str) -> None:
        """Make or take both. ``~`` is the home of the user: no shell has seen the words.

        Raises:
            AutotuningError: one cannot be made, holds what dsl has not written, or is in use.
        """
        try:
            self.results_dir = os.path.abspath(os.path.expanduser(results_dir))
            self.exps_dir = os.path.abspath(os.path.expanduser(exps_dir))
        except OSError as error:  # the working directory is gone
            raise refusal(error, results_dir) from None
        paths = {self.exps_dir: "exps_dir", self.results_dir: "results_dir"}
        for path, name in paths.items():  # before one is made, which may lie in the other
            check(name, path)
        self._locks: dict[str, int] = {}
        try:
            for path, name in paths.items():
                self._locks[path] = claim(name, path)
        except BaseException:
            self.close()
            raise
        self._token = os.urandom(4).hex()
        mark = self._mark()
        self._round, self._memory = mark.round, mark.memory
        # Where no experiment ran well, the next tuning tries again what failed.
        if mark.state == "finished" and not os.path.exists(f"{self.results_dir}/{OPTIMAL_CONFIG}"):
            self._round += 1
            self._memory = ()

    def close(self) -> None:
        """Let others use the folders."""
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()

    def is_finished(self) -> bool:
        """Whether the last tuning here came to its end."""
        return self._mark().state == "finished"

    def keep_memory(self, tuning: str, memory_bytes: int | None) -> int | None:
        """The bytes of a device with which a tuning decides: those with which it began.

        Other programs come and go, and with other bytes the search would try other micro batches. A tuning in
        which nothing ran well begins anew. Kept when the folder is marked.

        ``tuning``: a word for what is tuned; ``memory_bytes``: how many are free now, None if nobody knows.
        """
        if self._memory[:1] != (tuning,):
            self._memory = (tuning, *(() if memory_bytes is None else (str(memory_bytes),)))
        return int(self._memory[1]) if len(self._memory) > 1 else None

    def mark(self, *, is_finished: bool) -> None:
        """Note whether the tuning has come to its end. Raises AutotuningError if it cannot be written."""
        words = ("finished" if is_finished else "unfinished", str(self._round), *self._memory)
        line = f"{' '.join(words)}\n".encode()
        fd = self._locks[self.results_dir]
        try:
            os.pwrite(fd, line, 0)  # first: a full disk has room for what was there
            os.ftruncate(fd, len(line))
        except OSError as error:
            raise refusal(error, f"{self.results_dir}/{MARKER}") from None

    def empty(self) -> None:
        """Remove what tunings have written, and nothing else.

        Raises:
            AutotuningError: something of it cannot be removed.
        """
        self._memory = ()
        try:
            for entry in list(os.scandir(self.results_dir)):
                if made := _made(entry.path):
                    # Half of a folder would be nobody's: a command that is killed meanwhile leaves none.
                    old = f"{self.results_dir}/{SCRATCH}old-{entry.name}"
                    clear(old)
                    os.rename(entry.path, old)
                    rmtree(old)
                    description = f"{self.exps_dir}/{entry.name}.json"
                    if read_object(description).get("name") == made[0]:
                        remove(description)
                elif entry.name.startswith(SCRATCH) and entry.is_dir(follow_symlinks=False):
                    clear(entry.path)
                elif entry.name in TABLES:
                    os.unlink(entry.path)
        except OSError as error:
            raise refusal(error, error.filename or self.results_dir) from None

    def folder(self, experiment: Experiment) -> str:
        """Where the files of an experiment lie."""
        return f"{self.results_dir}/{experiment.name}"

    def written(self, experiment: Experiment) -> str:
        """The file that an experiment has to write.

        Its name is of this command alone. A run of a command that was killed may live on for its grace
        period: what it writes is taken for nobody else's.
        """
        stem, ending = os.path.splitext(self._kept(experiment))
        return f"{stem}-{self._token}{ending}"

    def begin(
        self,
        experiment: Experiment,
        description: Mapping[str, object],
        exp: Mapping[str, object],
        command: str,
    ) -> None:
        """Write down an experiment before it runs.

        What an earlier run of the same content has left is removed, one of another content is put aside.

        ``description`` goes to the folder of descriptions, ``exp`` is the same with all that is known of the
        run, ``command`` a line for a shell.

        Raises:
            AutotuningError: the files cannot be written, or something of others has their names.
        """
        folder, described = self.folder(experiment), f"{self.exps_dir}/{experiment.name}.json"
        new, old = [f"{self.results_dir}/{SCRATCH}{word}-{experiment.name}" for word in ("new", "old")]
        made = self._made_here(experiment)
        if os.path.lexists(described) and read_object(described).get("name") != experiment.name:
            raise _not_ours(described, "exps_dir")
        try:
            for path in (new, old):
                clear(path)
            if made and made[1] != exp["fingerprint"]:
                self._put_aside(*made)
                made = None
            os.mkdir(new)
            write(f"{new}/{DESCRIPTION}", as_json(exp))
            write(f"{new}/{CONFIG}", as_json(description["ds_config"]))
            write(f"{new}/cmd.txt", command + "\n")
            write(described, as_json(description))
            if made:
                os.rename(folder, old)
                rmtree(old)
            os.rename(new, folder)
        except OSError as error:
            raise refusal(error, error.filename or folder) from None

    def save(self, experiment: Experiment, fingerprint: str, result: Result) -> None:
        """Keep what became of an experiment. Raises AutotuningError if it cannot be written."""
        if result.outcome not in _KEPT:
            return
        known = {
            "fingerprint": fingerprint,
            "round": self._round,
            "outcome": result.outcome,
            "metrics": dict(result.metrics),
            "reason": result.reason,
            "exit_code": result.exit_code,
            "elapsed_s": result.elapsed_s,
        }
        path = f"{self.folder(experiment)}/{RESULT}"
        try:
            write(path, as_json(known))
        except OSError as error:
            raise refusal(error, path) from None

    def load(self, experiment: Experiment, fingerprint: str) -> Result | None:
        """What became of an experiment of the same content; None: it has not run, or has to run again.

        Raises:
            AutotuningError: its files were put aside and cannot come back.
        """
        self._bring_back(experiment, fingerprint)
        known = read_object(f"{self.folder(experiment)}/{RESULT}")
        try:
            outcome = known["outcome"]
            if known["fingerprint"] != fingerprint or outcome not in _KEPT:
                return None
            if outcome != "ok" and known.get("round", 0) != self._round:
                return None
            return Result(
                outcome,
                dict(known["metrics"]),
                known["reason"],
                known["exit_code"],
                known["elapsed_s"],
            )
        except (ValueError, TypeError, KeyError):
            return None

    def text(self, experiment: Experiment) -> str | None:
        """What an experiment has written; None: nothing."""
        return self._take(experiment, self.written(experiment))

    def left(self, experiment: Experiment, fingerprint: str) -> str | None:
        """What a run of the same content has written whose end nobody has noted; None: nothing."""
        folder = self.folder(experiment)
        exp = read_object(f"{folder}/{DESCRIPTION}")
        is_known = os.path.exists(f"{folder}/{RESULT}") or os.path.exists(f"{folder}/{PAUSED}")
        if exp.get("fingerprint") != fingerprint or is_known:
            return None
        try:
            path = exp["ds_config"][AUTOTUNING][PATH_KEYS[experiment.kind]]
            return self._take(experiment, f"{folder}/{os.path.basename(path)}")
        except (KeyError, TypeError):
            return None

    def distrust(self, experiment: Experiment) -> None:
        """What the run of an experiment will have written counts only if its end is noted."""
        with suppress(OSError):  # a full disk costs a run less than a tuning
            write(f"{self.folder(experiment)}/{PAUSED}", "")

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
            write(f"{self.results_dir}/{OPTIMAL_CONFIG}", as_json(config))
            write(f"{self.results_dir}/{OPTIMAL_COMMAND}", command + "\n")
        except OSError as error:
            raise refusal(error, error.filename or self.results_dir) from None

    def forget_optimal(self) -> None:
        """Remove what an earlier tuning has found, as this one has found nothing. Raises AutotuningError."""
        for name in (OPTIMAL_CONFIG, OPTIMAL_COMMAND):
            try:
                os.unlink(f"{self.results_dir}/{name}")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise refusal(error, f"{self.results_dir}/{name}") from None

    def _kept(self, experiment: Experiment) -> str:
        """Where the file of an experiment lies when it has ended."""
        return f"{self.folder(experiment)}/{'model_info' if experiment.kind == 'profile' else 'metrics'}.json"

    def _take(self, experiment: Experiment, written: str) -> str | None:
        kept = self._kept(experiment)
        with suppress(OSError):  # it has written nothing
            os.replace(written, kept)
        return read(kept)

    def _mark(self) -> _Mark:
        """What the marker says."""
        words = (read(f"{self.results_dir}/{MARKER}") or "").split()
        state, count = (*words, "", "")[:2]
        memory = tuple(words[2:4])
        return _Mark(
            state, int(count) if _is_count(count) else 0, memory if all(map(_is_count, memory[1:])) else ()
        )

    def _made_here(self, experiment: Experiment) -> tuple[str, str] | None:
        """Name and fingerprint of what has the name of an experiment; None: nothing has."""
        folder = self.folder(experiment)
        made = _made(folder)
        if os.path.lexists(folder) and (made is None or made[0] != experiment.name):
            raise _not_ours(folder, "results_dir")
        return made

    def _put_aside(self, name: str, fingerprint: str) -> None:
        """Let the files of an experiment make room for another one of its name. Raises OSError."""
        aside = f"{name}{_ASIDE}{fingerprint[:_ASIDE_LETTERS]}"
        if os.path.lexists(f"{self.results_dir}/{aside}"):
            raise _not_ours(f"{self.results_dir}/{aside}", "results_dir")
        os.rename(f"{self.results_dir}/{name}", f"{self.results_dir}/{aside}")
        self._move_description(name, name, aside)

    def _bring_back(self, experiment: Experiment, fingerprint: str) -> None:
        """Give an experiment the files that it had before another one of its name."""
        name = experiment.name
        aside = f"{name}{_ASIDE}{fingerprint[:_ASIDE_LETTERS]}"
        if _made(f"{self.results_dir}/{aside}") != (name, fingerprint):
            return
        made = self._made_here(experiment)
        if made and made[1] == fingerprint:
            return
        try:
            if made:
                self._put_aside(*made)
            os.rename(f"{self.results_dir}/{aside}", self.folder(experiment))
            self._move_description(name, aside, name)
        except OSError as error:
            raise refusal(error, error.filename or self.folder(experiment)) from None

    def _move_description(self, name: str, old: str, new: str) -> None:
        path, target = f"{self.exps_dir}/{old}.json", f"{self.exps_dir}/{new}.json"
        is_free = not os.path.lexists(target) or read_object(target).get("name") == name
        if read_object(path).get("name") == name and is_free:
            os.replace(path, target)


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 20


def _made(path: str) -> tuple[str, str] | None:
    """Name and fingerprint of the experiment whose folder dsl has made there; None: it is none of ours.

    A copy under another name is none: what it is for only its owner knows.
    """
    if os.path.islink(path):
        return None
    exp = read_object(f"{path}/{DESCRIPTION}")
    name, fingerprint = exp.get("name"), exp.get("fingerprint")
    if not isinstance(name, str) or not isinstance(fingerprint, str):
        return None
    is_named = os.path.basename(path) in (name, f"{name}{_ASIDE}{fingerprint[:_ASIDE_LETTERS]}")
    return (name, fingerprint) if is_named else None


def _not_ours(path: str, name: str) -> AutotuningError:
    return AutotuningError(f"{path} is not of a tuning, move it away or name another {name}")
