"""What each option of the two commands asks for: one field of the `Request`, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.options import FRONT_ENDS, LINES, OPTIONS, ROWS, said

from dsl.model.options import Option
from dsl.model.request import MeetingRequest, Program, Request, ResourceRequest, SignalRequest

# Options that change nothing here, and those that have a test of their own below.
WITHOUT_EFFECT = {
    *("monitor_interval", "exit_barrier_timeout", "event_log_handler", "print_completion", "fork_server_per"),
}
APART = {"nnodes", "run_path", "use_env", "preempt_signal"}


def _read(command: str, *words: str, **facts: Any) -> Request:
    request: Request = FRONT_ENDS[command].read([*words, "t.py", "--x"], {}, **facts)[0]
    return request


def _fields(record: Any, path: str = "") -> dict[str, Any]:
    """The fields of a record and of the records in it, by their path."""
    found: dict[str, Any] = {}
    for name in record.__match_args__:
        field = getattr(record, name)
        nested = isinstance(getattr(type(field), "__match_args__", None), tuple) and hasattr(
            type(field), "_defaults"
        )
        found.update(_fields(field, f"{path}{name}.") if nested else {f"{path}{name}": field})
    return found


def _changes(command: str, *words: str, **facts: Any) -> dict[str, Any]:
    """What the words change in the request."""
    before, after = _fields(_read(command, **facts)), _fields(_read(command, *words, **facts))
    return {name: value for name, value in after.items() if value != before[name]}


@pytest.mark.parametrize(
    "command, option", OPTIONS, ids=[f"{command} {option.dest}" for command, option in OPTIONS]
)
def test_each_option_changes_its_field_of_the_request_and_no_other(command: str, option: Option) -> None:
    if option.dest in APART:
        return
    if option.dest in WITHOUT_EFFECT:
        assert _changes(command, *said(option, ROWS[command][option.dest][0])) == {}
        return
    word, field, value = ROWS[command][option.dest]
    for name in option.names:
        assert _changes(command, *said(option, word, name)) == {field: value}


@pytest.mark.parametrize("command", LINES)
def test_an_option_whose_value_may_be_missing_never_takes_the_word_behind_it(command: str) -> None:
    assert _changes(command, "--debug") == {"debug.ranks": "all"}
    request = FRONT_ENDS[command].read(["--debug", "t.py", "1"], {})[0]
    assert (request.program.script, request.program.args) == ("t.py", ("1",))
    parsed = FRONT_ENDS[command].parse_args(["--debug", "t.py", "--debug"])
    assert (parsed.debug, getattr(parsed, LINES[command].script)) == ("all", "t.py")
    assert FRONT_ENDS[command].parse_args(["--debug=1", "t.py"]).debug == "1"
    with pytest.raises(SystemExit):
        FRONT_ENDS[command].parse_args(["--debug=", "t.py"])


@pytest.mark.parametrize("command", LINES)
@pytest.mark.parametrize("name", ["--preempt-signal", "--preempt_signal"])
def test_a_signal_that_announces_the_end_loses_its_usual_meaning(name: str, command: str) -> None:
    assert _read(command, name, "USR1").signals == SignalRequest((15, 2, 1, 3), (12,), 10)
    assert _read(command, name, "TERM").signals == SignalRequest((2, 1, 3), (10, 12), 15)
    assert _read(command, name, "34").signals == SignalRequest((15, 2, 1, 3), (10, 12), 34)


def test_every_row_is_an_option() -> None:
    for command, line in LINES.items():
        assert set(ROWS[command]) == {option.dest for option in line.options}


def test_nothing_said_is_the_default_request() -> None:
    program = Program("script", "t.py", ("--x",), local_rank_option="--local_rank")
    expected = Request("deepspeed", program, ResourceRequest(hostfile="/job/hostfile"))
    assert _read("dsl") == expected
    said = "--num_gpus -1 --num_nodes -1 --node_rank -1 --enable_each_rank_log None --log-dir= --master_addr="
    assert _read("dsl", *said.split()) == expected
    assert _read("dslrun") == Request(
        "torch",
        Program("script", "t.py", ("--x",)),
        ResourceRequest(nproc_per_node="1"),
        MeetingRequest(master_addr="127.0.0.1", node_rank=0, run_id="none"),
        signals=SignalRequest(stop=(15, 2, 1, 3), forward=(10, 12)),
        max_restarts=0,
    )


@pytest.mark.parametrize(
    "words, least, most",
    [("3", 3, 3), ("1:4", 1, 4), (" 2 : 5 ", 2, 5), ("1", 1, 1), ("1:1", None, None), ("4:2", 4, 2)],
)
def test_nodes_of_dslrun(words: str, least: int | None, most: int | None) -> None:
    resources = _read("dslrun", "--nnodes", words).resources
    assert (resources.min_nodes, resources.max_nodes) == (least, most)


def test_a_path_overrules_what_else_was_said_of_the_program() -> None:
    assert _changes("dslrun", "--run-path", "--module", "--no-python") == {}
    assert (
        _read("dslrun", "--run-path", "--local-rank-arg", "dash").program.local_rank_option == "--local-rank"
    )
