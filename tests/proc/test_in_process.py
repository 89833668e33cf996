"""`dsl.run` inside of somebody's program: the functions of torch.distributed.run, by their names and in their shape."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.kit.waiting import until

import dsl.launch
import dsl.run
import dsl.runner
from dsl.errors import OptionError, ScriptError, UnsupportedError
from dsl.functions import ChildFailedError, LaunchConfig, elastic_launch

TELL = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "GIVEN")
facts = {name: os.environ.get(name) for name in names}
pathlib.Path(sys.argv[-1], os.environ["RANK"]).write_text(json.dumps([os.getppid(), facts, sys.argv[1:-1]]))
"""


@pytest.fixture(autouse=True)
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs keep their files."""
    path = tmp_path / "temp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    return path


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def told(folder: Path) -> dict[int, list[object]]:
    files = [path for path in folder.iterdir() if path.name.isdecimal()]
    return {int(path.name): json.loads(path.read_text()) for path in files}


def test_a_launcher_that_filters_its_own_arguments_runs_a_job_in_its_own_process(
    tmp_path: Path, temp_dir: Path, monkeypatch: pytest.MonkeyPatch
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
    assert not list(temp_dir.iterdir())


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
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=25, check=False
    )
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
    monkeypatch.setattr("dsl.machine.this_process.Names.stamp", lambda _names: "20260102030405")
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
