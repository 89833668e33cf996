"""The verdict of a job: the cause's own words wherever its output went, and each failure told once."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.support.places import free_port

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
    line = [*map(str, command), str(script), *words]
    result = subprocess.run(line, capture_output=True, text=True, timeout=25, check=False, cwd=folder)
    assert result.returncode == 1
    return result.stderr


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
    """G3"""
    command = [dslrun, "--nproc-per-node", 2] if name == "dslrun" else [dsl_command, "--num_gpus", 2]
    lines = said([*command, *options.split()], tmp_path).splitlines()
    (first,) = [line for line in lines if REASON in line]
    assert first.startswith(f"{name}: rank 1 ")
    shown = lines[lines.index(f"{name}: last output of rank 1:") :]
    assert f"{name}: {SHOWN}" in shown
    assert f"{name}: stopped by {name}: rank 0 (SIGTERM)" in lines
    assert not any(HINT in line or "FAILED" in line for line in lines), "told again"
    assert sum("batch 40 holds NaN" in line for line in shown) == 2


def test_an_error_file_adds_the_summary_of_torchrun_without_telling_it_again(
    dslrun: Path, tmp_path: Path
) -> None:
    """G3: what log parsers look for, and where the record lies."""
    text = said([dslrun, "--nproc-per-node", 2], tmp_path, RECORDS)
    verdict, _, box = text.partition("train.py FAILED")
    assert verdict.count(REASON) == 1
    assert "error_file: /" in box
    assert "Traceback" not in box
    assert "  traceback : ValueError: batch 40 holds NaN (train.py:" in box
    assert HINT not in text


def test_what_only_the_error_file_knows_is_shown_whole(dslrun: Path, tmp_path: Path) -> None:
    """G3"""
    text = said([dslrun, "--nproc-per-node", 2], tmp_path, RECORDS, "quiet")
    assert "failed first: exit code 1: ValueError: batch 40 holds NaN\n" in text
    box = text.partition("train.py FAILED")[2]
    assert "  traceback : Traceback (most recent call last):\n" in box


def test_a_failure_that_nobody_has_explained_gets_the_summary_of_torchrun(
    dslrun: Path, tmp_path: Path
) -> None:
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(1)\ntime.sleep(1000)"
    text = said([dslrun, "--nproc-per-node", 2], tmp_path, code)
    box = text.partition("train.py FAILED")[2]
    assert f"traceback : {HINT}" in box
    assert text.count("failed first: exit code 1") == 1


def test_on_one_node_of_several_the_verdict_speaks_for_this_one(dslrun: Path, tmp_path: Path) -> None:
    """Another node may have failed before."""
    options = f"--nnodes 2 --master-addr 127.0.0.1 --master-port {free_port()} --nproc-per-node 2"
    other = [str(dslrun), *options.split(), "--no-python", "/bin/sleep", "1000"]
    with subprocess.Popen(other, stderr=subprocess.DEVNULL) as first:
        line = [dslrun, *options.split(), "--node-rank", "1"]
        text = said(line, tmp_path, SCRIPT.replace("rank == 1", "rank == 3"))
        assert first.wait(20) == 1
    assert "failed first on this node: exit code 1: ValueError" in text
