"""What each signal to the command does, and that each worker gets it once."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import Job, running
from tests.support.namespaces import unshared
from tests.support.warm import Place

pytestmark = pytest.mark.engine

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def _worker(directory: Path, caught: str, *end: str) -> list[str]:
    """Words of a worker that traces the signals `caught` and announces itself."""
    return [
        "catch",
        caught,
        "trace",
        str(directory / "trace"),
        "note",
        str(directory / "ready"),
        "%r %p",
        *end,
    ]


def _counts(job: Job) -> dict[int, Counter[int]]:
    """{pid: how often it caught each signal}."""
    counts: dict[int, Counter[int]] = {}
    for one in job.caught():
        counts.setdefault(one.pid, Counter())[one.signum] += 1
    return counts


def _caught_by_all(job: Job, number: int, times: int) -> Callable[[], bool]:
    return lambda: sum(counter[number] for counter in _counts(job).values()) >= times


def test_user_signals_are_passed_on_once_each_and_the_job_goes_on(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """torchrun tears the job down instead."""
    words = _worker(tmp_path, "USR1,USR2", "await", "USR1,USR2", "3", "exit", "0")
    with running(dsl_line(dsl_command, 3, [str(testchild), *words]), tmp_path) as job:
        pids = set(job.ready(3).values())
        for round_ in range(1, 4):
            for number in USER_SIGNALS:
                os.kill(job.guard, number)
                until(_caught_by_all(job, number, 3 * round_))
        assert job.wait() == 0, job.stderr()
        assert _counts(job) == {pid: Counter(dict.fromkeys(USER_SIGNALS, 3)) for pid in pids}


@pytest.mark.parametrize(
    "count, told", [(1, "1 worker has 20 s to save its work"), (2, "2 workers have 20 s to save their work")]
)
def test_an_announced_preemption_leaves_time_for_a_checkpoint_and_asks_for_another_run(
    count: int, told: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The grace is no time at all: the time for the checkpoint counts."""
    words = _worker(tmp_path, "USR1", "await", "USR1", "1", "sleep", "300", "exit", "0")
    options = ["--preempt-signal", "USR1", "--preempt-grace", "20", "--log_level", "info"]
    with running(dsl_line(dsl_command, count, [str(testchild), *words], 0.0, *options), tmp_path) as job:
        pids = set(job.ready(count).values())
        os.kill(job.guard, signal.SIGUSR1)
        assert job.wait() == 75, job.stderr()
        assert f"SIGUSR1 received: {told}" in job.stderr()
        assert _counts(job) == {pid: Counter({signal.SIGUSR1: 1}) for pid in pids}


