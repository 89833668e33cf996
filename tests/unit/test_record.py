"""Records: the frozen data of the plan."""

from __future__ import annotations

import copy
import pickle

import pytest

from dsl._record import record, replace


@record
class Point:
    """A record for the tests."""

    x: int
    y: int = 2
    name: str = ""

    @property
    def total(self) -> int:
        """Sum of the coordinates."""
        return self.x + self.y


def test_fields_are_taken_in_order_or_by_name() -> None:
    assert Point(1, 5) == Point(y=5, x=1)
    assert (Point(1).y, Point(1).name, Point(1, 4).total) == (2, "", 5)


@pytest.mark.parametrize(
    "args, kwargs, message",
    [
        ((), {}, "Point needs the field 'x'"),
        ((1, 2, "", 4), {}, "Point takes 3 fields, got 4"),
        ((1,), {"z": 1}, "Point has no free field 'z'"),
        ((1,), {"x": 1}, "Point has no free field 'x'"),
    ],
)
def test_wrong_fields_are_a_type_error(args: tuple[int, ...], kwargs: dict[str, int], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Point(*args, **kwargs)  # type: ignore[arg-type]


def test_a_record_cannot_be_changed() -> None:
    point = Point(1)
    with pytest.raises(AttributeError, match=r"Point\.x cannot be changed"):
        point.x = 3  # type: ignore[misc]
    with pytest.raises(AttributeError, match=r"Point\.x cannot be changed"):
        del point.x
    with pytest.raises(AttributeError):
        point.other = 3  # type: ignore[attr-defined]
    assert not hasattr(point, "__dict__")


def test_records_compare_and_hash_by_value_and_kind() -> None:
    @record
    class Other:
        x: int
        y: int = 2
        name: str = ""

    assert Point(1) == Point(1)
    assert Point(1) != Point(2)
    other: object = Other(1)
    assert Point(1) != other
    assert len({Point(1), Point(1), Point(2)}) == 2


def test_a_record_shows_copies_and_pickles_its_fields() -> None:
    point = Point(1, 2, "a")
    assert repr(point) == "Point(x=1, y=2, name='a')"
    assert pickle.loads(pickle.dumps(point)) == copy.deepcopy(point) == point


def test_replace_changes_fields_and_knows_no_others() -> None:
    assert replace(Point(1), y=7) == Point(1, 7)
    with pytest.raises(TypeError, match="no free field 'z'"):
        replace(Point(1), z=7)
