"""A message calls the command and its options as the command at hand does."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.launches import without_engine
from tests.unit.cli.test_torchrun import BAD_INPUT

from dsl.cli import torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
UNDERSCORED = re.compile(r"--[a-z]+(?:_[a-z]+)+")
# Modules that only `dsl` gets to, and what tells both commands of each other's options.
OWN_WORDS = {
    *(
        "cli/options_deepspeed.py",
        "cli/deepspeed.py",
        "elasticity/solver.py",
        "plan/hosts.py",
        "plan/listed.py",
        "plan/remote.py",
    ),
    *(
        "runner.py",
        "conductor/attempts.py",
        "conductor/terms.py",
        "agent/head.py",
        "cli/ssh.py",
        "view/report.py",
    ),
}
# Functions elsewhere that only `dsl` gets to.
OWN_FUNCTIONS = {
    *(("plan/job.py", name) for name in ("_with_hosts", "_check_host_options", "_check_each_rank_log")),
    *(("plan/job.py", name) for name in ("_unused_host_options", "_unused_ways")),
    ("conductor/attempts.py", "place_of_rank_0"),  # of dsl alone: dslrun never lacks an address
    # It is one of the two ways to tell a script its local rank, in both commands.
    ("cli/options_torch.py", ""),
    # Examples of each command, and what it has in place of options of the other.
    ("cli/parser.py", ""),
    *(("evidence/reports.py", name) for name in ("", "_local_rank")),
    # Arguments of scripts.
    ("tune/run.py", ""),
    ("tune/setup.py", ""),
    *(("tune/config.py", name) for name in ("", "find_config")),
    # A conflict of options names those that were given.
    ("binding/__init__.py", "_bindings_asked_for"),
    ("binding/rules.py", "bind_workers"),
}


def _texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Every text of a module with the outermost function that it stands in, documentation left out."""
    for top in tree.body:
        name = top.name if isinstance(top, ast.FunctionDef) else ""
        documented = [
            node
            for node in ast.walk(top)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ]
        docs = {id(node.value) for node in documented}
        for node in ast.walk(top):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                yield name, node.value


def test_no_text_that_both_commands_show_spells_an_option_as_only_one_of_them_does() -> None:
    package = ROOT / "python" / "dsl"
    found = set()
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name in OWN_WORDS:
            continue
        for function, text in _texts(ast.parse(path.read_text(encoding="utf-8"))):
            if UNDERSCORED.search(text):
                found.add((name, function))
    assert found - OWN_FUNCTIONS == set()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory with a script, and no devices."""
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("dsl.devices.offered.DeviceFacts.cuda_count", 0)

    def run_job(*_: object) -> int:
        return 7

    without_engine(monkeypatch, run_job)
    return tmp_path


MORE = [
    "sh",
    "-x",
    "-- -x",
    "--no-python .",
    "--bind auto --numa-binding node t.py",
    "--bind auto --bind-strict --nproc-per-node 4000 t.py",
    "--numa-binding exclusive --nproc-per-node 3 t.py",
    "--mem-policy bind t.py",
    "--logs-specs nothing t.py",
    "--logs-specs nothing --dry-run t.py",
    "--log-max-size 1M --preempt-grace 3 t.py",
    "--nnodes 1:2 --rdzv-backend c10d --dry-run t.py",
    "--nnodes 2 --standalone --node-rank 2 --master-port 3 t.py",
    "--bind-strict t.py",
    "t.py --nnodes 2",
    "--nnodes 2 --master-port 0 t.py",
    "--nnodes 2 --rdzv-endpoint h:0 t.py",
    "--nprocs 3 t.py",
]


@pytest.mark.parametrize("line", [*[line for line, _, _ in BAD_INPUT], *MORE])
@pytest.mark.parametrize("level", ["info", "debug"])
def test_what_dslrun_says_is_in_its_own_words(
    line: str, level: str, machine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PET_LOG_LEVEL", level)
    with contextlib.suppress(SystemExit):
        torchrun.main(line.split())
    said = capfd.readouterr()
    for text in said.err.splitlines():
        assert text.startswith(("dslrun: ", "usage: dslrun "))
        own = text.replace(line, "").replace(sys.prefix, "")
        assert not UNDERSCORED.search(re.sub(r"argument [^:]*:", "", own)), text
        assert not re.search(r"\bdsl\b", own.replace(str(machine), "")) or "only dsl has it" in own, text
