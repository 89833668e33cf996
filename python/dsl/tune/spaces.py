"""Spaces of configs: the values that are tried for each key, every config that they make, and in which order.

If a config has a list where DeepSpeed takes one value, the user wants to try these values. The defaults of
the ZeRO stages and the names of experiments, which are also names of folders, are DeepSpeed's. A sampler
proposes each point of a space at most once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import product
from math import prod
from typing import Any

from dsl._record import Record
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
    is_number,
    section_of,
)
from dsl.words import show

MOST_POINTS = 20_000
"""Most configs of a space, so that a mistake in its lists does no harm."""

# DeepSpeed takes one number, word or switch here, so a list has values to try. Elsewhere a list is a value.
_SECTIONS = (
    *(ZERO, f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer"),
    *("fp16", "bf16", "bfloat16", "activation_checkpointing", "aio"),
)
_KEYS = (
    *(MICRO_BATCH, ACCUMULATION, "gradient_clipping", "prescale_gradients", "gradient_predivide_factor"),
    *("gradient_allreduce_op", "sparse_gradients", "communication_data_type", "disable_allgather"),
)
_BUCKETS = [50_000_000, 500_000_000, 1_000_000_000]
_BOTH = [True, False]
_DEFAULTS: dict[int, dict[str, object]] = {
    1: {"reduce_bucket_size": _BUCKETS, "allgather_bucket_size": _BUCKETS},
    2: {
        "overlap_comm": _BOTH,
        "reduce_scatter": [False, True],
        "reduce_bucket_size": _BUCKETS,
        "allgather_bucket_size": _BUCKETS,
        "contiguous_gradients": [False, True],
    },
    3: {
        "overlap_comm": _BOTH,
        "reduce_scatter": [False, True],
        "reduce_bucket_size": _BUCKETS,
        "allgather_partitions": _BOTH,
        "allgather_bucket_size": _BUCKETS,
        "contiguous_gradients": [False, True],
    },
}
_ONE: dict[str, object] = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
_TWO: dict[str, object] = {
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "contiguous_gradients": False,
}
_THREE: dict[str, object] = {
    **_TWO,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 1_000_000,
    "stage3_gather_16bit_weights_on_model_save": False,
    "sub_group_size": 1_000_000_000_000,
}
_TEMPLATES: dict[int, dict[str, object]] = {1: _ONE, 2: _TWO, 3: _THREE}


class Point(Record):
    """A config of a space."""

    name: str
    """Name of its experiment."""
    config: Mapping[str, object]
    """The whole config."""
    choice: tuple[int, ...]
    """For each axis of the space, the index of the value that this config has."""


class Axis(Record):
    """A key that is tuned."""

    key: str
    """Dotted key of the config."""
    values: tuple[object, ...]
    """At least two, all different."""


class Grid(Record):
    """A space with all its points."""

    name: str
    """As the table shows it."""
    axes: tuple[Axis, ...]
    """The keys that are tuned."""
    points: tuple[Point, ...]
    """All different, in the order in which a grid search goes through them."""


def first_config(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """A config in which each list of values to try is replaced by the first of them.

    ``prefix``: dotted key of this section, with a dot at the end; empty: it is a whole config.
    """
    own: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            own[key] = first_config(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and _is_tried(prefix + key):
            own[key] = value[0]
        else:
            own[key] = value
    return own


def _is_tried(key: str) -> bool:
    return key in _KEYS or key.rpartition(".")[0] in _SECTIONS


def without_nulls(config: Mapping[str, object]) -> dict[str, object]:
    """A config without the keys whose value is null: with null, a user takes a key out."""
    return {
        key: without_nulls(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not None
    }


def zero_grid(
    stage: int,
    config: Mapping[str, object],
    micro_batches: Sequence[int],
    samples: int,
    *,
    hidden_size: int,
    workers: int,
) -> Grid:
    """The full space of a ZeRO stage.

    The user's config wins: for a key that is tuned by default, the user's value or list replaces the default
    values, and null takes the key out of the space and of the template.

    Args:
        stage: 1 to 3.
        config: the user's config.
        micro_batches: micro batches to try.
        samples: samples of one worker in a step; with the micro batch they give the accumulation steps.
        hidden_size: width of the model, which sets some sizes of stage 3; 0: unknown.
        workers: workers that share the samples of a step; fewer than all if several share a model's copy.

    Raises:
        AutotuningError: there are too many configs.
    """
    said = {key: value for key, value in section_of(config, ZERO).items() if key != STAGE}
    zero = {STAGE: stage, **_TEMPLATES[stage], **_sizes_of(stage, hidden_size), **_DEFAULTS[stage], **said}
    left_out = (ZERO, MICRO_BATCH, ACCUMULATION, TRAIN_BATCH, AUTOTUNING)
    others = {key: value for key, value in config.items() if key not in left_out}
    space = {ZERO: zero, MICRO_BATCH: list(micro_batches), **others}
    # DeepSpeed has the keys in the template's order in names of experiments, else in the defaults' order.
    listed = {**space, ZERO: {STAGE: stage, **_DEFAULTS[stage], **said}}
    axes = _checked(_axes(listed, ""))
    tuned = {axis.key.rpartition(".")[2] for axis in axes}
    points, seen = [], set()
    for choice in product(*[range(len(axis.values)) for axis in axes]):
        point = first_config(space)
        for axis, place in zip(axes, choice, strict=True):
            _put(point, axis.key, axis.values[place])
        point = without_nulls(point)
        micro_batch = point[MICRO_BATCH]
        assert isinstance(micro_batch, int)
        steps = max(samples // micro_batch, 1)
        point |= {ACCUMULATION: steps, TRAIN_BATCH: micro_batch * steps * workers}
        if (content := fingerprint(point)) not in seen:
            seen.add(content)
            points.append(Point(full_name(point, tuned, f"z{stage}_"), point, choice))
    named = {ZERO: listed[ZERO], MICRO_BATCH: listed[MICRO_BATCH]}
    return Grid(full_name(named, tuned, f"z{stage}_", has_values=False), axes, tuple(points))


def own_grid(config: Mapping[str, object], space: Mapping[str, tuple[object, ...]]) -> Grid:
    """The space of the user's own section ``space``.

    Raises:
        AutotuningError: a key leads through a value that is no section, or there are too many configs.
    """
    axes = _checked([Axis(key, _different(values)) for key, values in space.items()])
    points = []
    for choice in product(*[range(len(axis.values)) for axis in axes]):
        values = {axis.key: axis.values[place] for axis, place in zip(axes, choice, strict=True)}
        point = deepcopy(dict(config))
        for key, value in values.items():
            _put(point, key, value)
        points.append(Point(dotted_name(values), point, choice))
    return Grid("space", axes, tuple(points))


def count_own(space: Mapping[str, tuple[object, ...]]) -> int:
    """How many configs `own_grid` makes of this space."""
    return prod([len(_different(values)) for values in space.values()])


def _sizes_of(stage: int, hidden_size: int) -> dict[str, object]:
    if stage < 3 or not hidden_size:
        return {}
    return {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


def _axes(space: Mapping[str, object], prefix: str) -> Iterator[Axis]:
    for key, value in space.items():
        if isinstance(value, dict):
            yield from _axes(value, f"{prefix}{key}.")
        elif isinstance(value, list) and _is_tried(prefix + key) and len(values := _different(value)) > 1:
            yield Axis(prefix + key, values)


def _checked(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    own = tuple(axes)
    if (count := prod([len(axis.values) for axis in own])) > MOST_POINTS:
        raise AutotuningError(
            f"the lists of values make {count} configs, more than {MOST_POINTS}: leave some values out"
        )
    return own


def _different(values: Sequence[object]) -> tuple[object, ...]:
    # By content: 1, 1.0 and true are equal in Python, but different for a script.
    return tuple({fingerprint(value): value for value in values}.values())


def _put(config: dict[str, object], key: str, value: object) -> None:
    inner, parts = config, key.split(".")
    for place, part in enumerate(parts[:-1]):
        section = inner.setdefault(part, {})
        if not isinstance(section, dict):
            raise AutotuningError(
                f"autotuning.space: {show(key)} leads through {'.'.join(parts[: place + 1])}, which holds "
                f"{show(section)} and no section"
            )
        inner = section
    inner[parts[-1]] = deepcopy(value)  # not shared between configs


_LONGEST = 180
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._+-=")
_OFFLOAD = {"offload_param": "op_", "offload_optimizer": "oo_"}


def full_name(
    config: Mapping[str, object], tuned: Collection[str], prefix: str, *, has_values: bool = True
) -> str:
    """Name of an experiment of a full space: initials of each tuned key, and its value.

    ``has_values``: if false, it is the name of the space, without the values.
    """
    keys = {*tuned, MICRO_BATCH, ACCUMULATION}
    return as_folder(prefix + (_join(config, keys, has_values=has_values) or "exp"))


def dotted_name(values: Mapping[str, object]) -> str:
    """Name of an experiment of the user's own space: ``batch=8_lr=0.1``, each key by its last part."""
    return as_folder("_".join([f"{key.rpartition('.')[2]}={value}" for key, value in values.items()]))


