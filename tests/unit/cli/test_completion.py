"""What shells get when they ask for words that change."""

from __future__ import annotations

import io
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.machine import make_facts

from dsl.cli import deepspeed, torchrun
from dsl.cli.completion import PLAIN, answer, filters
from dsl.cli.ssh import SSH
from dsl.cli.tool import Tool
from dsl.plan.hosts import apply_filters
from dsl.view.tools import PS, WAIT

POOL = {"worker-0": 4, "worker-1": 2, "big": 300}


@pytest.mark.parametrize(
    "word, expected",
    [
        ("", ["worker-0", "worker-1", "big"]),
        ("worker-1:", ["worker-1:0", "worker-1:1"]),
        ("worker-0:2,", ["worker-0:2,0", "worker-0:2,1", "worker-0:2,3"]),
        ("worker-1:0@", ["worker-1:0@worker-0", "worker-1:0@big"]),
        ("nobody:", []),
        ("big@worker-1:0,1,", []),
    ],
)
def test_a_filter_goes_on(word: str, expected: list[str]) -> None:
    assert [one for one, _ in filters(word, POOL)] == expected


def test_a_host_with_many_slots_shows_the_first() -> None:
    assert len(list(filters("big:", POOL))) == 64


@given(st.lists(st.integers(0, 400), max_size=6))
def test_what_is_offered_is_a_filter_that_a_launch_accepts(choices: list[int]) -> None:
    word = ""
    for number in choices:
        offered = [one for one, _ in filters(word, POOL)]
        if not offered:
            break
        word = offered[number % len(offered)]
        assert apply_filters({host: range(count) for host, count in POOL.items()}, word, "")
        word += (":", ",", "@")[number % 3] if ":" not in word.rpartition("@")[2] else (",", "@")[number % 2]


HOSTS = "worker-0 slots=2\n$(id) slots=1\na;b slots=1\nworker-1 slots=1\n"


@pytest.mark.parametrize(
    "asked, expected",
    [
        (("FILTER", "dsl", "", "hosts"), ["worker-0\t2 slots", "worker-1\t1 slot"]),
        (("FILTER", "dsl", "worker-1", "hosts"), ["worker-1\t1 slot"]),
        (("FILTER", "dsl", "x", "hosts"), []),
        (("FILTER", "dsl", "", "missing"), []),
        (("FILTER", "dsl", "", "broken"), []),
        (("SIGNAL", "dsl", "SIGUSR", ""), ["SIGUSR1\tsignal 10", "SIGUSR2\tsignal 12"]),
        (("SIGNAL,...", "dslrun", "SIGUSR1,SIGUSR", ""), ["SIGUSR1,SIGUSR2\tsignal 12"]),
        (("SIGNAL", "dsl", "SIGKILL", ""), []),
        (("OTHER", "dsl", "", ""), []),
    ],
)
def test_an_answer(asked: tuple[str, str, str, str], expected: list[str]) -> None:
    facts = make_facts(files={"hosts": HOSTS, "broken": "a slots=\n"})
    assert answer(*asked, facts) == expected


@pytest.mark.parametrize(
    "line",
    [
        "--print-completion tcsh",
        "--print_completion=tcsh",
        "--nnodes 1 --print-completion tcsh t.py",
        "--completion tcsh",
    ],
)
def test_dslrun_prints_a_script_as_torchrun_does(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert torchrun.main(line.split()) == 0
    assert "complete dslrun '" in capfd.readouterr().out


def test_without_a_hostfile_the_hosts_are_those_of_the_scheduler_or_this_one() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-4]"}
    found = answer("FILTER", "dsl", "", "", make_facts(environ=environ))
    assert [line.partition("\t")[0] for line in found] == ["n3", "n4"]
    found = answer("FILTER", "dsl", "localhost:", "", make_facts(environ={"LOCAL_SIZE": "2"}))
    assert [line.partition("\t")[0] for line in found] == ["localhost:0", "localhost:1"]


@given(st.text(max_size=20))
def test_nothing_is_offered_that_a_shell_would_read_in_another_way(name: str) -> None:
    facts = make_facts(files={"hosts": f"{name} slots=1\n"})
    for line in answer("FILTER", "dsl", "", "hosts", facts):
        assert PLAIN.fullmatch(line.partition("\t")[0])
        assert line.count("\t") == 1
        assert line.isprintable() or line.replace("\t", "").isprintable()


@pytest.mark.parametrize("words", [["--completion", "bash"], ["--completion=fish"], ["--completion", "zsh"]])
@pytest.mark.parametrize("front_end", [deepspeed, torchrun])
def test_each_command_prints_the_script_for_all(
    front_end: ModuleType, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert front_end.main(words) == 0
    said = capsys.readouterr()
    assert "--nproc-per-node" in said.out.replace("-l ", "--")
    assert "dsl-wait" in said.out
    assert "dsl-warm" in said.out
    assert said.err == ""


@pytest.mark.parametrize(
    "words, said",
    [
        ("--completion", "argument --completion: expected one argument"),
        ("--completion ksh", "argument --completion: invalid choice: 'ksh'"),
        ("--completion bash train.py", "--completion stands alone, as in dsl --completion bash"),
        ("-q --completion zsh", "--completion stands alone, as in dsl --completion zsh"),
        ("--completion FILTER dsl", "argument --completion: invalid choice: 'FILTER'"),
    ],
)
def test_a_slip_at_the_completion_is_one_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        deepspeed.main(words.split())
    assert caught.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "tool, words, said",
    [
        (PS, ["--jsn"], "dsl-ps: error: unrecognized arguments: --jsn, did you mean --json?"),
        (PS, ["job"], "dsl-ps: error: unrecognized arguments: job, see dsl-ps --help"),
        (WAIT, ["--zzz"], "dsl-wait: error: unrecognized arguments: --zzz, see dsl-wait --help"),
        (SSH, ["--max-at-onec", "3", "ls"], "--max-at-onec, did you mean --max-at-once?"),
        (SSH, [], "dsl-ssh: error: no command was given: dsl-ssh [OPTIONS] COMMAND [ARGUMENTS]"),
    ],
)
def test_a_slip_at_a_tool_is_one_line(
    tool: Tool, words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = tool.main(words)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert said in capfd.readouterr().err.splitlines()[-1]


def test_a_program_gets_the_help_in_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    parser = PS.make_parser()
    parser.print_help(file)
    assert file.getvalue() == parser.format_help()
    assert capsys.readouterr().out == ""
