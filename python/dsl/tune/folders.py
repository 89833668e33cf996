"""The files of a tuning: results and descriptions of experiments. Each file is whole or absent.

A folder that dsl has made, or found empty, holds a marker. dsl empties only folders with a marker, and
removes only what an earlier tuning has written. The marker is locked as long as a tuning uses the folder.

If an experiment needs the name of an earlier one with other content, the earlier experiment keeps its files:
they move to ``NAME@`` plus the first letters of its fingerprint, and back when it is needed again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from json import dumps

from dsl.errors import AutotuningError, JobFormatError
from dsl.machine.files import A_FILE, A_FOLDER, Folder, cannot_write
from dsl.model.codec import from_json, from_plain
from dsl.model.judgement import Judgement
from dsl.tune.config import AUTOTUNING
from dsl.tune.experiment import Experiment, Result

MARKER = ".dsl-autotuning"
"""A file by which dsl knows a folder that it has made."""

SCRATCH = ".dsl-exp-"
"""Prefix of the names of files and folders that are being made or removed."""

RESULT, DESCRIPTION, CONFIG, END = "result.json", "exp.json", "ds_config.json", "end.json"
OPTIMAL_CONFIG, OPTIMAL_COMMAND = "ds_config_optimal.json", "cmd_optimal.txt"
SUMMARIES = ("summary.txt", "summary.json", "summary.png")
"""What a tuning has found: for people, for programs, and as a picture."""

TABLES = (OPTIMAL_CONFIG, OPTIMAL_COMMAND, *SUMMARIES)
"""Files beside the folders of the experiments when a tuning has ended."""

PAUSED = "paused"
"""A file in the folder of a run that was paused: the times that it measured are wrong."""

DESCRIBED = ("name", "ds_config", "num_gpus", "num_nodes", "hostfile")
"""What the description of an experiment says, as in DeepSpeed."""

PATH_KEYS = {"run": "metric_path", "profile": "model_info_path"}
"""Keys of the section that name the file that each kind of experiment has to write."""

WRITTEN = {"run": "metrics.json", "profile": "model_info.json"}
"""Names of these files after its end."""

TAIL_BYTES = 65536
"""Bytes at the end of an experiment's output that we read."""

_ASIDE, _ASIDE_LETTERS = "@", 8
"""What follows the name of an experiment whose folder was put aside. No experiment has an @ in its name."""

_KEPT = ("ok", "oom", "crash", "timeout", "no metric", "torn metric")
"""Outcomes that are kept; an experiment that was stopped runs again."""


def _check(key: str, path: str) -> None:
    """Refuse an existing folder that is not ours. Raises AutotuningError; ``key``: its key in the section."""
    with _naming(path), suppress(FileNotFoundError), closing(_open(key, path)) as folder:
        if not folder.what(MARKER) and folder.names():
            raise AutotuningError(
                f"{path} holds files that no tuning has written, name another folder as autotuning.{key}"
            )


def _claim(key: str, path: str) -> Folder:
    """Make or take a folder, and keep other commands out until it is closed. Raises AutotuningError."""
    with _naming(path), ExitStack() as undo:
        os.makedirs(path, exist_ok=True)
        folder = undo.enter_context(closing(_open(key, path)))
        if not folder.lock(MARKER):
            raise AutotuningError(
                f"another command is tuning in {path}, wait for it or name another folder as autotuning.{key}"
            )
        undo.pop_all()
    return folder


