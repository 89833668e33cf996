"""What a user of the command sees of the workers' output, on a terminal, in a pipe and in files."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support import terminal as support
from tests.support.command import dsl_line
from tests.support.jobs import running
from tests.support.logs import Found, check
from tests.support.terminal import Terminal

Open = Callable[..., AbstractContextManager[Terminal]]

pytestmark = [pytest.mark.engine, pytest.mark.guarantee("G3", "G6")]

FAILING = """
import os, sys
print("step 1 of", os.environ["RANK"], flush=True)
def step():
    raise ValueError("bad batch")
if os.environ["RANK"] == "1":
    step()
import time
time.sleep(100)
"""


def _run(
    command: Sequence[str], stdin: bytes = b"", timeout_s: float = 60
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(list(command), input=stdin, capture_output=True, timeout=timeout_s, check=False)


def _only_log(root: Path, name: str) -> Path:
    (path,) = root.rglob(name)
    return path


def test_lines_of_several_workers_stay_whole_in_a_pipe(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = [str(testchild), "numbered", "1", "300", "60", "two", "numbered", "2", "200", "60", "split"]
    result = _run(dsl_line(dsl_command, 8, words))
    linecheck = testchild.with_name("dsl-linecheck")
    assert check(linecheck, result.stdout) == Found(2400, 0, 0, 0, 0)
    assert check(linecheck, result.stderr) == Found(1600, 0, 0, 0, 0)


BY_TURNS = """
import os
rank = os.environ["RANK"]
for number in range(3000):
    os.write(2 - number % 2, f"{rank} {number}\\n".encode())
