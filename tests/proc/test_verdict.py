"""The verdict of a job: the cause's own words wherever its output went, and each failure told once."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.namespaces import unshared
from tests.support.places import free_port
from tests.support.terminal import terminal as a_terminal

SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    print("going", flush=True)
    raise ValueError("batch 40 holds NaN")
time.sleep(1000)
"""
RECORDS = """
import json, os, sys, time
if os.environ["RANK"] == "1":
    try:
        raise ValueError("batch 40 holds NaN")
    except ValueError as error:
        import traceback
        text = {"message": "ValueError: batch 40 holds NaN", "extraInfo": {"py_callstack": traceback.format_exc()}}
        json.dump({"message": text}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
        if "quiet" in sys.argv: os._exit(1)
        raise
time.sleep(1000)
"""
HINT = "To enable traceback see"
REASON = "failed first: exit code 1: ValueError: batch 40 holds NaN (train.py:"
SHOWN = "  | ValueError: batch 40 holds NaN"


pytestmark = pytest.mark.usefixtures("temporary")  # where error files of failed workers stay


def said(command: list[object], folder: Path, text: str = SCRIPT, *words: str) -> str:
    """What a failing job of two says on stderr."""
    script = folder / "train.py"
    script.write_text(text)
    result = ran([*map(str, command), str(script), *words], cwd=folder)
    assert result.returncode == 1
    return result.stderr


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize(
    "options",
    [
        "",
        "--local-ranks-filter 0",
        "--local-ranks-filter 0 --tag-output always --collapse",
        "--redirects 3 --log-dir logs",
        "--redirects 2 --local-ranks-filter 0 --log-dir logs",
        "--redirects 1 --local-ranks-filter 0 --log-dir logs",
        "--tee 1 --local-ranks-filter 0 --log-dir logs",
    ],
)
@pytest.mark.parametrize("name", ["dsl", "dslrun"])
def test_the_failing_ranks_traceback_is_shown_wherever_its_output_went(
    name: str, options: str, dslrun: Path, dsl_command: Path, tmp_path: Path
) -> None:
    command = [dslrun, "--nproc-per-node", 2] if name == "dslrun" else [dsl_command, "--num_gpus", 2]
    lines = said([*command, *options.split()], tmp_path).splitlines()
    (first,) = [line for line in lines if REASON in line]
    assert first.startswith(f"{name}: rank 1 ")
    shown = lines[lines.index(f"{name}: last output of rank 1:") :]
    assert f"{name}: {SHOWN}" in shown
    assert f"{name}: stopped by {name}: rank 0 (SIGTERM)" in lines
    assert not any(HINT in line or "FAILED" in line for line in lines), "told again"
    assert sum("batch 40 holds NaN" in line for line in shown) == 2


@pytest.mark.guarantee("G3")
def test_an_error_file_adds_the_summary_of_torchrun_without_telling_it_again(
    dslrun: Path, tmp_path: Path
) -> None:
    """What log parsers look for, and where the record lies."""
    text = said([dslrun, "--nproc-per-node", 2], tmp_path, RECORDS)
    verdict, _, box = text.partition("train.py FAILED")
    assert verdict.count(REASON) == 1
    assert "error_file: /" in box
    assert "Traceback" not in box
    assert "  traceback : ValueError: batch 40 holds NaN (train.py:" in box
    assert HINT not in text


@pytest.mark.guarantee("G3")
def test_what_only_the_error_file_knows_is_shown_whole(dslrun: Path, tmp_path: Path) -> None:
    text = said([dslrun, "--nproc-per-node", 2], tmp_path, RECORDS, "quiet")
    assert "failed first: exit code 1: ValueError: batch 40 holds NaN\n" in text
    box = text.partition("train.py FAILED")[2]
    assert "  traceback : Traceback (most recent call last):\n" in box


def test_a_failure_that_nobody_has_explained_is_told_once(dslrun: Path, tmp_path: Path) -> None:
    """The summary of torchrun would repeat it, with nothing where the traceback stands."""
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(1)\ntime.sleep(1000)"
    first, second = said([dslrun, "--nproc-per-node", 2], tmp_path, code).splitlines()
    assert first.endswith("failed first: exit code 1")
    assert second == "dslrun: stopped by dslrun: rank 0 (SIGTERM)"


def test_on_one_node_of_several_the_verdict_speaks_for_the_whole_job(dslrun: Path, tmp_path: Path) -> None:
    options = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {free_port()} --nproc-per-node 2"
    other = [str(dslrun), *options.split(), "--no-python", "/bin/sleep", "1000"]
    with subprocess.Popen(other, stderr=subprocess.DEVNULL) as first:
        line = [dslrun, *options.split(), "--node-rank", "1"]
        text = said(line, tmp_path, SCRIPT.replace("rank == 1", "rank == 3"))
        assert first.wait(20) == 1
    assert "failed first: exit code 1: ValueError" in text


