"""Our modules in the place of torch's: all public names of the installed torch are there, and work together."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.command import ran

import dsl.run

pytestmark = pytest.mark.torch

STAND_INS = {
    "torch.distributed.run": "dsl.run",
    "torch.distributed.launch": "dsl.launch",
    "torch.distributed.launcher.api": "dsl.functions.launcher",
    "torch.distributed.elastic.multiprocessing.errors": "dsl.functions.errors",
}


@pytest.mark.parametrize("theirs, ours", STAND_INS.items())
def test_every_public_name_of_torchs_module_is_in_ours(theirs: str, ours: str) -> None:
    torchs, module = importlib.import_module(theirs), importlib.import_module(ours)
    parts = {
        name
        for name, value in vars(torchs).items()
        if isinstance(value, ModuleType) and theirs in value.__name__
    }
    public = {name for name in vars(torchs) if not name.startswith("_")} - parts
    assert [name for name in sorted(public) if not hasattr(module, name)] == []


@pytest.mark.parametrize("ours", STAND_INS.values())
def test_a_name_that_torch_has_not_is_no_name_of_ours(ours: str) -> None:
    module = importlib.import_module(ours)
    for name in ("elastic_lunch", "_elastic_launch", "__path__"):
        assert not hasattr(module, name)


def test_the_modules_import_nothing_of_torch_by_themselves() -> None:
    code = f"import sys, {', '.join(STAND_INS.values())}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_without_torch_its_names_are_missing_and_ours_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsl.functions import errors

    monkeypatch.setattr(errors, "_copies", {})
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(AttributeError, match=r"'dsl.run' has no attribute 'Std', and there is no torch"):
        _ = dsl.run.Std
    assert callable(dsl.run.config_from_args)


IN_TORCHS_PLACE = """
import sys
import dsl.run, dsl.functions
sys.modules["torch.distributed.run"] = dsl.run
from torch.distributed.run import LaunchConfig, config_from_args, elastic_launch, parse_args, parse_min_max_nnodes
assert LaunchConfig is dsl.functions.LaunchConfig and elastic_launch is dsl.functions.elastic_launch
assert parse_min_max_nnodes("1:3") == (1, 3)
config, program, arguments = config_from_args(parse_args(sys.argv[1:]))
elastic_launch(config=config, entrypoint=program)(*arguments)
"""


@pytest.mark.parametrize(
    "options, shown",
    [
        (
            ["--nproc-per-node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
            ["0 3 []", "1 3 []", "2 3 []"],
        ),
        (["--nproc-per-node=2", "--local-ranks-filter=1"], ["1 2 []"]),
        (["--local-rank-arg=dash"], ["0 1 ['--local-rank=0']"]),
        (["-x", "RANK_0=a", "-x", "ZERO=b", "--wrap=0:env", "--give-up-on=3"], ["0 1 []"]),
    ],
)
def test_a_program_launches_by_the_config_of_a_command_line(
    options: list[str], shown: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:-1], flush=True)"
    )
    result = ran([sys.executable, "-c", IN_TORCHS_PLACE, *options, "train.py", "--config"], cwd=tmp_path)
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, shown), result.stderr


def test_the_config_has_what_torchs_config_has() -> None:
    from torch.distributed.run import config_from_args
    from torch.distributed.run import parse_args as parse

    words = [
        *("--nnodes=2", "--node-rank=1", "--nproc-per-node=2", "--master-addr=here", "--master-port=7"),
        "a.py",
        "x",
    ]
    ours, theirs = dsl.run.config_from_args(dsl.run.parse_args(words)), config_from_args(parse(words))
    assert ours[1:] == (sys.executable, ["-u", "a.py", "x"]) == theirs[1:]
    for name in (
        "min_nodes",
        "max_nodes",
        "nproc_per_node",
        "run_id",
        "role",
        "rdzv_backend",
        "max_restarts",
    ):
        assert getattr(ours[0], name) == getattr(theirs[0], name), name
    assert ours[0].rdzv_endpoint == theirs[0].rdzv_endpoint == "here:7"
    assert ours[0].rdzv_configs["rank"] == theirs[0].rdzv_configs["rank"] == 1


def test_a_default_that_a_program_sets_counts_and_the_command_line_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PET_RDZV_ID", "from the environment")
    monkeypatch.setenv("PET_ROLE", "trainer")
    parser = dsl.run.get_args_parser()
    parser.add_argument("--own", default="x")
    parser.set_defaults(nproc_per_node="3", max_restarts="4", rdzv_id="set", own="y")
    read = parser.parse_args(["a.py"])
    assert (read.nproc_per_node, read.max_restarts, read.rdzv_id, read.own) == ("3", 4, "set", "y")
    assert read.role == "trainer"
    assert parser.parse_args(["--nproc-per-node=2", "a.py"]).nproc_per_node == "2"
