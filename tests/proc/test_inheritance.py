"""What a worker is handed beside environment and arguments: compared with a golden state, nothing of ours leaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import dsl_line
from tests.support.group import Group
from tests.support.jobs import running
from tests.support.warm import Place

from dsl import Stdio, WorkerSpec

pytestmark = pytest.mark.engine

NONE = "0" * 16


def _direct(testchild: Path, directory: Path, wrap: Sequence[str] = ()) -> dict[str, Any]:
    """What a worker sees when a shell-like parent starts it, without any launcher."""
    path = directory / "direct"
    subprocess.run([*wrap, str(testchild), "dump", str(path)], stdin=subprocess.DEVNULL, check=True)
    state: dict[str, Any] = json.loads(path.read_text())
    return state


def _launched(
    dsl: Path, testchild: Path, directory: Path, wrap: Sequence[str] = (), workers: int = 2
) -> list[dict[str, Any]]:
    line = dsl_line(dsl, workers, [str(testchild), "dump", str(directory / "dump.%r")])
    with running([*wrap, *line], directory / "job") as job:
        assert job.wait() == 0, job.stderr()
    return [json.loads((directory / f"dump.{rank}").read_text()) for rank in range(workers)]


INHERITED = [
    "Uid",
    "Gid",
    "Groups",
    "CapEff",
    "NoNewPrivs",
    "Cpus_allowed_list",
    "Mems_allowed_list",
    "umask",
    "nice",
    "limits",
    "cwd",
    "memory_policy",
]


def test_a_worker_gets_what_the_command_got(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    expected = _direct(testchild, tmp_path)
    for state in _launched(dsl_command, testchild, tmp_path):
        assert {name: state[name] for name in INHERITED} == {name: expected[name] for name in INHERITED}


def test_signals_are_as_a_shell_leaves_them(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """Python ignores SIGPIPE and SIGXFSZ and the guard blocks signals: a worker must see none of that."""
    for state in _launched(dsl_command, testchild, tmp_path):
        found = {name: state[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")}
        assert found == dict.fromkeys(found, NONE)


def test_an_ignored_hang_up_stays_ignored(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    for state in _launched(dsl_command, testchild, tmp_path, ["nohup"]):
        assert (state["SigIgn"], state["SigBlk"]) == ("0000000000000001", NONE)


def test_a_worker_leads_its_own_group_in_the_session_of_the_command(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    states = _launched(dsl_command, testchild, tmp_path)
    for state in states:
        assert state["pgid"] == state["pid"]
        assert state["parent_death_signal"] == 9
    assert len({state["sid"] for state in states}) == 1
    assert len({state["ppid"] for state in states}) == 1
    assert states[0]["sid"] not in {state["pid"] for state in states}


def test_only_the_standard_streams_are_open(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """Nothing of the engine, and no stray descriptor of the caller (7 here), reaches a worker."""
    for state in _launched(dsl_command, testchild, tmp_path, ["/bin/sh", "-c", 'exec "$0" "$@" 7</dev/null']):
        targets = {fd: target.partition(":")[0] for fd, (target, _) in state["fds"].items()}
        assert targets == {"0": "/dev/null", "1": "pipe", "2": "pipe"}


def test_a_worker_that_is_alone_has_the_streams_of_the_command(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    (state,) = _launched(dsl_command, testchild, tmp_path, workers=1)
    targets = {fd: target for fd, (target, _) in state["fds"].items()}
    job = tmp_path / "job"
    assert targets == {"0": "/dev/null", "1": str(job / "stdout"), "2": str(job / "stderr")}


def test_only_the_standard_streams_are_open_with_many_workers_and_pipes(
    testchild: Path, tmp_path: Path
) -> None:
    """The last of 60 workers must not hold a pipe of the first."""
    held = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(held, True)
    try:
        specs = [
            WorkerSpec(
                [str(testchild), "dump", str(tmp_path / f"dump.{index}")],
                stdout=Stdio.pipe(),
                stderr=Stdio.pipe(),
            )
            for index in range(60)
        ]
        with Group(specs) as group:
            group.finish()
    finally:
        os.close(held)
    for index in range(60):
        fds = json.loads((tmp_path / f"dump.{index}").read_text())["fds"]
        assert sorted(fds) == ["0", "1", "2"]
        assert [fds[fd][0].startswith("pipe:") for fd in ("0", "1", "2")] == [False, True, True]
        assert all(int(fds[fd][1], 8) & os.O_NONBLOCK == 0 for fd in fds)


def test_the_descriptor_limit_is_the_callers_even_when_we_needed_more(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """A raised soft limit breaks programs that use select()."""
    wrap = ["/bin/sh", "-c", 'ulimit -S -n 64 && exec "$0" "$@"']
    for state in _launched(dsl_command, testchild, tmp_path, wrap, workers=80):
        (line,) = [line for line in state["limits"] if line.startswith("Max open files")]
        assert line.split()[3] == "64"


def test_umask_nice_and_directory_of_the_caller(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    wrap = ["/bin/sh", "-c", 'umask 027; cd /usr/bin; exec nice -n 5 "$0" "$@"']
    nice = min(os.nice(0) + 5, 19)
    for state in _launched(dsl_command, testchild, tmp_path, wrap):
        assert (state["umask"], state["nice"], state["cwd"]) == (0o027, nice, "/usr/bin")


@pytest.mark.parametrize(
    "closed, streams", [("<&-", {0}), (">&-", {1}), ("2>&-", {2}), ("<&- >&- 2>&-", {0, 1, 2})]
)
def test_closed_standard_streams_are_never_filled_with_something_of_ours(
    closed: str, streams: set[int], dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """One worker has the streams of the command, several have pipes; nobody has stdin."""
    wrap = ["/bin/sh", "-c", f'exec "$0" "$@" {closed}']
    for workers in (1, 2):
        directory = tmp_path / str(workers)
        directory.mkdir()
        for state in _launched(dsl_command, testchild, directory, wrap, workers):
            found = {int(fd): target.partition(":")[0] for fd, (target, _) in state["fds"].items()}
            own = [
                str(directory / "job" / stream) if workers == 1 else "pipe" for stream in ("stdout", "stderr")
            ]
            whole = dict(enumerate(["/dev/null", *own]))
            assert found == {**whole, **dict.fromkeys(streams, "/dev/null")}


AT_THE_END = """
import atexit, fcntl, json, os
def note():
    found = [[os.readlink(f"/proc/self/fd/{fd}"), fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE] for fd in range(3)]
    with open(os.environ["NOTED"], "w") as file:
        json.dump(found, file)
