"""Two readers of one table: the small one says what argparse says, or nothing."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.support.options import LINES, OPTIONS, ROWS

from dsl.cli import options_torch, torchrun
from dsl.cli.command import read_words
from dsl.cli.parser import Parser

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable

    from dsl.model.options import CommandLine, Option

ROOT = Path(__file__).parents[3]
PARSERS = {command: Parser(line) for command, line in LINES.items()}
VALUES = [
    *("2", "-1", "+3", " 4 ", "1_0", "-1.5", ".5", "-.5", "1e3", "nan", "inf", "x", "0x1", "٣", "-٣", "1:2"),
    *(
        "2:1",
        "64K",
        "1M",
        "",
        " ",
        "a b",
        "-a b",
        "-",
        "--",
        "---",
        "-q",
        "-x",
        "--x",
        "a=b",
        "=",
        "run",
        "node",
    ),
    *("auto", "debug", "spawn", "h:1", "t.py", "-m", "--module", "--num_gpus", "--nnodes=2"),
]


def _by_argparse(parse: Callable[[], Namespace]) -> dict[str, Any] | None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return vars(parse())
        except SystemExit:
            return None


def _shown(values: dict[str, Any] | None) -> dict[str, str] | None:
    """Values with their types; NaN is equal to itself."""
    return None if values is None else {name: repr(value) for name, value in sorted(values.items())}


def _words(line: CommandLine) -> st.SearchStrategy[list[str]]:
    """A few words of a command line: an option with its value in one or two words, or any word at all."""
    names = st.sampled_from(
        [*sorted(name for option in line.options for name in option.names), "--help", "-h"]
    )
    values = st.sampled_from(VALUES)
    choices = st.sampled_from(sorted({word for option in line.options for word in option.choices or ()}))
    good = st.sampled_from([option for option in line.options if not option.is_flag]).flatmap(
        lambda option: st.tuples(
            st.sampled_from(option.names), st.sampled_from(option.choices or ("1", "-1", "64K", "a b", ""))
        )
    )
    return st.one_of(
        good.map(list),
        good.map(lambda pair: [f"{pair[0]}={pair[1]}"]),
        st.sampled_from([option for option in line.options if option.is_flag]).map(
            lambda one: [one.names[-1]]
        ),
        st.tuples(names, values | choices).map(list),
        st.builds("{}={}".format, names, values | choices).map(lambda word: [word]),
        st.builds(lambda name, end: [name[:end]], names, st.integers(2, 12)),
        st.builds(lambda name, end: [f"{name[:end]}=1"], names, st.integers(2, 12)),
        st.builds(lambda name, text: [name[:2] + text], names, values),
        (names | values).map(lambda word: [word]),
    )


def _argv(line: CommandLine) -> st.SearchStrategy[list[str]]:
    own = st.lists(_words(line), max_size=4).map(lambda parts: [word for part in parts for word in part])
    rest = st.lists(_words(line), max_size=2).map(lambda parts: [word for part in parts for word in part])
    return st.builds(
        lambda own, script, rest: [*own, *script, *rest], own, st.sampled_from([[], ["t.py"]]), rest
    )


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # it leaves most odd lines to argparse
@given(st.sampled_from(sorted(LINES)).flatmap(lambda one: st.tuples(st.just(one), _argv(LINES[one]))))
def test_what_the_small_reader_accepts_means_the_same_to_argparse(case: tuple[str, list[str]]) -> None:
    command, argv = case
    found = read_words(argv, LINES[command])
    assume(found is not None)
    assert found is not None
    assert _shown(vars(found)) == _shown(_by_argparse(lambda: PARSERS[command].parse_script_args(argv)))


@pytest.mark.parametrize(
    "command, option", OPTIONS, ids=[f"{command} {option.dest}" for command, option in OPTIONS]
)
def test_every_spelling_is_accepted_and_means_what_it_means_to_argparse(command: str, option: Option) -> None:
    for name in option.names:
        value = ROWS[command][option.dest][0]
        written = [[name]] if option.is_flag else [[name, value]]
        if not option.is_flag and name.startswith("--"):
            written.append([f"{name}={value}"])
        for words in written:
            argv = [*words, "t.py", name, "--", "-x"]
            found = read_words(argv, LINES[command])
            assert found is not None, argv
            assert _shown(vars(found)) == _shown(vars(PARSERS[command].parse_script_args(argv)))
            assert (getattr(found, option.dest) != option.default) == (option.choices != ("node",))


DECLINED = [
    *("", "--num_gpus", "--num_gpus 2", "-h", "--help t.py", "--num_g 2 t.py", "-Hhosts t.py"),
    *(
        "-H=h t.py",
        "-qH h t.py",
        "--module=1 t.py",
        "--module= t.py",
        "--num_gpus x t.py",
        "--num_gpus= t.py",
    ),
    *(
        "--autotuning x t.py",
        "--hostfile -q t.py",
        "--hostfile -- t.py",
        "--hostfile=-- t.py",
        "-- t.py",
        "- x",
    ),
    *("-1.5 x", "--zzz t.py", "-x t.py", "--log-max-size 1 t.py", "--grace -1 t.py", "--grace nan t.py"),
]


@pytest.mark.parametrize("text", DECLINED)
def test_what_is_not_plain_is_left_to_argparse(text: str) -> None:
    assert read_words(text.split(), LINES["dsl"]) is None


TEXTS = [(command, option) for command, option in OPTIONS if option.is_text]


@pytest.mark.parametrize("text", ["-t 7 -u 30", "-h -q", "--mca a b", "--x=y z", "-3", ""])
@pytest.mark.parametrize("command, option", TEXTS, ids=[f"{command} {one.dest}" for command, one in TEXTS])
def test_free_text_may_begin_with_a_dash(command: str, option: Option, text: str) -> None:
    for words in ([option.names[0], text], [f"{option.names[-1]}={text}"]):
        argv = [*words, "t.py", "-t 7"]
        found = read_words(argv, LINES[command])
        assert found is not None, argv
        assert getattr(found, option.dest) == text
        assert _shown(vars(found)) == _shown(vars(PARSERS[command].parse_script_args(argv)))


def test_free_text_may_begin_with_a_dash_behind_an_option_that_is_shortened() -> None:
    assert (
        PARSERS["dsl"].parse_script_args(["--launcher_a", "-t 7 -u 30", "t.py"]).launcher_args == "-t 7 -u 30"
    )


@pytest.mark.parametrize("word", ["--num_gpus", "--num-gpus=2 3", "-t", "-v", "--"])
def test_an_option_behind_one_of_free_text_is_not_its_value(word: str) -> None:
    argv = ["--launcher_args", word, "2", "t.py"]
    assert read_words(argv, LINES["dsl"]) is None
    assert _by_argparse(lambda: PARSERS["dsl"].parse_script_args(argv)) is None


@pytest.mark.parametrize("argv, rest", [(["t.py", "--", "a"], ["a"]), (["t.py", "a", "--"], ["a", "--"])])
def test_one_separator_right_after_the_script_is_no_argument(argv: list[str], rest: list[str]) -> None:
    found = read_words(argv, LINES["dsl"])
    assert found is not None
    assert found.user_args == rest


@pytest.mark.parametrize("command", LINES)
def test_an_option_may_be_repeated_and_all_of_its_values_count(command: str) -> None:
    words = ["--wrap", "0:a -b", "--wrap=1-2:c", "--max-restarts", "1", "t.py", "--wrap", "3:d"]
    found = read_words(words, LINES[command])
    assert found is not None
    assert found.wrap == ("0:a -b", "1-2:c")
    parsed = vars(PARSERS[command].parse_script_args(words))
    assert _shown(parsed) == _shown(vars(found))
    assert PARSERS[command].parse_script_args(["t.py"]).wrap == ()
    inherited = Parser(LINES[command], {"PET_WRAP": "0:e"})
    expected = ("0:e",) if LINES[command].prefix else ()
    assert inherited.parse_script_args(["t.py"]).wrap == expected
    assert inherited.parse_script_args(words).wrap == found.wrap


def test_the_table_never_has_a_spelling_twice() -> None:
    for line in LINES.values():
        for option in line.options:  # both spellings of each name are there
            long = [name for name in option.names if name[:2] == "--"]
            assert {name.replace("_", "-") for name in long} <= {*long}
            assert {f"--{name[2:].replace('-', '_')}" for name in long} <= {*long}
        names = [name for option in line.options for name in option.names]
        values = [option.dest for option in line.options]
        assert len(set(names)) == len(names)
        assert len(set(values)) == len(values)


def test_a_default_needs_no_reading() -> None:
    """argparse would read a default that is text."""
    for _, option in OPTIONS:
        assert not isinstance(option.default, str) or option.read(option.default) == option.default


@pytest.mark.parametrize(
    "argv, text",
    [
        (["t.py"], "9"),
        (["--grace", "3", "t.py"], "9"),
        (["--shutdown_timeout=3", "t.py"], "soon"),
        (["t.py"], "-0"),
        (["t.py"], " 4.5 "),
    ],
)
def test_torchs_variable_for_the_grace_means_the_same_to_both(argv: list[str], text: str) -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": text}
    found = read_words(argv, LINES["dslrun"], environ)
    assert found is not None
    assert _shown(vars(found)) == _shown(vars(torchrun.parse_args(argv, environ)))


@pytest.mark.parametrize("text", ["soon", "", "-1", "nan"])
def test_a_bad_value_of_that_variable_is_left_to_argparse(text: str) -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": text}
    assert read_words(["t.py"], LINES["dslrun"], environ) is None
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
        torchrun.read(["t.py"], environ)


def test_variables_that_stand_for_options_are_left_to_argparse() -> None:
    assert read_words(["t.py"], LINES["dslrun"], {"PET_NNODES": "2"}) is None
    assert torchrun.read(["t.py"], {"PET_NNODES": "2"})[0].resources.min_nodes == 2


@pytest.mark.parametrize("local_rank_arg", ["none", "dash"])
def test_the_default_of_a_face_is_that_of_both_readers(local_rank_arg: str) -> None:
    line = options_torch.command_line("python -m dsl.launch", local_rank_arg)
    for argv in (["t.py"], ["--local-rank-arg=underscore", "t.py"]):
        found = read_words(argv, line)
        assert found is not None
        assert vars(found) == vars(torchrun.parse_args(argv, {}, line))


def _documented() -> list[tuple[str, list[str]]]:
    """Command lines of jobs that the documents show as code: (command, its words)."""
    found = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        shown = [
            line.strip()
            for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
            for line in block.split("\n")
        ]
        shown += [line[4:] for line in text.split("\n") if line.startswith("    ")]
        shown += [line[2:] for line in text.split("\n") if line.startswith("$ ")]
        shown += re.findall(r"`([^`\n]+)`", text)
        for line in shown:
            match = re.match(r"(?:[A-Z_]+=\S+ )*(dsl|dslrun) (.*)", line)
            words = shlex.split(match[2], comments=True) if match else []
            if match and words[0] != "--stand-in" and any(word.endswith(".py") for word in words):
                found.append((match[1], words))
    return found


DOCUMENTED = _documented()
COMMON = [
    ("dsl", "train.py"),
    ("dsl", "--num_gpus 8 train.py --lr 1e-3 --deepspeed ds.json"),
    ("dsl", "--num_gpus=8 --master_port 29501 -H hosts --module pkg.train --num_gpus 3"),
    (
        "dsl",
        "--hostfile hosts --include worker-0@worker-1:0,2 --no_ssh --node_rank 1 --master_addr h train.py",
    ),
    ("dsl", "--no_python --num_gpus 2 -q /bin/true"),
    ("dslrun", "--standalone --nproc-per-node=gpu train.py --lr -1"),
    ("dslrun", "--nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=h --master_port=29500 train.py -x"),
    ("dslrun", "-m --max-restarts 3 -r 3 -t 1 --log-dir logs pkg.train"),
    ("dslrun", "--rdzv-backend=c10d --rdzv-endpoint=h:29400 --rdzv-id=7 --nnodes=1:4 train.py"),
    ("dslrun", "--log-line-prefix-template ${rank}: --signals-to-handle TERM,USR1 --grace 3 train.py"),
]
PLAIN = [*DOCUMENTED, *[(command, line.split()) for command, line in COMMON]]


def test_the_documents_show_command_lines() -> None:
    assert len(DOCUMENTED) >= 18
    assert {command for command, _ in DOCUMENTED} == {"dsl", "dslrun"}


@pytest.mark.parametrize(
    "command, words", PLAIN, ids=[shlex.join([command, *words]) for command, words in PLAIN]
)
def test_a_common_command_line_is_plain(command: str, words: list[str]) -> None:
    found = read_words(words, LINES[command])
    assert found is not None
    assert _shown(vars(found)) == _shown(vars(PARSERS[command].parse_script_args(words)))


def test_a_common_command_line_is_read_without_argparse() -> None:
    """Start-up is a budget."""
    code = f"""
import sys
from dsl.cli import deepspeed, torchrun
for command, words in {PLAIN!r}:
    (deepspeed if command == "dsl" else torchrun).read(words, {{"PATH": "/bin"}})
print(sorted({{"argparse", "enum", "gettext", "locale", "re", "typing"}} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert (result.stdout, result.stderr) == ("[]\n", "")
