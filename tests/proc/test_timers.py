"""Timers of torch.distributed.elastic.timer: a worker that overstays is ended, and the verdict names the timer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.jobs import is_still, running
from tests.support.warm import Place

from dsl.agent import timers


@pytest.fixture
def temporary(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files that is this test's own, and timers that are asked for."""
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    return temporary


# A client as torch's is: it opens the FIFO without waiting, writes one line and closes it.
CLIENT = """
import json, os, signal, sys, time
def request(scope, expiration, signum, pid=None):
    fd = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY | os.O_NONBLOCK)
    names = ("version", "pid", "scope_id", "expiration_time", "signal")
    values = (1, os.getpid() if pid is None else pid, scope, expiration, signum)
    os.write(fd, json.dumps(dict(zip(names, values))).encode() + b"\\n")
    os.close(fd)
def acquire(scope, after, signum=9, pid=None):
    request(scope, time.time() + after, signum, pid)
def release(scope):
    request(scope, -1, 0)
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


def a_client(folder: Path, text: str) -> Path:
    path = folder / "client.py"
    path.write_text(CLIENT + text, encoding="utf-8")
    return path


Clients = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def clients(dslrun: Path, tmp_path: Path, temporary: Path) -> Clients:
    """Runs a job of so many clients that do this: ``clients(2, text, "--option", words=[...])``."""

    def run(
        workers: int, text: str, *options: str, words: Sequence[object] = ()
    ) -> subprocess.CompletedProcess[str]:
        return ran([dslrun, f"--nproc-per-node={workers}", *options, a_client(tmp_path, text), *words])

    return run


@pytest.mark.guarantee("G3")
def test_a_worker_that_overstays_is_ended_and_the_verdict_names_the_timer(
    dslrun: Path, temporary: Path, clients: Clients
) -> None:
    """Torchrun kills itself, too, by the same signal."""
    text = """
if rank == 1:
    acquire("kept", 60)
    acquire("train step", 0.3)
signal.pause()
"""
    begin_s = time.monotonic()
    result = clients(2, text)
    assert result.returncode == 137, result.stderr
    assert time.monotonic() - begin_s < 20
    cause = next(line for line in result.stderr.splitlines() if " failed first: " in line)
    assert cause.startswith("dslrun: rank 1 ")
    assert cause.endswith("killed by SIGKILL (signal 9): its timer 'train step' had expired")
    assert list(temporary.rglob("watchdog*")) == []


@pytest.mark.guarantee("G3")
def test_a_worker_of_a_warm_server_that_overstays_is_ended(tmp_path: Path) -> None:
    """It is no child of the command."""
    client = a_client(tmp_path, 'acquire("kept", 0.3)\nsignal.pause()\n')
    with Place() as place:
        asked = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
        result = place.run(str(client), cwd=tmp_path, more=asked, timeout_s=20)
    assert result.returncode == 137, result.stderr
    assert "its timer 'kept' had expired" in result.stderr


def test_a_timer_that_is_released_or_replaced_or_not_over_ends_nobody(
    temporary: Path, clients: Clients
) -> None:
    text = """
acquire("a", 0.4)
release("a")
acquire("b", 0.4)
acquire("b", 60)
time.sleep(1)
"""
    result = clients(2, text)
    assert result.returncode == 0, result.stderr
    assert "timer" not in result.stderr
    assert list(temporary.iterdir()) == []


def test_the_next_attempt_has_no_timers_of_the_last_one(clients: Clients) -> None:
    text = """
if attempt == 0:
    acquire("left", 1)
    if rank == 0:
        sys.exit(3)
    signal.pause()
acquire("own", 60)
time.sleep(1.5)
release("own")
"""
    result = clients(2, text, "--max-restarts=1")
    assert result.returncode == 0, result.stderr


def test_the_signal_is_the_clients_and_without_one_nobody_is_ended(clients: Clients) -> None:
    text = """
got = []
signal.signal(signal.SIGUSR2, lambda number, frame: got.append(number))
acquire("none", 0.1, 0)
time.sleep(0.5)
acquire("mine", 0.1, int(signal.SIGUSR2))
while not got:
    time.sleep(0.01)
"""
    result = clients(1, text)
    assert result.returncode == 0, result.stderr
    assert "'none' of process" in result.stderr
    assert "sent SIGUSR2 to it" in result.stderr


@pytest.mark.guarantee("G1")
def test_a_process_below_a_worker_may_take_timers_and_a_stranger_is_never_signalled(clients: Clients) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        text = f"""
child = os.fork()
if child == 0:
    acquire("child", 0.3)
    while True:
        signal.pause()
acquire("stranger", 0.1, 9, {stranger.pid})
acquire("agent", 0.1, 9, os.getppid())
acquire("init", 0.1, 9, 1)
assert os.waitpid(child, 0)[1] == 9
"""
        result = clients(1, text)
        assert result.returncode == 0, result.stderr
        assert "the timer 'child' of process" in result.stderr
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.guarantee("G1")
def test_in_a_proc_of_another_pid_namespace_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers in it are those of others."""
    is_descendant = vars(timers)["_is_descendant"]
    with subprocess.Popen(["/bin/sleep", "600"]) as child:
        try:
            assert is_descendant(child.pid, set())
            monkeypatch.setattr(os, "readlink", lambda _: "1")
            assert not is_descendant(child.pid, set())
        finally:
            child.kill()


