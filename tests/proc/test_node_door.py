"""The agent's door, started where a user's files lie."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Programs that start an agent for each of two hosts, and lose its key on the way.
LOSERS = {
    "pdsh": """
started = [Popen(["sh", "-c", argv[-1].replace("%n", place)], stdin=PIPE) for place in "01"]
""",
    "mpirun": """
del environ["DSL_CONTROL_KEY"]
words = argv[argv.index(executable) :]
started = [Popen(words, env={**environ, "OMPI_COMM_WORLD_RANK": place}) for place in "01"]
""",
}
SHADOWS = ("socket.py", "select.py", "json.py", "threading.py", "shlex.py", "queue.py")


@pytest.mark.parametrize("option", [(), ("-E",)])
def test_files_of_the_user_are_no_modules_of_the_agent(tmp_path: Path, option: tuple[str, ...]) -> None:
    """A script's directory may hold a `socket.py`: the agent runs there, and does not import it."""
    for name in SHADOWS:
        (tmp_path / name).write_text("raise SystemExit('the wrong module')\n", encoding="utf-8")
    words = [sys.executable, *option, "-m", "dsl_launcher.node", "--stdio", "--place", "0"]
    ended = subprocess.run(words, cwd=tmp_path, input=b"", capture_output=True, check=False)
    assert b"wrong module" not in ended.stderr + ended.stdout
    assert ended.stderr.startswith(b"dsl: error: ")
    assert ended.stderr.count(b"\n") == 1


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "launcher, program, said",
    [
        ("pdsh", "pdsh", "pdsh does not mark the lines of hosts with their names"),
        ("openmpi", "mpirun", "DSL_CONTROL_KEY has not come to host "),
    ],
)
def test_a_key_that_is_lost_on_the_way_is_missed_at_once_and_shown_nowhere(
    dsl_command: Path, tmp_path: Path, launcher: str, program: str, said: str
) -> None:
    """The agents would call for half a minute."""
    path = tmp_path / "bin" / program
    path.parent.mkdir()
    imports = (
        "from os import environ\nfrom subprocess import PIPE, Popen\nfrom sys import argv, executable, exit\n"
    )
    path.write_text(
        f"#!{sys.executable}\n{imports}{LOSERS[program]}exit(max(one.wait() for one in started))\n",
        encoding="utf-8",
    )
    path.chmod(0o700)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n", encoding="utf-8")
    (tmp_path / "t.py").touch()
    words = [str(dsl_command), "--hostfile", "hosts", "--launcher", launcher, "--log_level", "debug", "t.py"]
    ended = subprocess.run(
        words,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{path.parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )
    assert ended.returncode == 1
    assert said in ended.stderr
    assert not re.search("[0-9a-f]{64}", ended.stdout + ended.stderr)
