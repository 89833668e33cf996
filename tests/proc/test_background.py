"""Jobs in the background: what their shell gets, what survives it, and what dsl-attach and dsl-wait make of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import complete_lines
from tests.support.namespaces import unshared
from tests.support.places import free_port
from tests.support.terminal import terminal

from dsl.machine import find_sockets

KILLED = 137
TOOLS = ("dsl-wait", "dsl-attach")
RUNS = re.compile(
    r"^dsl(?:run)?: job (\d+) runs in the background; dsl-attach \1 follows it, dsl-wait \1 waits for it$"
)


class Shell:
    """A user who starts jobs in the background, whose workers may wait for ``go``."""

    def __init__(self, dsl_command: Path, testchild: Path, folder: Path) -> None:
        self._bin = dsl_command.parent
        self._testchild = str(testchild)
        self.state = folder / "state"
        self.jobs = self.state / "dsl" / "jobs"
        self.go = folder / "go"
        self.started: list[int] = []

    def line(self, words: Sequence[str], *options: str, workers: int = 2) -> list[str]:
        """A command that runs these words in the background."""
        program = [self._testchild, *words]
        return dsl_line(self._bin / "dsl", workers, program, 5.0, "--detach", *options)

    def detach(self, words: Sequence[str], *options: str, workers: int = 2) -> int:
        """Start a job, and return its pid."""
        return self.pid_of(self.run(self.line(words, *options, workers=workers)))

    def pid_of(self, ended: subprocess.CompletedProcess[bytes]) -> int:
        """The pid that the shell was told."""
        assert (ended.returncode, ended.stdout) == (0, b""), ended.stderr
        found = RUNS.match(ended.stderr.decode().splitlines()[-1])
        assert found, ended.stderr
        self.started.append(int(found[1]))
        return int(found[1])

    def in_room(self, size: str, script: str, line: list[str]) -> subprocess.CompletedProcess[bytes]:
        """Run this script, with the command as its words, where jobs are kept on a disk of this size."""
        self.state.mkdir()
        mount = 'mount -t tmpfs -o size="$1" none "$2" || exit 99; state=$2; shift 2\n'
        words = ["bash", "-c", mount + script, "bash", size, str(self.state), *line]
        return self.run([*unshared("--mount"), *words])

    def run(self, line: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[bytes]:
        """Run a command to its end."""
        return subprocess.run(line, capture_output=True, check=False, timeout=60, **options)  # type: ignore[call-overload, no-any-return]

    def attach(self, *words: object) -> subprocess.CompletedProcess[bytes]:
        """``dsl-attach`` until it ends by itself."""
        return self.run(self.tool("dsl-attach", *words))

    def wait(self, *words: object) -> subprocess.CompletedProcess[bytes]:
        """``dsl-wait``."""
        return self.run(self.tool("dsl-wait", *words))

    def tool(self, name: str, *words: object) -> list[str]:
        """The command line of one of our commands."""
        return [str(self._bin / name), *map(str, words)]

    def popen(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        """One of our commands, which goes on."""
        return subprocess.Popen(self.tool(name, *words), stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def folder(self, pid: int) -> Path:
        """The folder of a job."""
        (found,) = self.jobs.glob(f"{pid}-*")
        return found


@pytest.fixture
def shell(
    dsl_command: Path, testchild: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shell]:
    """A shell with folders of its own."""
    made = Shell(dsl_command, testchild, tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(made.state))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield made
    for pid in made.started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def agent_of(guard: int) -> int:
    """The agent of a command."""
    (agent,) = processes.children(guard)
    return agent


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "end, code", [("exit 0", 0), ("exit 3", 3), ("raise KILL", 137), ("raise TERM", 143)]
)
def test_the_shell_goes_on_at_once_and_the_exit_code_can_be_had_later(
    shell: Shell, end: str, code: int
) -> None:
    pid = shell.detach(["say", "hello", "wait", str(shell.go), "only", "0", "[", *end.split(), "]"])
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
    waiting = shell.popen("dsl-wait", pid)
    shell.go.touch()
    assert waiting.communicate(timeout=30) == (b"", b"")
    assert waiting.returncode == code
    assert shell.wait().returncode == code, "it has ended"
    attached = shell.attach(pid)
    assert (attached.returncode, attached.stderr) == (code, b"")
    assert attached.stdout.count(b"hello\n") == 2
    assert (b"exit code 3" in attached.stdout) == (code == 3), "the verdict is there, too"


def test_the_job_can_be_looked_into_as_soon_as_the_shell_goes_on(shell: Shell) -> None:
    for _ in range(5):
        pid = shell.detach(["wait", str(shell.go)], workers=100)
        assert any(name.startswith(f"{pid}-") for _, name in find_sockets(".sock"))
        os.kill(pid, signal.SIGKILL)


def test_a_job_that_restarts_is_one_job(shell: Shell, tmp_path: Path) -> None:
    program = tmp_path / "twice.py"
    program.write_text(
        "import os\nattempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('attempt', attempt, flush=True)\nos._exit(0 if attempt else 5)\n"
    )
    line = shell.tool("dslrun", "--detach", "--max-restarts", 1, "--nproc-per-node", 1, program)
    pid = shell.pid_of(shell.run(line))
    attached = shell.attach(pid)
    assert attached.returncode == 0
    assert set(attached.stdout.splitlines()) >= {b"attempt 0", b"attempt 1"}


def test_files_of_a_job_are_for_its_user_alone_who_can_have_the_last_lines(shell: Shell) -> None:
    pid = shell.detach(["say", "one", "say", "two", "say", "three"], workers=1)
    assert shell.wait(pid).returncode == 0
    for folder in (shell.jobs, shell.folder(pid)):
        assert folder.stat().st_mode & 0o777 == 0o700
    files = {path.name: path for path in shell.folder(pid).iterdir()}
    assert set(files) == {"job.json", "output", "exit.json"}
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    begun = json.loads(files["job.json"].read_text())["JobStart"]
    assert (begun["pid"], begun["words"][:2], begun["cwd"]) == (pid, ["dsl", "--no_python"], os.getcwd())
    assert shell.attach("-n", 2, pid).stdout == b"two\nthree\n"
    assert shell.attach("--lines=0", pid).stdout == b""


@pytest.mark.guarantee("G6")
def test_everybody_who_attaches_gets_all_bytes(shell: Shell, tmp_path: Path) -> None:
    """Some of them attach while it is written, several at once, and one when it is over."""
    goes_on = tmp_path / "goes_on"
    words = ["lines", "2000", "40", "note", str(goes_on), "%r", "wait", str(shell.go), "lines", "20000", "40"]
    pid = shell.detach(words, "--tag-output", "always")
    until(goes_on.exists)
    viewers = [shell.popen("dsl-attach", pid) for _ in range(3)]
    shell.go.touch()
    viewers += [shell.popen("dsl-attach", pid) for _ in range(2)]
    seen = [viewer.communicate(timeout=60)[0] for viewer in viewers]
    written = (shell.folder(pid) / "output").read_bytes()
    assert written.count(b"\n") >= 44_000
    assert [one == written for one in (*seen, shell.attach(pid).stdout)] == [True] * 6
    assert {viewer.returncode for viewer in viewers} == {0} == {shell.wait(pid).returncode}


@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize("leave", ["hang up", "log out"])
def test_a_job_outlives_its_terminal(shell: Shell, leave: str) -> None:
    line = shell.line(["say", "before", "wait", str(shell.go), "say", "after", "exit", "4"])
    with terminal(line) as window:
        window.showed("runs in the background")
        window.reported("ended 0")
        (folder,) = shell.jobs.iterdir()
        pid = int(folder.name.partition("-")[0])
        shell.started.append(pid)
        known = [processes.find(pid), processes.find(agent_of(pid))]
        if leave == "hang up":
            window.hang_up()
        else:
            os.killpg(window.shell, signal.SIGHUP)
    assert all(one is not None and processes.alive(one) for one in known)
    shell.go.touch()
    attached = shell.attach(pid)
    assert (attached.returncode, attached.stdout.count(b"before\n")) == (4, 2)
    assert b"after\n" in attached.stdout


@pytest.mark.guarantee("G1", "G2")
def test_ctrl_c_in_dsl_attach_leaves_the_job_alone(shell: Shell) -> None:
    pid = shell.detach(["say", "hello", "wait", str(shell.go), "exit", "6"])
    with terminal(shell.tool("dsl-attach", pid)) as window:
        window.showed("hello")
        window.press(b"\x03")
        window.showed(f"dsl-attach: job {pid} runs on; dsl-attach {pid} comes back to it")
        window.reported(f"ended {-signal.SIGINT}")
    viewer = shell.popen("dsl-attach")
    assert viewer.stdout is not None
    assert viewer.stdout.readline() == b"hello\n"
    viewer.terminate()
    assert b"runs on" in viewer.communicate(timeout=30)[1]
    assert viewer.returncode == 128 + signal.SIGTERM
    shell.go.touch()
    attached = shell.attach(pid)
    assert (attached.returncode, attached.stdout.count(b"hello\n")) == (6, 2)


def test_a_reader_that_goes_ends_dsl_attach_alone(shell: Shell) -> None:
    pid = shell.detach(["lines", "100000", "80", "wait", str(shell.go)], workers=1)
    piped = f"{' '.join(shell.tool('dsl-attach', pid))} | head -n 1; exit ${{PIPESTATUS[0]}}"
    ended = shell.run(["bash", "-c", piped])
    assert (ended.returncode, ended.stdout.count(b"\n"), ended.stderr) == (141, 1, b"")
    shell.go.touch()
    assert shell.wait(pid).returncode == 0


NO_JOB = {
    "a bad option": (["dsl", "--grace", "-1", "x.py"], 2),
    "a bad plan": (["dslrun", "--nproc-per-node", "0", "x.py"], 2),
    "no script": (["dsl", "nothing-here.py"], 2),
    "no program": (["dsl", "--no_python", "nothing-here"], 127),
    "a bad place for logs": (["dsl", "--log_dir", "/dev/null/x", "--no_python", "true"], 2),
    "a dry run": (["dsl", "--dry-run", "--master_port", "29500", "--no_python", "true"], 0),
    "a tuning": (["dsl", "--autotuning", "run", "x.py", "--deepspeed_config", "x.json"], 2),
}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("mistake", NO_JOB)
def test_what_starts_no_job_stays_in_the_shell(shell: Shell, tmp_path: Path, mistake: str) -> None:
    (name, *words), code = NO_JOB[mistake]
    usual = shell.run(shell.tool(name, *words), cwd=tmp_path)
    detached = shell.run(shell.tool(name, "--detach", *words), cwd=tmp_path)
    assert detached.returncode == code
    if mistake != "a tuning":
        assert (code, detached.stdout, detached.stderr) == (usual.returncode, usual.stdout, usual.stderr)
    assert not list(shell.jobs.glob("*"))


def test_notices_of_the_plan_are_shown_in_the_shell_and_kept(shell: Shell, tmp_path: Path) -> None:
    ended = shell.run(shell.line(["exit", "0"], "--log_dir", str(tmp_path / "logs"), "--log_level", "info"))
    notices = ended.stderr.decode().splitlines()[:-1]
    pid = shell.pid_of(ended)
    assert any("logs" in line for line in notices)
    assert shell.attach(pid).stdout.decode().splitlines()[: len(notices)] == notices


@pytest.mark.engine
@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize("victim", ["guard", "agent", "both"])
def test_a_job_whose_processes_are_killed_is_over_for_all_who_wait(
    shell: Shell, tmp_path: Path, victim: str
) -> None:
    pid = shell.detach(["note", str(tmp_path / "ready"), "%p", "pause"])
    until(lambda: len(complete_lines(tmp_path / "ready")) == 2)
    workers = [processes.find(int(line)) for line in complete_lines(tmp_path / "ready")]
    commands = {name: shell.popen(name, pid) for name in TOOLS}
    for one in {"guard": [pid], "agent": [agent_of(pid)], "both": [pid, agent_of(pid)]}[victim]:
        os.kill(one, signal.SIGKILL)
    for name, command in commands.items():
        said = command.communicate(timeout=30)[1].decode()
        assert command.returncode == KILLED, name
        text = f"{name}: job {pid} has left no exit code: its guard was killed\n"
        assert said == ("" if victim == "agent" else text)
    assert not [worker for worker in workers if worker is not None and processes.alive(worker)]


def test_dsl_wait_takes_several_jobs_and_returns_the_first_failure(shell: Shell) -> None:
    codes = [shell.detach(["exit", code], workers=1) for code in ("0", "4", "5")]
    assert shell.wait(*codes).returncode == 4
    assert shell.wait(*codes[::-1]).returncode == 5
    assert shell.wait(codes[0]).returncode == 0


@pytest.mark.guarantee("G8")
def test_a_job_that_is_not_there_is_one_line(shell: Shell) -> None:
    for tool, word in itertools.product(TOOLS, (1, "../..")):
        ended = shell.run(shell.tool(tool, word))
        assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (2, b"", 1)
        assert b"has gone to the background on this host" in ended.stderr
    assert shell.wait().returncode == 2


TRAPS = {
    "link": 'ln -s "$1" jobs',
    "open": "mkdir -m 750 jobs",
    "file": "touch jobs",
    "link above": 'rmdir "$PWD" && ln -s "$1" "$PWD"',
    "foreign": "mkdir -m 700 jobs && chown 1:1 jobs",
    "relative": "",
}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("trap", TRAPS)
def test_a_folder_that_is_not_ours_alone_is_refused_before_the_start(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    if trap == "foreign" and os.geteuid() != 0:
        pytest.skip("needs root")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    shell.jobs.parent.mkdir(parents=True, mode=0o700)
    assert shell.run(["sh", "-c", TRAPS[trap], "sh", elsewhere], cwd=shell.jobs.parent).returncode == 0
    if trap == "relative":
        monkeypatch.setenv("XDG_STATE_HOME", "state")
        monkeypatch.setenv("HOME", "/dev/null")
    touched = tmp_path / "touched"
    ended = shell.run(shell.line(["touch", str(touched)]), cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (1, b"", 1)
    assert b"dsl: error: the output of jobs cannot be kept in" in ended.stderr
    assert b"set XDG_STATE_HOME to another directory" in ended.stderr
    assert not touched.exists()
    assert not list(elsewhere.iterdir())


@pytest.mark.root
@pytest.mark.guarantee("G8")
def test_a_full_disk_is_refused_before_the_start(shell: Shell, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    fill = 'dd if=/dev/zero of="$state/fill" bs=1k status=none 2>/dev/null; "$@"'
    ended = shell.in_room("16k", fill, shell.line(["touch", str(touched)]))
    assert (ended.returncode, ended.stderr.count(b"\n")) == (1, 1), ended.stderr
    assert b"no space left on device" in ended.stderr
    assert not touched.exists()


KEEPS = """
"$@" || exit 98
"$(dirname "$1")/dsl-wait"
"$(dirname "$1")/dsl-attach"
"""


@pytest.mark.root
@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("ending, code", [("7", 7), ("0", 1)])
def test_a_job_that_fills_the_disk_still_has_its_exit_code(shell: Shell, ending: str, code: int) -> None:
    """A job that had succeeded but for its output has failed."""
    ended = shell.in_room("128k", KEEPS, shell.line(["lines", "5000", "80", "exit", ending]))
    assert ended.returncode == code, ended.stderr


LAST = """
import os, time
if os.environ["RANK"] != "0":
    time.sleep(600)
