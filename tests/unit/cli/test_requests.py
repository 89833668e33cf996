"""What each option of the two commands asks for: one field of the `Request`, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from dsl.cli import deepspeed, options_deepspeed, options_torch, torchrun
from dsl.model.options import CommandLine, Option
from dsl.model.request import (
    ElasticRequest,
    MeetingRequest,
    OutputRequest,
    PlacementRequest,
    Program,
    RemoteRequest,
    Request,
    ResourceRequest,
    SignalRequest,
    StartRequest,
)

FRONT_ENDS = {"dsl": deepspeed, "dslrun": torchrun}
LINES: dict[str, CommandLine] = {
    "dsl": options_deepspeed.COMMAND_LINE,
    "dslrun": options_torch.COMMAND_LINE,
}

# Words after the option -> the field that changes, and its value. "": it is a flag.
BOTH: dict[str, tuple[str, str, Any]] = {
    "grace": ("7", "signals.grace_s", 7.0),
    "preempt_grace": ("9", "signals.preempt_grace_s", 9.0),
    "signal_scope": ("group", "signals.scope", "group"),
    "log_dir": ("d", "output.log_dir", "d"),
    "redirects": ("0:1", "output.redirects", "0:1"),
    "tee": ("0:2", "output.tee", "0:2"),
    "local_ranks_filter": ("0,2", "output.local_ranks", "0,2"),
    "duplicate_stdout_filters": ("a", "output.stdout_words", "a"),
    "duplicate_stderr_filters": ("b", "output.stderr_words", "b"),
    "tag_output": ("never", "output.tag", "never"),
    "collapse": ("", "output.collapse", True),
    "partial_after": ("never", "output.partial_after_s", None),
    "stdin": ("none", "output.stdin", "none"),
    "log_max_size": ("64K", "output.max_bytes", 1 << 16),
    "bind": ("auto", "placement.bind", "auto"),
    "bind_strict": ("", "placement.strict", True),
    "mem_policy": ("local", "placement.memory", "local"),
    "start_method": ("forkserver", "start.method", "forkserver"),
    "preload": ("torch,a.b", "start.preload", ("torch", "a.b")),
    "warm_for": ("60", "start.warm_for_s", 60.0),
    "warm_memory": ("2G", "start.warm_memory", 2 << 30),
    "debug": ("0,2-3", "debug.ranks", "0,2-3"),
    "debug_port": ("7000", "debug.port", 7000),
    "debug_address": ("0.0.0.0", "debug.address", "0.0.0.0"),
    "debug_wait": ("", "debug.waits", True),
    "report_bindings": ("", "placement.names_devices", True),
    "dry_run": ("", "placement.names_devices", True),
    "dry_run_json": ("", "placement.names_devices", True),
    "log_level": ("debug", "log_level", "debug"),
    "strict": ("", "is_strict", True),
    "events": ("e", "events", "e"),
    "metrics": ("9100", "metrics", "9100"),
    "detach": ("", "detaches", True),
    "stacks_on_failure": ("", "stacks_on_failure", True),
    "hang_timeout": ("600", "hang_timeout_s", 600.0),
    "hang_action": ("stop", "hang_action", "stop"),
}
DEEPSPEED: dict[str, tuple[str, str, Any]] = {
    "hostfile": ("h", "resources.hostfile", "h"),
    "include": ("a", "resources.include", "a"),
    "exclude": ("b", "resources.exclude", "b"),
    "num_nodes": ("2", "resources.min_nodes", 2),
    "num_gpus": ("3", "resources.num_gpus", 3),
    "master_port": ("29500", "meeting.master_port", 29500),
    "master_addr": ("m", "meeting.master_addr", "m"),
    "min_elastic_nodes": ("1", "elastic.min_nodes", 1),
    "max_elastic_nodes": ("2", "elastic.max_nodes", 2),
    "elastic_training": ("", "elastic.training", True),
    "elastic_wait": ("7", "elastic.wait_s", 7.0),
    "max_restarts": ("3", "max_restarts", 3),
    "autotuning": ("run", "elastic.autotuning", "run"),
    "no_ssh": ("", "remote.no_ssh", True),
    "node_rank": ("0", "meeting.node_rank", 0),
    "no_ssh_check": ("", "remote.no_ssh_check", True),
    "force_multi": ("", "remote.force_multi", True),
    "launcher": ("slurm", "remote.launcher", "slurm"),
    "launcher_args": ("x y", "remote.launcher_args", "x y"),
    "ssh_port": ("6", "remote.ssh_port", 6),
    "venv_script": ("v", "remote.venv_script", "v"),
    "one_agent_per_node": ("", "remote.per_node", True),
    "heartbeat": ("3", "remote.heartbeat_s", 3.0),
    "module": ("", "program.kind", "module"),
    "no_python": ("", "program.kind", "program"),
    "no_local_rank": ("", "program.local_rank_option", ""),
    "bind_cores_to_rank": ("", "placement.bind_cores_to_rank", True),
    "bind_core_list": ("0-3", "placement.core_list", "0-3"),
    "enable_each_rank_log": ("logs", "output.each_rank_log", "logs"),
    "save_pid": ("", "save_pid", True),
    "quiet": ("", "log_level", "error"),
}
TORCH: dict[str, tuple[str, str, Any]] = {
    "nproc_per_node": ("gpu", "resources.nproc_per_node", "gpu"),
    "node_rank": ("1", "meeting.node_rank", 1),
    "role": ("r", "role", "r"),
    "max_restarts": ("3", "max_restarts", 3),
    "master_addr": ("m", "meeting.master_addr", "m"),
    "master_port": ("29500", "meeting.master_port", 29500),
    "local_addr": ("l", "meeting.local_addr", "l"),
    "standalone": ("", "meeting.standalone", True),
    "rdzv_backend": ("c10d", "meeting.backend", "c10d"),
    "rdzv_endpoint": ("h:1", "meeting.endpoint", "h:1"),
    "rdzv_id": ("7", "meeting.run_id", "7"),
    "rdzv_conf": ("a=1", "meeting.settings", "a=1"),
    "module": ("", "program.kind", "module"),
    "no_python": ("", "program.kind", "program"),
    "virtual_local_rank": ("", "placement.virtual_local_rank", True),
    "numa_binding": ("socket", "placement.numa_binding", "socket"),
    "logs_specs": ("mine", "output.logs_specs", "mine"),
    "log_line_prefix_template": ("${rank}:", "output.template", "${rank}:"),
    "local_rank_arg": ("dash", "program.local_rank_option", "--local-rank"),
    "signals_to_handle": ("TERM", "signals.stop", (15,)),
    "forward_signals": ("USR1", "signals.forward", (10,)),
}
FIELDS = {"dsl": {**BOTH, **DEEPSPEED}, "dslrun": {**BOTH, **TORCH}}
# Options that torchrun has and that change nothing here, and those that have a test of their own below.
WITHOUT_EFFECT = {
    "monitor_interval",
    "exit_barrier_timeout",
    "event_log_handler",
    "print_completion",
    "fork_server_per",
}
APART = {"doctor", "nnodes", "run_path", "use_env", "preempt_signal"}
OPTIONS = [(command, option) for command, line in LINES.items() for option in line.options]


def _read(command: str, *words: str, **facts: Any) -> Request:
    request: Request = FRONT_ENDS[command].read([*words, "t.py", "--x"], {}, **facts)[0]
    return request


def _fields(record: Any, path: str = "") -> dict[str, Any]:
    """The fields of a record and of the records in it, by their path."""
    found: dict[str, Any] = {}
    for name in record.__match_args__:
        field = getattr(record, name)
        nested = isinstance(getattr(type(field), "__match_args__", None), tuple) and hasattr(
            type(field), "_defaults"
        )
        found.update(_fields(field, f"{path}{name}.") if nested else {f"{path}{name}": field})
    return found


def _changes(command: str, *words: str, **facts: Any) -> dict[str, Any]:
    """What the words change in the request."""
    before, after = _fields(_read(command, **facts)), _fields(_read(command, *words, **facts))
    return {name: value for name, value in after.items() if value != before[name]}


@pytest.mark.parametrize(
    "command, option", OPTIONS, ids=[f"{command} {option.dest}" for command, option in OPTIONS]
)
def test_each_option_changes_its_field_of_the_request_and_no_other(command: str, option: Option) -> None:
    if option.dest in APART:
        return
    if option.dest in WITHOUT_EFFECT:
        assert _changes(command, option.names[0], option.choices[-1] if option.choices else "5") == {}
        return
    words, field, value = FIELDS[command][option.dest]
    assert option.is_flag == (not words)
    for name in option.names:
        given = [f"{name}={words}"] if option.bare else [name, words] if words else [name]
        assert _changes(command, *given) == {field: value}


@pytest.mark.parametrize("command", LINES)
def test_an_option_whose_value_may_be_missing_never_takes_the_word_behind_it(command: str) -> None:
    assert _changes(command, "--debug") == {"debug.ranks": "all"}
    request = FRONT_ENDS[command].read(["--debug", "t.py", "1"], {})[0]
    assert (request.program.script, request.program.args) == ("t.py", ("1",))
    parsed = FRONT_ENDS[command].parse_args(["--debug", "t.py", "--debug"])
    assert (parsed.debug, getattr(parsed, LINES[command].script)) == ("all", "t.py")
    assert FRONT_ENDS[command].parse_args(["--debug=1", "t.py"]).debug == "1"
    with pytest.raises(SystemExit):
        FRONT_ENDS[command].parse_args(["--debug=", "t.py"])


@pytest.mark.parametrize("command", LINES)
@pytest.mark.parametrize("name", ["--preempt-signal", "--preempt_signal"])
def test_a_signal_that_announces_the_end_loses_its_usual_meaning(name: str, command: str) -> None:
    assert _read(command, name, "USR1").signals == SignalRequest((15, 2, 1, 3), (12,), 10)
    assert _read(command, name, "TERM").signals == SignalRequest((2, 1, 3), (10, 12), 15)
    assert _read(command, name, "34").signals == SignalRequest((15, 2, 1, 3), (10, 12), 34)


def test_every_row_of_this_file_is_an_option() -> None:
    for command, line in LINES.items():
        names = {option.dest for option in line.options}
        assert set(FIELDS[command]) == names - WITHOUT_EFFECT - APART


def test_nothing_said_is_the_default_request() -> None:
    program = Program("script", "t.py", ("--x",), local_rank_option="--local_rank")
    expected = Request("deepspeed", program, ResourceRequest(hostfile="/job/hostfile"))
    assert _read("dsl") == expected
    said = "--num_gpus -1 --num_nodes -1 --node_rank -1 --enable_each_rank_log None --log-dir= --master_addr="
    assert _read("dsl", *said.split()) == expected
    assert _read("dslrun") == Request(
        "torch",
        Program("script", "t.py", ("--x",)),
        ResourceRequest(nproc_per_node="1"),
        MeetingRequest(master_addr="127.0.0.1", node_rank=0, run_id="none"),
        signals=SignalRequest(stop=(15, 2, 1, 3), forward=(10, 12)),
        max_restarts=0,
    )


def test_every_wish_of_dsl_reaches_its_record() -> None:
    line = (
        "-H h -i a -e b --num_nodes 1:2 --min_elastic_nodes 1 --max_elastic_nodes 2 --num_gpus 3 --master_port 4 "
        "--master_addr m --node_rank 5 --launcher slurm --launcher_args x --module --no_local_rank "
        "--no_ssh --no_ssh_check --force_multi --save_pid --enable_each_rank_log logs --autotuning run "
        "--elastic_training --bind_cores_to_rank --bind_core_list 0 --ssh_port 6 --venv_script v --log_level debug "
        "--one-agent-per-node --heartbeat 3 "
        "--grace 7 --log-dir d -r 1 -t 0:2 --local_ranks_filter 0 --duplicate-stdout-filters a "
        "--duplicate_stderr_filters b --tag-output never --collapse --partial-after 2 --stdin none --log_max_size 64k "
        "--start_method auto --preload torch"
    )
    assert _read("dsl", *line.split()) == Request(
        "deepspeed",
        Program("module", "t.py", ("--x",)),
        ResourceRequest(hostfile="h", include="a", exclude="b", min_nodes=1, max_nodes=2, num_gpus=3),
        MeetingRequest(master_addr="m", master_port=4, node_rank=5),
        RemoteRequest(
            "slurm",
            "x",
            no_ssh=True,
            no_ssh_check=True,
            force_multi=True,
            ssh_port=6,
            venv_script="v",
            per_node=True,
            heartbeat_s=3.0,
        ),
        SignalRequest(grace_s=7.0),
        OutputRequest(
            log_dir="d",
            each_rank_log="logs",
            redirects="1",
            tee="0:2",
            local_ranks="0",
            stdout_words="a",
            stderr_words="b",
            tag="never",
            collapse=True,
            partial_after_s=2.0,
            stdin="none",
            max_bytes=1 << 16,
        ),
        PlacementRequest(bind_cores_to_rank=True, core_list="0"),
        ElasticRequest(autotuning="run", training=True, min_nodes=1, max_nodes=2),
        StartRequest("auto", ("torch",)),
        log_level="debug",
        save_pid=True,
    )


@pytest.mark.parametrize(
    "words, least, most",
    [("3", 3, 3), ("1:4", 1, 4), (" 2 : 5 ", 2, 5), ("1", 1, 1), ("1:1", None, None), ("4:2", 4, 2)],
)
def test_nodes_of_dslrun(words: str, least: int | None, most: int | None) -> None:
    resources = _read("dslrun", "--nnodes", words).resources
    assert (resources.min_nodes, resources.max_nodes) == (least, most)


def test_a_path_overrules_what_else_was_said_of_the_program() -> None:
    assert _changes("dslrun", "--run-path", "--module", "--no-python") == {}
    assert (
        _read("dslrun", "--run-path", "--local-rank-arg", "dash").program.local_rank_option == "--local-rank"
    )


def test_a_script_is_told_its_local_rank_unless_it_uses_the_environment() -> None:
    launch = {"line": options_torch.command_line(local_rank_arg="dash")}
    assert _read("dslrun", **launch).program.local_rank_option == "--local-rank"
    assert _changes("dslrun", "--use-env", **launch) == {"program.local_rank_option": ""}
    assert _changes("dslrun", "--local-rank-arg", "underscore", **launch) == {
        "program.local_rank_option": "--local_rank"
    }


def test_quiet_wins_over_a_level() -> None:
    assert _changes("dsl", "--log_level", "debug", "-q") == {"log_level": "error"}


def test_a_device_without_files_is_no_directory_for_logs() -> None:
    assert _changes("dslrun", "--log-dir", "/dev/null", "-r", "3", "-t", "3", "--logs-specs", "mine") == {
        "output.logs_specs": "mine"
    }
