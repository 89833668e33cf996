"""`dslrun --logs-specs`: a plug-in with a thread of its own, in a real job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.kit.waiting import until
from tests.support.jobs import running

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
    info = folder / "dsl_test_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dsl_test_plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torchrun.logs_specs]\nmine = dsl_test_plugin:Specs\n")
    (folder / "dsl_test_plugin.py").write_text(PACKAGE)
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
