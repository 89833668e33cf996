"""Finds the best micro batch of a ZeRO stage: DeepSpeed's steps, one stage at a time.

The steps find the smallest micro batch that runs and the largest, try some between them, and then some
just below the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from dsl._record import Record
from dsl.errors import AutotuningError
from dsl.lists import BEYOND, show
from dsl.tune.config import ACCUMULATION, MICRO_BATCH, STAGE, TRAIN_BATCH, ZERO, Section, is_count
from dsl.tune.experiment import Experiment
from dsl.tune.results import Entry, Results, Steps, why_not
from dsl.tune.spaces import first_config, without_nulls

MARKED = 0.05
"""The search goes on in a direction only if a micro batch is better by this share."""


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


class NotFound(Record):
    """A stage that does not run even with the smallest micro batch."""

    reason: str
    """Why, in one line."""
    is_too_large: bool = True
    """Whether memory was the reason, so that a smaller micro batch may run."""


def read_batches(section: Section, config: Mapping[str, object], workers: int) -> Batches:
    """The bounds from section and config. Values of types that DeepSpeed does not take are ignored.

    Raises:
        AutotuningError: a count is too large, accumulation steps are a list, a listed micro batch is no
            whole number from 1 on, or every listed micro batch makes too large a step.
    """
    for key in (MICRO_BATCH, ACCUMULATION):
        value = config.get(key)
        if any(is_count(one) and one >= BEYOND for one in (value if isinstance(value, list) else [value])):
            raise AutotuningError(f"{key}: expected numbers of at most {BEYOND - 1}, got {show(value)}")
    most_of_step = None
    if section.max_train_batch_size is not None:
        most_of_step = section.max_train_batch_size * section.mp_size // workers
    most = section.max_train_micro_batch_size_per_gpu
    if most_of_step is not None:
        most = min(most, most_of_step)
    given, steps = config.get(MICRO_BATCH), config.get(ACCUMULATION)
    if isinstance(steps, list):
        raise AutotuningError(
            f"{ACCUMULATION}: a list is not tried, got {show(steps)}: give one number, or name it in "
            "autotuning.space"
        )
    if isinstance(given, list) and not all(is_count(one) for one in given):
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
        listed=tuple([one for one in listed if one <= (most_of_step or one)]),
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

    def tune(self, start: int, fits: int | None) -> Steps[Found | NotFound]:
        """Run all steps.

        Args:
            start: largest micro batch of the stage before; 0: there is none.
            fits: largest micro batch that should fit into memory; None: unknown.
        """
        if self._batches.listed:
            return (yield from self._try_listed())
        smallest = yield from self._smallest(start, fits)
        if isinstance(smallest, NotFound):
            return smallest
        largest = yield from self._largest(smallest, fits)
        if largest < start:
            return NotFound(f"no micro batch as large as that of the stage before, {start}")
        samples = self._batches.samples_of_step(largest)
        sizes = self._between(smallest, largest, samples)
        best = yield from self._look_below(smallest, sizes, samples)
        return Found(largest, (*sizes[:-1], best), samples)

    def _try_listed(self) -> Steps[Found | NotFound]:
        sizes = self._batches.listed
        samples = sizes[-1] * self._batches.steps_while_searching(sizes[-1])
        entries = yield from self._run_all([(size, samples // size) for size in sizes])
        ran = [size for size, entry in zip(sizes, entries, strict=True) if entry.value is not None]
        return Found(ran[-1], sizes, samples) if ran else _failed(entries[0], sizes[0])

    def _smallest(self, start: int, fits: int | None) -> Steps[int | NotFound]:
        bounds = self._batches
        if fits is not None and start > fits:
            return NotFound(f"memory suffices for a micro batch of {fits} at most")
        first = start or max(min(bounds.given or 1, bounds.most), bounds.least)
        entry = yield from self._probe(first)
        if entry.value is not None:
            return first
        failed = _failed(entry, first)
        if start or not failed.is_too_large or first <= bounds.least:
            return failed
        entry = yield from self._probe(bounds.least)
        return bounds.least if entry.value is not None else _failed(entry, bounds.least)

    def _largest(self, smallest: int, fits: int | None) -> Steps[int]:
        bounds = self._batches
        limit = max(bounds.most if fits is None else min(fits, bounds.most), smallest)
        sizes = [size for size in (ceil(1.05 * limit), limit, int(0.95 * limit)) if size <= bounds.most]
        for place, size in enumerate(sizes):
            if size <= smallest:
                return smallest
            entry = yield from self._probe(size, [one for one in sizes[place:] if one > smallest])
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
        pairs = [(one, self._batches.steps_while_searching(one)) for one in (size, *ahead)]
        return (yield from self._run(pairs[0], pairs))

    def _run(self, pair: tuple[int, int], ahead: Sequence[tuple[int, int]]) -> Steps[Entry]:
        fresh = [one for one in dict.fromkeys(ahead) if one not in self._seen]
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
    zero = own.get(ZERO)
    return {**own, ZERO: {**(without_nulls(zero) if isinstance(zero, dict) else {}), STAGE: stage}}


def with_batch(config: Mapping[str, object], size: int, steps: int, batches: Batches) -> dict[str, object]:
    """A config with a micro batch, its accumulation steps, and the resulting train batch."""
    total = size * steps * batches.workers // batches.mp_size
    return {**config, MICRO_BATCH: size, ACCUMULATION: steps, TRAIN_BATCH: total}


def _failed(entry: Entry, size: int) -> NotFound:
    first = entry.trials[0]
    if first.result.outcome == "oom":
        return NotFound(f"a micro batch of {size} does not fit into memory")
    name = entry.experiment.name
    return NotFound(f"{name} fails for another reason than memory: {why_not(first)}", is_too_large=False)
