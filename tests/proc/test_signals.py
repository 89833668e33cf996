"""What each signal to the command does, and that each worker gets it once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import dsl_line
from tests.support.jobs import Helpers, Job, complete_lines, running
from tests.support.namespaces import unshared
from tests.support.warm import Place

pytestmark = pytest.mark.engine

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def _worker(caught: str, end: str) -> str:
    """Words of a worker that traces the signals `caught` and announces itself."""
    return f"catch {caught} trace {{}}/trace note {{}}/ready '%r %p' {end}"


def _cleaner(name: str) -> str:
    """Words of a worker that needs 300 ms to clean up after this signal."""
    return _worker("INT,TERM,HUP,QUIT", f"await {name} 1 sleep 300 note {{}}/cleaned %r")


def _caught_by_all(job: Job, number: int, times: int) -> Callable[[], bool]:
    return lambda: sum(counter[number] for counter in job.counts().values()) >= times


def test_user_signals_are_passed_on_once_each_and_the_job_goes_on(helpers: Helpers) -> None:
    """torchrun tears the job down instead."""
    with helpers(3, _worker("USR1,USR2", "await USR1,USR2 3 exit 0")) as job:
        pids = set(job.ready(3).values())
        for round_ in range(1, 4):
            for number in USER_SIGNALS:
                os.kill(job.guard, number)
                until(_caught_by_all(job, number, 3 * round_))
        assert job.wait() == 0, job.stderr()
        assert job.counts() == {pid: Counter(dict.fromkeys(USER_SIGNALS, 3)) for pid in pids}


@pytest.mark.parametrize(
    "count, told", [(1, "1 worker has 20 s to save its work"), (2, "2 workers have 20 s to save their work")]
)
def test_an_announced_preemption_leaves_time_for_a_checkpoint_and_asks_for_another_run(
    count: int, told: str, helpers: Helpers
) -> None:
    """The grace is no time at all: the time for the checkpoint counts."""
    options = ["--preempt-signal", "USR1", "--preempt-grace", "20", "--log_level", "info"]
    with helpers(count, _worker("USR1", "await USR1 1 sleep 300 exit 0"), 0.0, *options) as job:
        pids = set(job.ready(count).values())
        os.kill(job.guard, signal.SIGUSR1)
        assert job.wait() == 75, job.stderr()
        assert f"SIGUSR1 received: {told}" in job.stderr()
        assert job.counts() == {pid: Counter({signal.SIGUSR1: 1}) for pid in pids}


@pytest.mark.parametrize("name, code", [("INT", 130), ("TERM", 143), ("HUP", 129), ("QUIT", 131)])
def test_a_stop_signal_reaches_each_worker_once_and_leaves_it_time(
    name: str, code: int, tmp_path: Path, helpers: Helpers
) -> None:
    """The workers need 300 ms to clean up; the grace period is far longer, so all of them must finish."""
    with helpers(3, _cleaner(name)) as job:
        pids = set(job.ready(3).values())
        os.kill(job.guard, getattr(signal, f"SIG{name}"))
        assert job.wait() == code, job.stderr()
        number = getattr(signal, f"SIG{name}")
        assert job.counts() == {pid: Counter({number: 1}) for pid in pids}
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_second_stop_signal_ends_the_wait(name: str, helpers: Helpers) -> None:
    """The grace period is two minutes and the workers never listen: the second signal must cut it short."""
    number = getattr(signal, f"SIG{name}")
    with helpers(2, _worker("INT,TERM", "pause"), 120) as job:
        job.ready(2)
        os.kill(job.guard, number)
        until(lambda: len(job.caught()) == 2)
        until(lambda: "second signal" in job.stderr())
        # Another process, as when somebody types kill again; twice at once from one process is one request.
        subprocess.run(["kill", "-s", name, str(job.guard)], check=True)
        assert job.wait(timeout_s=15) == 128 + number, job.stderr()
        assert job.left() == []
        assert f"SIG{name} received again: the grace is over" in job.stderr()


def _step(job: Job, workers: Sequence[int], order: str) -> list[str]:
    """Every process of the job, in an order of G(uard), A(gent) and W(orkers)."""
    pids = {"G": [job.guard], "A": [job.agent()], "W": workers}
    return [str(pid) for kind in order for pid in pids[kind]]


@pytest.mark.parametrize("order", ["GA", "AG", "GAW", "WAG", "AWG"])
@pytest.mark.parametrize("name, code", [("TERM", 143), ("INT", 130)])
def test_a_stop_that_hits_several_processes_of_a_job_leaves_the_grace(
    order: str, name: str, code: int, tmp_path: Path, helpers: Helpers
) -> None:
    """systemd signals each process of its group, Slurm each of a step, and `pkill` each of the name.

    No worker is to be killed for having been told twice.
    """
    with helpers(2, _cleaner(name), 120) as job:
        workers = list(job.ready(2).values())
        subprocess.run(["kill", "-s", name, *_step(job, workers, order)], check=True)
        assert job.wait() == code, job.stderr()
        most = 1 + ("W" in order)
        assert all(1 <= sum(counter.values()) <= most for counter in job.counts().values())
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["0", "1"]
    assert job.stderr().count("received") == 1


@pytest.mark.parametrize("order", ["GAW", "WAG", "AWG"])
def test_a_worker_that_dies_of_a_stop_to_all_processes_costs_the_others_no_grace(
    order: str, tmp_path: Path, helpers: Helpers
) -> None:
    """Rank 0 has no handler, so its death may be noticed before the agent's own signal."""
    cleans = ["await", "TERM", "1", "sleep", "300", "note", str(tmp_path / "cleaned"), "%r"]
    words = ["only", "1", "[", "catch", "TERM", "]", "note", str(tmp_path / "ready"), "%r %p"]
    words += ["only", "0", "[", "pause", "]", *cleans]
    with helpers(2, words, 120) as job:
        workers = list(job.ready(2).values())
        # Before the last one gets it the job may be over.
        subprocess.run(["kill", "-s", "TERM", *_step(job, workers, order)], check=False)
        assert job.wait() == 143, job.stderr()
    assert (tmp_path / "cleaned").read_text().split() == ["1"]


