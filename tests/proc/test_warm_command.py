"""dsl-warm with real servers, which import modules of Python itself."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until


class User:
    """A user whose servers nobody else sees."""

    def __init__(self, folder: Path, place: Path) -> None:
        self._bin = folder
        self._place = place
        self._env = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
        self._env["TMPDIR"] = str(place)
        (place / "train.py").write_text("import json\nprint(json.dumps('hello'))\n")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ours to its end."""
        line = [str(self._bin / words[0]), *words[1:]]
        return subprocess.run(
            line, env=self._env, cwd=self._place, capture_output=True, text=True, timeout=60, check=False
        )

    def start(self, *options: str) -> int:
        """Start a server, and return its pid."""
        ended = self.run("dsl-warm", "start", *options, "dslrun", "--nproc-per-node", "2", "train.py")
        assert ended.returncode == 0, ended.stderr
        assert "has imported json" in ended.stdout
        return int(ended.stdout.split()[1])

    def servers(self) -> list[dict[str, object]]:
        """What ``dsl-warm status`` says."""
        ended = self.run("dsl-warm", "status", "--json")
        assert ended.returncode == 0, ended.stderr
        found: list[dict[str, object]] = json.loads(ended.stdout)["servers"]
        return found


@pytest.fixture
def user(dsl_command: Path, tmp_path: Path) -> Iterator[User]:
    """A user without servers; those that it starts are ended."""
    found = User(dsl_command.parent, tmp_path)
    yield found
    found.run("dsl-warm", "stop")
    assert found.servers() == []


def test_a_server_is_started_shown_and_ended(user: User) -> None:
    assert user.run("dsl-warm").stdout == "there is no warm server of yours on this machine\n"
    pid = user.start("--preload", "json")
    (server,) = user.servers()
    assert (server["pid"], server["state"], server["jobs"]) == (pid, "idle", 0)
    assert (server["program"], server["modules"]) == ("train.py", ["json"])
    assert str(pid) in user.run("dsl-warm").stdout
    ended = user.run("dsl-warm", "stop", str(pid))
    assert (ended.returncode, ended.stdout) == (0, f"server {pid} has ended\n")
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_second_start_finds_the_server(user: User) -> None:
    assert user.start("--preload", "json") == user.start("--preload", "json")


def test_a_server_that_does_not_answer_is_shown_and_killed(user: User) -> None:
    pid = user.start("--preload", "json")
    os.kill(pid, signal.SIGSTOP)
    assert [(one["pid"], one["state"]) for one in user.servers()] == [(pid, "no answer")]
    ended = user.run("dsl-warm", "stop")
    assert (ended.returncode, ended.stdout) == (0, f"server {pid} has ended\n")


def test_the_socket_of_a_killed_server_is_removed(user: User, tmp_path: Path) -> None:
    os.kill(user.start("--preload", "json"), signal.SIGKILL)
    until(lambda: user.servers() == [])
    assert not [*tmp_path.glob("dsl-*/*.warm")]


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def _remove_names(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize("remove", [_remove, _move, _remove_names])
def test_a_server_that_nobody_finds_any_more_ends(
    user: User, tmp_path: Path, remove: Callable[[Path], None]
) -> None:
    pid = user.start()
    watch = os.pidfd_open(pid)
    [folder] = tmp_path.glob("dsl-*")
    remove(folder)
    assert select.select([watch], [], [], 20)[0], "the server is out of reach, and stays"
    os.close(watch)
    assert user.servers() == []
    user.start()


def test_a_refusal_is_one_line(user: User) -> None:
    ended = user.run("dsl-warm", "start", "--preload", "no_such_module", "dslrun", "train.py")
    assert ended.returncode == 1
    assert "no_such_module" in ended.stderr
    assert ended.stderr.count("\n") == 1
    unknown = user.run("dsl-warm", "stop", "1")
    assert (unknown.returncode, unknown.stderr) == (
        2,
        "dsl-warm: error: no warm server has the pid '1', see dsl-warm status\n",
    )
