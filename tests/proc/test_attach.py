"""`--debug`: a debugger attaches to one of several workers, which the others do not notice."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.debugger import Debugger
from tests.kit.waiting import until
from tests.support.command import ran

from dsl.machine import port_is_free

pytestmark = pytest.mark.timeout(90)

SCRIPT = """\
import os, sys
rank = os.environ["RANK"]
print("rank", rank, "began", sys.argv[1:], flush=True)
answer = 6 * int(rank)
open(f"{sys.argv[-1]}.{rank}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", "w").close()
if rank + os.environ.get("TORCHELASTIC_RESTART_COUNT", "") == "00" and "--fail" in sys.argv:
    sys.exit(7)
print("rank", rank, "made", answer, flush=True)
"""
LINE = 5


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def base() -> int:
    """A port with a free one behind it, of those that the kernel gives to nobody: it is used seconds later."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Not as `random` draws, which begins alike in all runs of tests.
    ports = random.SystemRandom().sample(range(1024, max(given - 1, 9000)), 100)
    return next(port for port in ports if port_is_free(port) and port_is_free(port + 1))


def start(dsl: Path, command: str, *words: str) -> subprocess.Popen[bytes]:
    count = "--num_gpus=2" if command == "dsl" else "--nproc-per-node=2"
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [str(dsl.with_name(command)), count, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        cwd=os.path.dirname(words[-1]),
    )


def finish(job: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.communicate()
    return job.returncode, out.decode(), err.decode()


@pytest.mark.needs_package("debugpy")
@pytest.mark.parametrize(
    "command, start_method", [("dsl", "spawn"), ("dslrun", "forkserver"), ("dslrun", "module")]
)
def test_a_breakpoint_stops_the_rank_that_is_debugged_and_the_other_runs(
    command: str, start_method: str, base: int, dsl_command: Path, script: Path, tmp_path: Path
) -> None:
    """`--debug=1` of two ranks."""
    how = ["-m", "train"] if start_method == "module" else ["--start-method", start_method, str(script)]
    debug = ["--debug=1", f"--debug-port={base}", "--debug-wait"]
    job = start(dsl_command, command, *debug, *how, "--lr", str(tmp_path / "done"))
    try:
        with Debugger(base + 1) as debugger:
            until((tmp_path / "done.0.0").exists, 30)
            assert not (tmp_path / "done.1.0").exists()
            debugger.attach(str(script), LINE)
            thread = debugger.stopped()
            assert debugger.evaluate(thread, "answer") == "6"
            assert debugger.evaluate(thread, "sys.argv[-2:]") == str(["--lr", str(tmp_path / "done")])
            assert not (tmp_path / "done.1.0").exists()
            debugger.go_on(thread)
            debugger.ended()
    finally:
        code, out, err = finish(job)
    assert code == 0, err
    assert {"rank 0 made 0", "rank 1 made 6"} <= set(out.splitlines())
    (line,) = [one for one in err.splitlines() if "launch.json" in one]
    (found,) = json.loads(line.partition('"configurations": ')[2])
    assert found["connect"] == {"host": "127.0.0.1", "port": base + 1}


LAUNCHES = """\
import os, sys
from dsl.functions.launcher import launch
def train(path):
    rank = int(os.environ["RANK"])
    answer = 6 * rank
    open(f"{path}.{rank}.0", "w").close()
    return answer
if __name__ == "__main__":
    debug = {"debug": [1], "debug_port": int(sys.argv[1]), "debug_wait": True}
    print("results", launch(train, sys.argv[2], nproc_per_node=2, **debug))
"""
LINE_OF_FUNCTION = 6


@pytest.mark.needs_package("debugpy")
def test_a_breakpoint_stops_the_rank_of_a_function_that_is_debugged(base: int, tmp_path: Path) -> None:
    path = tmp_path / "launches.py"
    path.write_text(LAUNCHES)
    job = subprocess.Popen(
        [sys.executable, str(path), str(base), str(tmp_path / "done")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        with Debugger(base + 1) as debugger:
            until((tmp_path / "done.0.0").exists, 30)
            debugger.attach(str(path), LINE_OF_FUNCTION)
            thread = debugger.stopped()
            assert debugger.evaluate(thread, "answer") == "6"
            assert not (tmp_path / "done.1.0").exists()
            debugger.go_on(thread)
            debugger.ended()
    finally:
        code, out, err = finish(job)
    assert (code, out) == (0, "results [0, 6]\n"), err
    assert f"rank 1 waits for a debugger at 127.0.0.1:{base + 1}" in err


@pytest.mark.needs_package("debugpy")
def test_a_debugger_attaches_again_after_a_restart(
    base: int, dsl_command: Path, script: Path, tmp_path: Path
) -> None:
    job = start(
        dsl_command, "dslrun", "--debug=0", f"--debug-port={base}", "--debug-wait", "--max-restarts=1",
        str(script), "--fail", str(tmp_path / "done"),
    )  # fmt: skip
    try:
        for attempt in range(2):
            # By then nothing of the attempt before is left, so it is not its debugger that we meet.
            until((tmp_path / f"done.1.{attempt}").exists, 30)
            with Debugger(base) as debugger:
                debugger.attach(str(script), LINE)
                thread = debugger.stopped()
                count = debugger.evaluate(thread, "os.environ['TORCHELASTIC_RESTART_COUNT']")
                assert count == repr(str(attempt))
                debugger.go_on(thread)
                debugger.ended()
    finally:
        code, out, err = finish(job)
    assert code == 0, err
    assert "rank 0 made 0" in out


@pytest.mark.needs_package("debugpy")
def test_nobody_has_to_attach(base: int, dsl_command: Path, script: Path, tmp_path: Path) -> None:
    """And nothing of debugpy is left when the job has ended."""
    job = start(dsl_command, "dsl", "--debug", f"--debug-port={base}", str(script), str(tmp_path / "done"))
    code, out, err = finish(job)
    assert code == 0, err
    assert {"rank 0 made 0", "rank 1 made 6"} <= set(out.splitlines())
    assert f"ranks 0-1 listen for a debugger at 127.0.0.1:{base}-{base + 1}" in err


def test_a_port_that_is_taken_is_refused_with_its_holder(
    base: int, dsl_command: Path, script: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", base)):
        words = ["--debug", f"--debug-port={base}", str(script), str(tmp_path / "done")]
        code, out, err = finish(start(dsl_command, "dsl", *words))
    assert (code, out) == (2, "")
    said = f"dsl: error: port {base}, where rank 0 is to be debugged, is taken by pid {os.getpid()} "
    assert err.startswith(said)
    assert err.endswith(": give another --debug-port\n")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("way", ["environment", "-x", "-x of nodes that come and go"])
def test_without_debugpy_nothing_is_started_and_one_line_says_what_is_missing(
    way: str, dsl_command: Path, script: Path, tmp_path: Path
) -> None:
    """The workers' interpreter counts, which may be another than the command's."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    words = ["--debug", "--log-level=error", script, tmp_path / "done"]
    named = [] if way == "environment" else ["-x", f"PYTHON_EXEC={bare}"]
    nodes = ["--nnodes=1:2", "--rdzv-backend=c10d"] if "nodes" in way else []
    environ = {} if named else {"PYTHON_EXEC": str(bare)}
    result = ran([dsl_command.with_name("dslrun"), *named, *nodes, *words], 30, environ)
    assert (result.returncode, result.stdout) == (2, "")
    said = f"dslrun: error: --debug needs debugpy, which {bare} does not have: pip install debugpy there"
    assert result.stderr.splitlines() == [said]
