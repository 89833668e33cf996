"""TCP ports of this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from dsl.errors import PortError
from dsl.machine.this_process import name_port_holder, pick_free_port, port_is_free


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


def test_a_port_that_is_picked_is_free() -> None:
    port = pick_free_port()
    assert 1024 <= port <= 65535
    assert port_is_free(port)


def test_a_port_that_needs_rights_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_port: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dsl.machine.this_process.probe_port", refuse)
    with pytest.raises(
        PortError, match="cannot listen on master port 80: permission denied, choose one above 1023"
    ):
        port_is_free(80)


def test_without_psutil_the_holder_stays_unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert name_port_holder(29500).startswith("another process (psutil")
