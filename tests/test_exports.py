"""The package's public names are exactly those it lists."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

import pytest

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