def test_a_guard_that_is_slow_to_pass_a_stop_on_costs_no_grace(tmp_path: Path, helpers: Helpers) -> None:
    """It passes on what the agent has heard directly, and acted upon, long before."""
    may_end = tmp_path / "may_end"
    with helpers(2, _worker("TERM", "await TERM 1 wait {}/may_end exit 0"), 120) as job:
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


def test_a_hang_up_under_nohup_changes_nothing(tmp_path: Path, helpers: Helpers) -> None:
    """torchrun installs a handler and dies under nohup."""
    words = _worker("USR1", "await USR1 1 exit 0")
    with running(["nohup", *helpers.line(2, words)], tmp_path) as job:
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


def test_a_command_in_its_own_session_keeps_the_code(tmp_path: Path, helpers: Helpers) -> None:
    with running(["setsid", "--wait", *helpers.line(2, "exit 21")], tmp_path) as job:
        assert job.wait() == 21


def test_timeout_leaves_the_workers_their_grace(tmp_path: Path, helpers: Helpers) -> None:
    """`timeout` signals the command twice within a moment, itself and its group: that is one request, not two."""
    line = helpers.line(2, _cleaner("TERM"))
    with running(["timeout", "--signal=TERM", "3", *line], tmp_path) as job:
        job.ready(2)
        assert job.wait() == 124
        until(lambda: not job.left())
    assert sorted((tmp_path / "cleaned").read_text().split()) == ["0", "1"]


def test_a_signal_sent_before_any_worker_runs_still_ends_the_command(helpers: Helpers) -> None:
    with helpers(64, "pause") as job:
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
    words: str, code: int, tmp_path: Path, helpers: Helpers
) -> None:
    with running(_in_a_pid_namespace(helpers.line(2, words.split())), tmp_path) as job:
        assert job.wait() == code, job.stderr()


@pytest.mark.root
def test_as_the_first_process_of_a_container_it_obeys_and_reaps(tmp_path: Path, helpers: Helpers) -> None:
    """pid 1 gets no signal it does not handle, and every orphan of the container is its child."""
    line = helpers.line(2, "daemon [ exit 0 ] " * 5 + _worker("USR1", "pause"))
    with running(_in_a_pid_namespace(line), tmp_path) as job:
        job.ready(2)
        guard = until(lambda: processes.children(job.process.pid))[0]
        agent = until(lambda: processes.children(guard))[0]
        until(lambda: not _zombies(guard) and not _zombies(agent))
        os.kill(guard, signal.SIGTERM)
        assert job.wait() == 143, job.stderr()


def _zombies(pid: int) -> list[int]:
    found = [processes.find(child) for child in processes.children(pid)]
    return [process.pid for process in found if process and process.state == "Z"]


def test_an_orphan_is_reaped_while_the_job_runs(tmp_path: Path, helpers: Helpers) -> None:
    """The agent adopts what daemonises, so it must also bury it."""
    orphan = ["daemon", "[", "exit", "0", "]"]
    words = [*orphan * 10, "note", str(tmp_path / "ready"), "%r %p", "pause"]
    with helpers(2, words) as job:
        job.ready(2)
        until(lambda: not _zombies(job.agent()) and not _zombies(job.guard))
        assert len(processes.children(job.agent())) == 2


