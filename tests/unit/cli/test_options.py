"""The command lines as a grammar, and the defaults of `dslrun` from the environment."""

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
from tests.support.options import LINES

from dsl.cli.command import read_words
from dsl.cli.parser import Parser
from dsl.cli.torchrun import parse_args
from dsl.model.options import byte_size

PARSERS = {command: Parser(line) for command, line in LINES.items()}
PARSER = PARSERS["dsl"]
ODD = (
    *("--num_g", "--num_g=3", "--mod", "--n", "-qH", "-qHhosts", "-Hhosts", "-H=h", "-qq", "-x", "--grace=1"),
    *("--nn", "--nproc=3", "--stand", "--r", "--no", "-mr3", "-r3", "-r=1", "--log_d=d"),
    *("2", "-1", "a:0,1", "run", "debug", "x y", "", "-", "--", "-q", "train.py", "1:2", "--x"),
)
WORDS = {
    # Where a value may be missing, argparse takes the next word for it; we do not.
    command: st.sampled_from(sorted(name for name, one in parser._option_string_actions.items() if one.nargs != "?"))
    | st.sampled_from(ODD)
    for command, parser in PARSERS.items()
}  # fmt: skip
both = pytest.mark.parametrize("command", LINES)


def _parse(parse: Callable[[Sequence[str]], argparse.Namespace], argv: list[str]) -> dict[str, object] | int:
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        try:
            return vars(parse(argv))
        except SystemExit as stop:
            return int(stop.code or 0)


@both
@given(data=st.data())
def test_what_argparse_accepts_is_accepted_with_the_same_result(command: str, data: st.DataObject) -> None:
    argv = data.draw(st.lists(WORDS[command], max_size=8))
    by_argparse = _parse(PARSERS[command].parse_args, argv)
    if isinstance(by_argparse, dict):
        assert _parse(PARSERS[command].parse_script_args, argv) == by_argparse


@pytest.mark.guarantee("G5")
@both
@given(data=st.data())
def test_what_follows_the_script_is_never_touched_but_for_a_separator(
    command: str, data: st.DataObject
) -> None:
    """Argparse alone would refuse some of these, `--n` for one."""
    line, rest = LINES[command], data.draw(st.lists(WORDS[command], max_size=5))
    parsed = _parse(PARSERS[command].parse_script_args, ["--max-restarts", "2", "train.py", *rest])
    assert isinstance(parsed, dict)
    kept = rest[1:] if rest[:1] == ["--"] else rest
    assert (parsed["max_restarts"], parsed[line.script], parsed[line.rest]) == (2, "train.py", kept)


@pytest.mark.parametrize(
    "line, script, rest",
    [
        ("t.py -- a", "t.py", ["a"]),
        ("t.py -- -- a", "t.py", ["--", "a"]),
        ("t.py a -- b", "t.py", ["a", "--", "b"]),
        ("-q -- t.py -- a", "t.py", ["--", "a"]),
        ("-- -x --num_gpus", "-x", ["--num_gpus"]),
    ],
)
def test_one_separator_before_the_script_or_right_after_it(line: str, script: str, rest: list[str]) -> None:
    parsed = PARSER.parse_script_args(line.split())
    assert (parsed.user_script, parsed.user_args) == (script, rest)
    assert vars(parsed) == vars(PARSER.parse_args(line.split()))


@pytest.mark.parametrize(
    "argv, message",
    [
        (["-num_gpus", "2", "t.py"], "unrecognized arguments: -num_gpus"),
        (["--n", "2", "t.py"], "ambiguous option: --n could match"),
        (["--num_gpus", "x", "t.py"], "argument --num_gpus/--num_accelerators: invalid int value: 'x'"),
        (["--num_nodes", "x", "t.py"], "argument --num_nodes: invalid int value, nor MIN:MAX: 'x'"),
        (["--num_gpus"], "expected one argument"),
        (
            ["--launcher_args", "-v", "t.py"],
            "expected one argument, one that begins with a dash stands behind =, as in --launcher_args=-x",
        ),
        (["--log_level", "loud", "t.py"], "invalid choice: 'loud'"),
        (["--autotuning", "t.py"], "invalid choice: 't.py'"),
        (
            ["--grace", "-1", "t.py"],
            "argument --grace/--shutdown-timeout: must be 0 or more seconds: '-1'",
        ),
        (["--grace", "nan", "t.py"], "must be 0 or more seconds"),
        (["--grace", "soon", "t.py"], "invalid seconds value: 'soon'"),
        (["--module=1", "t.py"], "ignored explicit argument '1'"),
        (["--log-max-size", "63K", "t.py"], "argument --log-max-size: must be a size of at"),
        (["--log-max-size", "1.5G", "t.py"], "must be a size of at least 64K, such as 512K, 100M or 2G"),
        (["--log-max-size", "1048577G", "t.py"], "at most 1048576G: '1048577G'"),
        (["--log-max-size", "9" * 5000, "t.py"], "must be a size of at least 64K"),
        (["--tag-output", "yes", "t.py"], "invalid choice: 'yes'"),
        (["--num_gpuz", "2", "t.py"], "unrecognized arguments: --num_gpuz, did you mean --num_gpus?"),
        (["--hostfil3=x", "t.py"], "unrecognized arguments: --hostfil3=x, did you mean --hostfile?"),
        (
            ["--num_gpuz", "2", "--hostfil3=x", "--role", "x", "t.py", "--num_nodez"],
            "--num_gpuz, did you mean --num_gpus?; --hostfil3=x, did you mean --hostfile?; --role, only dslrun",
        ),
        (
            ["--num-gpuz", "--no-such=1", "t.py", "--num_nodez"],
            "unrecognized arguments: --num-gpuz, did you mean --num-gpus?; --no-such=1, did you mean --no-ssh?\n",
        ),
        (["--verbose", "t.py", "--num_nodez"], "--verbose, did you mean --log_level debug?\n"),
        (["--num-gpus", "x", "t.py"], "argument --num_gpus/--num_accelerators: invalid int value: 'x'"),
        (["-q"], "the following arguments are required: SCRIPT, see dsl -h\n"),
    ],
)
def test_bad_usage_is_two_lines_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PARSER.parse_script_args(argv)
    usage, error = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert usage == "usage: dsl [OPTIONS] SCRIPT [ARGUMENTS]"
    assert error.startswith("dsl: error: ")
    assert message in f"{error}\n"


