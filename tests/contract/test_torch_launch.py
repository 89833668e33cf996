"""Launches from Python against torch's (golden/torch_launch.json): results and errors, but for a list of differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.contract.golden_file import cases
from tests.contract.torch_launch_inputs import CASES, observe

from dsl.functions.launcher import ChildFailedError, LaunchConfig, launch_agent

GOLDEN: dict[str, dict[str, Any]] = dict(cases("torch_launch"))
NEED_TORCH = ("no run_id, two nodes", "two nodes, of which one comes")
"""Nodes that meet by torch's rendezvous."""
REFUSED = {"raises": ["ValueError"]}
NO_ENTRYPOINT = {"at": "launch", "raises": ["TypeError"]}

# What ours does in place of that; docs/functions.md has the reasons.
DIFFERENCES: dict[str, dict[str, Any]] = {
    "arguments": {"results": {"0": [1, "a b", "0", "$$", "$x", None]}},
    "a program without an interpreter": {
        "at": "launch",
        "raises": ["ChildFailedError"],
        "name": "FOLDER/headless",
        "first": 0,
        "failures": {"0": [126, 0, "str", False]},
    },
    "a program without a name": NO_ENTRYPOINT,
    "no entrypoint": NO_ENTRYPOINT,
    "an entrypoint that is a number": NO_ENTRYPOINT,
    "a function that cannot be pickled": NO_ENTRYPOINT,
    "a function that exits with None": {"results": {"0": None}},
    "a result that cannot be pickled": {
        **GOLDEN["a result that cannot be pickled"],
        "failures": {"0": [1, 0, "dict", True]},
    },
    "a log_dir that is a file": {**GOLDEN["a log_dir that is a file"], "at": "launch"},
    "a log_dir in a file": {**GOLDEN["a log_dir in a file"], "at": "launch"},
    "no run_id": {**GOLDEN["no run_id"], "warned": False},
    "a static endpoint without a host": {"results": {"0": 3}},
    "a backend that nobody knows": {"results": {"0": 3}},
    "no worker": {"at": "launch", **REFUSED},
    "less than no restart": {"at": "config", **REFUSED},
    "an interval of none": {"results": {"0": 3}},
    "a signal that cannot be handled": {"at": "config", **REFUSED},
}


@pytest.mark.proc
@pytest.mark.usefixtures("without_cloudpickle")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.torch] if name in NEED_TORCH else []) for name in CASES]
)
def test_a_launch_ends_as_with_torch(name: str, tmp_path: Path) -> None:
    """An error of ours may be of more classes than torch's, and may come before the launch."""
    found = observe(name, lambda fields: LaunchConfig(**fields), launch_agent, ChildFailedError, tmp_path)
    expected = {**DIFFERENCES.get(name, GOLDEN[name])}
    if "raises" in expected:
        assert set(expected.pop("raises")) <= set(found.pop("raises"))
        assert (found.pop("at"), expected.pop("at")) != ("launch", "config")
    assert {**found, "says": ""} == {**expected, "says": ""}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_one(name: str) -> None:
    assert {**DIFFERENCES[name], "says": ""} != {**GOLDEN[name], "says": ""}
