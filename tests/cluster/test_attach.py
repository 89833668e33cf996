"""`--debug` over several hosts: what is said is enough to attach to a rank on another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.cluster import Cluster
from tests.kit.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

ROOT = Path(__file__).parent.parent.parent
WORKER = """\
import os
rank = int(os.environ["RANK"])
open(f"began{rank}", "w").close()
print("rank", rank, "on", os.uname().nodename, flush=True)
"""
LINE = 3
# Runs on the first host: attaches to the port of the words by the way that dsl has told.
ATTACH = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.kit.debugger import Debugger
with Debugger(int(sys.argv[1])) as debugger:
    debugger.attach(sys.argv[2], {LINE})
    thread = debugger.stopped()
    print(debugger.evaluate(thread, "os.uname().nodename"), flush=True)
    debugger.go_on(thread)
    debugger.ended()
"""


def test_a_rank_on_another_host_is_attached_to_through_ssh(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=2\n", encoding="utf-8")
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    words: list[str | Path] = ["--launcher", "ssh", "--no_local_rank", "--debug=2", "--debug-wait", script]
    said = tmp_path / "said"
    with said.open("wb") as file:
        job = hosts[0].start(
            [dsl_command, "-H", "hosts", *words],
            env={"DS_ACCELERATOR": "cpu"},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=file,
        )
    until(lambda: all((tmp_path / f"began{rank}").exists() for rank in (0, 1)), 60)
    lines = said.read_text().splitlines()
    assert "dsl: rank 2 waits for a debugger at 127.0.0.1:5680" in lines
    (tunnel,) = [line.partition(": ssh ")[2] for line in lines if "to reach node1" in line]
    assert tunnel == "-N -L 5680:127.0.0.1:5679 node1"
    way = hosts[0].start(["ssh", *tunnel.split()])
    try:
        result = hosts[0].run([sys.executable, "-c", ATTACH, "5680", script], cwd=tmp_path, timeout_s=60)
    finally:
        way.kill()
        way.wait()
    assert (result.returncode, result.stdout) == (0, "'node1'\n"), result.stderr
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said.read_text()
    assert "rank 2 on node1" in out.decode()
    (line,) = [one for one in lines if "launch.json" in one]
    (found,) = json.loads(line.partition('"configurations": ')[2])
    assert found["connect"] == {"host": "127.0.0.1", "port": 5680}


def test_a_host_with_a_taken_port_is_named_before_anything_starts(
    hosts: Cluster, dsl_command: Path, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1 slots=1\n", encoding="utf-8")
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")
    listening = "import socket; s = socket.create_server(('', 5678)); print('up', flush=True); input()"
    holder = hosts[1].start([sys.executable, "-c", listening], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        words = ["-H", "hosts", "--launcher", "ssh", "--debug", "worker.py"]
        result = hosts[0].run([dsl_command, *words], env={"DS_ACCELERATOR": "cpu"}, cwd=tmp_path)
    finally:
        holder.communicate(b"\n")
    assert result.returncode == 2
    (error,) = [line for line in result.stderr.splitlines() if "error: " in line]
    assert "node1: port 5678, where rank 1 is to be debugged, is taken by pid" in error
    assert not list(tmp_path.glob("began*"))
