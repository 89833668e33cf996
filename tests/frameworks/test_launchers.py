"""Launchers of others start through us when they are made to as docs/from-frameworks.md says: its own words are run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.support.command import ran

BIN = Path(sysconfig.get_path("scripts"))
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "from-frameworks.md"
JOB_TIMEOUT_S = 120
pytestmark = [pytest.mark.timeout(2 * JOB_TIMEOUT_S)]

TELL = """
import json, os, pathlib, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(dict(os.environ)))
if os.environ["RANK"] in sys.argv[2:]:
    raise ValueError("batch 3 holds NaN")
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, clean_environ: str, tmp_path: Path) -> None:
    del clean_environ  # it would drop variables again
    (tmp_path / "tmp").mkdir()
    (tmp_path / "told").mkdir()
    (tmp_path / "train.py").write_text(TELL)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


def documented(title: str) -> str:
    """The first block of code below a heading."""
    found = re.search(rf"^### {title}$.*?^```\w+\n(.*?)^```$", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def call(*command: str) -> subprocess.CompletedProcess[str]:
    return ran(command, stdin=subprocess.DEVNULL, timeout_s=JOB_TIMEOUT_S)


def assert_ours(folder: Path) -> None:
    """Both ranks ran, and each is a worker of ours."""
    told = {path.name: json.loads(path.read_text()) for path in (folder / "told").iterdir()}
    assert sorted(told) == ["0", "1"]
    assert {seen["WORLD_SIZE"] for seen in told.values()} == {"2"}
    assert len({seen["DSL_JOB_ID"] for seen in told.values()}) == 1


ACCELERATE = (
    "launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision bf16 --dynamo_backend no"
)


def test_accelerate_launches_through_us(tmp_path: Path) -> None:
    (tmp_path / "dsl_accelerate.py").write_text(documented("accelerate"))
    words = [sys.executable, "dsl_accelerate.py", *ACCELERATE.split(), "--main_process_port", "0", "train.py"]
    result = call(*words, "told")
    assert result.returncode == 0, result.stderr
    assert_ours(tmp_path)
    assert json.loads((tmp_path / "told" / "1").read_text())["ACCELERATE_MIXED_PRECISION"] == "bf16"
    result = call(*words, "told", "1")
    assert result.returncode == 1
    assert result.stderr.count("train.py FAILED") == 1
    assert "ValueError: batch 3 holds NaN" in result.stderr


STANDS_IN = {
    "accelerate": ("accelerate", *ACCELERATE.split(), "--main_process_port", "0"),
    "fabric": ("fabric", "run", "--accelerator", "cpu", "--devices", "2", "--main-port", "0"),
    "torchrun": ("torchrun", "--nproc-per-node", "2"),
    "deepspeed": ("deepspeed", "--num_gpus", "2", "--no_local_rank"),
    "torch": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    "the script of torch": (str(BIN / "torchrun"), "--nproc-per-node", "2"),
    "torchx": (*["torchx", "run", "--scheduler", "local_cwd", "dist.ddp", "-j", "1x2", "--script"],),
}


@pytest.mark.parametrize("name", STANDS_IN)
def test_a_launcher_that_nobody_edits_launches_through_us(name: str, tmp_path: Path) -> None:
    after = ("--", "told") if name == "torchx" else ("told",)
    result = call(str(BIN / "dslrun"), "--stand-in", "--", *STANDS_IN[name], "train.py", *after)
    assert result.returncode == 0, result.stderr
    assert_ours(tmp_path)


def test_a_fabric_of_lightning_launches_through_us(tmp_path: Path) -> None:
    (tmp_path / "dsl_fabric.py").write_text(documented("Lightning"))
    options = ["--accelerator", "cpu", "--devices", "2", "--main-port", "0"]
    result = call(sys.executable, "dsl_fabric.py", "run", *options, "train.py", "told")
    assert result.returncode == 0, result.stderr
    assert_ours(tmp_path)


def test_torchx_launches_through_us(tmp_path: Path) -> None:
    recipe = documented("TorchX").replace("-j 1x2 --script train.py", "-j 1x2 --script train.py -- told")
    result = call("sh", "-ec", recipe)
    assert result.returncode == 0, result.stderr
    assert_ours(tmp_path)
