"""Where the failure summary goes beyond torchrun's; its shape is held by the golden of torch."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.failures import AT_NS, a_failure

from dsl._record import replace
from dsl.model.judgement import ErrorRecord, Failure
from dsl.report.failures import MAX_OTHERS, MAX_TEXT, addition, format_summary

pytestmark = [pytest.mark.guarantee("G3"), pytest.mark.usefixtures("in_utc")]

SECOND = 10**9
MS = 10**6
HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


def recorded(traceback: str, *, is_text: bool = False, time_s: float | None = None) -> dict[str, Any]:
    texts = (traceback, "") if is_text else ("", traceback)
    return {"recorded": ErrorRecord(*texts, time_s, None, is_text), "error_file": "/run/error.json"}


def times_of(*failures: Failure) -> list[str]:
    """The times that are shown, in the order of the failures."""
    text = format_summary("t", failures, failures[-1])
    return re.findall(r"^  time      : (.+)$", text, re.MULTILINE)


def test_the_whole_of_it() -> None:
    """What log parsers look for, and the evidence below what torch says of the cause."""
    victim = a_failure(1, time_ns=AT_NS + SECOND, **recorded("Traceback:\n  x\nE: y\n"))
    cause = a_failure(0, exitcode=-9, reason="killed by SIGKILL (signal 9)")
    assert format_summary("train.py", [cause, victim], cause, ["memory ran out", "peak 3 GiB"]) == (
        """
====================================================
train.py FAILED
----------------------------------------------------
Failures:
[1]:
  time      : 2026-01-02_03:04:06
  host      : node7
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 101)$
  error_file: /run/error.json
  traceback : Traceback:
    x
  E: y
$$
----------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-02_03:04:05
  host      : node7
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 100)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 100
  memory ran out
  peak 3 GiB