atexit.register(note)
"""
MODULES = ("dsl", "dsl.run", "dsl.launch")


def test_every_command_begins_with_streams_of_its_own(dsl_command: Path, tmp_path: Path) -> None:
    """Else the first files that it opens are taken for its streams."""
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "NOTED": str(tmp_path / "noted")}
    null = [["/dev/null", os.O_RDONLY], ["/dev/null", os.O_WRONLY], ["/dev/null", os.O_WRONLY]]
    commands = [[str(path)] for path in sorted(dsl_command.parent.glob("dsl*"))]
    commands += [[sys.executable, "-m", module] for module in MODULES]
    assert len(commands) > 10
    for words in commands:
        subprocess.run(
            ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words, "--help"],
            env=environ, timeout=30, check=False,
        )  # fmt: skip
        assert json.loads((tmp_path / "noted").read_text()) == null, words
        (tmp_path / "noted").unlink()


def test_a_program_that_launches_functions_keeps_its_closed_streams_closed_to_us(tmp_path: Path) -> None:
    """With a warm server, whose connection is the first file that such a program opens."""
    (tmp_path / "program.py").write_text(
        "import os, sys\n"
        "from dsl.functions import launch\n"
        "def work():\n"
        "    return [os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)]\n"
        "if __name__ == '__main__':\n"
        "    found = launch(work, start_method=sys.argv[1])\n"
        "    open(sys.argv[2], 'w').write(repr(found))\n"
    )
    noted = tmp_path / "noted"
    with Place() as place:
        for method in ("spawn", "warm", "warm"):
            words = [sys.executable, str(tmp_path / "program.py"), method, str(noted)]
            line = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words]
            assert subprocess.run(line, env=place.environ(), timeout=60, check=False).returncode == 0
            assert noted.read_text() == repr([["/dev/null"] * 3])
            noted.unlink()
