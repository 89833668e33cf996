"""What a worker is handed beside environment and arguments: compared with a golden state, nothing of ours leaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import WITH_ODD_ENTRIES, dsl_line
from tests.support.group import Group
from tests.support.jobs import Helpers, running
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


INHERITED = (
    *("Uid", "Gid", "Groups", "CapEff", "NoNewPrivs", "Cpus_allowed_list", "Mems_allowed_list"),
    *("umask", "nice", "limits", "cwd", "memory_policy"),
)


def test_a_worker_gets_what_the_command_got(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """Python ignores SIGPIPE and SIGXFSZ and the guard blocks signals: a worker must see none of that."""
    expected = _direct(testchild, tmp_path)
    states = _launched(dsl_command, testchild, tmp_path)
    for state in states:
        assert {name: state[name] for name in INHERITED} == {name: expected[name] for name in INHERITED}
        found = {name: state[name] for name in ("SigBlk", "SigIgn", "SigCgt", "SigPnd")}
        assert found == dict.fromkeys(found, NONE)
        assert state["pgid"] == state["pid"]
        assert state["parent_death_signal"] == 9
    assert len({(state["sid"], state["ppid"]) for state in states}) == 1
    assert states[0]["sid"] not in {state["pid"] for state in states}


def test_an_ignored_hang_up_stays_ignored(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    for state in _launched(dsl_command, testchild, tmp_path, ["nohup"]):
        assert (state["SigIgn"], state["SigBlk"]) == ("0000000000000001", NONE)


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


# ---- environment and arguments


Dumps = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def dumps(helpers: Helpers, tmp_path: Path) -> Dumps:
    """What so many workers see: ``dumps(2, "--option", environ={...}, arguments=(...))``."""

    def run(
        workers: int,
        *options: str,
        environ: Mapping[str, str] | None = None,
        arguments: tuple[str, ...] = (),
    ) -> list[dict[str, Any]]:
        words = ["dump", str(tmp_path / "dump.%r"), "exit", "0", *arguments]
        with helpers(workers, words, None, *options, environ=environ) as job:
            assert job.wait() == 0, job.stderr()
        return [json.loads((tmp_path / f"dump.{rank}").read_text()) for rank in range(workers)]

    return run


def _environment(dump: dict[str, Any]) -> dict[str, str]:
    pairs = [entry.partition("=") for entry in dump["env"]]
    names = [name for name, _, _ in pairs]
    assert len(names) == len(set(names)), "a variable is set twice"
    return {name: value for name, _, value in pairs}


@pytest.mark.guarantee("G5")
def test_a_rank_has_its_variables_and_everything_that_is_inherited(dumps: Dumps) -> None:
    given = {"SOME_USER_VARIABLE": "1", "OMP_NUM_THREADS": "3"}
    for rank, dump in enumerate(dumps(3, "--master_port", "29611", environ=given)):
        env = _environment(dump)
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_SIZE": "3",
            "NODE_RANK": "0",
        }
        own |= {"CROSS_RANK": "0", "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
        expected = {**os.environ, **given, **own}
        assert {name: env.get(name) for name in expected} == expected
        added = env.keys() - expected.keys() - {"DSL_TEST_JOB", "CUDA_VISIBLE_DEVICES"}
        assert [name for name in added if not name.startswith("DSL_")] == []


NASTY = {
    "JSON": '{"a": "b", "c": [1, "$HOME"]}',
    "QUOTES": "I am 6' tall and 72\" wide",
    "SHELL": "a;b$HOME`id` $(id) *?[x] && | > <",
    "LINES": "one\ntwo\r\n\tthree",
    "EMPTY": "",
    "EQUALS": "a=b=c",
    "UNICODE": "Grüße, 世界",
    "LONG": "x" * 100_000,
    "BACKSLASH": "\\n\\",
}


@pytest.mark.guarantee("G5")
def test_values_and_arguments_arrive_byte_for_byte(dumps: Dumps) -> None:
    environ = {**NASTY, "RAW": os.fsdecode(bytes(range(1, 256)))}
    arguments = (*environ.values(), "--num_gpus", "9", "--", "-H", "--help")
    (dump,) = dumps(1, environ=environ, arguments=arguments)
    env = _environment(dump)
    expected = {name: os.fsencode(value) for name, value in environ.items()}
    assert {name: env[name].encode("latin-1") for name in environ} == expected
    received = [word.encode("latin-1") for word in dump["argv"]]
    assert received[-len(arguments) :] == [os.fsencode(word) for word in arguments]


@pytest.mark.guarantee("G5")
def test_the_local_rank_argument_goes_between_script_and_arguments(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    dump = str(tmp_path / "dump.%r")
    line = [str(dsl_command), "--no_python", "--num_gpus", "2", str(testchild), "dump", dump]
    with running(line, tmp_path) as job:
        assert job.wait() == 0, job.stderr()
    for rank in range(2):
        argv = json.loads((tmp_path / f"dump.{rank}").read_text())["argv"]
        assert argv == [str(testchild), f"--local_rank={rank}", "dump", dump]


@pytest.mark.guarantee("G5")
def test_a_python_script_runs_unbuffered_with_its_own_arguments(dsl_command: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.argv[1:], sys.stdout.write_through)\n")
    line = [str(dsl_command), "--num_gpus", "1", str(script), "--lr", "1"]
    with running(line, tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
    assert job.stdout() == "['--local_rank=0', '--lr', '1'] True\n"


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G1")
def test_every_worker_carries_the_token_of_the_job(dumps: Dumps) -> None:
    """The token by which stray processes are found is the same for the group and new for each job."""
    tokens: list[str] = []
    for _ in range(2):
        found = {_environment(dump)["DSL_JOB_ID"] for dump in dumps(2)}
        assert len(found) == 1
        tokens += found
    assert tokens[0] != tokens[1]


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_entries_that_no_mapping_can_hold_arrive_as_they_are(
    command: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Variables that are set twice, and entries without a name or without a value."""
    entries = ["TWICE=1", "=nameless", "=C:=C:\\", "no equals sign", "TWICE=2", "TWICE=1", "RANK=7", "RANK=8"]
    words = [str(testchild), "dump", str(tmp_path / "dump.%r"), "exit", "0"]
    line = dsl_line(dsl_command.with_name(command), 2, words)
    with running([sys.executable, "-c", WITH_ODD_ENTRIES, "|".join(entries), *line], tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
    for rank in range(2):
        found = json.loads((tmp_path / f"dump.{rank}").read_text())["env"]
        odd = [entry for entry in found if entry.startswith(("TWICE", "=", "no ", "RANK="))]
        assert sorted(odd) == sorted([*entries[:6], f"RANK={rank}"])
        assert [entry for entry in odd if entry.startswith("TWICE")] == ["TWICE=1", "TWICE=2", "TWICE=1"]
