"""What is asked for by global rank, with real workers: whom the console shows, who has files, who is wrapped."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import dsl_line, ran
from tests.support.jobs import running
from tests.support.places import Nodes

SAYS = ("/bin/sh", "-c", 'echo "out of $RANK"; echo "err of $RANK" >&2')


@pytest.fixture(params=["dsl", "dslrun"])
def command(request: pytest.FixtureRequest, dsl_command: Path) -> Path:
    """Path of each of the two commands."""
    return dsl_command.with_name(request.param)


def job(command: Path, workers: int, *options: str, program: Sequence[str] = SAYS) -> list[str]:
    return dsl_line(command, workers, program, None, *options)


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of the workers, in no order."""
    lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    return sorted(line for line in lines if " of " in line)


def test_the_console_shows_the_ranks_that_both_lists_name(command: Path, tmp_path: Path) -> None:
    options = (
        "--ranks-filter",
        "0,2-3",
        "--local-ranks-filter",
        "1,2,3",
        "--log-dir",
        str(tmp_path / "logs"),
    )
    result = ran(job(command, 5, *options))
    assert result.returncode == 0, result.stderr
    assert said(result) == ["err of 2", "err of 3", "out of 2", "out of 3"]
    kept = {path.read_text() for path in (tmp_path / "logs").glob("*/attempt_0/*/stdout.log")}
    assert kept == {f"out of {rank}\n" for rank in range(5)}


@pytest.mark.parametrize("text", ["x", "3-1", "0,", "-1"])
def test_a_list_that_is_none_is_one_line(command: Path, text: str) -> None:
    result = ran(job(command, 1, f"--ranks-filter={text}"))
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert f"error: --ranks-filter '{text}': bad range" in line


def test_nodes_with_a_command_each_count_ranks_over_all_of_them(nodes: Nodes) -> None:
    each = "--nproc-per-node=2 --ranks-filter=1-2"
    jobs = nodes.start(each, each, program=("--no-python", *SAYS))
    assert [one.wait() for one in jobs] == [0, 0], [one.stderr() for one in jobs]
    shown = [[line for line in one.stdout().splitlines() if " of " in line] for one in jobs]
    assert shown == [["out of 1"], ["out of 2"]]


def test_files_are_for_the_global_ranks_that_the_maps_name(nodes: Nodes, tmp_path: Path) -> None:
    each = f"--nproc-per-node=2 --log-dir={tmp_path}/logs --redirects=rank2:3 --tee=rank1:1"
    jobs = nodes.start(each, each, program=("--no-python", *SAYS))
    assert [one.wait() for one in jobs] == [0, 0], [one.stderr() for one in jobs]
    kept = sorted(path.read_text() for path in (tmp_path / "logs").glob("[!.]*/attempt_0/*/*.log"))
    assert [text for text in kept if text] == ["err of 2\n", "out of 1\n", "out of 2\n"]
    shown = [sorted(line for line in one.stdout().splitlines() if " of " in line) for one in jobs]
    assert shown == [["[default1]:out of 1", "out of 0"], ["out of 3"]]


def test_a_prefix_names_the_host_as_the_job_knows_it(command: Path) -> None:
    result = ran(job(command, 2, "--log-line-prefix-template", "<${host} ${rank}> "))
    host = "localhost" if command.name == "dsl" else os.uname().nodename
    assert said(result) == sorted(
        f"<{host} {rank}> {stream} of {rank}" for rank in (0, 1) for stream in ("out", "err")
    )


WRAP = '/bin/sh -c \'echo "wrap of $RANK"; "$@"; exit $?\' wrapper'
"""A command that keeps signals to itself, as shells do."""


def test_a_command_executes_the_ranks_that_it_wraps(command: Path) -> None:
    result = ran(job(command, 4, "--wrap", f"0,2:{WRAP}", "--wrap", "2:env A=1"))
    assert result.returncode == 0, result.stderr
    lines = [f"{stream} of {rank}" for rank in range(4) for stream in ("out", "err")]
    assert said(result) == sorted([*lines, "wrap of 0", "wrap of 2"])


@pytest.mark.parametrize("signum, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_worker_behind_a_command_hears_signals_and_leaves_nothing(
    command: Path, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    program = ("/bin/sh", "-c", f'echo $$ >"{tmp_path}/$RANK"; exec sleep 600')
    line = job(command, 2, "--grace", "60", "--wrap", f"1:{WRAP}", program=program)
    with running(line, tmp_path / "job") as started:
        until(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        started.process.send_signal(signum)
        assert started.wait() == code, started.stderr()


SCRIPT = """
import os, sys
print("wrapped" if os.environ.get("WRAPPED") else "plain", "of", os.environ["RANK"], *sys.argv[1:])
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_wrapped_worker_is_executed_and_the_others_are_forked(
    method: str, dslrun: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    options = ("--nproc-per-node", "3", "--start-method", method, "--wrap", "1:env WRAPPED=1")
    result = ran([dslrun, *options, script, "a b"])
    assert result.returncode == 0, result.stderr
    assert said(result) == ["plain of 0 a b", "plain of 2 a b", "wrapped of 1 a b"]
    lines = [line for line in result.stderr.splitlines() if "executed" in line]
    assert lines == ["dslrun: rank 1 executed, not forked: --wrap"] * (method == "forkserver")


@pytest.mark.parametrize(
    "wrap, code, text",
    [
        ("1:no-such-program -x", 127, "--wrap: program 'no-such-program' is not on PATH"),
        ("1:/", 126, "--wrap: program '/' is a directory"),
        ("1:", 2, "--wrap '1:': there is no command, give RANKS:COMMAND, as in 0:nsys profile"),
        ("one:true", 2, "--wrap 'one': bad range 'one', expected a rank or FIRST-LAST, or all"),
        ("2:true", 2, "--wrap '2': the job has ranks 0 to 1"),
    ],
)
def test_a_command_that_cannot_wrap_is_one_line(command: Path, wrap: str, code: int, text: str) -> None:
    result = ran(job(command, 2, "--wrap", wrap))
    assert (result.returncode, result.stdout, result.stderr) == (code, "", f"{command.name}: error: {text}\n")


def test_a_command_is_needed_only_where_it_wraps_a_rank(nodes: Nodes) -> None:
    jobs = nodes.start("--wrap=1:no-such-program", "--wrap=1:env", program=("--no-python", *SAYS))
    assert [one.wait() for one in jobs] == [0, 0], [one.stderr() for one in jobs]
    result = ran(job(nodes.bin / "dslrun", 1, "--dry-run", "--wrap", "0:env A=1"))
    assert "command: env A=1 /bin/sh -c" in result.stdout
