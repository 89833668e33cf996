"""The layers of the package, and start-up as a budget: what a launch may import (design, sections 2 and 7)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "python" / "dsl"

# A module may import from its own line or from a line above it.
LAYERS = (
    ("errors", "model", "signals", "_record", "_own_process"),
    ("plan",),
    ("launchers",),
    ("excerpt",),
    ("report", "evidence"),
    ("spec",),
    ("attempts", "elastic"),
    ("narrator",),
    ("app",),
    ("cli",),
    ("run", "launch", "__main__"),
    ("runner",),  # the names users import, taken from everywhere
)
# Siblings: none of them may import another.
SIBLINGS = ("plan", "launchers", "report")
# The package's own face hands out names of these layers, and is imported by all of them.
FACE = "dsl"
MAY_IMPORT_EXTENSION = {"dsl", "dsl.spec"}
# All that a launch on one node may import beyond what os and sys bring.
LAUNCH_MODULES = {
    "__future__",
    "dsl.cli.options",
    "dsl.cli.options_deepspeed",
    "dsl.cli.reader",
    "dsl.cli.requests",
    "dsl.report",
    "dsl.report.evidence",
    "_socket",
    "operator",  # PyO3 asks it for the length of what it iterates
    "_operator",
    "errno",
    "gc",
    "dsl",
    "dsl._core",
    "dsl._own_process",
    "dsl._record",
    "dsl.__main__",
    "dsl.app",
    "dsl.attempts",
    "dsl.cli",
    "dsl.cli.command",
    "dsl.cli.deepspeed",
    "dsl.errors",
    "dsl.devices",
    "dsl.machine",
    "dsl.model",
    "dsl.model.node",
    "dsl.model.request",
    "dsl.output",
    "dsl.resources",
    "dsl.report.narrator",
    "dsl.plan",
    "dsl.plan.build",
    "dsl.devices.select",
    "dsl.plan.environ",
    "dsl.resources.filters",
    "dsl.machine.host",
    "dsl.output.routes",
    "dsl.machine.ports",
    "dsl.plan.program",
    "dsl.machine.topology",
    "dsl.resources.world",
    "dsl.report.verdict",
    "dsl.signals",
    "dsl.spec",
}
HEAVY = {
    *("torch", "psutil", "pynvml", "numpy", "typing", "dataclasses", "json", "logging", "subprocess"),
    *("argparse", "re", "enum", "gettext", "locale"),
}


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["dsl", *path.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


def type_only(tree: ast.Module) -> set[ast.AST]:
    """Statements that only a type checker sees."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    guarded = (node for node in blocks if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    return {inner for node in guarded for statement in node.body for inner in ast.walk(statement)}


def imported(name: str, *, at_run_time: bool = False) -> list[tuple[int, str]]:
    """Every module that a module of the package imports, anywhere in its text: (line, module)."""
    found = []
    ignored = type_only(modules()[name]) if at_run_time else set()
    for node in ast.walk(modules()[name]):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            known = [one for one in inner if one in modules() or one == "dsl._core"]
            found += [(node.lineno, one) for one in known] or [(node.lineno, base)]
    return found


def layer(name: str) -> tuple[int, str]:
    """Rank and name of the layer a module belongs to."""
    part = name.split(".")[1]
    for rank, members in enumerate(LAYERS):
        if part in members:
            return rank, part
    pytest.fail(f"{name} belongs to no layer: add it to LAYERS")


def test_every_module_imports_only_from_layers_below_it() -> None:
    wrong = []
    for name in modules():
        if name == FACE:
            continue
        rank, part = layer(name)
        for line, target in imported(name):
            if not target.startswith("dsl.") or target == "dsl._core":
                continue
            target_rank, target_part = layer(target)
            siblings = part in SIBLINGS and target_part in SIBLINGS and part != target_part
            if target_rank > rank or siblings:
                wrong.append(f"{name}:{line} imports {target}")
    assert not wrong


def test_nothing_below_the_command_line_imports_it() -> None:
    users = [name for name in modules() if any(target.startswith("dsl.cli") for _, target in imported(name))]
    assert [
        name for name in users if not name.startswith(("dsl.cli", "dsl.run", "dsl.launch", "dsl.__main__"))
    ] == []


def test_only_the_package_itself_and_the_spec_talk_to_the_extension() -> None:
    users = {name for name in modules() if any(target == "dsl._core" for _, target in imported(name))}
    assert users == MAY_IMPORT_EXTENSION


def test_the_package_needs_only_the_standard_library_and_its_two_dependencies() -> None:
    optional = {"psutil", "pynvml"}
    names = {target.split(".")[0] for name in modules() for _, target in imported(name, at_run_time=True)}
    assert names - {"dsl"} - optional <= set(sys.stdlib_module_names)


def imports_of(code: str, *argv: str) -> set[str]:
    """Names of all modules that a fresh interpreter imports while it runs the code, also after a fork."""
    command = [sys.executable, "-I", "-X", "importtime", "-c", code, *argv]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 0, result.stderr
    return set(re.findall(r"^import time:[\s\d]+\|[\s\d]+\|\s+(\S+)$", result.stderr, re.MULTILINE))


def assert_is_allowed(names: set[str]) -> None:
    extra = names - imports_of("import os, sys")
    assert extra & HEAVY == set()
    assert extra <= LAUNCH_MODULES


def test_importing_the_command_line_brings_no_other_module() -> None:
    names = imports_of("import dsl.cli.deepspeed")
    assert "dsl.cli.deepspeed" in names
    assert_is_allowed(names)


@pytest.mark.engine
@pytest.mark.proc
def test_a_launch_on_one_node_brings_no_other_module() -> None:
    """G7: from the command line to the exit code, in the guard and in the agent."""
    code = "import sys; from dsl.__main__ import main; sys.exit(main())"
    names = imports_of(code, "--num_gpus", "2", "--no_python", "/bin/true")
    assert {"dsl", "dsl._core"} <= names
    assert_is_allowed(names)


@pytest.mark.proc
def test_a_launch_of_dslrun_imports_nothing_heavy() -> None:
    code = "import sys; from dsl.run import main; sys.exit(main())"
    names = imports_of(code, "--nproc-per-node=2", "--no-python", "/bin/true")
    assert {"dsl.cli.torchrun", "dsl.report.verdict"} <= names
    assert names & HEAVY == set()


@pytest.mark.parametrize("code", ["import dsl", "from dsl import *", "import dsl.runner"])
def test_the_library_imports_no_device_or_tensor_library(code: str) -> None:
    names = imports_of(code)
    assert "dsl" in names
    assert names & {"torch", "psutil", "pynvml", "numpy"} == set()