def _spellings(command: str) -> set[str]:
    """Every option, in the first of its two spellings."""
    names = [name for option in LINES[command].options for name in option.names]
    return {
        *{name.replace("_", "-"): name for name in reversed(names)}.values(),
        "-h",
        "--help",
        "--help-all",
        "--version",
    }


@both
@pytest.mark.parametrize(
    "columns, width", [("60", 60), ("96", 96), ("200", 100), ("nonsense", 80), ("1", 80)]
)
def test_help_names_every_option_fits_the_terminal_and_tells_what_the_environment_says(
    command: str, columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = Parser(LINES[command], {"PET_NNODES": "7", "PET_MASTER_PORT": "broken"}).format_help()
    assert max(map(len, text.splitlines())) <= width
    assert [flag for flag in _spellings(command) if flag not in text] == []
    default = {"dsl": "(default: 29500)", "dslrun": "(default: 7, from PET_NNODES)"}[command]
    assert default in " ".join(text.split())


@both
def test_the_page_of_a_command_names_every_option(command: str) -> None:
    text = (Path(__file__).parents[3] / "docs" / f"{command}.md").read_text(encoding="utf-8")
    words = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text))
    assert _spellings(command) - words == set()


@pytest.mark.parametrize(
    "text, size",
    [("65536", 1 << 16), ("64K", 1 << 16), ("3m", 3 << 20), ("2G", 2 << 30), ("1048576G", 1 << 50)],
)
def test_a_size_has_a_suffix_of_1024(text: str, size: int) -> None:
    assert byte_size(text) == size


def test_a_port_that_is_spelled_out_is_a_wish_even_if_it_is_the_default() -> None:
    assert not PARSER.parse_script_args(["t.py"]).master_port_given
    assert PARSER.parse_script_args(["--master_port", "29500", "t.py"]).master_port_given


@both
def test_an_option_of_the_incumbent_can_be_shortened_as_long_as_it_is_the_only_one_of_its_kind(
    command: str,
) -> None:
    """Two spellings are one option. Ours take no part: ``--log debug`` goes on to mean ``--log_level debug``."""
    parser = PARSERS[command]
    flags = {flag for flag in parser._option_string_actions if flag.startswith("--")}
    theirs = {flag: parser._option_string_actions[flag] for flag in flags - parser._whole}
    tried = 0
    for flag, action in theirs.items():
        for end in range(3, len(flag)):
            short = flag[:end]
            meant = {id(one) for name, one in theirs.items() if name.startswith(short)}
            if short in flags or len(meant) != 1 or "--help".startswith(short):
                continue
            value = [] if action.nargs == 0 else [action.choices[0] if action.choices else "7"]  # type: ignore[index]
            options = parser.parse_script_args([short, *value, "train.py"])
            assert getattr(options, LINES[command].script) == "train.py", short
            assert options == parser.parse_script_args([flag, *value, "train.py"]), short
            tried += 1
    assert tried > 100


@both
@pytest.mark.parametrize(
    "short", ["--gra", "--tag-o", "--log-max", "--partial", "--warm-f", "--debug-p", "--dry"]
)
def test_our_own_options_are_spelled_out(
    command: str, short: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        PARSERS[command].parse_script_args([f"{short}=1", "train.py"])
    assert short in capsys.readouterr().err


ACTIONS = [PARSERS["dslrun"]._option_string_actions[one.names[0]] for one in LINES["dslrun"].options]


def _options(line: str, environ: Mapping[str, str] | None = None) -> argparse.Namespace:
    return parse_args(line.split(), environ or {})


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
    read = read_words([f"--{dest}", quoted, "t.py"], LINES["dslrun"])
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
