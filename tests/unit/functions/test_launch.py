"""What a `LaunchConfig` asks for, what it refuses, and the small parts around a launch."""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import json
import pickle
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.events import a_plan, an_attempt, an_exit, end
from tests.support.outcome import assert_one_line
from tests.support.requests import wish_of
from tests.test_imports import imports_of

from dsl.errors import OptionError, UnsupportedError, UsageError
from dsl.functions import _worker
from dsl.functions.call import entrypoint_name, refuse_while_importing, source_of
from dsl.functions.config import LaunchConfig, to_request
from dsl.functions.errors import HandledSignals, SignalException
from dsl.functions.launcher import EntrypointError, conclude, launch
from dsl.model.outcome import Outcome
from dsl.model.request import DebugRequest, Program, StartRequest


def config_of(**fields: Any) -> LaunchConfig:
    return LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, **fields})


def request(**fields: Any) -> Any:
    return to_request(config_of(**fields), Program("call", "python", name="train"))


class Std(enum.IntFlag):
    """As torch's: the streams of a worker."""

    OUT = 1
    ERR = 2
    ALL = 3


class Mode(enum.Enum):
    """As torch's: modes of NUMA binding."""

    NODE = "node"


class NumaOptions:
    """As torch's."""

    affinity_mode = Mode.NODE


def test_the_first_fields_are_torchs_in_its_order() -> None:
    """Source: torch.distributed.launcher.api.LaunchConfig of torch 2.15."""
    names = [field.name for field in dataclasses.fields(LaunchConfig)]
    assert names[:23] == [
        *("min_nodes", "max_nodes", "nproc_per_node", "logs_specs", "run_id", "role", "rdzv_endpoint"),
        *("rdzv_backend", "rdzv_configs", "rdzv_timeout", "max_restarts", "monitor_interval", "start_method"),
        *("log_line_prefix_template", "metrics_cfg", "local_addr", "event_log_handler", "numa_options"),
        *("signals_to_handle", "duplicate_stdout_filters", "duplicate_stderr_filters"),
        *("virtual_local_rank", "shutdown_timeout"),
    ]


