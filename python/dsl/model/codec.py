"""Records as JSON and back, checked: how a `Job` and the messages about it travel between hosts.

The bytes are JSON in ASCII. A record is an object whose only key is its class, and a tuple is a list. Bytes
of argv and environment that are no UTF-8 travel as the surrogates by which Python holds them. Reading never
runs code. A record that is read has only the fields of its class, each value fits the annotation of its
field, and every number is bounded. An annotation may name another annotation, which the record's module holds
as text. ``Shown`` marks text for the user, written by anyone: reading it makes it printable and bounds its
length.
"""

from __future__ import annotations

from dsl._record import fields, scope
from dsl.errors import JobFormatError
from dsl.words import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _ast import expr
    from collections.abc import Callable, Mapping
    from typing import Any, TypeAlias, TypeVar

    Reader: TypeAlias = Callable[[Any], Any]
    """Makes a value from what JSON holds. Raises `_Unfit`."""
    _T = TypeVar("_T")

LONGEST_SHOWN = 2000
"""Characters of a text for the user."""

LONGEST_NUMBER = 32
"""Digits of a whole number."""

BIGGEST = 2**63 - 1
"""Largest absolute value of a number."""


class _Unfit(Exception):  # noqa: N818  it says what a value is
    """A value does not fit its annotation; the text shows the value."""


def to_json(value: object) -> bytes:
    """JSON in ASCII."""
    from json import dumps

    return dumps(value, separators=(",", ":")).encode("ascii")


def from_json(data: bytes) -> Any:
    """The reverse of `to_json`.

    Raises:
        JobFormatError: the data is no JSON, nests a thousand levels deep, or has a number that is too long or
            not finite. The text is a clause, as for all errors of the functions below.
    """
    from json import loads

    try:
        # Among the constants are NaN and Infinity, which are no whole numbers.
        return loads(data.decode("ascii"), parse_int=_integer, parse_constant=_integer)
    except (ValueError, RecursionError):
        raise JobFormatError("it is not JSON") from None


