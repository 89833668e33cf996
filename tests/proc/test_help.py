"""Help on a terminal: colours, and a pager for what is longer than the screen."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.kit.waiting import until
from tests.support.terminal import terminal

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.terminal import Terminal

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
    line = [str(path.with_name(command)), *words]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=20).stdout


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
