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
from tests.support.jobs import Helpers, full_pipe
from tests.support.terminal import Terminal

Open = Callable[..., AbstractContextManager[Terminal]]

pytestmark = [pytest.mark.engine, pytest.mark.guarantee("G3", "G6")]


def _run(
    command: Sequence[str], stdin: bytes = b"", timeout_s: float = 60
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(list(command), input=stdin, capture_output=True, timeout=timeout_s, check=False)


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
    words = [testchild, *["numbered", "1", "300", "60", "two", "complain", "hello", "exit"], ending]
    line = dsl_line(dsl_command.with_name(command), 2, words)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with open("/dev/full", "wb") as full:
        streams[stream] = full
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
    tmp_path: Path, helpers: Helpers
) -> None:
    words = ["raw", "x" * 99 + r"\n"] * 20
    limited = ["bash", "-c", 'ulimit -S -f 1; exec "$@"', "bash"]
    result = _run([*limited, *helpers.line(2, words, None, f"--log-dir={tmp_path}")])
    assert result.returncode == 1
    assert result.stdout.splitlines() == [b"x" * 99] * 40
    assert b"stdout.log: File too large, the job goes on without what does not fit" in result.stderr


def test_a_disk_that_has_room_again_gets_the_later_lines_whole(tmp_path: Path, helpers: Helpers) -> None:
    """What stands for the disk is a limit for our files: it leaves room for half a line, and is lifted later."""
    go, size = tmp_path / "go", 1024
    words = [*["raw", "x" * 99 + r"\n"] * 10, "wait", str(go), "say", "later"]
    with (tmp_path / "out").open("ab") as out, (tmp_path / "err").open("ab") as err:
        line = ["bash", "-c", 'ulimit -S -f 1; exec "$@"', "bash", *helpers.line(2, words)]
        process = subprocess.Popen(line, stdout=out, stderr=err)
    until(lambda: "cannot write stdout: File too large" in (tmp_path / "err").read_text())
    until(lambda: (tmp_path / "out").stat().st_size == size)
    for pid in processes.children(process.pid):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    go.touch()
    assert process.wait(60) == 1
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines == [*["x" * 99] * 10, "x" * 24, *["later"] * 2]


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_tee_writes_torchruns_prefix_also_into_a_pipe(
    command: str, dsl_command: Path, testchild: Path
) -> None:
    """As recorded of torchrun 2.15 with `--tee 0:1,1:2`: only what is teed has it."""
    words = [testchild, "say", "out %r", "complain", "err %r"]
    options = ["--tee", "0:1,1:2", *(["--role", "trainer"] if command == "dslrun" else [])]
    result = _run(dsl_line(dsl_command.with_name(command), 2, words, None, *options))
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


def test_progress_bars_stand_below_the_lines(terminal: Open, helpers: Helpers) -> None:
    with terminal(
        helpers.line(2, "raw '\\r10%' sleep 300 raw '\\r20%' sleep 300 only 0 [ say '\\rdone' ]"),
        {"TERM": "xterm"},
    ) as screen:
        screen.reported("ended 0")
        text = re.sub(r"\x1b\[[0-9;]*m", "", _screen(screen))
    assert "[rank 0] 10%\n[rank 1] 10%" in text
    assert "\r\x1b[1A\x1b[J" in text, "they are redrawn in place"


def test_the_window_size_reaches_the_workers_terminals(
    terminal: Open, dsl_command: Path, tmp_path: Path
) -> None:
    script = f"touch {tmp_path}/$RANK; until stty size < /dev/stderr | grep -q '33 9'; do sleep 0.02; done; echo seen"
    with terminal(dsl_line(dsl_command, 2, ["/bin/sh", "-c", script]), {"TERM": "xterm"}) as screen:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        if screen.is_in_background:
            screen.resume()  # only the foreground hears of the size
        screen.set_size(100, 33)
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


@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_worker_that_hears_of_a_new_size_finds_it(dsl_command: Path, threads: str) -> None:
    line = dsl_line(dsl_command, 3, [sys.executable, "-c", RESIZED], 1.0)
    with support.terminal(line, {"TERM": "xterm", "DSL_ENGINE_THREADS": threads}) as screen:
        until(lambda: _screen(screen).count("ready") == 3)
        for rows in range(50, 90):
            screen.set_size(100, rows)
            for rank in range(3):
                until(lambda rank=rank, rows=rows: _sizes(screen, rank)[-1:] == [rows])  # type: ignore[misc]
        assert _sizes(screen, 1) == _sizes(screen, 2) == list(range(50, 90))
        # The worker that reads the terminal also hears of it from the terminal itself, before its own has the size.
        assert list(dict.fromkeys(size for size in _sizes(screen, 0) if size != 24)) == list(range(50, 90))
        screen.press(b"\x03")
        screen.reported("ended -2")


