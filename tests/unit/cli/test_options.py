"""The command line as a grammar."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.cli.options_deepspeed import COMMAND_LINE
from dsl.cli.parser import Parser
from dsl.model.options import byte_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

PARSER = Parser(COMMAND_LINE)
VALUES = ["2", "-1", "a:0,1", "run", "debug", "x y", "", "-", "--", "-q", "train.py", "1:2", "--x"]
words = st.one_of(
    # Where a value may be missing, argparse takes the next word for it; we do not.
    st.sampled_from(sorted(name for name, one in PARSER._option_string_actions.items() if one.nargs != "?")),
    st.sampled_from(
        [
            "--num_g",
            "--num_g=3",
            "--mod",
            "--n",
            "-qH",
            "-qHhosts",
            "-Hhosts",
            "-H=h",
            "-qq",
            "-x",
            "--grace=1",
        ]
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


@given(st.lists(words, max_size=8))
def test_what_argparse_accepts_is_accepted_with_the_same_result(argv: list[str]) -> None:
    by_argparse = _parse(PARSER.parse_args, argv)
    if isinstance(by_argparse, dict):
        assert _parse(PARSER.parse_script_args, argv) == by_argparse


@pytest.mark.guarantee("G5")
@given(st.lists(words, max_size=5))
def test_what_follows_the_script_is_never_touched_but_for_a_separator(rest: list[str]) -> None:
    """Argparse alone would refuse some of these, `--n` for one."""
    parsed = _parse(PARSER.parse_script_args, ["--num_gpus", "2", "train.py", *rest])
    assert isinstance(parsed, dict)
    kept = rest[1:] if rest[:1] == ["--"] else rest
    assert (parsed["num_gpus"], parsed["user_script"], parsed["user_args"]) == (2, "train.py", kept)


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
        (["-q"], "the following arguments are required: SCRIPT"),
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
    assert message in error


@pytest.mark.parametrize(
    "columns, width", [("60", 60), ("96", 96), ("200", 100), ("nonsense", 80), ("1", 80)]
)
def test_help_names_every_option_and_fits_the_terminal(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = Parser(COMMAND_LINE).format_help()
    assert max(map(len, text.splitlines())) <= width
    assert [flag for flag in _spellings() if flag not in text] == []
    assert "(default: 29500)" in " ".join(text.split())


@pytest.mark.parametrize(
    "text, size",
    [("65536", 1 << 16), ("64K", 1 << 16), ("3m", 3 << 20), ("2G", 2 << 30), ("1048576G", 1 << 50)],
)
def test_a_size_has_a_suffix_of_1024(text: str, size: int) -> None:
    assert byte_size(text) == size


def test_a_port_that_is_spelled_out_is_a_wish_even_if_it_is_the_default() -> None:
    assert not PARSER.parse_script_args(["t.py"]).master_port_given
    assert PARSER.parse_script_args(["--master_port", "29500", "t.py"]).master_port_given


def test_the_documentation_names_every_option() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    words = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", text))
    assert _spellings() - words == set()


def _spellings() -> set[str]:
    """Every option, in the first of its two spellings."""
    names = [name for option in COMMAND_LINE.options for name in option.names]
    return {*{name.replace("_", "-"): name for name in reversed(names)}.values(), "-h", "--help", "--version"}


def test_whatever_deepspeed_lets_one_shorten_can_be_shortened() -> None:
    """Options that are not DeepSpeed's take no part: ``--log debug`` goes on to mean ``--log_level debug``."""
    flags = {flag for flag in PARSER._option_string_actions if flag.startswith("--")}
    theirs = flags - PARSER._whole
    tried = 0
    for flag in theirs:
        for end in range(3, len(flag)):
            short = flag[:end]
            if short in flags or sum(one.startswith(short) for one in theirs) != 1:
                continue
            action = PARSER._option_string_actions[flag]
            value = [] if action.nargs == 0 else [action.choices[0] if action.choices else "1"]  # type: ignore[index]
            if flag == "--help":
                continue
            options = PARSER.parse_script_args([short, *value, "train.py"])
            assert options.user_script == "train.py", short
            assert options == PARSER.parse_script_args([flag, *value, "train.py"]), short
            tried += 1
    assert tried > 100


@pytest.mark.parametrize(
    "words, said",
    [
        (["--num_gpuz", "2", "t.py"], "unrecognized arguments: --num_gpuz, did you mean --num_gpus?"),
        (["--hostfil3=x", "t.py"], "unrecognized arguments: --hostfil3=x, did you mean --hostfile?"),
        (["--zzz", "t.py"], "unrecognized arguments: --zzz, see dsl --help"),
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
def test_a_slip_is_one_line_that_helps(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PARSER.parse_script_args(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("short", ["--gra", "--tag", "--log-d", "--redirect", "--shutdown_t", "--st"])
def test_our_own_options_are_spelled_out(short: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PARSER.parse_script_args([f"{short}=1", "train.py"])
    assert short in capsys.readouterr().err
