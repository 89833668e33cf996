"""`dsl-report` on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def dsl_report(dsl_command: Path) -> Path:
    """Path of the installed `dsl-report` program."""
    return dsl_command.with_name("dsl-report")


def run(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A run that ends well and says nothing on stderr."""
    result = subprocess.run(
        words, env={**os.environ, **environ}, capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stderr == ""
    return result


def test_people_and_programs_are_told_the_same(dsl_report: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=2\nn2 slots=2\n")
    found = json.loads(run(dsl_report, "--json", "-H", hosts).stdout)
    text = run(dsl_report, "-H", hosts, "--hide_operator_status").stdout
    assert found["hostfile"] == {"path": str(hosts), "hosts": 2, "slots": 4}
    assert f"hostfile {'.' * 25} {hosts}, 2 hosts, 4 slots\n" in text
    assert f"dsl version {'.' * 22} {found['dsl']['version']}\n" in text
    assert found["python"]["path"] == sys.executable
    assert found["kernel"]["interfaces"].keys() == {"clone3", "pidfd", "close_range", "cgroup"}
    assert "\x1b" not in text


@pytest.mark.engine
def test_an_interface_that_is_not_used_says_why(dsl_report: Path) -> None:
    found = json.loads(run(dsl_report, "--json", DSL_ENGINE_DISABLE="pidfd,cgroup").stdout)
    interfaces = found["kernel"]["interfaces"]
    assert "DSL_ENGINE_DISABLE" in interfaces["pidfd"]
    assert "DSL_ENGINE_DISABLE" in interfaces["cgroup"]


def test_no_framework_is_imported(dsl_report: Path, tmp_path: Path) -> None:
    for name in ("torch", "deepspeed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.9'\ncuda = '99.9'\n")
    found = json.loads(run(dsl_report, "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert (found["torch"]["version"], found["torch"]["cuda"]) == ("9.9", "99.9")
    assert found["deepspeed"]["path"] == str(tmp_path / "deepspeed")


def test_it_does_not_mind_that_nobody_reads(dsl_report: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([dsl_report], stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writing)
    assert (result.returncode, result.stderr) == (0, b"")
