"""Public names of torch's modules that we do not have ourselves, for programs that use ours in their place.

They come from a copy of torch's module, whose functions call ours where we have them. Nothing is imported
before somebody asks for such a name. The module itself may be replaced by ours in `sys.modules`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType
    from typing import Any

_copies: dict[str, ModuleType] = {}


def name_of_torch(name: str, module: str, ours: Mapping[str, Any]) -> Any:
    """The object of that name in this module of torch; ``ours`` are the names in the module that asks.

    Raises:
        AttributeError: there is no such name, or no torch.
    """
    where = f"module {ours['__name__']!r} has no attribute {name!r}"
    try:
        copy = _copies.get(module) or _copy(module, ours)
    except ImportError as error:
        raise AttributeError(f"{where}, and there is no {module}: {error}") from None
    if name not in vars(copy):
        raise AttributeError(where)
    return getattr(copy, name)


def _copy(module: str, ours: Mapping[str, Any]) -> ModuleType:
    package = import_module(module.rpartition(".")[0])
    spec = PathFinder.find_spec(module, package.__path__)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module {module}")
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    functions: Any = import_module("dsl.functions")
    for name in vars(copy).keys() & {*functions.__all__, *ours["__all__"]}:
        setattr(copy, name, ours[name] if name in ours else getattr(functions, name))
    _copies[module] = copy
    return copy
