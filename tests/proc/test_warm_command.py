"""Warm servers of `dsl-warm`, of commands and of programs: who may call them, what they keep and how they end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support import functions
from tests.support.command import ran
from tests.support.warm import Place, variables

from dsl.functions import ChildFailedError, warm_launch


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
        return ran([self._bin / words[0], *words[1:]], env=self._env, cwd=self._place)

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

    missing = user.run("dsl-warm", "start", "dslrun", "no_such_script.py")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "script 'no_such_script.py' does not exist" in missing.stderr


ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys
from dsl.functions import warm_launch
from tests.support import functions

if __name__ == "__main__":
    with warm_launch(preload="json") as launch:
        launch(functions.parents)
        if sys.argv[1] == "forks" and not os.fork():
            sys.stdin.read()
            os._exit(0)
        if sys.argv[1] == "stays":
            print("launched", flush=True)
            sys.stdin.read()
    print("left", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Place]:
    with Place() as found, variables(found.variables()):
        yield found


def program(folder: Path, word: str) -> subprocess.Popen[str]:
    """A program of its own, which has launched a function and waits for the end of its stdin."""
    (folder / "program.py").write_text(PROGRAM)
    started = subprocess.Popen(
        [sys.executable, str(folder / "program.py"), word],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == ("launched\n" if word == "stays" else "left\n")
    return started


def test_launches_share_a_server_and_each_has_workers_of_its_own(place: Place) -> None:
    with warm_launch(nproc_per_node=2, preload="json") as launch:
        first, second = launch(functions.parents), launch(functions.parents)
        branch, server = first[0]
        assert first == [(branch, server)] * 2
        assert second[0][0] != branch
        assert second[0][1] == server == place.server().pid
        with pytest.raises(ChildFailedError):
            launch(functions.exit_in, 1, 3)
        assert launch(functions.add, 1, 2, nproc_per_node=3) == [3, 4, 5]
        assert place.server().pid == server
    until(lambda: not place.all())


def test_each_launch_says_why_a_held_server_cannot_import(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with warm_launch(preload="no_such_module_at_all") as launch:
        for _ in range(2):
            caplog.clear()
            assert launch(functions.add, 1, 2) == [3]
            assert "refused: cannot import no_such_module_at_all: ModuleNotFoundError" in caplog.text
    until(lambda: not place.all())


def test_a_server_that_cannot_import_ends_though_no_job_calls(user: User) -> None:
    done = user.run("dsl-warm", "start", "--preload", "no_such_module_at_all", "dslrun", "train.py")
    assert "cannot import no_such_module_at_all" in done.stderr
    until(lambda: not user.servers())


def test_a_server_that_was_ended_is_replaced(place: Place) -> None:
    with warm_launch(preload="json") as launch:
        ((_, server),) = launch(functions.parents)
        os.kill(server, signal.SIGKILL)
        until(lambda: processes.find(server) is None)  # its memory goes before its connections
        ((_, other),) = launch(functions.parents)
        assert other == place.server().pid != server


def test_a_server_is_found_whose_imports_end_while_it_is_called(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket has another name then than a moment before."""
    with warm_launch(preload="json") as launch:
        first = launch(functions.parents)
        names = [(folder, name.replace(".warm", ".new")) for folder, name in place.sockets()]
        monkeypatch.setattr("dsl.agent.warm._servers", lambda _digest: names)
        assert launch(functions.parents)[0][1] == first[0][1]


def test_threads_share_a_held_server(place: Place) -> None:
    with warm_launch(preload="json") as launch, ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: launch(functions.parents)[0], range(8))]
        assert {server for _, server in found} == {place.server().pid}


def test_a_held_server_ends_with_a_killed_program(place: Place, tmp_path: Path) -> None:
    with program(tmp_path, "stays") as started:
        assert place.server().jobs == 1
        started.kill()
    until(lambda: not place.all())


def test_a_child_of_the_program_does_not_hold_the_server(place: Place, tmp_path: Path) -> None:
    with program(tmp_path, "forks") as started:
        until(lambda: not place.servers())
        assert started.poll() is None
        started.communicate()
    assert started.returncode == 0


SCRIPT = "import os\nprint(os.environ.get('TEST_API_KEY'), os.environ.get('OTHER_TOKEN'))\n"