def test_nonsense_in_the_fifo_is_passed_over(clients: Clients) -> None:
    text = r"""
fd = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY | os.O_NONBLOCK)
for line in (b"{", b"[]", b"{}", b"\xff", b'{"pid": 1e3}', b"[" * 4000, b'{"pid": -1, "scope_id": "x",'
             b' "expiration_time": 0, "signal": 9}', b'{"pid": 2, "scope_id": "x", "expiration_time": NaN, "signal": 9}'):
    os.write(fd, line + b"\n")
acquire("last", 0.2)
signal.pause()
"""
    result = clients(1, text)
    assert result.returncode == 137, result.stderr
    assert "its timer 'last' had expired" in result.stderr


def test_workers_that_are_stopped_have_their_grace_whatever_their_timers_say(
    tmp_path: Path, clients: Clients
) -> None:
    text = """
def save(*_):
    time.sleep(1.5)
    open(sys.argv[1], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
if rank == 0:
    while not os.path.exists(sys.argv[1] + ".acquired"):
        time.sleep(0.01)
    sys.exit(3)
acquire("step", 1)
open(sys.argv[1] + ".acquired", "w").close()
signal.pause()
"""
    result = clients(2, text, words=[tmp_path / "saved"])
    assert result.returncode == 3, result.stderr
    assert (tmp_path / "saved").exists()


def test_the_fifo_lies_where_the_environment_says(
    dslrun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    path = tmp_path / "mine"
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(path))
    os.mkfifo(path)  # a leftover
    text = """
assert os.environ["TORCHELASTIC_TIMER_FILE"] == sys.argv[1]
acquire("x", 0.1)
signal.pause()
"""
    assert clients(1, text, words=[path]).returncode == 137
    assert not path.exists()
    path.write_text("of the user")
    result = clients(1, text, words=[path])
    assert result.returncode != 0
    assert f"dslrun: error: cannot make the timer file {path}: File exists" in result.stderr
    assert path.read_text() == "of the user"


def test_the_workers_of_a_launch_below_another_are_served_by_that(
    dslrun: Path, tmp_path: Path, temporary: Path, clients: Clients
) -> None:
    text = f"""
gate = {str(tmp_path / "gate")!r}
if sys.argv[1:] == ["above"] and rank == 0:
    os.execv({str(dslrun)!r}, ["dslrun", "--nproc-per-node=1", sys.argv[0]])
elif not sys.argv[1:]:
    acquire("below", 60)
    open(gate, "w").close()
else:
    while not os.path.exists(gate):
        time.sleep(0.01)
    acquire("beside", 0.2)
signal.pause()
"""
    result = clients(2, text, words=["above"])
    assert result.returncode == 137, result.stderr
    assert "dslrun: the timer 'beside' of process" in result.stderr
    assert list(temporary.rglob("watchdog*")) == []


def test_without_the_switch_there_are_no_timers(monkeypatch: pytest.MonkeyPatch, clients: Clients) -> None:
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "true")  # torch wants a 1
    text = 'assert "TORCHELASTIC_TIMER_FILE" not in os.environ'
    assert clients(1, text).returncode == 0


def test_a_killed_agent_leaves_no_fifo(dslrun: Path, tmp_path: Path, temporary: Path) -> None:
    script = a_client(tmp_path, 'open(sys.argv[1], "w").write(f"0 {os.getpid()}\\n"); time.sleep(600)')
    command = [str(dslrun), "--nproc-per-node=1", str(script), str(tmp_path / "ready")]
    with running(command, tmp_path) as job:
        job.ready(1)
        os.kill(job.agent(), 9)
        assert job.wait() == 137
    assert list(temporary.iterdir()) == []


@pytest.mark.engine
def test_nobody_wakes_up_for_a_timer_that_is_far_away(dslrun: Path, tmp_path: Path, temporary: Path) -> None:

    text = """
acquire("far", 3600)
open(sys.argv[1], "w").write(f"0 {os.getpid()}\\n")
time.sleep(600)
"""
    command = [str(dslrun), "--nproc-per-node=1", str(a_client(tmp_path, text)), str(tmp_path / "ready")]
    with running(command, tmp_path) as job:
        job.ready(1)
        until(lambda: is_still(job.agent(), look_s=0.3))


TORCHS = """
import os, sys, time, json
import torch.distributed.elastic.timer as timer
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60, scope="long enough"):
    pass
with timer.expires(after=0.5, scope="too short"):
    time.sleep(60)
"""


@pytest.mark.torch
def test_the_client_of_torch_is_served(dslrun: Path, tmp_path: Path, temporary: Path) -> None:
    script = tmp_path / "torchs.py"
    script.write_text(TORCHS, encoding="utf-8")
    result = ran([dslrun, "--nproc-per-node=1", script])
    assert result.returncode == 137, result.stderr
    assert "its timer 'too short' had expired" in result.stderr


def overstay() -> None:
    """A function of a worker, with a client as above."""
    path = os.environ["TORCHELASTIC_TIMER_FILE"]
    request: dict[str, Any] = {"pid": os.getpid(), "scope_id": "f", "signal": 9}
    with open(path, "w") as file:
        file.write(json.dumps({**request, "expiration_time": time.time() + 0.2}) + "\n")
    time.sleep(600)


def test_functions_that_were_launched_from_python_have_timers_too(temporary: Path) -> None:
    from dsl.functions import ChildFailedError, launch

    with pytest.raises(ChildFailedError, match="its timer 'f' had expired") as caught:
        launch(overstay)
    assert caught.value.exit_code == 137
    assert list(temporary.rglob("watchdog*")) == []
