"""The layers of the package, and start-up as a budget: what a launch may import (design, sections 2 and 7)."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.support.command import ran

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "dsl"
# Folders of modules that are no part of the package: circles are judged in them, too.
TOOLS = ("tests/kit", "benches", "scripts")

# Rooms from the ground up: a module imports from its own room and from those before it. Whatever a module names in
# its text counts, also inside a function and for the type checker alone.
ROOMS = (
    *("errors", "_record", "engine", "_own_process", "words"),
    *("elasticity", "model", "resources", "machine"),
    *("devices", "facts", "forkserver", "binding", "output", "rendezvous", "plan", "launchers", "control"),
    *("doctor", "conductor", "report", "evidence", "agent", "functions", "tune", "stand_in"),
    *("cli", "view"),
    *("__main__", "run", "launch", "runner"),
)
# The wing of what looks at jobs imports the launcher, which knows only its door. Completion names all commands.
DOOR = "dsl.view"
NAMES_ALL_COMMANDS = "dsl.cli.completion"
# The package's own face hands out the extension's names, and is imported by all.
FACE = "dsl"
MAY_IMPORT_EXTENSION = {
    "dsl.agent.warm",
    "dsl.view.warm",
    *("dsl", "dsl.machine", "dsl.control.hub", "dsl.view.views"),
    "dsl.view.report",
    "dsl.view.doctor",
    *(
        "dsl.forkserver.become",
        "dsl.forkserver.ending",
        "dsl.forkserver.freshness",
        "dsl.forkserver.server",
    ),
}
# Rooms that only compute: values in, values out. What they know of the machine they are given.
PURE_ROOMS = ("dsl.model", "dsl.plan", "dsl.launchers", "dsl.conductor")
PURE_MODULES = (
    "dsl.agent.joining",
    "dsl.output",
    *(f"dsl.doctor.{name}" for name in ("host_checks", "job_checks", "ring_checks")),
    "dsl.control.clock",
    "dsl.view.explain",
    "dsl.view.hang_watch",
    "dsl.elasticity.solver",
    *(f"dsl.tune.{name}" for name in (*("experiment", "config", "spaces", "steps", "search"),)),
    "dsl.rendezvous.delegate_messages",
    "dsl.rendezvous.settings",
)
IMPURE = {
    "os", "sys", "io", "time", "datetime", "socket", "_socket", "select", "subprocess", "multiprocessing", "shutil",
    "tempfile", "pathlib", "glob", "random", "secrets", "uuid", "signal", "threading", "asyncio", "logging", "mmap",
}  # fmt: skip
IMPURE_CALLS = {"open", "input", "print", "exec", "eval", "__import__"}
ENDS_PROCESSES = {"_exit", "fork", "forkpty", "abort", "execv", "execve", "execvp", "execvpe"}
# Modules of ours that a launch of two workers on one node may import.
MOST_MODULES = 37
# Lines of their sources. Each thousand costs a launch almost a millisecond. A slow machine loads `report.verdict`, too.
MOST_LOADED_LINES = 9_400
# Lines of the launcher, and of the wings that stand beside it. They shall fall.
MOST_LINES = {"dsl": 36_650, "dsl.view": 5_895, "dsl.tune": 3_700, "dsl.stand_in": 210}
# What it may import beside them, beyond what `import os, sys` does.
LIGHT = {"__future__", "gc", "select"}
TESTS = Path(__file__).resolve().parent / "unit"
# How often unit tests may touch names of the package that begin with an underscore.
MOST_PRIVATE_USES = 10


@cache
def modules(folder: Path = PACKAGE) -> dict[str, ast.Module]:
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent if folder == PACKAGE else ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return found


def type_only(tree: ast.Module) -> set[ast.AST]:
    """Statements that only a type checker sees."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    guarded = (node for node in blocks if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING")
    return {inner for node in guarded for statement in node.body for inner in ast.walk(statement)}


def imported(name: str, *, folder: Path = PACKAGE, at_run_time: bool = False) -> list[tuple[int, str]]:
    """Every module that a module of the folder imports, anywhere in its text: (line, module)."""
    found = []
    ignored = type_only(modules(folder)[name]) if at_run_time else set()
    for node in ast.walk(modules(folder)[name]):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute"
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            known = [one for one in inner if one in modules(folder) or one == "dsl._core"]
            found += [(node.lineno, one) for one in known] or [(node.lineno, base)]
    return found


