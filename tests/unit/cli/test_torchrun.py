"""`dslrun` from its arguments to the plan, and every mistake in one line. No process is started."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.launches import Started, assert_refused, started_jobs, without_engine

from dsl.agent.planner import Planner
from dsl.cli import deepspeed, torchrun
from dsl.model.job import NodePlan
from dsl.model.request import OutputRequest
from dsl.words import parse_signals


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory with a script, and a directory for temporary files of its own."""
    (tmp_path / "work").mkdir()
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work" / "t.py").touch()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("dsl.devices.offered.DeviceFacts.cuda_count", 0)
    return tmp_path


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return started_jobs(monkeypatch)


def _tree(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


STATIC = "--nnodes 2 --master-addr h --master-port 29500"
BAD_INPUT: list[tuple[str, int, str]] = [
    ("nope.py", 2, "script 'nope.py' does not exist"),
    ("--no-python nope", 127, "program 'nope' is not on PATH"),
    ("--no-python ./t.py", 126, "program './t.py' is not executable"),
    ("--no-python --module t", 2, "don't use both the '--no-python' flag and the '--module' flag"),
    ("--run-path --no-python nope.py", 2, "script 'nope.py' does not exist"),
    ("--local-rank-arg dash --no-python ./t.py", 2, "--no-python: a program is not told its local rank"),
    (
        "--strict --nnodes 2 --standalone t.py",
        2,
        "--nnodes has no effect with --standalone, which is one node",
    ),
    ("--strict --signals-to-handle NOPE,TERM t.py", 2, "NOPE"),
    (
        "--strict --bind-strict t.py",
        2,
        "--bind-strict has no effect without --bind auto (--strict makes this",
    ),
    ("--nnodes 0 t.py", 2, "--nnodes 0:0: MIN must be at least 1"),
    ("--nnodes 3:2 t.py", 2, "--nnodes 3:2: MIN must be at least 1, and MAX at least MIN"),
    ("--nnodes x t.py", 2, "--nnodes 'x': expected a number of nodes, or MIN:MAX"),
    ("--nnodes 1:2:3 t.py", 2, "--nnodes '1:2:3': expected"),
    ("--nnodes -1 t.py", 2, "--nnodes '-1': expected"),
    ("--nnodes= t.py", 2, "--nnodes '': expected"),
    ("--nnodes 9999999999 t.py", 2, "--nnodes '9999999999': expected"),
    ("--nproc-per-node 0 t.py", 2, "--nproc-per-node '0': it must be 1 to 65536"),
    ("--nproc-per-node many t.py", 2, "--nproc-per-node 'many': expected a number, auto, cpu or gpu"),
    ("--nproc-per-node gpu t.py", 2, "no CUDA device can be seen on this machine"),
    ("--nproc-per-node xpu t.py", 2, "no xpu device can be seen on this machine"),
    ("--nnodes 1:2 --rdzv-backend zeus t.py", 2, "--rdzv-backend 'zeus': expected one of static, c10d"),
    ("--nnodes 2 --rdzv-backend etcd --rdzv-endpoint h:x t.py", 2, "--rdzv-endpoint 'h:x': expected HOST"),
    ("--rdzv-backend zeus t.py", 2, "--rdzv-backend 'zeus': expected one of static, c10d, etcd, etcd-v2"),
    ("--rdzv-backend c10d --rdzv-endpoint h:x t.py", 2, "--rdzv-endpoint 'h:x': expected HOST:PORT"),
    ("--rdzv-endpoint h t.py", 2, "--rdzv-endpoint 'h': the port is missing"),
    ("--rdzv-conf timeout t.py", 2, "--rdzv-conf 'timeout': expected KEY=VALUE,..."),
    ("--master-port 65536 t.py", 2, "--master-port 65536 is not a port"),
    (
        "--master-port 29500 --master-addr a/b t.py",
        2,
        "--master-addr 'a/b': expected a host name or an address",
    ),
    (f"{STATIC} --node-rank 2 t.py", 2, "--node-rank 2: with 2 nodes it must be 0 to 1"),
    ("--master-port 29500 --node-rank 1 t.py", 2, "--node-rank 1: with 1 node it must be 0"),
    ("--max-restarts -1 t.py", 2, "--max-restarts -1: it must be 0 or more"),
    ("-r 4 t.py", 2, "--redirects '4': expected 0, 1, 2 or 3"),
    ("-r 0:7 t.py", 2, "--redirects '0:7': expected 0, 1, 2 or 3"),
    ("--tee 0:1,0:2 t.py", 2, "--tee '0:1,0:2': local rank 0 is there twice"),
    ("--local-ranks-filter a t.py", 2, "--local-ranks-filter 'a': expected local ranks"),
    ("--log-dir t.py t.py", 2, "'t.py' should not be a file"),
    ("--stdin 9 t.py", 2, "--stdin '9': it must be a rank, 0 to 0, or none"),
    ("--forward-signals SIGFOO t.py", 2, "--forward-signals 'SIGFOO': 'SIGFOO' is no signal"),
    ("--preempt-signal 65 t.py", 2, "'65' is no signal"),
    ("--signals-to-handle KILL t.py", 2, "SIGKILL cannot be taken"),
    ("--signals-to-handle SEGV t.py", 2, "SIGSEGV cannot be taken"),
    ("--signals-to-handle 32 t.py", 2, "32 cannot be taken"),
    ("--signals-to-handle TSTP t.py", 2, "SIGTSTP is always forwarded"),
    ("--preempt-signal USR1,USR2 t.py", 2, "name one signal"),
    ("--preempt-signal USR1 --forward-signals USR1 t.py", 2, "SIGUSR1 is named for two meanings"),
    ("--signals-to-handle USR1 --forward-signals USR1 t.py", 2, "SIGUSR1 is named for two meanings"),
    ("--virtual-local-rank --nproc-per-node 3 t.py", 2, "CUDA_VISIBLE_DEVICES=0,1 names 2"),
]


@pytest.mark.guarantee("G2", "G8")
@pytest.mark.parametrize("line, code, message", BAD_INPUT, ids=[line for line, _, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_its_exit_code(
    line: str,
    code: int,
    message: str,
    machine: Path,
    started: Started,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is started, nothing is left."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert_refused(torchrun, line, code, message, machine, capfd)
    assert started == []


@pytest.mark.parametrize(
    "line, said",
    [
        ("-m", "the following arguments are required: SCRIPT"),
        ("--nodes 2 t.py", "unrecognized arguments: --nodes, did you mean --nnodes?"),
        ("--nproc_per_nod3=2 t.py", "did you mean --nproc_per_node?"),
        ("--start-method thread t.py", "invalid choice: 'thread'"),
        ("--numa-binding all t.py", "invalid choice: 'all'"),
        ("--master-port many t.py", "invalid int value: 'many'"),
        ("--shutdown-timeout -1 t.py", "must be 0 or more seconds: '-1'"),
        ("--hang-timeout -1 t.py", "must be 1 or more seconds: '-1'"),
        ("--hang-timeout 0.5 t.py", "must be 1 or more seconds: '0.5'"),
    ],
)
def test_what_the_parser_refuses_is_its_usage_and_one_line(
    line: str, said: str, machine: Path, started: Started, capfd: pytest.CaptureFixture[str]
) -> None:
    before = _tree(machine)
    with pytest.raises(SystemExit) as caught:
        torchrun.main(line.split())
    _, error = capfd.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert error.startswith("dslrun: error: ")
    assert said in error
    assert started == []
    assert _tree(machine) == before


def test_a_port_that_is_taken_is_refused_with_its_holder(
    started: Started, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        two = ["--nnodes", "2", "--master-addr", "127.0.0.1"]
        for options, advice in (([], "or 0 for any free one"), (two, "the same on every node")):
            assert torchrun.main([*options, "--master-port", str(port), "t.py"]) == 2
            said = capfd.readouterr().err
            (error,) = [line for line in said.splitlines() if "error" in line]
            assert f"master port {port} is taken by pid {os.getpid()} (" in error
            assert error.endswith(f"; choose another, {advice}")
            assert "--master_port" not in said, "an option as only the sister spells it"
    assert started == []


def test_the_job_and_its_restarts_are_handed_over(started: Started, machine: Path) -> None:
    line = ["--nproc-per-node", "2", "--max-restarts", "2", "--grace", "3", "t.py", "a b", ""]
    assert torchrun.main(line) == 7
    ((plan, planner),) = started
    assert [worker.argv for worker in plan.workers] == [(sys.executable, "-u", "t.py", "a b", "")] * 2
    assert (plan.group.grace_s, plan.command) == (3, "dslrun")
    assert planner.job.max_restarts == 2
    assert (planner.run_dir or "").startswith(f"{machine}/tmp/dslrun_")
    second = planner.plan(1)
    assert (second.meeting.attempt, second.env["TORCHELASTIC_RESTART_COUNT"]) == (1, "1")
    assert second.run_dirs == (planner.run_dir,)
    assert not os.path.exists(planner.run_dir or "")


def test_a_script_that_parses_its_local_rank_is_told_by_the_face_of_torch_distributed_launch(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"program": "python -m dsl.launch", "local_rank_arg": "dash"}
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    assert torchrun.main(["t.py", "a"], **facts) == 7
    assert torchrun.main(["--use-env", "t.py", "a"], **facts) == 7
    assert torchrun.main(["--local-rank-arg", "underscore", "t.py", "a"], **facts) == 7
    assert torchrun.main(["--use_env", "--no_python", sys.executable, "a"], **facts) == 7
    assert [plan.workers[1].argv[2:] for plan, _ in started] == [
        ("t.py", "--local-rank=1", "a"),
        ("t.py", "a"),
        ("t.py", "--local_rank=1", "a"),
        (),
    ]


def test_a_path_is_run_by_an_interpreter_of_its_own_whatever_else_was_asked_for(started: Started) -> None:
    assert torchrun.main(["--run-path", "--no-python", "--module", "t.py"]) == 7
    assert started[0][0].workers[0].argv == (sys.executable, "-u", "t.py")


def test_no_log_files_at_all_by_torchruns_word_for_it(started: Started, machine: Path) -> None:
    assert torchrun.main(["--log-dir", "/dev/null", "-r", "3", "-t", "3", "t.py"]) == 7
    ((plan, planner),) = started
    assert not plan.has_log_files
    assert (planner.run_dir or "").startswith(f"{machine}/tmp/")
    request, _ = torchrun.read(
        ["--log-dir", "/dev/null", "-r", "3", "-t", "3", "--logs-specs", "mine", "t.py"], {}
    )
    assert request.output == OutputRequest(logs_specs="mine")


def test_a_template_of_prefixes_is_taken_from_the_option_before_the_environment(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "env ")
    assert torchrun.main(["--nproc-per-node", "2", "t.py"]) == 7
    assert torchrun.main(["--nproc-per-node", "2", "--log-line-prefix-template", "${rank}> ", "t.py"]) == 7
    assert [plan.workers[1].prefix for plan, _ in started] == ["env ", "1> "]


@pytest.mark.parametrize(
    "line, stop, forward, preempt",
    [
        ("", "TERM,INT,HUP,QUIT", "USR1,USR2", None),
        ("--signals-to-handle SIGTERM,usr1", "TERM,USR1", "USR2", None),
        ("--signals-to-handle 34,TERM,34", "34,TERM", "USR1,USR2", None),
        ("--forward-signals HUP,USR1", "TERM,INT,QUIT", "HUP,USR1", None),
        ("--forward-signals= ", "TERM,INT,HUP,QUIT", "", None),
        ("--forward-signals WINCH", "TERM,INT,HUP,QUIT", "WINCH", None),
        ("--preempt-signal USR1", "TERM,INT,HUP,QUIT", "USR2", "USR1"),
        ("--preempt-signal TERM", "INT,HUP,QUIT", "USR1,USR2", "TERM"),
    ],
)
def test_a_signal_that_is_named_for_one_meaning_leaves_the_defaults_of_the_others(
    line: str, stop: str, forward: str, preempt: str | None
) -> None:
    request, _ = torchrun.read([*line.split(), "t.py"], {})
    found = request.signals
    expected = [parse_signals(text or "", "--x", job_control="") for text in (stop, forward, preempt)]
    assert (found.stop, found.forward) == (expected[0], expected[1])
    assert found.preempt == (expected[2][0] if preempt else None)


@pytest.mark.parametrize(
    "text, stop, strangers",
    [
        ("SIGFOO,SIGTERM", (15,), ["SIGFOO"]),
        ("TERM, 65 ,usr1,0", (15, 10), ["65", "0"]),
        ("SIGFOO", (), ["SIGFOO"]),
        ("", (), []),
        ("-1", (), ["-1"]),
    ],
)
def test_a_name_to_handle_that_is_no_signal_is_passed_over_with_a_warning(
    text: str,
    stop: tuple[int, ...],
    strangers: list[str],
    started: Started,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As torchrun does. Our own options are ours to be strict with."""
    assert torchrun.main([f"--signals-to-handle={text}", "t.py"]) == 7
    signals = started[0][0].job.signals.meanings or {}
    assert tuple([number for number, meaning in signals.items() if meaning == "stop"]) == stop
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert warnings == [
        f"dslrun: warning: --signals-to-handle {text!r}: {item!r} is no signal and has no effect, "
        "expected names such as SIGUSR1"
        for item in strangers
    ]


@pytest.mark.parametrize(
    "variables, options, shown",
    [
        ({}, [], False),
        ({}, ["--log-level=info"], True),
        ({}, ["--log-level=warning"], False),
        ({"PET_LOG_LEVEL": "info"}, [], True),
        ({}, ["--dry-run"], True),
    ],
)
def test_a_healthy_small_job_says_nothing_unless_it_is_asked(
    variables: dict[str, str],
    options: list[str],
    *,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torchrun.main(["--nproc-per-node", "2", *options, "t.py"])
    threads = "dslrun: OMP_NUM_THREADS=1 for each worker, set it to choose another number of threads"
    assert capfd.readouterr().err.splitlines() == ([threads] if shown else [])


def test_a_directory_of_which_the_maps_make_no_use_stays_as_it_was(
    machine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """No empty folders stay, nor a link to one."""
    before = _tree(machine)
    assert torchrun.main(["--log-dir", "logs", "-r", "0", "t.py"]) == 7
    assert capfd.readouterr().err == ""
    assert _tree(machine) == before
    os.mkdir("logs")
    assert torchrun.main(["--log-dir", "logs", "-r", "0", "t.py"]) == 7
    assert os.listdir("logs") == []


@pytest.mark.parametrize("command", [deepspeed, torchrun])
def test_a_log_directory_says_where_the_files_are_and_has_a_link_to_the_newest(
    command: ModuleType, machine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = machine / "work" / "logs"
    logs.mkdir()
    (logs / ".latest").symlink_to("20250102030405_1")
    assert command.main(["--log-dir", "logs", "t.py"]) == 7
    run = os.readlink(logs / ".latest")
    assert f": log files are in logs/{run}\n" in capfd.readouterr().err
    assert (logs / ".latest" / "attempt_0" / "0").is_dir()
    assert sorted(os.listdir(logs)) == [".latest", run]
    assert re.match(r"20\d{12}_", run)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_directories_that_cannot_all_be_made_are_removed(
    at: int, machine: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    mkdir = os.mkdir

    def full(path: str, mode: int) -> None:
        if len(made) == at:
            raise OSError(28, "No space left on device")
        made.append(path)
        mkdir(path, mode)

    monkeypatch.setattr("dsl.output.folders.os.mkdir", full)
    assert torchrun.main(["-r", "3", "t.py"]) == 2
    assert "no space left on device" in capfd.readouterr().err
    assert _tree(machine / "tmp") == []


def test_an_interrupt_before_the_start_leaves_no_directory(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_planner: Planner, plan: NodePlan) -> int:
        assert os.path.isdir(plan.run_dirs[-1])
        raise KeyboardInterrupt

    without_engine(monkeypatch, interrupted)
    assert torchrun.main(["t.py"]) == 130
    assert _tree(machine / "tmp") == []
