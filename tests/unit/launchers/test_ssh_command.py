"""One command of the user's on a host, by ssh."""

from __future__ import annotations

from dsl.launchers.ssh import ssh_command


def test_options_come_before_the_host_and_nothing_of_it_is_one() -> None:
    words = ssh_command("me@n1", ("ls", "-l"), 2222)
    end = words.index("--")
    assert words[0] == "ssh"
    assert words[end - 2 : end] == ("-p", "2222")
    assert "BatchMode=yes" in words[:end]
    assert words[end + 1] == "me@n1"
    assert len(words) == end + 3
    assert "-p" not in ssh_command("n1", ("ls", "-l"))
    assert ssh_command("[fd00::1]", ("ls",))[-2] == "fd00::1"


def test_no_shell_on_the_way_sees_a_line_break() -> None:
    """Shells spell them differently."""
    for words in (("a\nb", "\r\n"), ("echo a\necho b",)):
        line = ssh_command("n1", words)[-1]
        assert "\n" not in line
        assert "\r" not in line