def test_log_files_lie_below_run_attempt_and_local_rank(tmp_path: Path, helpers: Helpers) -> None:
    result = _run(helpers.line(2, "say 'out of %r' complain 'err of %r'", None, "--log-dir", str(tmp_path)))
    assert sorted(result.stdout.splitlines()) == [b"out of 0", b"out of 1"]
    run = tmp_path / os.readlink(tmp_path / ".latest")
    files = {str(path.relative_to(run)): path for path in run.rglob("*.log")}
    expected = {f"attempt_0/{rank}/std{kind}.log": kind for rank in range(2) for kind in ("out", "err")}
    assert set(files) == set(expected)
    for name, kind in expected.items():
        assert files[name].read_text() == f"{kind} of {name.split('/')[1]}\n"
        assert files[name].stat().st_mode & 0o777 == 0o640


@pytest.mark.guarantee("G4")
def test_ctrl_c_works_while_nobody_reads_the_output(tmp_path: Path, helpers: Helpers) -> None:
    """The console is stopped and full; the job is interrupted and over at once all the same."""
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        helpers.line(2, "note {}/ready %r flood 1000000 100 4000"),
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


def test_a_stopped_terminal_does_not_hold_the_end(terminal: Open, tmp_path: Path, helpers: Helpers) -> None:
    """Ctrl-S: what a terminal would have scrolled by is given up, and the command ends."""
    gate = tmp_path / "gate"
    with terminal(
        helpers.line(2, "note {}/ready %r wait {}/gate flood 8 100 4000"), {"TERM": "xterm"}
    ) as screen:
        until(
            lambda: len(list(tmp_path.iterdir())) == 1 and len((tmp_path / "ready").read_text().split()) == 2
        )
        screen.press(b"\x13")
        gate.touch()
        screen.reported("ended 0", 30)


@pytest.mark.parametrize(
    "environ, has_cursor",
    [
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm-color", "JPY_PARENT_PID": "7", "TMUX": "of the server"}, False),
        ({"TERM": "xterm-color", "COLAB_RELEASE_TAG": "r"}, False),
        ({"TERM": "tmux", "COLAB_RELEASE_TAG": "r", "TMUX": "/s,1,0"}, True),
    ],
    ids=["dumb", "Jupyter in tmux", "Colab", "tmux in Colab"],
)
def test_a_terminal_without_a_cursor_gets_lines_only(
    environ: dict[str, str],
    terminal: Open,
    monkeypatch: pytest.MonkeyPatch,
    helpers: Helpers,
    *,
    has_cursor: bool,
) -> None:
    """As the one that a notebook makes for the commands of a cell."""
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(helpers.line(2, "raw '\\r10%' sleep 300 raw '\\r20%\\n'"), environ) as screen:
        screen.reported("ended 0")
        assert ("\x1b" in _screen(screen)) == has_cursor


def test_a_verdict_that_nobody_reads_does_not_hold_the_end(helpers: Helpers) -> None:
    """stderr is a full pipe: the exit code comes, the words do not."""
    with full_pipe() as write:
        line = helpers.line(2, "only 1 [ exit 7 ] pause", 1.0)
        result = subprocess.run(line, stdin=subprocess.DEVNULL, stderr=write, timeout=30, check=False)
        assert result.returncode == 7


def test_a_line_has_the_local_time_at_which_it_was_read(dsl_command: Path) -> None:
    """The zone is half an hour off, which UTC is not. The second line is written when the first one is here."""

    def now_ms() -> int:
        return int((time.time() + 5.5 * 3600) * 1000)

    script = "echo one; read -r go; echo two"
    options = ["--no-python", "--nproc-per-node=1"]
    options += ["--log-line-prefix-template", "${time} ${rank}|"]
    line = [str(dsl_command.with_name("dslrun")), *options, "sh", "-c", script]
    begin_ms, pipe = now_ms(), subprocess.PIPE
    environ = {**os.environ, "TZ": "IST-05:30"}
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, env=environ, text=True) as job:
        assert job.stdin
        assert job.stdout
        for word in ("one", "two"):
            found = re.fullmatch(rf"(\d\d):(\d\d):(\d\d)\.(\d{{3}}) 0\|{word}\n", job.stdout.readline())
            assert found
            hour, minute, second, millisecond = map(int, found.groups())
            told_ms = ((hour * 60 + minute) * 60 + second) * 1000 + millisecond
            end_ms = now_ms()
            assert (told_ms - begin_ms) % 86_400_000 <= end_ms - begin_ms
            begin_ms = end_ms
            job.stdin.write("go\n" if word == "one" else "")
            job.stdin.flush()
