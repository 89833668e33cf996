"""`dslrun` with real workers: what they find, how a group is started again, and how a job ends."""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.contract import torchrun_inputs as inputs
from tests.contract.golden_file import cases
from tests.contract.torchrun_inputs import as_torchrun
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line, ran
from tests.support.jobs import full_pipe, running
from tests.support.places import free_port

WORKERS = Path(__file__).resolve().parent.parent / "workers"

DUMP = """
import json, os, sys
path = os.path.join(sys.argv[1], os.environ["RANK"])
with open(path + ".part", "w") as file:
    json.dump({"env": dict(os.environ), "words": sys.argv[2:]}, file)
os.rename(path + ".part", path + ".json")
"""


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


# The environment.


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("case", cases("torchrun_environment"), ids=lambda case: case[0])
def test_real_workers_find_what_torchruns_workers_find(case: Any, dslrun: Path, tmp_path: Path) -> None:
    """All that is inherited is there, all that torchrun adds is there, and nothing else but the job's token."""
    _, options, given, workers = case
    recorded = re.search(r"\b296\d\d\b", options)
    if recorded and "standalone" not in options:
        port = str(free_port())
        options = options.replace(recorded[0], port)
        workers = [{**worker, "MASTER_PORT": port} for worker in workers]
    script = tmp_path / "dump.py"
    script.write_text(DUMP, encoding="utf-8")
    env = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(tmp_path),
        "DSL_TEST_TOKEN": os.environ["DSL_TEST_TOKEN"],
    }
    env.update(given)
    command = [str(dslrun), f"--nproc-per-node={inputs.WORKERS}", *options.split(), str(script)]
    command += [str(tmp_path)]
    result = ran(command, env=env)
    assert result.returncode == 0, result.stderr
    for rank, expected in enumerate(workers):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))["env"]
        assert found.pop("DSL_JOB_ID")
        found.pop("LC_CTYPE", None)  # Python's own, in a C locale
        assert env.keys() <= found.keys()
        new = {name: value for name, value in found.items() if env.get(name) != value}
        assert {name: inputs.normal(name, value, options) for name, value in new.items()} == as_torchrun(
            expected
        )


def test_the_two_other_ways_to_start_it(dslrun: Path, tmp_path: Path) -> None:
    """`python -m dsl.run` in the place of torch.distributed.run, `python -m dsl.launch` in that of .launch."""
    script = tmp_path / "dump.py"
    script.write_text(DUMP, encoding="utf-8")
    found = {}
    for module in ("dsl.run", "dsl.launch"):
        folder = tmp_path / module
        folder.mkdir()
        command = [sys.executable, "-m", module, "--nproc_per_node=2", str(script)]
        # The script's own first argument is the folder, which dsl.launch's option stands before.
        words = [str(folder), "a b"]
        if module == "dsl.launch":
            script.write_text(
                DUMP.replace("argv[1]", "argv[2]").replace("argv[2:]", "argv[1:]"), encoding="utf-8"
            )
        subprocess.run([*command, *words], check=True, timeout=25)
        found[module] = [
            json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))["words"] for rank in (0, 1)
        ]
    assert found["dsl.run"] == [["a b"]] * 2
    folder = tmp_path / "dsl.launch"
    assert found["dsl.launch"] == [[f"--local-rank={rank}", str(folder), "a b"] for rank in (0, 1)]


def test_a_usage_error_names_the_module_that_was_started() -> None:
    result = ran([sys.executable, "-m", "dsl.launch", "--no"])
    assert result.returncode == 2
    assert result.stderr.startswith("usage: python -m dsl.launch [OPTIONS] SCRIPT [ARGUMENTS]\n")


# A group that is started again.


