"""Experiments, orders to run them, and their results, judged by exit code and by the file that was due.

Words in the output never make an experiment fail if it ended well. They only tell kinds of failures apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import loads
from typing import Literal

from dsl._record import Record
from dsl.model.judgement import NO_EVIDENCE, Judgement
from dsl.report.verdict import verdict
from dsl.tune.config import is_number
from dsl.words import shorten

Outcome = Literal["ok", "oom", "crash", "timeout", "no metric", "torn metric", "stopped"]

PROFILE_NAME = "profile_model_info"
"""Name of the experiment that only looks at the model."""

GRACE_S = 3.0
"""Most seconds that workers get after SIGTERM: an experiment that we end has nothing to save."""


class Experiment(Record):
    """One run of the script with one config."""

    name: str
    """Unique in a search, and the name of its folder, such as ``z1_gas2_tmbspg8``."""
    config: Mapping[str, object]
    """The whole config as the script will read it, with its ``autotuning`` section, but without paths of
    files to write: the tuner adds them."""
    kind: Literal["profile", "run"]
    """A profile writes facts about the model to ``model_info_path``, a run its metrics to ``metric_path``."""
    space: str
    """Tuning space that it belongs to, such as ``z1``; empty for a profile."""
    repeat: int = 0
    """0 for the first run of a config; a repeat measures the same config once more."""


class Result(Record):
    """How an experiment went."""

    outcome: Outcome
    """``ok`` only if it ended with 0 and wrote its file. ``stopped``: the user ended it, nothing is known."""
    metrics: Mapping[str, float]
    """What it wrote: metrics by key, or for a profile the facts about the model. Empty unless ``ok``."""
    reason: str
    """Why it is not ``ok``, in one line; empty if it is."""
    exit_code: int
    """Exit code of the job."""
    elapsed_s: float
    """From start to end, in seconds; for a result from an earlier tuning, the time that it took then."""


class Resources(Record):
    """What an experiment gets, and how many experiments there is room for."""

    nodes: int
    """Nodes of an experiment."""
    slots_per_node: int
    """Slots of each of them."""
    lanes: int
    """Experiments that fit side by side, at least 1."""
    memory_bytes: int | None
    """Memory of the smallest device; None: unknown, or it has no memory of its own."""


class Trial(Record):
    """An experiment that was run, with its value for the search."""

    experiment: Experiment
    """What was run."""
    result: Result
    """How it went."""
    value: float | None
    """The metric that is tuned, in its own unit; None unless ``ok``."""


class Space(Record):
    """What is known about a tuning space. A config counts once, however often it is used or repeated."""

    name: str
    """Such as ``z1``; for a full space with the initials of its keys, such as ``z1_rbs_abs_tmbspg``."""
    configs: int
    """Configs that were run."""
    best: str
    """Name of its best experiment; empty: none ran."""
    value: float | None
    """Mean of the metric over all runs of that config."""


class Tie(Record):
    """A config that cannot be distinguished from the best one.

    The values of its runs and those of the best overlap, or are no further apart than the section's ``near``.
    """

    name: str
    """Name of its experiment."""
    least: float
    """Smallest value of its runs."""
    most: float
    """Largest value of its runs."""
    runs: int
    """Number of its runs."""


class Summary(Record):
    """What a search has found."""

    metric: str
    """Key that was tuned."""
    is_minimised: bool
    """Whether less is better."""
    best: Experiment | None
    """The first run of the best config; None: nothing ran."""
    value: float | None
    """Mean of the metric over all runs of the best config."""
    spaces: tuple[Space, ...]
    """In the order in which they were tried."""
    ties: tuple[Tie, ...]
    """The best config and the configs that tie with it, best first; empty if no config comes near."""
    trials: tuple[Trial, ...]
    """Everything that was run, in order, the profile and repeats too."""
    ended: str
    """Why the search ended, in one line."""
    notes: tuple[str, ...] = ()
    """Decisions to tell the user, a line each, in order: stages left out, and why."""

    @property
    def runs(self) -> tuple[Trial, ...]:
        """The trials that measured something: repeats count, the profile does not."""
        return tuple([one for one in self.trials if one.experiment.kind == "run"])


OUT_OF_MEMORY = (
    "out of memory",
    "outofmemory",
    "memoryerror",
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "cublas_status_alloc_failed",
    "resource_exhausted",
)
"""Words in the output if a device or the host ran out of memory, in lower case."""

MOST = 1e308
"""Numbers beyond it, and NaN, cannot be compared."""


class Done(Record):
    """How the command of an experiment ended."""

    name: str
    """Name of the experiment."""
    exit_code: int
    """Exit code of its job."""
    elapsed_s: float
    """From start to end, in seconds."""
    stop: str = ""
    """Why we ended it: ``timeout`` or ``stopped``; empty: it ended by itself."""
    error: str = ""
    """Why its command could not be started; empty: it was started."""


class ExperimentOutput(Record):
    """What an experiment has left."""

    written: str | None
    """Text of the file that it had to write; None: there is none."""
    instead: str = ""
    """What is in the place of that file, in words; empty: nothing."""
    stdout: str = ""
    """Last part of its stdout."""
    stderr: str = ""
    """Last part of its stderr."""
    judgement: Judgement | None = None
    """What its job knows about a failure; None: nothing."""


def judge(done: Done, output: ExperimentOutput, keys: Sequence[str], limit_s: float = 0.0) -> Result:
    """The result of an experiment that had to write a number for one of these keys; no keys: for any.

    ``limit_s``: the seconds that it had.
    """
    outcome, metrics, reason = _judge(done, output, keys, limit_s)
    return Result(outcome, metrics, reason, done.exit_code, done.elapsed_s)


def _judge(
    done: Done, output: ExperimentOutput, keys: Sequence[str], limit_s: float
) -> tuple[Outcome, Mapping[str, float], str]:
    if done.stop == "stopped":
        return "stopped", {}, "it was stopped"
    if done.stop == "timeout":
        return "timeout", {}, f"it did not end in {limit_s:g} s (autotuning.exp_timeout_s)"
    if done.exit_code:
        return _failure(done.exit_code, output)
    if output.written is None:
        instead = f": {output.instead}" if output.instead else ""
        return "no metric", {}, f"it ended well and wrote no metrics{instead}"
    return read_metrics(output.written, keys)


def read_metrics(text: str, keys: Sequence[str]) -> tuple[Outcome, Mapping[str, float], str]:
    """The numbers in a file that an experiment wrote, or what is wrong with it."""
    try:
        found = loads(text)
    except (ValueError, RecursionError):
        end = "" if text.strip() else ": it is empty"
        return "torn metric", {}, f"its metrics are no JSON, or were cut off while they were written{end}"
    if not isinstance(found, dict):
        return "torn metric", {}, f"its metrics are no JSON object: {shorten(text)}"
    numbers = {name: float(value) for name, value in found.items() if is_number(value) and abs(value) < MOST}
    if not numbers or (keys and not any(key in numbers for key in keys)):
        for key in keys:
            if key in found:
                shown = shorten(" ".join(repr(found[key]).split()))
                return "no metric", {}, f"its {key} is no number that can be compared: {shown}"
        wanted, has = " or ".join(keys) or "a number", shorten(", ".join(found)) or "nothing"
        return "no metric", {}, f"its metrics lack {wanted}, they have {has}"
    return "ok", numbers, ""


def _failure(exit_code: int, output: ExperimentOutput) -> tuple[Outcome, Mapping[str, float], str]:
    said, judgement = f"{output.stdout}\n{output.stderr}".lower(), output.judgement
    lines = verdict(judgement) if judgement is not None else []
    evidence = judgement.causes[0].evidence if judgement is not None and judgement.causes else NO_EVIDENCE
    has_run_out = evidence.is_out_of_memory or any(words in said for words in OUT_OF_MEMORY)
    written = [line.strip() for line in output.stderr.splitlines() if line.strip()]
    # Without a judgement no worker has run, and the last line of the command says why.
    script = [line for line in written if not (lines and line.startswith("dsl: "))]
    last = (evidence.lines or script or ("",))[-1]
    why = lines[0] if lines else f"exit code {exit_code}"
    is_news = bool(last) and last not in why
    return "oom" if has_run_out else "crash", {}, shorten(f"{why}: {last}" if is_news else why, 300)