os.write(2, b"Traceback (most recent call last):\\n")
os.write(1, b"  of no file\\n")
"""


def _by_rank(text: bytes) -> dict[bytes, list[int]]:
    """The numbers of `BY_TURNS`, in the order in which they are shown."""
    found: dict[bytes, list[int]] = {}
    for line in text.splitlines():
        words = line.removeprefix(b"[rank ").replace(b"] ", b" ").split()[-2:]
        if len(words) == 2 and words[1].isdigit():
            found.setdefault(words[0], []).append(int(words[1]))
    return found


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("place", ["file", "pipe"])
@pytest.mark.parametrize("options", [[], ["--tag-output", "always"]])
@pytest.mark.parametrize("count", [1, 3])
def test_what_goes_to_one_place_stays_in_the_order_in_which_a_worker_wrote_it(
    count: int, options: list[str], place: str, method: str, dsl_command: Path, tmp_path: Path
) -> None:
    """As after ``> log 2>&1``."""
    (tmp_path / "by_turns.py").write_text(BY_TURNS)
    words = [f"--num_gpus={count}", "--start-method", method, *options, str(tmp_path / "by_turns.py")]
    line = [str(dsl_command), "--no_local_rank", *words]
    if place == "file":
        with (tmp_path / "log").open("wb") as log:
            subprocess.run(line, stdout=log, stderr=log, timeout=60, check=True)
        text = (tmp_path / "log").read_bytes()
    else:
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60, check=True)
        text = done.stdout
    assert _by_rank(text) == {b"%d" % rank: list(range(3000)) for rank in range(count)}
    assert text.count(b"of no file") == count


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("ending, code", [("0", 1), ("7", 7)])
def test_output_that_a_full_disk_did_not_take_is_told_and_fails_a_job_that_had_succeeded(
    command: str, stream: str, ending: str, code: int, dsl_command: Path, testchild: Path
) -> None:
    options = ["--no_python", "--no_local_rank", "--num_gpus=2"]
    if command == "dslrun":
        options = ["--no-python", "--nproc-per-node=2"]
    line = [
        str(dsl_command.with_name(command)),
        *options,
        str(testchild),
        "numbered",
        "1",
        "300",
        "60",
        "two",
    ]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "wb") as full:
        streams[stream] = full
        line += ["complain", "hello", "exit", ending]
        result = subprocess.run(line, **streams, timeout=60, check=False)
    assert result.returncode == code
    if stream == "stdout":
        said = result.stderr.decode().splitlines()
        why = "No space left on device, the job goes on without what does not fit"
        assert f"{command}: warning: cannot write stdout: {why}" in said
        assert any(
            re.fullmatch(rf"{command}: warning: stdout lacks [0-9]+ bytes that .*", one) for one in said
        )
    elif ending == "0":
        assert len(result.stdout.splitlines()) == 600


def test_a_log_file_that_lacks_output_fails_a_job_that_had_succeeded(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = [str(testchild), *["raw", "x" * 99 + r"\n"] * 20]
    limited = ["bash", "-c", 'ulimit -S -f 1; exec "$@"', "bash"]
    result = _run([*limited, *dsl_line(dsl_command, 2, words, None, f"--log-dir={tmp_path}")])
    assert result.returncode == 1
    assert result.stdout.splitlines() == [b"x" * 99] * 40
    assert b"stdout.log: File too large, the job goes on without what does not fit" in result.stderr


def test_a_disk_that_has_room_again_gets_the_later_lines_whole(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """What stands for the disk is a limit for our files: it leaves room for half a line, and is lifted later."""
    go, size = tmp_path / "go", 1024
    words = [str(testchild), *["raw", "x" * 99 + r"\n"] * 10, "wait", str(go), "say", "later"]
    with (tmp_path / "out").open("ab") as out, (tmp_path / "err").open("ab") as err:
        line = ["bash", "-c", 'ulimit -S -f 1; exec "$@"', "bash", *dsl_line(dsl_command, 2, words)]
        process = subprocess.Popen(line, stdout=out, stderr=err)
    until(lambda: "cannot write stdout: File too large" in (tmp_path / "err").read_text())
    until(lambda: (tmp_path / "out").stat().st_size == size)
    for pid in processes.children(process.pid):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    go.touch()
    assert process.wait(60) == 1
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == [*["x" * 99] * 10, "x" * 24, *["later"] * 2]


def test_a_piped_line_has_a_prefix_only_if_asked(dsl_command: Path, testchild: Path) -> None:
    words = [str(testchild), "say", "hello"]
    assert _run(dsl_line(dsl_command, 2, words)).stdout == b"hello\nhello\n"
    tagged = _run(dsl_line(dsl_command, 2, words, None, "--tag-output", "always")).stdout
    assert sorted(tagged.splitlines()) == [b"[rank 0] hello", b"[rank 1] hello"]


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_tee_writes_torchruns_prefix_also_into_a_pipe(
    command: str, dsl_command: Path, testchild: Path
) -> None:
    """As recorded of torchrun 2.15 with `--tee 0:1,1:2`: only what is teed has it."""
    words = [str(testchild), "say", "out %r", "complain", "err %r"]
    if command == "dsl":
        line = dsl_line(dsl_command, 2, words, None, "--tee", "0:1,1:2")
    else:
        dslrun = str(dsl_command.with_name("dslrun"))
        line = [dslrun, "--no-python", "--nproc-per-node=2", "--tee", "0:1,1:2", "--role", "trainer", *words]
    result = _run(line)
    role = b"default" if command == "dsl" else b"trainer"
    assert sorted(result.stdout.splitlines()) == sorted([b"[" + role + b"0]:out 0", b"out 1"])
    errors = [line for line in result.stderr.splitlines() if b"err" in line]
    assert sorted(errors) == sorted([b"[" + role + b"1]:err 1", b"err 0"])


def test_a_terminal_shows_prefixes_and_the_workers_see_one(terminal: Open, dsl_command: Path) -> None:
    script = "test -t 1 && test -t 2 && echo yes"
    with terminal(dsl_line(dsl_command, 2, ["/bin/sh", "-c", script]), {"TERM": "xterm"}) as screen:
        screen.reported("ended 0")
        text = _screen(screen)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert sorted(plain.split()) == sorted(["[rank", "0]", "yes", "[rank", "1]", "yes"])
    assert text != plain, "each rank has a colour"


def _screen(screen: Terminal) -> str:
    """All that was shown."""
    return screen.shown().decode(errors="replace").replace("\r\n", "\n")


def test_progress_bars_stand_below_the_lines(terminal: Open, dsl_command: Path, testchild: Path) -> None:
    words = ["raw", "\\r10%", "sleep", "300", "raw", "\\r20%", "sleep", "300", "only", "0", "["]
    words += ["say", "\\rdone", "]"]
    with terminal(dsl_line(dsl_command, 2, [str(testchild), *words]), {"TERM": "xterm"}) as screen:
        screen.reported("ended 0")
        text = re.sub(r"\x1b\[[0-9;]*m", "", _screen(screen))
    assert "[rank 0] 10%\n[rank 1] 10%" in text
    assert "\r\x1b[1A\x1b[J" in text, "they are redrawn in place"


def test_the_window_size_reaches_the_workers_terminals(
    terminal: Open, dsl_command: Path, tmp_path: Path
) -> None:
    import fcntl
    import struct
    import termios

    def resize(screen: Terminal, rows: int, columns: int) -> None:
        fcntl.ioctl(screen._keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    script = f"touch {tmp_path}/$RANK; until stty size < /dev/stderr | grep -q '33 9'; do sleep 0.02; done; echo seen"
    with terminal(dsl_line(dsl_command, 2, ["/bin/sh", "-c", script]), {"TERM": "xterm"}) as screen:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        if screen.is_in_background:
            screen.resume()  # only the foreground hears of the size
        resize(screen, 33, 100)
        screen.reported("ended 0")
        assert _screen(screen).count("seen") == 2


RESIZED = """
import os, signal
# Waited for and not handled: a handler that came in the middle of another would overtake it.
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("ready", flush=True)
while True:
    signal.sigwait([signal.SIGWINCH])
    os.write(1, b"size %d\\n" % os.get_terminal_size(0 if os.environ["RANK"] == "2" else 2).lines)
