"""Where the last lines of a file begin."""

from __future__ import annotations

import os
import tempfile

from hypothesis import given
from hypothesis import strategies as st

from dsl.view.tools import start_of


@given(
    text=st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\n\n", b"x" * 40]), max_size=30).map(b"".join),
    lines=st.integers(0, 12),
    block=st.integers(1, 50),
)
def test_the_last_lines_are_those_that_splitlines_has(text: bytes, lines: int, block: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(text)
        file.flush()
        expected = b"".join(text.splitlines(keepends=True)[-lines:] if lines else [])
        assert text[start_of(file.fileno(), lines, block) :] == expected
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == len(text), "the position stays"
