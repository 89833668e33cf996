"""The exit-code table. Every way in which a job can end, and what the shell sees."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.command import dsl_line
from tests.support.jobs import Helpers, Job, running

pytestmark = [pytest.mark.engine, pytest.mark.linux_5_4, pytest.mark.guarantee("G2")]


class Ending(NamedTuple):
    """One way to end: what the workers do, what we do to the command, and the code."""

    name: str
    words: str
    """Words of `dsl-testchild`; ``READY`` announces a worker."""
    code: int
    signals: tuple[str, ...] = ()
    """Sent to the command once every worker is ready."""
    workers: int = 3


def _dies(name: str, code: int) -> Ending:
    return Ending(f"one-SIG{name}", f"only 1 [ raise {name} ] pause", code)


TABLE = [
    Ending("all-0", "exit 0", 0),
    Ending("one-worker-0", "exit 0", 0, workers=1),
    Ending("one-1", "only 1 [ exit 1 ] pause", 1),
    Ending("one-3-others-0", "only 1 [ exit 3 ] exit 0", 3),
    Ending("one-42", "only 1 [ exit 42 ] pause", 42),
    Ending("one-255", "only 1 [ exit 255 ] pause", 255),
    Ending("one-128", "only 1 [ exit 128 ] pause", 128),
    Ending("all-7", "exit 7", 7),
    Ending(
        "last-fails-after-others-ended-well",
        "only !2 [ touch DIR/%r exit 0 ] wait DIR/0 wait DIR/1 exit 6",
        6,
    ),
    *(
        _dies(name, 128 + getattr(signal, f"SIG{name}"))
        for name in ("HUP", "INT", "QUIT", "ILL", "ABRT", "BUS")
    ),
    *(
        _dies(name, 128 + getattr(signal, f"SIG{name}"))
        for name in ("FPE", "KILL", "USR1", "SEGV", "PIPE", "TERM")
    ),
    Ending("one-real-time-signal", "only 1 [ raise 40 ] pause", 168),
    Ending("victims-die-of-their-own-code", "only 1 [ sleep 1 exit 4 ] catch TERM await TERM 1 exit 9", 4),
    Ending("victims-end-well", "only 1 [ sleep 1 exit 4 ] catch TERM await TERM 1 exit 0", 4),
    Ending("victims-are-deaf", "ignore TERM READY only 1 [ sleep 100 exit 4 ] pause", 4),
    Ending("signal-first-then-code", "only 1 [ raise SEGV ] catch TERM await TERM 1 exit 5", 139),
    Ending("ended-well-left-a-daemon", "daemon [ ignore TERM touch DIR/d%r pause ] wait DIR/d%r exit 0", 0),
    Ending("failed-left-a-daemon", "daemon [ ignore TERM touch DIR/d%r pause ] wait DIR/d%r exit 8", 8),
    Ending("interrupted", "READY pause", 130, ("INT",)),
    Ending("terminated", "READY pause", 143, ("TERM",)),
    Ending("hung-up", "READY pause", 129, ("HUP",)),
    Ending("quit", "READY pause", 131, ("QUIT",)),
    Ending("interrupted-workers-end-well", "catch INT,TERM READY await INT 1 exit 0", 130, ("INT",)),
    Ending("interrupted-workers-fail", "catch INT,TERM READY await INT 1 exit 1", 130, ("INT",)),
    Ending("terminated-workers-end-well", "catch TERM READY await TERM 1 exit 0", 143, ("TERM",)),
    Ending("interrupted-twice-deaf", "ignore INT,TERM READY pause", 130, ("INT", "INT")),
    Ending("terminated-twice-deaf", "ignore INT,TERM READY pause", 143, ("TERM", "TERM")),
    Ending("terminated-deaf", "ignore INT,TERM READY pause", 143, ("TERM",)),
    Ending("terminated-while-stopped", "READY stop pause", 143, ("TERM",)),
    Ending("user-signals-then-0", "catch USR1,USR2 READY await USR1,USR2 1 exit 0", 0, ("USR1", "USR2")),
]


def _words(ending: Ending, directory: Path) -> list[str]:
    text = ending.words.replace("READY", "note DIR/ready R")
    words = text.replace("DIR", str(directory)).split()
    return ["%r %p" if word == "R" else word for word in words]


def _strike(job: Job, ending: Ending) -> None:
    if not ending.signals:
        return
    job.ready(ending.workers)
    for name in ending.signals:
        os.kill(job.guard, getattr(signal, f"SIG{name}"))


# Torchrun ends with 1 whatever the worker's code was.
OF_DSLRUN = (
    *("all-0", "one-42", "one-SIGKILL", "one-SIGSEGV", "interrupted", "terminated", "interrupted-twice-deaf"),
    "user-signals-then-0",
)
CASES = [*[("dsl", one) for one in TABLE], *[("dslrun", one) for one in TABLE if one.name in OF_DSLRUN]]


@pytest.mark.parametrize("command, ending", CASES, ids=[f"{command}-{one.name}" for command, one in CASES])
def test_the_exit_code_is_true(
    command: str, ending: Ending, dsl_command: Path, testchild: Path, tmp_path: Path, temporary: Path
) -> None:
    words = [str(testchild), *_words(ending, tmp_path / "job")]
    # Restarts that are left change nothing for a signal.
    options = ["--max-restarts=3"] if command == "dslrun" and ending.signals else []
    line = dsl_line(dsl_command.with_name(command), ending.workers, words, 0.5, *options)
    with running(line, tmp_path / "job") as job:
        _strike(job, ending)
        code = job.wait()
        assert job.left() == []
    assert code == ending.code, job.stderr()
    assert "Traceback" not in job.stderr()
    assert list(temporary.iterdir()) == []


PYTHON = {
    "returns": ("pass", 0),
    "sys-exit-7": ("import sys; sys.exit(7)", 7),
    "sys-exit-text": ("import sys; sys.exit('no')", 1),
    "exception": ("raise RuntimeError('x')", 1),
    "os-abort": ("import os; os.abort()", 134),
    "syntax": ("def", 1),
}


@pytest.mark.parametrize("name", PYTHON)
def test_a_python_worker_ends_as_python_does(name: str, dsl_command: Path, tmp_path: Path) -> None:
    source, expected = PYTHON[name]
    script = tmp_path / "train.py"
    script.write_text(source + "\n")
    with running([str(dsl_command), "--num_gpus", "2", str(script)], tmp_path / "job") as job:
        assert job.wait() == expected, job.stderr()


USAGE = {
    "no-script": ([], 2),
    "unknown-flag": (["--no_such_flag", "x.py"], 2),
    "missing-script": (["nothing-here.py"], 2),
    "missing-program": (["--no_python", "./nothing-here"], 127),
    "bad-number": (["--num_gpus", "many", "x.py"], 2),
    "conflict": (["--module", "--no_python", "x.py"], 2),
    "help": (["--help"], 0),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage_has_its_own_code(name: str, dsl_command: Path, tmp_path: Path) -> None:
    arguments, expected = USAGE[name]
    with running([str(dsl_command), *arguments], tmp_path) as job:
        assert job.wait() == expected
    assert "Traceback" not in job.stderr()


@pytest.mark.guarantee("G3")
@pytest.mark.root
def test_a_worker_that_the_kernel_kills_for_memory(tmp_path: Path, helpers: Helpers) -> None:
    """Out of memory is said to be that, not just signal 9, and the limit is named."""
    from tests.support.memory import memory_limit

    with memory_limit(200 << 20) as inside:
        if inside is None:
            pytest.skip("needs a writable cgroup v2")
        with running(inside(helpers.line(2, "only 1 [ alloc 400 ] pause")), tmp_path) as job:
            assert job.wait() == 137
    assert "memory" in job.stderr()
    assert "rank 1" in job.stderr()
    assert "(200 MB) limits the memory of this job: raise it" in job.stderr()


COUNT_KILLS = """
import sys
from dsl import Ended, LaunchSpec, Supervisor, WorkerSpec
supervisor = Supervisor()
for size in ("400", "1", "400"):
    supervisor.start(LaunchSpec([WorkerSpec([sys.argv[1], "alloc", size])]))
    events = []
    while not (events and isinstance(events[-1], Ended)):
        events += supervisor.wait()
    print(events[-1].oom_kills)