try:
    for _ in range(5000):
        os.write(1, b"x" * 79 + b"\\n")
except OSError:
    pass
raise ValueError("bad batch")
"""


@pytest.mark.root
@pytest.mark.guarantee("G2", "G3")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_fills_the_disk_keeps_its_verdict(shell: Shell, tmp_path: Path, workers: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(LAST)
    own = shell.tool("dsl", "--detach", f"--num_gpus={workers}", "--no_local_rank", script)
    ended = shell.in_room("128k", KEEPS, own)
    assert ended.returncode == 1, ended
    lines = ended.stdout.decode().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("[dsl: the disk was full"))
    assert any("rank 0 (local rank 0, pid" in line and "exit code 1" in line for line in lines[at:])
    if workers == 1:
        assert any("/output may lack its last words: No space left on device" in line for line in lines[at:])
    else:
        assert any("cannot write stdout: No space left on device" in line for line in lines[at:])
        assert "ValueError: bad batch" in "\n".join(lines[at:])


def test_old_jobs_make_room_and_nothing_else_is_removed(shell: Shell) -> None:
    running = shell.detach(["wait", str(shell.go)], workers=1)
    pids = [shell.detach(["exit", "0"], workers=1) for _ in range(3)]
    assert shell.wait(*pids).returncode == 0
    for number in range(25):  # as old as the first of them
        shutil.copytree(shell.folder(pids[0]), shell.jobs / f"1-{number:016x}", copy_function=shutil.copyfile)
    strange, guest = shell.jobs / "1-00000000000000ff", shell.jobs / f"1-{0:016x}" / "guest"
    strange.mkdir()
    for path in (shell.jobs / "note", strange / "job.json", guest):
        path.write_text("{}")
    last = shell.detach(["exit", "0"], workers=1)
    assert shell.wait(last).returncode == 0
    left = {path.name for path in shell.jobs.iterdir()}
    assert {"note", strange.name, shell.folder(running).name, shell.folder(last).name} <= left
    assert guest.read_text() == "{}" or guest.parent.name in left
    assert len(left) <= 1 + 20 + 1 + 3 + 1
    shell.go.touch()
    assert shell.wait(running).returncode == 0


@pytest.mark.guarantee("G1", "G2")
def test_ctrl_c_before_the_job_runs_ends_it(shell: Shell, tmp_path: Path) -> None:
    """The command has left the terminal by then, and stands just before the fork of its agent."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def hear(event, words):\n"
        "    if event == 'os.fork' and sys.argv[0].endswith('/dsl') and os.getsid(0) == os.getpid():\n"
        f"        open({str(tmp_path / 'there')!r}, 'w').close()\n"
        "        import _signal\n"
        "        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {2})\n"
        "        _signal.pause()\n"
        "sys.addaudithook(hear)\n"
    )
    environ = {"PYTHONPATH": str(tmp_path)}
    with terminal(shell.line(["exit", "0"]), environ) as window:
        until((tmp_path / "there").exists)
        window.press(b"\x03")
        window.reported("ended 130")
    assert not list(shell.jobs.iterdir())


