"""``dsl`` from its arguments to the plan, and every mistake in one line. No process is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.launches import Started, assert_refused, started_jobs

from dsl.cli import deepspeed, torchrun

LARGE = """{"zero_optimization": {"stage": [2, 3]},
"autotuning": {"device_memory": "80G", "model_info": {"num_params": 1e12}}}"""
"""A config of a model that its devices do not hold."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 4 slots on its CPU, and a working directory with a script and a hostfile."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("dsl.devices.offered.count_numa_nodes", lambda _nodes: 4)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "large.json").write_text(LARGE, encoding="utf-8")
    (tmp_path / "two").write_text("alpha slots=4\nbeta slots=2\n", encoding="utf-8")
    (tmp_path / "here").write_text("localhost slots=2\n", encoding="utf-8")
    (tmp_path / "bad").write_text("alpha slots=4\nbeta\n", encoding="utf-8")
    return tmp_path


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return started_jobs(monkeypatch)


BAD_INPUT: list[tuple[str, int, str]] = [
    ("nope.py", 2, "script 'nope.py' does not exist"),
    ("--no_python nope", 127, "program 'nope' is not on PATH"),
    ("--no_python ./nope", 127, "program './nope' does not exist"),
    ("--no_python ./t.py", 126, "program './t.py' is not executable"),
    ("--no_python --module t", 2, "don't use both"),
    ("--strict --node_rank 0 t.py", 2, "--node_rank has no effect without --no_ssh (--strict makes this"),
    ("--strict -H nosuch t.py", 2, "hostfile nosuch does not exist, correct --hostfile (--strict makes this"),
    ("-i gamma t.py", 2, "hostname 'gamma' not found in hostfile, known: localhost"),
    ("-i localhost:4 t.py", 2, "no slot '4' specified on host 'localhost', which has slots 0 to 3"),
    ("-i localhost:x t.py", 2, "bad filter 'localhost:x'"),
    ("-i a -e b t.py", 2, "--include and --exclude are mutually exclusive"),
    ("-e localhost t.py", 2, "nothing is left to start"),
    ("--num_gpus 1 -i localhost t.py", 2, "cannot specify num_nodes/gpus with include/exclude"),
    ("-H bad t.py", 2, "bad line 2: hostfile contains a bad entry: 'beta'"),
    ("-H two -i alphq t.py", 2, "hostname 'alphq' not found in hostfile, did you mean 'alpha'?"),
    ("-H two --num_nodes 3 t.py", 2, "--num_nodes 3 is more than the hosts"),
    ("-H two -i exec:alpha t.py", 2, "bad filter 'exec:alpha'"),
    (
        "-H two --master_addr alpha:29500 t.py",
        2,
        "--master_addr 'alpha:29500': expected a host name or an address",
    ),
    ("-H two --no_ssh t.py", 2, "--node_rank is not set correctly"),
    ("--num_nodes 2 t.py", 2, "num nodes is >1 but no extra nodes available"),
    ("--num_nodes 1:2 t.py", 2, "MIN:MAX format is only supported in elastic training"),
    ("--elastic_training t.py", 2, "master addr is required"),
    ("--elastic_training --master_addr m --num_nodes 2:1 t.py", 2, "MAX at least MIN"),
    ("--elastic_training --master_addr m --min_elastic_nodes 0 t.py", 2, "must be at least 1"),
    (
        "--elastic_training --master_addr m --min_elastic_nodes 3 --max_elastic_nodes 2 t.py",
        2,
        "on 3 to 2 nodes",
    ),
    (
        "--elastic_training --master_addr m --num_nodes 1:2 --max_elastic_nodes 3 t.py",
        2,
        "--num_nodes 1:2 and --max_elastic_nodes 3 contradict each other",
    ),
    ("--autotuning run t.py", 2, "autotuning needs the config of the script"),
    ("--autotuning tune t.py --deepspeed_config none.json", 2, "none.json: there is no such config"),
    (
        "--autotuning tune t.py --deepspeed_config large.json",
        2,
        "nothing can be tried; z2 is left out: it needs about ",
    ),
    ("--autotuning tune --dry-run t.py", 2, "--dry-run cannot be used with --autotuning"),
    ("--autotuning tune --detach t.py", 2, "--detach cannot be used with --autotuning"),
    (
        "--autotuning tune --doctor --ring t.py",
        2,
        "cannot be used with --autotuning: it starts no experiment",
    ),
    ("--autotuning tune --events e t.py", 2, "--events cannot be used with --autotuning"),
    ("--autotuning tune --no_ssh t.py", 2, "--no_ssh cannot be used with --autotuning"),
    ("--launcher nonsense t.py", 2, "unknown launcher 'nonsense', expected one of pdsh, openmpi, mvapich"),
    ("-H two --no_ssh --node_rank 0 --master_addr a --launcher x t.py", 2, "unknown launcher 'x'"),
    ("-H here --num_gpus 5 t.py", 2, "--num_gpus 5 is too many: host 'localhost' has slots 0 to 1"),
    (
        "--bind_cores_to_rank --bind_core_list 3-1 t.py",
        2,
        "core list '3-1': range '3-1' ends before it starts",
    ),
    ("--bind_cores_to_rank --bind_core_list 65535 t.py", 2, "this process may not use 65535"),
    ("--enable_each_rank_log t.py t.py", 2, "'t.py' should not be a file"),
    ("--log-dir t.py t.py", 2, "'t.py' should not be a file"),
    ("-r 0:7 t.py", 2, "--redirects '0:7': expected 0, 1, 2 or 3"),
    ("-t 0:1,0:2 t.py", 2, "--tee '0:1,0:2': local rank 0 is there twice"),
    ("--enable_each_rank_log logs -t x t.py", 2, "--tee 'x': expected 0, 1, 2 or 3"),
    ("--enable_each_rank_log logs -r 3 t.py", 2, "cannot be used with --redirects"),
    ("--local-ranks-filter , t.py", 2, "--local-ranks-filter ',': expected local ranks such as 0,2"),
    ("--stdin 9 t.py", 2, "--stdin '9': it must be a rank, 0 to 3, or none"),
    ("--master_port 65536 t.py", 2, "--master_port 65536 is not a port"),
]


