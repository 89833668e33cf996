"""Workers that somebody traces, such as by strace or gdb."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from kit import processes
from kit.waiting import until
from tests.support.group import Group

from dsl._core import Stdio, WorkerSpec

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.engine

WORKER = """
import ctypes, os, sys
PR_SET_PTRACER = 0x59616D61  # Not known, and not needed, where there is no Yama.
ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
open(sys.argv[1], "w").close()
os.read(0, 1)
os._exit(3)
"""

TRACER = """
import ctypes, os, sys
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
PTRACE_SEIZE, WALL = 0x4206, 0x40000000
if libc.ptrace(ctypes.c_long(PTRACE_SEIZE), ctypes.c_long(pid), None, None):
    sys.exit(os.strerror(ctypes.get_errno()))
print("seized", flush=True)
sys.stdin.read()
os.waitpid(pid, WALL)
"""


def is_zombie(pid: int) -> bool:
    process = processes.find(pid)
    return process is not None and process.state == "Z"


def test_a_worker_that_dies_is_collected_when_its_tracer_is_done_with_it(
    testchild: Path, tmp_path: Path
) -> None:
    """Until then it is dead, and no wait of ours finds it."""
    ready, other = tmp_path / "ready", tmp_path / "other"
    stdin, release = os.pipe()
    traced = WorkerSpec([sys.executable, "-c", WORKER, str(ready)], stdin=Stdio.fd(stdin))
    workers = [traced, WorkerSpec([str(testchild), "wait", str(other), "exit", "4"])]
    with Group(workers, on_failure="report") as group:
        pid = group.all_started()[0]
        os.close(stdin)
        until(ready.exists)
        words = [sys.executable, "-c", TRACER, str(pid)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
            assert tracer.stdin is not None
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == "seized\n"
            os.close(release)
            until(lambda: is_zombie(pid))
            other.touch()
            # This death comes behind the other one: that has been seen then.
            group.until(lambda group: 1 in group.exits())
            begin = time.monotonic(), time.process_time()
            assert group.supervisor.wait(0.5) == []
            passed_s, used_s = time.monotonic() - begin[0], time.process_time() - begin[1]
            assert used_s < passed_s / 2, "it polls without a pause"
            tracer.stdin.close()
            group.finish()
        assert tracer.returncode == 0
        exits = group.exits()
        assert (exits[0].code, exits[1].code) == (3, 4)
