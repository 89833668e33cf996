"""Records: the frozen data of the plan."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys

import pytest

from dsl._record import Record, replace


class Point(Record):
    x: int
    y: int = 2
    name: str = ""

    @property
    def total(self) -> int:
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


def test_records_compare_and_hash_by_value_and_kind() -> None:
    class Other(Record):
        x: int
        y: int = 2
        name: str = ""

    assert Point(1) == Point(1)
    assert Point(1) != Point(2)
    other: object = Other(1)
    assert Point(1) != other
    assert len({Point(1), Point(1), Point(2)}) == 2


class Slotted:
    __slots__ = ("x",)


class Annotated:
    """A base with a field that is only announced."""

    x: int


class Below(Annotated):
    """Has its field from its own base."""


@pytest.mark.parametrize("base, named", [(Point, Point), (Slotted, Slotted), (Below, Annotated)])
def test_fields_of_a_base_class_are_refused_instead_of_dropped(base: type, named: type) -> None:
    with pytest.raises(TypeError, match=f"Child cannot take over the fields of {named.__name__}"):
        type("Child", (base, Record), {"__annotations__": {"z": "int"}})


def test_a_base_class_without_fields_lends_its_methods() -> None:
    class Greeter:
        __slots__ = ()

        def greet(self) -> str:
            return "hello"

    class Child(Greeter, Record):
        z: int = 1

    assert (Child(2).z, Child().greet()) == (2, "hello")


@pytest.mark.parametrize("default", [[], {}, set(), bytearray(), ([],)], ids=repr)
def test_a_default_that_can_change_is_refused(default: object) -> None:
    with pytest.raises(TypeError, match=r"Child\.z has a default that can change"):
        type("Child", (Record,), {"__annotations__": {"y": "int", "z": "object"}, "y": 1, "z": default})


@pytest.mark.parametrize("default", [(), frozenset(), None, b"", Point(1), len], ids=repr)
def test_a_default_that_cannot_change_is_taken(default: object) -> None:
    made = type("Child", (Record,), {"__annotations__": {"z": "object"}, "z": default})
    assert made().z is default


def test_a_record_tells_its_signature() -> None:
    assert str(inspect.signature(Point)) == "(x: 'int', y: 'int' = 2, name: 'str' = '')"
    assert inspect.signature(Point).bind(1, name="a").arguments == {"x": 1, "name": "a"}


def test_a_signature_costs_nothing_until_it_is_asked_for() -> None:
    code = "import sys, dsl.model; sys.exit('inspect' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


def test_a_record_shows_copies_and_pickles_its_fields() -> None:
    point = Point(1, 2, "a")
    assert repr(point) == "Point(x=1, y=2, name='a')"
    assert pickle.loads(pickle.dumps(point)) == copy.deepcopy(point) == point


def test_replace_changes_fields_and_knows_no_others() -> None:
    assert replace(Point(1), y=7) == Point(1, 7)
    with pytest.raises(TypeError, match="no free field 'z'"):
        replace(Point(1), z=7)
