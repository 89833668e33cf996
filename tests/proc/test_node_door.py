"""The agent's door, started where a user's files lie."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHADOWS = ("socket.py", "select.py", "json.py", "threading.py", "shlex.py", "queue.py")


@pytest.mark.parametrize("option", [(), ("-E",)])
def test_files_of_the_user_are_no_modules_of_the_agent(tmp_path: Path, option: tuple[str, ...]) -> None:
    """A script's directory may hold a `socket.py`: the agent runs there, and does not import it."""
    for name in SHADOWS:
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n", encoding="utf-8")
    words = [sys.executable, *option, "-m", "dsl.node", "--stdio", "--place", "0"]
    ended = subprocess.run(words, cwd=tmp_path, input=b"", capture_output=True, check=False)
    assert b"wrong module" not in ended.stderr + ended.stdout
    assert ended.stderr.startswith(b"dsl: error: ")
    assert ended.stderr.count(b"\n") == 1
