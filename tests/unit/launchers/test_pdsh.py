"""One pdsh for all hosts."""

from __future__ import annotations

import shlex

import pytest
from tests.support.launchers import start

from dsl.errors import HostNameError, LauncherError

OWN = "-oBatchMode=yes -oClearAllForwardings=yes -oControlMaster=no"
HOSTS = {"a": 2, "b": 1}
WORDS = ["/opt/py", "-m", "dsl_launcher.node", "--connect", "10.0.0.1:7", "--place"]


def read(word: str, place: int) -> list[str]:
    """The words of the agent that the shell of a host gets, once pdsh has put in its place."""
    kept = word.replace("%%", "\0").replace("%n", str(place))
    assert "%" not in kept, "pdsh may read it in some way"
    words = shlex.split(kept.replace("\0", "%"))
    assert words[:3] == ["exec", "sh", "-c"]
    assert words[4] == str(place)
    return words[5:]


def test_one_command_whose_place_pdsh_fills_in() -> None:
    one = start("pdsh", HOSTS)
    assert list(one.argv[:-1]) == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    assert read(one.argv[-1], 1) == [*WORDS, "1"]
    assert dict(one.env) == {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": OWN}
    assert (one.node_rank, one.speaks, one.files) == (None, False, ())


def test_words_for_pdsh_stand_where_deepspeed_puts_them() -> None:
    one = start("pdsh", HOSTS, args=("-t", "3"))
    assert list(one.argv[:-1]) == ["pdsh", "-S", "-f", "1024", "-w", "a,b", "-t", "3"]


def test_a_port_comes_behind_what_the_user_gives_to_its_ssh() -> None:
    environ = (("PDSH_SSH_ARGS_APPEND", " -v "),)
    one = start("pdsh", HOSTS, ssh_port=2222, environ=environ)
    assert dict(one.env)["PDSH_SSH_ARGS_APPEND"] == f"-v {OWN} -p 2222"


def test_all_hosts_are_reached_at_once() -> None:
    one = start("pdsh", {f"n{i}": 1 for i in range(2000)})
    assert one.argv[3] == "2000"


def test_a_percent_sign_is_no_place() -> None:
    one = start("pdsh", {"a": 1}, python="/opt/100%n/py")
    assert read(one.argv[-1], 7)[0] == "/opt/100%n/py"


def test_interpreters_that_differ_are_chosen_there() -> None:
    one = start("pdsh", {"a": 1, "b": 1, "c": 1, "d": 1}, pythons=("/1", "/x%n y", "/x%n y", "/3"))
    words = read(one.argv[-1], 2)
    assert words[:2] == ["sh", "-c"]
    assert words[2] == (
        '[ "$0" -ge 1 ] || exec /1 "$@"; [ "$0" -ge 3 ] || exec \'/x%n y\' "$@"; exec /3 "$@"'
    )
    assert words[3:] == ["2", "-m", "dsl_launcher.node", "--connect", "10.0.0.1:7", "--place", "2"]


def test_a_script_is_sourced_first() -> None:
    one = start("pdsh", {"a": 1}, venv_script="/e/activate")
    assert read(one.argv[-1], 0)[3:6] == ["dsl", "/e/activate", "/opt/py"]


@pytest.mark.parametrize(
    "name, given",
    [
        ("me@a", "me@a"),
        ("fd00::2", "ssh:fd00::2"),
        ("2001:db8::2", "ssh:2001:db8::2"),
        ("me@[2001:db8::2]", "ssh:me@2001:db8::2"),
        ("[fe80::1%eth0]", "ssh:fe80::1%eth0"),
    ],
)
def test_users_and_addresses(name: str, given: str) -> None:
    assert start("pdsh", {name: 1}).argv[5] == given


@pytest.mark.parametrize("name", ["me@realm@gate", "a[1-3]", "[a", "a,b", "^a", "/a/"])
def test_what_pdsh_would_take_for_something_else_is_refused(name: str) -> None:
    with pytest.raises(HostNameError, match="cannot be given to pdsh"):
        start("pdsh", {name: 1})


@pytest.mark.parametrize(
    "hosts, labels",
    [
        (["n1", "u@n2", "10.0.0.1", "fe80::1"], {"n1": [0], "n2": [1], "10.0.0.1": [2], "fe80::1": [3]}),
        (["n1.a.com", "n2.a.com"], {"n1.a.com": [0], "n2.a.com": [1], "n1": [0], "n2": [1]}),
        (["n1.a.com", "n1.b.com"], {"n1.a.com": [0], "n1.b.com": [1]}),
        (["n1", "n1.a.com"], {"n1": [0], "n1.a.com": [1]}),
        (["a@n1", "b@n1"], {"n1": [0, 1]}),
    ],
)
def test_a_host_is_known_by_what_pdsh_writes_before_its_lines(
    hosts: list[str], labels: dict[str, list[int]]
) -> None:
    """As pdsh 2.34 does with ``-R exec``: names of one domain lose it, but those that begin with a digit."""
    found: dict[str, list[int]] = {}
    for label, node_rank in start("pdsh", dict.fromkeys(hosts, 1)).labels:
        found.setdefault(label, []).append(node_rank)
    assert found == labels


def test_lines_without_the_names_of_their_hosts_are_refused() -> None:
    with pytest.raises(LauncherError, match="-N lets pdsh leave out the names"):
        start("pdsh", HOSTS, args=("-N",))
