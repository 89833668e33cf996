"""The failure summary and the typed failures against those of torch 2.15 (golden/torch_summary.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.contract.golden_file import cases

from dsl.functions.errors import ChildFailedError
from dsl.model.judgement import Failure
from dsl.report.failures import format_summary, load_error_file, root_cause

pytestmark = pytest.mark.usefixtures("in_utc")

HOST = "node7.example"
CASES = cases("torch_summary")
FILES = cases("torch_summary", "files")
SECOND = "2026-01-02_03:04:05"
HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"

# Texts of torch, and ours in their place. The docstring of dsl.report.failures explains each.
DIFFERENCES: dict[str, list[tuple[str, str]]] = {
    "plain text without a time": [("1970-01-01_00:00:00", "2026-01-02_03:04:05")],
    "empty traceback": [("traceback : \n", "traceback : E\n")],
    "neither traceback nor message": [
        ("traceback : <N/A>", f"traceback : {HINT}"),
        ("=" * 36, "=" * 60),
        ("-" * 36, "-" * 60),
    ],
    # torch puts the cause, which is the first here, last.
    "two in one second": [(f"{SECOND}\n", f"{SECOND}.001000\n"), (f"{SECOND}\n", f"{SECOND}.000000\n")],
    "recorded: exception with control characters": [
        ("\x00", ""),
        ("\x1b[31m", ""),
        ("\x1b[0m", ""),
        ("\r\n", "\n"),
    ],
}


def failures_of(workers: list[dict[str, Any]]) -> list[Failure]:
    """The failed workers of a case, whose error files lie in the working directory."""
    found: list[Failure] = []
    by_time = sorted(workers, key=lambda worker: worker["noticed_s"])
    for worker in workers:
        path = Path(f"attempt_0/{worker['local_rank']}/error.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        if worker["content"] is not None:
            path.write_text(worker["content"], encoding="utf-8")
        recorded, _ = load_error_file(str(path)) or (None, 0)
        time_s = recorded.time_s if recorded is not None else None
        found.append(
            Failure(
                rank=worker["rank"],
                local_rank=worker["local_rank"],
                host=HOST,
                pid=worker["pid"],
                exitcode=worker["exitcode"],
                time_ns=worker["noticed_s"] * 10**9 + len(found) * 10**6,
                order=by_time.index(worker),
                error_file=str(path) if recorded is not None else None,
                recorded=recorded,
                recorded_ns=None if time_s is None else int(time_s) * 10**9,
                reason=f"exit code {worker['exitcode']}",
            )
        )
    return found


def expected(label: str, text: str) -> str:
    """torch's text with our differences applied."""
    for theirs, ours in DIFFERENCES.get(label, ()):
        assert theirs in text, f"torch does not say {theirs!r} any more"
        count = 1 if theirs == f"{SECOND}\n" else -1
        text = text.replace(theirs, ours, count)
    return text


@pytest.mark.guarantee("G3")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_failed_job_has_the_summary_root_cause_and_typed_failures_of_torch(
    case: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What people and their log parsers look for stands where they look for it, byte by byte."""
    monkeypatch.chdir(tmp_path)
    label, name, workers, answer = case
    failures = failures_of(workers)
    assert root_cause(failures).rank == answer["first"], "where whole seconds tell it"
    root = next(failure for failure in failures if failure.rank == answer["first"])
    text = format_summary(name, failures, root)
    assert text == expected(label, answer["text"])
    error = ChildFailedError.of(name, failures)
    assert error.name == name
    assert str(error) == error.format_msg() == text
    if answer["other_rules"] is not None:
        assert error.format_msg("#", "+") == expected(label, answer["other_rules"])
    rank, first = error.get_first_failure()
    assert (rank, first.failure.rank) == (answer["first"], answer["first"])

    assert list(error.failures) == [worker["rank"] for worker in workers]
    for worker, ours, theirs in zip(workers, error.failures.values(), answer["failures"], strict=True):
        assert [ours.local_rank, ours.pid, ours.exitcode] == [
            worker[name] for name in ("local_rank", "pid", "exitcode")
        ]
        assert ours.signal_name() == theirs["signal_name"]
        assert ours.error_file == theirs["error_file"]
        if label != "plain text without a time":
            assert ours.timestamp == theirs["timestamp"]
            assert ours.timestamp_isoformat() == theirs["isoformat"]
        if isinstance(theirs["message"], str) or label.startswith("recorded"):
            assert ours.message == theirs["message"]
        if label.startswith("recorded") and worker["content"] is not None:
            assert ours.error_file_data == theirs["error_file_data"]


@pytest.mark.parametrize("name, content", FILES, ids=lambda value: str(value)[:30])
def test_what_torch_records_is_read_whole(name: str, content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    if content is None:
        assert load_error_file(str(path)) is None
        return
    path.write_text(content, encoding="utf-8")
    data = json.loads(content)["message"]
    record, _ = load_error_file(str(path)) or (None, 0)
    assert record is not None
    assert record.message == data["message"]
    assert record.traceback == data["extraInfo"]["py_callstack"]
    assert record.time_s == float(data["extraInfo"]["timestamp"])
    assert record.exit_code == data.get("errorCode")
    assert not record.is_text


def test_the_recorded_files_show_both_a_traceback_and_the_code_of_a_worker_below() -> None:
    contents = [json.loads(content)["message"] for _, content in FILES if content]
    assert any("Traceback (most recent call last):" in data["extraInfo"]["py_callstack"] for data in contents)
    assert [data["errorCode"] for data in contents if "errorCode" in data] == [-11]
