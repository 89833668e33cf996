"""The lines of ``--events``: what each event becomes, and what never becomes one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.events import a_plan, an_attempt, an_exit, end
from tests.support.recorded import DOCS, checked, validator

from dsl._record import replace
from dsl.errors import DslError, EventsFileError
from dsl.model.job import Meeting
from dsl.model.judgement import Judgement
from dsl.model.outcome import AttemptStarted, Outcome, OutputCut, RestartFailed, Restarting, TimerExpired
from dsl.report.recorder import LONGEST_LINE, EventsFile, Recorder

PLAN = a_plan(2)
CAUSE = an_exit(1, code=3)
FAILED = an_attempt(PLAN, [CAUSE, an_exit(0, signal=15, by_us=True)], end(CAUSE))
WELL = an_attempt(PLAN, [an_exit(0, code=0), an_exit(1, code=0)], end())


class Book:
    """A recorder, and the lines that it has made."""

    def __init__(self, *, is_head: bool = False) -> None:
        self.raw: list[bytes] = []
        self.recorder = Recorder(self.raw.append, "job", "node7", is_head=is_head)

    def hear(self, *events: object) -> list[dict[str, Any]]:
        for event in events:
            self.recorder.hear(event)
        return self.lines()

    def lines(self) -> list[dict[str, Any]]:
        return [checked(line) for line in self.raw]


@pytest.mark.parametrize(
    "event, name, fields",
    [
        (AttemptStarted(PLAN), "AttemptStarted", {"ranks": [0, 1], "world_size": 2, "port": 29500}),
        (replace(FAILED, report=FAILED.report), "Report", {"code": 3, "ended": 2}),
        (Restarting(FAILED, 1), "Restarting", {"restarts": 1}),
        (
            Restarting(FAILED, 1, is_counted=False),
            "Restarting",
            {"counted": False},
        ),
        (RestartFailed(DslError("no room")), "RestartFailed", {"why": "no room"}),
        (TimerExpired(9, "step", 9), "TimerExpired", {"pid": 9, "scope": "step", "signum": 9}),
        (OutputCut(3, None), "OutputCut", {"lines": 3, "signum": None}),
        (Outcome(0, WELL), "JobEnded", {"code": 0, "attempts": 1, "verdict": []}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, (str, dict)) else "",
)
def test_what_an_event_becomes(event: object, name: str, fields: dict[str, Any]) -> None:
    (line,) = Book().hear(event)
    assert line["event"] == name
    assert {key: line[key] for key in fields} == fields


def test_an_attempt_that_ended_well_has_no_report() -> None:
    well = replace(WELL, report=None)
    assert Book().hear(well) == []


def test_the_end_names_the_first_failure_as_the_terminal_does() -> None:
    (line,) = Book().hear(Outcome(3, FAILED))
    assert line["verdict"][0].startswith("rank 1 (local rank 1, pid 1001, host node7) failed first")


def test_where_a_conductor_judges_the_end_is_its_judgement() -> None:
    book = Book()
    book.recorder.judged = lambda: Judgement(9, fault="ssh was killed")
    (line,) = book.hear(Outcome(9, WELL))
    assert "ssh was killed" in line["verdict"][0]


def test_a_conducted_node_leaves_restarts_and_the_end_to_the_head() -> None:
    failed = replace(FAILED, plan=replace(PLAN, is_conducted=True))
    ended = Restarting(failed, 1)
    assert Book().hear(ended, Outcome(3, failed)) == []


def test_a_head_does_not_record_the_programs_that_reach_hosts() -> None:
    names = [one["event"] for one in Book(is_head=True).hear(AttemptStarted(PLAN), FAILED, Outcome(3, WELL))]
    assert names == ["JobEnded"]


def test_lines_know_their_node_and_attempt_once_there_is_one() -> None:
    book = Book()
    book.recorder.membership(joined=["host n1"])
    first, _, second = book.hear(
        AttemptStarted(replace(PLAN, meeting=replace(PLAN.meeting, attempt=4, node_rank=2))), OutputCut(1, 2)
    )
    assert (first["host"], first["node_rank"], first["attempt"]) == ("node7", None, None)
    assert (second["node_rank"], second["attempt"]) == (2, 4)


def test_a_meeting_has_the_sizes_of_all_nodes() -> None:
    book = Book(is_head=True)
    book.recorder.meeting("host n1", Meeting(1, 0, (2, 3), "a", 29500, restarts=1, reason="failure"))
    (line,) = book.lines()
    assert (line["member"], line["attempt"], line["local_world_sizes"]) == ("host n1", 1, [2, 3])


def test_a_head_counts_the_attempts_of_the_hosts_and_says_why_none_ran() -> None:
    book = Book(is_head=True)
    for attempt in (0, 1):
        book.recorder.meeting("host n1", Meeting(attempt, 0, (2,), "a", 29500))
    book.recorder.restart("rank 1 failed first")
    book.recorder.beside = ("error: no host is there",)
    *_, restart, end_ = book.hear(Outcome(1, WELL))
    assert (restart["attempt"], restart["restarts"]) == (1, None)
    assert (end_["attempts"], end_["verdict"]) == (2, ["error: no host is there"])


class TestLinesOfOtherHosts:
    def test_they_keep_their_fields_and_get_ours(self) -> None:
        there, here = Book(), Book(is_head=True)
        there.hear(OutputCut(3, None))
        here.recorder.add(there.raw[0].decode().replace('"job":"job"', '"job":"x"'), 7, -5)
        (line,) = here.lines()
        assert (line["job"], line["received_ns"], line["clock_offset_ns"], line["lines"]) == ("job", 7, -5, 3)

    @pytest.mark.parametrize(
        "text",
        [
            *("", "x", "[]", "3", "{}", '{"event":"Started"}', "[" * 5000, "9" * 5000),
            '{"event":"E","host":"h","time_ns":true,"attempt":0,"node_rank":0}',
            '{"event":"E","host":"h","time_ns":1,"attempt":"0","node_rank":0}',
            '{"event":"E","host":"h","time_ns":1,"attempt":0,"node_rank":0,"x":NaN}',
            '{"event":"E","host":"h","time_ns":1,"attempt":0,"node_rank":0,"x":1e999}',
            '{"event":"E","host":"h","time_ns":1,"attempt":0,"node_rank":0,"x":"%s"}' % ("x" * LONGEST_LINE),
        ],
        ids=lambda text: text[:40],
    )
    def test_what_is_no_line_is_ignored(self, text: str) -> None:
        book = Book(is_head=True)
        book.recorder.add(text, 1, None)
        assert book.raw == []

    @given(st.text(), st.dictionaries(st.text(), st.text() | st.integers() | st.none() | st.floats()))
    def test_what_is_written_is_one_line_of_json(self, name: str, more: dict[str, Any]) -> None:
        fields = {**more, "event": name, "host": "h", "time_ns": 1, "attempt": 0, "node_rank": None}
        book = Book(is_head=True)
        book.recorder.add(json.dumps(fields), 1, None)
        for line in book.raw:
            assert line.count(b"\n") == 1
            assert json.loads(line)["schema"] == 1


any_text = st.text(st.characters(exclude_categories=()), max_size=8) | st.just("\udcff\ud800\n")
counts = st.integers(0, 2**40)
happenings = st.one_of(
    st.builds(
        lambda host, attempt: AttemptStarted(replace(a_plan(attempt=attempt), host=host)), any_text, counts
    ),
    st.builds(TimerExpired, counts, any_text, counts),
    st.builds(OutputCut, counts, st.none() | counts),
    st.builds(lambda text: RestartFailed(DslError(text)), any_text),
    st.sampled_from([FAILED, WELL, Outcome(3, FAILED), Outcome(0, WELL)]),
    st.builds(
        lambda restarts, counted, last: Restarting(last, restarts, counted),
        *(counts, st.booleans(), st.sampled_from([FAILED, WELL])),
    ),
)


@given(st.lists(happenings, max_size=12), st.booleans())
def test_each_line_of_any_history_is_what_the_schema_says(history: list[object], is_head: bool) -> None:  # noqa: FBT001
    book = Book(is_head=is_head)
    book.hear(*history)
    for line in book.raw:
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        checked(line)


def test_the_page_and_the_schema_name_the_same_events_and_fields() -> None:
    text = (DOCS / "events.md").read_text(encoding="utf-8").split("\n## The events of the engine\n")[0]
    schema = {
        one["properties"]["event"]["const"]: set(one["required"]) for one in validator().schema["oneOf"]
    }
    rows = re.findall(r"^\| (`[A-Z]\w+`(?:, `\w+`)*) \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    told = {
        name: set(re.findall(r"`(\w+)`", fields))
        for names, fields in rows
        for name in re.findall(r"\w+", names)
    }
    linked = set(re.findall(r"\[([A-Z]\w+)\]\(#", text)) - {"Exit"}
    assert {*told, *linked} == set(schema)
    for name, fields in told.items():
        known = schema[name] | {"Meeting", "slots"} if fields else set()
        assert fields <= known, name
        assert not fields or schema[name] <= fields, name
    first = re.findall(r"^\| `([a-z]\w+)` \| \w+", text, re.MULTILINE)
    assert set(first) == set(validator().schema["required"])


class TestTheFile:
    def test_it_is_for_its_user_alone_and_lines_are_appended(self, tmp_path: Path) -> None:
        path = tmp_path / "events"
        for line in (b"one\n", b"two\n"):
            file = EventsFile(str(path), pytest.fail)
            file.write(line)
            file.close()
        assert path.read_bytes() == b"one\ntwo\n"
        assert path.stat().st_mode & 0o777 == 0o600

    def test_where_all_may_write_it_is_no_link(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "mine")
        tmp_path.chmod(0o1777)
        with pytest.raises(
            EventsFileError, match=r"link' cannot be written: it is a link in a directory of all"
        ):
            EventsFile(str(tmp_path / "link"), pytest.fail)
        assert not (tmp_path / "mine").exists()
        tmp_path.chmod(0o700)
        EventsFile(str(tmp_path / "link"), pytest.fail).close()

    @pytest.mark.parametrize("path", ["", "none/events", "\0", "."])
    def test_a_bad_name_is_one_line(self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(EventsFileError, match=r"--events '.*' cannot be written: \w"):
            EventsFile(path, pytest.fail)

    def test_a_pipe_without_a_reader_does_not_keep_us_waiting(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(EventsFileError, match="No such device or address"):
            EventsFile(str(tmp_path / "pipe"), pytest.fail)

    @pytest.mark.parametrize("is_closed", [True, False])
    def test_a_pipe_that_takes_no_more_costs_one_warning(self, tmp_path: Path, *, is_closed: bool) -> None:
        warnings: list[str] = []
        os.mkfifo(tmp_path / "pipe")
        reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        file = EventsFile(str(tmp_path / "pipe"), warnings.append)
        if is_closed:
            os.close(reader)
        for _ in range(100):
            file.write(b"x" * 4000 + b"\n")
        if not is_closed:
            os.close(reader)
        assert len(warnings) == 1
        assert warnings[0].startswith("events are no longer recorded in ")
