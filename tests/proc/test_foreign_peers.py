"""Processes of this user in other namespaces get nothing, run nothing and signal nobody at any door of dsl.

The same attempts succeed for a process that is here, so they are real ones.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.jobs import Helpers, Job
from tests.support.strangers import ELSEWHERE, HERE, Victim, stranger

from dsl.model.codec import to_line
from dsl.model.observation import Follow, JobView, Look, NoAnswer, SignalRank
from dsl.view.stacks import last_collective

pytestmark = [pytest.mark.guarantee("G1"), pytest.mark.timeout(120)]

SECRET = "hf_secret_of_the_victim"


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    with Victim(tmp_path, SECRET) as victim:
        yield victim


def test_a_process_that_is_here_can_do_what_strangers_try(victim: Victim) -> None:
    """It is you: it gets the request of a job, and the server forks a worker for it."""
    request = victim.stolen_request()
    assert victim.PLAIN in request
    with stranger(HERE) as other:
        marker = victim.folder / "ran"
        command = ["/bin/sh", "-c", f"touch {marker}"]
        got = other.tries("call_warm", path=str(victim.socket), request=request, command=command, seed=None)
        assert len(got) >= 2
        assert until(marker.exists)


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_process_elsewhere_is_neither_called_nor_served_as_a_warm_server(kind: str, victim: Victim) -> None:
    request = victim.stolen_request()
    server = victim.place.server()
    with stranger(kind) as other:
        marker = victim.folder / "ran"
        command = ["/bin/sh", "-c", f"touch {marker}"]
        arguments = {"path": str(victim.socket), "command": command, "seed": None}
        assert other.tries("call_warm", request=request, **arguments) == []
        for purpose in "\1\2\3":
            other_purpose = request[:4] + purpose + request[5:]
            assert other.tries("call_warm", request=other_purpose, **arguments) == []
        assert not marker.exists()
        assert victim.place.server() == server
        with other.posing(victim.socket, names="caller") as got:
            victim.runs()
            told = victim.place.tool("dsl-warm", "status")
        assert got == []
        assert f"is left alone: its process runs in another {ELSEWHERE[kind][1]}, look from" in told.stderr


@pytest.mark.parametrize("named", ["caller", "bystander", "init"])
def test_a_server_that_calls_somebody_else_its_branch_harms_nobody(named: str, victim: Victim) -> None:
    """The engine signals only what descends from the server that it has called."""
    server = victim.socket
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        names = {"caller": "caller", "bystander": str(bystander.pid), "init": "1"}[named]
        with stranger(HERE) as other, other.posing(server, names=names) as got:
            said = victim.runs()
        assert not any(SECRET in one for one in got)
        assert "workers are executed instead" in said
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helpers: Helpers) -> Iterator[Job]:
    """A job of one rank that notes each signal, and has a secret."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with helpers(1, "catch ALL trace {}/trace note {}/ready '%r %p' pause") as job:
        job.ready(1)
        yield job


def socket_of(job: Job) -> Path:
    return until(lambda: list(job.directory.glob(f"dsl/{job.guard}-*.sock")))[0]


def questions(job: Job) -> str:
    """What a view may say, with a signal to the rank."""
    signal_rank = SignalRank(2, 0, 0, job.ready(1)["0"], 10)
    return b"".join(map(to_line, [Look(1, "status"), signal_rank, Follow()])).decode()


def test_a_process_that_is_here_may_look_into_a_job(job: Job) -> None:
    path = socket_of(job)
    with stranger(HERE) as other:
        assert '"JobView"' in "".join(other.tries("call_job", path=str(path), says=questions(job)))
    assert [one.signum for one in until(job.caught)] == [10]


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_process_elsewhere_neither_looks_into_a_job_nor_poses_as_one(
    kind: str, job: Job, dsl_command: Path
) -> None:
    path = socket_of(job)
    place = ELSEWHERE[kind][1]
    false = to_line(JobView("1", "dsl", ("false.py",), 4242, "/", "n0", 1, 0, 0, 1, 1)).decode()
    with stranger(kind) as other:
        got = "".join(other.tries("call_job", path=str(path), says=questions(job)))
        assert got == to_line(NoAnswer(f"runs in another {place}")).decode()
        assert job.caught() == []
        with other.posing(path.with_name("4242-0.sock"), is_job=True, says=false) as said:
            for name, code in (("dsl-ps", 0), ("dsl-stacks", 2), ("dsl-attach", 2)):
                words = [str(dsl_command.with_name(name)), *([] if name == "dsl-ps" else ["4242"])]
                done = ran(words)
                assert done.returncode == code, done.stderr
                assert "false.py" not in done.stdout
                lines = [line for line in done.stderr.splitlines() if "4242-0.sock" in line]
                why = f"is left alone: its process runs in another {place}, look from where it runs"
                assert len(lines) == 1, done.stderr
                assert lines[0].endswith(why)
        assert said == []


def test_a_process_elsewhere_is_not_asked_for_the_last_collective_of_a_worker(tmp_path: Path) -> None:
    path = tmp_path / "recorder.sock"
    refused = pytest.raises(PermissionError, match="runs in another pid namespace")
    with stranger("all-but-net") as other, other.posing(path, is_job=True) as said, refused:
        last_collective(str(path))
    assert said == []
