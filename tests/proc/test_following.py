"""``dsl-attach`` at jobs that run in another terminal: it shows what they show, and delays nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import running


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders that no other test uses."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@contextlib.contextmanager
def viewing(dsl_command: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """A running ``dsl-attach``."""
    line = [str(dsl_command.with_name("dsl-attach")), *map(str, words)]
    viewer = subprocess.Popen(line, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield viewer
    finally:
        viewer.kill()
        viewer.communicate()


def first_line(viewer: subprocess.Popen[bytes]) -> bytes:
    assert viewer.stdout is not None
    return viewer.stdout.readline()


@pytest.mark.guarantee("G6")
def test_a_view_begins_with_the_last_lines_and_ends_with_the_job(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    words = [
        "say",
        "early",
        "note",
        str(tmp_path / "ready"),
        "%r %p",
        "wait",
        str(go),
        "lines",
        "500",
        "60",
        "exit",
        "3",
    ]
    with running(dsl_line(dsl_command, 2, [str(testchild), *words]), tmp_path) as job:
        job.ready(2)
        until(lambda: job.stdout_path.read_bytes().count(b"early") == 2)
        with viewing(dsl_command, job.guard) as one, viewing(dsl_command, job.guard) as other:
            begins = [first_line(viewer) for viewer in (one, other)]
            go.touch()
            ends = [viewer.communicate(timeout=30) for viewer in (one, other)]
            assert [viewer.returncode for viewer in (one, other)] == [0, 0]
        assert job.wait() == 3
    shown = job.stdout_path.read_bytes()
    assert [begin + end[0] for begin, end in zip(begins, ends, strict=True)] == [shown, shown]
    assert ends[0][1].decode() == (
        f"dsl-attach: job {job.guard} has ended; the shell that has started it has its exit code\n"
    )


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_view_that_goes_leaves_the_job_alone(
    dsl_command: Path, testchild: Path, tmp_path: Path, how: signal.Signals
) -> None:
    go = tmp_path / "go"
    words = ["say", "early", "note", str(tmp_path / "ready"), "%r %p", "wait", str(go), "say", "late"]
    with running(dsl_line(dsl_command, 2, [str(testchild), *words]), tmp_path) as job:
        job.ready(2)
        with viewing(dsl_command, job.guard) as viewer:
            assert first_line(viewer) == b"early\n"
            viewer.send_signal(how)
            said = viewer.communicate(timeout=30)[1]
            assert viewer.returncode == (128 + how if how == signal.SIGTERM else -how)
            assert (b"runs on" in said) == (how != signal.SIGKILL)
        go.touch()
        assert job.wait() == 0
    assert job.stdout_path.read_bytes().count(b"late\n") == 2


@pytest.mark.guarantee("G4", "G6")
def test_a_view_that_stands_still_delays_nothing(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    lines = 300_000
    words = [
        "say",
        "early",
        "note",
        str(tmp_path / "ready"),
        "%r %p",
        "wait",
        str(go),
        "lines",
        str(lines),
        "60",
    ]
    with running(dsl_line(dsl_command, 2, [str(testchild), *words]), tmp_path) as job:
        job.ready(2)
        with viewing(dsl_command, job.guard) as viewer:
            assert first_line(viewer) == b"early\n"
            viewer.send_signal(signal.SIGSTOP)
            go.touch()
            assert job.wait() == 0
            viewer.send_signal(signal.SIGCONT)
            text = viewer.communicate(timeout=30)[0]
            assert viewer.returncode == 0
    assert job.stdout_path.read_bytes().count(b"\n") == 2 * lines + 2
    assert text.count(b"\n") < lines


def test_a_job_whose_output_does_not_pass_through_dsl_cannot_be_followed(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = ["note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 1, [str(testchild), *words]), tmp_path) as job:
        job.ready(1)
        with viewing(dsl_command, job.guard) as viewer:
            shown, said = viewer.communicate(timeout=30)
            assert (viewer.returncode, shown, said.count(b"\n")) == (1, b"", 1)
            assert b"its workers write past dsl" in said
            assert b"--tag-output always" in said
        waited = subprocess.run(
            [dsl_command.with_name("dsl-wait"), str(job.guard)], capture_output=True, check=False, timeout=30
        )
        assert waited.returncode == 2
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143


def test_one_worker_with_a_tag_can_be_followed(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    words = ["say", "early", "note", str(tmp_path / "ready"), "%r %p", "pause"]
    line = dsl_line(dsl_command, 1, [str(testchild), *words], None, "--tag-output", "always")
    with running(line, tmp_path) as job:
        job.ready(1)
        with viewing(dsl_command, job.guard) as viewer:
            assert first_line(viewer) == b"[rank 0] early\n"
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143
