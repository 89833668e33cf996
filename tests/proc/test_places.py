"""Nodes with fixed places come together: who is let in, who is not, and what users hear meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.delegates import listens
from tests.support.jobs import Job
from tests.support.links import until as until_messages
from tests.support.places import KEY, Nodes, a_hello, caller, free_port

from dsl.agent.joining import job_key
from dsl.control.hub import Hub, connect
from dsl.control.messages import Lost, Moved, Refused
from dsl.errors import ControlError, RefusedLinkError

KEYED = {"DSL_JOB_KEY": KEY}
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b2J\r\x00\u202e"


def assert_whole(nodes: Nodes, job: Job, *, environ: dict[str, str] | None = None) -> None:
    """Node 1 comes, and the job is that of two workers and nobody else."""
    (other,) = nodes.start("", first=1, count=2, environ=environ)
    assert [line.split()[0] for line in nodes.seen(2)] == ["0/2", "1/2"]
    nodes.end()
    assert [one.wait() for one in (job, other)] == [0, 0], [one.stderr() for one in (job, other)]
    assert all(line.isprintable() and len(line) < 1000 for line in job.stderr().splitlines())


# ---- the key of the job


def test_nodes_with_the_same_key_meet_and_no_worker_gets_it(nodes: Nodes, tmp_path: Path) -> None:
    words = ("--no-python", "/bin/sh", "-c", f'env >"{tmp_path}/env.$RANK"')
    jobs = nodes.start("", "", program=words, environ=KEYED)
    assert [job.wait() for job in jobs] == [0, 0], [job.stderr() for job in jobs]
    for rank in (0, 1):
        found = (tmp_path / f"env.{rank}").read_text()
        assert KEY not in found
        assert "DSL_JOB_KEY" not in found


@pytest.mark.parametrize(
    "keyed, here, there",
    [
        (
            0,
            "it has no DSL_JOB_KEY, and this node has one",
            "this node has no DSL_JOB_KEY, and the other side has one",
        ),
        (
            1,
            "it has a DSL_JOB_KEY, and this node has none",
            "this node has a DSL_JOB_KEY, and the other side has none",
        ),
    ],
)
def test_a_key_on_one_side_only_is_one_clear_line_on_both(
    keyed: int, here: str, there: str, nodes: Nodes
) -> None:
    """``here`` is what node 0 says."""
    environ = [KEYED if place == keyed else None for place in (0, 1)]
    (first,) = nodes.start("", count=2, environ=environ[0])
    (other,) = nodes.start("", first=1, count=2, environ=environ[1])
    assert other.wait() == 2
    (said,) = [line for line in other.stderr().splitlines() if "waiting for" not in line]
    assert said.startswith("dslrun: error: ")
    assert there in said
    until(lambda: f"warning: a node at 127.0.0.1 was refused: {here}" in first.stderr())
    assert_whole(nodes, first, environ=environ[0])
    assert first.stderr().count("was refused") == 1


def test_a_node_with_another_key_is_refused_in_one_line(nodes: Nodes) -> None:
    (first,) = nodes.start("", count=2, environ=KEYED)
    (other,) = nodes.start("", first=1, count=2, environ={"DSL_JOB_KEY": KEY + "x"})
    assert other.wait() == 2
    assert "has another DSL_JOB_KEY or --rdzv-id" in other.stderr()
    assert KEY not in other.stderr()
    assert_whole(nodes, first, environ=KEYED)


def test_a_short_key_is_refused_before_anything_is_done(nodes: Nodes) -> None:
    for key in ("", "secret"):
        (job,) = nodes.start("", count=2, environ={"DSL_JOB_KEY": key})
        assert job.wait() == 2
        assert job.stderr().startswith(
            f"dslrun: error: DSL_JOB_KEY has {len(key)} characters, it needs at least 16"
        )


def test_a_stranger_who_knows_the_run_id_alone_takes_no_place_of_a_job_with_a_key(nodes: Nodes) -> None:
    (job,) = nodes.start("--rdzv-id=known", count=2, environ=KEYED)
    until(lambda: listens(f"127.0.0.1:{nodes.port}"))
    with pytest.raises(RefusedLinkError), caller(nodes.port, a_hello(run_id="known"), run_id="known"):
        pass
    run_key, _ = job_key({}, "known")  # he says that he has a key of the user, and uses the one that he knows
    with pytest.raises(RefusedLinkError):
        connect([f"127.0.0.1:{nodes.port}"], run_key, 1, 20.0, keyed=True)
    (other,) = nodes.start("--rdzv-id=known", first=1, count=2, environ=KEYED)
    assert [line.split()[0] for line in nodes.seen(2)] == ["0/2", "1/2"]
    nodes.end()
    assert [one.wait() for one in (job, other)] == [0, 0]


# ---- nodes that do not belong to the job


def test_a_node_of_another_job_is_refused_in_one_line_with_2(nodes: Nodes) -> None:
    jobs = nodes.start("", "--rdzv-id=other", "")
    assert jobs[1].wait() == 2
    (said,) = [line for line in jobs[1].stderr().splitlines() if "waiting for" not in line]
    assert said.startswith(
        f"dslrun: error: 127.0.0.1:{nodes.port} refuses this node: the other side has another"
    )
    assert "none" not in said
    text = "warning: a node at 127.0.0.1 was refused: it has another DSL_JOB_KEY or --rdzv-id than this node"
    until(lambda: text in jobs[0].stderr())
    (right,) = nodes.start("", first=1, count=3)
    nodes.seen(3)
    nodes.end()
    assert [job.wait() for job in (jobs[0], right, jobs[2])] == [0, 0, 0]


@pytest.mark.parametrize(
    "hello, words",
    [
        (a_hello(nodes=3), "its --nnodes is 3, that of node 0 is 2"),
        (a_hello(place=0), "its --node-rank is 0, with 2 nodes it must be 1 to 1"),
        (a_hello(place=7), "its --node-rank is 7, with 2 nodes it must be 1 to 1"),
        (a_hello(version="0.0.1"), "it has dsl 0.0.1, this host has "),
        (a_hello(workers=0), "it has no workers"),
    ],
)
def test_a_node_that_does_not_fit_is_told_why_and_so_is_the_user(
    hello: object, words: str, nodes: Nodes
) -> None:
    (job,) = nodes.start("", count=2)
    until(lambda: listens(f"127.0.0.1:{nodes.port}"))
    for _ in range(3):
        with caller(nodes.port, hello) as outer:  # type: ignore[arg-type]
            moved = outer.receive(20)
        assert isinstance(moved, Moved)
        with caller(moved.port, hello) as inner:  # type: ignore[arg-type]
            refused = inner.receive(20)
        assert isinstance(refused, Refused)
        assert words in refused.text
    assert_whole(nodes, job)
    assert job.stderr().count(words) == 1, job.stderr()


def test_a_place_that_is_taken_is_refused_and_named(nodes: Nodes) -> None:
    jobs = nodes.start("", "", count=3)
    until(lambda: "waiting for 1 of 3 nodes: node 2" in jobs[0].stderr())
    (wrong,) = nodes.start("", first=1, count=3)
    assert wrong.wait() == 2
    name = os.uname().nodename
    words = f"cannot take part: its --node-rank is 1, and so is that of node 1 ({name})"
    assert words in wrong.stderr()
    until(lambda: words in jobs[0].stderr())
    (last,) = nodes.start("", first=2, count=3)
    nodes.seen(3)
    nodes.end()
    assert [job.wait() for job in (*jobs, last)] == [0, 0, 0]


def test_what_a_node_calls_itself_cannot_write_to_the_terminal(nodes: Nodes) -> None:
    (job,) = nodes.start("", count=2)
    until(lambda: listens(f"127.0.0.1:{nodes.port}"))
    hello = a_hello(host=f"odd{ESCAPES}", role=ESCAPES)
    with caller(nodes.port, hello) as outer:
        moved = outer.receive(20)
    assert isinstance(moved, Moved)
    with caller(moved.port, a_hello(nodes=3, host=ESCAPES)) as inner:
        inner.receive(20)
    assert_whole(nodes, job)
    assert "\x1b" not in job.stderr()


def test_a_node_that_goes_before_the_start_gives_its_place_back(nodes: Nodes) -> None:
    jobs = nodes.start("", "", count=3)
    until(lambda: "waiting for 1 of 3 nodes: node 2" in jobs[0].stderr())
    os.kill(jobs[1].guard, signal.SIGKILL)
    until(lambda: "before the job has begun" in jobs[0].stderr())
    others = nodes.start("", "", first=1, count=3)
    nodes.seen(3)
    nodes.end()
    assert [job.wait() for job in (jobs[0], *others)] == [0, 0, 0], jobs[0].stderr()


def test_a_first_node_that_is_started_again_is_found_again(nodes: Nodes) -> None:
    jobs = nodes.start("", "", count=3)
    until(lambda: "waiting for 1 of 3 nodes: node 2" in jobs[1].stderr())
    os.kill(jobs[0].guard, signal.SIGINT)
    assert jobs[0].wait() in (130, -signal.SIGINT)
    (again,) = nodes.start("", count=3)
    (last,) = nodes.start("", first=2, count=3)
    nodes.seen(3)
    nodes.end()
    assert [job.wait() for job in (again, jobs[1], last)] == [0, 0, 0]


# ---- strangers


def test_strangers_are_sent_away_told_of_once_and_harm_nobody(nodes: Nodes) -> None:
    (job,) = nodes.start("", count=2)
    until(lambda: listens(f"127.0.0.1:{nodes.port}"))
    with contextlib.ExitStack() as stack:

        def call(data: bytes) -> socket.socket:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", nodes.port), timeout=20))
            with contextlib.suppress(OSError):
                sock.sendall(data)
            return sock

        silent = [call(b"") for _ in range(200)]
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00\xce\xf7\x85\x3c\r\r\x4c",
            ESCAPES.encode(),
            b"x" * (1 << 20),
        ):
            for _ in range(3):
                with contextlib.suppress(ConnectionError):
                    assert call(data).recv(100) == b""
        assert_whole(nodes, job)
        for one in silent:  # they are gone with the port
            with contextlib.suppress(ConnectionError):
                assert one.recv(100) == b""
    where = f"127.0.0.1 was sent away from port {nodes.port}, where the nodes meet: it is a torchrun, or a worker of torch"
    assert job.stderr().count(where) == 1
    assert job.stderr().count("a stranger at 127.0.0.1 connected") == 1
    assert "\x1b" not in job.stderr()


def test_a_flood_at_the_agreed_port_locks_no_node_out(nodes: Nodes) -> None:
    """Somebody opens connections as fast as he can, and another one asks for a place and never takes it."""
    (job,) = nodes.start("", count=2)
    until(lambda: listens(f"127.0.0.1:{nodes.port}"))
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", nodes.port), timeout=1).close()

    def knock() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError, ControlError), caller(nodes.port, a_hello()) as link:
                link.receive(1)

    threads = [threading.Thread(target=one) for one in (flood, flood, knock)]
    for one in threads:
        one.start()
    try:
        (other,) = nodes.start("", first=1, count=2)
        nodes.seen(2)
    finally:
        is_over.set()
        nodes.end()
        assert [one.wait() for one in (job, other)] == [0, 0]
        for thread in threads:
            thread.join()


@pytest.mark.timeout(60)
def test_a_node_that_is_moved_to_a_port_where_nobody_listens_calls_again(nodes: Nodes) -> None:
    """Whoever pretends to be node 0 has the key of the run id; the node waits for the real one."""
    secret, _ = job_key({}, "none")
    fake = Hub(20.0, show=True)
    fake.listen("127.0.0.1", nodes.port, keyed=False)
    fake.expect(None, secret, count=4)
    fake.start()
    try:
        (other,) = nodes.start("", first=1, count=2)
        for _ in range(2):
            ((link, _),) = until_messages(fake, bool)
            link.send(Moved(free_port(), "h"))
            until_messages(fake, lambda found: any(isinstance(one, Lost) for _, one in found))
    finally:
        fake.close(1)
    (job,) = nodes.start("", count=2)
    nodes.seen(2)
    nodes.end()
    assert [one.wait() for one in (job, other)] == [0, 0], other.stderr()


def test_the_port_is_free_for_a_worker_that_does_not_ask_to_reuse_it(nodes: Nodes, tmp_path: Path) -> None:
    """Nothing of the meeting is left at the agreed port, not even after strangers and refused nodes."""
    script = tmp_path / "bind.py"
    script.write_text(
        "import os, socket\n"
        "if os.environ['RANK'] == '0':\n"
        "    sock = socket.socket()\n"
        "    sock.bind(('0.0.0.0', int(os.environ['MASTER_PORT'])))\n"
        "    sock.listen()\n"
    )
    (job,) = nodes.start("", count=2, program=(str(script),))
    until(lambda: listens(f"127.0.0.1:{nodes.port}"))
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", nodes.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        sock.recv(100)
    with pytest.raises(RefusedLinkError), caller(nodes.port, a_hello(), run_id="other"):
        pass
    (other,) = nodes.start("", first=1, count=2, program=(str(script),))
    assert [one.wait() for one in (job, other)] == [0, 0], job.stderr()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9", "localhost", "[::1]", socket.gethostname()])
def test_nodes_meet_wherever_the_first_one_is(address: str, nodes: Nodes) -> None:
    jobs = nodes.start("", "--nproc-per-node=2", address=address)
    assert [line.split()[0] for line in nodes.seen(3)] == ["0/3", "1/3", "2/3"]
    nodes.end()
    assert [job.wait() for job in jobs] == [0, 0]


# ---- what users hear while they wait


def test_a_node_that_waits_says_what_to_type_for_the_other(nodes: Nodes, tmp_path: Path) -> None:
    """The words are those of the user, but for the place."""
    program = tmp_path / "the program"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$1/args.$RANK"\n')
    program.chmod(0o755)
    words = ("--no-python", str(program), str(tmp_path), "it's", "$HOME", "a  b;", "--node-rank", "7", "")
    (job,) = nodes.start("--role=some", count=2, program=words)
    where = re.escape(
        f"this is node 0, waiting for 1 of 2 nodes: node 1, at 127.0.0.1:{nodes.port} for up to 600 s"
    )
    line = until(
        lambda: re.search(
            f"{where}; type on this machine: (.*); other machines need the address ", job.stderr()
        )
    )
    assert line is not None
    environ = {**os.environ, "PATH": f"{nodes.bin}:{os.environ['PATH']}"}
    other = subprocess.run(line[1], shell=True, env=environ, timeout=30, capture_output=True, check=False)
    assert other.returncode == 0, other.stderr
    assert job.wait() == 0
    said = "\n".join(words[2:]) + "\n"
    assert [(tmp_path / f"args.{rank}").read_text() for rank in (0, 1)] == [said, said]


def test_a_node_that_finds_nobody_says_where_and_for_how_long_and_what_to_type(nodes: Nodes) -> None:
    (job,) = nodes.start("--rdzv-conf=timeout=90", first=1, count=2)
    where = f"127.0.0.1:{nodes.port}"
    said = f"dslrun: waiting for node 0 for up to 90 s: nobody answers at {where} yet; type there: dslrun --nnodes=2 "
    until(lambda: f"{said}--node-rank 0 --master-addr=127.0.0.1 " in job.stderr())
    os.kill(job.guard, signal.SIGINT)
    job.wait()


@pytest.mark.guarantee("G2", "G8")
@pytest.mark.parametrize(
    "signum, codes, how",
    [
        (signal.SIGTERM, (143, -15), "terminated (SIGTERM)"),
        (signal.SIGINT, (130, -2), "interrupted (SIGINT)"),
        (signal.SIGUSR1, (75,), "preempted (SIGUSR1)"),
    ],
)
@pytest.mark.parametrize(
    "places, awaited", [((0,), "nodes 1-2"), ((1,), "node 0"), ((1, 0), "1 of 3 nodes: node 2")]
)
def test_the_last_words_of_a_node_that_a_signal_ends_are_which_nodes_were_missing(
    places: tuple[int, ...],
    awaited: str,
    signum: signal.Signals,
    codes: tuple[int, ...],
    how: str,
    nodes: Nodes,
) -> None:
    """The first of these nodes gets the signal."""
    jobs = [nodes.start("--preempt-signal=USR1", first=place, count=3)[0] for place in places]
    until(
        lambda: f"waiting for {awaited.partition(':')[0]}" in jobs[0].stderr() or "2 of 3" in jobs[0].stderr()
    )
    os.kill(jobs[0].guard, signum)
    assert jobs[0].wait() in codes
    assert jobs[0].stderr().splitlines()[-1] == f"dslrun: {how} while waiting for {awaited}"
    for job in jobs[1:]:
        os.kill(job.guard, signal.SIGTERM)
        job.wait()


def test_nodes_that_do_not_come_in_time_are_named(nodes: Nodes) -> None:
    (job,) = nodes.start("--rdzv-conf=timeout=1", count=3)
    assert job.wait() == 1
    text = "after 1 s the job is still waiting for nodes 1-2"
    assert job.stderr() == f"dslrun: error: {text}\n"


def test_nobody_at_the_meeting_point_in_time(nodes: Nodes) -> None:
    (job,) = nodes.start("--rdzv-conf=timeout=0.5", first=1, count=2)
    assert job.wait() == 1
    text = "dslrun: error: still waiting for node 0 after 0.5 s: "
    assert job.stderr().startswith(text)
    assert f"127.0.0.1:{nodes.port} (Connection refused)" in job.stderr()
