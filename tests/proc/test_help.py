"""What commands answer without a job: the help in colours and pages, and answers that cannot be written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.jobs import Helpers, running
from tests.support.terminal import Terminal, terminal

from dsl.machine import find_sockets

COLOUR = re.compile(r"\x1b\[\d*m")
PAGER = """#!/bin/sh
echo "LESS=$LESS" > {0}/shown
cat >> {0}/shown
echo paging
read line < /dev/tty
"""


@pytest.fixture
def pager(tmp_path: Path) -> Path:
    """A pager that writes what it shows to the file ``shown`` beside it, and waits for Enter."""
    path = tmp_path / "pager"
    path.write_text(PAGER.format(tmp_path))
    path.chmod(0o755)
    return path


def plain(path: Path, command: str, *words: str) -> str:
    """What a command says without a terminal."""
    return ran([path.with_name(command), *words], check=True).stdout


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_the_whole_help_has_colours_and_comes_in_the_pager(
    dsl_command: Path, pager: Path, command: str
) -> None:
    line = [str(dsl_command.with_name(command)), "--help"]
    with terminal(line, {"TERM": "xterm", "PAGER": f"{pager} -x"}, size=(80, 24)) as screen:
        screen.showed("paging")
        screen.press(b"\x03")  # the pager's business: this one dies of it, and the command ends well
        screen.reported("ended 0")
    head, _, shown = (pager.parent / "shown").read_text().partition("\n")
    assert head == "LESS=FRX"
    assert "\x1b[1mwhere to run:\x1b[0m\n" in shown
    assert "\x1b[36m--log-dir\x1b[0m DIR" in shown
    assert COLOUR.sub("", shown) == plain(dsl_command, command, "--help")


@pytest.mark.parametrize(
    "environ, size, words",
    [
        ({"TERM": "xterm"}, (80, 400), "dsl --help"),
        ({"TERM": "xterm"}, (80, 24), "dsl -h"),
        ({"TERM": "dumb"}, (80, 24), "dsl --help"),
        ({"TERM": "xterm", "JPY_PARENT_PID": "7"}, (80, 24), "dsl --help"),
        ({"TERM": "xterm", "PAGER": ""}, (80, 24), "dsl --help"),
        ({"TERM": "xterm", "PAGER": "/no/such/pager"}, (80, 24), "dsl --help"),
        ({"TERM": "xterm", "PAGER": "'"}, (80, 24), "dslrun --help"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, (80, 24), "dsl-ps --help"),
    ],
)
def test_what_fits_or_has_no_pager_is_printed(
    dsl_command: Path, pager: Path, environ: dict[str, str], size: tuple[int, int], words: str
) -> None:
    command, option = words.split()
    line = [str(dsl_command.with_name(command)), option]
    with terminal(line, {"PAGER": str(pager), **environ}, size=size) as screen:
        screen.reported("ended 0")
        # What the terminal shows may come later than the end of the command.
        end = plain(dsl_command, command, option)[-40:]
        until(lambda: COLOUR.sub("", text_of(screen)).endswith(end))
        shown = text_of(screen)
    assert COLOUR.sub("", shown) == plain(dsl_command, command, option)
    assert bool(COLOUR.search(shown)) is (environ["TERM"] == "xterm" and "NO_COLOR" not in environ)


def text_of(screen: Terminal) -> str:
    return screen.shown().decode().replace("\r\n", "\n")


@pytest.mark.skipif(shutil.which("less") is None, reason="needs the program less")
def test_less_shows_a_screen_and_leaves_it(dsl_command: Path) -> None:
    with terminal([str(dsl_command), "--help"], {"TERM": "xterm", "PAGER": "less"}, size=(80, 24)) as screen:
        screen.showed("SCRIPT [ARGUMENTS]")
        screen.press(b"q")
        screen.reported("ended 0")
        assert b"showing the plan" not in screen.shown()


def test_colours_can_be_forced_into_a_pipe(dsl_command: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = plain(dsl_command, "dsl", "--help")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = plain(dsl_command, "dsl", "--help")
    assert COLOUR.search(coloured)
    assert COLOUR.sub("", coloured) == without
    monkeypatch.setenv("NO_COLOR", "1")
    assert plain(dsl_command, "dsl", "--help") == without


ANSWERS = (
    *("dsl --help", "dsl -h", "dsl --version", "dslrun --version", "dsl-ps --help", "dsl-warm --version"),
    *("dsl --completion bash", "dslrun --completion=zsh", "dsl --completion SIGNAL dsl SIG -"),
    *("dsl-ps", "dsl-ps --json", "dsl-warm", "dsl-warm status --json", "dsl-warm stop", "dsl-report"),
    *("dsl-report --json", "dsl-elastic -c config.json", "dsl-elastic --version", "dsl-top --help"),
    *("dsl-attach --version", "dsl-wait --help", "dsl-stacks --version", "dsl-ssh --help"),
    *("dsl --num_gpus 1 --dry-run train.py", "dsl --num_gpus 1 --dry-run-json train.py"),
    *("dslrun --dry-run-json train.py", "dsl --num_gpus 1 --doctor train.py", "dslrun --doctor train.py"),
    pytest.param(
        "dsl --hostfile hosts --no_ssh_check --dry-run-json train.py", marks=pytest.mark.needs_program("ssh")
    ),
)
CONFIG = """{"elasticity": {"enabled": true, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2], "min_gpus": 1,
"max_gpus": 4, "min_time": 0, "version": 0.1}}"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    (tmp_path / "config.json").write_text(CONFIG)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


