"""Bad input gives one clear line and the right code, starts nothing, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.jobs import running

pytestmark = pytest.mark.guarantee("G8")

OPTIONS = {
    "hostfile-line": ["--hostfile", "DIR/bad-hostfile"],
    "unknown-host": ["--hostfile", "DIR/hostfile", "--include", "elsewhere"],
    "unknown-slot": ["--hostfile", "DIR/hostfile", "--include", "localhost:7"],
    "nothing-left": ["--hostfile", "DIR/hostfile", "--exclude", "localhost"],
    "both-filters": ["--hostfile", "DIR/hostfile", "--include", "localhost", "--exclude", "localhost"],
    "nodes-without-hosts": ["--num_nodes", "2"],
    "core-list-syntax": ["--num_gpus", "1", "--bind_cores_to_rank", "--bind_core_list", "0-"],
    "core-list-order": ["--num_gpus", "1", "--bind_cores_to_rank", "--bind_core_list", "1,0"],
    "core-not-allowed": ["--num_gpus", "1", "--bind_cores_to_rank", "--bind_core_list", "4000"],
    "log-directory-is-a-file": ["--num_gpus", "1", "--enable_each_rank_log", "DIR/hostfile"],
    "module-and-program": ["--num_gpus", "1", "--module"],
    "negative-grace": ["--num_gpus", "1", "--grace", "-1"],
    "port": ["--num_gpus", "1", "--master_port", "99999999"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_said_in_one_line_and_nothing_starts(
    name: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad-hostfile").write_text("localhost slots=2\nother slots\n")
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    options = [word.replace("DIR", str(tmp_path)) for word in OPTIONS[name]]
    started = tmp_path / "started"
    line = [
        str(dsl_command),
        "--no_python",
        "--no_local_rank",
        *options,
        str(testchild),
        "touch",
        str(started),
    ]
    with running(line, tmp_path / "job") as job:
        assert job.wait() == 2, job.stderr()
    said = [text for text in job.stderr().splitlines() if "error" in text]
    assert len(said) == 1, job.stderr()
    assert not said[0].endswith(".")
    assert "Traceback" not in job.stderr()
    assert job.stdout() == ""
    assert not started.exists()


def test_a_hostfile_fault_names_file_and_line(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("localhost slots=2\n\n# comment\nother slots=x\n")
    with running([str(dsl_command), "--hostfile", str(path), str(testchild)], tmp_path / "job") as job:
        assert job.wait() == 2
    assert job.stderr().startswith(f"dsl: error: {path} line 4: ")


def test_a_missing_script_is_named(dsl_command: Path, tmp_path: Path) -> None:
    script = str(tmp_path / "trian.py")
    with running([str(dsl_command), "--num_gpus", "2", script], tmp_path / "job") as job:
        assert job.wait() == 2
    assert script in job.stderr()
    assert len(job.stderr().splitlines()) == 1


def test_a_full_disk_for_output_is_not_a_traceback(dsl_command: Path, tmp_path: Path) -> None:
    """Our own message may fail to be written; the code still tells."""
    script = 'exec "$0" --num_gpus 2 nothing-here.py 2>/dev/full'
    with running(["/bin/sh", "-c", script, str(dsl_command)], tmp_path) as job:
        assert job.wait() == 2
