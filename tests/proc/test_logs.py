"""No line is lost, torn or given to another rank, files are byte-exact and stay what they are, and nobody waits for a console."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line, ran
from tests.support.jobs import Helpers, install_plug_in, running
from tests.support.logs import Found, LogGroup, check
from tests.support.namespaces import unshared

pytestmark = [pytest.mark.engine, pytest.mark.guarantee("G6")]

BIG = 10 << 20


@pytest.fixture
def linecheck(testchild: Path) -> Path:
    """Path of the helper program that checks numbered lines."""
    return testchild.with_name("dsl-linecheck")


@pytest.mark.parametrize("threads", ["", "3"])
@pytest.mark.parametrize("style", ["one", "two", "split", "block"])
def test_every_line_comes_once_whole_and_from_its_rank(
    style: str,
    threads: str,
    testchild: Path,
    linecheck: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DSL_ENGINE_THREADS", threads)  # one thread reads all, or others help it
    workers, lines = 30, 400
    words = [str(testchild), "numbered", "1", str(lines), "100", style]
    group = LogGroup(tmp_path, words, workers, files=True)
    assert group.process.stdout is not None
    found = check(linecheck, group.process.stdout)
    group.output()
    assert found == Found(workers * lines, 0, 0, 0, 0)
    for rank in (0, 17):
        alone = subprocess.run(words, env={"RANK": str(rank)}, capture_output=True, check=True)
        assert (tmp_path / f"{rank}.out").read_bytes() == alone.stdout


def test_a_line_of_ten_megabytes_stays_one(testchild: Path, linecheck: Path, tmp_path: Path) -> None:
    words = [str(testchild), "numbered", "1", "2", str(BIG), "block"]
    group = LogGroup(tmp_path, words, 3)
    assert group.process.stdout is not None
    assert check(linecheck, group.process.stdout) == Found(6, 0, 0, 0, 0)
    group.output()


def test_a_stopped_reader_holds_neither_the_files_nor_the_end(testchild: Path, tmp_path: Path) -> None:
    """Nobody reads our stdout: what is in files may be left out there, is counted, and the job ends."""
    group = LogGroup(tmp_path, [str(testchild), "flood", "16", "100", "4000"], 4, files=True)
    result = group.finish()
    assert set(result["exits"].values()) == {0}
    assert [kind for kind, *_ in result["notices"]] == ["lines_dropped"]
    for rank in range(4):
        assert (tmp_path / f"{rank}.out").stat().st_size >= 16 << 20


def test_a_reader_that_has_had_enough_does_not_end_the_job(testchild: Path, tmp_path: Path) -> None:
    group = LogGroup(tmp_path, [str(testchild), "flood", "4", "100", "4000"], 3)
    assert group.process.stdout is not None
    assert group.process.stdout.read(1000)
    group.process.stdout.close()
    result = group.finish()
    assert set(result["exits"].values()) == {0}
    assert [kind for kind, *_ in result["notices"]] == ["console_closed"]


def test_a_full_disk_is_told_once_and_the_job_goes_on(testchild: Path, tmp_path: Path) -> None:
    (tmp_path / "0.out").symlink_to("/dev/full")
    group = LogGroup(tmp_path, [str(testchild), "numbered", "1", "3000", "100", "one"], 2, files=True)
    out, _ = group.output()
    assert len(out.splitlines()) == 6000
    result = group.result()
    assert set(result["exits"].values()) == {0}
    failed, lost = result["notices"]
    assert failed[:4] == ["file_failed", 0, str(tmp_path / "0.out"), errno.ENOSPC]
    assert lost[0] == "bytes_lost"
    assert lost[4] == (tmp_path / "1.out").stat().st_size


def test_a_full_disk_is_told_of_the_file_for_words_too(testchild: Path, tmp_path: Path) -> None:
    (tmp_path / "filtered").symlink_to("/dev/full")
    path = str(tmp_path / "filtered")
    words = [str(testchild), "numbered", "1", "3000", "100", "one"]
    group = LogGroup(tmp_path, words, 2, line_files=[[1, path, [" "]]])
    out, _ = group.output()
    failed, lost = group.result()["notices"]
    assert failed[:4] == ["file_failed", None, path, errno.ENOSPC]
    assert [lost[0], lost[2]] == ["bytes_lost", path]
    assert lost[4] >= len(out)


def test_a_capped_file_keeps_its_begin_and_its_end(testchild: Path, tmp_path: Path) -> None:
    words = [str(testchild), "numbered", "1", "100000", "60", "block"]
    group = LogGroup(tmp_path, words, 1, files=True, console=None, log_max_bytes=1 << 20)
    group.output()
    text = (tmp_path / "0.out").read_bytes()
    assert 3 << 18 < len(text) < (1 << 20) + 100
    assert text.startswith(b"0 0 ")
    assert b" 99999 " in text[-200:]
    assert b"bytes left out]" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.err", "0.out", "result.json"]


def test_lines_with_a_word_are_copied(testchild: Path, tmp_path: Path) -> None:
    path = tmp_path / "filtered"
    words = [str(testchild), "say", "an ERROR of %r", "say", "nothing", "complain", "ERROR elsewhere"]
    group = LogGroup(tmp_path, words, 3, line_files=[[1, str(path), ["ERROR", "FATAL"]]])
    group.output()
    assert sorted(path.read_text().splitlines()) == [f"[rank {rank}] an ERROR of {rank}" for rank in range(3)]


def test_output_of_a_worker_that_was_killed_is_not_lost(testchild: Path, tmp_path: Path) -> None:
    words = [str(testchild), "numbered", "1", "500", "60", "one", "raw", "unfinished", "raise", "KILL"]
    group = LogGroup(tmp_path, words, 1)
    out, _ = group.output()
    assert len(out.splitlines()) == 501
    assert out.endswith(b"[rank 0] unfinished\n")
    assert group.result()["exits"] == {"0": 128 + signal.SIGKILL}


FIFO_FILE = """
import sys
from dsl import Ended, Exited, LaunchSpec, Stdio, Supervisor, WorkerSpec
worker = WorkerSpec(["/bin/true"], stdout=Stdio.file(sys.argv[1], append=sys.argv[2] == "append"))
supervisor = Supervisor()
supervisor.start(LaunchSpec([worker]))
ended = False
while not ended:
    for event in supervisor.wait():
        if isinstance(event, Exited):
            print(event.exit)
        ended |= isinstance(event, Ended)