@pytest.mark.guarantee("G1")
def test_a_child_that_the_shell_had_before_is_not_of_the_job(
    testchild: Path, tmp_path: Path, helpers: Helpers
) -> None:
    """With `monitor & exec dsl …` the command is born with a child. It is not ours to signal."""
    tmp_path.joinpath("job").mkdir()
    note = str(tmp_path / "monitor")
    script = 'monitor=$1; note=$2; shift 2; "$monitor" touch "$note" pause & exec "$@"'
    line = helpers.line(2, ["wait", note, "exit", "0"])
    with running(["/bin/sh", "-c", script, "sh", str(testchild), note, *line], tmp_path / "job") as job:
        assert job.wait() == 0, job.stderr()
        monitor = processes.find(int((tmp_path / "monitor").read_text()))
        assert monitor is not None
        assert monitor.state not in "ZXT"


@pytest.mark.parametrize("workers, code", [(2, 0), (1, 141)])
def test_a_reader_that_goes_away_does_not_end_the_job(
    workers: int, code: int, tmp_path: Path, helpers: Helpers
) -> None:
    """`dsl … | head -1`: several workers go on and succeed; one alone writes there itself and gets SIGPIPE."""
    line = helpers.line(workers, "only 0 [ lines 100000 80 ] exit 0")
    script = '"$@" | head -n 1 >/dev/null; exit "${PIPESTATUS[0]}"'
    with running(["/bin/bash", "-c", script, "bash", *line], tmp_path) as job:
        assert job.wait() == code, job.stderr()


def test_children_of_a_signalled_shell_do_not_matter(helpers: Helpers) -> None:
    """A whole process group is signalled (as by a terminal): the workers, in groups of their own, get one copy."""
    with helpers(2, _worker("INT,TERM", "await INT 1 sleep 100 exit 0")) as job:
        pids = set(job.ready(2).values())
        os.killpg(os.getpgid(job.guard), signal.SIGINT)
        assert job.wait() == 130
        assert job.counts() == {pid: Counter({signal.SIGINT: 1}) for pid in pids}


# ---- who hears a signal: the rank, and what it has started only when it must


PROGRAM = Path(__file__).parents[1] / "workers" / "helped.py"
COMMANDS = {"dsl": ["--no_local_rank", "--num_gpus", "2"], "dslrun": ["--nproc-per-node", "2"]}
METHODS = ("spawn", "forkserver", "warm")
ALL_HELPED = ["0 helped", "1 helped"]


@contextlib.contextmanager
def _training(command: Path, folder: Path, *options: str) -> Iterator[Job]:
    """Two ranks with a helper each, which are ready."""
    line = [str(command), *COMMANDS[command.name], *options, str(PROGRAM), str(folder)]
    with Place() as place, running(line, folder, environ=place.variables()) as job:
        job.ready(2)
        yield job


