"""Error files that anybody may have written, failed workers, their root cause, and the typed error."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.events import A_JOB
from tests.support.failures import AT_NS, a_failure

from dsl import Exit
from dsl.errors import DslError
from dsl.functions.errors import ChildFailedError, ProcessFailure
from dsl.model.job import Meeting, NodePlan, WorkerPlan
from dsl.model.judgement import COARSE_NS, ErrorRecord, Failure
from dsl.report.failures import MAX_BYTES, collect, load_error_file, root_cause

pytestmark = pytest.mark.guarantee("G3")

MS = 1_000_000
NOW_NS = AT_NS

STACK = 'Traceback (most recent call last):\n  File "t.py", line 1, in f\nValueError: "ü" \\ 😀\n'
WRITTEN = json.dumps(
    {
        "message": {
            "message": 'ValueError: "ü" \\ 😀',
            "extraInfo": {"py_callstack": STACK, "timestamp": "1767323045"},
            "errorCode": 3,
        }
    }
)


def a_record(message: str = "", traceback: str = "", **fields: Any) -> ErrorRecord:
    return ErrorRecord(
        **{"message": message, "traceback": traceback, "time_s": None, "exit_code": None, **fields}
    )


def parts(message: object = "E: x", stack: object = "stack", timestamp: object = "5", **more: object) -> str:
    """A file in the shape of torch's, with these values."""
    extra = {"py_callstack": stack, "timestamp": timestamp}
    return json.dumps({"message": {"message": message, "extraInfo": extra, **more}})


def read(folder: Path, content: bytes | str) -> ErrorRecord | None:
    path = folder / "error.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = load_error_file(str(path))
    return found and found[0]


@pytest.mark.parametrize(
    "content, record",
    [
        (WRITTEN, a_record('ValueError: "ü" \\ 😀', STACK, time_s=1767323045.0, exit_code=3)),
        (parts(), a_record("E: x", "stack", time_s=5.0)),
        (parts(errorCode=-11), a_record("E: x", "stack", time_s=5.0, exit_code=-11)),
        (parts(timestamp=5), a_record("E: x", "stack", time_s=5.0)),
        (parts(timestamp=5.25), a_record("E: x", "stack", time_s=5.25)),
        ('{"message": "it broke", "timestamp": 7}', a_record("it broke", time_s=7.0, is_text=True)),
        ('{"message": "it broke"}', a_record("it broke", is_text=True)),
        ('\ufeff{"message": "it broke"}', a_record("it broke", is_text=True)),
        ('{"message": ""}', a_record(is_text=True)),
        ('{"message": {"message": "E"}}', a_record("E")),
        ('{"message": {"extraInfo": {"py_callstack": "s"}}}', a_record("", "s")),
        ('{"message": {}}', a_record()),
        ('{"message": "a\\u0000b\\u001b[0mc"}', a_record("a\0b\x1b[0mc", is_text=True)),
        (b'{"message": "a\x00\x01\n"}', a_record("a\0\x01\n", is_text=True)),
        (b'{"message": "a\xff"}', a_record("a\ufffd", is_text=True)),
        ('{"message": "half \\ud83d of it"}', a_record("half ? of it", is_text=True)),
        # A value of the wrong kind costs only itself.
        (parts(message=["E"]), a_record("", "stack", time_s=5.0)),
        (parts(stack={"a": 1}), a_record("E: x", time_s=5.0)),
        (parts(timestamp="soon"), a_record("E: x", "stack")),
        (parts(timestamp=True), a_record("E: x", "stack")),
        (parts(timestamp=[5]), a_record("E: x", "stack")),
        (parts(timestamp=-1), a_record("E: x", "stack")),
        (parts(timestamp="1e300"), a_record("E: x", "stack")),
        (parts(timestamp=float("nan")), a_record("E: x", "stack")),
        (parts(timestamp="inf"), a_record("E: x", "stack")),
        (parts(timestamp="9" * 500_000), a_record("E: x", "stack")),
        (parts(errorCode="3"), a_record("E: x", "stack", time_s=5.0)),
        (parts(errorCode=True), a_record("E: x", "stack", time_s=5.0)),
        ('{"message": {"message": "E", "extraInfo": 3}}', a_record("E")),
        ('{"message": {"message": "E", "extraInfo": null}}', a_record("E")),
    ],
)
def test_what_a_file_says(content: bytes | str, record: ErrorRecord, tmp_path: Path) -> None:
    assert read(tmp_path, content) == record


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 5000,
        b"\xff\xfe\x00",
        "Traceback (most recent call last):\n",
        "null",
        "3",
        '"message"',
        '["message"]',
        "{}",
        '{"message": null}',
        '{"message": ["E"]}',
        '{"Message": "E"}',
        "[" * 900_000,
        '{"message":' * 90_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_file_without_a_record_says_nothing(content: bytes | str, tmp_path: Path) -> None:
    assert read(tmp_path, content) is None


