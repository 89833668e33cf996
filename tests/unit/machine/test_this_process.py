"""What this machine and this process are called, their files, streams, CPUs and ports."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsl.errors import PortError
from dsl.facts import this_machine
from dsl.machine import (
    is_this_machine,
    name_port_holder,
    pick_free_port,
    port_is_free,
    read_input,
    read_text,
    stream_kind,
    temp_dir,
)

HOST = os.uname().nodename


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
    "name, is_ours",
    [
        *[(name, True) for name in ("localhost", "127.0.0.1", HOST, f"user@{HOST}")],
        *[(name, False) for name in ("192.0.2.1", "node[1-3]", "no-such-host.invalid", "x" * 300, "\udce9")],
    ],
)
def test_names_and_addresses_of_this_machine(name: str, *, is_ours: bool) -> None:
    """192.0.2.0/24 is set aside for documentation (RFC 5737), .invalid for no host (RFC 2606)."""
    assert is_this_machine(name) is is_ours


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


@pytest.fixture(params=["127.0.0.1", "127.0.0.2", "0.0.0.0", "::1", "::"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """A socket that listens the way a store does, on one address or all."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((request.param, 0))
        except OSError:
            pytest.skip("needs a kernel with IPv6")
        server.listen()
        yield server


def test_a_port_is_taken_while_anyone_listens_on_it_and_the_listener_is_named(
    listener: socket.socket,
) -> None:
    port = listener.getsockname()[1]
    assert not port_is_free(port)
    assert name_port_holder(port).startswith(f"pid {os.getpid()} (")
    listener.close()
    assert port_is_free(port)


def test_a_listener_is_named_in_one_line(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _: ["python", "-c", "\nimport x"])
    assert name_port_holder(listener.getsockname()[1]) == f"pid {os.getpid()} (python -c  import x)"


def test_a_port_that_is_picked_is_free() -> None:
    port = pick_free_port()
    assert 1024 <= port <= 65535
    assert port_is_free(port)


def test_a_port_that_needs_rights_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_port: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dsl.machine.probe_port", refuse)
    with pytest.raises(
        PortError, match="cannot listen on master port 80: permission denied, choose one above 1023"
    ):
        port_is_free(80)


def test_without_psutil_the_holder_stays_unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert name_port_holder(29500).startswith("another process (psutil")
