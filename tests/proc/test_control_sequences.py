"""Control sequences in a worker's output reach neither another worker's line nor the terminal (tags on)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyte
import pytest
from tests.support.command import dsl_line
from tests.support.terminal import terminal

pytestmark = pytest.mark.guarantee("G6")

# Rank 1 writes a line before and one after rank 0 does its worst, in pieces that are read one by one.
WORKER = r"""
import os, sys, time
before, after = sys.argv[1] + "/before", sys.argv[1] + "/after"
def wait(path):
    while not os.path.exists(path):
        time.sleep(0.005)
if os.environ["RANK"] == "1":
    print("the line before", flush=True)
    open(before, "w").close()
    wait(after)
    print("the line after", flush=True)
else:
    wait(before)
    for piece in sys.argv[2:]:
        os.write(1, bytes.fromhex(piece))
        time.sleep(0.02)
    open(after, "w").close()
"""

ATTACKS: dict[str, list[bytes]] = {
    "clear the screen": [b"\x1b[2J"],
    "clear all of it and what scrolled by": [b"\x1b[H\x1b[2J\x1b[3J"],
    "go home and write": [b"\x1b[HFAKE"],
    "go to the line above": [b"\x1b[A\x1b[10DFAKE"],
    "go to a line of others by its number": [b"\x1b[1;1fFAKE\x1b[1dFAKE"],
    "rub out the line": [b"\x1b[2K"],
    "rub out its begin": [b"text\x1b[1KFAKE"],
    "delete and insert lines": [b"\x1b[1A\x1b[2M\x1b[2L"],
    "scroll": [b"\x1b[5S\x1b[5T\x1bM\x1bD\x1bE"],
    "set a scroll region": [b"\x1b[2;3r"],
    "set the title": [b"\x1b]0;FAKE\x07\x1b]2;FAKE\x1b\\"],
    "fill the clipboard": [b"\x1b]52;c;RkFLRQ==\x07"],
    "another screen": [b"\x1b[?1049h\x1b[?47h"],
    "hide the cursor, change modes": [b"\x1b[?25l\x1b[?7l\x1b[4h\x1b[?5h\x1b[20h\x1b[?2004h"],
    "save and restore the cursor": [b"\x1b7\x1b[s\x1b[u\x1b8FAKE"],
    "reset": [b"\x1bc", b"\x1b[!p"],
    "ask for an answer": [b"\x1b[6n\x1b[c\x1b[5n\x05"],
    "eight bits": [b"\x9b2J\xc2\x9b2J\xc2\x9d0;FAKE\x07\x84\x8d\xc2\x85"],
    "strings for devices": [b"\x1bPq#0~\x1b\\\x1b_Ga=d\x1b\\\x1b^x\x1b\\\x1bXx\x1b\\"],
    "in pieces": [b"\x1b", b"[", b"2", b"J", b"\x1b]0;FA", b"KE", b"\x07", b"\xc2", b"\x9b2J"],
    "over lines": [b"\x1b[2\nJ\x1b]0;FAKE\nFAKE\x07\x1b\nc"],
    "unfinished at the end of the line": [b"\x1b[3\nJ"],
    "an unfinished string": [b"\x1b]0;FAKE\n\x07"],
    "back over the tag": [b"\rFAKE", b"\x08" * 40 + b"FAKE", b"\x1b[40DFAKE", b"\x1b[GFAKE"],
    "another line by line feeds that are none": [b"\x0bFAKE\x0cFAKE"],
    "colours without an end": [b"\x1b[31;7m"],
    "other letters": [b"\x1b(0\x0e\x1b#8"],
    "set tabs": [b"\x1b[3g\x1bH"],
}
TAGGED = ("--tag-output", "always")


def _line(dsl: Path, tmp_path: Path, pieces: list[bytes]) -> list[str]:
    words = [piece.hex() for piece in (b"first\nlast ", *pieces, b" word\n")]
    program = [sys.executable, "-c", WORKER, str(tmp_path), *words]
    return dsl_line(dsl, 2, program, None, *TAGGED)


def _plain(line: str) -> str:
    """A line without what may stand in it."""
    line = re.sub(r"\x1b\[[0-9;:]*m|\x1b\[[0-9]*[CDK@PX]", "", line)
    return line.replace("\r[rank 0] ", "").replace("\x08", "")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_changes_nothing_on_a_terminal(name: str, dsl_command: Path, tmp_path: Path) -> None:
    with terminal(_line(dsl_command, tmp_path, ATTACKS[name]), {"TERM": "xterm"}) as window:
        window.reported("ended 0")
        window._read()
        data = window.screen
    answers: list[str] = []
    screen = pyte.Screen(80, 24)
    screen.write_process_input = answers.append
    modes = set(screen.mode)
    pyte.ByteStream(screen).feed(data)
    rows = [row.rstrip() for row in screen.display if row.strip()]
    assert [row for row in rows if row.startswith("[rank 1]")] == [
        "[rank 1] the line before",
        "[rank 1] the line after",
    ]
    own = [row for row in rows if not row.startswith("[rank 1]")]
    assert all(row.startswith("[rank 0] ") for row in own)
    assert own[0] == "[rank 0] first"
    assert own[-1].endswith("word")
    assert (screen.title, screen.icon_name, screen.mode, screen.margins) == ("", "", modes, None)
    assert (screen.cursor.x, screen.cursor.y, screen.cursor.hidden) == (0, len(rows), False)
    assert (answers, screen.charset, screen.tabstops) == ([], 0, set(range(8, 80, 8)))
    last = screen.display.index(next(row for row in screen.display if "the line after" in row))
    text = screen.buffer[last][len("[rank 1] t")]
    assert (text.fg, text.bg, text.reverse) == ("default", "default", False)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_leaves_only_text_colours_and_moves_behind_the_tag(
    name: str, dsl_command: Path, tmp_path: Path
) -> None:
    result = subprocess.run(
        _line(dsl_command, tmp_path, ATTACKS[name]), capture_output=True, timeout=30, check=False
    )
    lines = [_plain(line) for line in result.stdout.decode().split("\n")[:-1]]
    assert sorted(line for line in lines if line.startswith("[rank 1] ")) == [
        "[rank 1] the line after",
        "[rank 1] the line before",
    ]
    assert all(re.fullmatch(r"\[rank [01]\] [^\x00-\x08\x0a-\x1f\x7f-\x9f]*", line) for line in lines)


def test_untagged_lines_and_files_have_the_bytes_as_they_are(dsl_command: Path, tmp_path: Path) -> None:
    attack = b"".join(piece for pieces in ATTACKS.values() for piece in pieces if b"\n" not in piece) + b"\n"
    for tag in ("never", "always"):
        folder = tmp_path / tag
        folder.mkdir()
        program = [
            sys.executable,
            "-c",
            "import os, sys; os.write(1, bytes.fromhex(sys.argv[1]))",
            attack.hex(),
        ]
        line = dsl_line(dsl_command, 2, program, None, "--tag-output", tag, "--log-dir", str(folder))
        result = subprocess.run(line, capture_output=True, timeout=30, check=False)
        assert (result.stdout == attack * 2) is (tag == "never")
        assert [path.read_bytes() for path in folder.rglob("stdout.log")] == [attack, attack]
