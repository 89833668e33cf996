"""Programs that start torchrun or deepspeed themselves run under ``--stand-in``: all that they start is ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import ran

TELL = """
import json, os, pathlib, sys
sitecustomize = getattr(sys.modules.get("sitecustomize"), "__file__", None)
facts = {"environ": dict(os.environ), "words": sys.argv[1:], "path": sys.path, "site": sitecustomize}
pathlib.Path("told", os.environ["RANK"]).write_text(json.dumps(facts))
"""
THEIRS = """
LaunchConfig = elastic_launch = launch_agent = None
def main(args=None):
    raise SystemExit("this is torch's")
if __name__ == "__main__":
    main()
"""
# What an installer writes for an entry point.
CONSOLE = "import sys; from torch.distributed.run import main; sys.exit(main())"
LAUNCHER = "from torch.distributed.launcher.api import LaunchConfig, elastic_launch, launch_agent\n"
FUNCTION = """
import os
from torch.distributed.launcher import LaunchConfig, elastic_launch
import torch.distributed.launcher.api as api
def add(number):
    assert "DSL_STAND_IN" not in os.environ
    return number + int(os.environ["RANK"])
if __name__ == "__main__":
    config = LaunchConfig(1, 1, 2, run_id="x", rdzv_backend="c10d", rdzv_endpoint="localhost:0")
    print(elastic_launch(config, add)(10), api.launch_agent(config, add, [20]), elastic_launch.__module__)
