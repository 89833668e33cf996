"""`breakpoint()` in one of several workers: who reads the command's stdin, and that the terminal's keys stay right."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import dsl_line, ran
from tests.support.jobs import Helpers, states
from tests.support.terminal import Terminal
from tests.support.terminal import terminal as support_terminal

Open = Callable[..., AbstractContextManager[Terminal]]

pytestmark = pytest.mark.engine

AT_A_BREAKPOINT = """
import os
answer = 6
rank = os.environ["RANK"]
if rank == "{rank}":
    breakpoint()
print("rank", rank, "went on")
"""

CATCHING = """
import os, signal, sys
def note(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write(f"{number} {os.getpid()}\\n")
for number in (signal.SIGINT, signal.SIGCONT):
    signal.signal(number, note)
with open(sys.argv[2], "a") as file:
    file.write(f"{os.getpid()}\\n")
if os.environ["RANK"] == "0":
    print("got", repr(input("name? ")), flush=True)
else:
    while not os.path.exists(sys.argv[3]):
        signal.sigtimedwait([], 0.02)
"""


def _script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "train.py"
    path.write_text(text)
    return [sys.executable, str(path)]


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_a_debugger_of_rank_0_reads_what_is_piped_in(command: str, dsl_command: Path, tmp_path: Path) -> None:
    program = _script(tmp_path, AT_A_BREAKPOINT.format(rank=0))
    result = ran(dsl_line(dsl_command.with_name(command), 3, program), 30, input="p answer * 7\nc\n")
    assert result.returncode == 0, result.stderr
    assert "42" in result.stdout
    assert result.stdout.count(" went on\n") == 3


@pytest.mark.parametrize("command", ["dsl", "dslrun"])
def test_another_rank_is_told_how_its_debugger_can_read(
    command: str, dsl_command: Path, tmp_path: Path
) -> None:
    program = _script(tmp_path, AT_A_BREAKPOINT.format(rank=1))
    dsl = dsl_command.with_name(command)
    result = ran(dsl_line(dsl, 2, program), 30, input="")
    assert result.returncode == 1
    assert f"{command}: rank 1 has nothing to read: --stdin 1 gives it the standard input" in result.stderr
    result = ran(dsl_line(dsl, 2, program, None, "--stdin", "1"), 30, input="p answer * 7\nc\n")
    assert (result.returncode, "42" in result.stdout) == (0, True)


def _bring_to_the_foreground(screen: Terminal) -> None:
    """A job in the background that reads the terminal is stopped until then."""
    if screen.is_in_background:
        screen.reported("stopped")
        screen.resume()


def test_a_debugger_works_on_a_terminal(terminal: Open, dsl_command: Path, tmp_path: Path) -> None:
    program = _script(tmp_path, AT_A_BREAKPOINT.format(rank=0))
    with terminal(dsl_line(dsl_command, 3, program), {"TERM": "xterm"}) as screen:
        _bring_to_the_foreground(screen)
        screen.showed("(Pdb) ")
        screen.press(b"p answer * 7\n")
        screen.showed("42")
        screen.showed("(Pdb) ")
        screen.press(b"c\n")
        screen.showed("rank 0 went on")
        screen.reported("ended 0")
        assert screen.echo


SIZES = """
import os, pathlib, subprocess, sys
size = subprocess.run(["stty", "size"], capture_output=True, text=True).stdout
shown = os.get_terminal_size() if os.isatty(1) else None
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{size.strip()} {shown and shown.lines}")
"""


@pytest.mark.parametrize("forked", [(), ("--start-method=forkserver",)], ids=["executed", "forked"])
@pytest.mark.parametrize(
    "options, lines", [((), 33), (("--redirects", "3"), None), (("--stdin", "none"), 33)]
)
def test_every_rank_can_ask_for_the_size_of_the_terminal(
    options: tuple[str, ...], lines: int | None, forked: tuple[str, ...], dsl_command: Path, tmp_path: Path
) -> None:
    script = _script(tmp_path, SIZES)[-1]
    workers = ["--nproc-per-node=3", *forked, *options, f"--log-dir={tmp_path}" if lines is None else "--"]
    line = [str(dsl_command.with_name("dslrun")), *workers, script, str(tmp_path)]
    with support_terminal(line, {"TERM": "xterm"}, size=(111, 33)) as screen:
        screen.reported("ended 0", 60)
    assert [(tmp_path / rank).read_text() for rank in "012"] == [f"33 111 {lines}"] * 3


UNANSWERED = {
    "prompt": ("input('go on? ')", "EOFError"),
    "readline": ("import readline; input('go on? ')", "EOFError"),
    "pdb": ("breakpoint(); print()", "BdbQuit"),
    "reopened": ("sys.exit(open('/dev/stdin').read() or 'EOFError')", "EOFError"),
    "read": ("os.read(0, 1)", "OSError"),
    "select": ("import select; select.select([0], [], []); os.read(0, 1)", "OSError"),
}


@pytest.mark.parametrize("code, error", UNANSWERED.values(), ids=UNANSWERED)
def test_a_rank_that_asks_in_vain_at_a_terminal_does_not_wait(
    code: str, error: str, dsl_command: Path, tmp_path: Path
) -> None:
    """And is told how it can read, if it is a debugger or a prompt."""
    text = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {code}\ntime.sleep(60)\n"
    with support_terminal(dsl_line(dsl_command, 2, _script(tmp_path, text)), {"TERM": "xterm"}) as screen:
        screen.reported("ended 1")
        until(lambda: b"rank 1 (local rank 1" in screen.shown())
        shown = screen.shown().decode()
    assert error in shown
    assert ("--stdin 1 gives it the standard input of dsl" in shown) is (
        error != "OSError" and "open" not in code
    )


ASKING = """
import os
print("rank", os.environ["RANK"], "got", input("name? "), flush=True)
"""


@pytest.mark.parametrize(
    "options, rank", [((), 1), (("--stdin", "0"), 0)], ids=["the-shown-one", "the-one-that-is-named"]
)
def test_a_prompt_behind_a_filter_is_shown(
    options: tuple[str, ...], rank: int, terminal: Open, dsl_command: Path, tmp_path: Path
) -> None:
    """Nobody could answer one that is hidden. The others end at once, without an answer."""
    program = _script(tmp_path, f"import os\nif os.environ['RANK'] == '{rank}':\n    exec({ASKING!r})\n")
    line = dsl_line(dsl_command.with_name("dslrun"), 3, program, None, "--local-ranks-filter", "1", *options)
    with terminal(line, {"TERM": "xterm"}) as screen:
        _bring_to_the_foreground(screen)
        screen.showed("name? ")
        screen.press(b"Ada\n")
        screen.showed(f"rank {rank} got Ada")
        screen.reported("ended 0")


def _pids(path: Path, count: int) -> list[int]:
    until(lambda: path.exists() and len(path.read_text().split()) == count)
    return [int(word) for word in path.read_text().split()]


def _catching(dsl: Path, tmp_path: Path) -> list[str]:
    files = [str(tmp_path / name) for name in ("trace", "ready", "gate")]
    return dsl_line(dsl, 3, [*_script(tmp_path, CATCHING), *files], 5.0)


def _caught(tmp_path: Path) -> list[tuple[int, int]]:
    path = tmp_path / "trace"
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((int(line.split()[1]), int(line.split()[0])) for line in lines)


def test_a_prompt_survives_ctrl_z_and_fg_and_each_worker_hears_of_it_once(
    dsl_command: Path, tmp_path: Path
) -> None:
    with support_terminal(_catching(dsl_command, tmp_path), {"TERM": "xterm"}) as screen:
        pids = _pids(tmp_path / "ready", 3)
        screen.showed("name? ")
        screen.press(b"\x1a")
        screen.reported("stopped")
        until(lambda: states(pids) == {"T"})
        screen.resume()
        until(lambda: len(_caught(tmp_path)) >= 3)
        screen.press(b"Ada\n")
        screen.showed("got 'Ada'")
        (tmp_path / "gate").touch()
        screen.reported("ended 0")
    assert _caught(tmp_path) == sorted((pid, signal.SIGCONT) for pid in pids)


def test_ctrl_c_at_a_prompt_reaches_each_worker_once(dsl_command: Path, tmp_path: Path) -> None:
    with support_terminal(_catching(dsl_command, tmp_path), {"TERM": "xterm"}) as screen:
        pids = _pids(tmp_path / "ready", 3)
        screen.showed("name? ")
        screen.press(b"\x03")
        until(lambda: len(_caught(tmp_path)) >= 3)
        screen.press(b"Ada\n")
        (tmp_path / "gate").touch()
        screen.reported("ended -2")
        assert screen.echo
    assert _caught(tmp_path) == sorted((pid, signal.SIGINT) for pid in pids)


def test_a_job_in_the_background_stops_only_when_it_reads_the_terminal(
    dsl_command: Path, tmp_path: Path
) -> None:
    gate, ready = tmp_path / "gate", tmp_path / "ready"
    program = (
        f"echo here >> {ready}; until test -e {gate}; do sleep 0.02; done; test $RANK = 0 && read line; "
        'echo "got $line"'
    )
    line = dsl_line(dsl_command, 2, ["/bin/sh", "-c", program])
    with support_terminal(line, {"TERM": "xterm"}, "background") as screen:
        until(lambda: ready.exists() and ready.read_text().count("here") == 2)
        gate.touch()
        # The next report, so nothing stopped it before.
        screen.reported("stopped")
        screen.resume()
        screen.press(b"Ada\n")
        screen.showed("got Ada")
        screen.reported("ended 0")


def test_a_job_in_the_background_that_reads_nothing_is_never_stopped(helpers: Helpers) -> None:
    with support_terminal(helpers.line(2, "say hello"), {"TERM": "xterm"}, "background") as screen:
        screen.showed("hello")
        screen.reported("ended 0")


DISTRIBUTED = """
import torch.distributed as dist
dist.init_process_group("gloo")
answer = dist.get_world_size() * 21
dist.breakpoint()
print("rank", dist.get_rank(), "went on", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.torch
@pytest.mark.timeout(120)
def test_the_breakpoint_of_torch_distributed_works_on_a_terminal(dsl_command: Path, tmp_path: Path) -> None:
    line = dsl_line(dsl_command.with_name("dslrun"), 2, _script(tmp_path, DISTRIBUTED))
    with support_terminal(line, {"TERM": "xterm"}) as screen:
        screen.showed("(Pdb) ", 90)
        screen.press(b"up\n")
        screen.showed("(Pdb) ")
        screen.press(b"p answer\n")
        screen.showed("42")
        screen.press(b"c\n")
        screen.reported("ended 0", 60)
        assert screen.screen.count(b"went on") == 2