def room_of(name: str) -> int:
    """Place of a module's room in `ROOMS`."""
    return ROOMS.index(name.split(".")[1])


def test_every_module_imports_only_from_its_room_and_those_before() -> None:
    """One direction. A package is a face that may hand out names of its own modules."""
    ours = [name for name in modules() if name != FACE]
    assert {name.split(".")[1] for name in ours} == set(ROOMS), "rooms that are missing here, or gone"
    wrong = [
        f"{name}:{line} imports {target}"
        for name in ours
        for line, target in imported(name)
        if target.startswith("dsl.") and target not in ("dsl._core", DOOR) and room_of(target) > room_of(name)
        if name != NAMES_ALL_COMMANDS
    ]
    assert not wrong


@pytest.mark.parametrize(
    "folder", [PACKAGE, *(ROOT / name for name in TOOLS)], ids=lambda folder: folder.name
)
def test_there_is_no_circle_of_imports_lazy_ones_counted(folder: Path) -> None:
    """What a module reaches never reaches it back. Scripts name the modules beside them without their folder."""
    known = modules(folder)
    arrows: dict[str, set[str]] = {}
    for name in known.keys() - {FACE}:
        targets = {target for _, target in imported(name, folder=folder)}
        if not (folder / "__init__.py").exists():
            targets |= {f"{name.rpartition('.')[0]}.{target}" for target in targets}
        arrows[name] = targets & known.keys() - {FACE, name}
    while leaves := {name for name, targets in arrows.items() if not targets}:
        arrows = {name: targets - leaves for name, targets in arrows.items() if name not in leaves}
    assert arrows == {}


def rust_modules(crate: Path) -> dict[tuple[str, ...], str]:
    """The files of a crate without tests, by their module paths, without comments."""
    found = {}
    for path in sorted((crate / "src").rglob("*.rs")):
        name = tuple(part for part in path.relative_to(crate / "src").with_suffix("").parts if part != "mod")
        if name[0] != "bin" and "tests" not in name and name != ("lib",):
            text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
            found[name] = re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", text)[0]
    return found


def rust_paths(text: str) -> list[list[str]]:
    """What a file names: ``crate::a::{b, c::d}`` is two paths."""

    def spread(use: str) -> list[str]:
        head, brace, inner = use.partition("{")
        if not brace:
            return [use]
        parts, depth = [""], 0
        for char in inner.rpartition("}")[0]:
            depth += (char == "{") - (char == "}")
            if char == "," and not depth:
                parts.append("")
            else:
                parts[-1] += char
        return [head + one for part in parts for one in spread(part.strip())]

    uses = [one for use in re.findall(r"\buse ([^;]+);", text) for one in spread(use)]
    inline = re.findall(r"\b\w+(?:::\w+)+", re.sub(r"\buse [^;]+;", "", text))
    return [one.split(" as ")[0].strip().split("::") for one in uses + inline]


@pytest.mark.parametrize("crate", ["bindings", "control", "engine", "testkit"])
def test_there_is_no_circle_of_modules_in_rust(crate: str) -> None:
    """A module is a file. A file and the folder of its inner modules are one: these may name each other."""
    texts = rust_modules(PACKAGE.parent.parent / "rust" / crate)
    arrows: dict[tuple[str, ...], set[tuple[str, ...]]] = {name: set() for name in texts}
    for name, text in texts.items():
        for first, *rest in rust_paths(text):
            base: tuple[str, ...]
            if first == "crate":
                base = ()
            elif first == "super":
                ups = next((at for at, word in enumerate(rest) if word != "super"), len(rest))
                base, rest = name[: -1 - ups], rest[ups:]  # noqa: PLW2901  what follows the module above
            else:
                base, rest = name, [first, *rest]  # noqa: PLW2901  an inner module, or something else
            target = (*base, *rest)
            while target and target not in texts:
                target = target[:-1]
            common = min(len(target), len(name))
            if target[:common] != name[:common]:
                arrows[name].add(target)
    assert any(arrows.values())
    while leaves := {name for name, targets in arrows.items() if not targets & set(arrows)}:
        arrows = {name: targets for name, targets in arrows.items() if name not in leaves}
    assert arrows == {}


