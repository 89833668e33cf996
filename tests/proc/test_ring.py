"""`--doctor --ring` on this machine: real ranks of torch measure, and who holds them up is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "raise SystemExit('the doctor has started the script')\n"
ENV = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}


def ran(folder: Path, *words: str | Path, **env: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    result = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, **ENV, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.torch
@pytest.mark.timeout(150)
@pytest.mark.parametrize("count", [1, 4])
def test_the_ring_shows_figures_of_all_ranks(dsl_command: Path, tmp_path: Path, count: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    dslrun = dsl_command.with_name("dslrun")
    code, out, said = ran(tmp_path, dslrun, "--doctor", "--ring", "--nproc-per-node", str(count), "train.py")
    lines = out.splitlines()
    assert lines[0] == f"ring: 1 host, {count} rank{'s' * (count > 1)}, gloo on the CPU", said
    assert re.fullmatch(r"all_reduce over all ranks: 4 MB in \S+ m?s, 8 bytes in \S+ m?s", lines[1])
    assert [line.startswith("pairs of ranks, the median of 6: 4 MB in ") for line in lines[2:3]] == [True] * (
        count > 1
    )
    findings = lines[3:]  # a busy machine may make a rank slow
    assert [line for line in findings if not re.search(r"\[slow-(link|device)\]$", line)] == []
    assert code == bool(findings), said
    assert "the doctor has started the script" not in said


@pytest.mark.torch
@pytest.mark.timeout(150)
@pytest.mark.parametrize("where", ["the meeting of all ranks", "round 2 of the links"])
def test_a_rank_that_does_not_come_is_named(dsl_command: Path, tmp_path: Path, where: str) -> None:
    """Of four ranks, the last stops before a step; the others wait for it for a second, not for 30."""
    (tmp_path / "late.py").write_text(
        "import os, signal, sys\n"
        "from dsl.doctor import ring\n"
        "ring.STEP_S, ring.MEET_S = 2.0, 20.0\n"
        "begin = ring.Steps.begin\n"
        "def stop(self, step, within_s=None):\n"
        "    if self.rank == 3 and step == sys.argv[1]:\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    begin(self, step, within_s)\n"
        "ring.Steps.begin = stop\n"
        "sys.exit(ring.main())\n"
    )
    dslrun = dsl_command.with_name("dslrun")
    code, out, said = ran(tmp_path, dslrun, "--grace", "1", "--nproc-per-node", "4", "late.py", where)
    assert (code, out) == (2, "")
    limit = 20 if "meeting" in where else 2
    assert f"ring: error: {where} did not end within {limit} s: rank 3" in said
    assert said.count("\nring: error: ") + said.startswith("ring: error: ") == 1


@pytest.mark.torch
@pytest.mark.timeout(150)
def test_a_slow_device_is_named(dsl_command: Path, tmp_path: Path) -> None:
    """One rank has 64 times the work of the others."""
    (tmp_path / "slow.py").write_text(
        "import os, sys\n"
        "from dsl.doctor import ring\n"
        "ring.SIDE['gloo'] *= 4 if os.environ['RANK'] == '1' else 1\n"
        "sys.exit(ring.main())\n"
    )
    code, out, said = ran(tmp_path, dsl_command.with_name("dslrun"), "--nproc-per-node", "3", "slow.py")
    assert code == 1, said
    assert f"warning  {os.uname().nodename}: rank 1 (CPU) multiplies matrices in " in out
    assert "the median of all ranks is" in out


def test_a_missing_torch_is_one_line(dsl_command: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no torch here')\n")
    words = ("--doctor", "--ring", "--num_gpus", "2", "train.py")
    code, out, said = ran(tmp_path, dsl_command, *words, PYTHONPATH=str(tmp_path))
    assert (code, out) == (2, "")
    errors = [line for line in said.splitlines() if line.startswith("ring: error: ")]
    host, python = os.uname().nodename, sys.executable
    assert errors == [f"ring: error: {host}: {python} cannot import torch (no torch here): install it there"]
    assert "Traceback" not in said
