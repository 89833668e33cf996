"""Forked workers at a real terminal: keys, Ctrl-Z and fg, and a worker that reads or writes there."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.forks import HIDDEN
from tests.support.jobs import states
from tests.support.terminal import Terminal

Open = Callable[..., AbstractContextManager[Terminal]]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.linux_5_4,
    pytest.mark.needs_pidfd,  # to be forked
    pytest.mark.timeout(60),
]

# Notes its pid, then each signal that it gets. `decimal` shows that it was forked.
CATCH = (
    """
import os, signal, sys
notes = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in (signal.SIGINT, signal.SIGCONT):
    signal.signal(number, lambda number, _: os.write(notes, b"%d:%d\\n" % (number, os.getpid())))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(notes, b"%s:%d\\n" % (b"forked" if "decimal" in """
    + HIDDEN
    + """ else b"executed", os.getpid()))
while True:
    signal.pause()
"""
)

READ = (
    """
import sys
print("said", sys.stdin.readline().strip(), "decimal" in """
    + HIDDEN
    + """, flush=True)
sys.exit(7)
"""
)


def line(dsl: Path, folder: Path, text: str, workers: int, *options: str) -> list[str]:
    (folder / "script.py").write_text(text)
    count = ["--no_local_rank", "--num_gpus", str(workers)]
    forked = ["--start-method", "forkserver", "--preload", "decimal"]
    return [str(dsl), *count, *forked, *options, str(folder / "script.py"), str(folder / "notes")]


def noted(folder: Path, word: str) -> list[int]:
    """Pids that stand behind a word."""
    path = folder / "notes"
    pairs = [one.partition(":") for one in path.read_text().split()] if path.exists() else []
    return [int(pid) for what, _, pid in pairs if what == word]


def started(folder: Path, workers: int) -> list[int]:
    until(lambda: len(noted(folder, "forked")) == workers)
    return noted(folder, "forked")


def has_gone_on(folder: Path, times: int) -> bool:
    return len(noted(folder, str(int(signal.SIGCONT)))) == times


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_z_stops_forked_workers_and_fg_goes_on(
    workers: int, terminal: Open, dsl_command: Path, tmp_path: Path
) -> None:
    """And Ctrl-C reaches each of them once; a second one kills them."""
    with terminal(line(dsl_command, tmp_path, CATCH, workers, "--grace", "60")) as screen:
        pids = started(tmp_path, workers)
        for times in (1, 2):
            until(lambda: states(pids) == {"S"})
            screen.press(b"\x1a")
            screen.reported("stopped")
            until(lambda: states(pids) == {"T"})
            screen.resume()
            until(functools.partial(has_gone_on, tmp_path, times * workers))
        until(lambda: states(pids) == {"S"})
        screen.press(b"\x03")
        until(lambda: b"a second Ctrl-C kills at once" in screen.shown())
        until(lambda: sorted(noted(tmp_path, str(int(signal.SIGINT)))) == sorted(pids))
        screen.press(b"\x03")
        screen.reported("ended -2")
        assert b"SIGINT received again" in screen.shown()


def switches(pid: int) -> int:
    """How often the threads of a process have gone to sleep; -1 if one of them does not sleep."""
    texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    if any("\nState:\tS" not in text for text in texts):
        return -1
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


def waits_for_orders(server: int) -> bool:
    """It blocks all signals behind its imports, and sleeps then when its trial of a fork is over."""
    status = Path(f"/proc/{server}/status").read_text()
    blocked = int(status.partition("\nSigBlk:\t")[2].split()[0], 16)
    return (
        blocked >> (signal.SIGTERM - 1) & 1 == 1
        and switches(server) >= 0
        and processes.children(server) == []
    )


def test_ctrl_z_while_the_fork_server_imports_holds_the_workers_back(
    terminal: Open, dsl_command: Path, tmp_path: Path
) -> None:
    """Nobody starts behind the shell's back."""
    (tmp_path / "slow.py").write_text(
        f"import decimal, os, time\nopen({str(tmp_path / 'imports')!r}, 'w').close()\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
    )
    words = line(dsl_command, tmp_path, CATCH, 2)
    words[words.index("decimal")] = "slow"
    with terminal(words) as screen:
        until((tmp_path / "imports").exists)
        screen.press(b"\x1a")
        screen.reported("stopped")
        (guard,) = processes.children(screen.shell)
        (agent,) = processes.children(guard)
        (server,) = processes.children(agent)
        before = until(lambda: max(switches(agent), 0))
        (tmp_path / "go").touch()
        until(lambda: waits_for_orders(server))
        # It has heard that the server is ready, and waits again.
        until(lambda: switches(agent) > before)
        assert processes.children(server) == []
        screen.resume()
        started(tmp_path, 2)
        screen.press(b"\x03")
        screen.showed("a second Ctrl-C kills at once")
        screen.press(b"\x03")
        screen.reported("ended -2")


def test_a_lone_forked_worker_reads_and_writes_the_terminal(
    terminal: Open, dsl_command: Path, tmp_path: Path
) -> None:
    with terminal(line(dsl_command, tmp_path, READ, 1)) as screen:
        if screen.is_in_background:
            screen.reported("stopped")
        screen.press(b"word\n")
        screen.reported("ended 7")
        assert b"said word True" in screen.shown()
