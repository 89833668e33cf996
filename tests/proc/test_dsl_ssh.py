"""What `dsl-ssh` sends to a host, read by the shells of this one: what real hosts do stands in tests/cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.command import ran

from dsl.launchers.ssh import LONGEST_LINE, ssh_command

SHOW = "import sys, os; print(b'\\0'.join(map(os.fsencode, sys.argv[1:])).hex())"


def login(*words: str) -> subprocess.CompletedProcess[bytes]:
    """What a login shell on the other side makes of the command, as long as the connection stands."""
    line = ssh_command("n1", words)[-1]
    reading, writing = os.pipe()
    try:
        return subprocess.run(
            ["sh", "-c", line], stdin=reading, capture_output=True, start_new_session=True, check=False
        )
    finally:
        os.close(reading)
        os.close(writing)


def run(*words: str) -> str:
    """What the command says; it succeeds."""
    result = login(*words)
    assert (result.returncode, result.stderr) == (0, b"")
    return result.stdout.decode()


@pytest.mark.guarantee("G5")
@settings(max_examples=25)
@given(
    words=st.lists(
        st.text(st.characters(min_codepoint=1, codec="utf-8")).map(os.fsencode)
        | st.binary().map(lambda data: data.replace(b"\0", b"")),
        min_size=1,
    )
)
def test_several_words_arrive_byte_for_byte(words: list[bytes]) -> None:
    said = run(sys.executable, "-c", SHOW, *map(os.fsdecode, words))
    assert said == b"\0".join(words).hex() + "\n"


def test_one_word_is_a_line_for_the_shell() -> None:
    assert run("echo a  b; printf '%s\\n' \"it's\" 'c\nd' | wc -l") == "a b\n3\n"


def test_the_longest_command_still_fits() -> None:
    words = (sys.executable, "-c", SHOW)
    free = LONGEST_LINE - len(ssh_command("n1", (*words, "x"))[-1])
    word = "x" * (free + 1)
    assert len(ssh_command("n1", (*words, word))[-1]) == LONGEST_LINE
    assert len(run(*words, word)) == 2 * len(word) + 1


@pytest.mark.parametrize(
    "script, code", [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -KILL $$", 137)]
)
def test_the_exit_code_is_that_of_the_command(script: str, code: int) -> None:
    assert login("sh", "-c", script).returncode == code


def test_the_command_reads_nothing_and_ends_with_its_connection() -> None:
    line = ssh_command("n1", ("sh", "-c", "cat; echo ready; exec sleep 60"))[-1]
    with subprocess.Popen(
        ["sh", "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.close()
        assert process.wait(10) == -15


@pytest.fixture
def dsl_ssh(dsl_command: Path) -> Path:
    """Path of the installed `dsl-ssh` program."""
    return dsl_command.with_name("dsl-ssh")


def refusal(dsl_ssh: Path, *words: str, **environ: str) -> str:
    """What it says to a mistake, which ends it with 2."""
    result = ran([dsl_ssh, *words], environ=environ)
    assert (result.returncode, result.stdout) == (2, "")
    return result.stderr.splitlines()[-1]


@pytest.mark.needs_program("ssh")
@pytest.mark.guarantee("G8")
def test_mistakes_are_one_line(dsl_ssh: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("n1 slots=2\n")
    named = ("-f", str(hosts))
    assert refusal(dsl_ssh, "-f", "/no/such", "ls") == (
        "dsl-ssh: error: hostfile /no/such does not exist, name one with -f"
    )
    assert refusal(dsl_ssh, *named) == (
        "dsl-ssh: error: no command was given: dsl-ssh [OPTIONS] COMMAND [ARGUMENTS]"
    )
    assert refusal(dsl_ssh, *named, "ls", PATH=str(tmp_path)) == (
        "dsl-ssh: error: ssh is not on PATH, install OpenSSH's client"
    )
    assert refusal(dsl_ssh, *named, "echo", "'" * 50_000).endswith(
        "bytes, and at most 131071 fit: copy a script to the hosts, and run that"
    )
    assert "hostname 'n7' not found in hostfile" in refusal(dsl_ssh, *named, "-i", "n7", "ls")
    assert refusal(dsl_ssh, *named, "--max-at-once", "0", "ls").endswith("0 is not in the range of 1 to 1024")
    assert "unrecognized arguments: --fast" in refusal(dsl_ssh, *named, "--fast", "ls")
