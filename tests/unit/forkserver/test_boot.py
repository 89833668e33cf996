"""Words that start a fork server."""

from __future__ import annotations

import pytest

import dsl
from dsl.forkserver.boot import words_of
from dsl.model.job import ForkServer


@pytest.mark.parametrize(
    "preload, script, kind, expected",
    [
        (("a", "b.c"), "train.py", "script", ("a,b.c", "train.py")),
        ((), "train.py", "script", ("", "train.py")),
        ((), "pkg.train", "module", ("", "-m", "pkg.train")),
        (("a",), "", "script", ("a",)),
    ],
)
def test_the_server_follows_the_interpreter_and_its_flags(
    preload: tuple[str, ...], script: str, kind: str, expected: tuple[str, ...]
) -> None:
    server = ForkServer(
        interpreter=("python", "-u"), env={}, preload=preload, script=script, is_module=kind == "module"
    )
    words = words_of(server)
    assert tuple(word for word in words[4:] if word) == expected[1:]
    assert words[:4] == ("python", "-u", f"{dsl.__path__[0]}/forkserver/boot.py", expected[0])


def test_a_python_that_is_too_old_for_us_gets_to_the_check_of_the_extension() -> None:
    notes = words_of.__annotations__
    assert [name for name, note in notes.items() if not isinstance(note, str)] == [], (
        "3.8 would evaluate them"
    )
