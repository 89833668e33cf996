"""What a rank finds in its environment and its arguments, through the real command."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import WITH_ODD_ENTRIES, dsl_line
from tests.support.jobs import running

pytestmark = [pytest.mark.engine, pytest.mark.guarantee("G5")]


def _dumps(
    dsl: Path,
    testchild: Path,
    directory: Path,
    workers: int,
    *options: str,
    environ: Mapping[str, str] | None = None,
    arguments: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    words = ["dump", str(directory / "dump.%r"), "exit", "0", *arguments]
    line = dsl_line(dsl, workers, [str(testchild), *words], None, *options)
    with running(line, directory, environ=environ) as job:
        assert job.wait() == 0, job.stderr()
    return [json.loads((directory / f"dump.{rank}").read_text()) for rank in range(workers)]


def _environment(dump: dict[str, Any]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in dump["env"]]
    names = [name for name, _, _ in pairs]
    assert len(names) == len(set(names)), "a variable is set twice"
    return {name: value for name, _, value in pairs}


def test_the_rank_variables(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    dumps = _dumps(dsl_command, testchild, tmp_path, 3, "--master_port", "29611")
    for rank, dump in enumerate(dumps):
        env = _environment(dump)
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_SIZE": "3",
            "CROSS_RANK": "0",
            "CROSS_SIZE": "1",
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29611",
        }
        assert {name: env.get(name) for name in expected} == expected


def test_everything_else_is_inherited_and_nothing_is_added(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    given = {"SOME_USER_VARIABLE": "1", "OMP_NUM_THREADS": "3"}
    (dump,) = _dumps(dsl_command, testchild, tmp_path, 1, environ=given)
    env = _environment(dump)
    contract = {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    }
    added = {name for name in env if name not in os.environ and name not in given} - {"DSL_TEST_JOB"}
    assert {name for name in added - contract if not name.startswith("DSL_")} == set()
    for name in set(os.environ) | set(given):
        if name not in contract:
            assert env[name] == {**os.environ, **given}[name]


NASTY = {
    "JSON": '{"a": "b", "c": [1, "$HOME"]}',
    "QUOTES": "I am 6' tall and 72\" wide",
    "SHELL": "a;b$HOME`id` $(id) *?[x] && | > <",
    "LINES": "one\ntwo\r\n\tthree",
    "EMPTY": "",
    "EQUALS": "a=b=c",
    "UNICODE": "Grüße, 世界",
    "LONG": "x" * 100_000,
    "BACKSLASH": "\\n\\",
}


def test_values_arrive_byte_for_byte(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    (dump,) = _dumps(dsl_command, testchild, tmp_path, 1, environ=NASTY)
    env = _environment(dump)
    assert {name: env[name].encode("latin-1") for name in NASTY} == {
        name: value.encode() for name, value in NASTY.items()
    }


def test_a_value_that_is_not_utf8_arrives(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    raw = bytes(range(1, 256))
    (dump,) = _dumps(dsl_command, testchild, tmp_path, 1, environ={"RAW": os.fsdecode(raw)})
    assert _environment(dump)["RAW"].encode("latin-1") == raw


def test_arguments_arrive_byte_for_byte(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    arguments = (
        *NASTY.values(),
        os.fsdecode(bytes(range(128, 256))),
        "--num_gpus",
        "9",
        "--",
        "-H",
        "--help",
    )
    (dump,) = _dumps(dsl_command, testchild, tmp_path, 1, arguments=arguments)
    received = [word.encode("latin-1") for word in dump["argv"]]
    assert received[-len(arguments) :] == [os.fsencode(word) for word in arguments]


def test_the_local_rank_argument_goes_between_script_and_arguments(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    dump = str(tmp_path / "dump.%r")
    line = [str(dsl_command), "--no_python", "--num_gpus", "2", str(testchild), "dump", dump]
    with running(line, tmp_path) as job:
        assert job.wait() == 0, job.stderr()
    for rank in range(2):
        argv = json.loads((tmp_path / f"dump.{rank}").read_text())["argv"]
        assert argv == [str(testchild), f"--local_rank={rank}", "dump", dump]


def test_a_python_script_runs_unbuffered_with_its_own_arguments(dsl_command: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:], sys.stdout.write_through)\n")
    line = [str(dsl_command), "--num_gpus", "1", str(script), "--lr", "1"]
    with running(line, tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
    assert job.stdout() == "['--local_rank=0', '--lr', '1'] True\n"


@pytest.mark.guarantee("G1")
def test_every_worker_carries_the_token_of_the_job(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The token by which stray processes are found is the same for the group and new for each job."""
    tokens: list[str] = []
    for run in range(2):
        dumps = _dumps(dsl_command, testchild, tmp_path / str(run), 2)
        found = {_environment(dump)["DSL_JOB_ID"] for dump in dumps}
        assert len(found) == 1
        tokens += found
    assert tokens[0] != tokens[1]


@pytest.mark.guarantee("G1")
def test_a_job_inside_a_job_carries_both_tokens(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """A sweep for the outer job must find what the inner one started."""
    given = {"DSL_JOB_ID": "of-an-outer-job"}
    (dump,) = _dumps(dsl_command, testchild, tmp_path, 1, environ=given)
    outer, _, own = _environment(dump)["DSL_JOB_ID"].partition(":")
    assert outer == "of-an-outer-job"
    assert own


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_entries_that_no_mapping_can_hold_arrive_as_they_are(
    command: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Variables that are set twice, and entries without a name or without a value."""
    entries = ["TWICE=1", "=nameless", "=C:=C:\\", "no equals sign", "TWICE=2", "TWICE=1", "RANK=7", "RANK=8"]
    words = [str(testchild), "dump", str(tmp_path / "dump.%r"), "exit", "0"]
    line = dsl_line(dsl_command, 2, words)
    if command == "dslrun":
        line = [str(dsl_command.with_name(command)), "--no-python", "--nproc-per-node=2", *words]
    with running([sys.executable, "-c", WITH_ODD_ENTRIES, "|".join(entries), *line], tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
    for rank in range(2):
        found = json.loads((tmp_path / f"dump.{rank}").read_text())["env"]
        odd = [entry for entry in found if entry.startswith(("TWICE", "=", "no ", "RANK="))]
        assert sorted(odd) == sorted([*entries[:6], f"RANK={rank}"])
        assert [entry for entry in odd if entry.startswith("TWICE")] == ["TWICE=1", "TWICE=2", "TWICE=1"]
