"""Words that start a fork server."""

from __future__ import annotations

import pytest

from dsl.forkserver.server_command import server_words


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
    words = server_words(
        ("python", "-u"),
        folder_of_core="/lib/dsl",
        preload=preload,
        script=script,
        is_module=kind == "module",
    )
    assert tuple(word for word in words[4:] if word) == expected[1:]
    assert words[:4] == ("python", "-u", "/lib/dsl/forkserver/boot.py", expected[0])
