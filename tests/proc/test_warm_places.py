"""Commands in a sandbox, under a tracer or below a job: a server is no descendant of them, so it may not fit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.warm import Place

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import os
try:
    os.symlink("here", "link")
    os.unlink("link")
    print("makes links")
except OSError as error:
    print(error.strerror)
"""

BEGIN = """
import ctypes, os, struct, sys
library = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    result = library.syscall(number, *words)
    assert result >= 0, ctypes.get_errno()
    return result
"""
END = "\nos.execvp(sys.argv[1], sys.argv[1:])"
# Numbers of system calls that all processors share, or those of this one.
SYMLINKS = {"x86_64": (88, 266), "aarch64": (36,)}.get(os.uname().machine, ())
SECCOMP = {"x86_64": 317, "aarch64": 277}.get(os.uname().machine, 0)

SANDBOXES = {
    "seccomp": f"""
code = [(0x20, 0, 0, 0)]
for number in {SYMLINKS}:
    code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
code.append((0x06, 0, 0, 0x7fff0000))
text = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
program = struct.pack("=HxxxxxxQ", len(code), ctypes.addressof(text))
assert library.prctl(38, 1, 0, 0, 0) == 0
call({SECCOMP}, 1, 0, program)
""",
    "Landlock": """
assert library.prctl(38, 1, 0, 0, 0) == 0
call(446, call(444, struct.pack("=Q", 1 << 12), 8, 0), 0)
""",
}

TRACER = f"""{BEGIN}
import signal
pid = os.fork()
if pid == 0:
    assert library.ptrace(0, 0, 0, 0) == 0
    os.kill(os.getpid(), signal.SIGSTOP)
{END.replace(chr(10), chr(10) + "    ")}
while not os.WIFEXITED(status := os.waitpid(pid, 0)[1]):
    stop = os.WSTOPSIG(status)
    library.ptrace(7, pid, 0, 0 if stop in (signal.SIGSTOP, signal.SIGTRAP) else stop)
os._exit(os.WEXITSTATUS(status))
"""

BELOW = """
import ctypes, json, os, subprocess, sys
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
for line in sys.stdin:
    done = subprocess.run(json.loads(line), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "train.py").write_text(SCRIPT)
    with Place() as place:
        yield place


@pytest.fixture
def server(place: Place, tmp_path: Path) -> int:
    """Jobs of a server that was started in no special place."""
    done = place.run("train.py", cwd=tmp_path)
    assert done.stdout == "makes links\n", done.stderr
    return place.server().jobs


def _python(text: str) -> list[str]:
    return [sys.executable, "-c", f"{BEGIN}{text}{END}"]


@pytest.mark.parametrize("kind", SANDBOXES)
def test_workers_of_a_command_in_a_sandbox_are_in_it(
    place: Place, tmp_path: Path, server: int, kind: str
) -> None:
    before = _python(SANDBOXES[kind])
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs a kernel with {kind}")
    refused = place.run("train.py", cwd=tmp_path, before=before, method="spawn").stdout
    assert refused != "makes links\n"
    done = place.run("train.py", cwd=tmp_path, before=before)
    assert (done.returncode, done.stdout) == (0, refused), done.stderr
    said = f"start method warm: this command is in a sandbox of {kind}, so the server ends with the job"
    assert said in done.stderr
    assert place.server().jobs == server


@pytest.mark.parametrize("method", ["warm", "auto"])
def test_workers_of_a_command_that_is_traced_are_its_descendants(
    place: Place, tmp_path: Path, server: int, method: str
) -> None:
    (tmp_path / "train.py").write_text(f"{SCRIPT}\nif 0:\n    import torch\n")
    words = ("--log_level", "info", "train.py")
    done = place.run(*words, cwd=tmp_path, before=[sys.executable, "-c", TRACER], method=method)
    assert (done.returncode, done.stdout) == (0, "makes links\n"), done.stderr
    assert "a tracer follows this command" in done.stderr
    assert place.server().jobs == server


@pytest.mark.parametrize("parent", ["the worker", "who adopts"])
def test_below_a_job_that_its_variables_do_not_show_no_server_is_started_that_stays(
    place: Place, tmp_path: Path, parent: str
) -> None:
    is_orphan = parent == "who adopts"
    clear = ["env", "-i", *[f"{name}={value}" for name, value in place.environ().items()]]
    inner = [*clear, *place.command(str(tmp_path / "train.py"))]
    (tmp_path / "outer.py").write_text(
        f"import os, subprocess, time\nif {is_orphan} and os.fork() == 0:\n"
        "    middle = os.getpid()\n"
        "    if os.fork():\n        os._exit(0)\n"
        "    while os.getppid() == middle:\n        time.sleep(0.01)\n"
        f"    os.execvp('env', {['env', '-u', 'DSL_JOB_ID', *inner]!r})\n"
        f"if {is_orphan}:\n    os.wait()\n"
        f"    while not os.path.exists('seen'):\n        time.sleep(0.01)\n"
        f"else:\n    subprocess.run({inner!r}, check=True)\n"
    )
    words = place.command(str(tmp_path / "outer.py"), method="spawn")
    log = tmp_path / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            words, cwd=tmp_path, env=place.environ(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
        ) as job,
    ):
        try:
            until(lambda: "makes links" in log.read_text() or job.poll() is not None)
            assert "this is part of a job, so the server ends with the job" in log.read_text()
            assert place.sockets() == []
        finally:
            (tmp_path / "seen").touch()
        assert job.wait(60) == 0, log.read_text()


def test_a_server_that_would_end_with_others_serves_these_alone(place: Place, tmp_path: Path) -> None:
    """Below a process that adopts what its descendants leave, as the agent of a job does."""
    command = place.command("train.py")
    with subprocess.Popen(
        [sys.executable, "-c", BELOW],
        cwd=tmp_path,
        env=place.environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as adopter:
        assert adopter.stdin is not None
        assert adopter.stdout is not None

        def run_below() -> None:
            print(json.dumps(command), file=adopter.stdin, flush=True)
            assert json.loads(adopter.stdout.readline())[:2] == [0, "makes links\n"]  # type: ignore[union-attr]

        run_below()
        below = place.server().pid
        run_below()
        assert place.server() == (below, 2, 0)
        assert place.run("train.py", cwd=tmp_path).stdout == "makes links\n"
        [own] = until(lambda: [one.pid for one in place.told() if one.pid != below])
        assert [one.jobs for one in place.told() if one.pid == below] == [2]
        os.kill(below, signal.SIGKILL)
    assert place.run("train.py", cwd=tmp_path).stdout == "makes links\n"
    assert until(lambda: place.told() == [(own, 2, 0)])
