"""Commands from another shell, terminal, user or place: a warm worker is what an executed one would be there.

Either the server of an earlier command serves, or another one is started: that only shows in `same`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.kit.waiting import until
from tests.support.warm import Place, read_json

pytestmark = pytest.mark.timeout(300)

OBSERVED = Path(__file__).parent.parent / "workers" / "observed.py"

DIFFERENT = {
    "modules": "what the server has imported is there already",
    "gc.frozen": "the server's objects are left out of collections, so that their memory stays shared",
    "hash": "texts hash alike in all workers of a server: the interpreter chooses that when it starts",
}
# These differ between any two jobs.
_OF_A_JOB = ("DSL_JOB_ID", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "DSL_ERROR_FILE")
_OF_A_JOB_TOO = ("stdin.text", "stdout.tell")


def python(text: str) -> list[str]:
    """Words that run a text of Python and go on as the command behind them."""
    begin = "import ctypes, os, resource, signal, sys\nlibrary = ctypes.CDLL(None, use_errno=True)\n"
    return [sys.executable, "-c", f"{begin}{text}\nos.execvp(sys.argv[1], sys.argv[1:])"]


def prctl(*numbers: int) -> list[str]:
    """Words that make a call of prctl(2) first."""
    return python(f"assert library.prctl(*{numbers}) >= 0, ctypes.get_errno()")


STATES: dict[str, Sequence[str]] = {
    "as it is": [],
    "soft limit of files": ["prlimit", "--nofile=512:"],
    "soft limit of core": ["prlimit", "--core=0:"],
    "hard limit of files": ["prlimit", "--nofile=700:900"],
    "stack": ["prlimit", "--stack=4194304:"],
    "umask": ["sh", "-c", 'umask 027; exec "$@"', "sh"],
    "one CPU": ["taskset", "-c", "0"],
    "nice": ["nice", "-n", "5"],
    "stdin closed": ["sh", "-c", 'exec "$@" <&-', "sh"],
    "stdin and stdout closed": ["sh", "-c", 'exec "$@" <&- >&-', "sh"],
    "stderr closed": ["sh", "-c", 'exec "$@" 2>&-', "sh"],
    "all streams closed": ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"],
    "hang-ups ignored": ["nohup"],
    "signals ignored": python("signal.signal(signal.SIGUSR1, signal.SIG_IGN)"),
    "SIGCHLD ignored": python("signal.signal(signal.SIGCHLD, signal.SIG_IGN)"),
    "SIGPIPE not ignored": python("signal.signal(signal.SIGPIPE, signal.SIG_DFL)"),
    "SIGXFSZ not ignored": python("signal.signal(signal.SIGXFSZ, signal.SIG_DFL)"),
    "signals blocked": python("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGWINCH])"),
    "I/O idle": ["ionice", "-c", "3"],
    "I/O level": ["ionice", "-c", "2", "-n", "7"],
    "batch": ["chrt", "--batch", "0"],
    "timer slack": prctl(29, 70_000),
    "no new privileges": prctl(38, 1, 0, 0, 0),
    "huge pages off": prctl(41, 1, 0, 0, 0),
    "pages merged": prctl(67, 1, 0, 0, 0),
    "no executable gains": prctl(65, 1, 0, 0, 0),
    "subreaper": prctl(36, 1),
    "time stamp counter off": prctl(26, 2),
    "speculation off": prctl(53, 0, 4, 0, 0),
    "personality": ["setarch", "-R"],
    "core dump filter": ["sh", "-c", 'echo 0x7 >/proc/self/coredump_filter; exec "$@"', "sh"],
    "killed first": ["sh", "-c", 'echo 500 >/proc/self/oom_score_adj; exec "$@"', "sh"],
    "session": ["setsid", "-w"],
    "another variable": ["env", "SEEN=yes"],
    "a variable less": ["env", "-u", "LANG"],
    "Python's variables": ["env", "PYTHONUTF8=1", "PYTHONHASHSEED=7"],
    "no home": ["env", "-u", "HOME"],
    "scheduled as a group's": python("os.setpgid(0, 0)"),
    "clamped": python(
        "import struct\n"
        "data = struct.pack('IIQiIQQQII', 56, 0, 0x60 | 0x10, 0, 0, 0, 0, 0, 100, 900)\n"
        "library.syscall(314, 0, data, 0)"
    ),
    "a key ring": python("library.syscall(250, 1, b'of-a-test')"),
    "capabilities in the bounding set": prctl(24, 39),
    "secure bits": prctl(28, 1),
    "keeps capabilities": prctl(8, 1),
    "memory policy": python("library.syscall(238, 3, None, 0)"),
}
ROOT: dict[str, Sequence[str]] = {
    "group": ["setpriv", "--regid=65534", "--keep-groups"],
    "groups": ["setpriv", "--groups=1,2"],
    "capabilities": ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all"],
    "host name": ["unshare", "--uts"],
    "network": ["unshare", "--net"],
    "mounts": ["unshare", "--mount"],
    "control groups": ["unshare", "--cgroup"],
    "IPC": ["unshare", "--ipc"],
    "clock": ["unshare", "--time"],
    "process numbers": ["unshare", "--pid", "--fork", "--mount-proc"],
    "user": ["unshare", "--user", "--map-root-user"],
    "nice up": ["nice", "-n", "-5"],
    "first in line": ["chrt", "--fifo", "1"],
    "killed last": ["sh", "-c", 'echo -500 >/proc/self/oom_score_adj; exec "$@"', "sh"],
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    shutil.copy(OBSERVED, tmp_path)
    (tmp_path / "train.py").write_text(
        OBSERVED.read_text().replace("import gc\n", "import gc, textwrap, decimal\n", 1)
    )
    with Place() as place:
        yield place


def seen(path: Path) -> dict[str, Any]:
    """What a worker has observed, less what differs between any two jobs."""
    found = read_json(path)
    path.unlink()

    def is_kept(entry: str) -> bool:
        return not entry.startswith(tuple(f"{name}=" for name in _OF_A_JOB))

    entries = found["/proc/self/environ"]
    assert isinstance(entries, list)
    found["/proc/self/environ"] = sorted(filter(is_kept, entries))
    variables = found["os.environ"]
    assert isinstance(variables, list)
    found["os.environ"] = sorted(pair for pair in variables if pair[0] not in _OF_A_JOB)
    # Two commands that each make a namespace are in two.
    spaces = found["namespaces"]
    assert isinstance(spaces, dict)
    found["namespaces"] = {name: spaces[name] == os.readlink(f"/proc/self/ns/{name}") for name in spaces}
    for name in _OF_A_JOB_TOO:
        found.pop(name, None)
    return found


def observe(
    place: Place, folder: Path, method: str, before: Sequence[str] = (), cwd: Path | None = None
) -> dict[str, Any]:
    """What the worker of a job finds out about itself."""
    # Both write the same file, whose name they see.
    out = folder / "found.json"
    done = place.run(
        str(folder / "train.py"), "--to", str(out), cwd=cwd or folder, before=before, method=method
    )
    assert done.returncode == 0, done.stderr
    assert "fork server" not in done.stderr, done.stderr
    return seen(out)


def differences(plain: dict[str, Any], warm: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    assert list(plain) == list(warm)
    return {
        name: (plain[name], warm[name])
        for name in plain
        if plain[name] != warm[name] and name not in DIFFERENT
    }


def _cases() -> list[Any]:
    plain = [pytest.param(words, id=name) for name, words in STATES.items()]
    return plain + [pytest.param(words, id=name, marks=pytest.mark.root) for name, words in ROOT.items()]


@pytest.mark.parametrize("before", _cases())
def test_a_command_in_another_state_gets_the_workers_of_that_state(
    place: Place, tmp_path: Path, before: Sequence[str]
) -> None:
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs a kernel with what {before[0]} asks for")
    observe(place, tmp_path, "warm")
    plain = observe(place, tmp_path, "spawn", before)
    for _ in range(2):
        assert differences(plain, observe(place, tmp_path, "warm", before)) == {}
    # What the odd command has started serves only such commands.
    plain = observe(place, tmp_path, "spawn")
    assert differences(plain, observe(place, tmp_path, "warm")) == {}


def test_another_directory_and_a_link_to_it_are_the_workers(place: Place, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "link").symlink_to("inner")
    observe(place, tmp_path, "warm")
    for folder in ("inner", "link", "."):
        cwd = tmp_path / folder
        plain = observe(place, tmp_path, "spawn", cwd=cwd)
        assert differences(plain, observe(place, tmp_path, "warm", cwd=cwd)) == {}


def test_a_directory_that_was_moved_and_made_again_is_the_workers(place: Place, tmp_path: Path) -> None:
    cwd = tmp_path / "inner"
    cwd.mkdir()
    observe(place, tmp_path, "warm", cwd=cwd)
    cwd.rename(tmp_path / "moved")
    cwd.mkdir()
    for folder in (cwd, tmp_path / "moved"):
        plain = observe(place, tmp_path, "spawn", cwd=folder)
        assert differences(plain, observe(place, tmp_path, "warm", cwd=folder)) == {}


def at_a_terminal(place: Place, folder: Path, methods: Sequence[str]) -> list[dict[str, Any]]:
    """What workers see whose commands run one after the other in a session with a terminal of its own."""
    found = []
    out = folder / "found.json"
    reader, writer = os.pipe()
    orders_reader, orders_writer = os.pipe()
    shell, keyboard = pty.fork()
    if shell == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        copies = [os.dup2(fd, 20 + index) for index, fd in enumerate((writer, orders_reader))]
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)
        os.closerange(5, 64)
        text = (
            "import json, os, subprocess\nfor line in open(4, closefd=False):\n"
            "    code = subprocess.run(json.loads(line), check=False).returncode\n"
            "    os.write(3, b'%d\\n' % code)\n"
        )
        os.chdir(folder)
        os.execve(sys.executable, [sys.executable, "-c", text], place.environ())
    os.close(writer)
    os.close(orders_reader)
    os.set_blocking(reader, False)
    os.set_blocking(keyboard, False)
    screen = b""

    def ended() -> bytes:
        nonlocal screen
        with contextlib.suppress(OSError):
            screen += os.read(keyboard, 1 << 16)
        try:
            return os.read(reader, 100)
        except BlockingIOError:
            return b""

    try:
        for method in methods:
            line = place.command(str(folder / "train.py"), "--to", str(out), method=method)
            os.write(orders_writer, json.dumps(line).encode() + b"\n")
            assert until(ended, 40) == b"0\n", screen
            found.append(seen(out))
    finally:
        os.close(orders_writer)
        os.close(reader)
        os.close(keyboard)
        os.waitpid(shell, 0)
    return found


def test_each_terminal_has_its_own_server_which_ends_with_it(place: Place, tmp_path: Path) -> None:
    observe(place, tmp_path, "warm")
    [without] = until(place.told)
    plain, first, second, last = at_a_terminal(place, tmp_path, ["spawn", "warm", "warm", "spawn"])
    for warm in (first, second):
        assert differences(plain, warm) == {}
    assert differences(plain, last) == {}
    # The session is over: its server has gone with it, as everything that was started at a terminal.
    until(lambda: [one.pid for one in place.told()] == [without.pid])
    plain, warm = at_a_terminal(place, tmp_path, ["spawn", "warm"])
    assert differences(plain, warm) == {}


@pytest.mark.root
def test_a_command_in_another_control_group_has_workers_there(place: Place, tmp_path: Path) -> None:
    root = Path("/sys/fs/cgroup/pids")
    if not root.is_dir() or not os.access(root, os.W_OK):
        root = Path("/sys/fs/cgroup")
    group = root / place.mark
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs a writable cgroup v2")
    try:
        join = ["sh", "-c", f'echo 0 >{group}/cgroup.procs; exec "$@"', "sh"]
        observe(place, tmp_path, "warm")
        plain = observe(place, tmp_path, "spawn", join)
        warm = observe(place, tmp_path, "warm", join)
        assert differences(plain, warm) == {}
        assert place.mark in str(plain["cgroup"])
    finally:
        place.end()
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


ORPHANS = """
import os, subprocess, sys, textwrap, time
for _ in range(40):
    subprocess.run(["/bin/sh", "-c", "true &"])
