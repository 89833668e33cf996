"""What this machine and this process are called, their files, streams and CPUs."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from dsl.facts import this_machine
from dsl.machine.this_process import is_this_machine, read_input, read_text, stream_kind, temp_dir


@pytest.mark.parametrize("name", ["TMPDIR", "TEMP", "TMP", ""])
def test_the_folder_for_pid_files_is_the_one_that_tempfile_uses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(variable, str(tmp_path) if variable == name else "/nonexistent")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert temp_dir() == tempfile.gettempdir()


def test_text_comes_back_byte_for_byte_and_a_missing_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"caf\xe9 slots=1\n")
    text = read_text(str(tmp_path / "f"))
    assert text is not None
    assert text.encode("utf-8", "surrogateescape") == b"caf\xe9 slots=1\n"
    assert read_text(str(tmp_path / "none")) is None
    assert read_text(str(tmp_path)) is None


def test_the_mark_that_some_editors_write_first_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"\xef\xbb\xbfn1 slots=2\n")
    assert read_text(str(tmp_path / "f")) == "n1 slots=2\n"


def test_a_pipe_is_read_once_and_its_text_is_kept(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"n1 slots=2\n")
    os.close(write)
    try:
        path = f"/dev/fd/{read}"
        assert (
            read_text(path) is None
        )  # a script or a config may come by a pipe, too, and is the worker's to read
        assert [read_input(path), read_input(path)] == ["n1 slots=2\n"] * 2
    finally:
        os.close(read)
    (tmp_path / "f").write_text("n2 slots=1\n")
    assert read_input(str(tmp_path / "f")) == "n2 slots=1\n"
    assert read_input(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    "name", ["localhost", os.uname().nodename, f"user@{os.uname().nodename}", "127.0.0.1"]
)
def test_names_and_addresses_of_this_machine(name: str) -> None:
    assert is_this_machine(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "node[1-3]", "no-such-host.invalid", "x" * 300, "\udce9"])
def test_names_and_addresses_of_others(name: str) -> None:
    """192.0.2.0/24 is set aside for documentation (RFC 5737), .invalid for no host (RFC 2606)."""
    assert not is_this_machine(name)


def test_what_our_own_streams_are() -> None:
    """A stream that is closed has nobody to read it, as /dev/null has."""
    ours, theirs = os.openpty()
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        assert [stream_kind(fd) for fd in (theirs, write, null)] == ["terminal", "other", "null"]
    finally:
        for fd in (ours, theirs, read, write, null):
            os.close(fd)
    assert stream_kind(-1) == "null"


def test_the_facts_of_this_machine() -> None:
    facts = this_machine()
    assert (facts.names.executable, facts.names.pid) == (sys.executable, os.getpid())
    assert facts.names.host == os.uname().nodename
    assert set(facts.cpus.allowed) == os.sched_getaffinity(0)
    assert list(facts.cpus.allowed) == sorted(facts.cpus.allowed)
    assert len(facts.names.stamp()) == 14
    assert facts.names.stamp().isdigit()
    assert facts.names.random() != facts.names.random()
    assert facts.cpus.topology.numa_nodes == facts.cpus.numa_nodes
    assert facts.environ is os.environ
