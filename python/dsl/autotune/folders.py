"""The files of a tuning: results and descriptions of experiments, each whole or not there.

A folder that dsl has made, or found empty, holds a marker, and only such a one is ever emptied: of what an
earlier tuning has written, and of nothing else. The marker is locked as long as a tuning uses the folder.

An experiment of another content keeps its files when its name is wanted: they move to ``NAME@`` with the
begin of its fingerprint, and back when it is asked for again.
"""

from __future__ import annotations

import os
from contextlib import suppress

from dsl._record import record
from dsl.autotune.experiment import Result
from dsl.autotune.files import A_FILE, A_FOLDER, MARKER, SCRATCH, SUMMARIES, as_json, check, claim, refusal
from dsl.autotune.section import AUTOTUNING
from dsl.errors import AutotuningError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from dsl.autotune.experiment import Experiment
    from dsl.autotune.files import Folder

RESULT = "result.json"
DESCRIPTION = "exp.json"
CONFIG = "ds_config.json"
OPTIMAL_CONFIG = "ds_config_optimal.json"
OPTIMAL_COMMAND = "cmd_optimal.txt"
TABLES = (OPTIMAL_CONFIG, OPTIMAL_COMMAND, *SUMMARIES)
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
            paths = {
                key: os.path.abspath(os.path.expanduser(path))
                for key, path in (("exps_dir", exps_dir), ("results_dir", results_dir))
            }
        except OSError as error:  # the working directory is gone
            raise refusal(error, results_dir) from None
        self.exps_dir, self.results_dir = paths.values()
        for key, path in paths.items():  # before one is made, which may lie in the other
            check(key, path)
        self._claimed: dict[str, Folder] = {}
        try:
            for key, path in paths.items():
                if path not in self._claimed:
                    self._claimed[path] = claim(key, path)
        except BaseException:
            self.close()
            raise
        self._exps, self.results = self._claimed[self.exps_dir], self._claimed[self.results_dir]
        self._begun: dict[str, str] = {}
        """What is written down of each experiment of this command, by name."""
        self._token = os.urandom(4).hex()
        mark = self._mark()
        self._round, self._memory = mark.round, mark.memory
        # Where no experiment ran well, the next tuning tries again what failed.
        if mark.state == "finished" and not self.results.what(OPTIMAL_CONFIG):
            self._round += 1
            self._memory = ()

    def close(self) -> None:
        """Let others use the folders."""
        for folder in self._claimed.values():
            folder.close()

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
        self.results.mark(f"{' '.join(words)}\n")

    def empty(self) -> None:
        """Remove what tunings have written, and nothing else.

        Raises:
            AutotuningError: something of it cannot be removed.
        """
        self._memory = ()
        for name in self.results.names():
            if made := self._made(name):
                # Half of a folder would be nobody's: a command that is killed meanwhile leaves none.
                self._clear(name)
                if self._describes(name, made[0]):
                    self._exps.remove(f"{name}.json")
            elif name.startswith(SCRATCH):
                self.results.clear(name)
            elif name in TABLES:
                self.results.remove(name)

    def folder(self, experiment: Experiment) -> str:
        """Where the files of an experiment lie."""
        return f"{self.results_dir}/{experiment.name}"

    def written(self, experiment: Experiment) -> str:
        """The file that an experiment has to write.

        Its name is of this command alone. A run of a command that was killed may live on for its grace
        period: what it writes is taken for nobody else's.
        """
        stem, ending = os.path.splitext(_kept_name(experiment))
        return f"{self.folder(experiment)}/{stem}-{self._token}{ending}"

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
        name, new = experiment.name, f"{SCRATCH}new-{experiment.name}"
        made = self._made_here(experiment)
        if self._exps.what(f"{name}.json") and not self._describes(name, name):
            raise _not_ours(f"{self.exps_dir}/{name}.json", "exps_dir")
        self.results.clear(new)
        if made and made[1] != exp["fingerprint"]:
            self._put_aside(*made)
            made = None
        self.results.make(new)
        self._begun[name] = as_json(exp)
        self.results.write(f"{new}/{DESCRIPTION}", self._begun[name])
        self.results.write(f"{new}/{CONFIG}", as_json(description["ds_config"]))
        self.results.write(f"{new}/cmd.txt", command + "\n")
        self._exps.write(f"{name}.json", as_json(description))
        if made:
            self._clear(name)
        self.results.rename(new, name)

    def save(self, experiment: Experiment, fingerprint: str, result: Result) -> None:
        """Keep what became of an experiment. Raises AutotuningError if it cannot be written.

        A script may have removed its folder: it is made anew. Where something else is, nothing is kept.
        """
        name = experiment.name
        found = self.results.what(name)
        if result.outcome not in _KEPT or found not in ("", A_FOLDER):
            return
        if not found:
            self.results.make(name)
        if self._made(name) is None and name in self._begun:
            self.results.write(f"{name}/{DESCRIPTION}", self._begun[name])
        known = {
            "fingerprint": fingerprint,
            "round": self._round,
            "outcome": result.outcome,
            "metrics": dict(result.metrics),
            "reason": result.reason,
            "exit_code": result.exit_code,
            "elapsed_s": result.elapsed_s,
        }
        self.results.write(f"{name}/{RESULT}", as_json(known))

    def load(self, experiment: Experiment, fingerprint: str) -> Result | None:
        """What became of an experiment of the same content; None: it has not run, or has to run again.

        Raises:
            AutotuningError: its files were put aside and cannot come back.
        """
        self._bring_back(experiment, fingerprint)
        known = self.results.read_object(f"{experiment.name}/{RESULT}")
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
        return self._take(experiment, os.path.basename(self.written(experiment)))

    def instead(self, experiment: Experiment) -> str:
        """What there is in place of a file that an experiment had to write; empty: nothing."""
        folder = self.results.what(experiment.name)
        if folder != A_FOLDER:
            return f"its folder is now {folder}" if folder else "its folder is gone"
        for name in (self.written(experiment), _kept_name(experiment)):
            found = self.results.what(f"{experiment.name}/{os.path.basename(name)}")
            if found not in ("", A_FILE):
                return f"{found} is at {AUTOTUNING}.{PATH_KEYS[experiment.kind]}"
        return ""

    def left(self, experiment: Experiment, fingerprint: str) -> str | None:
        """What a run of the same content has written whose end nobody has noted; None: nothing."""
        exp = self.results.read_object(f"{experiment.name}/{DESCRIPTION}")
        is_known = any(self.results.what(f"{experiment.name}/{name}") for name in (RESULT, PAUSED))
        if exp.get("fingerprint") != fingerprint or is_known:
            return None
        try:
            path = exp["ds_config"][AUTOTUNING][PATH_KEYS[experiment.kind]]
            return self._take(experiment, os.path.basename(path))
        except (KeyError, TypeError):
            return None

    def distrust(self, experiment: Experiment) -> None:
        """What the run of an experiment will have written counts only if its end is noted."""
        with suppress(AutotuningError):  # a full disk costs a run less than a tuning
            self.results.write(f"{experiment.name}/{PAUSED}", "")

    def tail(self, experiment: Experiment, stream: str) -> str:
        """The last part of its ``stdout`` or ``stderr``."""
        try:
            with self.results.open(f"{experiment.name}/{stream}.log") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
                return file.read(TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def save_optimal(self, config: Mapping[str, object], command: str) -> None:
        """Write the best config, and the command that trains with it. Raises AutotuningError."""
        self.results.write(OPTIMAL_CONFIG, as_json(config))
        self.results.write(OPTIMAL_COMMAND, command + "\n")

    def forget_optimal(self) -> None:
        """Remove what an earlier tuning has found, as this one has found nothing. Raises AutotuningError."""
        for name in (OPTIMAL_CONFIG, OPTIMAL_COMMAND):
            self.results.remove(name)

    def _take(self, experiment: Experiment, written: str) -> str | None:
        kept = f"{experiment.name}/{_kept_name(experiment)}"
        with suppress(AutotuningError):  # it has written nothing
            self.results.rename(f"{experiment.name}/{written}", kept)
        return self.results.read(kept)

    def _mark(self) -> _Mark:
        """What the marker says."""
        words = (self.results.read(MARKER) or "").split()
        state, count = (*words, "", "")[:2]
        memory = tuple(words[2:4])
        return _Mark(
            state, int(count) if _is_count(count) else 0, memory if all(map(_is_count, memory[1:])) else ()
        )

    def _made_here(self, experiment: Experiment) -> tuple[str, str] | None:
        """Name and fingerprint of what has the name of an experiment; None: nothing has."""
        made = self._made(experiment.name)
        if self.results.what(experiment.name) and (made is None or made[0] != experiment.name):
            raise _not_ours(self.folder(experiment), "results_dir")
        return made

    def _made(self, folder: str) -> tuple[str, str] | None:
        """Name and fingerprint of the experiment whose folder dsl has made there; None: it is none of ours.

        A copy under another name is none: what it is for only its owner knows.
        """
        exp = self.results.read_object(f"{folder}/{DESCRIPTION}")
        name, fingerprint = exp.get("name"), exp.get("fingerprint")
        if not isinstance(name, str) or not isinstance(fingerprint, str):
            return None
        return (name, fingerprint) if folder in (name, _aside(name, fingerprint)) else None

    def _describes(self, described: str, name: str) -> bool:
        """Whether a description of that name is of this experiment."""
        return bool(self._exps.read_object(f"{described}.json").get("name") == name)

    def _clear(self, name: str) -> None:
        """Remove the folder of an experiment, of which half is never left."""
        old = f"{SCRATCH}old-{name}"
        self.results.clear(old)
        self.results.rename(name, old)
        self.results.clear(old)

    def _put_aside(self, name: str, fingerprint: str) -> None:
        """Let the files of an experiment make room for another one of its name."""
        aside = _aside(name, fingerprint)
        if self.results.what(aside):
            raise _not_ours(f"{self.results_dir}/{aside}", "results_dir")
        self._move(name, name, aside)

    def _bring_back(self, experiment: Experiment, fingerprint: str) -> None:
        """Give an experiment the files that it had before another one of its name."""
        name = experiment.name
        aside = _aside(name, fingerprint)
        if self._made(aside) != (name, fingerprint):
            return
        made = self._made_here(experiment)
        if made and made[1] == fingerprint:
            return
        if made:
            self._put_aside(*made)
        self._move(name, aside, name)

    def _move(self, name: str, old: str, new: str) -> None:
        """Give the files of an experiment another name."""
        self.results.rename(old, new)
        is_free = not self._exps.what(f"{new}.json") or self._describes(new, name)
        if self._describes(old, name) and is_free:
            self._exps.rename(f"{old}.json", f"{new}.json")


def _kept_name(experiment: Experiment) -> str:
    """Where the file of an experiment lies in its folder when it has ended."""
    return "model_info.json" if experiment.kind == "profile" else "metrics.json"


def _aside(name: str, fingerprint: str) -> str:
    return f"{name}{_ASIDE}{fingerprint[:_ASIDE_LETTERS]}"


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 20


def _not_ours(path: str, name: str) -> AutotuningError:
    return AutotuningError(f"{path} is not of a tuning, move it away or name another {name}")