def run(dsl_command: Path, place: Path, line: str, end: str) -> subprocess.CompletedProcess[str]:
    """A run of a command with this end of its line for a shell."""
    name, *words = line.split()
    script = f'exec "$0" "$@" {end}'
    return ran(["/bin/sh", "-c", script, dsl_command.with_name(name), *words], cwd=place)


@pytest.mark.parametrize("line", ANSWERS)
@pytest.mark.parametrize(
    "end, why", [(">/dev/full", "no space left on device"), (">&-", "it is closed")], ids=["full", "closed"]
)
def test_an_answer_that_cannot_be_written_is_an_error(
    dsl_command: Path, place: Path, line: str, end: str, why: str
) -> None:
    done = run(dsl_command, place, line, end)
    last = done.stderr.splitlines()[-1]
    assert last == f"{line.partition(' ')[0]}: error: stdout cannot be written: {why}"
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("line", ANSWERS)
def test_who_wants_no_more_hears_nothing(dsl_command: Path, place: Path, line: str) -> None:
    """As every program that SIGPIPE ends, behind ``| head``."""
    name, *words = line.split()
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [str(dsl_command.with_name(name)), *words],
            cwd=place,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == 128 + 13
    assert "stdout" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("line", ["dsl-top --once", "dsl-stacks", "dsl-stacks --json"])
def test_a_view_of_a_job_that_cannot_be_written_is_an_error(
    dsl_command: Path, place: Path, line: str, helpers: Helpers
) -> None:
    program = ["note", str(place / "ready"), "%r %p", "pause"]
    with running(helpers.line(1, program), place) as job:
        job.ready(1)
        until(lambda: any(name.startswith(f"{job.guard}-") for _, name in find_sockets(".sock")))
        done = run(dsl_command, place, f"{line} {job.guard}", ">/dev/full")
        why = "stdout cannot be written: no space left on device"
        assert (done.returncode, done.stderr) == (1, f"{line.partition(' ')[0]}: error: {why}\n")


@pytest.mark.parametrize("line", ["dsl-wait", "dsl-attach", "dsl-stacks", "dsl-top", "dsl-wait 1"])
@pytest.mark.parametrize("word", ["", " ", "\t\n"])
def test_an_empty_name_names_no_job(dsl_command: Path, place: Path, line: str, word: str) -> None:
    name, *words = line.split()
    command = [str(dsl_command.with_name(name)), *words, word]
    done = ran(command, cwd=place)
    why = f"{word!r} names no job, give the pid that dsl-ps shows"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{name}: error: {why}\n")


@pytest.mark.parametrize("line", ["dsl-wait", "dsl-attach", "dsl-stacks", "dsl-top", "dsl-warm stop"])
def test_a_job_or_server_that_there_is_not_is_a_mistake_in_the_usage_of_each_tool(
    dsl_command: Path, place: Path, line: str
) -> None:
    name, *words = line.split()
    done = ran([str(dsl_command.with_name(name)), *words, "1"], cwd=place)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"{name}: error: no ")


@pytest.mark.parametrize(
    "line, words",
    [
        (["dsl-warm", ""], "no such action: ''"),
        (["dsl-warm", "stop", ""], "no warm server has the pid ''"),
    ],
)
def test_other_empty_names_are_errors_too(
    dsl_command: Path, place: Path, line: list[str], words: str
) -> None:
    name, *rest = line
    command = [str(dsl_command.with_name(name)), *rest]
    done = ran(command, cwd=place)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: error: {words}")