FULL = """
import os, sys, time
if os.environ["RANK"] == "1":
    try:
        with open(sys.argv[-1] + "/fill", "ab", buffering=0) as file:
            while True:
                file.write(bytes(1024))
    except OSError:
        raise ValueError("batch 40 holds NaN") from None
time.sleep(1000)
"""


@pytest.mark.guarantee("G3")
@pytest.mark.root
@pytest.mark.parametrize("is_full_at_first", [False, True])
@pytest.mark.parametrize("name", ["dsl", "dslrun"])
def test_a_full_disk_is_named_and_the_last_words_have_room_that_was_taken_before(
    name: str, dsl_command: Path, tmp_path: Path, *, is_full_at_first: bool
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "train.py").write_text(FULL)
    fill = f"dd if=/dev/zero of={logs}/fill bs=1k 2>/dev/null; " if is_full_at_first else ""
    script = f'mount -t tmpfs -o size=256k none {logs} || exit 99; {fill}exec "$@"'
    count = "--num_gpus=2" if name == "dsl" else "--nproc-per-node=2"
    own = [str(dsl_command.with_name(name)), count, "--redirects", "3", "--log-dir", str(logs), "train.py"]
    result = ran([*unshared("--mount"), "/bin/sh", "-c", script, "sh", *own, str(logs)], cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    said = r"/attempt_0/1/stderr\.log may lack its last words: No space left on device, make room on its disk"
    assert re.search(said, result.stderr), result.stderr
    assert (REASON in result.stderr) != is_full_at_first, result.stderr


def test_what_the_screen_shows_is_not_quoted_and_the_cause_is_its_last_line(
    dsl_command: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [str(dsl_command), "--num_gpus=2", str(tmp_path / "train.py")]
    with a_terminal(line, {"TERM": "xterm", "NO_COLOR": "1"}) as screen:
        screen.reported("ended 1")
        lines = screen.shown().decode().split("\r\n")
    assert sum("Traceback" in line for line in lines) == 1
    assert lines[-3:-1] == [
        "dsl: stopped by dsl: rank 0 (SIGTERM)",
        next(line for line in lines if "failed first: exit code 1: ValueError: batch 40 holds NaN" in line),
    ]


MUCH = """
import os, sys, time
if os.environ["RANK"] == "1":
    try:
        raise ValueError("batch 40 holds NaN")
    except ValueError:
        import traceback
        traceback.print_exc()
    open("written", "w").close()
    while not os.path.exists("read"): time.sleep(0.01)
    sys.exit(1)
while not os.path.exists("written"): time.sleep(0.01)
time.sleep(0.3)
for number in range(30): print("step", number)
sys.stdout.flush()
open("read", "w").close()
time.sleep(1000)
"""


def test_what_has_gone_off_the_screen_is_quoted(
    dsl_command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(MUCH)
    monkeypatch.chdir(tmp_path)
    with a_terminal(
        [str(dsl_command), "--num_gpus=2", "train.py"], {"TERM": "xterm", "NO_COLOR": "1"}
    ) as screen:
        screen.reported("ended 1")
        lines = screen.shown().decode().split("\r\n")
    assert sum("Traceback" in line for line in lines) == 2
    assert "failed first: exit code 1" in lines[-2]


# The signal comes at the same line in each rank.
INTERRUPTED = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
open("ready" + os.environ["RANK"], "w").close()
signal.sigwait([signal.SIGINT])
signal.default_int_handler(signal.SIGINT, None)
"""


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("name", ["dsl", "dslrun"])
def test_ctrl_c_shows_one_traceback_for_all_ranks_and_says_who_has_interrupted_the_job(
    name: str, dsl_command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not shown again is equal; the files have all of it."""
    (tmp_path / "train.py").write_text(INTERRUPTED)
    monkeypatch.chdir(tmp_path)
    count = "--num_gpus=3" if name == "dsl" else "--nproc-per-node=3"
    line = [str(dsl_command.with_name(name)), count, "--stdin=none", "--log-dir=logs", "train.py"]
    with a_terminal(line, {"TERM": "xterm", "NO_COLOR": "1", "PYTHONNODEBUGRANGES": "1"}) as screen:
        until(lambda: len(list(tmp_path.glob("ready*"))) == 3)
        screen.press(b"\x03")
        screen.reported("ended -2")
        lines = screen.shown().decode().split("\r\n")
    assert [line for line in lines if "KeyboardInterrupt" in line] == ["[rank 0-2] KeyboardInterrupt"]
    assert lines[-2] == f"{name}: interrupted (Ctrl-C): ranks 0-2 ended"
    files = list((tmp_path / "logs").rglob("stderr.log"))
    assert len({path.read_text() for path in files}) == 1
    assert [path.read_text().count("KeyboardInterrupt") for path in files] == [1, 1, 1]