supervisor.close()
"""


@pytest.mark.parametrize("mode", ["append", "anew"])
@pytest.mark.parametrize("reader", ["a reader", "no reader"])
def test_a_fifo_in_the_place_of_a_file_of_a_worker_fails_its_start(
    mode: str, reader: str, tmp_path: Path
) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if reader == "a reader" else None
    program = [sys.executable, "-c", FIFO_FILE, str(path), mode]
    result = ran(program)
    if descriptor is not None:
        os.close(descriptor)
    assert f"errno={errno.ENXIO}" in result.stdout, result.stdout + result.stderr


def test_a_fifo_in_the_place_of_a_file_for_words_is_said(testchild: Path, tmp_path: Path) -> None:
    path = tmp_path / "filtered"
    os.mkfifo(path)
    group = LogGroup(tmp_path, [str(testchild), "say", "ERROR"], 2, line_files=[[1, str(path), ["ERROR"]]])
    try:
        out, _ = group.output(20)
        assert out.count(b"ERROR") == 2
        assert group.result()["notices"] == [["file_failed", None, str(path), errno.ENXIO, 0]]
    finally:
        group.process.kill()
        group.process.wait()


@pytest.mark.parametrize(
    "case",
    [
        "",
        "a FIFO that nobody reads",
        # As `docker kill -s HUP`: sender and session leader are both out of sight, and not the same.
        pytest.param("from outside a container", marks=pytest.mark.root),
    ],
)
def test_a_hang_up_from_log_rotation_opens_the_files_anew(
    case: str, tmp_path: Path, helpers: Helpers
) -> None:
    """Where a FIFO is at the path, the old file is kept, and nobody is held up."""
    logs = tmp_path / "logs"
    words = "catch USR1 say old note {}/job/ready '%r %p' await USR1 1 say new"
    line = helpers.line(2, words, 1.0, "--log-dir", str(logs))
    if "container" in case:
        line = [*unshared("--pid", "--fork", "--mount-proc", "--kill-child"), *line]
    with running(line, tmp_path / "job") as job:
        job.ready(2)
        guard = until(lambda: processes.children(job.guard))[0] if "container" in case else job.guard
        (path,) = until(lambda: list(logs.rglob("1/stdout.log")))
        until(lambda: path.read_text() == "old\n")
        path.rename(path.with_suffix(".1"))
        if "FIFO" in case:
            os.mkfifo(path)
        os.kill(guard, signal.SIGHUP)
        until(lambda: "opened anew" in job.stderr() if "FIFO" in case else path.exists())
        os.kill(guard, signal.SIGUSR1)
        assert job.wait() == 0, job.stderr()
    if "FIFO" in case:
        (said,) = [text for text in job.stderr().splitlines() if str(path) in text]
        assert "not a regular file" in said
        assert path.with_suffix(".1").read_text() == "old\nnew\n"
    else:
        assert path.with_suffix(".1").read_text() == "old\n"
        assert path.read_text() == "new\n"


FAILS_FIRST = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
if (folder / f"ready{rank}").exists():
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: (folder / "told").touch())
(folder / f"ready{rank}").touch()
while not (folder / ("ready1" if rank == "0" else "go")).exists():
    time.sleep(0.01)
sys.exit(3)
"""


