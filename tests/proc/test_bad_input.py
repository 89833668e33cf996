"""Bad input gives one clear line and the right code, starts nothing, and leaves nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.kit.users import as_ordinary_user
from tests.support.command import ran
from tests.support.jobs import running

pytestmark = pytest.mark.guarantee("G8")

# One of each kind: tests/unit/cli/test_deepspeed.py has them all.
OPTIONS = {
    "hostfile-line": ["--hostfile", "DIR/bad-hostfile"],
    "core-not-allowed": ["--num_gpus", "1", "--bind_cores_to_rank", "--bind_core_list", "4000"],
    "log-directory-is-a-file": ["--num_gpus", "1", "--enable_each_rank_log", "DIR/hostfile"],
    "port": ["--num_gpus", "1", "--master_port", "99999999"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_said_in_one_line_and_nothing_starts(
    name: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad-hostfile").write_text("localhost slots=2\nother slots\n")
    (tmp_path / "hostfile").write_text("localhost slots=2\n")
    options = [word.replace("DIR", str(tmp_path)) for word in OPTIONS[name]]
    started = tmp_path / "started"
    line = [str(dsl_command), "--no_python", "--no_local_rank", *options, str(testchild), "touch"]
    line += [str(started)]
    with running(line, tmp_path / "job") as job:
        assert job.wait() == 2, job.stderr()
    said = [text for text in job.stderr().splitlines() if "error" in text]
    assert len(said) == 1, job.stderr()
    assert not said[0].endswith(".")
    assert "Traceback" not in job.stderr()
    assert job.stdout() == ""
    assert not started.exists()


def test_a_full_disk_for_output_is_not_a_traceback(dsl_command: Path, tmp_path: Path) -> None:
    """Our own message may fail to be written; the code still tells."""
    script = 'exec "$0" --num_gpus 2 nothing-here.py 2>/dev/full'
    with running(["/bin/sh", "-c", script, str(dsl_command)], tmp_path) as job:
        assert job.wait() == 2


NOT_REACHED = "cannot be reached by this user, check the permissions of its directories"
OUT_OF_REACH = {
    "--num_gpus 2 closed/train.py": (f"script 'closed/train.py' {NOT_REACHED}", 2),
    "--num_gpus 2 closed": (f"script 'closed' {NOT_REACHED}", 2),
    "--num_gpus 2 --module closed": (
        "module 'closed' cannot be read by this user, check the permissions of 'closed'",
        2,
    ),
    "--num_gpus 2 --no_python closed/tool": (f"program 'closed/tool' {NOT_REACHED}", 126),
    "--hostfile closed/hosts train.py": ("closed/hosts: hostfile cannot be read: permission denied", 2),
    "--num_gpus 2 --log-dir closed/logs train.py": (
        "unable to create directory 'closed/logs' for each rank log: permission denied",
        2,
    ),
    "--autotuning tune train.py --deepspeed_config closed/config.json": (
        "closed/config.json: the config cannot be read: Permission denied",
        2,
    ),
}
"""Arguments, the message and the exit code, where another user has closed a directory."""


@pytest.mark.root
@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("words", OUT_OF_REACH)
def test_what_this_user_may_not_reach_is_not_called_missing(words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "closed").mkdir()
    for name in ("train.py", "tool", "hosts", "config.json", "__main__.py"):
        (tmp_path / "closed" / name).touch(0o755)
    (tmp_path / "closed").chmod(0o700)
    line = as_ordinary_user(words.split(), tmp_path)
    tmp_path.chmod(0o777)
    result = ran(line, cwd=tmp_path)
    said, code = OUT_OF_REACH[words]
    assert result.stderr.splitlines() == [f"dsl: error: {said}"]
    assert result.returncode == code


@pytest.mark.root
@pytest.mark.guarantee("G2")
def test_an_interpreter_that_this_user_may_not_reach_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "closed").mkdir(0o700)
    line = as_ordinary_user(["--nproc-per-node=2", "train.py"], tmp_path)
    line[line.index("-c") + 1] = "import sys; from dsl.cli.torchrun import main; sys.exit(main())"
    line.insert(line.index("env") + 1, f"PYTHON_EXEC={tmp_path}/closed/python")
    result = ran(line, cwd=tmp_path)
    hint = "Permission denied, this user may not enter one of its directories"
    assert f"could not be executed: {tmp_path}/closed/python: {hint}" in result.stderr
    assert result.returncode == 126


@pytest.mark.needs_program("ssh")
@pytest.mark.root
def test_a_home_of_another_user_is_nobodys_mistake(tmp_path: Path) -> None:
    """Nobody has named the files that are looked for there."""
    (tmp_path / "train.py").write_text("print('ran')\n")
    (tmp_path / "closed").mkdir(0o700)
    line = as_ordinary_user(["--num_gpus", "1", "--force_multi", "--dry-run", "train.py"], tmp_path)
    line.insert(line.index("env") + 1, f"HOME={tmp_path}/closed")
    result = ran(line, cwd=tmp_path)
    assert result.returncode == 0, result.stderr


FOUND_BY_THEIR_ENVIRONMENT = {
    "PATH": ("--no-python", "tool"),
    "PYTHONPATH": ("--module", "package.train"),
    "PYTHON_EXEC": ("unknown-syntax.py",),
}
"""Variables of ``-x`` by which the workers find what the command line names, and what it names."""

IN_A_PROGRAM = "import sys, dsl.run; dsl.run.main(sys.argv[1:])"


@pytest.mark.parametrize("name", FOUND_BY_THEIR_ENVIRONMENT)
@pytest.mark.parametrize("way", ["command", "program", "one-of-two-nodes"])
def test_what_the_workers_find_by_their_own_variables_is_not_called_missing(
    way: str, name: str, dslrun: Path, tmp_path: Path
) -> None:
    (tmp_path / "there" / "package").mkdir(parents=True)
    (tmp_path / "there" / "package" / "train.py").touch()
    (tmp_path / "there" / "tool").touch(0o755)
    (tmp_path / "unknown-syntax.py").write_text("a syntax of another Python\n")
    value = "another-python" if name == "PYTHON_EXEC" else f"{tmp_path}/there"
    command = [sys.executable, "-c", IN_A_PROGRAM] if way == "program" else [dslrun]
    nodes = ["--nnodes=2", "--node-rank=1"] if way == "one-of-two-nodes" else []
    line = [*command, "--dry-run", *nodes, "-x", f"{name}={value}", *FOUND_BY_THEIR_ENVIRONMENT[name]]
    result = ran(line, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