"""


def _sizes(screen: Terminal, rank: int) -> list[int]:
    """What a rank has said of its size."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", _screen(screen))
    return [int(size) for size in re.findall(rf"\[rank {rank}\] size (\d+)", plain)]


def test_a_worker_that_hears_of_a_new_size_finds_it(dsl_command: Path) -> None:
    import fcntl
    import struct
    import termios

    line = dsl_line(dsl_command, 3, [sys.executable, "-c", RESIZED], 1.0)
    with support.terminal(line, {"TERM": "xterm"}) as screen:
        until(lambda: _screen(screen).count("ready") == 3)
        for rows in range(50, 90):
            fcntl.ioctl(screen._keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 100, 0, 0))
            for rank in range(3):
                until(lambda rank=rank, rows=rows: _sizes(screen, rank)[-1:] == [rows])  # type: ignore[misc]
        assert _sizes(screen, 1) == _sizes(screen, 2) == list(range(50, 90))
        # The worker that reads the terminal also hears of it from the terminal itself, before its own has the size.
        assert list(dict.fromkeys(size for size in _sizes(screen, 0) if size != 24)) == list(range(50, 90))
        screen.press(b"\x03")
        screen.reported("ended -2")


def test_stdin_goes_to_the_worker_that_was_chosen(dsl_command: Path) -> None:
    script = 'read line; echo "$RANK got $line"'
    result = _run(
        dsl_line(dsl_command, 3, ["/bin/sh", "-c", script], None, "--stdin", "1"), stdin=b"first\nsecond\n"
    )
    assert sorted(result.stdout.splitlines()) == [b"0 got ", b"1 got first", b"2 got "]


def test_a_prompt_shows_before_its_line_is_finished(terminal: Open, dsl_command: Path) -> None:
    """A debugger in one of several workers can be talked to."""
    program = 'import os\nif os.environ["RANK"] == "1":\n    print(input("name? "), "it is")\n'
    line = dsl_line(dsl_command, 2, [sys.executable, "-c", program], None, "--stdin", "1")
    with terminal(line, {"TERM": "xterm"}) as screen:

        def asked() -> bool:
            return "name? " in _screen(screen)

        if screen.is_in_background:
            screen.reported("stopped")  # who asks from the background is stopped, as without us
            screen.resume()
        until(asked)
        screen.press(b"Ada\n")
        screen.reported("ended 0")
        assert "Ada it is" in _screen(screen)


