"""The command line of ``dsl`` against that of DeepSpeed 0.19.8 (golden/flags.json, golden/parse_args.json)."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
from tests.contract.golden_file import cases

from dsl import runner
from dsl.cli.options_deepspeed import COMMAND_LINE
from dsl.cli.parser import Parser

# Ours does more than an int here: docs/compat.md, "Options".
OWN_TYPES = {"num_nodes": "node_count"}
# What its type is called there: the same, with a bound, or less a pair of quotes around it.
SAME_TYPES = {"integer": "int", "unquoted": "str"}
OWN_ATTRIBUTES = {
    *("master_port_given", "launcher_given", "log_level_given", "grace"),
    *("elastic_training", "min_elastic_nodes", "max_elastic_nodes"),
}
# DeepSpeed up to 0.19.7 (spec of the removed flags: a word, and its default).
REMOVED_FLAGS = {"--elastic_training": False, "--min_elastic_nodes": -1, "--max_elastic_nodes": -1}


def _parse(argv: list[str]) -> dict[str, Any]:
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        return vars(runner.parse_args(argv))


DEFAULTS = _parse(["script"])
ACTIONS = Parser(COMMAND_LINE)._option_string_actions


@pytest.mark.parametrize("option", cases("flags", "options"), ids=lambda option: str(option["flags"][-1]))
def test_every_flag_has_its_names_type_default_and_choices(option: dict[str, Any]) -> None:
    for flag in option["flags"]:
        action = ACTIONS[flag]
        assert action.dest == option["dest"]
        own_type = OWN_TYPES.get(action.dest)
        found = getattr(action.type, "__name__", None)
        assert SAME_TYPES.get(found or "", found) == (own_type or option["type"])
        assert (action.nargs is None) == option["takes_value"]
        assert action.choices == option["choices"]
    assert DEFAULTS[option["dest"]] == option["default"]


@pytest.mark.parametrize("flag, default", REMOVED_FLAGS.items())
def test_flags_of_older_versions_are_there(flag: str, default: object) -> None:
    assert ACTIONS[flag].default == default


def test_every_unambiguous_prefix_means_the_same_option() -> None:
    wrong = []
    for prefix, dest in cases("flags", "prefixes"):
        if dest is None:
            continue
        takes_value = next(action.nargs is None for action in ACTIONS.values() if action.dest == dest)
        value = {"autotuning": "tune", "log_level": "debug"}.get(dest, "3")
        try:
            parsed = _parse([prefix, *([value] if takes_value else []), "script"])
        except SystemExit:
            wrong.append(prefix)
            continue
        if parsed[dest] == DEFAULTS[dest]:
            wrong.append(prefix)
    assert wrong == []


def test_command_lines_that_deepspeed_accepts_mean_the_same() -> None:
    accepted = 0
    for argv, answer in cases("parse_args"):
        if "result" not in answer:
            continue
        accepted += 1
        parsed = _parse(argv)
        changed = {
            key: value
            for key, value in parsed.items()
            if value != DEFAULTS[key] and key not in OWN_ATTRIBUTES
        }
        assert changed == answer["result"], argv
    assert accepted > 50


def test_command_lines_that_deepspeed_refuses_are_refused_unless_the_fault_is_in_the_scripts_part() -> None:
    """argparse also looks at what follows the script; we pass that on untouched (docs/compat.md)."""
    refused = 0
    for argv, answer in cases("parse_args"):
        if answer != {"exit": 2}:
            continue
        refused += 1
        with contextlib.suppress(SystemExit):
            assert _parse(argv)["user_args"], argv
    assert refused > 50