====================================================""".replace("$", " ")
    )


def test_bytes_that_are_no_text_are_shown() -> None:
    cause = a_failure(0)
    for name, shown in ((b"/dir/\xff\xe9.py", r"/dir/\xff\xe9.py"), ("é \u200b\x07.py".encode(), "é .py")):
        title = format_summary(os.fsdecode(name), [cause], cause).splitlines()[2]
        assert title == f"{shown} FAILED"


def test_evidence_stands_in_place_of_the_hint_and_belongs_to_the_cause_alone() -> None:
    cause, other = a_failure(3), a_failure(4)
    text = format_summary("t", [cause, other], cause, ["ValueError: bad batch\n(t.py:3 in step)"])
    assert text.count("ValueError: bad batch") == 1
    assert "  traceback : ValueError: bad batch\n  (t.py:3 in step)\n=" in text
    assert text.count(HINT) == 1


@pytest.mark.parametrize(
    "fields, account",
    [
        ({}, HINT),
        ({"reason": ""}, HINT),
        ({"exitcode": 255, "reason": "its exit status was lost"}, f"{HINT}\n  its exit status was lost"),
        (
            {"pid": 0, "exitcode": 127, "reason": "could not be executed: x: No such file or directory"},
            "could not be executed: x: No such file or directory",
        ),
        (
            {"exitcode": -11, "reason": "killed by SIGSEGV (signal 11, core dumped)"},
            "Signal 11 (SIGSEGV) received by PID 100",
        ),
        (recorded("first\nsecond"), "first\n  second"),
        (recorded("first\nsecond", is_text=True), "first\nsecond"),
        (recorded("first\r\nsecond\r\n"), "first\n  second\n  "),
    ],
)
def test_the_account_of_a_failure(fields: dict[str, Any], account: str) -> None:
    failure = a_failure(**fields)
    assert f"\n  traceback : {account}\n===" in format_summary("t", [failure], failure)


@pytest.mark.parametrize(
    "handler, account",
    [
        (object, "Signal 9 (SIGKILL) received by PID 4"),  # torch before 2.15
        (
            lambda: SimpleNamespace(
                maybe_enrich_signal_failure_message=lambda text, path: f"{text} at {path}"
            ),
            "Signal 9 (SIGKILL) received by PID 4 at <N/A>",
        ),
        (
            lambda: SimpleNamespace(maybe_enrich_signal_failure_message=lambda _text, _path: None),
            "Signal 9 (SIGKILL) received by PID 4",
        ),
    ],
)
def test_a_handler_of_the_site_may_say_more_of_a_death_by_a_signal(
    handler: object, account: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = SimpleNamespace(get_error_handler=handler)
    monkeypatch.setitem(sys.modules, "torch.distributed.elastic.multiprocessing.errors", errors)
    killed = a_failure(exitcode=-9, pid=4)
    assert f"traceback : {account}\n" in format_summary("t.py", [killed], killed)
    failed = a_failure(exitcode=9, pid=4)
    assert " at <N/A>" not in format_summary("t.py", [failed], failed)


def test_failures_in_one_second_show_its_fraction() -> None:
    one, two = a_failure(0, time_ns=AT_NS + 1 * MS), a_failure(1, time_ns=AT_NS + 2 * MS)
    later = a_failure(2, time_ns=AT_NS + 3 * SECOND + 5 * MS)
    assert times_of(one, two) == ["2026-01-02_03:04:05.001000", "2026-01-02_03:04:05.002000"]
    assert times_of(one, two, later)[-1] == "2026-01-02_03:04:08"
    assert times_of(one) == ["2026-01-02_03:04:05"]


def test_the_fraction_of_a_record_is_that_of_its_file_if_it_fits() -> None:
    at_s = AT_NS // SECOND
    plain = a_failure(9)
    cases = {
        AT_NS + 250 * MS: "2026-01-02_03:04:05.250000",
        AT_NS + 1100 * MS: "2026-01-02_03:04:06.100000",
        AT_NS + 60 * SECOND: "2026-01-02_03:04:05",
        AT_NS - SECOND: "2026-01-02_03:04:05",
        None: "2026-01-02_03:04:05",
    }
    for recorded_ns, shown in cases.items():
        failure = a_failure(
            0, time_ns=AT_NS + 7 * MS, recorded_ns=recorded_ns, **recorded("E", time_s=float(at_s))
        )
        assert times_of(failure, plain)[0] == shown


def test_a_record_without_a_time_has_that_of_its_file_else_of_the_death() -> None:
    dated = a_failure(0, time_ns=AT_NS + SECOND, recorded_ns=AT_NS, **recorded("E"))
    undated = a_failure(0, time_ns=AT_NS + SECOND, **recorded("E"))
    assert times_of(dated) == ["2026-01-02_03:04:05"]
    assert times_of(undated) == ["2026-01-02_03:04:06"]


def test_of_many_failures_the_cause_and_the_first_others_are_shown_and_the_rest_counted() -> None:
    failures = [a_failure(rank, time_ns=AT_NS + rank * SECOND) for rank in range(512)]
    text = format_summary("t", failures, failures[300])
    shown = [int(rank) for rank in re.findall(r"^  rank      : (\d+) ", text, re.MULTILINE)]
    assert shown == [*range(MAX_OTHERS), 300]
    assert re.findall(r"^\[(\d+)\]:$", text, re.MULTILINE)[-1] == "300"
    assert "\n  ... and 496 more: ranks 15-299,301-511\n---" in text


@pytest.mark.parametrize("count", [1, 2, MAX_OTHERS + 1])
def test_few_failures_are_all_shown(count: int) -> None:
    failures = [a_failure(rank) for rank in range(count)]
    text = format_summary("t", failures, failures[0])
    assert len(re.findall(r"^\[\d+\]:$", text, re.MULTILINE)) == count
    assert " more: " not in text
    assert ("<NO_OTHER_FAILURES>" in text) == (count == 1)


def test_one_failure_too_many_is_named() -> None:
    failures = [a_failure(rank) for rank in range(MAX_OTHERS + 2)]
    assert "  ... and 1 more: rank 16\n" in format_summary("t", failures, failures[0])


def test_a_very_long_traceback_loses_its_middle() -> None:
    failure = a_failure(**recorded("begin\n" + "x" * 5 * MAX_TEXT + "\nE: end\n"))
    text = format_summary("t", [failure], failure)
    assert len(text) < MAX_TEXT + 1000
    assert "traceback : begin\n" in text
    assert "\n  E: end\n" in text
    left_out = 4 * MAX_TEXT + len("begin\n\nE: end\n")
    assert f"\n  ... {left_out} characters left out, see the error file ...\n" in text


def test_a_cause_that_is_none_of_the_failures_is_refused() -> None:
    with pytest.raises(ValueError, match="not in"):
        format_summary("t", [a_failure(0)], a_failure(1))


@given(
    name=st.text(),
    host=st.text(),
    path=st.text(),
    traceback=st.text(),
    evidence=st.text(),
    is_text=st.booleans(),
)
def test_no_text_of_a_stranger_reaches_the_terminal_raw(
    name: str, host: str, path: str, traceback: str, evidence: str, *, is_text: bool
) -> None:
    fields = {**recorded(traceback, is_text=is_text), "error_file": path, "host": host}
    failure = a_failure(**fields)
    text = format_summary(name, [failure], failure, [evidence])
    odd = {char for char in text if unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"}}
    assert odd <= {"\n", "\t"}
    text.encode()


@given(st.text(st.sampled_from("ab \n\r\t\x1b[31m\0=-")))
def test_a_traceback_keeps_its_lines_and_each_is_indented(traceback: str) -> None:
    failure = a_failure(**recorded("E" + traceback))
    text = format_summary("t", [failure], failure)
    account = text.split("  traceback : ")[1].rpartition("\n")[0].split("\n")
    assert len(account) == traceback.count("\n") + 1
    assert all(line.startswith("  ") for line in account[1:])


@pytest.mark.guarantee("G3")
def test_below_a_verdict_it_stands_only_where_it_adds_something_and_repeats_no_traceback() -> None:
    """And nobody is told how to have the traceback that stands above."""
    told = "ValueError: bad batch (t.py:3 in step)"
    plain, other = a_failure(0), a_failure(1)
    same = a_failure(0, **recorded("Traceback:\nValueError: bad batch"))
    same = replace(same, recorded=replace(same.recorded, message="ValueError: bad batch"))
    assert addition("t", [plain, other], plain, told) == ""
    assert addition("t", [plain], plain, "") == ""
    assert addition("t", [plain, other], plain, "") == format_summary("t", [plain, other], plain)
    text = addition("t", [same, other], same, told)
    assert f"  traceback : {told}\n=" in text
    assert "  traceback : <N/A>\n" in text
    assert "Traceback:" not in text
    assert HINT not in text
    assert "Traceback:" in addition("t", [same, other], same, "KeyError: 'x'")
