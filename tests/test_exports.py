"""The package's public names are exactly those it lists."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType

import pytest
from tests.support.command import ran

import dsl


def test_every_listed_name_exists_and_is_listed_once() -> None:
    assert len(set(dsl.__all__)) == len(dsl.__all__)
    missing = [name for name in dsl.__all__ if not hasattr(dsl, name)]
    assert missing == []


def test_nothing_public_is_left_unlisted() -> None:
    for name in dsl.__all__:
        getattr(dsl, name)
    public = {name for name, value in vars(dsl).items() if not name.startswith("_") and not is_part(value)}
    assert public - {"annotations", "TYPE_CHECKING"} == {
        name for name in dsl.__all__ if not name.startswith("_")
    }


def is_part(value: object) -> bool:
    return isinstance(value, ModuleType)


def test_every_public_name_is_documented() -> None:
    undocumented = [
        name
        for name in dsl.__all__
        if isinstance(getattr(dsl, name), type) and not inspect.getdoc(getattr(dsl, name))
    ]
    assert undocumented == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    name = "no_such_name"
    with pytest.raises(AttributeError, match=name):
        getattr(dsl, name)


PUBLIC = (
    "dsl",
    "dsl.elasticity",
    "dsl.errors",
    "dsl.functions",
    "dsl.functions.launcher",
    "dsl.run",
    "dsl.launch",
    "dsl.runner",
)


@pytest.mark.parametrize("name", PUBLIC)
def test_dir_of_a_public_module_shows_what_it_has(name: str) -> None:
    """Before anybody has asked for any of it: in a fresh interpreter."""
    code = (
        f"import sys, {name} as m; shown = set(dir(m)); print(set(getattr(m, '__all__', ())) - shown, *shown)"
    )
    answer = ran([sys.executable, "-c", code], check=True).stdout
    assert answer.startswith("set() ")
    module = importlib.import_module(name)
    assert all(hasattr(module, one) for one in dir(module))


def test_everything_the_engine_tells_compares_by_value_and_shows_itself() -> None:
    machines = {dsl.Supervisor, dsl.Guard}
    kinds = [kind for kind in vars(dsl).values() if isinstance(kind, type) and kind not in machines]
    told = [kind for kind in kinds if not issubclass(kind, BaseException)]
    assert {dsl.Started, dsl.Exit, dsl.GuardOutcome, dsl.LaunchSpec, dsl.Stdio} <= set(told)
    assert [kind for kind in told if kind.__repr__ is object.__repr__ or kind.__eq__ is object.__eq__] == []


@pytest.mark.parametrize(
    "name",
    [
        "parse_args",
        "fetch_hostfile",
        "parse_resource_filter",
        "parse_inclusion_exclusion",
        "encode_world_info",
        "parse_num_nodes",
        "main",
        "_parse_hostfile",
        "_stable_remove_duplicates",
    ],
)
def test_the_names_users_of_deepspeed_import_are_there(name: str) -> None:
    """Source of the list: the launcher's module ``deepspeed.launcher.runner``."""
    assert callable(getattr(importlib.import_module("dsl.runner"), name))
