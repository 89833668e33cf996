"""What the failure of a worker leaves: the exit code, records for others, and restarts, whatever was taken away."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import ran
from tests.support.jobs import Helpers
from tests.support.places import Nodes


def a_script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


# Rank 0 records an exception, and is still cleaning up when rank 1 dies of it half a second later.
CLEANS_UP = """
import json, os, pathlib, signal, sys, time
gate = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    {handler}
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        extra = {{"py_callstack": "ValueError: bad batch", "timestamp": "9"}}
        json.dump({{"message": {{"message": "ValueError: bad batch", "extraInfo": extra}}}}, file)
    gate.touch()
    while True:
        signal.pause()
while not gate.exists():
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(7)
"""


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "handler", ["", "signal.signal(15, lambda *_: sys.exit(143))"], ids=["dies-of-it", "handles-it"]
)
def test_the_stop_of_a_cause_that_still_cleaned_up_is_not_the_exit_code(
    handler: str, dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    """Nobody has asked for an end, so the code is 1, as that of an exception, and not 143."""
    script = a_script(tmp_path, CLEANS_UP.format(handler=handler))
    result = ran([dslrun, "--nproc-per-node=2", script, tmp_path / "gate"])
    assert result.returncode == 1, result.stderr
    cause = r"^dslrun: rank 0 \(.*\) failed first: an exception, stopped by "
    assert re.search(cause, result.stderr, re.MULTILINE), result.stderr
    assert "ValueError: bad batch" in result.stderr
    assert str(temporary) in result.stderr


@pytest.mark.guarantee("G3")
def test_a_cause_that_still_cleaned_up_is_named_though_ranks_of_another_node_died_first(
    nodes: Nodes, tmp_path: Path
) -> None:
    script = a_script(tmp_path, CLEANS_UP.format(handler=""))
    options = "--nproc-per-node=1"
    jobs = nodes.start(options, options, program=(str(script), str(tmp_path / "gate")))
    assert [job.wait() for job in jobs] == [1, 1]
    for job in jobs:
        named = r"^dslrun: rank 0 \(.*\) failed first: an exception, stopped by .* ValueError: bad batch$"
        assert re.search(named, job.stderr(), re.MULTILINE), job.stderr()
        assert re.search(r"^dslrun: also failed: rank 1 \(.* exit code 7$", job.stderr(), re.MULTILINE)


@pytest.mark.guarantee("G2")
def test_a_killed_agent_leaves_no_pid_file_and_is_never_success(temporary: Path, helpers: Helpers) -> None:
    """In a container the pid, and so the file, is the same in each run; others look for it in /tmp."""
    with helpers(2, "note {}/ready '%r %p' pause", None, "--save_pid") as job:
        job.ready(2)
        path = Path(f"/tmp/{job.guard}.deepspeed")
        agent = job.agent()
        assert path.read_text() == str(agent)
        os.kill(agent, signal.SIGKILL)
        assert job.wait() == 137
        assert not path.exists()
    assert list(temporary.iterdir()) == []


# Fails once, after it has taken away what an age-based cleaner may take, and put something in its place.
CLEANED = """
import os, pathlib, shutil, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        shutil.rmtree(sys.argv[1])
        if sys.argv[2] == "file":
            pathlib.Path(sys.argv[1]).touch()
        sys.exit(3)
    while True:
        __import__("signal").pause()
