"""Choose the order in which the points of a space are tried. A sampler proposes each point at most once."""

from __future__ import annotations

from dsl.errors import AutotuningError
from dsl.tune.ds_config import fingerprint
from dsl.tune.section import is_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dsl.tune.section import Section
    from dsl.tune.spaces import Axis, Grid, Point


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
