"""The parser and the words of a worker, as torchrun has them."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from typing import Any

import pytest
from tests.contract.golden_file import cases

from dsl.cli.options_torch import COMMAND_LINE, command_line
from dsl.cli.parser import Parser
from dsl.cli.torchrun import parse_args, to_request
from dsl.errors import UsageError
from dsl.output.grammar import parse_words
from dsl.plan.worker import TORCH, worker_commands

Case = tuple[list[str], dict[str, str], dict[str, Any]]

NAME = "torchrun_options"

OUR_CHOICES = {"start_method": ("warm", "auto"), "print_completion": ("fish",)}
"""Values that torchrun's options have here alone."""


def _id(case: Case) -> str:
    argv, env, _ = case
    return " ".join([*(f"{name}={value}" for name, value in env.items()), *argv]) or "nothing"


def _quietly(argv: list[str], env: dict[str, str], **facts: str) -> Namespace | int:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return parse_args(argv, env, command_line(**facts))
        except SystemExit as stop:
            return int(stop.code or 0)


def _as_torchrun(options: Namespace) -> dict[str, Any]:
    """Our namespace in torchrun's terms."""
    found = dict(vars(options))
    grace_s = found.pop("grace")
    found["shutdown_timeout"] = None if grace_s == 30 else grace_s
    for name in ("redirects", "tee"):
        found[name] = found[name] or "0"
    for name in ("duplicate_stdout_filters", "duplicate_stderr_filters"):
        found[name] = list(parse_words(found[name]))
    return found


def test_every_option_of_torchrun_is_there_and_has_its_default() -> None:
    parser = Parser(COMMAND_LINE)
    ours = _as_torchrun(parser.parse_script_args(["t.py"]))
    for option in cases(NAME, "options"):
        for flag in option["flags"]:
            action = parser.option(flag)
            assert (action.nargs is None) == option["takes_value"], flag
            theirs = option["choices"] and [*option["choices"], *OUR_CHOICES.get(option["dest"], ())]
            assert (action.choices and list(action.choices)) == theirs, flag
        assert ours[option["dest"]] == option["default"], option["dest"]


@pytest.mark.parametrize("case", cases(NAME), ids=_id)
def test_a_command_line_means_what_it_means_to_torchrun(case: Case) -> None:
    argv, env, answer = case
    ours = _quietly(argv, env)
    if "result" not in answer:
        assert ours == 2
        return
    assert not isinstance(ours, int)
    defaults = {option["dest"]: option["default"] for option in cases(NAME, "options")}
    defaults.update(training_script="t.py", training_script_args=[])
    expected = {**defaults, **answer["result"]}
    found = _as_torchrun(ours)
    assert {name: found[name] for name in expected} == expected


def _words(argv: list[str], env: dict[str, str], **facts: str) -> list[str] | None:
    options = _quietly(argv, env, **facts)
    if isinstance(options, int):
        return None
    try:
        program = to_request(options).program
    except UsageError:
        return None
    (argv_of_rank_0,) = worker_commands(program, TORCH, env, "PYTHON", ["/run/attempt_0/0"])
    return list(argv_of_rank_0)


def _filled_in(answer: list[str] | None) -> list[str] | None:
    """What torchrun has recorded, with the local rank in place: it is filled in later there."""
    return answer and [word.replace("${local_rank}", "0") for word in answer]


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("case", cases(NAME, "words"), ids=_id)
def test_the_words_of_a_worker_are_those_of_torchrun(case: Case) -> None:
    """PYTHON_EXEC, modules, programs, and the macro for the local rank."""
    argv, env, answer = case
    assert _words(argv, env) == _filled_in(answer.get("result"))


@pytest.mark.parametrize("case", cases(NAME, "launch"), ids=_id)
def test_the_words_of_a_worker_are_those_of_torch_distributed_launch(case: Case) -> None:
    argv, env, answer = case
    assert _words(argv, env, local_rank_arg="dash") == _filled_in(answer.get("result"))
