"""The facts of how an attempt ended."""

from __future__ import annotations

import os

import pytest
from tests.support.events import a_report

from dsl.conductor.judge import Context, judge_alone
from dsl.evidence.reports import seen_on_screen

pytestmark = pytest.mark.guarantee("G3")

QUOTED = ("Traceback:", "  f()", "ValueError: 3")
SHOWN = b"".join(f"\x1b[36m[rank 5]\x1b[0m {line}\n".encode() for line in QUOTED)
OTHER = b"[rank 0] step 7\n"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 24 rows."""
    monkeypatch.setattr(os, "get_terminal_size", lambda _fd: os.terminal_size((80, 24)))


@pytest.mark.usefixtures("screen")
@pytest.mark.parametrize(
    "recent, is_seen",
    [
        (SHOWN, True),
        (OTHER * 90 + SHOWN + OTHER * 17, True),
        (OTHER * 90 + SHOWN + OTHER * 18, False),
        (SHOWN.replace(b"\n", b"\n" + OTHER), True),
        (SHOWN.replace(b"3", b"4"), False),
        (b"", False),
    ],
)
def test_a_head_sees_what_its_terminal_still_shows(recent: bytes, is_seen: bool) -> None:  # noqa: FBT001
    judgement = judge_alone(a_report(0, 1, rank=5, lines=QUOTED), Context())
    first = seen_on_screen(judgement, recent).causes[0]
    assert first.evidence.is_on_screen == is_seen
    assert first.evidence.lines == QUOTED


def test_without_a_terminal_nothing_is_seen() -> None:
    judgement = judge_alone(a_report(0, 1, rank=5, lines=QUOTED), Context())
    assert seen_on_screen(judgement, SHOWN) == judgement


@pytest.mark.usefixtures("screen")
def test_a_cause_without_lines_is_not_seen() -> None:
    judgement = judge_alone(a_report(0, 1, rank=5), Context())
    assert seen_on_screen(judgement, SHOWN) == judgement
