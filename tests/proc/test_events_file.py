"""The record of real jobs: ``--events`` of `dsl` and `dslrun`, and ``events=`` of functions."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import running
from tests.support.places import Nodes
from tests.support.recorded import only, recorded

from dsl.functions import launch

SECRET = "a value that no record may have"
LOOK_S = 0.2


def test_a_job_from_its_launch_to_its_end(dsl_command: Path, tmp_path: Path) -> None:
    file = tmp_path / "events"
    line = dsl_line(
        dsl_command,
        2,
        ["/bin/echo", "hi"],
        None,
        "--events",
        str(file),
        "--tag-output=always",
    )
    with running(line, tmp_path, environ={"DSL_TEST_SECRET": SECRET}) as job:
        assert job.wait() == 0, job.stderr()
        found = recorded(file)
        (launched,) = only("Launched", found)
        assert (launched["pid"], launched["argv"]) == (job.guard, ["dsl", *line[1:]])
        assert 0 <= launched["time_ns"] - launched["began_ns"] < 10e9
    names = [one["event"] for one in found]
    assert names[:2] == ["Launched", "AttemptStarted"]
    assert names[-2:] == ["Ended", "JobEnded"]
    started, exits = only("Started", found), only("Exited", found)
    for kind in (started, only("FirstOutput", found), exits):
        assert sorted(one["rank"] for one in kind) == [0, 1]
    assert {one["pid"] for one in started} == {one["pid"] for one in exits}
    assert all(one["max_rss_bytes"] > 1 << 16 and one["cpu_user_s"] >= 0 for one in exits)
    assert (found[-1]["code"], found[-1]["verdict"]) == (0, [])
    assert len({one["job"] for one in found}) == 1
    assert SECRET not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_restart_and_a_failure_are_recorded_as_the_terminal_tells_them(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    file = tmp_path / "events"
    options = ["--no-python", "--nproc-per-node=2", "--max-restarts=1", f"--events={file}"]
    line = [str(dsl_command.with_name("dslrun")), *options, str(testchild), "exit", "3"]
    with running(line, tmp_path) as job:
        assert job.wait() == 3
        told = job.stderr()
    found = recorded(file)
    assert [one["attempt"] for one in only("AttemptStarted", found)] == [0, 1]
    (restart,) = only("Restarting", found)
    assert (restart["attempt"], restart["restarts"], restart["counted"]) == (0, 1, True)
    assert restart["why"] in told
    reports = only("Report", found)
    assert [(one["attempt"], one["cause"]["code"]) for one in reports] == [(0, 3), (1, 3)]
    assert found[-1]["code"] == 3
    assert found[-1]["verdict"][0] in told


def test_a_signal_a_stop_and_a_kill_are_recorded(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    file = tmp_path / "events"
    program = [str(testchild), "ignore", "TERM", "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 2, program, 0.2, f"--events={file}"), tmp_path) as job:
        job.ready(2)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143
    found = recorded(file)
    (received,), (stopping,), (killing,) = (
        only(one, found) for one in ("SignalReceived", "Stopping", "Killing")
    )
    assert (received["signum"], received["action"]) == (15, "stop")
    assert (stopping["reason"], stopping["grace_s"]) == ("signal", 0.2)
    assert sorted(killing["ranks"]) == [0, 1]
    assert [one["signal"] for one in only("Exited", found)] == [9, 9]
    assert found[-1]["code"] == 143


def test_nodes_with_fixed_places_record_their_own_part(nodes: Nodes, tmp_path: Path) -> None:
    files = [tmp_path / f"events{rank}" for rank in range(2)]
    jobs = nodes.start(*[f"--nproc-per-node=2 --max-restarts=1 --events={file}" for file in files])
    nodes.seen(4)
    nodes.fail(3, 0)
    nodes.seen(8)
    nodes.end()
    assert [job.wait() for job in jobs] == [0, 0], [job.stderr() for job in jobs]
    for rank, file in enumerate(files):
        found = recorded(file)
        assert [one["attempt"] for one in only("AttemptStarted", found)] == [0, 1]
        assert {one["node_rank"] for one in found[1:]} == {rank}
        ranks = [2 * rank, 2 * rank + 1]
        assert sorted(one["rank"] for one in only("Exited", found)) == sorted([*ranks, *ranks])
        assert len(only("Restarting", found)) == 1
        assert found[-1]["code"] == 0
    (report,) = [one for one in only("Report", recorded(files[1])) if one["attempt"] == 0]
    assert (report["cause"]["rank"], report["cause"]["code"]) == (3, 7)


def test_functions_record_too(testchild: Path, tmp_path: Path) -> None:
    file = tmp_path / "events"
    launch(str(testchild), "exit", "0", nproc_per_node=2, events=str(file))
    found = recorded(file)
    assert [one["event"] for one in found][:2] == ["Launched", "AttemptStarted"]
    assert (found[0]["pid"], found[0]["argv"]) == (os.getpid(), [])
    assert found[-1]["event"] == "JobEnded"
    assert str(file) not in {
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)
    }


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_full_disk_costs_one_warning(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    line = dsl_line(dsl_command, 2, [str(testchild), "exit", "0"], None, "--events=/dev/full")
    with running(line, tmp_path) as job:
        assert job.wait() == 0
        why = "events are no longer recorded in '/dev/full': No space left on device"
        assert job.stderr() == f"dsl: warning: {why}\n"


def test_a_file_that_cannot_be_made_prevents_the_job(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    line = dsl_line(dsl_command, 1, [str(testchild), "exit", "0"], None, f"--events={tmp_path}/none/e")
    with running(line, tmp_path) as job:
        assert job.wait() == 2
        why = "cannot be written: No such file or directory, choose another file"
        assert job.stderr() == f"dsl: error: --events '{tmp_path}/none/e' {why}\n"


def test_a_dry_run_records_nothing(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    line = dsl_line(dsl_command, 1, [str(testchild)], None, f"--events={tmp_path}/e", "--dry-run")
    with running(line, tmp_path) as job:
        assert job.wait() == 0
    assert not (tmp_path / "e").exists()


def test_a_record_of_a_job_in_which_nothing_happens_costs_nothing(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    program = [str(testchild), "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 3, program, None, f"--events={tmp_path}/e"), tmp_path) as job:
        job.ready(3)

        def is_still(pid: int) -> bool:
            before = processes.processor_ns(pid)
            time.sleep(LOOK_S)
            return processes.processor_ns(pid) == before

        until(lambda: is_still(job.guard) and is_still(job.agent()))
        assert len(only("Started", recorded(tmp_path / "e"))) == 3


@pytest.mark.guarantee("G1")
def test_the_workers_do_not_have_the_file_open(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    program = [str(testchild), "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 1, program, None, f"--events={tmp_path}/e"), tmp_path) as job:
        (pid,) = job.ready(1).values()
        fds = f"/proc/{pid}/fd"
        assert f"{tmp_path}/e" not in {os.readlink(f"{fds}/{fd}") for fd in os.listdir(fds)}