print("second", os.environ["RANK"])
sys.exit(int(sys.argv[3]))
"""


def test_a_cleaned_temporary_directory_does_not_take_the_restarts(
    dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    """Its parents are made again, too."""
    script = a_script(tmp_path, CLEANED)
    result = ran([dslrun, "--nproc-per-node=2", "--max-restarts=1", script, temporary, "gone", 0])
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split("\n")) == ["", "second 0", "second 1"]
    assert "warning" not in result.stderr
    assert list(temporary.iterdir()) == []


def test_log_files_lie_in_their_cleaned_directory_again(
    dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    logs = tmp_path / "deep" / "logs"
    options = ["--nproc-per-node=2", "--max-restarts=1", f"--log-dir={logs}", "-r", "3"]
    result = ran([dslrun, *options, a_script(tmp_path, CLEANED), logs.parent, "gone", 0])
    assert result.returncode == 0, result.stderr
    (run_dir,) = logs.iterdir()
    assert [(run_dir / f"attempt_1/{rank}/stdout.log").read_text() for rank in (0, 1)] == [
        "second 0\n",
        "second 1\n",
    ]


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("code", [0, 5])
def test_files_that_cannot_be_had_any_more_are_named_and_cost_no_attempt(
    code: int, dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    """What would only have been in the files is shown instead."""
    logs = tmp_path / "logs"
    options = ["--nproc-per-node=2", "--max-restarts=1", f"--log-dir={logs}", "-r", "3"]
    result = ran([dslrun, *options, a_script(tmp_path, CLEANED), logs, "file", code])
    assert result.returncode == code, result.stderr
    assert f"second {0 if code == 0 else ''}" in result.stdout
    (said,) = [line for line in result.stderr.splitlines() if "warning: " in line and str(logs) in line]
    assert said.endswith("this attempt has no log files and no error files")


LOST = """
import os, shutil, sys
try:
    raise ValueError("bad batch")
except ValueError:
    shutil.rmtree(sys.argv[1])
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w")
"""


@pytest.mark.guarantee("G3")
def test_an_error_file_that_was_cleaned_away_is_not_the_reason(
    dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    """Torch's `@record` fails to write it, and says so last."""
    result = ran([dslrun, "--nproc-per-node=1", "--tee", "3", a_script(tmp_path, LOST), temporary])
    assert result.returncode == 1
    (first,) = [line for line in result.stderr.splitlines() if line.startswith("dslrun: rank ")]
    assert "exit code 1: ValueError: bad batch (script.py:4" in first


# The record of the root cause, for whoever has started us.

RECORDS = """
import json, os, signal, sys
if os.environ["RANK"] == "0":
    while True:
        signal.pause()
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write(sys.argv[1])
if sys.argv[2] == "kill":
    os.kill(os.getpid(), 9)
sys.exit(int(sys.argv[2]))
"""
EXTRA = {"py_callstack": "Traceback: ü", "timestamp": "1795311220"}
PARTS = {"message": {"message": "ValueError: bad\nbatch ü", "extraInfo": EXTRA}, "more": [1]}


@pytest.mark.parametrize(
    "record, end, expected",
    [
        (PARTS, "1", {**PARTS, "message": {**PARTS["message"], "errorCode": 1}}),  # type: ignore[dict-item]
        (PARTS, "kill", {**PARTS, "message": {**PARTS["message"], "errorCode": -9}}),  # type: ignore[dict-item]
        ({"message": "it broke", "timestamp": 7}, "5", {"message": "it broke", "timestamp": 7}),
        ('{"message": {"message": "E: cut', "5", None),
        ("", "5", None),
    ],
    ids=["parts", "killed", "text", "cut-off", "none"],
)
def test_the_record_of_the_root_cause_goes_where_our_own_environment_names_a_file(
    record: Any, end: str, expected: Any, dslrun: Path, tmp_path: Path, temporary: Path, monkeypatch: Any
) -> None:
    """As recorded from torchrun 2.15, but for a record that is cut off: there torchrun dies of it."""
    handed = tmp_path / "handed.json"
    handed.write_text("of an earlier run, and longer than what comes " * 40)
    before = handed.read_text()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(handed))
    text = record if isinstance(record, str) else json.dumps(record)
    result = ran([dslrun, "--nproc-per-node=2", a_script(tmp_path, RECORDS), text, end])
    assert result.returncode == (137 if end == "kill" else int(end)), result.stderr
    if expected is None:
        assert handed.read_text() == before
        return
    assert json.loads(handed.read_text()) == expected


