"""What a job records in its file of events, and what `dsl-report` makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.command import dsl_line, ran
from tests.support.jobs import Helpers, is_still, running
from tests.support.places import Nodes
from tests.support.recorded import only, recorded

from dsl.functions import launch

SECRET = "a value that no record may have"


def test_a_job_from_its_launch_to_its_end(dsl_command: Path, tmp_path: Path) -> None:
    file = tmp_path / "events"
    options = [f"--events={file}", "--tag-output=always"]
    line = dsl_line(dsl_command, 2, ["/bin/echo", "hi"], None, *options)
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
    options = ["--max-restarts=1", f"--events={file}"]
    line = dsl_line(dsl_command.with_name("dslrun"), 2, [testchild, "exit", "3"], None, *options)
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


def test_a_signal_a_stop_and_a_kill_are_recorded(tmp_path: Path, helpers: Helpers) -> None:
    file = tmp_path / "events"
    with helpers(2, "ignore TERM note {}/ready '%r %p' pause", 0.2, f"--events={file}") as job:
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
        (restart,) = only("Restarting", found)
        assert restart["why"].startswith("rank 3 (") == (rank == 1)
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
    assert not has_open(os.getpid(), file)


def has_open(pid: int, file: Path) -> bool:
    """Whether a process has it open."""
    fds = Path(f"/proc/{pid}/fd")
    return str(file) in {os.readlink(fds / fd) for fd in os.listdir(fds) if os.path.lexists(fds / fd)}


FULL = "warning: events are no longer recorded in '/dev/full': No space left on device"
NO_FILE = "error: --events '/dev/null/e' cannot be written: Not a directory, choose another file"


@pytest.mark.parametrize("file, code, said", [("/dev/full", 0, FULL), ("/dev/null/e", 2, NO_FILE)])
def test_a_full_disk_costs_one_warning_and_a_file_that_cannot_be_made_prevents_the_job(
    file: str, code: int, said: str, helpers: Helpers
) -> None:
    with helpers(2, "exit 0", None, f"--events={file}") as job:
        assert (job.wait(), job.stderr()) == (code, f"dsl: {said}\n")


def test_a_dry_run_records_nothing(tmp_path: Path, helpers: Helpers) -> None:
    with helpers(1, [], None, f"--events={tmp_path}/e", "--dry-run") as job:
        assert job.wait() == 0
    assert not (tmp_path / "e").exists()


def test_a_record_of_a_job_in_which_nothing_happens_costs_nothing(tmp_path: Path, helpers: Helpers) -> None:
    with helpers(3, "note {}/ready '%r %p' pause", None, f"--events={tmp_path}/e") as job:
        job.ready(3)
        until(lambda: is_still(job.guard) and is_still(job.agent()))
        assert len(only("Started", recorded(tmp_path / "e"))) == 3


@pytest.mark.guarantee("G1")
def test_the_workers_do_not_have_the_file_open(tmp_path: Path, helpers: Helpers) -> None:
    with helpers(1, "note {}/ready '%r %p' pause", None, f"--events={tmp_path}/e") as job:
        (pid,) = job.ready(1).values()
        assert has_open(job.agent(), tmp_path / "e")
        assert not has_open(pid, tmp_path / "e")


@pytest.fixture
def dsl_report(dsl_command: Path) -> Path:
    """Path of the installed `dsl-report` program."""
    return dsl_command.with_name("dsl-report")


def run(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A run that ends well and says nothing on stderr."""
    result = ran(words, environ=environ, check=True)
    assert result.stderr == ""
    return result


def test_people_and_programs_are_told_the_same(dsl_report: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=2\nn2 slots=2\n")
    found = json.loads(run(dsl_report, "--json", "-H", hosts).stdout)
    text = run(dsl_report, "-H", hosts, "--hide_operator_status").stdout
    assert found["hostfile"] == {"path": str(hosts), "hosts": 2, "slots": 4}
    assert f"hostfile {'.' * 25} {hosts}, 2 hosts, 4 slots\n" in text
    assert f"dsl version {'.' * 22} {found['dsl']['version']}\n" in text
    assert found["python"]["path"] == sys.executable
    assert found["kernel"]["interfaces"].keys() == {"clone3", "pidfd", "close_range", "cgroup"}
    assert "\x1b" not in text


@pytest.mark.engine
def test_an_interface_that_is_not_used_says_why(dsl_report: Path) -> None:
    found = json.loads(run(dsl_report, "--json", DSL_ENGINE_DISABLE="pidfd,cgroup").stdout)
    interfaces = found["kernel"]["interfaces"]
    assert "DSL_ENGINE_DISABLE" in interfaces["pidfd"]
    assert "DSL_ENGINE_DISABLE" in interfaces["cgroup"]


def test_no_framework_is_imported(dsl_report: Path, tmp_path: Path) -> None:
    for name in ("torch", "deepspeed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '9.9'\ncuda = '99.9'\n")
    found = json.loads(run(dsl_report, "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert (found["torch"]["version"], found["torch"]["cuda"]) == ("9.9", "99.9")
    assert found["deepspeed"]["path"] == str(tmp_path / "deepspeed")


def test_it_ends_as_others_if_nobody_reads(dsl_report: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run([dsl_report], stdout=writing, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, b"")


@pytest.mark.needs_package("matplotlib")
def test_the_timeline_of_a_real_job(dsl_report: Path, dsl_command: Path, tmp_path: Path) -> None:
    line = dsl_line(dsl_command, 2, ["/bin/echo", "hi"], None, "--events=t.jsonl", "--tag-output=always")
    subprocess.run(line, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    result = ran([dsl_report, "--timeline", "t.jsonl"], cwd=tmp_path, check=True)
    assert result.stderr.splitlines() == [
        "dsl-report: wrote t.json, which https://ui.perfetto.dev opens",
        "dsl-report: wrote t.png",
    ]
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {one["name"] for one in events if one["ph"] == "X"}
    assert names >= {"start of the command", "preparation", "spawn", "until the first output", "run"}
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


EMPTY = "no job was launched in this record: give the file of --events"


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["--timeline", ""], 1, "'': No such file or directory"),
        (["--timeline", "none"], 1, "'none': No such file or directory"),
        (["--timeline", "/dev/null", "--output", "t"], 1, EMPTY),
        (["--output", "t"], 2, "--output names the files of a timeline: add --timeline FILE"),
    ],
)
def test_what_a_timeline_needs(
    dsl_report: Path, tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    result = ran([dsl_report, *words], cwd=tmp_path)
    assert (result.returncode, result.stderr) == (code, f"dsl-report: error: {said}\n")
    assert not list(tmp_path.iterdir())


def test_a_timeline_replaces_no_pipe(dsl_report: Path, dsl_command: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.json")
    line = dsl_line(dsl_command, 1, ["true"], None, "--events", "e")
    subprocess.run(line, cwd=tmp_path, check=True, timeout=60)
    result = ran([dsl_report, "--timeline", "e", "--output", "t"], cwd=tmp_path)
    why = "it is a pipe, which can be read only once"
    said = f"dsl-report: error: 't.json' cannot be written: {why}, choose another --output\n"
    assert (result.returncode, result.stderr) == (1, said)