def _open(key: str, path: str) -> Folder:
    """Open a folder in which no other user may write. Raises AutotuningError or OSError."""
    folder = Folder(path, AutotuningError)
    owner, is_open = folder.strangers()
    if owner is None and not is_open:
        return folder
    folder.close()
    if owner is not None:
        raise AutotuningError(
            f"{path} belongs to another user (uid {owner}), name another folder as autotuning.{key}"
        )
    raise AutotuningError(
        f"{path} may be written by every user, take that away (chmod o-w) or name another folder as "
        f"autotuning.{key}"
    )


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn an OSError in the block into an AutotuningError that names the path."""
    try:
        yield
    except OSError as error:
        raise AutotuningError(cannot_write(path, error)) from None


class Folders:
    """The two folders of a tuning, locked against other tunings until `close` or the end of the process."""

    def __init__(self, results_dir: str, exps_dir: str) -> None:
        """Make both folders, or take existing ones. ``~`` becomes the user's home: no shell has expanded it.

        Raises:
            AutotuningError: a folder cannot be made, holds files that dsl has not written, or is in use.
        """
        with _naming(results_dir):  # the working directory may be gone
            paths = [os.path.abspath(os.path.expanduser(path)) for path in (results_dir, exps_dir)]
        for key, path in zip(("results_dir", "exps_dir"), paths, strict=True):
            _check(key, path)  # before a folder is made: one may lie in the other
        self.results_dir, self.exps_dir = paths
        self.results = self._exps = _claim("results_dir", self.results_dir)
        try:
            if self.exps_dir != self.results_dir:
                self._exps = _claim("exps_dir", self.exps_dir)
        except BaseException:
            self.close()
            raise
        self._begun: dict[str, str] = {}
        """The written description of each experiment of this command, by name."""
        self._token = os.urandom(4).hex()
        mark = self.results.read_object(MARKER)
        # If no experiment ran well, the next tuning runs the failed ones again.
        is_spent = mark.get("is_finished") is True and not self.results.what(OPTIMAL_CONFIG)
        failures, memory = mark.get("failures"), mark.get("memory")
        self._failures = (failures if isinstance(failures, int) else 0) + is_spent
        """How many tunings have failed completely before."""
        self._memory: dict[str, object] = {} if is_spent or not isinstance(memory, dict) else memory
        """A word for what was tuned, and how many bytes of a device were free then; None: unknown."""

    def close(self) -> None:
        """Let other commands use the folders."""
        self.results.close()
        self._exps.close()

    def is_finished(self) -> bool:
        """Whether the last tuning here came to its end."""
        return self.results.read_object(MARKER).get("is_finished") is True

    def keep_memory(self, tuning: str, memory_bytes: int | None) -> int | None:
        """The free bytes of a device that the search uses: the number from the beginning of this tuning.

        Other programs come and go, and with another number the search would try other micro batches. After a
        tuning in which nothing ran well, the next one uses a new number. `mark` writes the number down.

        ``tuning``: a word for what is tuned; ``memory_bytes``: bytes that are free now, None if unknown.
        """
        known = self._memory.get(tuning, memory_bytes)
        kept = known if known is None or isinstance(known, int) else memory_bytes
        self._memory = {tuning: kept}
        return kept

    def mark(self, *, is_finished: bool) -> None:
        """Note whether the tuning has come to its end. Raises AutotuningError if it cannot be written."""
        known = {"is_finished": is_finished, "failures": self._failures, "memory": self._memory}
        self.results.write_locked(MARKER, as_json(known).encode())

    def empty(self) -> None:
        """Remove what tunings have written, and nothing else.

        Raises:
            AutotuningError: a file cannot be removed.
        """
        self._memory = {}
        for name in self.results.names():
            if made := self._made(name):
                # Remove it whole, even if we are killed meanwhile: dsl would not recognize half a folder.
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

        Only this command uses its name. An experiment of a killed command may live on for its grace period,
        and we must not take its file for ours.
        """
        stem, ending = os.path.splitext(WRITTEN[experiment.kind])
        return f"{self.folder(experiment)}/{stem}-{self._token}{ending}"

    def begin(self, experiment: Experiment, exp: Mapping[str, object], command: str) -> None:
        """Write down an experiment before it runs.

        The files of an earlier run with the same content are removed; with other content, they are put aside.

        ``exp`` is what is known about the run; a part of it goes to the folder of descriptions.
        ``command`` is a line for a shell.

        Raises:
            AutotuningError: the files cannot be written, or files that are not ours have their names.
        """
        name, new = experiment.name, f"{SCRATCH}new-{experiment.name}"
        self._make_room(name, str(exp["fingerprint"]))
        is_known = self._made(name) is not None
        if self.results.what(name) and not is_known:
            raise _not_ours(self.folder(experiment), "results_dir")
        if self._exps.what(f"{name}.json") and not self._describes(name, name):
            raise _not_ours(f"{self.exps_dir}/{name}.json", "exps_dir")
        self.results.clear(new)
        self.results.make(new)
        self._begun[name] = as_json(exp)
        self.results.write(f"{new}/{DESCRIPTION}", self._begun[name])
        self.results.write(f"{new}/{CONFIG}", as_json(exp["ds_config"]))
        self.results.write(f"{new}/cmd.txt", command + "\n")
        self._exps.write(f"{name}.json", as_json({key: exp[key] for key in DESCRIBED if key in exp}))
        if is_known:
            self._clear(name)
        self.results.rename(new, name)

    def save(self, experiment: Experiment, fingerprint: str, result: Result) -> None:
        """Write down the result of an experiment. Raises AutotuningError if it cannot be written.

        If the script has removed its folder, the folder is made anew. If something else is in the place of
        the folder, the result is not written.
        """
        name = experiment.name
        found = self.results.what(name)
        if result.outcome not in _KEPT or found not in ("", A_FOLDER):
            return
        if not found:
            self.results.make(name)
        if self._made(name) is None and name in self._begun:
            self.results.write(f"{name}/{DESCRIPTION}", self._begun[name])
        known: dict[str, object] = {key: getattr(result, key) for key in Result.__match_args__}
        known |= {"fingerprint": fingerprint, "failures": self._failures}
        self.results.write(f"{name}/{RESULT}", as_json(known))

    def load(self, experiment: Experiment, fingerprint: str) -> Result | None:
        """The result of an experiment with the same content; None: it has not run, or has to run again.

        Raises:
            AutotuningError: its files were put aside and cannot come back.
        """
        self._make_room(experiment.name, fingerprint)
        known = self.results.read_object(f"{experiment.name}/{RESULT}")
        outcome = known.get("outcome")
        if known.get("fingerprint") != fingerprint or outcome not in _KEPT:
            return None
        if outcome != "ok" and known.get("failures") != self._failures:
            return None
        is_whole = all(key in known for key in Result.__match_args__) and isinstance(known["metrics"], dict)
        return Result(**{key: known[key] for key in Result.__match_args__}) if is_whole else None

    def text(self, experiment: Experiment) -> str | None:
        """The text that an experiment has written; None: nothing."""
        return self._take(experiment, os.path.basename(self.written(experiment)))

    def instead(self, experiment: Experiment) -> str:
        """What is in the place of the file that an experiment had to write, in words; empty: nothing."""
        folder = self.results.what(experiment.name)
        if folder != A_FOLDER:
            return f"its folder is now {folder}" if folder else "its folder is gone"
        for name in (self.written(experiment), WRITTEN[experiment.kind]):
            found = self.results.what(f"{experiment.name}/{os.path.basename(name)}")
            if found not in ("", A_FILE):
                return f"{found} is at {AUTOTUNING}.{PATH_KEYS[experiment.kind]}"
        return ""

    def left(self, experiment: Experiment, fingerprint: str) -> str | None:
        """What a run with the same content has written, if its result was not saved; None: nothing."""
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
        """Mark the run of an experiment as paused: what it writes counts only if its result is saved."""
        with suppress(AutotuningError):  # a full disk must not end the tuning because of one run
            self.results.write(f"{experiment.name}/{PAUSED}", "")

    def tail(self, experiment: Experiment, stream: str) -> str:
        """The last part of its ``stdout`` or ``stderr``."""
        try:
            with self.results.open(f"{experiment.name}/{stream}.log") as file:
                file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
                return file.read(TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def take_end(self, experiment: Experiment) -> Judgement | None:
        """The facts that its job has left about a failure; None: none that can be read."""
        name = f"{experiment.name}/{END}"
        text = self.results.read(name)
        if text is None:
            return None
        with suppress(AutotuningError, JobFormatError):
            self.results.remove(name)
            found: Judgement = from_plain(from_json(text.encode(errors="replace")), {"Judgement": Judgement})
            return found
        return None

    def save_optimal(self, config: Mapping[str, object], command: str) -> None:
        """Write the best config, and the command that trains with it. Raises AutotuningError."""
        self.results.write(OPTIMAL_CONFIG, as_json(config))
        self.results.write(OPTIMAL_COMMAND, command + "\n")

    def forget_optimal(self) -> None:
        """Remove the best config of an earlier tuning, as this one has none. Raises AutotuningError."""
        for name in (OPTIMAL_CONFIG, OPTIMAL_COMMAND):
            self.results.remove(name)

    def _take(self, experiment: Experiment, written: str) -> str | None:
        kept = f"{experiment.name}/{WRITTEN[experiment.kind]}"
        with suppress(AutotuningError):  # it has written nothing
            self.results.rename(f"{experiment.name}/{written}", kept)
        return self.results.read(kept)

    def _made(self, folder: str) -> tuple[str, str] | None:
        """Name and fingerprint of the experiment that a folder belongs to; None: the folder is not ours.

        A copy under another name is not ours: only its owner knows its purpose.
        """
        exp = self.results.read_object(f"{folder}/{DESCRIPTION}")
        name, fingerprint = exp.get("name"), exp.get("fingerprint")
        if not isinstance(name, str) or not isinstance(fingerprint, str):
            return None
        return (name, fingerprint) if folder in (name, _aside(name, fingerprint)) else None

    def _describes(self, described: str, name: str) -> bool:
        """Whether the description named ``described`` is that of the experiment ``name``."""
        return bool(self._exps.read_object(f"{described}.json").get("name") == name)

    def _clear(self, name: str) -> None:
        """Remove the folder of an experiment without ever leaving half of it."""
        old = f"{SCRATCH}old-{name}"
        self.results.clear(old)
        self.results.rename(name, old)
        self.results.clear(old)

    def _make_room(self, name: str, fingerprint: str) -> None:
        """Bring the files of an experiment back, if they were put aside; put others of its name aside."""
        made, aside = self._made(name), _aside(name, fingerprint)
        if made and made[1] != fingerprint:
            if self.results.what(_aside(*made)):
                raise _not_ours(f"{self.results_dir}/{_aside(*made)}", "results_dir")
            self._move(name, name, _aside(*made))
        if self._made(aside) == (name, fingerprint) and not self.results.what(name):
            self._move(name, aside, name)

    def _move(self, name: str, old: str, new: str) -> None:
        """Give the files of an experiment another name."""
        self.results.rename(old, new)
        is_free = not self._exps.what(f"{new}.json") or self._describes(new, name)
        if self._describes(old, name) and is_free:
            self._exps.rename(f"{old}.json", f"{new}.json")


def _aside(name: str, fingerprint: str) -> str:
    return f"{name}{_ASIDE}{fingerprint[:_ASIDE_LETTERS]}"


def _not_ours(path: str, name: str) -> AutotuningError:
    return AutotuningError(f"{path} is not of a tuning, move it away or name another {name}")


def as_json(value: object) -> str:
    """A value as the text of a file."""
    return dumps(value, indent=2) + "\n"