"""


@pytest.mark.root
def test_the_last_event_counts_the_kills_for_memory_of_its_group_alone(
    testchild: Path, tmp_path: Path
) -> None:
    from tests.support.memory import memory_limit

    with memory_limit(200 << 20) as inside:
        if inside is None:
            pytest.skip("needs a writable cgroup v2")
        with running(inside([sys.executable, "-c", COUNT_KILLS, str(testchild)]), tmp_path) as job:
            assert job.wait() == 0
    assert job.stdout().split() == ["1", "0", "1"]


def test_the_interpreter_is_the_one_that_runs_the_command(dsl_command: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.executable)\n")
    with running([str(dsl_command), "--num_gpus", "1", str(script)], tmp_path / "job") as job:
        assert job.wait() == 0
    assert job.stdout().strip() == sys.executable


PROGRAMS = {
    "missing": 127, "file/program": 127, "no-interpreter": 127, "plain": 126, "folder": 126, "no-format": 126,
}  # fmt: skip


@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("name, status", PROGRAMS.items())
def test_the_command_ends_with_the_code_of_a_shell_and_names_the_path(
    name: str, status: int, dsl_command: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "no-interpreter").write_text("#!/nothing/here\n")
    (tmp_path / "no-format").write_bytes(b"\x01\x02\x03 not a program\n")
    for executable in ("no-interpreter", "no-format"):
        (tmp_path / executable).chmod(0o755)
    program = str(tmp_path / name)
    with running(dsl_line(dsl_command, 3, [program]), tmp_path / "job") as job:
        code = job.wait()
    assert (code, job.stdout()) == (status, "")
    assert program in job.stderr()
    assert "Traceback" not in job.stderr()


@pytest.mark.guarantee("G3")
def test_the_command_blames_the_cause_and_lists_the_victims(tmp_path: Path, helpers: Helpers) -> None:
    """The lowest rank dies too, a millisecond later and by itself: deaf to our TERM, its code is certain."""
    pid3 = str(tmp_path / "job" / "pid3")
    words = [
        *("only", "3", "[", "touch", pid3, "wait", str(tmp_path / "job" / "pid0"), "exit", "3", "]"),
        *("only", "0", "[", "ignore", "TERM", "touch", str(tmp_path / "job" / "pid0")),
        *("wait", pid3, "waitpid", pid3, "sleep", "1", "exit", "5", "]", "pause"),
    ]
    with running(helpers.line(4, words), tmp_path / "job") as job:
        code = job.wait()
    assert code == 3
    cause, victims, followers = job.stderr().splitlines()
    assert re.fullmatch(r"dsl: rank 3 \(local rank 3, pid \d+, host \S+\) failed first: exit code 3", cause)
    assert victims == "dsl: stopped by dsl: ranks 1-2 (SIGTERM)"
    assert followers == "dsl: ended because of it: rank 0 (exit code 5)"
