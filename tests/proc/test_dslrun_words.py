"""What `dslrun` says while a job runs and ends: in its own name, with its own spelling of options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.jobs import running

FAIL = 'if [ "$RANK" = 1 ]; then exit 3; fi; sleep 60'
CASES = {
    "failure": ((), FAIL, 3, "stopped by dslrun: rank 0 (SIGTERM)"),
    "restart": (("--max-restarts", "1"), FAIL, 3, "starting all 2 workers again, restart 1 of 1"),
    "debug": (("--log-level", "debug"), FAIL, 3, "rank 1 runs /bin/sh -c "),
    "signal": ((), "kill -SEGV $$", 139, "killed by SIGSEGV"),
    "stop": (
        (),
        'if [ "$RANK" = 1 ]; then kill -TERM $PPID; fi; sleep 60',
        143,
        "SIGTERM received: stopping",
    ),
    "logs": (("--log-dir", "DIR/logs"), FAIL, 3, "log files are in "),
}


@pytest.mark.parametrize("name", CASES)
def test_every_line_is_in_the_name_of_dslrun(name: str, dsl_command: Path, tmp_path: Path) -> None:
    options, script, code, said = CASES[name]
    dslrun = str(dsl_command.with_name("dslrun"))
    words = [word.replace("DIR", str(tmp_path)) for word in options]
    line = [dslrun, "--no-python", "--nproc-per-node=2", *words, "/bin/sh", "-c", script]
    with running(line, tmp_path / "job") as job:
        assert job.wait() == code, job.stderr()
    told = job.stderr()
    assert said in told
    own = [text for text in told.splitlines() if text.startswith("dsl")]
    assert own
    for text in own:
        assert text.startswith("dslrun: ")
        assert "by dsl " not in text
        assert not re.search(r" --[a-z]+_[a-z]", text)
    assert (tmp_path / "logs").exists() == (name == "logs")