def test_the_name_of_a_class_stands_in_one_module() -> None:
    """One meaning a word: who searches for a class finds one."""
    names = [
        node.name
        for tree in modules().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(names) == sorted(set(names))


def pure_modules() -> list[str]:
    return [name for name in modules() if name.startswith(PURE_ROOMS) or name in PURE_MODULES]


@pytest.mark.parametrize("name", pure_modules())
def test_what_only_computes_touches_no_clock_file_socket_process_or_environment(name: str) -> None:
    tree = modules()[name]
    found = [
        f"{line}: import {target}"
        for line, target in imported(name, at_run_time=True)
        if target.split(".")[0] in IMPURE
    ]
    found += [
        f"{node.lineno}: {node.func.id}()"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS
    ]
    assert found == []


def test_only_the_commands_fork_or_end_their_process() -> None:
    """Whoever runs an agent elsewhere gets its outcome. Delegates and fork servers are processes of their own."""
    users = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ENDS_PROCESSES
    }
    servers = {name for name in users if name.startswith("dsl.forkserver.")}
    stand_in = {"dsl.stand_in", "dsl.stand_in.sitecustomize"}  # they become another program
    commands = {"dsl.agent.session", "dsl.agent.background", "dsl.rendezvous.delegate"}
    assert users - servers == {*commands, *stand_in, "dsl.doctor.ring"}


def test_one_function_makes_the_plans_of_ranks_and_one_those_of_what_reaches_hosts() -> None:
    makers = [
        (name, function.name)
        for name, tree in modules().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "WorkerPlan"
    ]
    # Programs that reach hosts are no ranks of a job.
    assert makers == [
        ("dsl.launchers.base", "plan_starts"),
        ("dsl.plan.node", "_workers"),
    ]


def test_one_function_starts_attempts() -> None:
    starters = [
        (name, function.name)
        for name, tree in modules().items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func).endswith("supervisor.start")
    ]
    # An experiment of a tuning is a command of its own, and its agent starts its attempts.
    assert sorted({*starters}) == [("dsl.agent.agent", "_start"), ("dsl.tune.run", "__init__")]


def records(name: str) -> list[ast.ClassDef]:
    return [
        node
        for node in ast.walk(modules()[name])
        if isinstance(node, ast.ClassDef)
        and any(isinstance(mark, ast.Name) and mark.id == "record" for mark in node.decorator_list)
    ]


# What no record may hold that reaches a plan: things that act, and things that live.
LIVE = re.compile(
    r"\b(Callable|Iterator|IO|TextIO|BinaryIO|Any|object|NodeFacts|Console|Names|Files|Cpus|DeviceFacts|Ports|LogsPlugin"
    r"|Supervisor|Guard|Rendezvous|Planner|Agent)\b"
)


@pytest.mark.parametrize(
    "name",
    [name for name in modules() if name.startswith(("dsl.model", "dsl.plan", "dsl.binding", "dsl.output"))],
)
def test_no_record_on_the_way_to_the_plan_holds_a_callable_or_a_live_object(name: str) -> None:
    found = [
        f"{one.name}.{field.target.id}: {ast.unparse(field.annotation)}"
        for one in records(name)
        for field in one.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and LIVE.search(ast.unparse(field.annotation))
    ]
    assert found == []


def test_nothing_below_the_command_line_imports_it() -> None:
    users = [name for name in modules() if any(target.startswith("dsl.cli") for _, target in imported(name))]
    above = ("dsl.cli", DOOR, "dsl.run", "dsl.launch", "dsl.__main__")
    assert [name for name in users if not name.startswith(above)] == []


def test_the_tuner_has_one_door() -> None:
    users = {name for name in modules() for _, found in imported(name) if found.startswith("dsl.tune.")}
    assert {name for name in users if not name.startswith("dsl.tune.")} == {"dsl.cli.deepspeed"}
    doors = {found for _, found in imported("dsl.cli.deepspeed") if found.startswith("dsl.tune.")}
    assert doors == {"dsl.tune.run"}


def test_only_the_package_itself_and_the_spec_talk_to_the_extension() -> None:
    users = {name for name in modules() if any(target == "dsl._core" for _, target in imported(name))}
    assert users == MAY_IMPORT_EXTENSION


def test_the_package_needs_only_the_standard_library_and_its_two_dependencies() -> None:
    optional = {"psutil", "pynvml", "torch", "matplotlib", "rich", "optuna", "textual", "prometheus_client"}
    names = {target.split(".")[0] for name in modules() for _, target in imported(name, at_run_time=True)}
    assert names - {"dsl"} - optional <= set(sys.stdlib_module_names)


