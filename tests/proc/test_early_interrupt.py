"""SIGINT from the first byte-code of ours on: no traceback, the exit code of Ctrl-C, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.command import ran
from tests.support.interrupts import assert_silent
from tests.support.places import free_port

# Sends this process SIGINT when it has done so many things that Python tells of, unless a guard has taken over.
HOOK = """
import os, signal, sys

at, first, hit = int(os.environ["AT"]), os.environ["FROM"], os.environ["HIT"]
seen = 0

def hear(event, words):
    global at, seen
    if event == "os.fork":
        at = 0
    elif seen or (event == "import" and words[0] == first):
        seen += 1
        if seen == at:
            os.close(os.open(hit, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hear)
"""
POINTS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 300, 377, 450, 500, 610, 700, 800, 987)
SCRIPT = "dsl"
"""What an installed command imports first."""
MODULE = "dsl._core"
"""What the package imports first, where the interpreter itself runs a module of it."""
NODES = (
    "--nnodes",
    "2",
    "--master-port",
    str(free_port()),
    "--rdzv-conf",
    "timeout=0.2",
    "--no-python",
    "/bin/true",
)
# A worker that the interrupt has to end, if there is one: others may have ended well before it reaches them.
WORKER = ("/bin/sh", "-c", '[ ! -e "$HIT" ] || exec sleep 60')
DOORS = {
    "dsl": (SCRIPT, ("--num_gpus", "2", "--no_python", *WORKER)),
    "dslrun": (SCRIPT, ("--nproc-per-node", "2", "--no-python", *WORKER)),
    "dslrun, node 0": (SCRIPT, NODES),
    "dslrun, node 1": (SCRIPT, ("--node-rank", "1", *NODES)),
    "dsl-report": (SCRIPT, ()),
    "dsl-attach": (SCRIPT, ()),
    "dsl-wait": (SCRIPT, ()),
    "dsl-warm": (SCRIPT, ()),
    "dsl-elastic": (SCRIPT, ("-c", "config.json")),
    "dsl-ps": (SCRIPT, ()),
    "dsl-ssh": (SCRIPT, ("--hostfile", "hosts", "true")),
    "-m dsl": (MODULE, ("--num_gpus", "2", "--no_python", *WORKER)),
    "-m dsl.run": (MODULE, ("--nproc-per-node", "2", "--no-python", *WORKER)),
    "-m dsl_launcher.node": (MODULE, ("--stdio",)),
}


def words_of(door: str, dsl_command: Path) -> list[str]:
    """The command line of a door, without its arguments."""
    name = door.partition(",")[0]
    return [sys.executable, *name.split()] if name.startswith("-m") else [str(dsl_command.with_name(name))]


@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize("door", DOORS)
def test_an_interrupt_at_any_step_is_silent_and_leaves_nothing(
    door: str, dsl_command: Path, temporary: Path, tmp_path: Path
) -> None:
    first, words = DOORS[door]
    (tmp_path / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    work, hit = tmp_path / "work", tmp_path / "hit"
    work.mkdir()
    (work / "config.json").write_text("{}", encoding="utf-8")
    (work / "hosts").write_text("localhost slots=1\n", encoding="utf-8")
    before = sorted(work.iterdir())
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "FROM": first, "HIT": str(hit), "DS_ACCELERATOR": "cpu"}
    hits = 0
    for at in POINTS:
        hit.unlink(missing_ok=True)
        ended = ran(
            [*words_of(door, dsl_command), *words],
            env={**env, "AT": str(at)},
            cwd=work,
            stdin=subprocess.DEVNULL,
        )
        if not hit.exists():
            break
        hits += 1
        assert "Traceback" not in ended.stderr, (at, ended.stderr)
        assert "KeyboardInterrupt" not in ended.stderr, (at, ended.stderr)
        assert_silent(ended.returncode, ended.stderr, at)
        assert sorted(work.iterdir()) == before, at
        assert list(temporary.iterdir()) == [], at
    assert hits >= 8


@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize(
    "count", [8, pytest.param(200, marks=[pytest.mark.stress, pytest.mark.timeout(900)])]
)
def test_an_interrupt_at_any_time_is_silent_and_leaves_nothing(
    count: int, dsl_command: Path, temporary: Path
) -> None:
    chance = random.Random(23)
    for _ in range(count):
        door = chance.choice(["dsl", "dslrun"])
        options = {
            "dsl": ["--num_gpus", "2", "--no_local_rank", "--no_python"],
            "dslrun": ["--nproc-per-node", "2", "--no-python"],
        }[door]
        job = subprocess.Popen(
            [dsl_command.with_name(door), *options, "/bin/sleep", "30"],
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        delay_s = chance.uniform(0, 0.3)
        time.sleep(delay_s)  # it is a moment of the clock that is tried, nothing is waited for
        job.send_signal(signal.SIGINT)
        _, said = job.communicate(timeout=60)
        assert_silent(job.returncode, said, delay_s)
        assert list(temporary.iterdir()) == [], delay_s


def test_workers_hear_an_interrupt_that_the_command_was_started_to_ignore(dsl_command: Path) -> None:
    """As after ``trap '' INT``, or in the background of a shell without job control; torchrun does the same."""
    line = f"trap '' INT; {dsl_command} --num_gpus 1 --no_local_rank --no_python /bin/sh -c 'kill -INT $$ && echo lives'"
    ended = ran(["/bin/sh", "-c", line], environ={"DS_ACCELERATOR": "cpu"})
    assert (ended.returncode, ended.stdout) == (130, "")


# The same in a worker that a fork server has forked, between the fork and its program.
FORKED_HOOK = """
import os, signal, sys

at, hit, server, seen = int(os.environ["AT"]), os.environ["HIT"], os.getpid(), 0

def hear(event, words):
    global seen
    if os.getpid() != server:
        seen += 1
        if seen == at:
            os.close(os.open(hit, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGINT)

if any(word.endswith("/boot.py") for word in sys.orig_argv):
    sys.addaudithook(hear)
"""


@pytest.mark.guarantee("G2")
@pytest.mark.timeout(180)  # many launches: a busy machine takes ten times as long
@pytest.mark.parametrize("program", ["script", "module"])
def test_an_interrupt_of_a_forked_worker_before_or_after_its_program_is_silent(
    program: str, dsl_command: Path, tmp_path: Path
) -> None:
    """As an executed worker's is until Python has made it an exception."""
    (tmp_path / "sitecustomize.py").write_text(FORKED_HOOK, encoding="utf-8")
    (tmp_path / "program.py").write_text("print('begun', flush=True)\n", encoding="utf-8")
    hit, hits = tmp_path / "hit", 0
    words = ("--start-method", "forkserver", "--preload", "decimal", "--no_local_rank", "--num_gpus", "1")
    for at in range(1, 40):
        hit.unlink(missing_ok=True)
        ended = ran(
            [dsl_command, *words, *(["program.py"] if program == "script" else ["--module", "program"])],
            environ={"PYTHONPATH": str(tmp_path), "AT": str(at), "HIT": str(hit), "DS_ACCELERATOR": "cpu"},
            cwd=tmp_path,
        )
        if not hit.exists() or (program == "module" and at > 8):  # there the imports of Python's runpy follow
            break
        assert "dsl/forkserver" not in ended.stderr, (at, ended.stderr)
        if ended.stdout:  # the program has ended: the interrupt comes too late
            assert (ended.returncode, ended.stderr) == (0, ""), at
            continue
        hits += 1
        assert ended.returncode == 130, (at, ended.stderr)
    assert hits >= 3