def test_a_file_that_is_cut_off_anywhere_says_nothing(tmp_path: Path) -> None:
    assert [read(tmp_path, WRITTEN[:length]) for length in range(len(WRITTEN))] == [None] * len(WRITTEN)


def test_a_huge_file_says_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, parts(message="\n" * MAX_BYTES)) is None


def make_link(path: Path) -> None:
    target = path.with_name("target")
    target.write_text(WRITTEN)
    path.symlink_to(target)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.mkdir(),
        os.mkfifo,
        make_link,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        make_socket,
    ],
    ids=["nothing", "directory", "fifo", "link", "link to a device", "link to itself", "socket"],
)
def test_only_a_regular_file_is_read_and_nothing_is_waited_for(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "e"
    make(path)
    assert load_error_file(str(path)) is None


def test_what_a_fifo_holds_is_not_taken_for_a_file(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        path.write_text(WRITTEN)
        assert load_error_file(str(path)) is None
    finally:
        os.close(reader)


@pytest.mark.parametrize(
    "path", ["", "a\0b", "\ud83d", "x" * 5000, "/dev/null", "/dev/zero", "/proc/self/mem"]
)
def test_an_odd_path_says_nothing(path: str) -> None:
    assert load_error_file(path) is None


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    read(tmp_path, WRITTEN)
    load_error_file(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["5", "1e999", "-3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
extras = st.fixed_dictionaries({}, optional={"py_callstack": values, "timestamp": values})
messages = st.fixed_dictionaries(
    {}, optional={"message": values, "extraInfo": extras | values, "errorCode": values}
)
files = st.fixed_dictionaries({}, optional={"message": messages | values, "timestamp": values})


def assert_sound(record: ErrorRecord | None) -> None:
    if record is None:
        return
    assert type(record.message) is type(record.traceback) is str
    both = record.message + record.traceback
    assert both.encode().decode() == both
    assert record.time_s is None or 0 <= record.time_s < 2**40
    assert type(record.time_s) in {float, type(None)}
    assert record.exit_code is None or type(record.exit_code) is int
    assert ProcessFailure(a_failure(recorded=record)).timestamp_isoformat()


@given(st.binary() | st.binary().map(lambda data: b'{"message": {"message": "' + data))
def test_any_bytes_are_a_record_or_none(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    assert_sound(read(tmp_path_factory.getbasetemp(), content))


@given(values | files)
def test_any_json_is_a_record_or_none(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    assert_sound(read(tmp_path_factory.getbasetemp(), json.dumps(data)))


@given(st.text(), st.text(), st.integers(0, 2**33))
def test_what_torch_writes_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, message: str, stack: str, time_s: int
) -> None:
    record = read(tmp_path_factory.getbasetemp(), parts(message, stack, str(time_s)))
    assert record == a_record(message, stack, time_s=float(time_s))


def a_plan(*error_files: str | None) -> NodePlan:
    """A node of workers from rank 8 on, each with such an error file."""
    node = tuple(
        WorkerPlan(rank=8 + local, local_rank=local, argv=("prog",), env={}, error_file=file)
        for local, file in enumerate(error_files)
    )
    return NodePlan(A_JOB, Meeting(0, 1, (8, len(node)), "127.0.0.1", 29500), "node7", node, {})


def an_exit(worker: int, order: int, **fields: Any) -> Exit:
    """A worker that ran for a second and ended with code 1, unless told otherwise."""
    ends = {"code": 1, "signal": None, "status": 1, "core_dumped": False, "caused_by_stop": False}
    start = {"started_ns": NOW_NS - 1000 * MS, "exec_stage": None, "exec_errno": None, "exec_path": None}
    own = {"worker": worker, "order": order, "pid": 1000 + worker, "ended_ns": NOW_NS + order * MS}
    return cast("Exit", SimpleNamespace(**{**ends, **start, **own, **fields}))


def test_workers_that_failed_by_themselves_are_collected_in_the_order_of_their_deaths() -> None:
    exits = [an_exit(2, 4, code=None, signal=11, status=139, core_dumped=True)]
    exits += [an_exit(0, 2, code=None, signal=15, status=143, caused_by_stop=True)]
    exits += [an_exit(3, 0, code=0, status=0)]
    exits += [an_exit(1, 3, code=None, signal=9, status=137, caused_by_stop=True)]
    exits += [an_exit(4, 1, code=7, status=7)]
    failures = collect(a_plan(*[None] * 5), exits)
    assert failures == [
        Failure(12, 4, "node7", 1004, 7, NOW_NS + 1 * MS, 1, None, None, None, "exit code 7"),
        Failure(
            10, 2, "node7", 1002, -11, NOW_NS + 4 * MS, 4, None, None, None,
            "killed by SIGSEGV (signal 11, core dumped)",
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("errno, status, words", [(2, 127, "No such file"), (13, 126, "Permission denied")])
def test_a_worker_that_could_not_be_executed_fails_with_its_status(
    errno: int, status: int, words: str, tmp_path: Path
) -> None:
    """What lies at the place of its error file is none of its words."""
    (tmp_path / "error.json").write_text(WRITTEN)
    facts = {"code": None, "pid": 0, "started_ns": 0, "exec_stage": "exec", "exec_errno": errno}
    exit_ = an_exit(0, 0, status=status, exec_path="/x/prog", **facts)
    (failure,) = collect(a_plan(str(tmp_path / "error.json")), [exit_])
    assert (failure.exitcode, failure.pid, failure.recorded, failure.error_file) == (status, 0, None, None)
    assert failure.reason.startswith(f"could not be executed: /x/prog: {words}")


@pytest.mark.parametrize(
    "written_ms, is_believed",
    [(-500, True), (0, True), (-1000, True), (-3_600_000, False), (3_600_000, False)],
)
def test_a_record_comes_with_the_time_of_its_file_if_that_lies_in_the_life_of_its_worker(
    written_ms: int, *, is_believed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "error.json"
    path.write_text(WRITTEN)
    written_ns = NOW_NS + written_ms * MS
    os.utime(path, ns=(0, written_ns))
    (failure,) = collect(a_plan(None, str(path)), [an_exit(1, 0)])
    assert failure.error_file == str(path)
    assert failure.recorded is not None
    assert failure.recorded.traceback == STACK
    assert failure.recorded_ns == (written_ns if is_believed else None)


def test_an_error_file_that_holds_no_record_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("{")
    (failure,) = collect(a_plan(str(tmp_path / "error.json")), [an_exit(0, 0)])
    assert (failure.error_file, failure.recorded, failure.recorded_ns) == (None, None, None)


def died(rank: int, order: int, died_ms: float, raised_ms: float | None = None) -> Failure:
    """A worker that died, and before that may have left a record; times count from the same moment."""
    time_ns = NOW_NS + int(died_ms * MS)
    if raised_ms is None:
        return a_failure(rank, time_ns=time_ns, order=order)
    recorded_ns = NOW_NS + int(raised_ms * MS)
    return a_failure(rank, time_ns=time_ns, order=order, recorded=a_record("E"), recorded_ns=recorded_ns)


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize(
    "cause, failures",
    [
        (3, [died(3, 0, 0)]),
        (3, [died(0, 1, 1), died(3, 0, 0)]),
        (3, [died(3, 0, 0), died(0, 1, 1)]),
        # The kernel's order counts, whatever the clock said when we looked.
        (3, [died(0, 1, 0), died(3, 0, 0)]),
        (3, [died(0, 1, -2), died(3, 0, 0)]),
        # Both recorded, and died at once.
        (3, [died(3, 0, 0, -1), died(0, 1, 1, 0)]),
        (3, [died(0, 1, 1, -2), died(3, 0, 0, -1)]),
        # It raised first and cleaned up, while a peer fell over the broken connection.
        (3, [died(0, 0, 0), died(3, 1, 500, -40)]),
        (3, [died(0, 0, 0, -2), died(3, 1, 500, -40)]),
        (3, [died(0, 0, 0, -30), died(3, 1, 500, -40)]),
        (3, [died(0, 0, 0), died(1, 1, 90, -30), died(3, 2, 500, -40)]),
        # A record that is hardly older may only look older.
        (0, [died(0, 0, 0), died(3, 1, 5, -9)]),
        (0, [died(0, 0, 0), died(3, 1, 5, 2)]),
        # The cause left no record, a victim did, later.
        (0, [died(0, 0, 0), died(3, 1, 50, 45)]),
        # Records of one tick: the first death.
        (3, [died(3, 0, 0, -40), died(0, 1, 500, -40)]),
    ],
)
def test_the_root_cause(cause: int, failures: list[Failure]) -> None:
    """Two deaths one millisecond apart are told apart, and a victim that dies first is no cause."""
    assert root_cause(failures).rank == cause
    assert root_cause(failures[::-1]).rank == cause
    assert ChildFailedError.of("t", failures).get_first_failure()[0] == cause


@pytest.mark.parametrize("older_ns, cause", [(COARSE_NS, 0), (COARSE_NS + 1, 3)])
def test_a_record_is_clearly_older_beyond_the_coarseness_of_file_times(older_ns: int, cause: int) -> None:
    late = a_failure(3, order=1, recorded=a_record("E"), recorded_ns=NOW_NS - older_ns)
    assert root_cause([a_failure(0), late]).rank == cause


def test_without_failures_there_is_no_root_cause() -> None:
    with pytest.raises(ValueError, match="empty"):
        root_cause([])
    with pytest.raises(ValueError, match="needs a failure"):
        ChildFailedError("t", {})


def test_a_child_failed_error_is_one_of_ours_with_the_summary_as_its_text() -> None:
    failures = [a_failure(1, order=1, exitcode=-9), a_failure(0, order=2)]
    error = ChildFailedError.of("train.py", failures, ["out of memory"])
    assert isinstance(error, DslError)
    assert str(error) == error.format_msg()
    assert "train.py FAILED" in str(error)
    assert "Signal 9 (SIGKILL) received by PID 101\n  out of memory\n" in str(error)
    assert error.failures == {1: ProcessFailure(failures[0]), 0: ProcessFailure(failures[1])}


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize(
    "exitcode, code, is_stopped",
    [
        *((3, 3, False), (-9, 137, False), (-15, 143, False), (127, 127, False)),
        *((-15, 1, True), (-9, 1, True), (143, 1, True), (3, 3, True)),
    ],
)
def test_the_exit_code_of_the_error_is_that_of_its_cause_but_not_our_stop_of_it(
    exitcode: int, code: int, *, is_stopped: bool
) -> None:
    failures = [a_failure(0, order=1), a_failure(1, order=0, exitcode=exitcode, is_stopped=is_stopped)]
    assert ChildFailedError.of("t", failures).exit_code == code


def test_a_child_failed_error_survives_pickling_whole() -> None:
    recorded = a_record("E: x", "stack\n", time_s=5.0, exit_code=3)
    failure = a_failure(2, recorded=recorded, error_file="/e.json", recorded_ns=NOW_NS)
    error = ChildFailedError.of("train.py", [failure, a_failure(3)], ["seen in its output"])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert isinstance(copy, ChildFailedError)
    assert str(copy) == str(error)
    assert (copy.name, copy.failures, copy.evidence) == (error.name, error.failures, error.evidence)
    assert copy.exit_code == error.exit_code


def test_a_typed_failure_tells_what_was_recorded() -> None:
    recorded = a_record("E: x", "stack\n", time_s=5.0, exit_code=3)
    failure = ProcessFailure(a_failure(2, recorded=recorded, error_file="/e.json"))
    message = {
        "message": "E: x",
        "extraInfo": {"py_callstack": "stack\n", "timestamp": "5"},
        "errorCode": 3,
    }
    assert failure.message == message
    assert failure.error_file_data == {"message": message}
    assert (failure.error_file, failure.timestamp) == ("/e.json", 5)


@pytest.mark.parametrize(
    "exitcode, message, name",
    [
        (1, "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html", "<N/A>"),
        (-9, "Signal 9 (SIGKILL) received by PID 102", "SIGKILL"),
        (-50, "Signal 50 (<N/A>) received by PID 102", "<N/A>"),
    ],
)
def test_a_typed_failure_without_a_record_tells_what_is_known(exitcode: int, message: str, name: str) -> None:
    failure = ProcessFailure(a_failure(2, exitcode=exitcode))
    assert (failure.message, failure.signal_name()) == (message, name)
    assert (failure.error_file, failure.error_file_data["message"]) == ("<N/A>", "<NONE>")
    assert ("errorTraits" in failure.error_file_data) == (exitcode > 0)
    assert failure.timestamp == NOW_NS // 10**9