def test_a_rotation_while_a_failed_attempt_ends_does_not_end_the_job(
    dsl_command: Path, tmp_path: Path
) -> None:
    logs = ["--log-dir", str(tmp_path / "logs"), "--tee", "3"]
    words = [sys.executable, "-c", FAILS_FIRST, str(tmp_path)]
    with running(
        dsl_line(dsl_command, 2, words, 60.0, "--max-restarts", "1", *logs), tmp_path / "job"
    ) as job:
        until((tmp_path / "told").exists)
        os.kill(job.guard, signal.SIGHUP)
        until(lambda: "opened anew" in job.stderr())
        (tmp_path / "go").touch()
        assert job.wait() == 0


PACKAGE = """
import os, threading

class Dest:
    tee_stdouts, tee_stderrs, error_files = {}, {}, {}

class Specs:
    def __init__(self, log_dir, **asked):
        self.folder, self.attempts = log_dir, 0
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def reify(self, envs):
        self.attempts += 1
        os.makedirs(f"{self.folder}/{self.attempts}")
        answer = Dest()
        answer.stdouts = {rank: f"{self.folder}/{self.attempts}/{rank}" for rank in envs}
        answer.stderrs = dict.fromkeys(envs, "")
        return answer
"""


def _line(dsl: Path, folder: Path, *words: object) -> list[str]:
    install_plug_in(folder, "dsl_test_plugin", "torchrun.logs_specs", "mine = dsl_test_plugin:Specs", PACKAGE)
    own = ["--no-python", "--nproc-per-node=2", "--logs-specs=mine", f"--log-dir={folder / 'logs'}"]
    return [str(dsl.with_name("dslrun")), *own, *map(str, words)]


def _environ(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_each_attempt_has_the_files_that_the_plug_in_names(dsl_command: Path, tmp_path: Path) -> None:
    script = "echo $TORCHELASTIC_RESTART_COUNT; exit 3"
    line = _line(dsl_command, tmp_path, "--max-restarts=1", "/bin/sh", "-c", script)
    with running(line, tmp_path / "job", environ=_environ(tmp_path)) as job:
        assert job.wait() == 3
        assert job.stdout() == ""
    for attempt in range(2):
        texts = [(tmp_path / "logs" / str(attempt + 1) / rank).read_text() for rank in "01"]
        # A worker may be ended before it has said anything, but not both.
        assert "".join(texts) in (f"{attempt}\n", f"{attempt}\n" * 2)


def test_signals_reach_the_workers_and_not_the_thread_of_the_plug_in(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Such a thread, which importing torch starts, would end the command with its default for the signal."""
    job_dir = tmp_path / "job"
    words = ["catch", "USR1", "trace", job_dir / "trace", "note", job_dir / "ready", "%r %p", "pause"]
    line = _line(dsl_command, tmp_path, testchild, *words)
    with running(line, job_dir, environ=_environ(tmp_path)) as job:
        job.ready(2)
        assert len(os.listdir(f"/proc/{job.guard}/task")) == 2
        os.kill(job.guard, signal.SIGUSR1)
        until(lambda: [one.signum for one in job.caught()].count(signal.SIGUSR1) == 2)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143, job.stderr()
