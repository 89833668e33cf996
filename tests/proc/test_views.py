"""Views into a running job, and its output for those who attach: who may look, what they see, and no harm to the job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import dsl_line, ran
from tests.support.jobs import Helpers, Job, running
from tests.support.terminal import terminal

from dsl.errors import DslError
from dsl.machine import find_sockets
from dsl.model.observation import NodeStatus
from dsl.view import jobs
from dsl.view.jobs import RunningJob, call_jobs, find_job, running_jobs
from dsl.view.stacks import read_state
from dsl.view.views import MOST_VIEWS

OPEN: list[RunningJob] = []


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of the sockets, which no other test uses. The views of a test are closed after it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path / "dsl"
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def job(helpers: Helpers) -> Iterator[Job]:
    with helpers(3, "note {}/ready '%r %p' pause") as job:
        job.ready(3)
        yield job


def own_jobs(pid: int) -> list[RunningJob]:
    """Views of a job."""
    found = running_jobs()
    OPEN.extend(found)
    return [one for one in found if one.view.pid == pid]


def thread_count(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def seen(job: Job) -> RunningJob:
    return until(lambda: own_jobs(job.guard))[0]


def status(view: RunningJob) -> NodeStatus:
    nodes, missing = view.look("status")
    assert missing == ()
    (node,) = nodes
    assert isinstance(node, NodeStatus)
    return node


def test_a_job_is_found_by_the_pid_of_its_command_and_shows_its_ranks(
    job: Job, folder: Path, dsl_command: Path
) -> None:
    view = seen(job)
    assert (view.view.command, view.view.workers, view.view.nodes) == ("dsl", 3, 1)
    assert view.view.words[0].endswith("testchild")
    assert Path(view.path).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    ranks = status(view).ranks
    assert {str(one.rank): one.pid for one in ranks} == job.ready(3)
    assert {one.state for one in ranks} == {"S"}
    assert all(one.rss_bytes and one.threads == 1 for one in ranks)

    tool = dsl_command.with_name("dsl-ps")
    title, *rows = ran([tool], check=True).stdout.splitlines()
    assert title.split()[0] == "JOB"
    row = next(one.split() for one in rows if one.split()[0] == str(job.guard))
    assert (row[1], row[3:6]) == ("running", ["1", "3", "0"])
    found = json.loads(ran([tool, "--json"], check=True).stdout)
    assert found["schema"] == 1
    assert [one["ranks"] for one in found["jobs"] if one["pid"] == job.guard] == [3]

    os.kill(job.ready(3)["1"], signal.SIGSTOP)
    assert until(lambda: [one.state for one in status(view).ranks] == ["S", "T", "S"])


@pytest.mark.parametrize("victim, signum", [("guard", signal.SIGTERM), ("agent", signal.SIGKILL)])
def test_the_socket_goes_with_the_job(victim: str, signum: signal.Signals, job: Job, folder: Path) -> None:
    """With one whose agent is killed, too."""
    seen(job)
    os.kill(job.guard if victim == "guard" else job.agent(), signum)
    job.process.wait(20)
    assert not folder.exists()


def test_a_socket_that_a_killed_job_has_left_is_removed(job: Job) -> None:
    path = seen(job).path
    for pid in (job.guard, job.agent()):
        os.kill(pid, signal.SIGSTOP)  # neither of them tidies up behind the other
    for pid in (job.agent(), job.guard):
        os.kill(pid, signal.SIGKILL)
    job.process.wait(20)
    assert Path(path).exists()
    # The agent may end a moment after its guard.
    assert until(lambda: own_jobs(job.guard) == [] and not Path(path).exists())


def test_a_job_that_restarts_shows_its_new_workers(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    program = [testchild, "note", tmp_path / "ready", "%r %p", "pause"]
    line = dsl_line(dsl_command.with_name("dslrun"), 2, program, None, "--max-restarts=1")
    with running(line, tmp_path) as job:
        first = job.ready(2)
        view = seen(job)
        assert (view.view.attempt, view.view.restarts) == (0, 0)
        os.kill(first["0"], signal.SIGKILL)
        assert until(lambda: {one.pid for one in status(view).ranks} - {0, *first.values()})
        again = until(lambda: [one for one in own_jobs(job.guard) if one.view.restarts == 1])[0]
        assert again.view.attempt == 1
        view.close()


def test_a_flood_of_views_is_bounded_and_the_job_goes_on(job: Job) -> None:
    path = seen(job).path
    held = []
    for _ in range(200):
        one = socket.socket(socket.AF_UNIX)
        one.settimeout(0.2)
        try:
            one.connect(path)
        except (OSError, TimeoutError):
            one.close()
            continue
        held.append(one)
    agent = job.agent()
    assert until(lambda: thread_count(agent) > MOST_VIEWS)
    assert thread_count(agent) <= MOST_VIEWS + 8
    assert len(os.listdir(f"/proc/{agent}/fd")) < 100
    for one in held:
        one.close()
    until(lambda: thread_count(agent) < 8)
    view = seen(job)
    assert len(status(view).ranks) == 3


@pytest.mark.parametrize(
    "words", [b"\0" * 4096, b'{"Look":{"number":-1}}\n', b"x" * (2 << 20), b'{"Stop":{}}\n', b"\n" * 100]
)
def test_what_cannot_be_read_ends_only_that_view(job: Job, words: bytes) -> None:
    view = seen(job)
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(20)
    stranger.connect(view.path)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError), stranger:
        stranger.sendall(words + b"\n")
        while stranger.recv(1 << 16):
            pass
    assert len(status(view).ranks) == 3


@pytest.mark.root
def test_another_user_is_not_let_in(job: Job) -> None:
    view = seen(job)
    program = (
        "import os, socket, sys\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        "except PermissionError: print('refused')\n"
    )
    assert ran([sys.executable, "-c", program, view.path]).stdout == "refused\n"


@contextlib.contextmanager
def stopped(job: Job) -> Iterator[None]:
    """The processes that supervise a job are stopped."""
    pids = (job.guard, job.agent())
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: all(read_state(pid) == "T" for pid in pids))
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_stopped_job_is_a_row_and_holds_up_no_other(
    job: Job,
    dsl_command: Path,
    testchild: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    helpers: Helpers,
) -> None:
    monkeypatch.setattr(jobs, "CALL_S", 1e6)  # nobody waits so long for a job that he does not mean
    seen(job)
    tool = str(dsl_command.with_name("dsl-ps"))
    with running(helpers.line(1, "pause"), tmp_path / "other") as other:
        seen(other)
        with stopped(job):
            text = ran([tool], check=True).stdout
            rows = {one.split()[0]: one for one in text.splitlines()}
            assert rows[str(job.guard)].split()[1:3] == ["no", "answer"]
            assert str(testchild) in rows[str(job.guard)]
            assert rows[str(other.guard)].split()[1] == "running"
            found = json.loads(ran([tool, "--json"], check=True).stdout)
            assert [one["pid"] for one in found["jobs"]] == [other.guard]
            assert [one["pid"] for one in found["no_answer"]] == [job.guard]
            for word in ("", str(other.guard)):
                answered, silent = call_jobs(word)
                OPEN.extend(answered)
                assert find_job(word, answered, silent).view.pid == other.guard
    assert own_jobs(job.guard)


def test_who_means_a_stopped_job_is_told(
    job: Job, dsl_command: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CALL_S", 0.1)
    seen(job)
    with stopped(job):
        for word in ("", str(job.guard)):
            with pytest.raises(DslError, match=f"job {job.guard} does not answer, it may be stopped"):
                find_job(word, *call_jobs(word))
        attached = ran([dsl_command.with_name("dsl-attach"), job.guard], 20)
        assert (attached.returncode, attached.stderr.count("\n")) == (1, 1)
        assert f"job {job.guard} does not answer" in attached.stderr


def test_a_job_whose_directory_is_gone_is_seen(tmp_path: Path, helpers: Helpers) -> None:
    line = helpers.line(1, "pause")
    here = tmp_path / "here"
    here.mkdir()
    with running(["sh", "-c", 'cd "$0" && exec "$@"', str(here), *line], tmp_path / "job") as job:
        seen(job)
        here.rmdir()
        assert until(lambda: [one.view.cwd for one in own_jobs(job.guard)]) == [""]


def test_dsl_ps_begins_with_the_script_and_fits_the_terminal(dsl_command: Path, tmp_path: Path) -> None:
    """With the words that the user has typed. The name of the script stays whole, and so does everything where there
    is no terminal.
    """
    script = tmp_path / "a_folder_with_a_name" / "train_model.py"
    script.parent.mkdir()
    script.write_text("import time\ntime.sleep(600)\n")
    tool = str(dsl_command.with_name("dsl-ps"))
    options = ["--config", "config.yaml", "--no-shuffle"]
    line = [str(dsl_command), "--num_gpus=2", str(script), *options]

    def row(pid: int, text: str) -> str:
        (found,) = [one for one in text.splitlines() if one.startswith(f"{pid} ")]
        return re.sub(r" \d+:\d\d ", " 0:00 ", found, count=1)  # how long it has run

    with running(line, tmp_path / "job") as job:
        seen(job)
        whole = row(job.guard, ran([tool], check=True).stdout)
        assert whole.endswith(" ".join(["  0         " + str(script), *options]))
        for size, environ in ((80, {}), (200, {"COLUMNS": "80"})):
            with terminal([tool], environ, size=(size, 24)) as screen:
                screen.reported("ended 0")
                short = row(job.guard, screen.shown().decode())
            assert short.partition(str(script)[:5])[0] == whole.partition(str(script))[0]
            assert "…" in short
            assert "train_model.py" in short
            assert len(short) <= 80


def test_a_program_that_launches_functions_is_a_job_too(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import time\n"
        "from dsl.functions import LaunchConfig, elastic_launch\n"
        "def work(): time.sleep(600)\n"
        "if __name__ == '__main__': elastic_launch(LaunchConfig(1, 1, 2), work)()\n"
    )
    with running([sys.executable, str(tmp_path / "program.py")], tmp_path) as job:
        view = seen(job).view
        assert (view.workers, view.words) == (2, ("work",))


def test_the_name_of_a_job_is_its_pid() -> None:
    with pytest.raises(DslError, match="no job of this user runs"):
        find_job("", [])


@contextlib.contextmanager
def viewing(dsl_command: Path, pid: int) -> Iterator[subprocess.Popen[bytes]]:
    """A running ``dsl-attach`` to the job of a command, which answers views a moment after its workers' start."""
    until(lambda: any(name.startswith(f"{pid}-") for _, name in find_sockets(".sock")))
    line = [str(dsl_command.with_name("dsl-attach")), str(pid)]
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
    dsl_command: Path, tmp_path: Path, helpers: Helpers
) -> None:
    go = tmp_path / "go"
    with helpers(2, "say early note {}/ready '%r %p' wait {}/go lines 500 60 exit 3") as job:
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
    dsl_command: Path, tmp_path: Path, how: signal.Signals, helpers: Helpers
) -> None:
    go = tmp_path / "go"
    with helpers(2, "say early note {}/ready '%r %p' wait {}/go say late") as job:
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
def test_a_view_that_stands_still_delays_nothing(dsl_command: Path, tmp_path: Path, helpers: Helpers) -> None:
    lines = 300_000
    with helpers(2, f"say early note {{}}/ready '%r %p' wait {{}}/go lines {lines} 60") as job:
        job.ready(2)
        with viewing(dsl_command, job.guard) as viewer:
            assert first_line(viewer) == b"early\n"
            viewer.send_signal(signal.SIGSTOP)
            (tmp_path / "go").touch()
            assert job.wait() == 0
            viewer.send_signal(signal.SIGCONT)
            text = viewer.communicate(timeout=30)[0]
            assert viewer.returncode == 0
    assert job.stdout_path.read_bytes().count(b"\n") == 2 * lines + 2
    assert text.count(b"\n") < lines