@pytest.mark.parametrize("options", [(), ("--log-dir", "LOGS"), ("--log-dir", "LOGS", "--redirects", "3")])
def test_the_verdict_quotes_the_exception_and_the_last_output(
    options: Sequence[str], dsl_command: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    logs = [str(tmp_path / "logs") if word == "LOGS" else word for word in options]
    line = dsl_line(dsl_command, 2, [sys.executable, str(script)], 1.0, *logs)
    result = _run(line)
    assert result.returncode == 1
    verdict = result.stderr.decode()[result.stderr.decode().index("dsl: rank 1") :]
    first = verdict.splitlines()[0]
    assert "failed first: exit code 1" in first
    assert "ValueError: bad batch" in verdict
    assert "train.py:5 in step" in verdict
    assert "raise ValueError" in verdict
    if logs:
        path = next((tmp_path / "logs").rglob("1/stderr.log"))
        assert str(path) in verdict
        assert "Traceback" in path.read_text()


def test_log_files_lie_below_run_attempt_and_local_rank(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = [str(testchild), "say", "out of %r", "complain", "err of %r"]
    result = _run(dsl_line(dsl_command, 2, words, None, "--log-dir", str(tmp_path)))
    assert sorted(result.stdout.splitlines()) == [b"out of 0", b"out of 1"]
    run = tmp_path / os.readlink(tmp_path / ".latest")
    files = {str(path.relative_to(run)): path for path in run.rglob("*.log")}
    expected = {f"attempt_0/{rank}/std{kind}.log": kind for rank in range(2) for kind in ("out", "err")}
    assert set(files) == set(expected)
    for name, kind in expected.items():
        assert files[name].read_text() == f"{kind} of {name.split('/')[1]}\n"
        assert files[name].stat().st_mode & 0o777 == 0o640


def test_each_rank_log_is_written_by_the_worker_itself(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = [str(testchild), "say", "one", "complain", "two"]
    result = _run(dsl_line(dsl_command, 2, words, None, "--enable_each_rank_log", str(tmp_path)))
    assert result.stdout == b""
    for rank in range(2):
        assert _only_log(tmp_path, f"*_rank{rank}.log").read_text() == "one\ntwo\n"


@pytest.mark.guarantee("G4")
def test_ctrl_c_works_while_nobody_reads_the_output(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The console is stopped and full; the job is interrupted and over at once all the same."""
    ready = tmp_path / "ready"
    words = [str(testchild), "note", str(ready), "%r", "flood", "1000000", "100", "4000"]
    process = subprocess.Popen(
        dsl_line(dsl_command, 2, words),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: ready.exists() and len(ready.read_text().split()) == 2)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert time.monotonic() - begin < 10
    finally:
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


def test_a_stopped_terminal_does_not_hold_the_end(
    terminal: Open, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Ctrl-S: what a terminal would have scrolled by is given up, and the command ends."""
    gate = tmp_path / "gate"
    words = [
        str(testchild),
        "note",
        str(tmp_path / "ready"),
        "%r",
        "wait",
        str(gate),
        "flood",
        "8",
        "100",
        "4000",
    ]
    with terminal(dsl_line(dsl_command, 2, words), {"TERM": "xterm"}) as screen:
        until(
            lambda: len(list(tmp_path.iterdir())) == 1 and len((tmp_path / "ready").read_text().split()) == 2
        )
        screen.press(b"\x13")
        gate.touch()
        screen.reported("ended 0", 30)


@pytest.mark.parametrize(
    "environ",
    [
        {"TERM": "dumb"},
        {"TERM": "xterm-color", "JPY_PARENT_PID": "7", "TMUX": "of the server"},
        {"TERM": "xterm-color", "COLAB_RELEASE_TAG": "r"},
    ],
    ids=lambda environ: next(reversed(environ)),
)
def test_a_terminal_without_a_cursor_gets_lines_only(
    environ: dict[str, str],
    terminal: Open,
    dsl_command: Path,
    testchild: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the one that a notebook makes for the commands of a cell."""
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    words = [str(testchild), "raw", "\\r10%", "sleep", "300", "raw", "\\r20%\\n"]
    with terminal(dsl_line(dsl_command, 2, words), environ) as screen:
        screen.reported("ended 0")
        assert "\x1b" not in _screen(screen)


def test_tmux_has_a_cursor_in_colab_too(terminal: Open, dsl_command: Path, testchild: Path) -> None:
    words = [str(testchild), "raw", "\\r10%", "sleep", "300", "raw", "\\r20%\\n"]
    environ = {"TERM": "tmux", "COLAB_RELEASE_TAG": "r", "TMUX": "/s,1,0", "NO_COLOR": "1"}
    with terminal(dsl_line(dsl_command, 2, words), environ) as screen:
        screen.reported("ended 0")
        assert "\x1b[J" in _screen(screen)


def test_a_verdict_that_nobody_reads_does_not_hold_the_end(dsl_command: Path, testchild: Path) -> None:
    """stderr is a full pipe: the exit code comes, the words do not."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    while True:
        try:
            os.write(write, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write, True)
    try:
        line = dsl_line(dsl_command, 2, [str(testchild), "only", "1", "[", "exit", "7", "]", "pause"], 1.0)
        result = subprocess.run(line, stdin=subprocess.DEVNULL, stderr=write, timeout=30, check=False)
        assert result.returncode == 7
    finally:
        os.close(read)
        os.close(write)


def test_a_hang_up_from_log_rotation_reopens_the_files(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    words = [str(testchild), "catch", "USR1", "say", "old", "note", str(tmp_path / "job" / "ready"), "%r %p"]
    words += ["await", "USR1", "1", "say", "new"]
    line = dsl_line(dsl_command, 2, words, 1.0, "--log-dir", str(logs))
    with running(line, tmp_path / "job") as job:
        job.ready(2)
        (path,) = until(lambda: list(logs.rglob("1/stdout.log")))
        until(lambda: path.read_text() == "old\n")
        path.rename(path.with_suffix(".1"))
        os.kill(job.guard, signal.SIGHUP)
        until(path.exists)
        os.kill(job.guard, signal.SIGUSR1)
        assert job.wait() == 0
    assert path.with_suffix(".1").read_text() == "old\n"
    assert path.read_text() == "new\n"


def test_a_hang_up_without_log_files_still_ends_the_job(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = [str(testchild), "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 2, words, 1.0), tmp_path) as job:
        job.ready(2)
        os.kill(job.guard, signal.SIGHUP)
        assert job.wait() == 128 + signal.SIGHUP
