"""What the failure of a worker leaves: the exit code, records for others, and restarts, whatever was taken away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.command import dsl_line
from tests.support.jobs import running

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def dslrun(dsl_command: Path) -> Path:
    """Path of the installed `dslrun` program."""
    return dsl_command.with_name("dslrun")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files that is this test's own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def run(command: Sequence[object]) -> subprocess.CompletedProcess[str]:
    """The command to its end."""
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=25, check=False)


def a_script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


# Rank 0 records an exception, and is still cleaning up when rank 1 dies of it half a second later.
CLEANS_UP = """
import json, os, pathlib, signal, sys, time
gate = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    {handler}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        extra = {{"py_callstack": "ValueError: bad batch", "timestamp": "9"}}
        json.dump({{"message": {{"message": "ValueError: bad batch", "extraInfo": extra}}}}, file)
    gate.touch()
    while True:
        signal.pause()
while not gate.exists():
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(7)
"""


@pytest.mark.parametrize(
    "handler", ["", "signal.signal(15, lambda *_: sys.exit(143))"], ids=["dies-of-it", "handles-it"]
)
def test_the_stop_of_a_cause_that_still_cleaned_up_is_not_the_exit_code(
    handler: str, dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    """G2: nobody has asked for an end, so the code is 1, as that of an exception, and not 143."""
    script = a_script(tmp_path, CLEANS_UP.format(handler=handler))
    result = run([dslrun, "--nproc-per-node=2", script, tmp_path / "gate"])
    assert result.returncode == 1, result.stderr
    cause = r"^dslrun: rank 0 \(.*\) failed first: an exception, stopped by "
    assert re.search(cause, result.stderr, re.MULTILINE), result.stderr
    assert "ValueError: bad batch" in result.stderr
    assert str(temporary) in result.stderr


def test_a_killed_agent_leaves_no_pid_file(
    dsl_command: Path, testchild: Path, tmp_path: Path, temporary: Path
) -> None:
    """In a container the pid, and so the file, is the same in each run; others look for it in /tmp."""
    words = [str(testchild), "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 2, words, None, "--save_pid"), tmp_path) as job:
        job.ready(2)
        path = Path(f"/tmp/{job.guard}.deepspeed")
        agent = job.agent()
        assert path.read_text() == str(agent)
        os.kill(agent, signal.SIGKILL)
        assert job.wait() == 137
        assert not path.exists()
    assert list(temporary.iterdir()) == []
