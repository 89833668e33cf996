"""Options that a command does not have: the line says what it has instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.options import FRONT_ENDS, LINES

from dsl import __version__
from dsl.cli import deepspeed, torchrun
from dsl.cli.parser import INSTEAD, OTHERS, unknown_variables

if TYPE_CHECKING:
    from types import ModuleType

NAMES = {command: [set(one.names) for one in line.options] for command, line in LINES.items()}


def _error(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        FRONT_ENDS[command].main(words)
    assert caught.value.code == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ")
    return error


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "command, words, said",
    [
        ("dslrun", "--nprocs 4 t.py", "--nprocs, did you mean --nproc-per-node?"),
        ("dslrun", "-np 4 t.py", "-np, did you mean --nproc-per-node?"),
        ("dslrun", "--num-gpus=4 t.py", "--num-gpus=4, dslrun has --nproc-per-node"),
        ("dslrun", "--num_gpus 4 t.py", "--num_gpus, dslrun has --nproc-per-node"),
        ("dslrun", "--include localhost:0 t.py", "--include, dslrun has CUDA_VISIBLE_DEVICES for the devices"),
        ("dslrun", "--hostfile h t.py", "--hostfile, dslrun has --nnodes, --node-rank and --master-addr"),
        ("dslrun", "--quiet t.py", "--quiet, dslrun has --log-level error"),
        ("dslrun", "-H h t.py", "-H, dslrun has --nnodes"),
        ("dslrun", "--save_pid t.py", "--save_pid, only dsl has it"),
        ("dslrun", "-nnodes 2 t.py", "-nnodes, did you mean --nnodes?"),
        ("dslrun", "--config_file c t.py", "--config_file, did you mean options such as --nproc-per-node, in place of accelerate's file?"),
        ("dsl", "--config-file=c t.py", "=c, did you mean options such as --num_gpus, in place of accelerate's file?"),
        ("dslrun", "--num_processes 2 t.py", "--num_processes, did you mean --nproc-per-node?"),
        ("dsl", "--nproc-per-node 4 t.py", "--nproc-per-node, dsl has --num_gpus"),
        ("dsl", "--nproc_per_node=4 t.py", "--nproc_per_node=4, dsl has --num_gpus"),
        ("dsl", "-num_gpus 4 t.py", "-num_gpus, did you mean --num_gpus?"),
        ("dsl", "--role x t.py", "--role, only dslrun has it"),
        ("dsl", "--nnodes 4 t.py", "--nnodes, dsl has --num_nodes"),
        ("dsl", "--nprocs 4 t.py", "--nprocs, did you mean --num_gpus?"),
        ("dsl", "--verbose t.py", "--verbose, did you mean --log_level debug?"),
        ("dsl", "--zzz t.py", "--zzz, see dsl --help"),
        ("dsl", f"--{'z' * 5000} t.py", "zzz, see dsl --help"),
        ("dslrun", "--hostfil h t.py", "--hostfil, dslrun has --nnodes"),
        ("dslrun", "--nproc_per_nod3 2 t.py", "--nproc_per_nod3, did you mean --nproc_per_node?"),
        ("dsl", "--prewarm t.py", "--prewarm, which is gone, use --start-method forkserver or warm"),
        ("dslrun", "--import-throttle 4 t.py", "--import-throttle, which is gone, use --start-method forkserver"),
        ("dslrun", "--import_throttle=4 t.py", "--import_throttle=4, which is gone, use --start-method forkserver"),
        ("dslrun", "--fork-server-per numa t.py", "--fork-server-per: numa is gone, leave the option out: all workers"),
        ("dsl", "-V", "-V, did you mean --version?"),
        ("dsl", "--nmu_gpus=2", "unrecognized arguments: --nmu_gpus=2, did you mean --num_gpus?"),
        ("dslrun", "--nnodes 2", "the following arguments are required: SCRIPT, see dslrun -h"),
        ("dsl", "-m t.py", "-m, did you mean --module?"),
        ("dsl", "-n 4 t.py", "-n, did you mean --num_gpus?"),
    ],
)  # fmt: skip
def test_a_hint_that_hints(command: str, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = _error(command, words.split(), capsys)
    assert said in error
    assert len(error) < 300


@pytest.mark.parametrize("command, sister", [("dslrun", "dsl"), ("dsl", "dslrun")])
def test_every_option_that_only_the_sister_has_is_answered(
    command: str, sister: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {name for names in NAMES[command] for name in names}
    theirs = [names for names in NAMES[sister] if not names & own]
    hints = INSTEAD[LINES[command].origin]
    assert set(hints) <= {name[2:] for names in theirs for name in names}
    for names in theirs:
        for name in names:
            error = _error(command, [name, "1", "t.py"], capsys)
            assert f"{command} has " in error or f"only {sister} has it" in error, name


@pytest.mark.parametrize("command", ["dslrun", "dsl"])
def test_a_hint_names_what_there_is(command: str) -> None:
    own = {name for names in NAMES[command] for name in names} | {"--version"}
    hints = INSTEAD[LINES[command].origin]
    texts = [*hints.values(), *[pair[command == "dslrun"] for pair in OTHERS.values()]]
    named = {word.strip(",") for text in texts for word in text.split() if word.startswith("--")}
    foreign = {"--local_rank=N"} if command == "dsl" else set()
    assert named - own - foreign == set()


def test_a_word_of_other_launchers_is_no_option_of_ours() -> None:
    for command, sets in NAMES.items():
        own = {name.lstrip("-").replace("-", "_") for names in sets for name in names if name[:2] == "--"}
        assert not own & {*OTHERS}, command


@pytest.mark.parametrize(
    "front_end, program, facts",
    [
        (deepspeed, "dsl", {}),
        (torchrun, "dslrun", {}),
        (torchrun, "python -m dsl.launch", {"program": "python -m dsl.launch"}),
    ],
)
def test_the_version_of_each_command(
    front_end: ModuleType, program: str, facts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        front_end.main(["--version"], **facts)
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{program} {__version__}\n"


def test_the_version_takes_no_abbreviation_of_another_option() -> None:
    assert deepspeed.parse_args(["--ve", "v", "t.py"]).venv_script == "v"
    assert torchrun.parse_args(["--v", "t.py"], {}).virtual_local_rank
    assert torchrun.parse_args(["t.py"], {"PET_VERSION": "1"}).training_script == "t.py"


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_a_short_help_fits_a_screen_and_names_what_there_is(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        FRONT_ENDS[command].main(["-h"])
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert (caught.value.code, said.err) == (0, "")
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
    own = {name for names in NAMES[command] for name in names} | {"--help", "--help-all"}
    named = [word for line in lines for word in line.split() if word[:2] == "--" and word != "--lr"]
    assert len(named) >= 15
    assert set(named) - own == set()
    assert f"{command} --help shows more options, --help-all shows all" in said.out
    assert lines[-1].endswith(f"docs/{command}.md")


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_the_help_shows_what_people_use_and_says_where_the_rest_is(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        FRONT_ENDS[command].main(["--help"])
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert (caught.value.code, said.err) == (0, "")
    assert max(map(len, lines)) <= 80
    shown = [line.split("  ")[1].replace(",", "").split() for line in lines if line.startswith("  -")]
    assert 30 <= len(shown) <= 40
    own = {name for names in NAMES[command] for name in names}
    assert {word for words in shown for word in words if word[0] == "-"} - own == set()
    assert f"{command} --help-all shows all options, with defaults" in said.out


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_a_command_without_words_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        FRONT_ENDS[command].main([])
    said = capsys.readouterr()
    usage, *examples, error = said.err.splitlines()
    assert (caught.value.code, said.out) == (2, "")
    assert usage.startswith("usage: ")
    assert error == f"{command}: error: the following arguments are required: SCRIPT, see {command} -h"
    assert len(examples) == 3
    for line in examples:
        words = line.partition(".py")[0].split()
        assert words[0] == command
        front_end = FRONT_ENDS[command]
        assert front_end.read([*words[1:-1], "t.py"], {})[0].program.script == "t.py"


def test_the_default_of_the_launcher_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        deepspeed.main(["--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    launcher = text[text.index("--launcher ssh|") : text.index("--launcher_args")]
    assert launcher.count("default") == 1
    assert "(default: slurm in an allocation of Slurm, else pdsh if it is installed, else ssh)" in launcher


@pytest.mark.parametrize(
    "variable, said",
    [
        ("PET_NPROC", "warning: PET_NPROC has no effect, did you mean PET_NPROC_PER_NODE?"),
        (
            "PET_NPROCS_PER_NODE",
            "warning: PET_NPROCS_PER_NODE has no effect, did you mean PET_NPROC_PER_NODE?",
        ),
        ("PET_RDZV_ENDPOINTS", "warning: PET_RDZV_ENDPOINTS has no effect, did you mean PET_RDZV_ENDPOINT?"),
        ("PET_HOSTS", "PET_HOSTS has no effect: dslrun has no option --hosts"),
        ("PET_DATA", "PET_DATA has no effect: dslrun has no option --data"),
        ("PET_", "PET_ has no effect: dslrun has no option --"),
    ],
)
def test_a_variable_that_is_the_default_of_no_option(variable: str, said: str) -> None:
    environ = {"PET_NNODES": "1", "PET_STDIN": "0", "PET_RDZV_CONF": "", "CARPET_ID": "1", variable: "2"}
    assert [one.line for one in unknown_variables(environ, LINES["dslrun"])] == [said]


@pytest.mark.parametrize("variable", ["PET_PREWARM", "PET_IMPORT_THROTTLE"])
def test_the_default_of_an_option_that_is_gone_is_refused(
    variable: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "1")
    assert torchrun.main(["t.py"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{variable}: the default of --" in line
    assert ", which is gone, use --start-method forkserver or warm" in line
