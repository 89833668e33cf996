"""``--metrics``: the figures of real jobs, at a port and in a file, and readers that mean no good."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.kit.waiting import until
from tests.support.command import dsl_line, ran
from tests.support.jobs import Helpers, Job, is_still
from tests.support.places import Nodes, free_port

from dsl.machine.crowd import MOST_CLIENTS
from dsl.view.metrics import FRESH_S


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
def started(helpers: Helpers, target: object) -> Iterator[Job]:
    with helpers(2, "note {}/ready '%r %p' pause", None, "--metrics", str(target)) as job:
        job.ready(2)
        yield job


def test_a_port_shows_what_the_ranks_use_until_the_job_ends_to_this_machine_alone(helpers: Helpers) -> None:
    port = free_port()
    with started(helpers, port) as job:
        listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{port:04X}" in listening
        assert f"00000000:{port:04X}" not in listening
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


def test_nobody_learns_the_arguments_of_the_program_and_another_path_or_method_is_refused(
    testchild: Path, tmp_path: Path, helpers: Helpers
) -> None:
    port = free_port()
    with started(helpers, f"127.0.0.1:{port}"):
        for path, method, code in (("/", "GET", 404), ("/metrics", "POST", 405)):
            asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
            with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(asked, timeout=20):
                pass
            with closing(refused.value):
                assert refused.value.code == code
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics?name=all", timeout=20) as answer:
            text = answer.read().decode()
    assert f'program="{testchild.name}"' in text
    assert "pause" not in text
    assert str(tmp_path) not in text


def test_many_silent_clients_do_not_keep_others_from_the_figures(helpers: Helpers) -> None:
    """There are more than are served at once, and nobody waits for the deadline of another."""
    port = free_port()
    with started(helpers, port) as job:
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


@pytest.mark.parametrize("option, value", [("--metrics", "0x1"), ("--metrics", "none/job"), ("--events", "")])
@pytest.mark.parametrize("look", ["--dry-run", "--dry-run-json", "--doctor"])
def test_a_look_at_the_plan_refuses_them_too(
    dslrun: Path, tmp_path: Path, option: str, value: str, look: str
) -> None:
    (tmp_path / "train.py").touch()
    done = ran([dslrun, look, option, value, "train.py"], cwd=tmp_path)
    assert done.returncode == 2
    assert f"{option} {value!r} " in done.stdout + done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_device_stays_and_a_pipe_is_refused(dslrun: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.mkfifo(tmp_path / "pipe")
    for name, code in (("null", 0), ("pipe", 2)):
        done = ran([dslrun, "--metrics", name, "train.py"], cwd=tmp_path)
        assert done.returncode == code, done.stderr
    assert stat.S_ISCHR((tmp_path / "null").stat().st_mode)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_nobody_asks_and_nothing_runs(helpers: Helpers) -> None:
    port = free_port()
    with started(helpers, port) as job:
        scrape(port)
        until(lambda: is_still(job.agent(), look_s=1.5 * FRESH_S))


def test_a_file_is_whole_at_any_time_and_keeps_the_end(tmp_path: Path, helpers: Helpers) -> None:
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
        with started(helpers, path) as job:
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
    done = ran([dslrun, "--nproc-per-node=2", "--max-restarts=2", "--metrics", path, script])
    assert done.returncode == 128 + signal.SIGKILL
    text = path.read_text()
    assert figures(text)["dsl_job_restarts_total"] == 2
    assert 'dsl_job_failures_total{how="SIGKILL"} 3.0\n' in text
    assert "SIGTERM" not in text


def test_the_node_that_conducts_counts_the_failures_of_its_own_workers(nodes: Nodes, tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    jobs = nodes.start(f"--max-restarts=1 --metrics {path}", "--max-restarts=1")
    nodes.seen(2)
    nodes.fail(0, 0)
    nodes.seen(4)
    nodes.fail(0, 1)
    assert [job.wait() for job in jobs] == [7, 7], [job.stderr() for job in jobs]
    assert 'dsl_job_failures_total{how="exit code 7"} 2.0\n' in path.read_text()


@pytest.mark.parametrize(
    "target, words",
    [
        ("{port}", " cannot listen at 127.0.0.1:{port}: Address already in use, choose another port"),
        ("{folder}/none/job.prom", " '{folder}/none/job.prom' cannot be written: No such file or directory"),
        ("{folder}", " '{folder}' cannot be written: it is a directory, choose another file"),
        ("127.0.0.1:94o0", " '127.0.0.1:94o0' is no address: give PORT or HOST:PORT, or './127"),
    ],
)
def test_a_port_or_a_file_that_cannot_be_had_is_one_line_before_the_job(
    tmp_path: Path, target: str, words: str, helpers: Helpers
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        given = {"port": listener.getsockname()[1], "folder": tmp_path}
        done = ran(helpers.line(1, "note {}/ready %r", None, "--metrics", target.format(**given)))
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert f"--metrics{words.format(**given)}" in lines[0]
    assert not (tmp_path / "ready").exists()


def test_a_file_has_the_end_of_a_job_that_ends_at_once(dsl_command: Path, tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    result = ran(dsl_line(dsl_command, 1, ["true"], None, "--metrics", str(path)))
    assert (result.returncode, result.stderr) == (0, "")
    assert figures(path.read_text())["dsl_job_end_time_seconds"] > 0