def _noted(folder: Path, name: str, count: int = 2) -> list[str]:
    """The lines of a file of notes, once so many are there."""
    until(lambda: len(complete_lines(folder / name)) >= count)
    return sorted(complete_lines(folder / name))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_stop_leaves_a_rank_its_helpers_until_it_has_saved(
    name: str, method: str, dsl_command: Path, tmp_path: Path
) -> None:
    """torchrun signals the process group: its data loaders are gone before the rank can use them again."""
    command = dsl_command.with_name(name)
    with _training(command, tmp_path, "--start-method", method) as job:
        for count in (2, 4):
            os.kill(job.guard, signal.SIGUSR1)
            assert _noted(tmp_path, "heard", count) == sorted(ALL_HELPED * (count // 2))
        os.kill(job.guard, signal.SIGTERM)
        assert _noted(tmp_path, "stopping") == ["0 1", "1 1"]
        (tmp_path / "may_save").touch()
        assert job.wait() == 143, job.stderr()
    assert _noted(tmp_path, "saved") == ALL_HELPED


@pytest.mark.parametrize("method", METHODS)
def test_a_preemption_by_the_signal_that_ends_helpers_leaves_them(
    method: str, dsl_command: Path, tmp_path: Path
) -> None:
    options = ["--preempt-signal", "TERM", "--preempt-grace", "600", "--grace", "0", "--start-method", method]
    with _training(dsl_command, tmp_path, *options) as job:
        os.kill(job.guard, signal.SIGTERM)
        _noted(tmp_path, "stopping")
        (tmp_path / "may_save").touch()
        assert job.wait() == 75, job.stderr()
    assert _noted(tmp_path, "saved") == ALL_HELPED


def test_the_failure_of_another_rank_leaves_a_rank_its_helpers(dsl_command: Path, tmp_path: Path) -> None:
    with _training(dsl_command, tmp_path) as job:
        (tmp_path / "may_fail").touch()
        assert _noted(tmp_path, "stopping", 1) == ["0 1"]
        (tmp_path / "may_save").touch()
        assert job.wait() == 3, job.stderr()
    assert _noted(tmp_path, "saved", 1) == ["0 helped"]


def test_a_function_that_is_asked_to_end_keeps_its_helpers_until_it_has_saved(tmp_path: Path) -> None:
    with running([sys.executable, str(PROGRAM), str(tmp_path)], tmp_path) as job:
        job.ready(2)
        os.kill(job.process.pid, signal.SIGTERM)
        _noted(tmp_path, "stopping")
        (tmp_path / "may_save").touch()
        assert job.wait() == 143, job.stderr()
    assert _noted(tmp_path, "saved") == ALL_HELPED


def test_in_the_scope_of_the_group_a_stop_reaches_the_helpers_at_once(
    dsl_command: Path, tmp_path: Path
) -> None:
    with _training(dsl_command, tmp_path, "--signal-scope", "group") as job:
        os.kill(job.guard, signal.SIGTERM)
        _noted(tmp_path, "stopping")
        (tmp_path / "may_save").touch()
        assert job.wait() == 143, job.stderr()
    assert _noted(tmp_path, "saved") == ["0 alone", "1 alone"]


def _helped_line(dsl: Path, testchild: Path, folder: Path, *options: str) -> list[str]:
    """A line of two deaf ranks, each with a helper in its group and one in a session of its own."""
    helper = ["catch", "USR1,TERM", "trace", str(folder / "helpers"), "note", str(folder / "helpers_ready")]
    helper += ["%r"]
    end = ["await", "TERM", "1", "exit", "0"]
    helpers = ["child", "[", *helper, *end, "]", "child", "[", "setsid", *helper, *end, "]"]
    rank = ["catch", "USR1,TERM", "trace", str(folder / "trace"), "note", str(folder / "ready"), "%r %p"]
    rank += ["pause"]
    return dsl_line(dsl, 2, [str(testchild), *helpers, *rank], None, *options)


@pytest.mark.parametrize("options", [("--grace", "2"), ("--grace", "600", "--preempt-signal", "TERM")])
def test_helpers_of_a_rank_that_does_not_end_are_asked_before_all_are_killed(
    options: Sequence[str], dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    preempt = ["--preempt-grace", "2"] if "--preempt-signal" in options else []
    line = _helped_line(dsl_command, testchild, tmp_path, "--signal-scope", "rank", *options, *preempt)
    with running(line, tmp_path) as job:
        job.ready(2)
        _noted(tmp_path, "helpers_ready", 4)
        os.kill(job.guard, signal.SIGTERM)
        assert job.wait() == (75 if preempt else 143), job.stderr()
        assert job.left() == []
        assert list(job.counts("trace").values()) == [Counter({signal.SIGTERM: 1})] * 2
        assert list(job.counts("helpers").values()) == [Counter({signal.SIGTERM: 1})] * 4
        of_ranks, of_helpers = job.caught(), job.caught("helpers")
    assert max(one.time_ns for one in of_ranks) < min(one.time_ns for one in of_helpers)


WRAPPER = ("/bin/sh", "-c", 'trap "echo >>$0" USR1; "$@" & program=$!; while ! wait "$program"; do :; done')
"""As `nsys profile python` and `conda run` it has the program for a child, and passes no signal on to it.

The next word is a file that has a line for each SIGUSR1."""


@pytest.mark.parametrize(
    "options, heard",
    [((), 2), (("--signal-scope", "group"), 2), (("--signal-scope", "rank"), 0)],
)
def test_a_wrapper_does_not_keep_signals_from_its_program(
    options: Sequence[str], heard: int, dsl_command: Path, testchild: Path, tmp_path: Path
) -> None:
    program = ["catch", "USR1,USR2", "trace", str(tmp_path / "trace"), "note", str(tmp_path / "ready")]
    program += ["%r %p"]
    words = [*WRAPPER, str(tmp_path / "wrappers"), str(testchild), *program, "await", "USR2", "1"]
    with running(dsl_line(dsl_command, 2, words, None, *options), tmp_path) as job:
        pids = job.ready(2).values()
        os.kill(job.guard, signal.SIGUSR1)
        until(lambda: len(complete_lines(tmp_path / "wrappers")) == 2)
        until(lambda: len(job.caught()) == heard)
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        assert job.wait() == 0, job.stderr()
        assert [one.signum for one in job.caught()].count(signal.SIGUSR1) == heard
