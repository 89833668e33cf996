"""Choose the order in which the points of a space are tried. A tuner tries each point at most once."""

from __future__ import annotations

from dsl.autotune.config import fingerprint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from dsl.autotune.section import Section
    from dsl.autotune.spaces import Grid, Point

    class Tuner(Protocol):
        """Proposes points and learns how they did."""

        def propose(self, count: int) -> list[Point]:
            """The next points, at most ``count``, all new; empty if no point is left."""

        def learn(self, point: Point, value: float | None) -> None:
            """Take the metric of a point; None: it failed."""


class InOrder:
    """Goes through a list of points, and learns nothing: grid search and random search."""

    def __init__(self, points: list[Point]) -> None:
        self._points = points

    def propose(self, count: int) -> list[Point]:
        """The next points of the list."""
        batch, self._points = self._points[:count], self._points[count:]
        return batch

    def learn(self, point: Point, value: float | None) -> None:
        """Do nothing: the order is fixed."""


def make_tuner(grid: Grid, section: Section) -> Tuner:
    """The tuner that the section asks for.

    Raises:
        AutotuningError: it needs a package that is not installed.
    """
    points = list(grid.points)
    if section.tuner_type == "model_based":
        from dsl.autotune.model import ModelBased

        return ModelBased(grid, section)
    if section.tuner_type == "random":
        # Sorted by a hash: the same order with every version of Python, which replaying a search needs.
        points.sort(key=lambda point: fingerprint(section.seed, point.config))
    return InOrder(points)
