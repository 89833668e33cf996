"""A package `dsl` of the user, and modules named as Python's: our commands do not see them, and the workers do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.command import ran

pytestmark = [pytest.mark.proc, pytest.mark.timeout(120)]

SCRIPT = """\
import os, sys
import dsl, glob
print("worker", dsl.WHOSE, glob.WHOSE, os.environ.get("RANK"), flush=True)
"""
SHADOWS = ("select.py", "json.py", "copy.py", "argparse.py", "glob.py")
COMMANDS = (
    "dsl",
    "dsl-attach",
    "dsl-elastic",
    "dsl-ps",
    "dsl-report",
    "dsl-ssh",
    "dsl-stacks",
    "dsl-top",
    "dsl-wait",
)


@pytest.fixture(params=["package", "module"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a `dsl` of the user, and modules that end a process other than a worker."""
    text = "import os\nif 'RANK' not in os.environ:\n    print('not for us', flush=True); os._exit(66)\nWHOSE = 'own'\n"
    package = request.param == "package"
    if package:
        (tmp_path / "dsl").mkdir()
    for name in (*SHADOWS, "dsl/__init__.py" if package else "dsl.py"):
        (tmp_path / name).write_text(text)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def run(folder: Path, *words: str | Path, on_path: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if on_path:
        env["PYTHONPATH"] = f"{folder}:{env.get('PYTHONPATH', '')}"
    return ran(words, cwd=folder, env=env)


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return sorted(result.stdout.splitlines())


OWN = ["worker own own 0", "worker own own 1"]
WAYS = {
    "dslrun": ["--nproc-per-node=2", "train.py"],
    "dsl": ["--num_gpus=2", "--no_local_rank", "train.py"],
}


@pytest.mark.parametrize("on_path", [True, False])
@pytest.mark.parametrize("command", WAYS)
def test_workers_import_the_users_package_and_the_command_ours(
    command: str, *, on_path: bool, folder: Path, dsl_command: Path
) -> None:
    assert said(run(folder, dsl_command.with_name(command), *WAYS[command], on_path=on_path)) == OWN


@pytest.mark.parametrize("on_path", [True, False])
@pytest.mark.parametrize(
    "door, words",
    [
        ("dsl_launcher", WAYS["dsl"]),
        ("dsl_launcher.run", WAYS["dslrun"]),
        ("dsl_launcher.launch", ["--use-env", *WAYS["dslrun"]]),
    ],
)
def test_the_second_door_opens_where_the_first_leads_to_the_users_package(
    door: str, words: list[str], *, on_path: bool, folder: Path
) -> None:
    assert said(run(folder, sys.executable, "-m", door, *words, on_path=on_path)) == OWN


@pytest.mark.parametrize("option", ["--help", "--version"])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_a_module_of_the_user(
    command: str, option: str, folder: Path, dsl_command: Path
) -> None:
    result = run(folder, dsl_command.with_name(command), option)
    assert (result.returncode, "not for us" in result.stdout) == (0, False), result.stderr


@pytest.mark.parametrize("method", ["forkserver", "warm"])
def test_what_a_fork_server_imports_for_workers_is_the_users(
    method: str, folder: Path, dsl_command: Path
) -> None:
    """The server is ours, and forgets our package before it imports: so a forked worker has the user's."""
    for name in (*SHADOWS, "dsl.py", "dsl/__init__.py"):
        if (folder / name).exists():
            (folder / name).write_text("WHOSE = 'own'\n")
    command = [str(dsl_command.with_name("dslrun")), "--start-method", method, "--warm-for=5"]
    command += ["--preload=dsl"]
    assert said(run(folder, *command, *WAYS["dslrun"])) == OWN


@pytest.mark.parametrize("on_path", [True, False])
def test_helpers_are_ours_too(*, on_path: bool, folder: Path, dsl_command: Path) -> None:
    """What takes the stacks of workers is a process of its own, and trusts no file of the working directory."""
    if not on_path:
        (folder / "dsl_launcher.py").write_text("print('not for us', flush=True)\n")
    (folder / "train.py").write_text(
        "import dsl, os, time\nprint('began', dsl.WHOSE, flush=True)\ntime.sleep(600)\n"
    )
    env = {**os.environ, **({"PYTHONPATH": str(folder)} if on_path else {})}
    words = [str(dsl_command.with_name("dslrun")), "--nproc-per-node=1", "train.py"]
    with subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"began own\n"
        try:
            result = run(folder, dsl_command.with_name("dsl-stacks"), str(command.pid), on_path=on_path)
        finally:
            command.terminate()
    assert "rank 0 (pid " in result.stdout
    assert "process that takes stacks" not in result.stdout
    assert "not for us" not in result.stdout + result.stderr


@pytest.mark.torch
def test_a_delegate_that_meets_by_torch_is_ours_and_imports_torch_from_anywhere(
    folder: Path, dsl_command: Path
) -> None:
    words = ["--nnodes=1:1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", *WAYS["dslrun"]]
    for name in SHADOWS:
        (folder / name).unlink()
    (folder / "train.py").write_text("import dsl, os; print('worker', dsl.WHOSE, 'own', os.environ['RANK'])")
    assert said(run(folder, dsl_command.with_name("dslrun"), *words)) == OWN


def test_a_package_that_is_only_on_the_path_of_the_user_is_found_there(folder: Path, tmp_path: Path) -> None:
    """Some sites put all that they install into folders of `PYTHONPATH`."""
    import dsl

    site = tmp_path / "site"
    site.mkdir()
    for name in ("dsl", "dsl_launcher"):
        (site / name).symlink_to(Path(dsl.__file__).parent.with_name(name))
    words = [sys.executable, "-S", "-m", "dsl_launcher.run", *WAYS["dslrun"]]
    env = {**os.environ, "PYTHONPATH": f"{folder}:{site}"}
    result = ran(words, cwd=folder, env=env)
    assert said(result) == OWN