def test_nodes_that_wait_for_others_wait_in_the_background(shell: Shell) -> None:
    """In a loop over the nodes, the command for one node cannot wait for the next."""
    options = ("--detach", "--nnodes", 2, "--master-port", free_port(), "--nproc-per-node", 1, "--no-python")
    words = (*options, "sh", "-c", "echo $RANK of $WORLD_SIZE")
    lines = [shell.tool("dslrun", "--node-rank", rank, *words) for rank in (1, 0)]
    pids = [shell.pid_of(shell.run(lines[0]))]
    _, row = shell.run(shell.tool("dsl-ps")).stdout.decode().splitlines()
    assert re.match(rf"{pids[0]}  waiting  \d:\d\d .* dslrun --node-rank 1 --detach --nnodes 2 ", row), row
    listed = json.loads(shell.run(shell.tool("dsl-ps", "--json")).stdout)
    assert ([one["pid"] for one in listed["waiting"]], listed["jobs"]) == (pids, [])
    pids.append(shell.pid_of(shell.run(lines[1])))
    attached = [shell.attach(pid) for pid in pids]
    assert [one.returncode for one in attached] == [0, 0]
    assert b"1 of 2\n" in attached[0].stdout
    assert b"0 of 2\n" in attached[1].stdout
    assert len(shell.run(shell.tool("dsl-ps")).stdout.splitlines()) == 1


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "words", ["--node-rank=1 --master-port=", "--rdzv-backend=c10d --rdzv-endpoint=localhost:"]
)
def test_a_signal_while_a_node_waits_for_others_is_its_exit_code(shell: Shell, words: str) -> None:
    place = f"{words}{free_port()}".split()
    line = ("--detach", "--nnodes", 2, *place, "--nproc-per-node", 1, "--no-python", "true")
    pid = shell.pid_of(shell.run(shell.tool("dslrun", *line)))
    os.kill(pid, signal.SIGTERM)
    assert shell.wait(pid).returncode == 128 + signal.SIGTERM