@pytest.mark.parametrize("name, code", [("INT", 130), ("TERM", 143), ("HUP", 129), ("QUIT", 131)])
def test_a_stop_signal_reaches_each_worker_once_and_leaves_it_time(
    name: str, code: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The workers need 300 ms to clean up; the grace period is far longer, so all of them must finish."""
    words = _worker(
        tmp_path,
        "INT,TERM,HUP,QUIT",
        "await",
        name,
        "1",
        "sleep",
        "300",
        "note",
        str(tmp_path / "cleaned"),
        "%r",
    )
    with running(dsl_line(dsl_command, 3, [str(testchild), *words]), tmp_path) as job:
        pids = set(job.ready(3).values())
        os.kill(job.guard, getattr(signal, f"SIG{name}"))
        assert job.wait() == code, job.stderr()
        number = getattr(signal, f"SIG{name}")
        assert _counts(job) == {pid: Counter({number: 1}) for pid in pids}
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_second_stop_signal_ends_the_wait(
    name: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """The grace period is two minutes and the workers never listen: the second signal must cut it short."""
    number = getattr(signal, f"SIG{name}")
    words = _worker(tmp_path, "INT,TERM", "pause")
    with running(dsl_line(dsl_command, 2, [str(testchild), *words], 120), tmp_path) as job:
        job.ready(2)
        os.kill(job.guard, number)
        until(lambda: len(job.caught()) == 2)
        until(lambda: "second signal" in job.stderr())
        # Another process, as when somebody types kill again; twice at once from one process is one request.
        subprocess.run(["kill", "-s", name, str(job.guard)], check=True)
        assert job.wait(timeout_s=15) == 128 + number, job.stderr()
        assert job.left() == []
        assert f"SIG{name} received again: the grace is over" in job.stderr()


def test_the_same_signal_twice_at_once_from_one_process_is_one_request(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """`timeout` signals its child, then the group of both: the grace must not be gone by that."""
    words = _worker(
        tmp_path, "TERM", "await", "TERM", "1", "sleep", "300", "note", str(tmp_path / "end"), "x"
    )
    with running(dsl_line(dsl_command, 2, [str(testchild), *words, "exit", "0"]), tmp_path) as job:
        job.ready(2)
        os.kill(job.guard, signal.SIGTERM)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143
    assert (tmp_path / "end").read_text() == "x\nx\n"


@pytest.mark.parametrize("first", ["guard", "agent"])
@pytest.mark.parametrize("name, code", [("TERM", 143), ("INT", 130)])
def test_a_stop_that_hits_guard_and_agent_alike_leaves_the_grace(
    first: str, name: str, code: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """systemd signals each process of its group, Slurm each of a step, and `pkill` each of the name."""
    words = _worker(
        tmp_path, name, "await", name, "1", "sleep", "300", "note", str(tmp_path / "cleaned"), "%r"
    )
    with running(dsl_line(dsl_command, 2, [str(testchild), *words]), tmp_path) as job:
        job.ready(2)
        both = [job.guard, job.agent()]
        for pid in both if first == "guard" else reversed(both):
            os.kill(pid, getattr(signal, f"SIG{name}"))
        assert job.wait() == code, job.stderr()
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["0", "1"]
    assert job.stderr().count("received") == 1


def _step(job: Job, workers: Sequence[int], order: str) -> list[str]:
    """Every process of the job, in an order of G(uard), A(gent) and W(orkers)."""
    pids = {"G": [job.guard], "A": [job.agent()], "W": workers}
    return [str(pid) for kind in order for pid in pids[kind]]


@pytest.mark.parametrize("order", ["GAW", "WAG", "AWG"])
def test_a_stop_that_hits_guard_agent_and_workers_leaves_the_grace(
    order: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Slurm signals every process of a step at once: no worker is to be killed for having been told twice."""
    words = _worker(
        tmp_path, "TERM", "await", "TERM", "1", "sleep", "300", "note", str(tmp_path / "cleaned"), "%r"
    )
    with running(dsl_line(dsl_command, 2, [str(testchild), *words], 120), tmp_path) as job:
        workers = list(job.ready(2).values())
        subprocess.run(["kill", "-s", "TERM", *_step(job, workers, order)], check=True)
        assert job.wait() == 143, job.stderr()
        assert all(1 <= counter[signal.SIGTERM] <= 2 for counter in _counts(job).values())
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["0", "1"]
    assert job.stderr().count("received") == 1


@pytest.mark.parametrize("order", ["GAW", "WAG", "AWG"])
def test_a_worker_that_dies_of_a_stop_to_all_processes_costs_the_others_no_grace(
    order: str, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """Rank 0 has no handler, so its death may be noticed before the agent's own signal."""
    cleans = ["await", "TERM", "1", "sleep", "300", "note", str(tmp_path / "cleaned"), "%r"]
    words = ["only", "1", "[", "catch", "TERM", "]", "note", str(tmp_path / "ready"), "%r %p"]
    words += ["only", "0", "[", "pause", "]", *cleans]
    with running(dsl_line(dsl_command, 2, [str(testchild), *words], 120), tmp_path) as job:
        workers = list(job.ready(2).values())
        # Before the last one gets it the job may be over.
        subprocess.run(["kill", "-s", "TERM", *_step(job, workers, order)], check=False)
        assert job.wait() == 143, job.stderr()
    assert (tmp_path / "cleaned").read_text().split() == ["1"]


def test_a_guard_that_is_slow_to_pass_a_stop_on_costs_no_grace(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """It passes on what the agent has heard directly, and acted upon, long before."""
    may_end = tmp_path / "may_end"
    words = _worker(tmp_path, "TERM", "await", "TERM", "1", "wait", str(may_end), "exit", "0")
    with running(dsl_line(dsl_command, 2, [str(testchild), *words], 120), tmp_path) as job:
        workers = list(job.ready(2).values())
        os.kill(job.guard, signal.SIGSTOP)
        subprocess.run(["kill", "-s", "TERM", *_step(job, workers, "GAW")], check=True)
        until(lambda: "SIGTERM received" in job.stderr())
        os.kill(job.guard, signal.SIGCONT)
        # The guard has passed on its SIGTERM once this is through, because it reads signals in order.
        os.kill(job.guard, signal.SIGWINCH)
        until(lambda: not _is_pending(job.guard, signal.SIGWINCH))
        may_end.touch()
        assert job.wait() == 143, job.stderr()
        assert "the grace is over" not in job.stderr()


def _is_pending(pid: int, number: int) -> bool:
    """Whether a signal waits to be read by a process."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file)
    return bool(int(fields["ShdPnd"], 16) & 1 << (number - 1))


def test_a_second_stop_that_hits_guard_and_agent_alike_ends_the_wait(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    words = _worker(tmp_path, "INT,TERM", "pause")
    with running(dsl_line(dsl_command, 2, [str(testchild), *words], 120), tmp_path) as job:
        job.ready(2)
        both = [str(job.guard), str(job.agent())]
        subprocess.run(["kill", "-s", "TERM", *both], check=True)
        until(lambda: len(job.caught()) == 2)
        until(lambda: "second signal" in job.stderr())
        # Between the two the job may be over.
        subprocess.run(["kill", "-s", "TERM", *both], check=False)
        assert job.wait(timeout_s=15) == 143, job.stderr()
        assert job.left() == []


def test_a_hang_up_under_nohup_changes_nothing(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """torchrun installs a handler and dies under nohup."""
    words = _worker(tmp_path, "USR1", "await", "USR1", "1", "exit", "0")
    with running(["nohup", *dsl_line(dsl_command, 2, [str(testchild), *words])], tmp_path) as job:
        job.ready(2)
        os.kill(job.guard, signal.SIGHUP)
        os.kill(job.agent(), signal.SIGHUP)
        os.kill(job.guard, signal.SIGUSR1)
        assert job.wait() == 0, job.stderr()


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGQUIT, 131), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("method", ["spawn", "forkserver", "warm"])
def test_a_job_that_a_script_has_started_behind_an_ampersand_hears_a_stop(
    method: str, number: int, code: int, dsl_command: Path, tmp_path: Path
) -> None:
    """A shell without job control lets such a job ignore SIGINT and SIGQUIT, and torchrun hears them all the same."""
    program = tmp_path / "waits.py"
    program.write_text(
        "import os, time\n"
        "with open('ready', 'a') as file: file.write(os.environ['RANK'] + ' 1\\n')\n"
        "time.sleep(1000)\n"
    )
    ignoring = ["sh", "-c", 'trap "" INT QUIT TERM; cd "$0"; exec "$@"', str(tmp_path)]
    options = ["--no_local_rank", "--num_gpus", "2", "--grace", "600", "--start-method", method]
    line = [*ignoring, str(dsl_command), *options, str(program)]
    with Place() as place, running(line, tmp_path, environ=place.variables()) as job:
        job.ready(2)
        os.kill(job.guard, number)
        assert job.wait() in (code, -number), job.stderr()


def test_a_command_in_its_own_session_keeps_the_code(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    line = dsl_line(dsl_command, 2, [str(testchild), "exit", "21"])
    with running(["setsid", "--wait", *line], tmp_path) as job:
        assert job.wait() == 21


def test_timeout_leaves_the_workers_their_grace(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """`timeout` signals the command twice within a moment, itself and its group: that is one request, not two."""
    words = _worker(
        tmp_path, "TERM", "await", "TERM", "1", "sleep", "400", "note", str(tmp_path / "cleaned"), "%r"
    )
    line = dsl_line(dsl_command, 2, [str(testchild), *words])
    with running(["timeout", "--signal=TERM", "3", *line], tmp_path) as job:
        job.ready(2)
        assert job.wait() == 124
        until(lambda: not job.left())
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["0", "1"]


def test_a_signal_sent_before_any_worker_runs_still_ends_the_command(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    with running(dsl_line(dsl_command, 64, [str(testchild), "pause"]), tmp_path) as job:
        job.agent()  # from here on the guard has its handlers
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == 143
        assert job.left() == []
        assert "Traceback" not in job.stderr()


def _in_a_pid_namespace(line: Sequence[str]) -> list[str]:
    return [*unshared("--pid", "--fork", "--mount-proc", "--kill-child"), *line]


@pytest.mark.root
@pytest.mark.parametrize("words, code", [("exit 0", 0), ("only 1 [ exit 5 ] pause", 5)])
def test_as_the_first_process_of_a_container_the_code_is_true(
    words: str, code: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    line = dsl_line(dsl_command, 2, [str(testchild), *words.split()])
    with running(_in_a_pid_namespace(line), tmp_path) as job:
        assert job.wait() == code, job.stderr()


@pytest.mark.root
def test_as_the_first_process_of_a_container_it_obeys_and_reaps(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """pid 1 gets no signal it does not handle, and every orphan of the container is its child."""
    orphan = ["daemon", "[", "exit", "0", "]"]
    line = dsl_line(dsl_command, 2, [str(testchild), *orphan * 5, *_worker(tmp_path, "USR1", "pause")])
    with running(_in_a_pid_namespace(line), tmp_path) as job:
        job.ready(2)
        guard = until(lambda: processes.children(job.process.pid))[0]
        agent = until(lambda: processes.children(guard))[0]
        until(lambda: not _zombies(guard) and not _zombies(agent))
        os.kill(guard, signal.SIGTERM)
        assert job.wait() == 143, job.stderr()


@pytest.mark.root
def test_a_hang_up_from_outside_a_container_opens_the_log_files_anew(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """`docker kill -s HUP` for log rotation: sender and session leader are both out of sight, and not the same."""
    logs = tmp_path / "logs"
    words = ["catch", "USR1", "say", "old", "note", str(tmp_path / "ready"), "%r %p", "await", "USR1", "1"]
    line = dsl_line(dsl_command, 2, [str(testchild), *words, "say", "new"], 1.0, "--log-dir", str(logs))
    with running(_in_a_pid_namespace(line), tmp_path) as job:
        job.ready(2)
        guard = until(lambda: processes.children(job.process.pid))[0]
        (path,) = until(lambda: list(logs.rglob("1/stdout.log")))
        until(lambda: path.read_text() == "old\n")
        path.rename(path.with_suffix(".1"))
        os.kill(guard, signal.SIGHUP)
        until(path.exists)
        os.kill(guard, signal.SIGUSR1)
        assert job.wait() == 0, job.stderr()
    assert path.read_text() == "new\n"


def _zombies(pid: int) -> list[int]:
    found = [processes.find(child) for child in processes.children(pid)]
    return [process.pid for process in found if process and process.state == "Z"]


def test_an_orphan_is_reaped_while_the_job_runs(dsl_command: Path, testchild: Path, tmp_path: Path) -> None:
    """The agent adopts what daemonises, so it must also bury it."""
    orphan = ["daemon", "[", "exit", "0", "]"]
    words = [*orphan * 10, "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with running(dsl_line(dsl_command, 2, [str(testchild), *words]), tmp_path) as job:
        job.ready(2)
        until(lambda: not _zombies(job.agent()) and not _zombies(job.guard))
        assert len(processes.children(job.agent())) == 2


@pytest.mark.guarantee("G1")
def test_a_child_that_the_shell_had_before_is_not_of_the_job(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """With `monitor & exec dsl …` the command is born with a child. It is not ours to signal."""
    tmp_path.joinpath("job").mkdir()
    note = str(tmp_path / "monitor")
    script = 'monitor=$1; note=$2; shift 2; "$monitor" touch "$note" pause & exec "$@"'
    line = dsl_line(dsl_command, 2, [str(testchild), "wait", note, "exit", "0"])
    with running(["/bin/sh", "-c", script, "sh", str(testchild), note, *line], tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
        monitor = processes.find(int((tmp_path / "monitor").read_text()))
        assert monitor is not None
        assert monitor.state not in "ZXT"


@pytest.mark.parametrize("workers, code", [(2, 0), (1, 141)])
def test_a_reader_that_goes_away_does_not_end_the_job(
    workers: int, code: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """`dsl … | head -1`: several workers go on and succeed; one alone writes there itself and gets SIGPIPE."""
    words = ["only", "0", "[", "lines", "100000", "80", "]", "exit", "0"]
    line = dsl_line(dsl_command, workers, [str(testchild), *words])
    script = '"$@" | head -n 1 >/dev/null; exit "${PIPESTATUS[0]}"'
    with running(["/bin/bash", "-c", script, "bash", *line], tmp_path) as job:
        assert job.wait() == code, job.stderr()


def test_children_of_a_signalled_shell_do_not_matter(
    dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    """A whole process group is signalled (as by a terminal): the workers, in groups of their own, get one copy."""
    words = _worker(tmp_path, "INT,TERM", "await", "INT", "1", "sleep", "100", "exit", "0")
    with running(dsl_line(dsl_command, 2, [str(testchild), *words]), tmp_path) as job:
        pids = set(job.ready(2).values())
        os.killpg(os.getpgid(job.guard), signal.SIGINT)
        assert job.wait() == 130
        assert _counts(job) == {pid: Counter({signal.SIGINT: 1}) for pid in pids}
