"""The parser, the words and the environment of a worker, as torchrun has them."""

from __future__ import annotations

import contextlib
import io
from argparse import Namespace
from typing import Any

import pytest
from tests.contract import torchrun_inputs as inputs
from tests.contract.golden_file import cases
from tests.contract.torchrun_inputs import as_torchrun
from tests.support.machine import make_facts
from tests.support.requests import plan_of

from dsl.agent.joining import joining_of
from dsl.agent.member import Member
from dsl.agent.planner import Planner
from dsl.cli.options_torch import COMMAND_LINE, command_line
from dsl.cli.parser import Parser
from dsl.cli.torchrun import parse_args, to_request
from dsl.conductor.conductor import Conductor
from dsl.conductor.terms import fixed_places
from dsl.errors import UsageError
from dsl.model.job import Meeting
from dsl.output import parse_words
from dsl.plan.job import plan_job
from dsl.plan.node import count_workers
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
            action = parser._option_string_actions[flag]
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


OF_THE_ENVIRONMENT = "torchrun_environment"


def _planned(options: str, given: dict[str, str]) -> list[dict[str, str]]:
    environ = {"PATH": "/bin", **given}
    request = to_request(parse_args([*options.split(), "t.py"], environ))
    plan = plan_of(request, make_facts(environ=environ))
    found = []
    for worker in plan.workers:
        env = {**plan.env, **worker.env}
        new = {name: value for name, value in env.items() if environ.get(name) != value}
        found.append({name: inputs.normal(name, value, options) for name, value in new.items()})
    return found


@pytest.mark.parametrize("case", cases(OF_THE_ENVIRONMENT), ids=lambda case: case[0])
def test_each_worker_has_the_environment_that_torchrun_gives_it(case: Any) -> None:
    _, options, given, workers = case
    ours = _planned(f"--nproc-per-node {inputs.WORKERS} {options}", given)
    assert ours == [as_torchrun(worker) for worker in workers]


@pytest.mark.parametrize("case", cases(OF_THE_ENVIRONMENT, "nodes"), ids=lambda case: case[0])
def test_the_nodes_of_a_job_agree_as_with_torchrun(case: Any) -> None:
    _, options, given, workers = case
    ours = []
    for node_rank in (0, 1):
        ours += _planned(f"--nproc-per-node 2 {options} --node-rank {node_rank}", given)
    assert ours == [as_torchrun(worker) for worker in workers]


@pytest.mark.parametrize("case", cases("torchrun_nodes"), ids=lambda case: case[0])
def test_nodes_that_differ_are_counted_as_by_torchrun(case: Any) -> None:
    """As node 0 has them meet, and each plans."""
    _, options, each, workers = case
    environ = {"PATH": "/bin"}
    facts = make_facts(environ=environ)
    lines = [f"--nproc-per-node {one} {options} --node-rank {rank}" for rank, one in enumerate(each)]
    planned = [plan_job(to_request(parse_args([*line.split(), "t.py"], environ)), facts) for line in lines]
    first = joining_of(planned[0], facts, count_workers(planned[0].job, 0, facts))
    terms = fixed_places(planned[0].job, len(each), first.hello.version, first.address, first.port, 600.0)
    conductor = Conductor(terms, 0.0)
    said: list[Any] = []
    for one in planned:
        joining = joining_of(one, facts, count_workers(one.job, one.node_rank, facts))
        said += conductor.hear(one.node_rank, joining.hello, 0.0)
    met = [one.message for one in said if isinstance(one.message, Meeting)]
    ours = []
    for meeting, one in zip(met, planned, strict=True):
        planner = Planner(one, facts)
        planner.meet_by(Member(None, meeting))  # type: ignore[arg-type]
        plan = planner.plan(0)
        for worker in plan.workers:
            env = {**plan.env, **worker.env}
            new = {name: value for name, value in env.items() if environ.get(name) != value}
            found = {name: inputs.normal(name, value, options) for name, value in new.items()}
            assert (found.pop("DSL_RESTART_REASON"), found.pop("DSL_ATTEMPT")) == ("start", "0")
            ours.append(found)
    assert ours == [as_torchrun(worker) for worker in workers]


def test_the_list_of_differences_is_in_use() -> None:
    """A difference that no longer is one must not stay on the list."""
    recorded = [worker for case in cases(OF_THE_ENVIRONMENT) for worker in case[3]]
    changed = {name for worker in recorded for name in worker if as_torchrun(worker)[name] != worker[name]}
    assert changed == {"MASTER_ADDR", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
