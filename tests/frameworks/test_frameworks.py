"""Training scripts as their authors write them learn under our commands what they learn under those they were written for."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.command import ran

BIN = Path(sysconfig.get_path("scripts"))
SCRIPTS = Path(__file__).resolve().parent / "scripts"
PACKAGES = ("torch", "lightning", "accelerate", "transformers", "deepspeed")

TORCHRUN = (str(BIN / "torchrun"), "--nproc-per-node", "2")
DSLRUN = (str(BIN / "dslrun"), "--nproc-per-node", "2")
FORKED = ("--start-method", "forkserver")

# What each script must have made of its environment, whoever started it.
CASES: dict[str, dict[str, object]] = {
    "ddp.py": {"elastic": True, "attempt": "0"},
    "lightning_fit.py": {"environment": "TorchElasticEnvironment"},
    "accelerate_loop.py": {"kind": "DistributedType.MULTI_CPU"},
    "hf_trainer.py": {"mode": "ParallelMode.DISTRIBUTED"},
    "deepspeed_zero.py": {},
}

# A framework takes many seconds to import on a cold disk, and DeepSpeed compiles an operation in the first job.
JOB_TIMEOUT_S = 300
pytestmark = [pytest.mark.timeout(2 * JOB_TIMEOUT_S + 30)]


class Answer(NamedTuple):
    """What one rank says of its training."""

    losses: list[float]
    """One for each step."""
    shared: list[float]
    """Made from what the ranks sent each other: weights at the end, or gathered losses."""
    saw: dict[str, object]
    """The place in the job that the framework took from its environment."""


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(
            f"{', '.join(missing)} cannot be imported: start these tests with scripts/test frameworks"
        )


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where torch keeps what DeepSpeed compiles: in the user's cache a killed job would leave a lock for ever."""
    return tmp_path_factory.mktemp("extensions")


@pytest.fixture(autouse=True)
def temp_dir(monkeypatch: pytest.MonkeyPatch, clean_environ: str, tmp_path: Path, extensions: Path) -> Path:
    """The jobs' environment: on the CPU, without network; the result is their directory for temporary files."""
    del clean_environ  # it would drop variables again
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    return folder