@pytest.mark.guarantee("G1", "G2")
def test_a_job_that_is_ended_at_any_moment_has_its_exit_code(shell: Shell) -> None:
    chance = random.Random(25)
    ends = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGKILL: KILLED, 0: 0}
    for _ in range(25):
        signum = chance.choice([*ends])
        pid = shell.detach(["sleep", "50" if signum == 0 else "60000"], workers=2)
        waiting = [shell.popen(name, pid) for name in TOOLS]
        if signum and chance.random() < 0.5:
            until(partial(processes.children, agent_of(pid)))
        if signum:
            os.kill(pid, signum)
        for one in waiting:
            one.communicate(timeout=30)
        assert [one.returncode for one in waiting] == [ends[signum]] * 2, signum


@pytest.mark.timeout(120)
@pytest.mark.guarantee("G1", "G2", "G6")
def test_who_comes_and_goes_changes_nothing(shell: Shell) -> None:
    chance = random.Random(100)
    words = ["lines", "3000", "60", "wait", str(shell.go), "lines", "3000", "60", "exit", "9"]
    pid = shell.detach(words, "--tag-output", "always")
    viewers: list[subprocess.Popen[bytes]] = []
    for number in range(100):
        viewer = shell.popen("dsl-attach", pid)
        assert viewer.stdout is not None
        os.read(viewer.stdout.fileno(), chance.choice([1, 100, 100_000]))
        viewers.append(viewer)
        if number == 50:
            shell.go.touch()
        if len(viewers) >= 4:
            victim = viewers.pop(chance.randrange(4))
            victim.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP]))
            victim.communicate(timeout=30)
    rest = [viewer.communicate(timeout=60)[0] for viewer in viewers]
    assert {viewer.returncode for viewer in viewers} == {9}
    written = (shell.folder(pid) / "output").read_bytes()
    assert shell.attach(pid).stdout == written
    assert all(written.endswith(one) for one in rest)
    assert shell.wait(pid).returncode == 9


def test_commands_that_close_their_streams_go_to_the_background_as_well(shell: Shell) -> None:
    closed = 'exec "$@" <&- >&-'
    pid = shell.pid_of(shell.run(["bash", "-c", closed, "bash", *shell.line(["say", "hello"])]))
    assert shell.attach(pid).stdout.count(b"hello\n") == 2