def test_only_the_delegate_and_a_worker_of_ours_import_torch() -> None:
    """Never the process that supervises, which the modules up to these do not reach."""
    users = {
        name for name in modules() if any(target.split(".")[0] == "torch" for _, target in imported(name))
    }
    assert users <= {"dsl.doctor.ring", *[f"dsl.rendezvous.{name}" for name in ("torch_side", "delegate")]}
    assert not [name for name in modules() if "dsl.doctor.ring" in {target for _, target in imported(name)}]
    inner = {"torch_side", "refusals", "rounds", "claim", "delegate"}
    askers = {
        name
        for name in modules()
        if any(target.removeprefix("dsl.rendezvous.") in inner for _, target in imported(name))
    }
    assert askers <= {f"dsl.rendezvous.{name}" for name in inner}


@cache
def private_names() -> set[str]:
    """Names of the package that begin with one underscore, without those of modules."""
    nodes = [node for tree in modules().values() for node in ast.walk(tree)]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    of_modules = {part for name in modules() for part in name.split(".")}
    return {name for name in names if re.match(r"_[^_]", name)} - of_modules


def private_uses(test: ast.Module) -> list[str]:
    """Private names of the package that a test imports, reads, sets or replaces."""
    nodes = list(ast.walk(test))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    used = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsl"):
            used += [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "patch", "object")):
            words = [one.value for one in node.args[:2] if isinstance(one, ast.Constant)]
            used += [word.rpartition(".")[2] for word in words if isinstance(word, str)]
    return sorted(name for name in used if name in private_names() - own)


def test_unit_tests_touch_few_private_names() -> None:
    """Tests of what others can see stay true when the inside changes."""
    found = {
        str(path.relative_to(TESTS)): uses
        for path in sorted(TESTS.rglob("test_*.py"))
        if (uses := private_uses(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert sum(map(len, found.values())) <= MOST_PRIVATE_USES, found


def imports_of(code: str, *argv: str) -> set[str]:
    """Names of all modules that a fresh interpreter imports while it runs the code, also after a fork."""
    result = ran([sys.executable, "-I", "-X", "importtime", "-c", code, *argv])
    assert result.returncode == 0, result.stderr
    return set(re.findall(r"^import time:[\s\d]+\|[\s\d]+\|\s+(\S+)$", result.stderr, re.MULTILINE))


def brought_by(code: str, *argv: str) -> set[str]:
    """The same without what every program has that asks for its arguments and its environment."""
    return imports_of(code, *argv) - imports_of("import os, sys")


def test_the_launcher_and_its_wings_do_not_grow() -> None:
    lines = dict.fromkeys(MOST_LINES, 0)
    for path in PACKAGE.rglob("*.py"):
        wing = ".".join(path.relative_to(PACKAGE.parent).parts[:2])
        lines[wing if wing in lines else "dsl"] += len(path.read_text(encoding="utf-8").splitlines())
    assert {name: count for name, count in lines.items() if count > MOST_LINES[name]} == {}


@pytest.mark.guarantee("G7")
@pytest.mark.engine
@pytest.mark.proc
@pytest.mark.parametrize(
    "command, options",
    [
        ("dsl.__main__ import main", "--num_gpus 2 --no_python"),
        ("dsl.run import command as main", "--nproc-per-node=2 --no-python"),
        ("dsl.run import command as main", "--standalone --nproc-per-node=2 --no-python"),
    ],
)
def test_a_launch_on_one_node_imports_few_modules_and_light_ones(command: str, options: str) -> None:
    """From the command line to the exit code, in the guard and in the agent."""
    no_settling = "from dsl.agent import agent; agent.SETTLE_S = 60.0"  # for a slow machine
    code = f"import sys; {no_settling}; from {command}; sys.exit(main())"
    names = brought_by(code, *options.split(), "/bin/true")
    ours = {name for name in names if name.split(".")[0] == "dsl"}
    assert len(ours) <= MOST_MODULES, sorted(ours)
    files = [ROOT / "python" / name.replace(".", "/") for name in ours]
    sources = [
        path for one in files for path in (one.with_suffix(".py"), one / "__init__.py") if path.exists()
    ]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    assert lines <= MOST_LOADED_LINES
    assert names - ours <= LIGHT
    assert {name for name in ours if name.startswith(f"{DOOR}.")} == set()


@pytest.mark.parametrize(
    "code", ["import dsl", "from dsl import *", "import dsl.runner", "import dsl.elasticity"]
)
def test_the_library_imports_no_device_or_tensor_library(code: str) -> None:
    names = imports_of(code)
    assert "dsl" in names
    assert names & {"torch", "psutil", "pynvml", "numpy"} == set()
