"""``--metrics``: the figures of real jobs, at a port and in a file, and readers that mean no good."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import Job, running

from dsl.machine.crowd import MOST_CLIENTS
from dsl.view.metrics import FRESH_S


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def figures(text: str) -> dict[str, float]:
    """Each figure with its labels, as ``name{rank=0}``; of ranks only the label of the rank is kept."""
    return {
        f"{one.name}{{rank={one.labels['rank']}}}" if "rank" in one.labels else one.name: one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return figures(answer.read().decode())


@contextmanager
def started(dsl_command: Path, testchild: Path, folder: Path, target: str, *options: str) -> Iterator[Job]:
    program = [str(testchild), "note", str(folder / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 2, program, None, "--metrics", target, *options), folder) as job:
        job.ready(2)
        yield job


def test_a_port_shows_what_the_ranks_use_until_the_job_ends(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    port = free_port()
    with started(dsl_command, testchild, tmp_path, str(port)) as job:
        found = scrape(port)
        assert found["dsl_job_ranks"] == 2
        assert found["dsl_job_restarts_total"] == 0
        assert found["dsl_ranks"] == 2
        for rank in (0, 1):
            assert found[f"dsl_rank_threads{{rank={rank}}}"] == 1
            assert found[f"dsl_rank_resident_memory_bytes{{rank={rank}}}"] > 0
        os.kill(job.guard, signal.SIGTERM)
        job.wait()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_only_this_machine_reaches_a_port_without_a_host(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    port = free_port()
    with started(dsl_command, testchild, tmp_path, str(port)):
        others = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{port:04X}" in others
        assert f"00000000:{port:04X}" not in others


def test_another_path_or_method_is_refused(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    port = free_port()
    with started(dsl_command, testchild, tmp_path, f"127.0.0.1:{port}"):
        for path, method, code in (("/", "GET", 404), ("/metrics", "POST", 405)):
            asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
            with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(asked, timeout=20):
                pass
            with closing(refused.value):
                assert refused.value.code == code
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics?name=all", timeout=20) as answer:
            assert answer.status == 200


def test_many_silent_clients_do_not_keep_others_from_the_figures(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """There are more than are served at once, and nobody waits for the deadline of another."""
    port = free_port()
    with started(dsl_command, testchild, tmp_path, str(port)) as job:
        scrape(port)
        fds = f"/proc/{job.agent()}/fd"
        before = len(os.listdir(fds))
        with ExitStack() as silent:
            for _ in range(MOST_CLIENTS + 8):
                silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in range(4):
                assert scrape(port)["dsl_job_ranks"] == 2
            assert len(os.listdir(fds)) <= before + MOST_CLIENTS + 1
            until(lambda: len(os.listdir(fds)) <= before)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
    assert "internal error" not in job.stderr()


def test_nobody_learns_the_arguments_of_the_program(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    port = free_port()
    with (
        started(dsl_command, testchild, tmp_path, str(port)),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer,
    ):
        text = answer.read().decode()
    assert f'program="{testchild.name}"' in text
    assert "pause" not in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("option, value", [("--metrics", "0x1"), ("--metrics", "none/job"), ("--events", "")])
@pytest.mark.parametrize("look", ["--dry-run", "--dry-run-json", "--doctor"])
def test_a_look_at_the_plan_refuses_them_too(
    dslrun: Path, tmp_path: Path, option: str, value: str, look: str
) -> None:
    (tmp_path / "train.py").touch()
    command = [str(dslrun), look, option, value, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"{option} {value!r} " in done.stdout + done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_device_stays_and_a_pipe_is_refused(dslrun: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mkfifo(tmp_path / "pipe")
    for name, code in (("null", 0), ("pipe", 2)):
        command = [str(dslrun), "--metrics", name, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_clients_that_mean_no_good_delay_only_each_other(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """One says nothing, one never ends its request, one goes in the middle, and many come at once."""
    port = free_port()
    with started(dsl_command, testchild, tmp_path, str(port)) as job:
        scrape(port)
        threads = set(os.listdir(f"/proc/{job.agent()}/task"))
        silent = socket.create_connection(("127.0.0.1", port))
        endless = socket.create_connection(("127.0.0.1", port))
        gone = socket.create_connection(("127.0.0.1", port))
        with closing(silent), closing(endless):
            endless.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20000)
            gone.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            gone.close()
            crowd = [threading.Thread(target=scrape, args=(port,)) for _ in range(8)]
            for one in crowd:
                one.start()
            for one in crowd:
                one.join()
            assert scrape(port)["dsl_job_ranks"] == 2
            assert set(os.listdir(f"/proc/{job.agent()}/task")) <= threads
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 128 + signal.SIGTERM
    assert "internal error" not in job.stderr()


def test_nobody_asks_and_nothing_runs(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    def is_still(pid: int) -> bool:
        """Whether no thread has run for longer than figures stay fresh."""
        before = processes.processor_ns(pid)
        time.sleep(1.5 * FRESH_S)
        return processes.processor_ns(pid) == before

    port = free_port()
    with started(dsl_command, testchild, tmp_path, str(port)) as job:
        scrape(port)
        until(lambda: is_still(job.agent()))


def test_a_file_is_whole_at_any_time_and_keeps_the_end(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    path = tmp_path / "job.prom"
    texts: set[str] = set()
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            if path.exists():
                texts.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with started(dsl_command, testchild, tmp_path, str(path)) as job:
            until(lambda: any("dsl_rank_threads" in text for text in texts))
            os.kill(job.guard, signal.SIGTERM)
            assert job.wait() == 128 + signal.SIGTERM
    finally:
        is_over.set()
        reader.join()
    for text in texts | {path.read_text()}:
        assert text == "" or text.endswith("\n")
        figures(text)
    last = figures(path.read_text())
    assert last["dsl_job_exit_code"] == 128 + signal.SIGTERM
    assert last["dsl_job_end_time_seconds"] >= last["dsl_job_start_time_seconds"]
    assert path.stat().st_mode & 0o777 == 0o644
    assert sorted(one.name for one in tmp_path.iterdir() if "prom" in one.name) == ["job.prom"]


def test_restarts_and_failures_are_counted(dslrun: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()\n"
    )
    command = [
        str(dslrun),
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "2",
        "--metrics",
        str(path),
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    text = path.read_text()
    found = figures(text)
    assert found["dsl_job_restarts_total"] == 2
    assert 'dsl_job_failures_total{how="SIGKILL"} 3.0\n' in text
    assert "SIGTERM" not in text


@pytest.mark.parametrize(
    "target, words",
    [
        (
            "{port}",
            "--metrics cannot listen at 127.0.0.1:{port}: Address already in use, choose another port",
        ),
        ("no.such.host.invalid:9400", "--metrics cannot listen at no.such.host.invalid:9400: "),
        ("70000", "--metrics: 70000 is no port, give a number from 1 to 65535"),
        (
            "{folder}/none/job.prom",
            "--metrics '{folder}/none/job.prom' cannot be written: No such file or directory",
        ),
        ("{folder}", "--metrics '{folder}' cannot be written: it is a directory, choose another file"),
        ("127.0.0.1:94o0", "--metrics '127.0.0.1:94o0' is no address: give PORT or HOST:PORT, or './127"),
        ("-1", "--metrics '-1' is no address: give PORT or HOST:PORT, or './-1' for a file of this name"),
        ("", "--metrics '' is no address: give PORT or HOST:PORT"),
    ],
)
def test_a_port_or_a_file_that_cannot_be_had_is_one_line_before_the_job(
    dsl_command: Path, testchild: Path, tmp_path: Path, target: str, words: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = {"port": listener.getsockname()[1], "folder": tmp_path}
        program = [str(testchild), "note", str(tmp_path / "ready"), "%r"]
        command = dsl_line(dsl_command, 1, program, None, "--metrics", target.format(**given))
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert words.format(**given) in lines[0]
    assert not (tmp_path / "ready").exists()


def test_a_file_has_the_end_of_a_job_that_ends_at_once(dsl_command: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    command = dsl_line(dsl_command, 1, ["true"], None, "--metrics", str(path))
    result = subprocess.run(command, capture_output=True, text=True, timeout=25, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert figures(path.read_text())["dsl_job_end_time_seconds"] > 0
