"""`dsl-report` on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.command import dsl_line


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


def test_it_ends_as_others_if_nobody_reads(dsl_report: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([dsl_report], stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.needs_package("matplotlib")
def test_the_timeline_of_a_real_job(dsl_report: Path, dsl_command: Path, tmp_path: Path) -> None:
    line = dsl_line(dsl_command, 2, ["/bin/echo", "hi"], None, "--events=e", "--tag-output=always")
    subprocess.run(line, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    command = [str(dsl_report), "--timeline", "t", "--events", "e"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert result.stderr.splitlines() == [
        "dsl-report: wrote t.json, which https://ui.perfetto.dev opens",
        "dsl-report: wrote t.png",
    ]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {one["name"] for one in events if one["ph"] == "X"}
    assert names >= {"start of the command", "preparation", "spawn", "until the first output", "run"}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words, code, said",
    [
        (
            ["--timeline", "t"],
            2,
            "--timeline and --events belong together: dsl-report --timeline out --events FILE",
        ),
        (
            ["--events", "e"],
            2,
            "--timeline and --events belong together: dsl-report --timeline out --events FILE",
        ),
        (["--timeline", "t", "--events", "none"], 1, "'none': No such file or directory"),
        (
            ["--timeline", "t", "--events", "/dev/null"],
            1,
            "no job was launched in this record: give the file of --events",
        ),
    ],
)
def test_what_a_timeline_needs(
    dsl_report: Path, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    result = subprocess.run(
        [dsl_report, *words], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stderr) == (code, f"dsl-report: error: {said}\n")
    assert not list(tmp_path.iterdir())


def test_a_timeline_replaces_no_pipe(dsl_report: Path, dsl_command: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.json")
    line = dsl_line(dsl_command, 1, ["true"], None, "--events", "e")
    subprocess.run(line, cwd=tmp_path, check=True, timeout=60)
    command = [str(dsl_report), "--timeline", "t", "--events", "e"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    why = "it is a pipe, which can be read only once"
    said = f"dsl-report: error: 't.json' cannot be written: {why}, choose another name\n"
    assert (result.returncode, result.stderr) == (1, said)
