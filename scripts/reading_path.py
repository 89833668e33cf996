"""Write the first chapter of docs/design.md: the modules of a launch, in the order of their first calls.

`tests/test_reading_path.py` checks that the chapter is what a launch does.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "dsl"
PAGE = ROOT / "docs" / "design.md"
BEGIN, END = "<!-- made by scripts/reading_path.py -->", "<!-- end of what is made -->"
CHAPTER = re.compile(f"{BEGIN}\n.*?{END}\n", re.DOTALL)

# Each process of a launch writes the functions of dsl by which it first enters a module.
TRACE = """
import inspect, os, sys
first = {}
def imports(frame):
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return frame is not None and frame.f_globals["__name__"] != "__main__"
def note(frame, event, _):
    name, code = frame.f_globals.get("__name__", ""), frame.f_code
    is_new = name.startswith("dsl.") and name not in first and code.co_name[0] != "<"
    if event == "call" and is_new and code.co_flags & inspect.CO_OPTIMIZED and not imports(frame):
        owner = [f"{type(frame.f_locals['self']).__name__}."] if "self" in frame.f_locals else []
        first[name] = "".join([*owner, code.co_name])
leave = os._exit
def end(code):
    sys.setprofile(None)
    loaded = [name for name in sys.modules if name.startswith("dsl.")]
    with open(out, "a") as file:
        print((list(first.items()), loaded), file=file)
    leave(code)
os._exit = end
from dsl import _own_process
from dsl.agent import agent
agent.SETTLE_S = 60.0
_own_process._is_traced = lambda: False
_own_process.keep = lambda names: None  # it imports what has no compiled file
from dsl.run import command
out = sys.argv.pop(1)
sys.setprofile(note)
end(command())
"""

ONLY_IF = {
    "elasticity": "a job has a config with DeepSpeed's `elasticity` section",
    "forkserver": "workers are forked: `--start-method forkserver` or `warm`",
    "binding": "workers are bound to CPUs",
    "launchers": "dsl reaches other hosts",
    "control": "a job has several nodes",
    "conductor": "a job has several nodes, or starts again",
    "rendezvous": "the nodes of a job find each other",
    "evidence": "a worker has failed",
    "doctor": "you type `--doctor`, or the job has several hosts",
    "functions": "workers are launched from Python",
    "tune": "you type `--autotuning`",
    "stand_in": "you type `--stand-in`",
    "view": "somebody looks at a job, or at a machine",
}
"""Rooms that a launch hardly enters, with what makes it enter them."""


def launch() -> tuple[dict[str, str], set[str]]:
    """The modules that a launch calls, with the first function of each; and the modules that it loads."""
    with NamedTemporaryFile("r") as file:
        words = [sys.executable, "-c", TRACE, file.name, "--nproc-per-node=2", "--no-python", "true"]
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        traces = [ast.literal_eval(line) for line in file]
    calls: dict[str, str] = {}
    for called, _ in sorted(traces, key=lambda trace: -len(trace[0])):  # the agent does more than the guard
        for name, function in called:
            calls.setdefault(name, function)
    return calls, {name for _, loaded in traces for name in loaded}


def chapter() -> str:
    """The chapter as it has to be."""
    calls, loaded = launch()
    rows = [
        f"| `{name.removeprefix('dsl.')}:{function}` | {_first_line(name)} |"
        for name, function in calls.items()
    ]
    rest = sorted(loaded - set(calls) - {"dsl._core"})
    rest = [f"`{name.removeprefix('dsl.')}`" for name in rest if not _is_package(name)]
    rooms = [f"* `{name}/`: {reason}" for name, reason in ONLY_IF.items()]
    return "\n".join(
        [
            BEGIN,
            "",
            "The modules that `dslrun --nproc-per-node 2 SCRIPT` calls, in the order of their first calls.",
            "",
            "| module:first call | what the module is for |",
            "| --- | --- |",
            *rows,
            "",
            f"Loaded, too, but only for what they declare: {', '.join(rest)}.",
            "",
            "Read these rooms only if",
            "",
            *rooms,
            "",
            END,
            "",
        ]
    )


def _is_package(name: str) -> bool:
    return (PACKAGE.parent / name.replace(".", "/")).is_dir()


def _first_line(name: str) -> str:
    path = PACKAGE.parent / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0].replace("``", "`")


def main() -> None:
    """Write the chapter."""
    text = PAGE.read_text(encoding="utf-8")
    made = chapter()
    PAGE.write_text(CHAPTER.sub(lambda _: made, text), encoding="utf-8")


if __name__ == "__main__":
    main()
