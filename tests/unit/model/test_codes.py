"""Lists of failures: which exit codes they stand for."""

from __future__ import annotations

import pytest

from dsl.model.codes import parse_codes


@pytest.mark.parametrize(
    "text, codes",
    [
        ("1", (1,)),
        ("1,3-5", (1, 3, 4, 5)),
        (" 7 , 3 - 4 ,3", (3, 4, 7)),
        ("SIGKILL", (137,)),
        ("usr2,Kill", (137, 140)),
        ("sigkill,SigSegv,2", (2, 137, 139)),
        ("signal", tuple(range(129, 193))),
        ("any", tuple(range(1, 256))),
        ("255", (255,)),
    ],
)
def test_a_list_stands_for_exit_codes(text: str, codes: tuple[int, ...]) -> None:
    assert parse_codes(text) == codes


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "1,",
        "0",
        "0-3",
        "256",
        "3-300",
        "5-3",
        "-1",
        "1--2",
        "40th",
        "SIGNONE",
        "all",
        "1 2",
        "9" * 5000,
    ],
)
def test_what_is_no_failure_is_refused(text: str) -> None:
    assert parse_codes(text) is None