@pytest.mark.parametrize("options", ["--redirects=3 --log-dir={}/logs", "--ranks-filter=9"])
def test_a_job_that_shows_nothing_cannot_be_followed(
    options: str, dsl_command: Path, tmp_path: Path, helpers: Helpers
) -> None:
    with helpers(2, "note {}/ready '%r %p' pause", None, *options.format(tmp_path).split()) as job:
        job.ready(2)
        with viewing(dsl_command, job.guard) as viewer:
            shown, said = viewer.communicate(timeout=30)
        assert (viewer.returncode, shown, said.count(b"\n")) == (1, b"", 1)
        assert b"it shows no output of its workers" in said


def test_a_job_whose_output_does_not_pass_through_dsl_cannot_be_followed(
    dsl_command: Path, helpers: Helpers
) -> None:
    """But one worker with a tag can."""
    words = "say early note {}/ready '%r %p' pause"
    with helpers(1, words) as job:
        job.ready(1)
        with viewing(dsl_command, job.guard) as viewer:
            shown, said = viewer.communicate(timeout=30)
            assert (viewer.returncode, shown, said.count(b"\n")) == (1, b"", 1)
            assert b"its workers write past dsl" in said
            assert b"--tag-output always" in said
        waited = ran([dsl_command.with_name("dsl-wait"), job.guard], 30)
        assert waited.returncode == 2
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143
    with helpers(1, words, None, "--tag-output=always") as job:
        job.ready(2)  # with the line of the first job
        with viewing(dsl_command, job.guard) as viewer:
            assert first_line(viewer) == b"[rank 0] early\n"
