"""Debuggers, profilers and tracers that run a command, and follow what it starts: `python -m TOOL -m dsl.run`."""

from __future__ import annotations

import contextlib
import json
import os
import pstats
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.kit.debugger import ANSWER_S, Debugger
from tests.kit.waiting import until
from tests.support.command import ran

pytestmark = [pytest.mark.proc, pytest.mark.timeout(90)]

SCRIPT = """\
import os, sys
def work():
    return [os.environ["RANK"], *sys.argv[1:]]
print("worker", *work(), flush=True)
"""
LINE = 3
COMMANDS = {
    "dsl": ["--num_gpus=2", "--no_local_rank"],
    "dsl.run": ["--nproc-per-node=2"],
    "dsl.launch": ["--nproc-per-node=2", "--use-env"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(SCRIPT)
    return tmp_path


def words_of(command: str, *, is_module: bool, options: Sequence[str] = ()) -> list[str]:
    program = ["--module", "package.train"] if is_module else ["train.py"]
    return [command, *COMMANDS[command], *options, *program, "--lr", "2"]


def run(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return ran([sys.executable, *words], cwd=folder, environ=env or {})


def said(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("worker"))


BOTH = ["worker 0 --lr 2", "worker 1 --lr 2"]


@pytest.mark.needs_package("debugpy")
@pytest.mark.parametrize(
    "command, is_module", [("dsl.run", False), ("dsl.run", True), ("dsl.launch", False), ("dsl", True)]
)
def test_an_editor_that_runs_a_command_stops_each_rank_at_a_breakpoint(
    command: str, *, is_module: bool, folder: Path
) -> None:
    """What an editor does with `"module": "dsl.run"`: the adapter tells it of each rank, and it attaches."""
    path = str(folder / ("package/train.py" if is_module else "train.py"))
    module, *args = words_of(command, is_module=is_module)
    # An adapter whose first client comes before it has written this file (debugpy 1.8.22) accepts no other client.
    endpoints = folder / "endpoints"
    adapter = subprocess.Popen(
        [sys.executable, "-m", "debugpy.adapter", "--port", "0"],
        env={**os.environ, "DEBUGPY_ADAPTER_ENDPOINTS": str(endpoints)},
        stderr=subprocess.DEVNULL,
    )
    with adapter, contextlib.ExitStack() as stack:
        stack.callback(adapter.terminate)
        until(lambda: endpoints.exists() and endpoints.read_text().endswith("\n"), ANSWER_S)
        port = json.loads(endpoints.read_text())["client"]["port"]
        launcher = stack.enter_context(Debugger(port))
        launcher.attach(
            path, LINE, "launch", module=module, args=args, cwd=str(folder), console="internalConsole"
        )
        ranks = {}
        for _ in range(2):
            child = launcher.hear("debugpyAttach")
            rank = stack.enter_context(Debugger(child["connect"]["port"]))
            rank.attach(path, LINE, **child)
            thread = rank.stopped()
            ranks[rank.evaluate(thread, "os.environ['RANK']")] = rank.evaluate(thread, "sys.argv[1:]")
            rank.go_on(thread)
            rank.ended()
        launcher.ended()
    assert ranks == {"'0'": "['--lr', '2']", "'1'": "['--lr', '2']"}


@pytest.mark.needs_package("viztracer")
@pytest.mark.parametrize("command, is_module", [("dsl.run", False), ("dsl", True)])
def test_a_tracer_that_follows_processes_has_the_workers_in_its_trace(
    command: str, *, is_module: bool, folder: Path
) -> None:
    text = f"import runpy; runpy.run_module({command!r}, run_name='__main__')"
    (folder / "start.py").write_text(text)
    words = words_of(command, is_module=is_module)[1:]
    result = run(folder, "-m", "viztracer", "-o", "trace.json", "--", "start.py", *words)
    assert (result.returncode, said(result.stdout)) == (0, BOTH), result.stderr
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    workers = {one["pid"] for one in events if one["name"].startswith("work (")}
    assert len(workers) == 2
    assert len({one["pid"] for one in events}) == 3, "the launcher is in the trace, too"


@pytest.mark.parametrize("command, is_module", [("dsl.run", False), ("dsl.launch", True), ("dsl", False)])
def test_a_profiler_of_a_command_writes_its_profile(command: str, *, is_module: bool, folder: Path) -> None:
    words = words_of(command, is_module=is_module)
    result = run(folder, "-m", "cProfile", "-o", "profile", "-m", *words)
    assert (result.returncode, said(result.stdout), result.stderr) == (0, BOTH, "")
    functions = {name for _, _, name in pstats.Stats(str(folder / "profile")).stats}  # type: ignore[attr-defined]
    assert {"run_here", "_start_here"} <= functions


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_profile_is_written_when_a_signal_ends_the_job(signum: int, folder: Path) -> None:
    (folder / "train.py").write_text("import time, sys; print('began', flush=True); time.sleep(60)")
    command = subprocess.Popen(
        [sys.executable, *("-m", "cProfile", "-o", "profile", "-m"), *words_of("dsl.run", is_module=False)],
        cwd=folder,
        stdout=subprocess.PIPE,
    )
    with command:
        assert command.stdout is not None
        for _ in range(2):
            assert command.stdout.readline() == b"began\n"
        command.send_signal(signum)
        until(lambda: command.poll() is not None, 20)
    assert (folder / "profile").stat().st_size


MEASURE = """
import atexit, os, sys
if place := os.environ.get("MEASURE"):
    lines = set()
    def trace(frame, event, _):
        lines.add(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        return trace
    def write():
        sys.settrace(None)
        with open(f"{place}/{os.getpid()}.lines", "w") as file:
            file.write("\\n".join(lines))
    atexit.register(write)
    sys.settrace(trace)
"""


def test_what_measures_each_python_by_a_variable_measures_the_command_and_its_workers(folder: Path) -> None:
    """As coverage does, whose start file is not installed here: each start of Python would take longer."""
    (folder / "sitecustomize.py").write_text(MEASURE)
    env = {"MEASURE": str(folder), "PYTHONPATH": str(folder)}
    result = run(folder, "-m", *words_of("dsl.run", is_module=False), env=env)
    assert (result.returncode, said(result.stdout)) == (0, BOTH), result.stderr
    found = [path.read_text() for path in folder.glob("*.lines")]
    assert sum("train.py:work" in one for one in found) == 2
    assert sum("session.py:run_here" in one for one in found) == 1


TOOL = """
import os, runpy, subprocess, sys
init, spawn = subprocess.Popen.__init__, os.posix_spawn
def popen(self, args, *rest, **kwargs):
    init(self, [args[0], "-X", "tool", *args[1:]], *rest, **kwargs)
if "popen" in sys.argv[1]:
    subprocess.Popen.__init__ = popen
if "spawn" in sys.argv[1]:
    os.posix_spawn = lambda path, words, env, **more: spawn(path, words, {**env, "TOOL": "here"}, **more)
if "fork" in sys.argv[1]:
    fork, os.fork = os.fork, lambda: fork()
if "broken" in sys.argv[1]:
    def spawn(path, words, env, **more): raise TypeError
del sys.argv[1]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
print("the tool goes on")
"""
SHOW = """
import os, sys
attempt, other = os.environ["TORCHELASTIC_RESTART_COUNT"], "other." + os.environ["TORCHELASTIC_RESTART_COUNT"]
print("worker", "tool" in sys._xoptions, os.environ.get("TOOL"), attempt, flush=True)
if os.environ["RANK"] == "1":
    open(other, "w").close()
elif attempt == "0":
    while not os.path.exists(other):
        pass
    sys.exit(1)
"""


@pytest.mark.parametrize(
    "patched, seen",
    [
        ("nothing", "False None"),
        ("popen", "True None"),
        ("spawn", "False here"),
        ("popen,spawn", "True here"),
        ("fork", "False None"),
        ("popen,spawn,broken", "True None"),
    ],
)
def test_each_attempt_starts_by_the_words_and_variables_of_a_tool_which_then_goes_on(
    patched: str, seen: str, folder: Path
) -> None:
    (folder / "tool.py").write_text(TOOL)
    (folder / "train.py").write_text(SHOW)
    words = words_of("dsl.run", is_module=False, options=["--max-restarts=1"])
    result = run(folder, "tool.py", patched, *words)
    assert said(result.stdout) == [f"worker {seen} {attempt}" for attempt in "0011"], result.stderr
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "the tool goes on")


@pytest.mark.parametrize("method", ["forkserver", "warm"])
def test_workers_that_a_tool_follows_are_executed_and_one_line_says_so(method: str, folder: Path) -> None:
    (folder / "tool.py").write_text(TOOL)
    words = words_of("dsl.run", is_module=False, options=["--start-method", method])
    result = run(folder, "tool.py", "popen", *words)
    assert said(result.stdout) == BOTH
    line = "dslrun: the workers are executed, not forked: a tool of this process follows what it starts\n"
    assert (result.returncode, result.stderr) == (0, line)


def test_a_job_that_fails_below_a_tool_has_its_exit_code_and_its_verdict(folder: Path) -> None:
    (folder / "tool.py").write_text(TOOL)
    (folder / "train.py").write_text("import os, sys; sys.exit(7 * int(os.environ['RANK']))")
    result = run(folder, "tool.py", "nothing", *words_of("dsl.run", is_module=False))
    assert result.returncode == 7
    assert "rank 1 (local rank 1, pid " in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["--preempt-signal=USR1", "--detach"])
def test_what_takes_a_process_of_its_own_has_it_below_a_tool_too(option: str, folder: Path) -> None:
    (folder / "tool.py").write_text(TOOL)
    result = run(folder, "tool.py", "nothing", *words_of("dsl.run", is_module=False, options=[option]))
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("the tool goes on\n")
