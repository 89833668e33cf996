"""Functions and programs launched from Python: results, typed failures, and nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.kit import processes
from tests.kit.waiting import until
from tests.support import functions
from tests.support.command import ran
from tests.support.jobs import PROGRAMS, install_plug_in
from tests.support.places import free_port
from tests.support.recorded import only, recorded

from dsl.errors import DslError, ProgramNotExecutableError, ProgramNotFoundError, RendezvousError
from dsl.functions.launcher import (
    ChildFailedError,
    EntrypointError,
    LaunchConfig,
    ResultError,
    elastic_launch,
    launch,
)

pytestmark = pytest.mark.usefixtures("temporary", "without_cloudpickle")


def config(nproc_per_node: int = 2, **fields: Any) -> LaunchConfig:
    return LaunchConfig(1, 1, nproc_per_node, **{"max_restarts": 0, **fields})


def fails(entrypoint: Any, *args: object, nproc_per_node: int = 2, **fields: Any) -> ChildFailedError:
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(nproc_per_node, **fields), entrypoint)(*args)
    return caught.value


def refuses(kind: type[DslError], entrypoint: Any, *args: object) -> str:
    with pytest.raises(kind) as caught:
        launch(entrypoint, *args)
    text = str(caught.value)
    assert "\n" not in text
    return text


# Results


def test_results_come_by_rank() -> None:
    assert elastic_launch(config(3), functions.add)(10, 20) == {0: 30, 1: 31, 2: 32}
    assert launch(functions.add, 1, 2, nproc_per_node=2) == [3, 4]


def test_a_worker_knows_its_place_and_stands_where_its_parent_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = elastic_launch(config(role="trainer", env={"EXTRA": "ä b"}), functions.describe)(
        "${local_rank}", 7
    )
    assert sorted(seen) == [0, 1]
    for rank, place in seen.items():
        assert place["args"] == (str(rank), 7)
        assert (place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (place["GROUP_RANK"], place["ROLE_NAME"], place["EXTRA"]) == ("0", "trainer", "ä b")
        assert place["cwd"] == str(tmp_path)
        assert (place["argv"], place["path"]) == (sys.argv, sys.path)
        assert place["threads"] is None


def test_a_directory_that_was_removed_does_not_keep_a_function_from_being_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert launch(functions.add, 1, 2, nproc_per_node=2) == [3, 4]


def test_a_program_has_no_result_but_its_own_arguments(tmp_path: Path) -> None:
    code = "import json, sys; json.dump(sys.argv, open(sys.argv[1], 'w'))"
    words = ["-S", "-c", code, f"{tmp_path}/${{local_rank}}", 7, "a b"]
    assert elastic_launch(config(), sys.executable)(*words) == {0: None, 1: None}
    for local_rank in ("0", "1"):
        path = tmp_path / local_rank
        assert json.loads(path.read_text()) == ["-c", str(path), "7", "a b"]


def test_results_and_arguments_may_be_large() -> None:
    size = 20 << 20
    results = elastic_launch(config(), functions.blob)(size)
    assert {rank: (len(data), data[-1]) for rank, data in results.items()} == {0: (size, 1), 1: (size, 2)}
    assert launch(functions.length, results[0]) == [size]


def test_arguments_and_results_are_seen_by_this_user_only(temporary: Path) -> None:
    secret = "5ecret-7-words"
    (seen,) = launch(functions.look_at_files, secret)
    assert seen["modes"] == {"call.pickle": 0o600}
    assert seen["folder"] & 0o077 == 0
    assert (seen["has_secret"], seen["shown"]) == (True, False)
    assert list(temporary.iterdir()) == []


def test_a_worker_may_launch_workers_of_its_own() -> None:
    assert launch(functions.launch_inside, 3, nproc_per_node=2) == [[3, 4, 5], [3, 4, 5]]


def test_an_exit_with_0_is_a_result_without_a_value() -> None:
    assert elastic_launch(config(), functions.exit_in)(1, 0) == {0: "done", 1: None}
    assert elastic_launch(config(), functions.exit_in)(1, None) == {0: "done", 1: None}


def test_log_files_stay_and_what_was_passed_does_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    elastic_launch(config(log_dir=str(logs), run_id="a", redirects="3", tee="0:1"), "echo")(
        "one ${local_rank}"
    )
    launch(functions.add, 1, 2, log_dir=str(logs), run_id="b", redirects={0: 3})
    (echo,) = logs.glob("a_*")
    (function,) = logs.glob("b_*")
    assert (echo / "attempt_0/1/stdout.log").read_text() == "one 1\n"
    assert sorted(path.name for path in function.rglob("*.*")) == ["stderr.log", "stdout.log"]
    assert capfd.readouterr().out == "[default_role0]:one 0\n"  # as torch writes it


# Failures


@pytest.mark.guarantee("G3")
def test_an_exception_names_its_rank_and_shows_only_the_users_frames() -> None:
    error = fails(functions.fail_in, 1, nproc_per_node=3)
    assert (error.name, list(error.failures)) == ("fail_in", [1])
    rank, failure = error.get_first_failure()
    assert (rank, failure.local_rank, failure.exitcode) == (1, 1, 1)
    message = failure.error_file_data["message"]
    assert message["message"] == "ValueError: on\npurpose"
    stack = message["extraInfo"]["py_callstack"]
    assert 'raise ValueError("on\\npurpose")' in stack
    assert "_worker.py" not in stack
    assert abs(failure.timestamp - time.time()) < 60
    assert json.loads(Path(failure.error_file).read_text()) == failure.error_file_data
    assert "rank      : 1 (local_rank: 1)" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_what_the_function_has_recorded_itself_is_kept() -> None:
    _, failure = fails(functions.record_and_raise, "its own words", nproc_per_node=1).get_first_failure()
    assert failure.message == "its own words"


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("code, exitcode", [(3, 3), ("a message", 1)])
def test_an_exit_code_is_kept(code: object, exitcode: int) -> None:
    error = fails(functions.exit_in, 1, code)
    assert error.exit_code == exitcode
    assert {rank: failure.exitcode for rank, failure in error.failures.items()} == {1: exitcode}


@pytest.mark.guarantee("G2", "G3")
def test_a_signal_death_is_told_as_one() -> None:
    error = fails(functions.kill_in, 0, signal.SIGKILL)
    _, failure = error.get_first_failure()
    assert (failure.exitcode, failure.signal_name(), error.exit_code) == (-9, "SIGKILL", 137)
    assert failure.message == f"Signal 9 (SIGKILL) received by PID {failure.pid}"


def test_the_logger_hears_what_the_others_did_when_one_failed(caplog: pytest.LogCaptureFixture) -> None:
    fails(functions.fail_in, 1, stacks_on_failure=True)
    (told,) = [line for line in caplog.messages if line.startswith("the others at that moment: ")]
    assert "rank 0 " in told


@pytest.mark.guarantee("G3")
@pytest.mark.timeout(240)  # torch is imported four times
@pytest.mark.needs_package("torch")
def test_the_error_handler_that_a_site_has_in_torch_hears_of_functions() -> None:
    done = ran([sys.executable, str(PROGRAMS / "site_handler.py")], check=True, timeout_s=200)
    heard = [line for line in done.stderr.splitlines() if line.startswith("handler: ")]
    assert heard == [
        *("handler: begin works", "handler: success"),
        *("handler: begin fails", "handler: exception bad batch"),
        "handler: begin is_killed",
    ]
    result, failed, killed = re.split(r"\n(?=\n=)", done.stdout)
    assert result == "{0: 7}"
    assert "ValueError: bad batch" in failed
    assert "GPU 3" not in failed
    assert re.search(r"traceback : Signal 9 \(SIGKILL\) received by PID \d+\nGPU 3 has .* see True", killed)
    assert "\x07" not in killed


def test_the_last_words_of_a_program_are_evidence() -> None:
    """The program knows nothing of error files."""
    error = fails(sys.executable, "-c", "raise ValueError('of a program')")
    assert "ValueError: of a program" in str(error)


def test_a_program_that_cannot_be_executed_is_found_before_the_start(tmp_path: Path, temporary: Path) -> None:
    """As torch has it: FileNotFoundError and PermissionError, and nothing is left."""
    assert "'no-such-program' is not on PATH" in refuses(ProgramNotFoundError, "no-such-program")
    (tmp_path / "plain").touch()
    said = refuses(ProgramNotExecutableError, f"{tmp_path}/plain")
    assert said == f"program '{tmp_path}/plain' is not executable, mark it with chmod +x"
    assert issubclass(ProgramNotFoundError, FileNotFoundError)
    assert issubclass(ProgramNotExecutableError, PermissionError)
    assert list(temporary.iterdir()) == []


def test_a_program_is_looked_up_on_the_path_of_the_workers(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    assert launch("mine", env={"PATH": f"{tmp_path}:/bin"}) == [None]


def test_nodes_without_a_name_for_their_job_get_one_and_are_warned(caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = {"rdzv_endpoint": "localhost:0", "rdzv_configs": {"last_call_timeout": 1}}
    made = LaunchConfig(1, 2, 1, **fields)
    assert elastic_launch(made, functions.add)(1, 2) == {0: 3}
    assert made.run_id
    (said,) = [one for one in caplog.messages if "run_id" in one]
    assert said == (
        f"the config has no run_id, {made.run_id} was made up: nodes meet only under the same one, "
        "so give it to every node"
    )


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    _, failure = fails(functions.make_lock, nproc_per_node=1).get_first_failure()
    said = failure.error_file_data["message"]
    assert said["message"].startswith("TypeError: the result cannot be sent back: TypeError: cannot pickle")
    assert said["extraInfo"]["py_callstack"].count("\n") == 1


@pytest.mark.guarantee("G8")
def test_a_result_that_is_missing_or_unreadable_is_one_line() -> None:
    text = refuses(ResultError, functions.leave_without_result)
    assert "rank 0 of leave_without_result ended with exit code 0 before" in text
    assert "RuntimeError: not here" in refuses(ResultError, functions.make_unreadable)


@pytest.mark.guarantee("G8")
def test_what_cannot_be_sent_is_one_line_that_says_how_to_mend_it(temporary: Path) -> None:
    text = refuses(EntrypointError, lambda: 1)
    assert "<lambda> cannot be sent to the workers: " in text
    assert "top level of a module, or install cloudpickle" in text
    assert "argument 2 of add cannot be sent" in refuses(EntrypointError, functions.add, 1, threading.Lock())
    assert "entrypoint None" in refuses(EntrypointError, None)
    assert list(temporary.iterdir()) == []


def test_cloudpickle_sends_what_pickle_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of a few lines: functions without a closure, by value."""
    (tmp_path / "cloudpickle.py").write_text(
        "import marshal, pickle, types\n"
        "def make(code): return types.FunctionType(marshal.loads(code), {})\n"
        "class Pickler(pickle.Pickler):\n"
        "    def reducer_override(self, value):\n"
        "        if isinstance(value, types.FunctionType) and value.__name__ == '<lambda>':\n"
        "            return make, (marshal.dumps(value.__code__),)\n"
        "        return NotImplemented\n"
        "def dump(value, file): Pickler(file, 4).dump(value)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        (double,) = launch(lambda x: lambda y: y, 1)
        assert double.__name__ == "<lambda>"
        assert launch(lambda x: x * 2, 21) == [42]
    finally:
        sys.modules.pop("cloudpickle", None)


# Restarts


@pytest.mark.guarantee("G1")
def test_the_second_attempt_starts_when_nothing_of_the_first_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon of each worker, in a session of its own and deaf to SIGTERM, is gone before."""
    results = elastic_launch(config(max_restarts=1, grace_s=0.2), functions.fail_once)(str(tmp_path))
    assert results == {0: ("1", True), 1: ("1", True)}
    assert "failed first: exit code 3" in caplog.text
    assert "starting all 2 workers again, restart 1 of 1" in caplog.text


def test_a_cleaned_temporary_directory_does_not_take_the_restarts(temporary: Path) -> None:
    """The function and its arguments are written again."""
    assert launch(functions.clean_and_fail_once, str(temporary), max_restarts=1) == [str(temporary)]
    assert list(temporary.iterdir()) == []


def test_restarts_end(temporary: Path) -> None:
    error = fails(functions.fail_in, 0, max_restarts=2)
    assert "/attempt_2/0/" in error.failures[0].error_file
    (run_dir,) = temporary.iterdir()
    files = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file())
    assert files == [f"attempt_{attempt}/0/error.json" for attempt in range(3)]


# The program that launches


def test_many_calls_in_one_process_leave_nothing(temporary: Path) -> None:
    """Successes, failures and refusals in turn: no descriptor, thread, child or file stays."""

    def call(number: int) -> None:
        if number % 3 == 0:
            assert launch(functions.add, number, 0) == [number]
        elif number % 3 == 1:
            fails(functions.exit_in, 0, 9)
        else:
            refuses(EntrypointError, functions.add, threading.Lock())

    def kept() -> tuple[int, int, list[Path]]:
        children = len(processes.children(os.getpid()))
        return len(os.listdir("/proc/self/fd")), children, list(temporary.iterdir())

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    for number in range(3):  # modules are loaded
        call(number)
    gc.collect()  # what other tests have left
    before, threads_before = kept(), threads()
    for number in range(20):
        call(number)
    assert kept() == before
    # The kernel lists a thread for a moment after it has been joined.
    assert until(lambda: threads() <= threads_before)


def test_the_caller_is_left_as_it_was() -> None:
    def state() -> list[object]:
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return [dict(os.environ), list(sys.path), os.getcwd(), handlers]

    before = state()
    launch(functions.add, 1, 2)
    assert state() == before
    code = (
        "import multiprocessing, sys; from dsl.functions.launcher import launch; launch(abs, 1);"
        "print(multiprocessing.get_start_method(allow_none=True), 'torch' in sys.modules)"
    )
    result = ran([sys.executable, "-c", code], check=True)
    assert result.stdout == "None False\n"


@pytest.mark.guarantee("G1")
def test_the_callers_own_children_are_left_to_it() -> None:
    """Neither reaped nor ended."""
    own = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(17)"])
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        fails(functions.fail_in, 0)
        assert daemon.poll() is None
        assert own.wait(20) == 17
    finally:
        daemon.kill()
        daemon.wait()


def test_two_threads_may_launch_at_once(tmp_path: Path) -> None:
    """Each group waits for the other's workers, so neither waits for the other's end."""
    (tmp_path / "notes").mkdir()
    found: dict[str, Any] = {}

    def run(name: str) -> None:
        found[name] = elastic_launch(config(run_id=name), functions.meet)(str(tmp_path / "notes"))

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
    both = dict.fromkeys(range(2), os.getpid())
    assert found == {"a": both, "b": both}


def on_static_nodes(
    counts: Sequence[int], run: Callable[[LaunchConfig], None], within_s: float = 25, **fields: Any
) -> None:
    """Call it for each node, with so many workers, side by side. Those beyond the second are spares."""
    fields = {"max_restarts": 0, "rdzv_backend": "static", "spares": len(counts) - 2, **fields}
    fields["rdzv_endpoint"] = f"127.0.0.1:{free_port()}"
    nodes = [
        LaunchConfig(2, 2, count, rdzv_configs={"rank": place}, env={"PLACE": str(place)}, **fields)
        for place, count in enumerate(counts)
    ]
    threads = [threading.Thread(target=run, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)


@pytest.mark.guarantee("G3")
def test_a_failure_on_one_static_node_ends_the_other_and_says_where_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error says it, and the logger of the node whose workers did not fail."""
    caught: list[DslError] = []

    def run(node: LaunchConfig) -> None:
        with pytest.raises(DslError) as failure:
            elastic_launch(node, functions.exit_in)(1, 4)
        caught.append(failure.value)

    on_static_nodes((1, 2), run)
    assert {type(one) for one in caught} == {ChildFailedError, RendezvousError}
    assert {one.exit_code for one in caught} == {4}
    told = next(str(one) for one in caught if isinstance(one, RendezvousError))
    host = os.uname().nodename
    assert re.match(rf"rank 1 \(local rank 0, pid \d+, host {host}\) failed first: exit code 4", told)
    assert told in caplog.messages


def test_static_nodes_have_their_own_ranks_and_numbers_of_workers() -> None:
    found: dict[int, Any] = {}
    on_static_nodes((1, 3), lambda node: found.update(elastic_launch(node, functions.describe)()))
    names = ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")
    places = {rank: " ".join(one[name] for name in names) for rank, one in found.items()}
    assert places == {0: "0 0 4", 1: "1 0 4", 2: "1 1 4", 3: "1 2 4"}


@pytest.mark.guarantee("G3")
def test_a_spare_takes_the_place_of_a_node_whose_function_fails_again() -> None:
    found: dict[str, Any] = {}

    def run(node: LaunchConfig) -> None:
        found[node.env["PLACE"]] = elastic_launch(node, functions.fail_at_place)("1")

    on_static_nodes((1, 1, 1), run, max_restarts=5)
    assert found == {"0": {0: "0"}, "1": {}, "2": {1: "2"}}


def test_a_spare_that_was_not_needed_hangs_up_though_its_program_goes_on(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    def run(node: LaunchConfig) -> None:
        found[node.env["PLACE"]] = elastic_launch(node, functions.add)(1, 2)

    file = tmp_path / "events"
    # Node 0 would wait 10 s for a spare that is still there.
    on_static_nodes((1, 1, 1), run, within_s=8, events=str(file))
    assert found == {"0": {0: 3}, "1": {1: 4}, "2": {}}
    ended = [one for one in only("JobEnded", recorded(file)) if one["code"] == 0]
    assert sorted(one["attempts"] for one in ended) == [0, 1, 1]


@pytest.mark.torch
@pytest.mark.timeout(180)
def test_workers_reduce_over_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert elastic_launch(config(3), functions.sum_over_ranks)(1.5) == {rank: [4.5, 3.0] for rank in range(3)}


ANSWERS = """
class Specs:
    stdouts = stderrs = {0: "", 1: ""}
    tee_stdouts = tee_stderrs = error_files = {}
    def __init__(self, **asked): pass
    def reify(self, envs): return self
"""


@pytest.mark.parametrize("log_dir", [None, "logs"])
def test_a_plug_in_for_logs_leaves_results_and_failures_where_they_are(
    log_dir: str | None, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves all output on the console and gives no worker an error file."""
    group, entry = "torchrun.logs_specs", "answers = dsl_test_answers:Specs"
    install_plug_in(tmp_path, "dsl_test_answers", group, entry, ANSWERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(temporary)
    fields: dict[str, Any] = {"logs_specs": "answers", "log_dir": log_dir}
    assert launch(functions.add, 1, 2, nproc_per_node=2, **fields) == [3, 4]
    error = fails(functions.fail_in, 1, **fields)
    assert set(error.failures) == {1}
    assert error.exit_code == 1
    assert [path for path in temporary.iterdir() if path.name != log_dir] == []
