"""Every number that a user can write, in an option or in a variable: bounded, and refused in one short line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.launches import without_engine
from tests.support.options import FRONT_ENDS, LINES, OPTIONS

from dsl.cli import deepspeed, torchrun
from dsl.errors import UsageError
from dsl.functions import LaunchConfig, elastic_launch
from dsl.model.job import NodePlan
from dsl.model.options import Option, unquoted, variable
from dsl.words import MOST_WORKERS

LONG = "9" * 5000

# What no number of any kind may be.
NO_NUMBERS = ("x", "1_0", "0x10", "\u0663", "1,5", LONG, f"-{LONG}", str(2**63), str(-(2**63)), "99999999999")
NO_INTEGERS = (*NO_NUMBERS, "", "1.5", "1e3", "nan", "inf")
NO_COUNTS = (*NO_INTEGERS, "-2", str(10**9))
NO_SECONDS = (*NO_NUMBERS, "", "nan", "-nan", "inf", "-inf", "infinity", "-1", "1e300", "1e9999", "1e10")
NO_CODES = (*[text for text in NO_INTEGERS if text != "1,5"], "0", "256", "-2", "3-1", "1,", "SIGNONE", "all")
NO_RANKS = (*[text for text in NO_INTEGERS if text not in ("", "1,5")], "-2", "0-99999999999")

# Options whose value is a number or holds some: values that are refused, and what else has to be said.
NUMBERS: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("dsl", "num_nodes"): (("2", "1:2", f"1:{LONG}", "0x1:2", *NO_INTEGERS), ""),
    # -1 is DeepSpeed's word for "not said", and so is every negative number.
    ("dsl", "num_gpus"): (("1000000000", str(MOST_WORKERS + 1), *NO_INTEGERS), ""),
    ("dsl", "master_port"): (("65536", *NO_COUNTS), ""),
    ("dsl", "min_elastic_nodes"): (NO_INTEGERS, ""),
    ("dsl", "max_elastic_nodes"): (NO_INTEGERS, ""),
    ("dsl", "elastic_wait"): (NO_SECONDS, ""),
    ("dsl", "max_restarts"): (("-1", *NO_COUNTS), ""),
    ("dsl", "node_rank"): (NO_COUNTS, "--no_ssh"),
    ("dsl", "ssh_port"): (("0", "-1", "65536", *NO_COUNTS), ""),
    ("dsl", "heartbeat"): (("0", "0.9", *NO_SECONDS), ""),
    ("dsl", "wait_hosts"): (NO_SECONDS, ""),
    ("dsl", "include"): (
        ("localhost:0-99999999999", *[f"localhost:{text}" for text in NO_COUNTS if text]),
        "",
    ),
    ("dsl", "exclude"): (
        ("localhost:0-99999999999", *[f"localhost:{text}" for text in NO_COUNTS if text]),
        "",
    ),
    ("dsl", "bind_core_list"): (("0-99999999999", *NO_COUNTS), "--num_gpus 1 --bind_cores_to_rank"),
    ("dslrun", "spares"): (("-1", *NO_COUNTS), "--nnodes 2"),
    ("dslrun", "nnodes"): (("0", f"1:{LONG}", *NO_COUNTS), ""),
    ("dslrun", "nproc_per_node"): (("0", str(MOST_WORKERS + 1), *NO_COUNTS), ""),
    ("dslrun", "node_rank"): (NO_COUNTS, "--nnodes 2 --master-addr h"),
    ("dslrun", "max_restarts"): (("-1", *NO_COUNTS), ""),
    ("dslrun", "monitor_interval"): (NO_SECONDS, ""),
    ("dslrun", "exit_barrier_timeout"): (NO_SECONDS, ""),
    ("dslrun", "master_port"): (("65536", *NO_COUNTS), ""),
    ("dslrun", "rdzv_endpoint"): (tuple(f"h:{text}" for text in ("65536", *NO_COUNTS)), ""),
    ("dslrun", "signals_to_handle"): (("KILL", "9", "32"), ""),
    ("dslrun", "forward_signals"): (("65", *[text for text in NO_COUNTS if text]), ""),
}
BOTH = {
    "grace": NO_SECONDS,
    "hang_timeout": ("0", "0.9", *NO_SECONDS),
    "preempt_signal": ("65", *[text for text in NO_COUNTS if text]),
    "preempt_grace": NO_SECONDS,
    "restart_on": NO_CODES,
    "give_up_on": NO_CODES,
    "partial_after": NO_SECONDS,
    "redirects": ("", "4", *[f"{text}:1" for text in NO_COUNTS if text != "--"], f"0:{LONG}"),
    "tee": ("", "4", *[f"{text}:1" for text in NO_COUNTS if text != "--"], f"0:{LONG}"),
    "local_ranks_filter": NO_RANKS,
    "ranks_filter": ("1,", "3-1", *NO_RANKS),
    "warm_for": NO_SECONDS,
    "warm_memory": ("-1", "0", f"{LONG}K", "1.5M", *[one for one in NO_INTEGERS if one != "99999999999"]),
    "debug": ("1,", "3-1", *NO_RANKS),
    "wrap": tuple(f"{text}:true" for text in ("1,", "3-1", *NO_RANKS)),
    "stdin": (str(MOST_WORKERS), *NO_RANKS),
    "log_max_size": ("-1", "0", f"{LONG}K", "1.5M", *[one for one in NO_INTEGERS if one != "99999999999"]),
}  # fmt: skip
NUMBERS.update({(command, "debug_port"): (("0", "65536", *NO_COUNTS), "--debug") for command in LINES})
NUMBERS.update({(command, dest): (values, "") for command in LINES for dest, values in BOTH.items()})

# Options whose value holds no number of ours.
TEXTS = {
    *("hostfile", "master_addr", "launcher", "launcher_args", "venv_script", "enable_each_rank_log"),
    *("debug_address", "events", "metrics", "env", "ssh_program", "discover"),
    *("role", "local_addr", "rdzv_backend", "rdzv_id", "rdzv_conf", "logs_specs", "log_line_prefix_template"),
    *("event_log_handler", "log_dir", "duplicate_stdout_filters", "duplicate_stderr_filters", "preload"),
}

# What messages call an option, if not by its name.
CALLED = {
    "num_nodes": ("num_nodes", "num nodes"),
    "include": ("filter", "slot"),
    "exclude": ("filter", "slot"),
    "bind_core_list": ("core list",),
}


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[NodePlan]:
    """A machine with 4 slots on its CPU, a script, and the plans that were handed to the engine."""
    (tmp_path / "t.py").touch()
    (tmp_path / "hosts").write_text("localhost slots=2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("dsl.devices.offered.count_numa_nodes", lambda _nodes: 4)
    plans: list[NodePlan] = []

    def run_job(_planner: object, plan: NodePlan) -> int:
        plans.append(plan)
        return 7

    without_engine(monkeypatch, run_job)
    return plans


def _refusal(command: str, words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that says why the command line is refused; after argparse's usage, where it is argparse."""
    try:
        code = FRONT_ENDS[command].main([*words, "t.py"])
    except SystemExit as stop:
        code = int(stop.code or 0)
    lines = capfd.readouterr().err.splitlines()
    assert code == 2, (words, lines)
    assert all(line.startswith("usage: ") or "error: " in line or "warning: " in line for line in lines)
    (error,) = [line for line in lines if "error: " in line]
    assert error.startswith(f"{command}: error: ")
    assert len(error) < 400
    return error


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("command, dest", NUMBERS)
def test_a_number_that_cannot_be_is_refused_in_one_short_line(
    command: str, dest: str, started: list[NodePlan], capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started, nothing is computed that a slip of a few digits makes endless."""
    (option,) = [one for one in LINES[command].options if one.dest == dest]
    name = next(name for name in option.names if name.startswith("--"))
    values, others = NUMBERS[command, dest]
    for value in values:
        error = _refusal(command, [*others.split(), f"{name}={value}"], capfd)
        assert any(word in error.replace("-", "_") for word in CALLED.get(dest, (dest,))), value
        assert started == [], value


@pytest.mark.parametrize(
    "command, option", OPTIONS, ids=[f"{command} {option.dest}" for command, option in OPTIONS]
)
def test_no_option_escapes_this_table(command: str, option: Option) -> None:
    """A new option is a flag, has choices, or stands in `NUMBERS` or `TEXTS`."""
    is_plain = option.is_flag or option.choices is not None
    assert [is_plain, (command, option.dest) in NUMBERS, option.dest in TEXTS].count(True) == 1
    if option.dest in TEXTS:
        assert option.read in (str, unquoted, variable)


@pytest.mark.parametrize("dest", [dest for command, dest in NUMBERS if command == "dslrun"])
def test_a_variable_that_stands_for_an_option_is_refused_by_its_own_name(
    dest: str,
    started: list[NodePlan],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    values, others = NUMBERS["dslrun", dest]
    for value in (*values[:2], *values[2::4]):  # their reader is the same: some will do
        monkeypatch.setenv(f"PET_{dest.upper()}", value)
        assert f"PET_{dest.upper()}" in _refusal("dslrun", others.split(), capfd), value
    assert started == []


@pytest.mark.parametrize(
    "command, name, values",
    [
        ("dslrun", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", NO_SECONDS),
        ("dslrun", "PET_STANDALONE", ("x", "", LONG, "1.5", "yes")),
        ("dsl", "LOCAL_SIZE", (str(MOST_WORKERS + 1), *[one for one in NO_INTEGERS if one])),
        (
            "dsl",
            "CUDA_VISIBLE_DEVICES",
            ("0-99999999999", "0-3", LONG, f"0-{LONG}", "99999999999", "\u0663"),
        ),
    ],
)
def test_a_variable_is_bounded_like_an_option(
    command: str,
    name: str,
    values: tuple[str, ...],
    started: list[NodePlan],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for value in values:
        monkeypatch.setenv(name, value)
        assert name in _refusal(command, [], capfd), value
    assert started == []


@pytest.mark.parametrize("slots", [LONG, str(2**63), str(MOST_WORKERS + 1), "-1"])
def test_slots_of_a_hostfile_are_bounded(
    slots: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text(f"localhost slots={slots}\n", encoding="utf-8")
    assert "hosts line 1: " in _refusal("dsl", ["-H", "hosts"], capfd)


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(
    "name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS"]
)
@pytest.mark.parametrize("command", sorted(LINES))
def test_a_variable_that_is_only_passed_on_is_nobodys_business(
    command: str, name: str, started: list[NodePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the workers inherit is not read."""
    monkeypatch.setenv(name, LONG)
    assert FRONT_ENDS[command].main(["--bind", "auto", "--report-bindings", "t.py"]) == 7
    assert len(started) == 1


@pytest.mark.parametrize("text, count", [(" 2 ", 2), ("+3", 3), ("007", 7)])
def test_a_number_may_have_blanks_a_sign_and_zeroes(text: str, count: int, started: list[NodePlan]) -> None:
    """As Python's ``int`` reads it, for both tools that the commands stand in for."""
    assert deepspeed.main([f"--num_gpus={text}", "t.py"]) == 7
    assert torchrun.main([f"--nproc-per-node={text}", "t.py"]) == 7
    assert [len(plan.workers) for plan in started] == [count, count]


def test_a_width_of_the_terminal_that_cannot_be_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for columns in (LONG, "-5", "99999999999", "nan"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit) as caught:
            deepspeed.main(["--help"])
        assert caught.value.code == 0
        assert "--num_gpus" in capfd.readouterr().out


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "fields",
    [
        {"grace_s": 1e300},
        {"grace_s": float("nan")},
        {"partial_after_s": float("nan")},
        {"shutdown_timeout": 2**63},
        {"max_restarts": 10**9},
        {"nproc_per_node": 10**9},
        {"nproc_per_node": 2**63},
        {"min_nodes": 10**9, "max_nodes": 10**9, "rdzv_backend": "static", "rdzv_endpoint": "h:1"},
        {"rdzv_backend": "static", "rdzv_endpoint": f"h:{LONG}"},
        {"redirects": f"{LONG}:1"},
    ],
    ids=str,
)
def test_a_field_of_a_config_is_bounded_like_an_option(fields: dict[str, Any]) -> None:
    """Launched from Python, the same numbers are refused by the same rules."""
    wishes = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, "rdzv_configs": {"rank": 0}, **fields}
    with pytest.raises(UsageError) as caught:
        elastic_launch(LaunchConfig(**wishes), print)()
    assert len(str(caught.value)) < 400
