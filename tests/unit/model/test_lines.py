"""Records, one a line."""

from __future__ import annotations

import pytest
from tests.support.outcome import error_of

from dsl.errors import JobFormatError
from dsl.model.codec import LONGEST_LINE, Lines


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b"7", b'"Notice"', b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_refused(line: bytes) -> None:
    assert error_of(JobFormatError, Lines(Lines).feed, line + b"\n") is not None


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_an_end_takes_no_more_memory_than_is_allowed(end: bytes) -> None:
    lines = Lines()
    assert lines.feed(b"x" * LONGEST_LINE) == []
    assert error_of(JobFormatError, lines.feed, b"x" + end) == f"it is longer than {LONGEST_LINE} bytes"