def _integer(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(text[:LONGEST_NUMBER])
    return int(text)


def to_plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if not hasattr(value, "__match_args__"):
        return value
    return {type(value).__name__: {name: to_plain(getattr(value, name)) for name in value.__match_args__}}


def from_plain(value: Any, kinds: Mapping[str, type]) -> Any:
    """Read a record of one of these classes: the reverse of `to_plain`.

    Raises:
        JobFormatError: the value is no such record, or a part of it does not fit.
    """
    name = next(iter(value), "") if isinstance(value, dict) else value
    if not isinstance(value, dict) or len(value) != 1 or name not in kinds:
        raise JobFormatError(f"{_shown(name)} is none of {', '.join(kinds)}")
    return fields_from_plain(value[name], kinds[name])


def to_line(message: object) -> bytes:
    """A record of a conversation between two processes of ours, as one line."""
    return to_json(to_plain(message)) + b"\n"


def from_line(line: bytes, kinds: Mapping[str, type]) -> Any:
    """The reverse of `to_line`. Raises JobFormatError if the line is no record of these classes."""
    return from_plain(from_json(line), kinds)


def fields_from_plain(found: Any, kind: type[_T]) -> _T:
    """Make a record from its fields in JSON.

    Raises:
        JobFormatError: a field is missing or unknown, or its value does not fit.
    """
    readers = _READERS.get(kind)
    if readers is None:
        names = scope(kind)
        readers = _READERS[kind] = {field: _reader(text, names) for field, text in fields(kind).items()}
    if not isinstance(found, dict):
        raise JobFormatError(f"{_shown(found)} is no {kind.__name__}")
    values = {}
    for field, value in found.items():
        reader = readers.get(field)
        if reader is None:
            raise JobFormatError(f"{kind.__name__} has no field {_shown(field)}")
        try:
            values[field] = reader(value)
        except _Unfit as error:
            raise JobFormatError(f"{field} of {kind.__name__} is {error}") from None
    try:
        return kind(**values)
    except TypeError as error:
        raise JobFormatError(str(error)) from None


_READERS: dict[type, dict[str, Reader]] = {}
"""The reader of each field, for the classes of records that were read before."""


# Readers of values, made from annotations.


def _reader(annotation: str, names: Mapping[str, Any]) -> Reader:
    from _ast import PyCF_ONLY_AST

    # What `ast.parse` does. Importing its module would take longer than reading all annotations.
    tree: Any = compile(annotation, "", "eval", PyCF_ONLY_AST)
    return _reader_of(tree.body, names)


def _reader_of(node: expr, names: Mapping[str, Any]) -> Reader:
    """``names`` maps the names in annotations to what they stand for."""
    from _ast import BinOp, Constant, Name, Subscript

    if isinstance(node, Constant):
        return _one_of(None)
    if isinstance(node, BinOp):
        return _either(_reader_of(node.left, names), _reader_of(node.right, names))
    if isinstance(node, Subscript):
        assert isinstance(node.value, Name)
        inner = list(getattr(node.slice, "elts", (node.slice,)))
        if node.value.id == "Literal":
            return _one_of(*map(_constant, inner))
        if node.value.id == "Annotated":
            return _between(_reader_of(inner[0], names), *map(_constant, inner[1:]))
        assert node.value.id == "tuple", node.value.id
        is_open = isinstance(inner[-1], Constant)
        return _tuple([_reader_of(one, names) for one in inner[: 1 if is_open else None]], is_open=is_open)
    assert isinstance(node, Name)
    if node.id in _PLAIN:
        return _PLAIN[node.id]
    named = names[node.id]
    return _reader(named, names) if isinstance(named, str) else _record_of(named)


def _constant(node: Any) -> Any:
    return -node.operand.value if hasattr(node, "operand") else node.value


def _if(fits: Callable[[Any], bool]) -> Reader:
    """Reads a value as it is, if it fits."""

    def read(value: Any) -> Any:
        if fits(value):
            return value
        raise _Unfit(_shown(value))

    return read


def _of_type(*kinds: type) -> Reader:
    is_number = not {*kinds} & {str, bool}
    return _if(lambda value: type(value) in kinds and (not is_number or -BIGGEST <= value <= BIGGEST))


_text = _of_type(str)
_PLAIN: dict[str, Reader] = {
    "str": _text,
    "Shown": lambda value: printable(_text(value)[:LONGEST_SHOWN]),
    "bool": _of_type(bool),
    "int": _of_type(int),
    "float": _of_type(int, float),
}


def _one_of(*values: object) -> Reader:
    return _if(lambda value: any(type(one) is type(value) and one == value for one in values))


def _either(one: Reader, other: Reader) -> Reader:
    def read(value: Any) -> Any:
        try:
            return one(value)
        except _Unfit:
            return other(value)

    return read


def _between(reader: Reader, least: float, most: float) -> Reader:
    return _if(lambda value: least <= reader(value) <= most)


def _tuple(readers: list[Reader], *, is_open: bool) -> Reader:
    """``is_open``: any number of values, which the one reader reads."""

    def read(value: Any) -> Any:
        if type(value) is list and (is_open or len(value) == len(readers)):
            each = readers * len(value) if is_open else readers
            return tuple([reader(item) for reader, item in zip(each, value, strict=True)])
        raise _Unfit(_shown(value))

    return read


def _record_of(kind: type) -> Reader:
    kinds = {kind.__name__: kind}

    def read(value: Any) -> Any:
        if type(value) is dict:
            return from_plain(value, kinds)
        raise _Unfit(_shown(value))

    return read


def _shown(value: Any) -> str:
    """A value in one short line, however large it is."""
    if isinstance(value, str):
        return repr(value[:40])
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else repr(value)


LONGEST_LINE = 1 << 20
"""Most bytes of a line: a longer one counts as damaged."""


class Lines:
    """Reads the records of some classes, one a line (`to_line`), from bytes that come piece by piece."""

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        """Return the records whose lines ``data`` completes.

        Raises:
            JobFormatError: a line is damaged or too long. The text is a clause.
        """
        *whole, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (self._rest, *whole))) > LONGEST_LINE:
            raise JobFormatError(f"it is longer than {LONGEST_LINE} bytes")
        return [from_line(line, self._kinds) for line in whole]