@pytest.fixture
def master_port() -> Iterator[str]:
    """A free port. DeepSpeed leaves shared memory behind that is named after it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    yield str(port)
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        path.unlink()


def test_the_frameworks_stay_out_of_the_process_that_runs_the_tests() -> None:
    """Their threads and seeds would change what other tests measure."""
    assert not {"torch", "deepspeed", "transformers"}.intersection(sys.modules)


def run(
    command: tuple[str, ...], script: str, out: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    out.mkdir()
    return ran(
        [*command, SCRIPTS / script, "--out", out, *arguments],
        stdin=subprocess.DEVNULL,
        timeout_s=JOB_TIMEOUT_S,
    )


def train(command: tuple[str, ...], script: str, out: Path, *arguments: str) -> list[Answer]:
    """The answers of both ranks of a job that ended well, and did what it was asked for."""
    result = run(command, script, out, *arguments)
    assert result.returncode == 0, result.stderr
    assert "fork server" not in result.stderr
    return [Answer(**json.loads((out / f"{rank}.json").read_text(encoding="utf-8"))) for rank in (0, 1)]


def assert_same(theirs: list[Answer], ours: list[Answer]) -> None:
    for one, other in zip(theirs, ours, strict=True):
        assert other.saw == one.saw
        assert len(other.losses) >= 4
        assert other.losses == pytest.approx(one.losses, rel=1e-6)
        assert other.shared == pytest.approx(one.shared, rel=1e-6)


@pytest.mark.guarantee("G1", "G5")
@pytest.mark.parametrize("script", CASES)
def test_a_script_learns_the_same_as_under_torchrun(script: str, tmp_path: Path, temp_dir: Path) -> None:
    """Nothing of ours stays in the directory for temporary files. Forked or executed, it is the same."""
    theirs = train(TORCHRUN, script, tmp_path / "theirs")
    ours = train(DSLRUN, script, tmp_path / "ours")
    assert_same(theirs, ours)
    assert_same(ours, train((*DSLRUN, *FORKED), script, tmp_path / "forked"))
    expected = CASES[script] | {"world_size": 2}
    assert [{name: answer.saw.get(name) for name in expected} for answer in ours] == [expected, expected]
    assert not list(temp_dir.glob("dsl*"))


def test_a_job_that_is_started_again_learns_the_same_as_one_that_never_failed(tmp_path: Path) -> None:
    """Workers that meet again find nothing of those that are gone.

    torchrun is no measure here: its store outlives the attempt, so that the next workers over gloo find the
    addresses of the dead ones and fail or hang (with 2.13 and 2.15 this script ended well in 5 runs of 16).
    """
    whole = train(DSLRUN, "ddp.py", tmp_path / "whole")
    for name, way in (("again", ()), ("forked", FORKED)):
        command = (*DSLRUN, *way, "--max-restarts", "1")
        again = train(command, "ddp.py", tmp_path / name, "--fail-at-step", "2")
        assert [answer.saw["attempt"] for answer in again] == ["1", "1"]
        assert [answer.losses for answer in again] == [
            pytest.approx(answer.losses, rel=1e-6) for answer in whole
        ]


def test_a_deepspeed_script_learns_the_same_as_under_deepspeed(master_port: str, tmp_path: Path) -> None:
    """Both take the same port, one right after the other."""
    options = ("--num_gpus", "2", "--master_port", master_port)
    theirs = train((str(BIN / "deepspeed"), *options), "deepspeed_zero.py", tmp_path / "theirs")
    ours = train((str(BIN / "dsl"), *options), "deepspeed_zero.py", tmp_path / "ours")
    assert_same(theirs, ours)
    forked = train((str(BIN / "dsl"), *options, *FORKED), "deepspeed_zero.py", tmp_path / "forked")
    assert_same(ours, forked)
    assert [answer.saw["local_rank_argument"] for answer in ours] == [0, 1]


@pytest.mark.guarantee("G3")
def test_a_recorded_error_lies_where_the_worker_was_told(tmp_path: Path) -> None:
    """The file outlives the job, and holds what it holds under torchrun."""
    told = []
    for name, command in (("theirs", TORCHRUN), ("ours", DSLRUN), ("forked", (*DSLRUN, *FORKED))):
        out = tmp_path / name
        result = run(command, "record_failure.py", out)
        assert result.returncode == 1, result.stderr
        files = [Path((out / f"error_file_{rank}").read_text(encoding="utf-8")) for rank in (0, 1)]
        assert not files[0].exists()
        message = json.loads(files[1].read_text(encoding="utf-8"))["message"]
        told.append((message["message"], message["extraInfo"]["py_callstack"]))
    theirs, ours, forked = told
    assert ours == theirs
    assert forked == theirs
    assert ours[0] == "ValueError: batch 3 of rank 1 holds NaN"


def test_a_deepspeed_job_is_tuned_and_then_trains_with_the_best_config(tmp_path: Path) -> None:
    """Its engine writes the metrics and ends the script by itself; what the user has set of ZeRO stays."""
    section = {"end_profile_step": 4, "num_tuning_micro_batch_sizes": 1, "repeats": 0}
    config = {
        "train_micro_batch_size_per_gpu": [2, 8],
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1234},
        "autotuning": {"enabled": True, **section},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "out").mkdir()
    line = [
        *(str(BIN / "dsl"), "--num_gpus", "1", "--autotuning", "run", str(SCRIPTS / "tuned_zero.py")),
        *("--out", "out", "--deepspeed_config", "config.json"),
    ]
    result = ran(line, cwd=tmp_path, timeout_s=2 * JOB_TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    results = tmp_path / "autotuning_results"
    known = {path.parent.name: json.loads(path.read_text()) for path in results.glob("*/result.json")}
    assert {one["outcome"] for one in known.values()} == {"ok"}
    assert known["profile_model_info"]["metrics"]["num_params"] == 8 * 16 + 16 + 16 + 1
    best = json.loads((results / "ds_config_optimal.json").read_text())
    assert "autotuning" not in best
    answer = json.loads((tmp_path / "out" / "0.json").read_text())
    assert answer["size"] == best["train_micro_batch_size_per_gpu"] in (2, 8)
    assert answer["batch"] == best["train_batch_size"]
    assert (answer["stage"], answer["bucket"]) == (1, 1234)
    assert len(answer["losses"]) == 8 * best.get("gradient_accumulation_steps", 1)
    # It trains as fast as its experiment ran. Four times as slow is the config that was not chosen.
    summary = json.loads((results / "summary.json").read_text())
    told = {one["name"]: one["value"] for one in summary["trials"] if one["kind"] == "run"}
    assert summary["best"]["value"] == max(told.values()) > 2 * min(told.values())
    assert 0.5 < answer["samples_per_s"] / summary["best"]["value"] < 2
