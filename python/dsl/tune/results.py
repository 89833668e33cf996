"""What a search has run, and the results. A config runs only once, unless to measure it again."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeVar

from dsl._record import replace
from dsl.tune.config import AUTOTUNING, TRAIN_BATCH, Section, fingerprint, read_metric
from dsl.tune.experiment import Experiment, Result, Space, Summary, Tie, Trial

_T = TypeVar("_T")
Steps = Generator[tuple[Experiment, ...], Mapping[str, Result], _T]

MOST_TIES = 3
"""Most configs that are measured again at a time: the best and the next best."""


class Stopped(Exception):  # noqa: N818  it is no error: the user has enough
    """An experiment was stopped: the search ends with what it knows."""


class Entry:
    """A config with all its runs."""

    def __init__(self, first: Trial) -> None:
        self.trials = [first]

    @property
    def experiment(self) -> Experiment:
        """Its first run."""
        return self.trials[0].experiment

    @property
    def values(self) -> list[float]:
        """The metric of each run that has one."""
        return [trial.value for trial in self.trials if trial.value is not None]

    @property
    def value(self) -> float | None:
        """Mean of the metric over all its runs; None: the first one failed."""
        return sum(self.values) / len(self.values) if self.values else None


class Results:
    """Asks for runs and remembers their results."""

    def __init__(self, section: Section, own: Mapping[str, object]) -> None:
        """Take the section, and the section that each experiment gets instead."""
        self.section = section
        """The section as the user wrote it."""
        self._own = own
        self._entries: dict[str, Entry] = {}
        self._names: set[str] = set()
        self._trials: list[Trial] = []
        self.notes: list[str] = []
        """Decisions to tell the user."""

    def run(self, wanted: Sequence[Experiment]) -> Steps[list[Entry]]:
        """Run the new configs side by side; returns the entries of all, in order.

        ``wanted``: experiments without an ``autotuning`` section. If a name is taken, the run gets another.
        """
        contents = [fingerprint(one.config) for one in wanted]
        fresh = {}
        for one, content in zip(wanted, contents, strict=True):
            if content not in self._entries and content not in fresh:
                config = {**one.config, AUTOTUNING: self._own}
                fresh[content] = replace(one, name=self._free(one.name), config=config)
        if fresh:
            trials = yield from self._ask(fresh.values())
            self._entries.update(
                {content: Entry(trial) for content, trial in zip(fresh, trials, strict=True)}
            )
        return [self._entries[content] for content in contents]

    def profile(self, experiment: Experiment) -> Steps[Result]:
        """Run an experiment that only looks at the model."""
        self._names.add(experiment.name)
        trials = yield from self._ask([experiment])
        return trials[0].result

    def settle(self, entries: Iterable[Entry]) -> Steps[Entry | None]:
        """The best of some configs; near-ties run again before the decision. None: no config ran."""
        candidates = self._ranked(entries)
        # Twice: the config that was best at first may turn out to be worse.
        for _ in range(2):
            close = [one for one in candidates if self._is_close(one, candidates[0])][:MOST_TIES]
            if len(close) > 1:
                yield from self._repeat(close)
            candidates = self._ranked(candidates)
        return candidates[0] if candidates else None

    def settle_all(self) -> Steps[None]:
        """Do the same for all configs: those near the best run again."""
        yield from self.settle(self._entries.values())

    def best_of(self, space: str) -> Entry | None:
        """The best config of a space so far. None: no config of it ran."""
        ranked = self._ranked([one for one in self._entries.values() if one.experiment.space == space])
        return ranked[0] if ranked else None

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value of the metric is better than another; any value is better than None."""
        if than is None:
            return True
        return value < than if self._is_minimised else value > than

    def gain(self, value: float, over: float) -> float:
        """How much better ``value`` is than ``over``, as a share of ``over``; below 0 if it is worse."""
        difference = over - value if self._is_minimised else value - over
        return difference / abs(over) if over else difference

    def summarise(self, ended: str) -> Summary:
        """What the search has found."""
        entries = self._entries.values()
        ranked = self._ranked(entries)
        best = ranked[0] if ranked else None
        close = [one for one in ranked if best and (self._is_close(one, best) or _overlap(one, best))]
        spaces = []
        for name in dict.fromkeys([entry.experiment.space for entry in entries]):
            found = self.best_of(name)
            count = sum(entry.experiment.space == name for entry in entries)
            spaces.append(
                Space(name, count, found.experiment.name if found else "", found.value if found else None)
            )
        ties = [Tie(one.experiment.name, min(one.values), max(one.values), len(one.values)) for one in close]
        return Summary(
            metric=self.section.metric,
            is_minimised=self._is_minimised,
            best=best.experiment if best else None,
            value=best.value if best else None,
            spaces=tuple(spaces),
            ties=tuple(ties) if len(ties) > 1 else (),
            trials=tuple(self._trials),
            ended=ended,
            notes=tuple(self.notes),
        )

    def why_nothing_ran(self) -> str:
        """The last known reason why no config ran; empty: a config ran."""
        if any(entry.values for entry in self._entries.values()):
            return ""
        failed = [trial for trial in self._trials if trial.experiment.kind == "run"]
        told = [f"{one.experiment.name}: {why_not(one)}" for one in failed]
        return (self.notes or told or ["nothing was tried"])[-1]

    @property
    def _is_minimised(self) -> bool:
        return self.section.mode == "min"

    def _repeat(self, entries: Iterable[Entry]) -> Steps[None]:
        """Run configs again, as often as the section allows."""
        again = [
            (
                entry,
                replace(entry.experiment, name=self._free(f"{entry.experiment.name}_repeat{n}"), repeat=n),
            )
            for entry in entries
            for n in range(len(entry.trials), self.section.repeats + 1)
        ]
        trials = (yield from self._ask([experiment for _, experiment in again])) if again else []
        for (entry, experiment), trial in zip(again, trials, strict=True):
            entry.trials.append(trial)
            if trial.value is None:
                self.notes.append(f"{experiment.name} failed, though the config ran before: {why_not(trial)}")

    def _ask(self, experiments: Iterable[Experiment]) -> Steps[list[Trial]]:
        asked = tuple(experiments)
        results = yield asked
        trials = [self._trial(one, results[one.name]) for one in asked if one.name in results]
        self._trials += trials
        if len(trials) < len(asked) or any(trial.result.outcome == "stopped" for trial in trials):
            # Experiments that ran beside the stopped one still count.
            for trial in trials:
                if trial.value is not None and not trial.experiment.repeat:
                    self._entries.setdefault(trial.experiment.name, Entry(trial))
            raise Stopped
        return trials

    def _trial(self, experiment: Experiment, result: Result) -> Trial:
        if experiment.kind == "profile" or result.outcome != "ok":
            return Trial(experiment, result, None)
        value = read_metric(self.section, result.metrics)
        if value is None:
            why = f"its metrics have no finite number at {self.section.metric}"
            result = replace(result, outcome="no metric", reason=why)
        return Trial(experiment, result, value)

    def _ranked(self, entries: Iterable[Entry]) -> list[Entry]:
        ran = [(entry.value, entry) for entry in entries if entry.value is not None]
        ran.sort(key=lambda pair: pair[0], reverse=not self._is_minimised)
        found = [entry for _, entry in ran]
        # Runs that look for a micro batch may be below the bound: they count only if nothing else ran.
        found = [entry for entry in found if not self._is_too_small(entry)] or found
        # If a later run of the best config failed, a near-tie without a failure takes its place.
        if found and _has_failed(found[0]):
            steady = [one for one in found if not _has_failed(one) and self._is_close(one, found[0])][:1]
            found = [*steady, *[one for one in found if one not in steady]]
        return found

    def _is_too_small(self, entry: Entry) -> bool:
        samples = entry.experiment.config.get(TRAIN_BATCH)
        return isinstance(samples, int) and samples < self.section.min_train_batch_size

    def _is_close(self, one: Entry, other: Entry) -> bool:
        assert one.value is not None
        assert other.value is not None
        return abs(one.value - other.value) <= self.section.near * max(abs(one.value), abs(other.value))

    def _free(self, name: str) -> str:
        free, n = name, 1
        while free in self._names:
            n += 1
            free = f"{name}_{n}"
        self._names.add(free)
        return free


def _overlap(one: Entry, other: Entry) -> bool:
    return min(one.values) <= max(other.values) and min(other.values) <= max(one.values)


def _has_failed(entry: Entry) -> bool:
    """Whether a later run of a config has failed."""
    return any(trial.value is None for trial in entry.trials[1:])


def why_not(trial: Trial) -> str:
    """Why an experiment failed."""
    return trial.result.reason or trial.result.outcome
