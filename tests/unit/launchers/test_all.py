"""What holds for every launcher, whatever it is given."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.launchers import starts
from tests.support.outcome import assert_one_line

from dsl.errors import HostNameError, UsageError
from dsl.launchers.base import shell_word
from dsl.launchers.table import TABLE
from dsl.plan.remote import LAUNCHERS, RANK_LAUNCHERS

SECRET = "0123456789abcdef"
SHELLS = ("ssh", "pdsh")
names = st.from_regex(r"[a-z][a-z0-9._-]{0,8}", fullmatch=True)
slots = st.dictionaries(names, st.integers(1, 4), min_size=1, max_size=5)
texts = st.text(st.characters(exclude_characters="\0\r\n"), max_size=8)


def test_every_word_of_the_option_has_a_launcher() -> None:
    assert set(TABLE) == set(LAUNCHERS)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "name",
    [
        *("-oProxyCommand=x", "-", "-a", "me@-oProxyCommand=x", "-me@a", "", "@", "me@", "^a"),
        *("a b", "a\tb", "a\nb", "a\x1b[1m", "a;b", "a,b", "a$(id)", "a`id`", "a|b", "a&b", "a>b"),
        *("a'b", 'a"b', "a\\b", "a/b", "a*b"),
    ],
)
def test_a_name_that_is_none_is_refused_in_one_line(launcher: Any, name: str) -> None:
    with pytest.raises(HostNameError) as caught:
        starts(launcher, {"good": 1, name: 1})
    assert_one_line(str(caught.value))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    "name", ["exec:n1", "ssh:n1", "exec:me@n1", "n1:22", "me@n1:22", "1:2", "fd00::1%", "::g"]
)
def test_a_colon_stands_in_ipv6_addresses_alone(launcher: Any, name: str) -> None:
    """pdsh would run the command on this host for ``exec:n1``."""
    with pytest.raises(HostNameError, match=r"'[:%@]'") as caught:
        starts(launcher, {"good": 1, name: 1})
    assert_one_line(str(caught.value))


@pytest.mark.parametrize(
    "launcher, name", [*((launcher, "fd00::2") for launcher in RANK_LAUNCHERS), ("slurm", "me@a")]
)
def test_a_name_that_the_launcher_cannot_take_is_refused(launcher: Any, name: str) -> None:
    with pytest.raises(HostNameError, match="means something else to it"):
        starts(launcher, {name: 1})


@pytest.mark.parametrize("launcher", RANK_LAUNCHERS)
@given(slots=slots, per_node=st.booleans(), port=st.none() | st.integers(1, 65535), value=texts)
def test_no_word_holds_a_secret(
    launcher: Any, *, slots: dict[str, int], per_node: bool, port: int | None, value: str
) -> None:
    secret = SECRET + value
    found = starts(launcher, slots, per_node=per_node, ssh_port=port, variables=(("KEY", secret),))
    for one in found:
        assert ("KEY", secret) in one.env
        assert not any(SECRET in text for text in (*one.argv, *(text for _, text in one.files)))


@pytest.mark.parametrize("launcher", RANK_LAUNCHERS)
@given(slots=slots, per_node=st.booleans(), args=st.lists(texts, max_size=3))
def test_every_word_of_the_user_arrives_whole_and_in_order(
    launcher: Any, *, slots: dict[str, int], per_node: bool, args: list[str]
) -> None:
    (one,) = starts(launcher, slots, per_node=per_node, args=tuple(args))
    ends = range(len(one.argv) - len(args) + 1)
    assert any(list(one.argv[end : end + len(args)]) == args for end in ends)
    assert one.argv[-5:] == ("/opt/py", "-m", "dsl_launcher.node", "--connect", "10.0.0.1:7")


@pytest.mark.parametrize("launcher", RANK_LAUNCHERS)
@given(slots=slots, per_node=st.booleans())
def test_there_are_as_many_tasks_as_slots_or_hosts(
    launcher: Any, *, slots: dict[str, int], per_node: bool
) -> None:
    (one,) = starts(launcher, slots, per_node=per_node)
    flag = "-np" if launcher == "mvapich" else "-n"
    assert one.argv[one.argv.index(flag) + 1] == str(len(slots) if per_node else sum(slots.values()))


@pytest.mark.parametrize("launcher", SHELLS)
@given(slots=slots, python=texts.filter(bool), script=texts)
def test_the_words_of_an_agent_survive_a_shell(
    launcher: Any, *, slots: dict[str, int], python: str, script: str
) -> None:
    for place, one in enumerate(starts(launcher, slots, python=python, venv_script=script)):
        line = one.argv[-1]
        if launcher == "pdsh":
            line = line.replace("%%", "\0").replace("%n", str(place)).replace("\0", "%")
        words = shlex.split(line)
        expected = [python, "-m", "dsl_launcher.node", "--connect", "10.0.0.1:7", "--place", str(place)]
        assert words[-len(expected) :] == expected


@given(st.text(st.characters(exclude_characters="\0\r\n")))
def test_a_quoted_word_is_read_back(word: str) -> None:
    assert shlex.split(shell_word(word)) == [word]


@given(st.text(st.sampled_from("!'\\$`a \"")))
def test_what_shells_read_differently_stands_outside_of_quotes(word: str) -> None:
    """csh expands ``!`` within single quotes, and fish reads a backslash there."""
    inside = False
    text = shell_word(word)
    place = 0
    while place < len(text):
        if text[place] == "'":
            inside = not inside
        elif text[place] == "\\":
            assert not inside
            place += 1
        else:
            assert text[place] != "!"
        place += 1
    assert not inside


@pytest.mark.parametrize("word", ["a\nb", "a\rb"])
def test_a_line_break_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="line break") as caught:
        starts("ssh", {"a": 1}, python=word)
    assert_one_line(str(caught.value))
