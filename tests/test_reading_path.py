"""The first chapter of docs/design.md names the modules of a launch, in the order of their first calls."""

from __future__ import annotations

import pytest
from scripts.reading_path import CHAPTER, ONLY_IF, PACKAGE, PAGE, chapter

pytestmark = pytest.mark.proc


def test_the_chapter_is_what_a_launch_does() -> None:
    (written,) = CHAPTER.findall(PAGE.read_text(encoding="utf-8"))
    assert written == chapter(), "run make docs"


def test_every_room_that_is_read_only_sometimes_exists() -> None:
    assert [name for name in ONLY_IF if not (PACKAGE / name).is_dir()] == []