def test_a_record_that_cannot_be_handed_on_is_a_warning(
    dslrun: Path, tmp_path: Path, temporary: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "handed.json"))
    script = a_script(tmp_path, RECORDS)
    result = ran([dslrun, "--nproc-per-node=2", script, json.dumps(PARTS), 4])
    assert result.returncode == 4
    assert f"warning: cannot write the error file {tmp_path}/nowhere/handed.json: No such" in result.stderr


AROUND = """
import sys
from torch.distributed.elastic.multiprocessing import errors
def work():
    raise ValueError("of the worker")
@errors.record
def main():
    if sys.argv[1] == "run":
        import dsl.run
        sys.exit(dsl.run.main(["--nproc-per-node=1", "--no-python", sys.executable, __file__, "work"]))
    from dsl.functions import launch
    launch(work)
if __name__ == "__main__":
    if sys.argv[1] == "work":
        errors.record(work)()
    elif sys.argv[1] == "catch":
        try:
            main()
        except errors.ChildFailedError as error:
            print(error.get_first_failure()[1].error_file)
    else:
        main()
"""


@pytest.mark.torch
@pytest.mark.parametrize("way", ["run", "functions", "catch"])
def test_a_record_of_torch_around_our_launcher_leaves_the_workers_own(
    way: str, tmp_path: Path, temporary: Path, monkeypatch: Any
) -> None:
    """As it does around torch's ChildFailedError, which ours is where torch's is known."""
    handed = tmp_path / "handed.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(handed))
    result = ran([sys.executable, a_script(tmp_path, AROUND), way])
    assert (result.returncode, result.stdout.count("error.json")) == ((0, 1) if way == "catch" else (1, 0))
    message = json.loads(handed.read_text())["message"]
    assert message["message"] == "ValueError: of the worker"
    assert message["errorCode"] == 1
    assert "in work" in message["extraInfo"]["py_callstack"]
    assert "ChildFailedError" not in message["extraInfo"]["py_callstack"]


SHORTENED = """
import mmap, os, sys
if os.environ["RANK"] == "1":
    with open(sys.argv[1], "w+b") as file:
        file.truncate(4096)
        memory = mmap.mmap(file.fileno(), 4096)
        file.truncate(0)
        memory[0]
"""
TAKES_A_DASH = "import argparse; parser = argparse.ArgumentParser(); parser.add_argument('--local-rank'); parser.parse_args()"
KNOWN_CAUSES = {
    "shared-memory": (SHORTENED, ("--nproc-per-node=2",), 135, "/dev/shm is the usual reason: it has "),
    "option": (
        TAKES_A_DASH,
        ("--nproc-per-node=2", "--local-rank-arg=underscore"),
        2,
        "--local-rank-arg dash passes --local-rank=N, and --use-env leaves out the option",
    ),
    "environment": (
        "import a_module_that_is_elsewhere",
        ("--nproc-per-node=2",),
        1,
        f"VIRTUAL_ENV is /elsewhere, but the workers run {sys.executable}: install dsl there, or set PYTHON_EXEC=",
    ),
}


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("text, options, code, mend", KNOWN_CAUSES.values(), ids=KNOWN_CAUSES)
def test_a_known_cause_comes_with_what_mends_it(
    text: str,
    options: tuple[str, ...],
    code: int,
    mend: str,
    dslrun: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    result = ran([dslrun, *options, a_script(tmp_path, text), *([tmp_path / "file"] if code == 135 else [])])
    assert result.returncode == code
    assert result.stderr.count(mend) == 1


def test_what_looks_like_a_default_and_is_none_is_named(
    dslrun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PET_NPROC": "2", "WORLD_SIZE": "4", "RANK": "0", "MASTER_ADDR": "job-0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    result = ran([dslrun, a_script(tmp_path, "")])
    assert (result.returncode, result.stdout) == (0, "")
    variable, nodes = result.stderr.splitlines()
    assert variable == "dslrun: warning: PET_NPROC has no effect, did you mean PET_NPROC_PER_NODE?"
    assert nodes.startswith(
        "dslrun: warning: WORLD_SIZE=4, but this job runs on this node alone: give --nnodes"
    )