"""

OPTIONS = ("--nproc-per-node", "2", "train.py", "word")
GRANDCHILD = f"import subprocess, sys; sys.exit(subprocess.run(['sh', '-c', 'torchrun {' '.join(OPTIONS)}']).returncode)"

WAYS: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "torchrun by name": (("torchrun", *OPTIONS), []),
    "a shell": (("sh", "-c", f"torchrun {' '.join(OPTIONS)}"), []),
    "a grandchild": ((sys.executable, "-c", GRANDCHILD), []),
    "python -m": ((sys.executable, "-m", "torch.distributed.run", *OPTIONS), []),
    "python -m, with flags": (
        (sys.executable, "-u", "-X", "dev", "-m", "torch.distributed.run", *OPTIONS),
        [],
    ),
    "torch.distributed.launch": (
        (sys.executable, "-m", "torch.distributed.launch", *OPTIONS),
        ["--local-rank"],
    ),
    "its function": ((sys.executable, "-c", CONSOLE, *OPTIONS), []),
    "its main module": (
        (
            sys.executable,
            "-c",
            "import runpy; runpy.run_module('torch.distributed.run', None, '__main__')",
            *OPTIONS,
        ),
        [],
    ),
    "deepspeed by name": (("deepspeed", "--num_gpus", *OPTIONS[1:]), ["--local_rank"]),
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a script, and with another's torch in ``PYTHONPATH``."""
    (tmp_path / "told").mkdir()
    (tmp_path / "train.py").write_text(TELL)
    launcher = tmp_path / "lib" / "torch" / "distributed" / "launcher"
    launcher.mkdir(parents=True)
    for folder in (launcher.parent.parent, launcher.parent):
        (folder / "__init__.py").touch()
    (launcher / "__init__.py").write_text(LAUNCHER)
    for name in ("run", "launch", "launcher/api"):
        (launcher.parent / f"{name}.py").write_text(THEIRS)
    places = [str(tmp_path / "lib"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stood_in(dslrun: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *words: ran([dslrun, "--stand-in", "--", *words])


def told(folder: Path) -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in (folder / "told").iterdir()}


@pytest.mark.parametrize("words, own", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("command", ["dslrun", "dsl"])
def test_what_a_program_starts_is_ours_and_its_workers_know_nothing_of_that(
    command: str, words: tuple[str, ...], own: list[str], dsl_command: Path, project: Path
) -> None:
    result = ran([dsl_command.with_name(command), "--stand-in", "--", *words])
    assert result.returncode == 0, result.stderr
    workers = told(project)
    assert sorted(workers) == ["0", "1"]
    for rank, worker in workers.items():
        found = worker["environ"]
        assert found["DSL_JOB_ID"]
        assert [name for name in found if name.startswith("DSL_STAND_IN")] == []
        assert {name: found[name] for name in ("PATH", "PYTHONPATH")} == {
            name: os.environ[name] for name in ("PATH", "PYTHONPATH")
        }
        assert [path for path in worker["path"] if "stand_in" in path] == []
        assert "stand_in" not in str(worker["site"])
        assert worker["words"] == [*[f"{name}={rank}" for name in own], "word"]


PASSES_ON_PATH = """
import os, subprocess, sys
sys.exit(subprocess.run(sys.argv[1:], env={"PATH": os.environ["PATH"]}).returncode)
"""


def test_a_program_that_passes_on_its_path_alone_starts_ours(
    stood_in: Callable[..., subprocess.CompletedProcess[str]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    result = stood_in(sys.executable, "-c", PASSES_ON_PATH, "torchrun", *OPTIONS)
    assert result.returncode == 0, result.stderr
    workers = told(project)
    assert sorted(workers) == ["0", "1"]
    assert {worker["environ"]["PATH"] for worker in workers.values()} == {os.environ["PATH"]}


def test_functions_are_launched_by_ours(
    stood_in: Callable[..., subprocess.CompletedProcess[str]], project: Path
) -> None:
    (project / "program.py").write_text(FUNCTION)
    result = stood_in(sys.executable, "program.py")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "{0: 10, 1: 11} {0: 20, 1: 21} dsl.functions.launcher"


@pytest.mark.torch
@pytest.mark.timeout(180)
def test_ours_are_found_in_the_place_of_a_real_torch(
    dslrun: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = os.environ["PYTHONPATH"].split(os.pathsep)[1:]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    (project / "program.py").write_text(f"import torch.distributed\n{FUNCTION}")
    result = ran([dslrun, "--stand-in", "--", sys.executable, "program.py"], timeout_s=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "{0: 10, 1: 11} {0: 20, 1: 21} dsl.functions.launcher"
    result = ran([dslrun, "--stand-in", "--", sys.executable, "-c", CONSOLE, *OPTIONS], timeout_s=120)
    assert result.returncode == 0, result.stderr
    assert sorted(told(project)) == ["0", "1"]


def test_the_program_takes_the_place_of_the_command(dslrun: Path) -> None:
    """So its signals, its exit code and its streams are those of the command."""
    words = [str(dslrun), "--stand-in", "--", "sh", "-c", "echo $$; grep SigIgn /proc/self/status; exit 7"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        pid, ignored = process.communicate(timeout=60)[0].splitlines()
    assert (int(pid), process.returncode) == (process.pid, 7)
    assert ignored == ran(["grep", "SigIgn", "/proc/self/status"]).stdout.strip()
    result = ran([dslrun, "--stand-in", "sh", "-c", "kill -KILL $$"])
    assert result.returncode == -signal.SIGKILL


@pytest.mark.parametrize("text", ["told = 1", "raise ValueError('theirs')", None])
def test_the_users_own_sitecustomize_runs(
    text: str | None, stood_in: Callable[..., subprocess.CompletedProcess[str]], project: Path
) -> None:
    if text is not None:
        (project / "lib" / "sitecustomize.py").write_text(text)
    show = "import os, sys; print(getattr(sys.modules.get('sitecustomize'), 'told', 0), sys.path)"
    usual = ran([sys.executable, "-c", show])
    result = stood_in(sys.executable, "-c", show)
    assert (result.returncode, result.stdout) == (0, usual.stdout)
    assert result.stderr == usual.stderr * 2, "of the command, and of the program that it becomes"
    result = stood_in(sys.executable, "-c", CONSOLE, *OPTIONS)
    assert result.returncode == 0, result.stderr
    assert sorted(told(project)) == ["0", "1"]


def test_a_failure_inside_has_its_exit_code_and_its_lines(
    stood_in: Callable[..., subprocess.CompletedProcess[str]], project: Path
) -> None:
    (project / "train.py").write_text("import sys; sys.exit(3)")
    result = stood_in("torchrun", "train.py")
    assert result.returncode == 3
    assert "failed: exit code 3" in result.stderr


def test_a_python_without_our_package_runs_ours(
    stood_in: Callable[..., subprocess.CompletedProcess[str]], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An isolated environment whose Python has torch, and where nobody has installed dsl."""
    monkeypatch.setenv("PYTHONPATH", str(project / "lib"))
    ran([sys.executable, "-m", "venv", "--without-pip", "other"], check=True)
    other = project / "other" / "bin" / "python"
    for words in (("-m", "torch.distributed.run"), ("-c", CONSOLE)):
        result = stood_in(other, *words, *OPTIONS)
        assert result.returncode == 0, result.stderr
        workers = told(project)
        assert [workers[rank]["environ"]["PYTHONPATH"] for rank in "01"] == [str(project / "lib")] * 2


def test_links_of_others_names_start_ours(dslrun: Path, project: Path) -> None:
    said = ran([dslrun, "--make-links", project / "links"], check=True).stdout
    assert said.count(" -> ") == 2
    path = f"{project / 'links'}{os.pathsep}{os.environ['PATH']}"
    for command, option in (("torchrun", "--nproc-per-node"), ("deepspeed", "--num_gpus")):
        result = ran([project / "links" / command, option, *OPTIONS[1:]], environ={"PATH": path})
        assert result.returncode == 0, result.stderr
        workers = told(project)
        assert [bool(workers[rank]["environ"]["DSL_JOB_ID"]) for rank in "01"] == [True, True]
