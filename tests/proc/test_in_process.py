"""Programs that run jobs: `dsl.run` by the names and in the shape of torch.distributed.run, and functions."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support.command import ran
from tests.support.jobs import PROGRAMS, TOKEN, started_program

import dsl.launch
import dsl.run
import dsl.runner
from dsl.errors import OptionError, ScriptError, UnsupportedError
from dsl.functions import ChildFailedError, LaunchConfig, elastic_launch

pytestmark = pytest.mark.usefixtures("temporary", "without_cloudpickle")

TELL = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "GIVEN")
facts = {name: os.environ.get(name) for name in names}
pathlib.Path(sys.argv[-1], os.environ["RANK"]).write_text(json.dumps([os.getppid(), facts, sys.argv[1:-1]]))
"""


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def told(folder: Path) -> dict[int, list[object]]:
    files = [path for path in folder.iterdir() if path.name.isdecimal()]
    return {int(path.name): json.loads(path.read_text()) for path in files}


def test_a_launcher_that_filters_its_own_arguments_runs_a_job_in_its_own_process(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's way (1.15): known arguments, among them a list, then attributes by name, numbers as text."""
    words = ["a b", str(tmp_path)]
    path = script(tmp_path, TELL)
    parser = dsl.run.get_args_parser()
    args, _ = parser.parse_known_args(["--training_script", path, "--training_script_args", words])  # type: ignore[list-item]
    theirs = {"training_script": path, "training_script_args": words, "nproc_per_node": "2", "nnodes": "1"}
    for name, value in {**theirs, "master_port": "0", "module": False, "max_restarts": "0"}.items():
        assert name in vars(args)
        setattr(args, name, value)
    monkeypatch.setenv("GIVEN", "by the program")
    dsl.run.run(args)
    found = told(tmp_path)
    assert sorted(found) == [0, 1]
    for rank, (parent, facts, arguments) in found.items():
        assert isinstance(facts, dict)
        assert parent == os.getpid()
        assert (facts["RANK"], facts["WORLD_SIZE"], facts["GIVEN"]) == (str(rank), "2", "by the program")
        assert arguments == ["a b"]
    assert not list(temporary.iterdir())


def test_a_namespace_of_torchs_own_parser_is_understood(tmp_path: Path) -> None:
    """What only we have is not in it, and it has names and values that we do not have."""
    args = argparse.Namespace(
        nnodes="1:1", nproc_per_node="1", rdzv_backend="static", rdzv_endpoint="", rdzv_id="none", rdzv_conf="",
        standalone=True, max_restarts=0, monitor_interval=0.1, start_method="spawn", event_log_handler="null",
        role="default", module=False, no_python=False, run_path=False, log_dir=None, redirects="0", tee="0",
        local_ranks_filter="", node_rank=0, master_addr="127.0.0.1", master_port=None, local_addr=None,
        logs_specs=None, numa_binding=None, signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        duplicate_stdout_filters=["a,b", "c"], duplicate_stderr_filters=None, virtual_local_rank=False,
        shutdown_timeout=3, use_agent_store=True, training_script=Path(script(tmp_path, TELL)),
        training_script_args=[tmp_path],
        debug=True,  # a flag of accelerate, which is no wish for a debugger
    )  # fmt: skip
    dsl.run.run(args)
    assert sorted(told(tmp_path)) == [0]


def test_main_returns_to_whoever_called_it_and_leaves_the_program_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {number: signal.getsignal(number) for number in (2, 15, 1)}
    dsl.run.main(["--nproc-per-node", "2", script(tmp_path, TELL), str(tmp_path)])
    dsl.launch.main([str(tmp_path / "train.py"), "--n", str(tmp_path)])
    assert told(tmp_path)[0][2] == ["--local-rank=0", "--n"]
    assert gc.isenabled()
    assert {number: signal.getsignal(number) for number in before} == before
    assert capfd.readouterr() == ("", "")


def test_a_command_wraps_a_rank_here_too(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, "import os; print(os.environ['RANK'], os.environ.get('BY'))")
    dsl.run.main(["--nproc-per-node", "2", "--wrap", "1:env BY=a", "--wrap", "0:env BY=b", path])
    elastic_launch(LaunchConfig(1, 1, 1, wrap="0:env BY=c"), sys.executable)(path)
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 b", "0 c", "1 a"]


def test_it_may_be_called_from_any_thread(tmp_path: Path) -> None:
    args = dsl.run.parse_args([script(tmp_path, TELL), str(tmp_path)])
    thread = threading.Thread(target=dsl.run.run, args=[args])
    thread.start()
    thread.join(20)
    assert sorted(told(tmp_path)) == [0]


@pytest.mark.guarantee("G2", "G3")
def test_a_failure_is_an_exception_with_the_code_and_its_own_words(tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys\nif os.environ['RANK'] == '1': sys.exit('no data')\nsys.exit(0)")
    with pytest.raises(ChildFailedError) as caught:
        dsl.run.main(["--nproc-per-node", "2", path])
    rank, failure = caught.value.get_first_failure()
    assert (rank, failure.exitcode, caught.value.exit_code) == (1, 1, 1)
    assert "train.py FAILED" in str(caught.value)


def test_a_program_that_lets_a_failure_pass_ends_as_it_does_with_torch(tmp_path: Path) -> None:
    """A traceback that ends with the failure summary, and exit code 1."""
    path = script(tmp_path, "raise SystemExit(42)")
    code = f"import dsl.run; dsl.run.main([{path!r}])"
    result = ran([sys.executable, "-c", code])
    assert result.returncode == 1
    assert result.stderr.count("train.py FAILED") == 1
    assert "exitcode  : 42" in result.stderr


@pytest.mark.guarantee("G1", "G2")
def test_a_signal_to_the_program_ends_the_job_and_is_its_exit_code(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(1000)",
    )
    note = tmp_path / "pid"
    code = f"import dsl.run; dsl.run.main([{path!r}, {str(note)!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as program:
        try:
            pid = int(until(lambda: note.exists() and note.read_text()))
            program.terminate()
            _, said = program.communicate(timeout=20)
        finally:
            program.kill()
    assert program.returncode == 143
    assert "Traceback" not in said
    assert not Path(f"/proc/{pid}").exists()


def test_the_plan_can_be_shown_instead(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dsl.run.main(["--dry-run", "--nproc-per-node", "3", script(tmp_path, TELL), str(tmp_path)])
    assert "train.py" in capfd.readouterr().out
    assert told(tmp_path) == {}


def test_a_variable_is_the_default_of_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    path = script(tmp_path, TELL)
    args, _ = dsl.run.get_args_parser().parse_known_args([path])
    assert args.nproc_per_node == "2"
    dsl.run.run(argparse.Namespace(training_script=path, training_script_args=[str(tmp_path)]))
    assert sorted(told(tmp_path)) == [0, 1]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "kind, values, text",
    [
        (OptionError, {}, "training_script None"),
        (OptionError, {"training_script": "x", "max_restarts": "many"}, "max_restarts.*'many'"),
        (OptionError, {"training_script": "x", "max_restarts": 10**12}, "max_restarts"),
        (
            OptionError,
            {"training_script": "x", "start_method": "boot"},
            "start_method: invalid choice: 'boot'",
        ),
        (OptionError, {"training_script": "x", "shutdown_timeout": "-1"}, "grace: must be 0 or more"),
        (OptionError, {"training_script": "x", "signals_to_handle": "40"}, "Python has no name for 40"),
        (UnsupportedError, {"training_script": "x", "preempt_signal": "USR1"}, "use the command dslrun"),
        (UnsupportedError, {"training_script": "x", "detach": True}, "use the command dslrun"),
        (
            UnsupportedError,
            {"training_script": "x", "doctor_first": True},
            "doctor_first: a program starts its job at once",
        ),
        (UnsupportedError, {"training_script": "x", "doctor": True}, "use the command dslrun"),
        (ScriptError, {"training_script": "no_such.py"}, "'no_such.py' does not exist"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(
    kind: type[Exception], values: dict[str, str], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        dsl.run.run(argparse.Namespace(**values))
    assert "\n" not in str(caught.value)


def test_bad_usage_ends_as_argparse_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        dsl.run.parse_args(["--no-such", "train.py"])
    assert caught.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


# The same for DeepSpeed's runner


def test_the_runners_main_returns_after_a_job_that_ended_well(tmp_path: Path) -> None:
    dsl.runner.main(["--num_gpus", "2", script(tmp_path, TELL), str(tmp_path)])
    found = told(tmp_path)
    assert sorted(found) == [0, 1]
    assert {parent for parent, *_ in found.values()} == {os.getpid()}


@pytest.mark.guarantee("G2", "G3")
def test_two_jobs_of_a_program_in_one_second_keep_their_logs_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsl.machine.Names.stamp", lambda _names: "20260102030405")
    path = script(tmp_path, "import sys; print(sys.argv[-1])")
    for word in ("first", "second"):
        dsl.runner.main(["--num_gpus", "1", "--log-dir", str(tmp_path / "logs"), path, word])
    logs = sorted((tmp_path / "logs").glob("2026*/attempt_0/0/stdout.log"))
    assert [log.read_text() for log in logs] == ["first\n", "second\n"]


def test_the_runners_main_exits_with_the_code_of_a_job_that_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And says what the command says."""
    path = script(tmp_path, "import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)")
    with pytest.raises(SystemExit) as caught:
        dsl.runner.main(["--num_gpus", "2", "--save_pid", path])
    assert caught.value.code == 7
    said = capfd.readouterr().err
    assert said.startswith("dsl: rank 1 (local rank 1, pid ")
    assert said.count("failed first: exit code 7") == 1


@pytest.mark.parametrize("way", ["run", "functions"])
def test_what_is_no_signal_is_passed_over_with_a_warning(
    way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with torchrun, and with the command."""
    if way == "run":
        dsl.run.main(["--signals-to-handle", "SIGFOO,TERM", script(tmp_path, TELL), str(tmp_path)])
    else:
        config = LaunchConfig(1, 1, 1, signals_to_handle="SIGFOO,TERM")
        elastic_launch(config, sys.executable)(script(tmp_path, TELL), str(tmp_path))
    assert sorted(told(tmp_path)) == [0]
    assert "'SIGFOO' is no signal and has no effect" in caplog.text


@pytest.mark.guarantee("G3")
def test_a_rank_that_is_not_shown_says_why_it_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ChildFailedError, match=r"KeyError: 'loss' \(train.py:1 in <module>\)") as caught:
        dsl.run.main(["--local-ranks-filter", "1", script(tmp_path, "raise KeyError('loss')")])
    assert "To enable traceback" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("variables, seen", [({}, "False False\n"), ({"PET_STDIN": "0"}, "True False\n")])
def test_a_terminal_is_read_by_the_rank_that_is_named(
    variables: dict[str, str], seen: str, tmp_path: Path
) -> None:
    """It is in the terminal's foreground then, and its Ctrl-C comes from there, too; nobody gets that unasked."""
    path = script(
        tmp_path,
        """
import fcntl, os, pathlib, sys
reads = fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(reads))
""",
    )
    code = f"import dsl.run; dsl.run.main(['--nproc-per-node', '2', {path!r}, {str(tmp_path)!r}])"
    master, slave = os.openpty()
    try:
        result = subprocess.run(
            [sys.executable, "-c", code],
            stdin=slave,
            env={**os.environ, **variables},
            timeout=25,
            check=False,
        )
    finally:
        os.close(master)
        os.close(slave)
    assert result.returncode == 0
    assert " ".join((tmp_path / rank).read_text() for rank in "01") + "\n" == seen


# Programs that launch functions


def ready(way: str, folder: Path, *rest: str) -> tuple[subprocess.Popen[str], str]:
    """A program whose two workers have started, and the token of all that belongs to it."""
    token = f"{way}-{os.getpid()}-{time.monotonic_ns()}"
    job = started_program("launch_program.py", way, str(folder), *rest, token=token)
    until(lambda: len(list(folder.glob("ready*"))) == 2)
    return job, token


def gone(token: str) -> bool:
    return not processes.carrying(f"{TOKEN}={token}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "notes"
    path.mkdir()
    return path


def test_functions_and_classes_of_the_main_program_are_known_to_workers() -> None:
    output, errors = started_program("launch_program.py", "point").communicate(timeout=20)
    assert output == "[5, 5]\n", errors


@pytest.mark.guarantee("G8")
def test_a_lambda_of_the_main_program_is_refused_in_one_line() -> None:
    _, errors = started_program("launch_program.py", "lambda").communicate(timeout=20)
    assert "install cloudpickle" in errors.splitlines()[-1]


@pytest.mark.guarantee("G8")
def test_a_function_of_a_program_without_a_file_is_refused_in_one_line() -> None:
    code = "from dsl.functions.launcher import launch\ndef f(): return 1\nlaunch(f)"
    result = ran([sys.executable, "-c", code])
    expected = "f is defined in a program that the workers cannot import; move it to a module, or install cloudpickle"
    assert result.stderr.splitlines()[-1].endswith(f"EntrypointError: {expected}")


@pytest.mark.guarantee("G8")
def test_a_program_without_a_guard_does_not_start_workers_of_workers() -> None:
    """As with multiprocessing, but said once, and where it helps."""
    started = started_program("launch_unguarded.py")
    _, errors = started.communicate(timeout=20)
    assert started.returncode == 1
    (last,) = [line for line in errors.splitlines() if "__main__" in line]
    assert last == errors.splitlines()[-1]
    assert last.startswith(f"dsl.functions.call.EntrypointError: {PROGRAMS / 'launch_unguarded.py'}:12 ")
    assert last.endswith("every worker imports it: put that line under if __name__ == '__main__':")
    assert errors.count("Traceback") == 1
    assert errors.count("launcher.py") == 2, "the traceback shows frames between the call and the error"


@pytest.mark.guarantee("G1", "G2")
@pytest.mark.parametrize(
    "way, signum, code, heard, said",
    [
        ("polite", signal.SIGINT, -signal.SIGINT, "2", "KeyboardInterrupt"),
        ("polite", signal.SIGTERM, 143, "15", None),
        ("raising", signal.SIGALRM, 1, "15", "TimeoutError: too long"),
    ],
)
def test_a_signal_lets_the_workers_finish_first(
    way: str, signum: signal.Signals, code: int, heard: str, said: str | None, folder: Path
) -> None:
    """Then it raises what it raises in any program, ends it, or has the effect of the program's own handler."""
    job, _ = ready(way, folder)
    job.send_signal(signum)
    _, errors = job.communicate(timeout=20)
    assert job.returncode == code
    assert said is None or errors.splitlines()[-1] == said
    assert [path.read_text() for path in folder.glob("heard*")] == [heard] * 2


@pytest.mark.guarantee("G1")
def test_deaf_workers_are_killed_after_the_grace(folder: Path, temporary: Path) -> None:
    job, token = ready("deaf", folder, "0.2")
    begin_s = time.monotonic()
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=20)
    assert 0.2 <= time.monotonic() - begin_s < 5
    assert gone(token)
    assert list(temporary.iterdir()) == []


@pytest.mark.guarantee("G1")
def test_a_second_ctrl_c_does_not_wait(folder: Path) -> None:
    job, token = ready("deaf", folder, "600")
    job.send_signal(signal.SIGINT)
    until(lambda: list(folder.glob("heard*")))
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=20)
    assert job.returncode == -signal.SIGINT
    assert gone(token)


def test_sigterm_can_be_caught_as_an_exception(folder: Path) -> None:
    job = started_program("launch_program.py", "caught", str(folder))
    until(lambda: list(folder.glob("ready*")))
    job.send_signal(signal.SIGTERM)
    output, errors = job.communicate(timeout=20)
    assert (job.returncode, output) == (0, "SIGTERM ended the job True True\n"), errors


@pytest.mark.guarantee("G1")
def test_workers_do_not_outlive_a_program_that_is_killed(folder: Path) -> None:
    """SIGKILL of the launching program."""
    job, token = ready("deaf", folder, "600")
    assert not gone(token)
    job.kill()
    job.communicate(timeout=20)
    until(lambda: gone(token), timeout_s=10)