@pytest.mark.parametrize(
    "options, count, expected",
    [
        (NumaOptions(), 8, "node"),
        (NumaOptions(), 4, None),
        (None, 8, None),
        (NumaOptions(), RuntimeError, None),
    ],
)
def test_numa_options_that_a_site_has_set_in_torch_hold_if_each_device_has_a_worker(
    options: object, count: Any, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices are those of any accelerator."""

    def device_count() -> int:
        if count is RuntimeError:
            raise RuntimeError("the driver does not answer")
        return int(count)

    utils = SimpleNamespace(get_default_numa_options=lambda: options)
    torch = SimpleNamespace(accelerator=SimpleNamespace(device_count=device_count))
    monkeypatch.setitem(sys.modules, "torch._utils_internal", utils)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert request(nproc_per_node=8).placement.numa_binding == expected
    assert request(nproc_per_node=8, numa_options="socket").placement.numa_binding == "socket"


def test_every_field_is_documented() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "functions.md").read_text()
    missing = [field.name for field in dataclasses.fields(LaunchConfig) if f"`{field.name}`" not in text]
    assert missing == []


def test_a_config_can_be_changed_and_copied() -> None:
    config = LaunchConfig(1, 1, 2)
    config.run_id = "job"
    assert dataclasses.replace(config, nproc_per_node=3) == LaunchConfig(1, 1, 3, run_id="job")
    assert LaunchConfig(1, 1, 2).rdzv_configs is not config.rdzv_configs


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"max_restarts": 3}, {"max_restarts": 3, "node_rank": 0, "rdzv_backend": "c10d"}),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": "host:1"}, {"rdzv_backend": "c10d", "rdzv_endpoint": ""}),
        ({"rdzv_backend": "static"}, {"rdzv_backend": "c10d", "rdzv_endpoint": ""}),
        (
            {"rdzv_backend": "static", "rdzv_endpoint": "host:1"},
            {"rdzv_backend": "static", "rdzv_endpoint": "host:1"},
        ),
        (
            {
                "min_nodes": 3,
                "max_nodes": 3,
                "rdzv_backend": "static",
                "rdzv_endpoint": "host:1",
                "rdzv_configs": {"rank": "2", "timeout": 900},
            },
            {"min_nodes": 3, "max_nodes": 3, "node_rank": 2, "rdzv_endpoint": "host:1"},
        ),
        ({"nproc_per_node": "auto"}, {"nproc_per_node": "auto"}),
        (
            {"restart_on": "1,3-4,SIGKILL", "give_up_on": [2, 9]},
            {"restart_on": (1, 3, 4, 137), "give_up_on": (2, 9)},
        ),
        ({"events": Path("e"), "metrics": 9400}, {"events": "e", "metrics": "9400"}),
        ({"run_id": "job", "role": "trainer"}, {"rdzv_id": "job", "role": "trainer"}),
        ({"wrap": "0:nsys profile"}, {"wraps": ("0:nsys profile",)}),
        ({"wrap": ["0:nice", "1:nice"]}, {"wraps": ("0:nice", "1:nice")}),
        ({"shutdown_timeout": 5}, {"grace_s": 5.0}),
        ({"shutdown_timeout": 0.5}, {"grace_s": 0.5}),
        ({"grace_s": 0.5}, {"grace_s": 0.5}),
        ({"signals_to_handle": "SIGTERM, usr1,"}, {"stop_signals": (15, 10), "forward_signals": ()}),
        ({"signals_to_handle": "SIGFOO,TERM"}, {"stop_signals": (15,)}),
        ({"signals_to_handle": "34,15,TERM"}, {"stop_signals": (34, 15), "forward_signals": ()}),
        ({"numa_options": NumaOptions()}, {"numa_binding": "node"}),
        ({"numa_options": "socket"}, {"numa_binding": "socket"}),
        (
            {"virtual_local_rank": True, "logs_specs": "mine"},
            {"virtual_local_rank": True, "logs_specs": "mine"},
        ),
    ],
)
def test_fields_become_a_request(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = request(**fields)
    assert {name: wish_of(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"redirects": "0:1", "tee": 3}, {"redirects": "0:1", "tee": "3"}),
        ({"redirects": Std.ALL, "tee": {0: Std.OUT, 2: 2}}, {"redirects": "3", "tee": "0:1,2:2"}),
        ({"local_ranks_filter": {0, 2}}, {"local_ranks": "0,2"}),
        ({"redirects": {"rank8-15": Std.ERR, 0: 3}}, {"redirects": "rank8-15:2,0:3"}),
        ({"ranks_filter": [0, 8]}, {"global_ranks": "0,8"}),
        ({"ranks_filter": "0,8-15"}, {"global_ranks": "0,8-15"}),
        (
            {"duplicate_stdout_filters": ["a,b", "c"], "duplicate_stderr_filters": []},
            {"stdout_words": "a,,b,c", "stderr_words": ""},
        ),
        ({"log_dir": "logs"}, {"log_dir": "logs", "stdin": "none", "partial_after_s": 1.0}),
        ({"log_dir": Path("logs")}, {"log_dir": "logs"}),
        ({"partial_after_s": None}, {"partial_after_s": None}),
        ({"partial_after_s": 0}, {"partial_after_s": 0}),
    ],
)
def test_fields_become_a_request_for_output(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    found = request(**fields).output
    assert {name: getattr(found, name) for name in expected} == expected


def test_the_grace_comes_from_the_environment_if_no_field_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.15: resolved when the config is made, so that programs can read it back."""
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    first = config_of()
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "7")
    assert (first.shutdown_timeout, config_of().shutdown_timeout) == (30, 7)
    assert config_of(shutdown_timeout=2).shutdown_timeout == 2
    assert [wish_of(request(**one), "grace_s") for one in ({}, {"shutdown_timeout": 2})] == [7.0, 2.0]
    copy = dataclasses.replace(config_of(), grace_s=0.5)
    assert wish_of(to_request(copy, Program("call", "python")), "grace_s") == 0.5


