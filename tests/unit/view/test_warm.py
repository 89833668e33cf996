"""dsl-warm: its words, and what it shows of a server."""

from __future__ import annotations

import pytest

from dsl._record import replace
from dsl.view import warm

ANSWER = b"7 3 0 20500 600000 0\n/usr/bin/python3\0train.py\0torch,numpy"


def test_the_answer_of_a_server_is_read() -> None:
    server = warm.parse("/run/dsl", "0-1.warm", 812, ANSWER)
    assert (server.pid, server.state, server.jobs, server.running) == (812, "idle", 3, 0)
    assert (server.idle_s, server.stay_s) == (20.5, 600.0)
    assert (server.interpreter, server.program) == ("/usr/bin/python3", "train.py")
    assert server.modules == ("torch", "numpy")
    assert warm.parse("/run/dsl", "0-1.warm", 812, b"812 3 1 0 600000 0\npython").modules == ()


def test_a_server_is_a_row() -> None:
    server = replace(warm.parse("/run/dsl", "0-1.warm", 812, ANSWER), memory=410 << 20)
    assert warm.row(server) == ("812", "idle 0:20, ends in 9:39", "410M", "3", "train.py", "torch,numpy")
    assert warm.row(replace(server, holders=2))[1] == "idle 0:20, held by 2 programs"
    assert warm.row(replace(server, state="busy", running=2))[1] == "2 jobs running"
    assert warm.row(replace(server, state="busy", running=1))[1] == "1 job running"
    assert warm.row(replace(server, state="no answer"))[1:] == ("no answer", "410M", "-", "-", "-")
    long = warm.row(replace(server, modules=tuple(["module"] * 50)))[-1]
    assert len(long) < 70
    assert long.endswith("module,...")


def test_the_command_line_of_a_job_is_split_off() -> None:
    options = warm.WARM.read(["start", "--preload", "torch", "dsl", "--num_gpus", "2", "a.py"])
    assert (options.preload, options.words) == ("torch", ["dsl", "--num_gpus", "2", "a.py"])
    options = warm.WARM.read(["stop", "812"])
    assert (options.pids, options.words) == (["812"], [])


@pytest.mark.parametrize(
    "words, said",
    [
        (["begin"], "no such action: 'begin', expected status, stop or start"),
        (["stop", "--json"], "--json is for dsl-warm status"),
        (["--preload", "torch"], "--preload is for dsl-warm start"),
        (["status", "812"], "status takes no pid: '812'"),
        (["start"], "no command line was given: dsl-warm start"),
        (["start", "python", "a.py"], "'python' is neither dsl nor dslrun: dsl-warm start"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert warm.WARM.main(words) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"dsl-warm: error: {said}")
    assert error.count("\n") == 1
