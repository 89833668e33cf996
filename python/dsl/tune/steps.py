"""The steps of a search: what it runs, and how it finds the best micro batch of a ZeRO stage.

A config runs only once, unless to measure it again. For a micro batch DeepSpeed's steps find the smallest one
that runs and the largest, try some between them, and then some just below the largest.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from math import ceil
from typing import TypeVar

from dsl._record import Record, replace
from dsl.errors import AutotuningError
from dsl.tune.config import (
    ACCUMULATION,
    AUTOTUNING,
    MICRO_BATCH,
    STAGE,
    TRAIN_BATCH,
    ZERO,
    Section,
    fingerprint,
    is_count,
    read_metric,
    section_of,
)
from dsl.tune.experiment import Experiment, Result, Space, Summary, Tie, Trial
from dsl.tune.spaces import first_config, without_nulls
from dsl.words import BEYOND, show

_T = TypeVar("_T")
Steps = Generator[tuple[Experiment, ...], Mapping[str, Result], _T]

MARKED = 0.05
"""The search goes on in a direction only if a micro batch is better by this share."""
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
        contents = [fingerprint(experiment.config) for experiment in wanted]
        fresh = {}
        for experiment, content in zip(wanted, contents, strict=True):
            if content not in self._entries and content not in fresh:
                config = {**experiment.config, AUTOTUNING: self._own}
                fresh[content] = replace(experiment, name=self._free(experiment.name), config=config)
        if fresh:
            trials = yield from self._ask(fresh.values())
            self._entries.update(
                {content: Entry(trial) for content, trial in zip(fresh, trials, strict=True)}
            )
        return [self._entries[content] for content in contents]

    def profile(self, experiment: Experiment) -> Steps[Result]:
        """Run an experiment that only looks at the model."""
        trials = yield from self._ask([experiment])
        return trials[0].result

    def settle(self, entries: Iterable[Entry] | None = None) -> Steps[Entry | None]:
        """The best of some configs, or of all; near-ties run again before the decision. None: none ran."""
        candidates = self._ranked(self._entries.values() if entries is None else entries)
        # Twice: the config that was best at first may turn out to be worse.
        for _ in range(2):
            close = [entry for entry in candidates if self._is_close(entry, candidates[0])][:MOST_TIES]
            if len(close) > 1:
                yield from self._repeat(close)
            candidates = self._ranked(candidates)
        return candidates[0] if candidates else None

    def best_of(self, space: str) -> Entry | None:
        """The best config of a space so far. None: no config of it ran."""
        ranked = self._ranked([entry for entry in self._entries.values() if entry.experiment.space == space])
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
        close = [entry for entry in ranked if best and (self._is_close(entry, best) or _overlap(entry, best))]
        spaces = []
        for name in dict.fromkeys([entry.experiment.space for entry in entries]):
            count = sum(entry.experiment.space == name for entry in entries)
            found = self.best_of(name)
            of_best = (found.experiment.name, found.value) if found else ("", None)
            spaces.append(Space(name, count, *of_best))
        near = [(entry.experiment.name, entry.values) for entry in close]
        ties = [Tie(name, min(values), max(values), len(values)) for name, values in near]
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
        runs = [trial for trial in self._trials if trial.experiment.kind == "run"]
        told = [f"{trial.experiment.name}: {why_not(trial)}" for trial in runs]
        return (self.notes or told or ["nothing was tried"])[-1]

    @property
    def _is_minimised(self) -> bool:
        return self.section.mode == "min"

    def _repeat(self, entries: Iterable[Entry]) -> Steps[None]:
        """Run configs again, as often as the section allows."""
        again = [(entry, n) for entry in entries for n in range(len(entry.trials), self.section.repeats + 1)]
        runs = [
            replace(entry.experiment, name=self._free(f"{entry.experiment.name}_repeat{n}"), repeat=n)
            for entry, n in again
        ]
        trials = (yield from self._ask(runs)) if runs else []
        for (entry, _), trial in zip(again, trials, strict=True):
            entry.trials.append(trial)
            if trial.value is None:
                name = trial.experiment.name
                self.notes.append(f"{name} failed, though the config ran before: {why_not(trial)}")

    def _ask(self, experiments: Iterable[Experiment]) -> Steps[list[Trial]]:
        asked = tuple(experiments)
        results = yield asked
        trials = [self._trial(run, results[run.name]) for run in asked if run.name in results]
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
            near = [entry for entry in found if self._is_close(entry, found[0])]
            steady = [entry for entry in near if not _has_failed(entry)][:1]
            found = [*steady, *[entry for entry in found if entry not in steady]]
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


class Batches(Record):
    """How large batches may be. Sizes are in samples."""

    workers: int
    """Workers of the job."""
    mp_size: int
    """Workers that share one copy of the model."""
    accumulation: int
    """Accumulation steps in the user's config."""
    least: int
    """Smallest micro batch."""
    most: int
    """Largest micro batch that the section allows."""
    most_of_step: int | None
    """Most samples of one worker in a step; None: no bound."""
    least_of_step: int
    """Fewest samples of one worker in a step."""
    given: int | None
    """The user's micro batch."""
    listed: tuple[int, ...]
    """Micro batches that the user listed, ascending: only these are tried; empty: dsl looks for them."""

    def steps_while_searching(self, micro_batch: int) -> int:
        """Accumulation steps of a run that only tests whether a micro batch fits."""
        if self.most_of_step is None:
            return self.accumulation
        return max(min(self.accumulation, self.most_of_step // micro_batch), 1)

    def samples_of_step(self, largest: int) -> int:
        """Samples of one worker in a step, once the largest micro batch is known."""
        if self.most_of_step is not None:
            return max(self.most_of_step, largest)
        return max(largest * self.accumulation // self.mp_size, largest, self.least_of_step)


class Found(Record):
    """The micro batches that were found for a stage."""

    largest: int
    """Largest micro batch that runs."""
    sizes: tuple[int, ...]
    """Micro batches worth trying with other settings, ascending."""
    samples: int
    """Samples of one worker in a step."""


class NotFound(Exception):  # noqa: N818  the search goes on with the next stage
    """A stage does not run even with the smallest micro batch; why, in one line."""


def read_batches(section: Section, config: Mapping[str, object], workers: int) -> Batches:
    """The bounds from section and config. Values of types that DeepSpeed does not take are ignored.

    Raises:
        AutotuningError: a count is too large, accumulation steps are a list, a listed micro batch is no
            whole number from 1 on, or every listed micro batch makes too large a step.
    """
    for key in (MICRO_BATCH, ACCUMULATION):
        value = config.get(key)
        if any(is_count(size) and size >= BEYOND for size in (value if isinstance(value, list) else [value])):
            raise AutotuningError(f"{key}: expected numbers of at most {BEYOND - 1}, got {show(value)}")
    most, most_of_step = section.max_train_micro_batch_size_per_gpu, None
    if section.max_train_batch_size is not None:
        most_of_step = section.max_train_batch_size * section.mp_size // workers
        most = min(most, most_of_step)
    given, steps = config.get(MICRO_BATCH), config.get(ACCUMULATION)
    if isinstance(steps, list):
        raise AutotuningError(
            f"{ACCUMULATION}: a list is not tried, got {show(steps)}: give one number, or name it in "
            "autotuning.space"
        )
    if isinstance(given, list) and not all(is_count(size) for size in given):
        raise AutotuningError(f"{MICRO_BATCH}: expected whole numbers from 1 on, got {show(given)}")
    listed = sorted({*given}) if isinstance(given, list) else []
    if listed and listed[0] > (most_of_step or listed[0]):
        raise AutotuningError(
            f"{MICRO_BATCH}: none of {show(given)} leaves a step within autotuning.max_train_batch_size "
            f"{section.max_train_batch_size}"
        )
    return Batches(
        workers=workers,
        mp_size=section.mp_size,
        accumulation=steps if is_count(steps) else 1,
        least=section.min_train_micro_batch_size_per_gpu,
        most=most,
        most_of_step=most_of_step,
        least_of_step=-(-section.min_train_batch_size * section.mp_size // workers),
        given=given if is_count(given) else None,
        listed=tuple([size for size in listed if size <= (most_of_step or size)]),
    )


class Stage:
    """Tries micro batches with one ZeRO stage."""

    def __init__(
        self, number: int, config: Mapping[str, object], batches: Batches, results: Results, lanes: int = 1
    ) -> None:
        """Take what is tuned. With several lanes, idle lanes try sizes that may be needed next."""
        self.space = f"z{number}"
        self._config = with_stage(config, number)
        self._batches = batches
        self._results = results
        self._lanes = lanes
        self._seen: set[tuple[int, int]] = set()

    def tune(self, start: int, fits: int | None) -> Steps[Found]:
        """Run all steps. Raises NotFound.

        Args:
            start: largest micro batch of the stage before; 0: there is none.
            fits: largest micro batch that should fit into memory; None: unknown.
        """
        if self._batches.listed:
            return (yield from self._try_listed())
        smallest = yield from self._smallest(start)
        largest = yield from self._largest(smallest, fits)
        if largest < start:
            raise NotFound(f"no micro batch as large as that of the stage before, {start}")
        samples = self._batches.samples_of_step(largest)
        sizes = self._between(smallest, largest, samples)
        best = yield from self._look_below(smallest, sizes, samples)
        return Found(largest, (*sizes[:-1], best), samples)

    def _try_listed(self) -> Steps[Found]:
        sizes = self._batches.listed
        samples = sizes[-1] * self._batches.steps_while_searching(sizes[-1])
        entries = yield from self._run_all([(size, samples // size) for size in sizes])
        ran = [size for size, entry in zip(sizes, entries, strict=True) if entry.value is not None]
        if not ran:
            raise _failed(entries[0], sizes[0])
        return Found(ran[-1], sizes, samples)

    def _smallest(self, start: int) -> Steps[int]:
        bounds = self._batches
        size = start or max(min(bounds.given or 1, bounds.most), bounds.least)
        entry = yield from self._probe(size)
        if entry.value is None and not start and size > bounds.least and _ran_out_of_memory(entry):
            size = bounds.least
            entry = yield from self._probe(size)
        if entry.value is None:
            raise _failed(entry, size)
        return size

    def _largest(self, smallest: int, fits: int | None) -> Steps[int]:
        bounds = self._batches
        limit = max(bounds.most if fits is None else min(fits, bounds.most), smallest)
        sizes = [size for size in (ceil(1.05 * limit), limit, int(0.95 * limit)) if size <= bounds.most]
        for place, size in enumerate(sizes):
            if size <= smallest:
                return smallest
            entry = yield from self._probe(size, [larger for larger in sizes[place:] if larger > smallest])
            if entry.value is not None:
                return size
        # A size that fails from here on is too large: the smallest size has run.
        low, high = smallest, limit
        before = (yield from self._probe(smallest)).value
        while low <= high:
            middle = (low + high) // 2
            entry = yield from self._probe(middle, _middles(low, high, self._lanes))
            if entry.value is None:
                high = middle - 1
                continue
            low = middle + 1
            if middle != smallest:
                assert before is not None
                if self._results.gain(entry.value, before) < MARKED:
                    break
                before = entry.value
        return low - 1

    def _between(self, smallest: int, largest: int, samples: int) -> tuple[int, ...]:
        """Micro batches that need more accumulation steps than the largest one, and the largest."""
        low = max(smallest, largest // 2)
        stride = max((largest - low) // self._results.section.num_tuning_micro_batch_sizes, 1)
        sizes = [size for size in range(low, largest, stride) if samples // size != samples // largest]
        return (*sizes, largest)

    def _look_below(self, smallest: int, sizes: tuple[int, ...], samples: int) -> Steps[int]:
        """Try sizes below the largest, which may be slow because memory is short. Returns the best size."""
        entries = yield from self._run_all([(size, samples // size) for size in sizes])
        best, value = sizes[-1], entries[-1].value
        low = sizes[-2] + 1 if len(sizes) > 1 else smallest
        stride = max((sizes[-1] - low) // 3, 1)
        below = [(size, samples // size) for size in reversed(range(low, sizes[-1], stride))]
        for place, (size, _) in enumerate(below):
            entry = yield from self._run(below[place], below[place:])
            if entry.value is None or (
                value is not None and self._results.gain(entry.value, value) <= MARKED
            ):
                break
            best, value = size, entry.value
        return best

    def _probe(self, size: int, ahead: Sequence[int] = ()) -> Steps[Entry]:
        """Run a size to see whether it fits; idle lanes run sizes ``ahead`` that may be needed next."""
        pairs = [(tried, self._batches.steps_while_searching(tried)) for tried in (size, *ahead)]
        return (yield from self._run(pairs[0], pairs))

    def _run(self, pair: tuple[int, int], ahead: Sequence[tuple[int, int]]) -> Steps[Entry]:
        fresh = [other for other in dict.fromkeys(ahead) if other not in self._seen]
        beside = fresh[: self._lanes] if pair not in self._seen and self._lanes > 1 else []
        return (yield from self._run_all(list(dict.fromkeys([pair, *beside]))))[0]

    def _run_all(self, sizes: list[tuple[int, int]]) -> Steps[list[Entry]]:
        self._seen.update(sizes)
        wanted = [
            Experiment(
                f"{self.space}_gas{steps}_tmbspg{size}",
                with_batch(self._config, size, steps, self._batches),
                "run",
                self.space,
            )
            for size, steps in sizes
        ]
        return (yield from self._results.run(wanted))


def _middles(low: int, high: int, count: int) -> list[int]:
    """The sizes that a bisection may need, the next first: the middle, then the middle of each half."""
    ranges, found = [(low, high)], list[int]()
    while ranges and len(found) < count:
        (low, high), *ranges = ranges
        if low <= high:
            middle = (low + high) // 2
            found.append(middle)
            ranges += [(middle + 1, high), (low, middle - 1)]
    return found


def with_stage(config: Mapping[str, object], stage: int) -> dict[str, object]:
    """A config with a ZeRO stage and the first value of each list. ZeRO keys that are null are left out."""
    own = first_config(config)
    return {**own, ZERO: {**without_nulls(section_of(own, ZERO)), STAGE: stage}}


def with_batch(config: Mapping[str, object], size: int, steps: int, batches: Batches) -> dict[str, object]:
    """A config with a micro batch, its accumulation steps, and the resulting train batch."""
    total = size * steps * batches.workers // batches.mp_size
    return {**config, MICRO_BATCH: size, ACCUMULATION: steps, TRAIN_BATCH: total}


def _failed(entry: Entry, size: int) -> NotFound:
    if _ran_out_of_memory(entry):
        return NotFound(f"a micro batch of {size} does not fit into memory")
    name = entry.experiment.name
    return NotFound(f"{name} fails for another reason than memory: {why_not(entry.trials[0])}")


def _ran_out_of_memory(entry: Entry) -> bool:
    return entry.trials[0].result.outcome == "oom"