def test_the_timeout_of_a_meeting_can_be_read_back() -> None:
    """As in torch 2.15; the dict that was given stays the caller's."""
    given = {"rank": 0}
    assert config_of(rdzv_configs=given).rdzv_configs == {"rank": 0, "timeout": 900}
    assert config_of(rdzv_timeout=60).rdzv_configs == {"timeout": 60}
    assert config_of(rdzv_configs={"timeout": 5}).rdzv_configs == {"timeout": 5}
    assert given == {"rank": 0}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "fields, message",
    [
        ({"min_nodes": 2}, "min_nodes 2, max_nodes 1"),
        ({"min_nodes": 0}, "min_nodes 0"),
        ({"max_restarts": -1}, "max_restarts -1"),
        ({"start_method": "thread"}, "start_method 'thread'"),
        ({"numa_options": "nodes"}, "numa_options 'nodes': expected one of node, socket"),
        ({"fork_server_per": "numa"}, "fork_server_per 'numa' is gone"),
        ({"import_throttle": 2}, "import_throttle 2 is gone"),
        ({"prewarm": True}, "prewarm True is gone"),
        ({"warm_for_s": -1}, "warm_for_s -1"),
        ({"warm_memory": 0}, "warm_memory 0"),
        ({"debug": "first"}, "debug 'first'"),
        ({"debug": [2, -1]}, "debug [2, -1]"),
        ({"debug_port": 0}, "debug_port 0"),
        ({"spares": -1}, "spares -1: it must be 0 to 65536"),
        ({"restart_on": "1,x"}, "restart_on: expected a list such as 1,3-5,signal,SIGKILL, or any: '1,x'"),
        ({"give_up_on": [256]}, "give_up_on: expected a list"),
        ({"shutdown_timeout": -1}, "shutdown_timeout -1"),
        ({"grace_s": float("nan")}, "grace_s nan"),
        ({"grace_s": 1.0, "shutdown_timeout": 1}, "give one of them"),
        ({"signals_to_handle": "KILL"}, "signals_to_handle 'KILL': SIGKILL cannot be taken"),
        ({"signals_to_handle": "SIGTERM,SIGSEGV"}, "'SIGTERM,SIGSEGV': SIGSEGV cannot be taken"),
        ({"signals_to_handle": "TSTP"}, "SIGTSTP cannot be taken"),
        ({"signals_to_handle": "34,40"}, "Python has no name for 40"),
        ({"max_nodes": "2"}, "max_nodes '2': expected int"),
        ({"max_nodes": 2.5}, "max_nodes 2.5: expected int"),
        ({"grace_s": "5"}, "grace_s '5': expected float | None"),
        ({"shutdown_timeout": "5"}, "shutdown_timeout '5': expected float | None"),
        ({"role": 3}, "role 3: expected str"),
        ({"run_id": Path("a")}, "run_id PosixPath('a'): expected str | None"),
        ({"log_dir": 3}, "log_dir 3: expected str | os.PathLike[str] | None"),
        ({"log_dir": b"logs"}, "log_dir b'logs': expected str | os.PathLike[str] | None"),
        ({"events": ["f"]}, "events ['f']: expected str | os.PathLike[str] | None"),
        ({"redirects": [1]}, "redirects [1]: expected str | int | Mapping[int, int] | Mapping[str, int]"),
        ({"rdzv_configs": None}, "rdzv_configs None: expected dict[str, Any]"),
        ({"duplicate_stdout_filters": "a"}, "duplicate_stdout_filters 'a': expected list[str] | None"),
        ({"preload": 3}, "preload 3: expected str | Collection[str] | None"),
        ({"debug_wait": "yes"}, "debug_wait 'yes': expected bool"),
        ({"env": ["A"]}, "env ['A']: expected Mapping[str, str]"),
        ({"env": {"A": 1}}, "env['A']: expected Mapping[str, str]"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_when_the_config_is_made(
    fields: dict[str, Any], message: str
) -> None:
    """The error is a ValueError, as torch's is for a negative timeout."""
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        config_of(**fields)
    assert isinstance(caught.value, OptionError)
    assert_one_line(str(caught.value))


def test_a_type_is_checked_again_at_the_launch() -> None:
    config = config_of()
    config.max_restarts = "3"  # type: ignore[assignment]  # it is wrong
    with pytest.raises(OptionError, match=r"^max_restarts '3': expected int$"):
        to_request(config, Program("call", "python", name="train"))


def test_a_config_for_nodes_that_find_each_other_can_be_made_and_looked_into() -> None:
    assert config_of(max_nodes=4, rdzv_backend="etcd").max_nodes == 4
    made = request(
        max_nodes=4,
        run_id="job",
        rdzv_backend="etcd-v2",
        rdzv_endpoint="h:2379",
        rdzv_configs={"join_timeout": 5, "timeout": 900},
    )
    assert (made.resources.min_nodes, made.resources.max_nodes) == (1, 4)
    meeting = made.meeting
    assert (meeting.backend, meeting.endpoint, meeting.settings) == ("etcd-v2", "h:2379", "join_timeout=5")


@pytest.mark.parametrize(
    "fields, start",
    [
        ({}, StartRequest(source="/me/code.py")),
        ({"start_method": "fork"}, StartRequest("fork", source="/me/code.py")),
        ({"start_method": "forkserver"}, StartRequest("forkserver", source="/me/code.py")),
        (
            {"start_method": "forkserver", "preload": ["a", "b.c"]},
            StartRequest("forkserver", ("a", "b.c"), "/me/code.py"),
        ),
        ({"preload": "a,b"}, StartRequest(preload=("a", "b"), source="/me/code.py")),
        (
            {"start_method": "warm", "warm_for_s": 5.0, "warm_memory": 1 << 30},
            StartRequest("warm", source="/me/code.py", warm_for_s=5.0, warm_memory=1 << 30),
        ),
    ],
)
def test_how_workers_are_to_come_to_be(fields: dict[str, Any], start: StartRequest) -> None:
    program = Program("call", "python", name="train")
    assert to_request(config_of(**fields), program, "/me/code.py").start == start


@pytest.mark.parametrize(
    "fields, debug",
    [
        ({}, DebugRequest()),
        ({"debug": "all"}, DebugRequest("all")),
        ({"debug": "0,2-3", "debug_port": 7000}, DebugRequest("0,2-3", 7000)),
        ({"debug": [0, 2], "debug_wait": True}, DebugRequest("0,2", waits=True)),
        ({"debug": "1", "debug_address": "0.0.0.0"}, DebugRequest("1", address="0.0.0.0")),
    ],
)
def test_which_workers_are_to_be_debugged(fields: dict[str, Any], debug: DebugRequest) -> None:
    assert request(**fields).debug == debug


def test_a_program_is_not_debugged() -> None:
    with pytest.raises(UnsupportedError, match="debug '1': train is a program"):
        to_request(config_of(debug="1"), Program("program", "train", name="train"))


def test_the_imports_of_a_function_are_those_of_its_file() -> None:
    assert source_of(config_of) == __file__
    assert source_of(functools.partial(config_of, nproc_per_node=3)) == __file__
    assert source_of(len) == ""
    assert source_of("train.py") == ""


def test_jobs_without_a_name_get_different_ones() -> None:
    assert wish_of(request(), "rdzv_id") != wish_of(request(), "rdzv_id")


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "kind, fields, message",
    [
        (OptionError, {"max_nodes": 4}, "rdzv_backend='c10d'"),
        (OptionError, {"min_nodes": 2, "max_nodes": 2}, "rdzv_endpoint is missing"),
        (
            OptionError,
            {"min_nodes": 2, "max_nodes": 2, "rdzv_endpoint": "a:1"},
            "rdzv_configs['rank'] None: expected this node's rank, 0 to 1",
        ),
        (
            OptionError,
            {
                "min_nodes": 2,
                "max_nodes": 2,
                "rdzv_endpoint": "a:1",
                "spares": 1,
                "rdzv_configs": {"rank": 3},
            },
            "rdzv_configs['rank'] 3: expected this node's rank, 0 to 2",
        ),
        (OptionError, {"spares": 1}, "spares 1: only a job of several nodes can have spares"),
        (UnsupportedError, {"logs_specs": object()}, "use log_dir, redirects, tee"),
    ],
)
def test_what_makes_no_sense_together_is_one_line(
    kind: type[UsageError], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        request(rdzv_backend="static", **fields)
    assert_one_line(str(caught.value))


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("text", ["soon", "-1", "1.5"])
def test_a_grace_of_the_environment_that_is_no_number_is_one_line(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    with pytest.raises(OptionError, match=f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}"):
        config_of()


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="no_such_field"):
        launch(abs, 1, no_such_field=1)


class Callable:
    def __call__(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "entrypoint, name", [(abs, "abs"), (functools.partial(abs, 1), "abs"), (Callable(), "Callable")]
)
def test_what_is_called_has_a_name(entrypoint: object, name: str) -> None:
    assert entrypoint_name(entrypoint) == name


def test_signals_of_the_program_stay_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handled, ignored (nohup) and default: only the last one is taken, and given back."""
    heard = []
    own = [
        signal.signal(signal.SIGUSR1, lambda *_: heard.append(1)),
        signal.signal(signal.SIGHUP, signal.SIG_IGN),
    ]
    own.append(signal.signal(signal.SIGUSR2, signal.SIG_DFL))
    try:
        with HandledSignals([signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2]):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(SignalException) as caught:
                signal.raise_signal(signal.SIGUSR2)
        assert (heard, caught.value.sigval, caught.value.code) == ([1], signal.SIGUSR2, 128 + signal.SIGUSR2)
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in zip((signal.SIGUSR1, signal.SIGHUP, signal.SIGUSR2), own, strict=True):
            signal.signal(number, handler)


def test_other_threads_take_no_signal() -> None:
    found = []

    def run() -> None:
        with HandledSignals([signal.SIGUSR2]):
            found.append(signal.getsignal(signal.SIGUSR2))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_a_signal_exception_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(SignalException(signal.SIGTERM)))
    assert (copy.sigval, copy.code, str(copy)) == (signal.SIGTERM, 143, "SIGTERM ended the job")


def test_nothing_starts_while_the_main_program_is_imported_by_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from multiprocessing import process

    monkeypatch.setattr(process.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(EntrypointError, match="if __name__ == '__main__':"):
        refuse_while_importing()


class Cloud:
    @staticmethod
    def dump(value: object, file: Any) -> None:
        pickle.dump(("by value", str(value)), file)


@pytest.mark.parametrize(
    "value, by_value, expected",
    [(1, False, 1), (1, True, ("by value", "1")), ([1, sys._getframe], False, [1, sys._getframe])],
)
def test_cloudpickle_is_used_where_it_has_to_be(
    value: object, expected: object, *, by_value: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_worker, "cloudpickle", lambda: Cloud)
    file = io.BytesIO(b"head")
    file.seek(4)
    _worker.dump(value, file, by_value=by_value)
    file.seek(4)
    assert pickle.load(file) == expected


def test_what_pickle_began_is_overwritten_by_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_worker, "cloudpickle", lambda: Cloud)
    file = io.BytesIO()
    _worker.dump([b"x" * 200_000, threading.Lock()], file)
    file.seek(0)
    assert pickle.load(file)[0] == "by value"
    assert file.read() == b""


def record(error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    _worker._record(error)
    return json.loads(path.read_text())["message"]


def test_a_record_has_the_shape_of_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(KeyError("ä\n"), tmp_path / "error.json", monkeypatch)
    assert found["message"] == "KeyError: 'ä\\n'"
    assert set(found["extraInfo"]) == {"py_callstack", "timestamp"}
    assert found["extraInfo"]["timestamp"].isdecimal()
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


class Mute(Exception):  # noqa: N818  a class of a user
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_without_a_text_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(Mute(), tmp_path / "error.json", monkeypatch)
    assert found["message"] == "Mute: <its text cannot be shown>"


def test_a_record_that_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": "mine"}')
    assert record(ValueError("later"), path, monkeypatch) == "mine"


def test_a_record_without_a_place_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    _worker._record(ValueError())
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    _worker._record(ValueError())
    assert list(tmp_path.iterdir()) == []


def test_the_launching_program_imports_no_tensor_library_and_the_worker_nothing_of_ours() -> None:
    names = imports_of("import dsl.functions.launcher")
    assert names & {"torch", "psutil", "pynvml", "numpy", "logging", "json", "subprocess"} == set()
    worker = imports_of(f"import runpy; runpy.run_path({_worker.__file__!r}, run_name='other')")
    assert not [name for name in worker if name.startswith("dsl")]


def test_an_empty_template_is_a_wish_for_no_prefix_whatever_the_environment_asks_for() -> None:
    name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    assert request(log_line_prefix_template="", env={"A": "b"}).env == (("A", "b"), (name, ""))
    assert request(env={"A": "b"}).env == (("A", "b"),)


def test_a_node_that_was_stopped_for_a_spare_has_no_results_though_its_workers_ended_with_0() -> None:
    exits = [an_exit(0, code=0), an_exit(1, code=0, by_us=True)]
    nobody: Any = None  # is asked for results
    assert conclude(nobody, Outcome(0, an_attempt(a_plan(2), exits, end())), nobody) == {}