def _lives(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """What each life of each worker wrote: (attempt, rank) -> facts."""
    found = {}
    for path in folder.glob("[0-9]*-[0-9]*.json"):
        attempt, rank = map(int, path.stem.split("-"))
        found[attempt, rank] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.guarantee("G1")
@pytest.mark.engine
def test_a_group_that_fails_is_ended_whole_and_started_again(
    dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    """Nothing of an attempt lives when the next begins, not even what was deaf in a session of its own."""
    folder = tmp_path / "job"
    folder.mkdir()
    script = [str(WORKERS / "restarted.py"), str(folder), "2"]
    command = [str(dslrun), "--nproc-per-node=3", "--max-restarts=5", "--grace=0.3", *script]
    with running(command, folder) as job:
        assert job.wait(25) == 0, job.stderr()
        assert job.left() == []
    lives = _lives(folder)
    assert sorted(lives) == [(attempt, rank) for attempt in range(3) for rank in range(3)]
    assert {attempt_rank: facts["alive"] for attempt_rank, facts in lives.items() if facts["alive"]} == {}
    attempts = [{lives[attempt, rank]["env"]["MASTER_PORT"] for rank in range(3)} for attempt in range(3)]
    assert [len(ports) for ports in attempts] == [1, 1, 1]
    error_files = {facts["env"]["TORCHELASTIC_ERROR_FILE"] for facts in lives.values()}
    assert len(error_files) == 9
    assert {facts["env"]["TORCHELASTIC_MAX_RESTARTS"] for facts in lives.values()} == {"5"}
    assert len({facts["env"]["TORCHELASTIC_RUN_ID"] for facts in lives.values()}) == 1
    assert "restart 1 of 5" in job.stderr()
    assert "restart 2 of 5" in job.stderr()
    assert tree(temporary) == []


@pytest.mark.guarantee("G2")
def test_restarts_come_to_an_end_with_the_code_of_the_last_failure(
    dslrun: Path, testchild: Path, tmp_path: Path
) -> None:
    """And the crash loop is called one."""
    words = ["note", tmp_path / "lives", "%r", "only", "1", "[", "exit", "7", "]", "pause"]
    with running(dsl_line(dslrun, 2, [testchild, *words], None, "--max-restarts=2"), tmp_path) as job:
        assert job.wait() == 7
    assert (tmp_path / "lives").read_text().count("1\n") == 3
    assert re.search(
        r"crash loop: 3 attempts in a row failed the same way within \S+ s of their start", job.stderr()
    )


def test_a_port_is_free_for_each_attempt(dslrun: Path, tmp_path: Path) -> None:
    """Rank 0 listens on its port until it is killed, and can do so again."""
    script = tmp_path / "listen.py"
    script.write_text(
        "import os, signal, socket, sys\n"
        "port = int(os.environ['MASTER_PORT'])\n"
        "listener = socket.create_server(('', port))\n"
        "peer = socket.create_connection(('127.0.0.1', port))\n"
        "accepted = listener.accept()\n"
        "sys.exit(5 if os.environ['TORCHELASTIC_RESTART_COUNT'] < '2' else 0)\n"
    )
    for options in ([], [f"--master-port={free_port()}"]):
        result = ran([str(dslrun), "--max-restarts=2", *options, str(script)])
        assert result.returncode == 0, result.stderr


def test_a_stop_between_two_attempts_ends_the_job(dslrun: Path, testchild: Path, tmp_path: Path) -> None:
    """The launcher waits half a second for a stderr that nobody reads: time for a signal with no worker alive."""
    script = tmp_path / "worker.sh"
    script.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid$TORCHELASTIC_RESTART_COUNT.part\n"
        f"mv {tmp_path}/pid$TORCHELASTIC_RESTART_COUNT.part {tmp_path}/pid$TORCHELASTIC_RESTART_COUNT\n"
        f"[ $TORCHELASTIC_RESTART_COUNT = 0 ] && exit 3\nexec {testchild} pause\n"
    )
    script.chmod(0o755)
    command = dsl_line(dslrun, 1, [script], None, "--max-restarts=9", "--log-level=info")
    with full_pipe() as stderr, subprocess.Popen(command, stderr=stderr) as job:
        try:
            first = tmp_path / "pid0"
            until(first.exists)
            until(lambda: processes.find(int(first.read_text())) is None)
            job.send_signal(signal.SIGTERM)
            assert job.wait(20) == 143
        finally:
            job.kill()
    assert not (tmp_path / "pid1").exists()


# How a job ends.


@pytest.mark.guarantee("G4")
@pytest.mark.engine
def test_three_deaf_workers_are_ended_when_the_shutdown_timeout_is_over(
    dslrun: Path, testchild: Path, tmp_path: Path
) -> None:
    """Torchrun takes its 30 s all the same when a worker has failed."""
    ready = tmp_path / "ready"
    words = [
        *("ignore", "TERM", "note", ready, "%r %p"),
        *("only", "2", "[", "wait", tmp_path / "go", "exit", "9", "]", "pause"),
    ]
    with running(dsl_line(dslrun, 4, [testchild, *words], None, "--shutdown-timeout=2"), tmp_path) as job:
        job.ready(4)
        begin = time.monotonic()
        (tmp_path / "go").touch()
        assert job.wait() == 9
        elapsed_s = time.monotonic() - begin
        assert job.left() == []
    assert 2 <= elapsed_s < 6  # one after the other
    assert "dslrun: rank 2 (local rank 2, " in job.stderr()


# Files.

WRITER = """
import json, os, sys
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("out", rank, attempt)
print("err", rank, attempt, file=sys.stderr)
if rank == "1" and attempt < sys.argv[1]:
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "ValueError: bad batch", "extraInfo": {"timestamp": "9"}}}, file)
    sys.exit(1)
"""


@pytest.fixture
def writer(tmp_path: Path) -> str:
    """A script that writes to both streams, and whose rank 1 fails and leaves an error file in its first N lives."""
    path = tmp_path / "writer.py"
    path.write_text(WRITER, encoding="utf-8")
    return str(path)


@pytest.mark.guarantee("G6")
def test_log_files_lie_where_torchrun_puts_them(
    dslrun: Path, writer: str, tmp_path: Path, temporary: Path
) -> None:
    logs = tmp_path / "logs"
    options = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=job7"]
    options += [f"--log-dir={logs}"]
    result = ran([str(dslrun), *options, "-r", "1", "-t", "0:2", writer, "1"])
    assert result.returncode == 0, result.stderr
    run = logs / os.readlink(logs / ".latest")
    assert re.fullmatch(r"job7_\d{14}_\w{8}", run.name)
    assert [path for path in tree(run) if not (run / path).is_dir()] == [
        *(
            "attempt_0/0/stderr.log",
            "attempt_0/0/stdout.log",
            "attempt_0/1/error.json",
            "attempt_0/1/stdout.log",
        ),
        *("attempt_1/0/stderr.log", "attempt_1/0/stdout.log", "attempt_1/1/stdout.log"),
    ]
    assert (run / "attempt_1/1/stdout.log").read_text() == "out 1 1\n"
    assert (run / "attempt_1/0/stderr.log").read_text() == "err 0 1\n"
    assert result.stdout == ""
    assert f"log files are in {run}" in result.stderr
    assert tree(temporary) == []


@pytest.mark.parametrize("words", ["dsl --num_gpus 2", "dslrun", "dslrun --rdzv-id ID"])
def test_directories_of_runs_have_the_names_that_the_page_says(
    words: str, dslrun: Path, testchild: Path, tmp_path: Path
) -> None:
    """And collectors that look for torchrun's files find each of them once."""
    page = Path(__file__).parents[2] / "docs" / "output.md"
    row = words.removesuffix(" --num_gpus 2")
    (name,) = re.findall(rf"^\| `{row}` \| `DIR/(.+)` \|$", page.read_text(), re.MULTILINE)
    for word, pattern in (("YYYYmmddHHMMSS", "[0-9]{14}"), ("PID", "[0-9]+"), ("RANDOM", "[0-9a-f]{8}")):
        name = name.replace(word, pattern)
    command, *options = words.split()
    line = [str(dslrun.with_name(command)), *options, "--no-python", f"--log-dir={tmp_path}", str(testchild)]
    subprocess.run([*line, "say", "hello"], capture_output=True, timeout=25, check=True)
    pattern = "ID_*" if "ID" in words else "*"
    for path in glob.glob(f"{tmp_path}/{pattern}/attempt_0/*/stdout.log"):
        assert re.fullmatch(name, Path(path).parts[-4])
    assert len(glob.glob(f"{tmp_path}/{pattern}/attempt_0/0/stdout.log")) == 1


LONG_AGO_S = 120


def start_and_kill_whole(dslrun: Path, tmp_path: Path, temporary: Path) -> Path:
    """Start a job, kill all its processes at once, and return its directory as if that were some time ago."""
    (tmp_path / "killed").mkdir(exist_ok=True)
    script = ("sh", "-c", "touch $TMPDIR/../running; exec sleep 60")
    with running(dsl_line(dslrun, 2, script), tmp_path / "killed") as job:
        until((tmp_path / "running").exists)
        (run_dir,) = temporary.glob("dslrun_*")
        pids = (job.guard, job.agent())
        for signum in (signal.SIGSTOP, signal.SIGKILL):  # none of them sees the other's end
            for pid in pids:
                os.kill(pid, signum)
        job.wait()
    age(run_dir)
    return run_dir


def mark(run_dir: Path) -> Path:
    """The file that is locked while the run lives."""
    return run_dir.with_name(f".{run_dir.name}")


def age(run_dir: Path) -> None:
    past = time.time() - LONG_AGO_S
    os.utime(mark(run_dir), (past, past), follow_symlinks=False)


def run_something(dslrun: Path) -> None:
    subprocess.run(dsl_line(dslrun, 1, ["true"]), timeout=25, check=True)


def test_the_next_run_removes_what_a_killed_one_has_left(
    dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    left = start_and_kill_whole(dslrun, tmp_path, temporary)
    (left / "attempt_0/1").mkdir(parents=True)
    (left / "call.pickle").touch()
    run_something(dslrun)
    # A socket for views is removed by the next view.
    assert [path for path in tree(temporary) if not path.startswith(f"dsl-{os.getuid()}")] == []


@pytest.mark.parametrize(
    "name", ["attempt_0_1_error.json", "attempt_0/1/error.json", "attempt_0/1/stdout.log"]
)
def test_files_that_users_may_want_stay_when_a_run_was_killed(
    name: str, dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    left = start_and_kill_whole(dslrun, tmp_path, temporary)
    (left / name).parent.mkdir(parents=True, exist_ok=True)
    (left / name).write_text("x")
    run_something(dslrun)
    assert [path for path in tree(left) if not (left / path).is_dir()] == [name]


def test_directories_that_are_not_those_of_dead_runs_stay(
    dslrun: Path, tmp_path: Path, temporary: Path
) -> None:
    """A run that lives, one that has just begun, another user's, one without a mark, and links to elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "attempt_0").mkdir(parents=True)
    mark(elsewhere).touch()
    age(elsewhere)
    (temporary / "dslrun_0000000000000001").symlink_to(elsewhere)
    for number in range(2, 6):
        (temporary / f"dslrun_000000000000000{number}" / "attempt_0").mkdir(parents=True)
    young, _unmarked, linked, fifo = [temporary / f"dslrun_000000000000000{one}" for one in range(2, 6)]
    mark(young).touch()
    mark(linked).symlink_to(mark(elsewhere))
    os.mkfifo(mark(fifo))
    for one in (linked, fifo):
        age(one)
    if os.geteuid() == 0:
        theirs = temporary / "dslrun_0000000000000006"
        (theirs / "attempt_0").mkdir(parents=True)
        mark(theirs).touch()
        age(theirs)
        for path in (theirs, mark(theirs)):
            os.chown(path, 12345, 12345)
    before = tree(temporary)
    with running(dsl_line(dslrun, 1, ["sleep", "60"]), tmp_path / "living") as job:
        until(lambda: set(temporary.glob("dslrun_*")) - {temporary / one for one in before})
        (living,) = set(temporary.glob("dslrun_*")) - {temporary / one for one in before}
        until(lambda: mark(living).exists() and processes.children(job.agent()))
        age(living)
        run_something(dslrun)
        assert living.is_dir()
        assert mark(living).exists()
        os.kill(job.guard, signal.SIGTERM)
        job.wait()
    assert tree(temporary) == before
    assert tree(elsewhere) == ["attempt_0"]


def test_a_mark_of_ours_does_not_make_anothers_directory_ours(dslrun: Path, temporary: Path) -> None:
    """Nor does a link beside it lead elsewhere. The mark goes, so no further run looks there again."""
    target = temporary / "target"
    (target / "attempt_0").mkdir(parents=True)
    link = temporary / "dslrun_0000000000000001"
    link.symlink_to(target)
    left = [link]
    if os.geteuid() == 0:
        theirs = temporary / "dslrun_0000000000000002"
        (theirs / "attempt_0").mkdir(parents=True)
        os.chown(theirs, 12345, 12345)
        left.append(theirs)
    before = tree(temporary)
    for one in left:
        mark(one).touch()
        age(one)
    run_something(dslrun)
    assert tree(temporary) == before


def test_ranks_get_no_directories_for_error_files_alone(dslrun: Path, temporary: Path) -> None:
    """Only the user can look into the one of the run, and it is empty."""
    script = 'folder=$(dirname "$TORCHELASTIC_ERROR_FILE"); stat -c "%a %h" $folder; ls -A $folder'
    command = dsl_line(dslrun, 2, ["sh", "-c", script])
    result = ran(command)
    assert result.stdout == "700 2\n700 2\n"
    assert tree(temporary) == []


def test_an_error_file_of_a_job_that_fails_is_kept_and_named(
    dslrun: Path, writer: str, temporary: Path
) -> None:
    result = ran([str(dslrun), "--nproc-per-node=2", "--max-restarts=1", writer, "9"])
    assert result.returncode == 1
    files = [path for path in tree(temporary) if not (temporary / path).is_dir()]
    assert [re.sub(r"^dslrun_\w{16}/", "", path) for path in files] == [
        "attempt_0_1_error.json",
        "attempt_1_1_error.json",
    ]
    assert str(temporary / files[1]) in result.stderr


FAIL = 'if [ "$RANK" = 1 ]; then exit 3; fi; sleep 60'
CASES = {
    "failure": ((), FAIL, 3, "stopped by dslrun: rank 0 (SIGTERM)"),
    "restart": (("--max-restarts", "1"), FAIL, 3, "starting all 2 workers again, restart 1 of 1"),
    "debug": (("--log-level", "debug"), FAIL, 3, "rank 1 runs /bin/sh -c "),
    "signal": ((), "kill -SEGV $$", 139, "killed by SIGSEGV"),
    "stop": (
        (),
        'if [ "$RANK" = 1 ]; then kill -TERM $PPID; fi; sleep 60',
        143,
        "SIGTERM received: stopping",
    ),
    "logs": (("--log-dir", "DIR/logs"), FAIL, 3, "log files are in "),
}


@pytest.mark.parametrize("name", CASES)
def test_every_line_is_in_the_name_of_dslrun(name: str, dsl_command: Path, tmp_path: Path) -> None:
    options, script, code, said = CASES[name]
    dslrun = str(dsl_command.with_name("dslrun"))
    words = [word.replace("DIR", str(tmp_path)) for word in options]
    line = [dslrun, "--no-python", "--nproc-per-node=2", *words, "/bin/sh", "-c", script]
    with running(line, tmp_path / "job") as job:
        assert job.wait() == code, job.stderr()
    told = job.stderr()
    assert said in told
    own = [text for text in told.splitlines() if text.startswith("dsl")]
    assert own
    for text in own:
        assert text.startswith("dslrun: ")
        assert "by dsl " not in text
        assert not re.search(r" --[a-z]+_[a-z]", text)
    assert (tmp_path / "logs").exists() == (name == "logs")
