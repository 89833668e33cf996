"""Jobs in the background: what their shell gets, what survives it, and what dsl-attach and dsl-wait make of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.namespaces import unshared
from tests.support.places import free_port
from tests.support.terminal import terminal

KILLED = 137
TOOLS = ("dsl-wait", "dsl-attach")
RUNS = re.compile(
    r"^dsl(?:run)?: job (\d+) runs in the background; dsl-attach \1 follows it, dsl-wait \1 waits for it$"
)


class Shell:
    """A user who starts jobs in the background, with the folders of the jobs at ``state``."""

    def __init__(self, dsl_command: Path, testchild: Path, state: Path) -> None:
        self._bin = dsl_command.parent
        self._testchild = str(testchild)
        self.state = state
        self.jobs = state / "dsl" / "jobs"
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

    def folder(self, pid: int) -> Path:
        """The folder of a job."""
        (found,) = self.jobs.glob(f"{pid}-*")
        return found

    def close(self) -> None:
        """End what a failed test has left."""
        for pid in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shell(
    dsl_command: Path, testchild: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shell]:
    """A shell with folders of its own."""
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = Shell(dsl_command, testchild, state)
    yield made
    made.close()


def agent_of(guard: int) -> int:
    """The agent of a command."""
    (agent,) = processes.children(guard)
    return agent


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "end, code",
    [(("exit", "0"), 0), (("exit", "3"), 3), (("raise", "KILL"), 137), (("raise", "TERM"), 143)],
)
def test_the_shell_goes_on_at_once_and_the_exit_code_can_be_had_later(
    shell: Shell, tmp_path: Path, end: tuple[str, ...], code: int
) -> None:
    go = tmp_path / "go"
    pid = shell.detach(["say", "hello", "wait", str(go), "only", "0", "[", *end, "]"])
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
    waiting = subprocess.Popen(shell.tool("dsl-wait", pid), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    go.touch()
    said, _ = waiting.communicate(timeout=30)
    assert (waiting.returncode, said) == (code, b"")
    assert shell.wait().returncode == code, "it has ended"
    attached = shell.attach(pid)
    assert (attached.returncode, attached.stderr) == (code, b"")
    assert attached.stdout.count(b"hello\n") == 2
    assert (b"exit code 3" in attached.stdout) == (code == 3), "the verdict is there, too"


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
    assert b"attempt 0\n" in attached.stdout
    assert b"attempt 1\n" in attached.stdout


def test_files_of_a_job_are_for_its_user_alone(shell: Shell) -> None:
    pid = shell.detach(["say", "secret"])
    assert shell.wait(pid).returncode == 0
    for folder in (shell.jobs, shell.folder(pid)):
        assert folder.stat().st_mode & 0o777 == 0o700
    files = {path.name: path for path in shell.folder(pid).iterdir()}
    assert set(files) == {"job.json", "output", "exit.json"}
    assert {path.stat().st_mode & 0o777 for path in files.values()} == {0o600}
    begun = json.loads(files["job.json"].read_text())["JobStart"]
    assert begun["pid"] == pid
    assert begun["words"][:2] == ["dsl", "--no_python"]
    assert begun["cwd"] == os.getcwd()


@pytest.mark.guarantee("G6")
def test_everybody_who_attaches_gets_all_bytes(shell: Shell, tmp_path: Path) -> None:
    """Some of them attach while it is written, several at once, and one when it is over."""
    go, goes_on = tmp_path / "go", tmp_path / "goes_on"
    words = ["lines", "2000", "40", "note", str(goes_on), "%r", "wait", str(go), "lines", "20000", "40"]
    pid = shell.detach(words, "--tag-output", "always")
    until(goes_on.exists)
    viewers = [subprocess.Popen(shell.tool("dsl-attach", pid), stdout=subprocess.PIPE) for _ in range(3)]
    go.touch()
    viewers += [subprocess.Popen(shell.tool("dsl-attach", pid), stdout=subprocess.PIPE) for _ in range(2)]
    seen = [viewer.communicate(timeout=60)[0] for viewer in viewers]
    assert shell.wait(pid).returncode == 0
    written = (shell.folder(pid) / "output").read_bytes()
    assert written.count(b"\n") >= 44_000
    assert [one == written for one in (*seen, shell.attach(pid).stdout)] == [True] * 6
    assert {viewer.returncode for viewer in viewers} == {0}


def test_the_last_lines_come_first_if_they_are_enough(shell: Shell) -> None:
    pid = shell.detach(["say", "one", "say", "two", "say", "three"], workers=1)
    assert shell.wait(pid).returncode == 0
    assert shell.attach("-n", 2, pid).stdout == b"two\nthree\n"
    assert shell.attach("--lines=0", pid).stdout == b""


@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize("leave", ["hang up", "log out"])
def test_a_job_outlives_its_terminal(shell: Shell, tmp_path: Path, leave: str) -> None:
    go = tmp_path / "go"
    line = shell.line(["say", "before", "wait", str(go), "say", "after", "exit", "4"])
    with terminal(line) as window:
        window.showed("runs in the background")
        window.reported("ended 0")
        (folder,) = shell.jobs.iterdir()
        pid = int(folder.name.partition("-")[0])
        shell.started.append(pid)
        guard, agent = processes.find(pid), processes.find(agent_of(pid))
        assert guard is not None
        assert agent is not None
        if leave == "hang up":
            window.hang_up()
        else:
            os.killpg(window.shell, signal.SIGHUP)
    assert processes.alive(guard)
    assert processes.alive(agent)
    go.touch()
    attached = shell.attach(pid)
    assert (attached.returncode, attached.stdout.count(b"before\n")) == (4, 2)
    assert b"after\n" in attached.stdout


@pytest.mark.guarantee("G1", "G2")
def test_ctrl_c_in_dsl_attach_leaves_the_job_alone(shell: Shell, tmp_path: Path) -> None:
    go = tmp_path / "go"
    pid = shell.detach(["say", "hello", "wait", str(go), "exit", "6"])
    with terminal(shell.tool("dsl-attach", pid)) as window:
        window.showed("hello")
        window.press(b"\x03")
        window.showed(f"dsl-attach: job {pid} runs on; dsl-attach {pid} comes back to it")
        window.reported(f"ended {-signal.SIGINT}")
    viewer = subprocess.Popen(shell.tool("dsl-attach"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert viewer.stdout is not None
    assert viewer.stdout.readline() == b"hello\n"
    viewer.terminate()
    assert b"runs on" in viewer.communicate(timeout=30)[1]
    assert viewer.returncode == 128 + signal.SIGTERM
    go.touch()
    attached = shell.attach(pid)
    assert (attached.returncode, attached.stdout.count(b"hello\n")) == (6, 2)


def test_a_reader_that_goes_ends_dsl_attach_alone(shell: Shell, tmp_path: Path) -> None:
    go = tmp_path / "go"
    pid = shell.detach(["lines", "100000", "80", "wait", str(go)], workers=1)
    piped = f"{' '.join(shell.tool('dsl-attach', pid))} | head -n 1; exit ${{PIPESTATUS[0]}}"
    ended = shell.run(["bash", "-c", piped])
    assert (ended.returncode, ended.stdout.count(b"\n"), ended.stderr) == (141, 1, b"")
    go.touch()
    assert shell.wait(pid).returncode == 0


REFUSED = {
    "a bad option": (["dsl", "--grace", "-1", "x.py"], 2),
    "a bad plan": (["dslrun", "--nproc-per-node", "0", "x.py"], 2),
    "no script": (["dsl", "nothing-here.py"], 2),
    "no program": (["dsl", "--no_python", "nothing-here"], 127),
    "a bad place for logs": (["dsl", "--log_dir", "/dev/null/x", "--no_python", "true"], 2),
    "a tuning": (["dsl", "--autotuning", "run", "x.py", "--deepspeed_config", "x.json"], 2),
}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("mistake", REFUSED)
def test_what_is_refused_is_refused_in_the_shell(shell: Shell, tmp_path: Path, mistake: str) -> None:
    (name, *words), code = REFUSED[mistake]
    usual = shell.run(shell.tool(name, *words), cwd=tmp_path)
    detached = shell.run(shell.tool(name, "--detach", *words), cwd=tmp_path)
    assert detached.returncode == code
    if mistake != "a tuning":
        assert (detached.returncode, detached.stdout, detached.stderr) == (
            usual.returncode,
            usual.stdout,
            usual.stderr,
        )
    assert not shell.jobs.exists() or not list(shell.jobs.iterdir())


def test_a_dry_run_stays_in_the_shell(shell: Shell) -> None:
    shown = shell.run(shell.line(["exit", "0"], "--dry-run"))
    assert shown.returncode == 0
    assert b"command:" in shown.stdout
    assert not shell.state.exists()


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
    until(
        lambda: (tmp_path / "ready").read_text().count("\n") == 2 if (tmp_path / "ready").exists() else False
    )
    workers = [processes.find(int(line)) for line in (tmp_path / "ready").read_text().split()]
    agent = agent_of(pid)
    commands = {name: subprocess.Popen(shell.tool(name, pid), stderr=subprocess.PIPE) for name in TOOLS}
    for one in {"guard": [pid], "agent": [agent], "both": [pid, agent]}[victim]:
        os.kill(one, signal.SIGKILL)
    for name, command in commands.items():
        said = command.communicate(timeout=30)[1].decode()
        assert command.returncode == KILLED, name
        assert said == (
            "" if victim == "agent" else f"{name}: job {pid} has left no exit code: its guard was killed\n"
        )
    assert not [worker for worker in workers if worker is not None and processes.alive(worker)]


def test_dsl_wait_takes_several_jobs_and_returns_the_first_failure(shell: Shell) -> None:
    codes = [shell.detach(["exit", code], workers=1) for code in ("0", "4", "5")]
    assert shell.wait(*codes).returncode == 4
    assert shell.wait(*codes[::-1]).returncode == 5
    assert shell.wait(codes[0]).returncode == 0


@pytest.mark.guarantee("G8")
def test_a_job_that_is_not_there_is_one_line(shell: Shell) -> None:
    for tool in TOOLS:
        for words in ((1,), ("../..",)):
            ended = shell.run(shell.tool(tool, *words))
            assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (2, b"", 1)
            assert b"has gone to the background on this host" in ended.stderr
    assert shell.wait().returncode == 2


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("trap", ["link", "open", "file", "link above", "foreign", "relative"])
def test_a_folder_that_is_not_ours_alone_is_refused_before_the_start(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    if trap == "foreign" and os.geteuid() != 0:
        pytest.skip("needs root")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    shell.jobs.parent.mkdir(parents=True, mode=0o700)
    if trap == "link":
        shell.jobs.symlink_to(elsewhere)
    elif trap == "open":
        shell.jobs.mkdir()
        shell.jobs.chmod(0o750)
    elif trap == "file":
        shell.jobs.touch()
    elif trap == "link above":
        shell.jobs.parent.rmdir()
        shell.jobs.parent.symlink_to(elsewhere)
    elif trap == "foreign":
        shell.jobs.mkdir(mode=0o700)
        os.chown(shell.jobs, 1, 1)
    else:
        monkeypatch.setenv("XDG_STATE_HOME", "state")
        monkeypatch.setenv("HOME", "/dev/null")
    touched = tmp_path / "touched"
    ended = shell.run(shell.line(["touch", str(touched)]), cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (1, b"", 1)
    assert b"dsl: error: the output of jobs cannot be kept in" in ended.stderr
    assert b"set XDG_STATE_HOME to another directory" in ended.stderr
    assert not touched.exists()
    assert not list(elsewhere.iterdir())


FULL = """
mount -t tmpfs -o size=16k none "$1" || exit 99
dd if=/dev/zero of="$1/fill" bs=1k status=none 2>/dev/null
shift
"$@"
"""


@pytest.mark.root
@pytest.mark.guarantee("G8")
def test_a_full_disk_is_refused_before_the_start(shell: Shell, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    shell.state.mkdir()
    line = shell.line(["touch", str(touched)])
    ended = shell.run([*unshared("--mount"), "bash", "-c", FULL, "bash", str(shell.state), *line])
    assert (ended.returncode, ended.stderr.count(b"\n")) == (1, 1), ended.stderr
    assert b"no space left on device" in ended.stderr
    assert not touched.exists()


FILLS = """
mount -t tmpfs -o size=64k none "$1" || exit 99
state=$1; shift
"$@" || exit 98
"$(dirname "$1")/dsl-wait"
"""


KEEPS = """
mount -t tmpfs -o size=128k none "$1" || exit 99
state=$1; shift
"$@" || exit 98
"$(dirname "$1")/dsl-wait"
"$(dirname "$1")/dsl-attach"
"""


@pytest.mark.root
@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("ending, code", [("7", 7), ("0", 1)])
def test_a_job_that_fills_the_disk_still_has_its_exit_code(shell: Shell, ending: str, code: int) -> None:
    """A job that had succeeded but for its output has failed."""
    shell.state.mkdir()
    line = shell.line(["lines", "5000", "80", "exit", ending])
    ended = shell.run([*unshared("--mount"), "bash", "-c", FILLS, "bash", str(shell.state), *line])
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
    shell.state.mkdir()
    script = tmp_path / "train.py"
    script.write_text(LAST)
    own = shell.tool("dsl", "--detach", f"--num_gpus={workers}", "--no_local_rank", script)
    ended = shell.run([*unshared("--mount"), "bash", "-c", KEEPS, "bash", str(shell.state), *own])
    said = ended.stdout.decode()
    assert ended.returncode == 1, ended
    lines = said.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("[dsl: the disk was full"))
    assert any("rank 0 (local rank 0, pid" in line and "exit code 1" in line for line in lines[at:])
    if workers == 1:
        assert any("/output may lack its last words: No space left on device" in line for line in lines[at:])
    else:
        assert any("cannot write stdout: No space left on device" in line for line in lines[at:])
        assert "ValueError: bad batch" in "\n".join(lines[at:])


def test_old_jobs_make_room_and_nothing_else_is_removed(shell: Shell, tmp_path: Path) -> None:
    go = tmp_path / "go"
    running = shell.detach(["wait", str(go)], workers=1)
    pids = [shell.detach(["exit", "0"], workers=1) for _ in range(3)]
    assert shell.wait(*pids).returncode == 0
    template = shell.folder(pids[0])
    for number in range(25):  # as old as the first of them
        copy = shell.jobs / f"1-{number:016x}"
        copy.mkdir()
        for file in template.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    strange = shell.jobs / "1-00000000000000ff"
    (shell.jobs / "note").write_text("mine")
    strange.mkdir()
    (strange / "job.json").write_text("{}")
    guest = shell.jobs / f"1-{0:016x}" / "guest"
    guest.write_text("mine")
    last = shell.detach(["exit", "0"], workers=1)
    assert shell.wait(last).returncode == 0
    left = {path.name for path in shell.jobs.iterdir()}
    assert {"note", strange.name, shell.folder(running).name, shell.folder(last).name} <= left
    assert guest.read_text() == "mine" or guest.parent.name in left
    assert len(left) <= 1 + 20 + 1 + 3 + 1
    go.touch()
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


def test_nodes_that_wait_for_others_wait_in_the_background(shell: Shell, tmp_path: Path) -> None:
    """In a loop over the nodes, the command for one node cannot wait for the next."""
    options = ("--detach", "--nnodes", 2, "--master-port", free_port(), "--nproc-per-node", 1, "--no-python")
    pids = [
        shell.pid_of(
            shell.run(
                shell.tool("dslrun", "--node-rank", rank, *options, "sh", "-c", "echo $RANK of $WORLD_SIZE")
            )
        )
        for rank in (1, 0)
    ]
    attached = [shell.attach(pid) for pid in pids]
    assert [one.returncode for one in attached] == [0, 0]
    assert b"1 of 2\n" in attached[0].stdout
    assert b"0 of 2\n" in attached[1].stdout


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "words", [("--node-rank", "1"), ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost")]
)
def test_a_signal_while_a_node_waits_for_others_is_its_exit_code(
    shell: Shell, words: tuple[str, ...]
) -> None:
    port = free_port()
    place = ("--master-port", port) if "--node-rank" in words else ()
    words = tuple(f"{word}:{port}" if word == "localhost" else word for word in words)
    line = shell.tool(
        "dslrun", "--detach", "--nnodes", 2, *words, *place, "--nproc-per-node", 1, "--no-python", "true"
    )
    pid = shell.pid_of(shell.run(line))
    os.kill(pid, signal.SIGTERM)
    assert shell.wait(pid).returncode == 128 + signal.SIGTERM


@pytest.mark.guarantee("G1", "G2")
def test_a_job_that_is_ended_at_any_moment_has_its_exit_code(shell: Shell) -> None:
    chance = random.Random(25)
    ends = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGKILL: KILLED, 0: 0}
    for _ in range(25):
        signum = chance.choice([*ends])
        pid = shell.detach(["sleep", "50" if signum == 0 else "60000"], workers=2)
        null = subprocess.DEVNULL
        waiting = [subprocess.Popen(shell.tool(name, pid), stdout=null, stderr=null) for name in TOOLS]
        if signum and chance.random() < 0.5:
            until(partial(processes.children, agent_of(pid)))
        if signum:
            os.kill(pid, signum)
        assert [one.wait(30) for one in waiting] == [ends[signum]] * 2, signum


@pytest.mark.timeout(120)
@pytest.mark.guarantee("G1", "G2", "G6")
def test_who_comes_and_goes_changes_nothing(shell: Shell, tmp_path: Path) -> None:
    count = 100
    chance = random.Random(count)
    go = tmp_path / "go"
    words = ["lines", "3000", "60", "wait", str(go), "lines", "3000", "60", "exit", "9"]
    pid = shell.detach(words, "--tag-output", "always")
    viewers: list[subprocess.Popen[bytes]] = []
    for number in range(count):
        viewer = subprocess.Popen(
            shell.tool("dsl-attach", pid), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert viewer.stdout is not None
        os.read(viewer.stdout.fileno(), chance.choice([1, 100, 100_000]))
        viewers.append(viewer)
        if number == count // 2:
            go.touch()
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
