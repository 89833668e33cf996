"""Files of variables for all hosts."""

from __future__ import annotations

import contextlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.errors import EnvFileError
from dsl.resources.exports import env_file_paths, fill_in, parse_env_file, read_env_files

KNOWN = {"HOME": "/h", "OLD": "a b"}


def _values(text: str) -> dict[str, str]:
    """What a host makes of a file whose own variables are `KNOWN`."""
    pairs = [*parse_env_file(text, "F", {})]
    found = fill_in(pairs, KNOWN)
    return {name: found[name] for name, _ in pairs}


@pytest.mark.parametrize(
    "line, value",
    [
        ("A=1", "1"),
        ("A=", ""),
        ("A=b=c", "b=c"),
        (" A = b c ", "b c"),
        ("A=b # c", "b # c"),
        ("A=b\r", "b"),
        ("export A=b", "b"),
        ("export\tA=b", "b"),
        ("A=b'c'", "b'c'"),
        ('A={"x": [1, "y"]}', '{"x": [1, "y"]}'),
        ("A=$HOME", "/h"),
        ("A=${HOME}/x:$OLD", "/h/x:a b"),
        ("A=pa$$word", "pa$$word"),
        ("A=$$$HOME", "$$/h"),
        ("A=5$ $1 $(x) `x` $HOME", "5$ $1 $(x) `x` /h"),
        ("A=$HOME # $OLD", "/h # a b"),
        ("A=\\n;`x`|", "\\n;`x`|"),
        ("A='$HOME \"x\" \\'", '$HOME "x" \\'),
        ('A=" b "', " b "),
        ('A=""', ""),
        ('A="b" # note', "b"),
        ('A="$HOME/x:$OLD"', "/h/x:a b"),
        ('A="${HOME}x"', "/hx"),
        ('A="$NEW|"', "|"),
        (r'A="\$HOME \"q\" \\ \n"', r'$HOME "q" \ \n'),
        ('A="$(x) $ ${x-y} $1 ${"', "$(x) $ ${x-y} $1 ${"),
        ("A=caf\udce9", "caf\udce9"),
        ("A.b-c=1", "1"),
        ("export=1", "1"),
    ],
)  # fmt: skip
def test_a_line(line: str, value: str) -> None:
    assert list(_values(line).values()) == [value]


def test_blank_lines_and_notes_count_for_nothing_and_later_lines_know_earlier_ones() -> None:
    text = '\n# A=1\n  # B\nA=/x\n\t\nB="$A:$A"\nA=$A/y:$HOME\nC=$A\n'
    assert _values(text) == {"A": "/x/y:/h", "B": "/x:/x", "C": "/x/y:/h"}


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize(
    "text, message",
    [
        ("A=1\nB\n", "F line 2: 'B' is no NAME=VALUE, correct or remove it"),
        ("=1", "F line 1: '' is no NAME=VALUE"),
        ("export", "F line 1: 'export' is no NAME=VALUE"),
        ("export A", "F line 1: 'export A' is no NAME=VALUE"),
        ("A B=1", "F line 1: 'A B' is no NAME=VALUE"),
        ("set A=1", "F line 1: 'set A' is no NAME=VALUE"),
        ("export A B=1", "F line 1: 'export A B' is no NAME=VALUE"),
        ("A='b", "F line 1: the value of A has no closing '"),
        ('A="b\\"', 'F line 1: the value of A has no closing "'),
        ('A="b"c', 'F line 1: the value of A goes on behind its closing "'),
        ("A='b','c'", "F line 1: the value of A goes on behind its closing '"),
        ("A=b\0c", "F line 1: the value of A holds a NUL byte"),
    ],
)
def test_a_malformed_line(text: str, message: str) -> None:
    with pytest.raises(EnvFileError) as caught:
        _values(text)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.guarantee("G5")
@given(st.text(st.characters(exclude_characters="\n\0", codec="utf-8")))
def test_every_value_can_be_written_in_double_quotes(value: str) -> None:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    assert _values(f'A="{escaped}"') == {"A": value}


@given(st.text())
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    with contextlib.suppress(EnvFileError):
        assert all(name and not name.isspace() for name in _values(text))


@pytest.mark.parametrize(
    "name, home, cwd, paths",
    [
        (".env", "/h", "/w", ("/h/.env", "/w/.env")),
        ("x/.env", "/h", "/", ("/h/x/.env", "/x/.env")),
        (".env", "/w", "/w", ("/w/.env",)),
        ("/e", "/h", "/w", ("/e",)),
        (".env", "", "/w", ("/w/.env",)),
    ],
)
def test_where_files_are_looked_for(name: str, home: str, cwd: str, paths: tuple[str, ...]) -> None:
    assert env_file_paths(name, home, cwd) == paths


def test_a_later_file_knows_what_an_earlier_one_says() -> None:
    files = {"/h": "A=1\n", "/w": 'B="$A$HOME"\n'}
    found = read_env_files(("/h", "/none", "/w"), files.get)
    assert [*found.values()] == [[("A", "1")], [("B", "1\0HOME\0")]]


def test_a_file_that_cannot_be_read_is_no_missing_one() -> None:
    def refuse(_path: str) -> str:
        raise PermissionError(13, os.strerror(13))

    with pytest.raises(EnvFileError, match="/h cannot be read: permission denied"):
        read_env_files(("/h",), refuse)
