"""Frozen records without `dataclasses`: importing that takes as long as a whole one-node launch may.

A record takes its fields in order or by name, compares and hashes by value, and cannot be changed. All
records inherit the functions below: no code is compiled for a record, and its class costs six microseconds
more than a plain one.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar

    from typing_extensions import dataclass_transform

    _T = TypeVar("_T")
else:

    def dataclass_transform(**_options: object) -> Callable[[Any], Any]:
        """Tell type checkers nothing at run time."""
        return lambda decorator: decorator


@dataclass_transform(frozen_default=True)
class Record:
    """The base of a frozen record: its annotations are the fields, its class attributes their defaults.

    Type checkers see a frozen dataclass.

    Raises:
        TypeError: when the class is made, if another base has fields, which would be lost; or if a default
            cannot be hashed, such as a list. Defaults are shared between instances, so they must not change.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        if cls.__bases__ != (Record,):
            _refuse_fields_of_bases(cls)
        names = tuple(cls.__annotations__)
        members = cls.__dict__
        defaults = {name: members[name] for name in names if name in members}
        for name, value in defaults.items():
            try:
                hash(value)
            except TypeError:
                raise TypeError(f"{cls.__name__}.{name} has a default that can change: {value!r}") from None
        cls.__match_args__ = names  # type: ignore[attr-defined, misc]
        cls._defaults = defaults  # type: ignore[attr-defined]
        cls._names = frozenset(names)  # type: ignore[attr-defined]


def _init(self: Any, /, *args: Any, **kwargs: Any) -> None:
    names = self.__match_args__
    fields = self.__dict__
    if len(args) + len(kwargs) != len(names):
        fields.update(self._defaults)
    if args:
        fields.update(zip(names, args))  # noqa: B905  the lengths are compared
    if kwargs:
        fields.update(kwargs)
        if not (kwargs.keys() <= self._names and kwargs.keys().isdisjoint(names[: len(args)])):
            raise TypeError(_misfit(self, args, kwargs))
    if len(fields) != len(names) or len(args) > len(names):
        raise TypeError(_misfit(self, args, kwargs))


def _misfit(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why the arguments do not fit the fields."""
    kind, names = type(self).__name__, self.__match_args__
    if len(args) > len(names):
        return f"{kind} takes {len(names)} fields, got {len(args)}"
    free = names[len(args) :]
    for name in free:
        if name not in kwargs and name not in self._defaults:
            return f"{kind} needs the field {name!r}"
    return f"{kind} has no free field {next(name for name in kwargs if name not in free)!r}"


def _values(self: Any) -> tuple[Any, ...]:
    fields = self.__dict__
    return tuple([fields[name] for name in self.__match_args__])


def _eq(self: Any, other: object) -> bool:
    if self is other:
        return True
    return _values(self) == _values(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash((type(self), _values(self)))


def _repr(self: Any) -> str:
    fields = ", ".join(
        f"{name}={value!r}" for name, value in zip(self.__match_args__, _values(self), strict=True)
    )
    return f"{type(self).__name__}({fields})"


def _reduce(self: Any) -> tuple[type, tuple[Any, ...]]:
    return type(self), _values(self)


def _refuse(self: Any, name: str, *_value: object) -> None:
    raise AttributeError(f"{type(self).__name__}.{name} cannot be changed: records are frozen")


def _refuse_fields_of_bases(cls: type) -> None:
    for base in cls.__mro__[1:]:
        if base.__dict__.get("__slots__") or getattr(base, "__annotations__", None):
            raise TypeError(f"{cls.__name__} cannot take over the fields of {base.__name__}")


class _Signature:
    """Makes the ``__signature__`` of a record on demand: a launch must not import `inspect`."""

    __slots__ = ()

    def __get__(self, _instance: object, cls: Any) -> Any:
        from inspect import Parameter, Signature

        def parameter(name: str) -> Parameter:
            default = cls._defaults.get(name, Parameter.empty)
            annotation = cls.__annotations__.get(name, Parameter.empty)
            return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)

        return Signature([parameter(name) for name in cls.__match_args__])


# Type checkers do not see these: they make their own.
for _name, _member in {
    "__signature__": _Signature(),
    "__init__": _init,
    "__eq__": _eq,
    "__hash__": _hash,
    "__repr__": _repr,
    "__reduce__": _reduce,
    "__setattr__": _refuse,
    "__delattr__": _refuse,
}.items():
    setattr(Record, _name, _member)


def fields(kind: type) -> Mapping[str, str]:
    """The fields of a record in order, each with its annotation as source text."""
    return kind.__annotations__


def scope(kind: type) -> Mapping[str, Any]:
    """The namespace that a record's annotations refer to: that of its module."""
    import sys

    return vars(sys.modules[kind.__module__])


def replace(instance: _T, **changes: Any) -> _T:
    """Return a copy of the record with some fields changed. Raises TypeError for a name that is no field."""
    names: tuple[str, ...] = instance.__match_args__  # type: ignore[attr-defined]
    values = dict(zip(names, _values(instance), strict=True))
    return type(instance)(**{**values, **changes})


class kept:  # noqa: N801  used as a decorator, like `property`
    """A property that is computed once, on first access. The one of functools takes two ms to import."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