def zombies():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(parent) == os.getppid():
            found.append(pid)
    return found
deadline = time.monotonic() + 20
while zombies():
    if time.monotonic() > deadline:
        sys.exit(1)
    time.sleep(0.01)
sys.exit(7)
"""


def test_what_workers_leave_is_reaped_when_it_dies(place: Place, tmp_path: Path) -> None:
    """A long job would run out of pids. The exit codes of workers are none of it."""
    (tmp_path / "train.py").write_text(ORPHANS)
    for _ in range(2):
        done = place.run("train.py", cwd=tmp_path)
        assert done.returncode == 7, done.stderr


def test_a_server_that_is_stopped_before_it_begins_does_not_hold_up_the_job(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if any(word.endswith('.new') for word in sys.orig_argv):\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    (tmp_path / "train.py").write_text("print('trained')\n")
    with Place() as place:
        done = place.run("train.py", cwd=tmp_path, more={"PYTHONPATH": str(tmp_path)})
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
        assert place.sockets() == []
        assert place.all() == []


OF_SEVERAL = """
import os, textwrap
print(os.environ["RANK"], os.getppid(), flush=True)
"""


@pytest.mark.parametrize("forkers", [1, 3])
def test_the_branches_of_a_job_take_turns(place: Place, tmp_path: Path, forkers: int) -> None:
    """They are one job, also for a server that goes on in the place of another one."""
    train = tmp_path / "train.py"
    train.write_text(OF_SEVERAL)
    more = {"DSL_ENGINE_FORKERS": str(forkers)}
    for jobs, text in ((1, ""), (2, ""), (1, "import tokenize\n")):
        if text:
            train.write_text(text + OF_SEVERAL)
        done = place.run("train.py", cwd=tmp_path, workers=8, more=more)
        assert done.returncode == 0, done.stderr
        parents = {int(rank): int(parent) for rank, parent in map(str.split, done.stdout.splitlines())}
        assert len(parents) == 8
        assert len(set(parents.values())) == forkers
        assert all(parents[rank] == parents[rank % forkers] for rank in range(8))
        assert place.server().jobs == jobs


def test_the_branches_of_a_job_are_refused_once(place: Place, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_SEVERAL)
    words = ("--preload", "no_such_module", "train.py")
    done = place.run(*words, cwd=tmp_path, workers=4, more={"DSL_ENGINE_FORKERS": "3"})
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 4
    assert done.stderr.count("refused: cannot import no_such_module") == 1, done.stderr
    assert place.sockets() == []
