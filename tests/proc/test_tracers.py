"""Workers that somebody traces, such as by strace or gdb."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.fork_server import server, server_pids
from tests.support.group import Group
from tests.support.jobs import states

from dsl import ForkServerLost, Stdio, WorkerSpec
from dsl._core import kernel_interfaces

pytestmark = [pytest.mark.engine, pytest.mark.linux_5_4]

FORKED = pytest.param(
    True,
    id="forked",
    marks=[
        pytest.mark.needs_pidfd,
        pytest.mark.skipif(kernel_interfaces()["pidfd"] != "", reason="needs a kernel with pidfds"),
    ],
)

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


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("is_forked", [pytest.param(False, id="executed"), FORKED])
def test_a_worker_that_dies_is_collected_when_its_tracer_is_done_with_it(
    testchild: Path, tmp_path: Path, *, is_forked: bool
) -> None:
    """Until then it is dead, and no wait of ours finds it, nor one of its fork server."""
    ready, other = tmp_path / "ready", tmp_path / "other"
    stdin, release = os.pipe()
    words = [sys.executable, "-c", WORKER, str(ready)]
    fork_server = 0 if is_forked else None
    traced = WorkerSpec(
        ["env", *words], stdin=Stdio.fd(stdin), fork_server=fork_server, fork_entry=int(is_forked)
    )
    workers = [traced, WorkerSpec([str(testchild), "wait", str(other), "exit", "4"])]
    with Group(workers, on_failure="report", servers=[server()] if is_forked else []) as group:
        pid = group.all_started()[0]
        os.close(stdin)
        until(ready.exists)
        words = [sys.executable, "-c", TRACER, str(pid)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as tracer:
            assert tracer.stdin is not None
            assert tracer.stdout is not None
            assert tracer.stdout.readline() == "seized\n"
            os.close(release)
            until(lambda: states([pid]) == {"Z"})
            other.touch()
            # This death comes behind the other one: that has been seen then.
            group.until(lambda group: 1 in group.exits())
            begin = time.monotonic(), time.process_time()
            before_s = sum(map(cpu_s, server_pids()))
            # A fork server has two seconds to tell of a death.
            assert group.supervisor.wait(2.5 if is_forked else 0.5) == []
            passed_s, used_s = time.monotonic() - begin[0], time.process_time() - begin[1]
            used_s += sum(map(cpu_s, server_pids())) - before_s
            assert used_s < passed_s / 2, "somebody polls without a pause"
            tracer.stdin.close()
            group.finish()
        assert tracer.returncode == 0
        exits = group.exits()
        assert (exits[0].code, exits[1].code) == (3, 4)
        assert group.of(ForkServerLost) == []
