"""Experiments, orders to run them, and their results: the records that search, trials and reports share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from dsl._record import Record

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


class Order(Record):
    """One experiment to run."""

    name: str
    """Name of the experiment."""
    words: tuple[str, ...]
    """The words behind ``dsl`` in its command."""
    stdout: str
    """File of its stdout, which is appended to."""
    stderr: str
    """File of its stderr, which is appended to."""
    end: str
    """File in which its job leaves the facts of a failure."""
    limit_s: float
    """Seconds that it may take; 0: no limit."""
    grace_s: float = GRACE_S
    """Seconds that its workers get between SIGTERM and SIGKILL."""
