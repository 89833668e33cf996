"""The command line of `dslrun` as a grammar, and its defaults from the environment."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.cli.options_torch import COMMAND_LINE
from dsl.cli.parser import Parser
from dsl.cli.reader import read_words
from dsl.cli.torchrun import parse_args
from dsl.model.options import COMMON

PARSER = Parser(COMMAND_LINE)
ACTIONS = [PARSER.option(one.names[0]) for one in COMMAND_LINE.options]
OURS = {
    "--bind",
    "--bind-strict",
    "--mem-policy",
    "--report-bindings",
    "--detach",
    "--stacks-on-failure",
    "--hang-timeout",
    "--hang-action",
    "--doctor",
    "--events",
    "--metrics",
    "--dry-run",
    "--dry-run-json",
    "--strict",
    "--preload",
    "--fork-server-per",
    *("--warm-for", "--warm-memory"),
    *("--debug", "--debug-port", "--debug-address", "--debug-wait"),
    *(
        "--grace",
        "--tag-output",
        "--collapse",
        "--partial-after",
        "--stdin",
        "--log-max-size",
        "--log-level",
        "--local-rank-arg",
    ),
    *("--use-env", "--forward-signals", "--preempt-signal", "--preempt-grace", "--signal-scope"),
    "--exit-barrier-timeout",
}
VALUES = ["2", "-1", "a:0,1", "run", "x y", "", "-", "--", "t.py", "1:2", "--x", "3"]
words = st.one_of(
    # Where a value may be missing, argparse takes the next word for it; we do not.
    st.sampled_from(sorted(name for name, one in PARSER._option_string_actions.items() if one.nargs != "?")),
    st.sampled_from(
        ["--nn", "--nproc=3", "--stand", "--r", "--no", "-mr3", "-r3", "-r=1", "-x", "--log_d=d"]
    ),
    st.sampled_from(VALUES),
)


def _parse(parse: Callable[[Sequence[str]], argparse.Namespace], argv: list[str]) -> dict[str, object] | int:
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        try:
            return vars(parse(argv))
        except SystemExit as stop:
            return int(stop.code or 0)


def _options(line: str, environ: Mapping[str, str] | None = None) -> argparse.Namespace:
    return parse_args(line.split(), environ or {})


@given(st.lists(words, max_size=8))
def test_what_argparse_accepts_is_accepted_with_the_same_result(argv: list[str]) -> None:
    by_argparse = _parse(PARSER.parse_args, argv)
    if isinstance(by_argparse, dict):
        assert _parse(PARSER.parse_script_args, argv) == by_argparse


@pytest.mark.guarantee("G5")
@given(st.lists(words, max_size=5))
def test_what_follows_the_script_is_never_touched_but_for_a_separator(rest: list[str]) -> None:
    """Argparse alone would refuse some of these, `--r` for one."""
    parsed = _parse(PARSER.parse_script_args, ["--nnodes", "2", "train.py", *rest])
    assert isinstance(parsed, dict)
    kept = rest[1:] if rest[:1] == ["--"] else rest
    assert (parsed["nnodes"], parsed["training_script"], parsed["training_script_args"]) == (
        "2",
        "train.py",
        kept,
    )


def test_every_long_option_has_a_spelling_with_dashes_and_one_with_underscores() -> None:
    for action in ACTIONS:
        flags = set(action.option_strings)
        for flag in flags:
            if flag.startswith("--"):
                assert f"--{flag[2:].replace('-', '_')}" in flags
                assert f"--{flag[2:].replace('_', '-')}" in flags


def test_an_option_of_torchrun_can_be_shortened_as_long_as_it_is_the_only_one_of_its_kind() -> None:
    """Two spellings are one option. Ours take no part: `--log-d` goes on to mean `--log-dir`."""
    theirs = {
        flag: action
        for action in ACTIONS
        for flag in action.option_strings
        if flag.startswith("--")
        and flag.replace("_", "-") not in {f"--{one[2:].replace('_', '-')}" for one in OURS}
    }
    tried = 0
    for flag, action in theirs.items():
        for end in range(3, len(flag)):
            short = flag[:end]
            meant = {id(one) for name, one in theirs.items() if name.startswith(short)}
            if short in theirs or len(meant) != 1 or "--help".startswith(short):
                continue
            value = [] if action.nargs == 0 else [action.choices[0] if action.choices else "7"]  # type: ignore[index]
            options = PARSER.parse_script_args([short, *value, "train.py"])
            assert options.training_script == "train.py", short
            assert options == PARSER.parse_script_args([flag, *value, "train.py"]), short
            tried += 1
    assert tried > 200


@pytest.mark.parametrize("flag", sorted(OURS - {"--stdin", "--grace", "--events"}))
def test_our_own_options_are_spelled_out(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PARSER.parse_script_args([f"{flag[:-1]}=1", "train.py"])
    assert flag[:-1] in capsys.readouterr().err


EARLIER = [
    # torch 1.9 to 1.13, and before: underscores only.
    ("--nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=h --master_port=1234 t.py", {"node_rank": 1}),
    (
        "--rdzv_backend=c10d --rdzv_endpoint=h:1 --rdzv_id=7 --rdzv_conf=timeout=9 t.py",
        {"rdzv_conf": "timeout=9"},
    ),
    ("--max_restarts=3 --monitor_interval=5 --start_method=fork t.py", {"max_restarts": 3}),
    ("--log_dir=d --redirects=3 --tee=3 --role=r --no_python t.py", {"log_dir": "d", "role": "r"}),
    ("--run_path --use_env t.py", {"run_path": True}),
    # 2.0 and later.
    ("--nproc-per-node=8 --local-addr=h --local_ranks_filter=0 t.py", {"local_ranks_filter": "0"}),
    ("--logs_specs=mine --numa_binding=node --shutdown_timeout=3 t.py", {"grace": 3.0}),
    ("--duplicate_stdout_filters=a --duplicate_stderr_filters=b t.py", {"duplicate_stdout_filters": "a"}),
    ("--signals_to_handle=SIGTERM --virtual_local_rank t.py", {"virtual_local_rank": True}),
    # Since 2.15.
    ("--log_line_prefix_template=${rank}: t.py", {"log_line_prefix_template": "${rank}:"}),
]


@pytest.mark.parametrize("line, facts", EARLIER, ids=[line for line, _ in EARLIER])
def test_spellings_of_all_versions_are_understood(line: str, facts: dict[str, object]) -> None:
    options = vars(_options(line))
    assert options["training_script"] == "t.py"
    assert {name: options[name] for name in facts} == facts


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_every_option_has_a_variable_and_the_command_line_wins(action: argparse.Action) -> None:
    flag = max((one for one in action.option_strings if "-" not in one[2:]), key=len)
    variable = "PET_" + flag[2:].upper()
    if action.nargs == 0:
        assert [getattr(_options("t.py", {variable: text}), action.dest) for text in ("0", "1")] == [
            False,
            True,
        ]
        assert getattr(_options(f"{flag} t.py", {variable: "0"}), action.dest) is True
        return
    first, second = ("5", "6") if not action.choices else (list(action.choices) * 2)[:-3:-1]
    if action.dest in ("log_max_size", "warm_memory"):
        first, second = "1M", "2M"
    mark = "=" if action.nargs == "?" else " "
    by_line = getattr(_options(f"{flag}{mark}{first} t.py"), action.dest)
    assert getattr(_options("t.py", {variable: first}), action.dest) == by_line
    assert getattr(_options(f"{flag}{mark}{first} t.py", {variable: second}), action.dest) == by_line


@pytest.mark.parametrize("mark", ["'", '"'])
@pytest.mark.parametrize(
    "dest, text",
    [
        ("rdzv_conf", "timeout=60,read_timeout=5"),
        ("rdzv_endpoint", "h:29400"),
        ("nnodes", "1:4"),
        ("tee", "0:1,1:2"),
    ],
)
def test_quotes_around_a_value_that_no_shell_has_read_are_taken_off(dest: str, text: str, mark: str) -> None:
    """A list of words in a YAML file keeps them."""
    quoted = f"{mark}{text}{mark}"
    assert getattr(_options(f"--{dest}={quoted} t.py"), dest) == text
    assert getattr(_options("t.py", {f"PET_{dest.upper()}": quoted}), dest) == text
    read = read_words([f"--{dest}", quoted, "t.py"], COMMAND_LINE)
    assert read is not None
    assert getattr(read, dest) == text


@pytest.mark.parametrize("text", ['"a"=1,b="2"', '"a=1', "a=1'", '"', ""])
def test_quotes_inside_of_a_value_stay(text: str) -> None:
    assert _options("t.py", {"PET_RDZV_CONF": text}).rdzv_conf == text


def test_both_names_of_the_grace_have_a_variable_and_torchs_own_comes_last() -> None:
    assert _options("t.py", {"PET_GRACE": "4"}).grace == 4
    assert _options("t.py", {"PET_SHUTDOWN_TIMEOUT": "4", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}).grace == 4
    assert _options("t.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9"}).grace == 9
    assert _options("--shutdown-timeout 2 t.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}).grace == 2
    assert _options("t.py").grace == 30


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "variable, text, said",
    [
        ("PET_MASTER_PORT", "x", "PET_MASTER_PORT: invalid int value: 'x'"),
        ("PET_MASTER_PORT", "", "PET_MASTER_PORT: invalid int value: ''"),
        ("PET_MONITOR_INTERVAL", "often", "PET_MONITOR_INTERVAL: invalid seconds value: 'often'"),
        ("PET_STANDALONE", "yes", "PET_STANDALONE: invalid value: 'yes', expected 0 or 1"),
        ("PET_MODULE", "", "PET_MODULE: invalid value: '', expected 0 or 1"),
        (
            "PET_START_METHOD",
            "thread",
            "PET_START_METHOD: invalid choice: 'thread', expected one of spawn, fork",
        ),
        ("PET_NUMA_BINDING", "all", "PET_NUMA_BINDING: invalid choice: 'all', expected one of node, socket"),
        ("PET_SHUTDOWN_TIMEOUT", "-1", "PET_SHUTDOWN_TIMEOUT: must be 0 or more seconds: '-1'"),
        ("PET_LOG_MAX_SIZE", "1", "PET_LOG_MAX_SIZE: must be a size of at least 64K"),
        (
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            "soon",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT: invalid seconds value: 'soon'",
        ),
    ],
)
def test_a_wrong_variable_is_named(
    variable: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _options("t.py", {variable: text})
    usage, error = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert usage == "usage: dslrun [OPTIONS] SCRIPT [ARGUMENTS]"
    assert error.startswith(f"dslrun: error: {said}")


@pytest.mark.parametrize("columns", ["60", "200"])
def test_help_names_every_option_and_what_the_environment_says(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = Parser(COMMAND_LINE, {"PET_NNODES": "7", "PET_MASTER_PORT": "broken"}).format_help()
    assert max(map(len, text.splitlines())) <= int(columns)
    assert [flag for flag in _spellings() if flag not in text] == []
    assert "(default: 7, from PET_NNODES)" in " ".join(text.split())


def test_the_documentation_names_every_option() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text[text.index("\n# dslrun") :]
    found = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", section))
    shared = {flag for group in COMMON.values() for option in group for flag in option.names}
    assert _spellings() - shared - found == set()


def _spellings() -> set[str]:
    """Every option, without the second spelling with underscores of one that has dashes."""
    flags = set(PARSER._option_string_actions)
    return {flag for flag in flags if flag.replace("_", "-") not in flags - {flag}}