@pytest.mark.guarantee("G2", "G8")
@pytest.mark.parametrize("line, code, message", BAD_INPUT, ids=[line for line, _, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_its_exit_code(
    line: str,
    code: int,
    message: str,
    machine: Path,
    started: Started,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is started, nothing is left."""
    assert_refused(deepspeed, line, code, message, machine, capfd)
    assert started == []


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("DS_ACCELERATOR", "tpu", "DS_ACCELERATOR must be one of"),
        ("DS_ACCELERATOR", "npu", "DS_ACCELERATOR=npu"),
        ("CUDA_VISIBLE_DEVICES", "0,9", "CUDA_VISIBLE_DEVICES=0,9: no slot '9'"),
        ("CUDA_VISIBLE_DEVICES", "GPU-1", "CUDA_VISIBLE_DEVICES=GPU-1 names devices"),
    ],
)
def test_a_bad_environment_is_one_line_too(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert deepspeed.main(["t.py", "--quiet"]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"dsl: error: {message}")


def test_the_exit_code_is_that_of_the_job(started: Started) -> None:
    assert deepspeed.main(["--num_gpus", "3", "t.py", "--lr", "1e-3"]) == 7
    ((plan, _),) = started
    assert [worker.argv[2:] for worker in plan.workers] == [
        ("t.py", f"--local_rank={rank}", "--lr", "1e-3") for rank in range(3)
    ]


def test_the_directory_for_logs_is_there_when_the_job_starts(machine: Path, started: Started) -> None:
    assert deepspeed.main(["--enable_each_rank_log", "a/b", "t.py"]) == 7
    assert (machine / "a" / "b").is_dir()
    assert started[0][0].log_dir == "a/b"


def test_the_directories_of_a_run_are_there_when_the_job_starts(machine: Path, started: Started) -> None:
    assert deepspeed.main(["--log-dir", "a", "t.py"]) == 7
    run = machine / "a" / os.readlink(machine / "a" / ".latest")
    assert sorted(str(path.relative_to(run)) for path in run.rglob("*")) == [
        "attempt_0",
        *[
            f"attempt_0/{local_rank}{name}"
            for local_rank in range(4)
            for name in ("", "/stderr.log", "/stdout.log")
        ],
    ]
    assert started[0][0].run_dirs[0] == f"a/{run.name}"


@pytest.mark.parametrize("level, said", [("info", True), ("warning", False)])
def test_where_the_files_lie_is_said(
    level: str,
    *,
    said: bool,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (machine / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(machine / "tmp"))
    assert deepspeed.main(["-t", "3", "--log_level", level, "t.py"]) == 7
    (run,) = (machine / "tmp").iterdir()
    assert run.stat().st_mode & 0o777 == 0o750
    assert (f"dsl: log files are in {run}" in capfd.readouterr().err.splitlines()) is said


def test_no_empty_folder_stays_of_a_run_that_keeps_some_streams(machine: Path) -> None:
    assert deepspeed.main(["--log-dir", "a", "-r", "2:1", "t.py"]) == 7
    run = machine / "a" / os.readlink(machine / "a" / ".latest")
    assert [str(path.relative_to(run)) for path in sorted(run.rglob("*"))] == [
        "attempt_0",
        "attempt_0/2",
        "attempt_0/2/stdout.log",
    ]


@pytest.mark.parametrize("options", [["-t", "3"], ["--log-dir", "a"], ["--enable_each_rank_log", "a/b"]])
def test_a_dry_run_makes_no_file_and_announces_none(
    options: list[str], machine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = sorted(os.listdir(machine))
    assert deepspeed.main(["--dry-run", *options, "t.py"]) == 0
    assert "log files are in" not in capfd.readouterr().err
    assert sorted(os.listdir(machine)) == before


@pytest.mark.parametrize(
    "line, flag",
    [
        ("dsl t.py --master_port 1", "--master_port"),
        ("dsl t.py --num_gpus=2", "--num_gpus"),
        ("dsl t.py --master-port=1", "--master-port"),
        ("dsl --num-gpus 1 t.py --num_gpus 2", None),
        ("dsl --num_gpus 1 t.py --num_gpus 2", None),
        ("dsl -q t.py --num_gpus 2", None),
        ("dsl t.py --hostname x --num_gp 2", None),
        ("dslrun t.py --nproc_per_node 2", "--nproc_per_node"),
        ("dslrun t.py --x --master-port=3", "--master-port"),
        ("dslrun --nproc-per-node 1 t.py --nproc_per_node 2", None),
        ("dslrun t.py --log-dir x", None),
        ("dslrun t.py nnodes", None),
    ],
)
def test_an_option_of_ours_after_the_script_is_passed_on_with_a_warning(
    line: str, flag: str | None, started: Started, capfd: pytest.CaptureFixture[str]
) -> None:
    name, *words = line.split()
    assert (deepspeed if name == "dsl" else torchrun).main(words) == 7
    own = words[words.index("t.py") + 1 :]
    assert started[0][0].workers[0].argv[-len(own) :] == tuple(own)
    warnings = [text for text in capfd.readouterr().err.splitlines() if "warning" in text]
    expected = f"{name}: warning: {flag} comes after the script and goes to t.py"
    assert [text.startswith(expected) for text in warnings] == ([True] if flag else [])


@pytest.mark.parametrize(
    "options, lines",
    [
        ([], ["dsl: warning: --node_rank has no effect without --no_ssh"]),
        (
            ["--log_level", "info"],
            [
                "dsl: warning: --node_rank has no effect without --no_ssh",
                "dsl: detected CUDA_VISIBLE_DEVICES=1",
            ],
        ),
        (["--log_level", "warning"], ["dsl: warning: --node_rank has no effect without --no_ssh"]),
        (["--quiet"], []),
        (["--log_level", "debug", "-q"], []),
    ],
)
def test_the_log_level_decides_what_is_said(
    options: list[str], lines: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert deepspeed.main([*options, "--master_port", "0", "--node_rank", "3", "t.py"]) == 7
    said = capfd.readouterr()
    assert said.out == ""
    assert [text[: len(line)] for text, line in zip(said.err.splitlines(), lines, strict=True)] == lines


@pytest.mark.parametrize("text, code", [("1", 2), ("0", 7), ("", 7), ("yes", 2)])
def test_a_variable_makes_all_jobs_strict(
    text: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSL_STRICT", text)
    assert deepspeed.main(["--hostfile", "nosuch", "t.py"]) == code
    said = capfd.readouterr().err.splitlines()
    expected = {
        "1": "dsl: error: hostfile nosuch does not exist, correct --hostfile (--strict makes this an error)",
        "yes": "dsl: error: DSL_STRICT='yes': expected 0 or 1",
    }
    warning = (
        "dsl: warning: unable to find hostfile nosuch, will proceed with training with local resources only"
    )
    assert said == [expected.get(text, warning)]


def test_strict_binding_is_a_part_of_it() -> None:
    read = deepspeed.read
    assert read(["--strict", "--bind", "auto", "t.py"], {})[0].placement.strict
    assert read(["--bind", "auto", "t.py"], {"DSL_STRICT": "1"})[0].placement.strict
    assert not read(["--strict", "t.py"], {})[0].placement.strict


def test_nobody_has_to_read_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, _text: str) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    for stream in (None, Broken()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert deepspeed.main(["nope.py"]) == 2


def test_arguments_are_those_of_the_process_by_default(
    monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    monkeypatch.setattr(sys, "argv", ["dsl", "--num_gpus", "2", "t.py"])
    main: Callable[[], int] = deepspeed.main
    assert main() == 7
    assert len(started[0][0].workers) == 2
