"""Who calls a warm server, and with what, neither ends it nor holds up others."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.waiting import until
from tests.support.warm import Place

pytestmark = pytest.mark.timeout(300)

TELL = struct.pack("=IBQQIQ", 4, 2, 0, 0, 0, 0)
"""A request of version 4 that asks what a server is."""
MANY = 70
"""More than a server lets wait."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "train.py").write_text("import textwrap\n")
    with Place() as place:
        yield place


def warmed(place: Place, folder: Path) -> int:
    """Pid of a server that takes calls at once."""

    def told() -> bool:
        assert place.run("train.py", cwd=folder).returncode == 0
        return bool(place.told())

    until(told, 60)
    return place.server().pid


def call(place: Place) -> socket.socket:
    """A connection that says nothing yet."""
    ((folder, name),) = place.sockets()
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until(lambda: _is_connected(found, f"{folder}/{name}"))
    return found


def _is_connected(one: socket.socket, path: str) -> bool:
    try:
        one.connect(path)
    except BlockingIOError:
        return False
    return True


def hung_up(one: socket.socket) -> bool:
    """Whether the server hangs up."""
    return bool(select.select([one], [], [], 20)[0]) and not one.recv(1)


def test_silent_callers_hold_nobody_up_and_are_hung_up_on(place: Place, tmp_path: Path) -> None:
    server = warmed(place, tmp_path)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(call(place)) for _ in range(MANY)]
        assert [one.pid for one in place.told()] == [server]
        done = place.run("train.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert all(map(hung_up, silent))
    told = place.server()
    assert told.pid == server
    assert told.jobs >= 2


def _memory(size: int) -> int:
    fd = os.memfd_create("test")
    os.truncate(fd, size)
    return fd


def _pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


FILES: dict[str, Callable[[], int]] = {
    "huge and sparse": lambda: _memory(1 << 42),
    "sparse": lambda: _memory(1 << 30),
    "one page": lambda: _memory(mmap.PAGESIZE),
    "empty": lambda: _memory(0),
    "endless": lambda: os.open("/dev/zero", os.O_RDONLY),
    "pipe": _pipe,
    "folder": lambda: os.open("/", os.O_RDONLY),
    "path": lambda: os.open("/", os.O_PATH),
    "socket": lambda: socket.socket().detach(),
}


def test_no_file_of_a_caller_ends_the_server(place: Place, tmp_path: Path) -> None:
    server = warmed(place, tmp_path)
    for what, make in FILES.items():
        fd = make()
        with call(place) as one:
            socket.send_fds(one, [b"request"], [fd])
            os.close(fd)
            assert hung_up(one), what
    with call(place) as one:
        one.send(b"no file")
        assert hung_up(one)
    assert place.server().pid == server


def test_only_a_request_that_nobody_can_change_is_read(place: Place, tmp_path: Path) -> None:
    """What was checked is what is used."""
    server = warmed(place, tmp_path)
    some = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    for seals, is_answered in ((0, False), (some, False), (some | fcntl.F_SEAL_WRITE, True)):
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.write(fd, TELL)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with call(place) as one:
            socket.send_fds(one, [b"request"], [fd])
            os.close(fd)
            assert select.select([one], [], [], 20)[0]
            assert one.recv(4096).startswith(b"%d " % server) == is_answered