@pytest.mark.timeout(120)
def test_each_job_has_its_own_secrets_and_the_server_has_none(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Place() as place:
        pids = set()
        for key, token in (("first-key", "a-token"), ("second-key", "a-token"), ("first-key", "another")):
            more = {"TEST_API_KEY": key, "OTHER_TOKEN": token}
            done = place.run(str(script), cwd=tmp_path, more=more)
            assert done.stdout == f"{key} {token}\n", done.stderr
            pid = place.server().pid
            pids.add(pid)
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"PATH=" in environ
            assert b"API_KEY" not in environ
            assert b"TOKEN=" not in environ.replace(b"DSL_TEST_TOKEN=", b"")
        assert len(pids) == 1


SECRETS = {
    "TOKEN": "hidden-1",
    "MYSQL_PWD": "hidden-2",
    "SIGNING_PASSPHRASE": "hidden-3",
    "SENTRY_DSN": "https://hidden-4@host/1",
    "STORAGE_CONNECTION_STRING": "hidden-5",
    "DATABASE_URL": "postgres://me:hidden-6@host/db",
}


@pytest.mark.timeout(120)
def test_a_secret_is_told_by_the_name_or_by_a_password_in_a_url(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\nprint([os.environ[name] for name in {list(SECRETS)}])\n")
    with Place() as place:
        done = place.run(str(script), cwd=tmp_path, more={**SECRETS, "PROJECT_URL": "https://me@host"})
        assert done.stdout == f"{list(SECRETS.values())}\n", done.stderr
        environ = Path(f"/proc/{place.server().pid}/environ").read_bytes()
        assert b"PROJECT_URL=" in environ
        assert b"hidden" not in environ


@pytest.mark.timeout(120)
def test_a_module_that_asks_for_a_secret_is_imported_by_the_workers(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("import os\nfound = os.environ.get('TEST_API_KEY')\n")
    script = tmp_path / "train.py"
    script.write_text("import asks\nprint(asks.found)\n")
    with Place() as place:
        words = ("--preload", "asks", str(script))
        done = place.run(*words, cwd=tmp_path, more={"TEST_API_KEY": "secret"})
        assert (done.returncode, done.stdout) == (0, "secret\n")
        assert "asks reads TEST_API_KEY when it is imported, which only workers get" in done.stderr
        assert place.sockets() == []


TELL = struct.pack("=IBQQIQQ", 5, 2, 0, 0, 0, 0, 0)
"""A request of version 5 that asks what a server is."""
MANY = 70
"""More than a server lets wait."""


@pytest.fixture
def place_of_warm_callers(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "train.py").write_text("import textwrap\n")
    with Place() as place_of_warm_callers:
        yield place_of_warm_callers


def warmed(place_of_warm_callers: Place, folder: Path) -> int:
    """Pid of a server that takes calls at once."""

    def told() -> bool:
        assert place_of_warm_callers.run("train.py", cwd=folder).returncode == 0
        return bool(place_of_warm_callers.told())

    until(told, 60)
    return place_of_warm_callers.server().pid


def call(place_of_warm_callers: Place) -> socket.socket:
    """A connection that says nothing yet."""
    ((folder, name),) = place_of_warm_callers.sockets()
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until(lambda: _is_connected(found, f"{folder}/{name}"))
    return found


def _is_connected(one: socket.socket, path: str) -> bool:
    try:
        one.connect(path)
    except BlockingIOError:
        return False
    return True


def hung_up(one: socket.socket) -> bool:
    """Whether the server hangs up."""
    return bool(select.select([one], [], [], 20)[0]) and not one.recv(1)


@pytest.mark.timeout(300)
def test_silent_callers_hold_nobody_up_and_are_hung_up_on(
    place_of_warm_callers: Place, tmp_path: Path
) -> None:
    server = warmed(place_of_warm_callers, tmp_path)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(call(place_of_warm_callers)) for _ in range(MANY)]
        assert [one.pid for one in place_of_warm_callers.told()] == [server]
        done = place_of_warm_callers.run("train.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all(map(hung_up, silent))
    told = place_of_warm_callers.server()
    assert told.pid == server
    assert told.jobs >= 2


def _memory(size: int) -> int:
    fd = os.memfd_create("test")
    os.truncate(fd, size)
    return fd


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


FILES: dict[str, Callable[[], int]] = {
    "huge and sparse": lambda: _memory(1 << 42),
    "sparse": lambda: _memory(1 << 30),
    "one page": lambda: _memory(mmap.PAGESIZE),
    "empty": lambda: _memory(0),
    "endless": lambda: os.open("/dev/zero", os.O_RDONLY),
    "pipe": _pipe,
    "folder": lambda: os.open("/", os.O_RDONLY),
    "path": lambda: os.open("/", os.O_PATH),
    "socket": lambda: socket.socket().detach(),
}


@pytest.mark.timeout(300)
def test_no_file_of_a_caller_ends_the_server(place_of_warm_callers: Place, tmp_path: Path) -> None:
    server = warmed(place_of_warm_callers, tmp_path)
    for what, make in FILES.items():
        fd = make()
        with call(place_of_warm_callers) as one:
            socket.send_fds(one, [b"request"], [fd])
            os.close(fd)
            assert hung_up(one), what
    with call(place_of_warm_callers) as one:
        one.send(b"no file")
        assert hung_up(one)
    assert place_of_warm_callers.server().pid == server


@pytest.mark.timeout(300)
def test_only_a_request_that_nobody_can_change_is_read(place_of_warm_callers: Place, tmp_path: Path) -> None:
    """What was checked is what is used."""
    server = warmed(place_of_warm_callers, tmp_path)
    some = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for seals, is_answered in ((0, False), (some, False), (some | fcntl.F_SEAL_WRITE, True)):
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.write(fd, TELL)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with call(place_of_warm_callers) as one:
            socket.send_fds(one, [b"request"], [fd])
            os.close(fd)
            assert select.select([one], [], [], 20)[0]
            assert one.recv(4096).startswith(b"%d " % server) == is_answered