def as_folder(text: str) -> str:
    """A text as the name of a folder that cannot lead out of its parent folder."""
    name = "".join([one if one in _PLAIN or one == "_" else "-" for one in text])
    return (name if name.strip(".") else "exp")[:_LONGEST]


def _join(config: Mapping[str, object], keys: Collection[str], *, has_values: bool) -> str:
    text = ""
    for key, value in config.items():
        if key == "arg_mappings":
            continue
        if key in _OFFLOAD:
            text += _OFFLOAD[key]
            if has_values:
                inner = value.items() if isinstance(value, dict) else None
                text += "None_" if inner is None else "".join([_word(name, one) for name, one in inner])
            continue
        if isinstance(value, dict):
            inside = _join(value, keys, has_values=has_values)
            text += f"{inside}_" if inside else ""
        if key in keys:
            text += _word(key, value) if has_values else f"{_initials(key)}_"
    return text[:-1]


def _word(key: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{_initials(key)}{'T' if value else 'F'}_"
    if isinstance(value, int | float) and value > 9000:
        return f"{_initials(key)}{value:.1e}_"
    return f"{_initials(key)}{value}_"


def _initials(key: str) -> str:
    return "".join([part[:1] for part in key.split("_")])


_ASKS = 8
"""How often the model is asked for a point that is untried, before the nearest one is taken."""


class InOrder:
    """Goes through a list of points, and learns nothing: grid search and random search."""

    def __init__(self, points: list[Point]) -> None:
        self._points = points

    def propose(self, count: int) -> list[Point]:
        """The next points of the list, at most ``count``; empty if no point is left."""
        batch, self._points = self._points[:count], self._points[count:]
        return batch

    def learn(self, point: Point, value: float | None) -> None:
        """Do nothing: the order is fixed."""


class ModelBased:
    """Proposes the points that a model finds promising, or the nearest points that are untried.

    The model is a tree-structured Parzen estimator (optuna's).
    """

    def __init__(self, grid: Grid, section: Section) -> None:
        """Set up the model of a space.

        Raises:
            AutotuningError: optuna is not installed.
        """
        self._optuna = _import_optuna()
        self._axes = grid.axes
        self._left = {point.choice: point for point in grid.points}
        starts = max(2, min(10, len(self._left) // 4))
        self._study = self._optuna.create_study(
            direction="minimize" if section.mode == "min" else "maximize",
            sampler=self._optuna.samplers.TPESampler(seed=section.seed, n_startup_trials=starts),
        )
        self._distributions = {axis.key: self._distribution(axis) for axis in grid.axes}

    def propose(self, count: int) -> list[Point]:
        """The next points, at most ``count``, all new; empty if no point is left."""
        return [self._next() for _ in range(min(count, len(self._left)))]

    def learn(self, point: Point, value: float | None) -> None:
        """Tell the model about a result. A failed point counts as worse than every point that ran."""
        states = self._optuna.trial.TrialState
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params={axis.key: place for axis, place in zip(self._axes, point.choice, strict=True)},
                distributions=self._distributions,
                value=value,
                state=states.PRUNED if value is None else states.COMPLETE,
            )
        )

    def _next(self) -> Point:
        choice: tuple[int, ...] = ()
        for _ in range(_ASKS):
            trial = self._study.ask(self._distributions)
            choice = tuple([trial.params[axis.key] for axis in self._axes])
            # `learn` tells the result later, also if another point is tried in place of this one.
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
            if choice in self._left:
                return self._left.pop(choice)
        nearest = min(self._left, key=lambda one: self._distance(one, choice))
        return self._left.pop(nearest)

    def _distance(self, one: tuple[int, ...], other: tuple[int, ...]) -> float:
        return sum(
            abs(a - b) / len(axis.values) if _is_ordered(axis) else float(a != b)
            for axis, a, b in zip(self._axes, one, other, strict=True)
        )

    def _distribution(self, axis: Axis) -> Any:
        places = range(len(axis.values))
        # Numbers have an order; other values are only equal or different.
        if _is_ordered(axis):
            return self._optuna.distributions.IntDistribution(0, places[-1])
        return self._optuna.distributions.CategoricalDistribution(list(places))


def make_sampler(grid: Grid, section: Section) -> InOrder | ModelBased:
    """The sampler that the section asks for.

    Raises:
        AutotuningError: it needs a package that is not installed.
    """
    points = list(grid.points)
    if section.tuner_type == "model_based":
        return ModelBased(grid, section)
    if section.tuner_type == "random":
        # Sorted by a hash: the same order with every version of Python, which replaying a search needs.
        points.sort(key=lambda point: fingerprint(section.seed, point.config))
    return InOrder(points)


def _is_ordered(axis: Axis) -> bool:
    numbers = [one for one in axis.values if is_number(one)]
    return len(numbers) == len(axis.values) and numbers in (sorted(numbers), sorted(numbers, reverse=True))


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise AutotuningError(
            "autotuning.tuner_type model_based needs optuna: pip install optuna, "
            "or choose gridsearch or random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
