"""A process that tries the doors of dsl from where it was started, such as other namespaces of the same user.

The argument is the version of the protocol of fork servers. Each line on stdin is an order: a JSON object whose ``do`` names a function of `DOINGS`, with its arguments.
Each line on stdout is what came of an order: ``got``, all that somebody has said, and ``error``.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import random
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

SO_PEERPIDFD = 77
PATIENCE_S = 5.0
"""How long an answer may take. Who refuses an attempt hangs up at once."""
HELLO, READY = b"\0" + struct.pack("=I", int(sys.argv[1])), b"\1"
"""What a fork server says first, and once it takes orders."""
SERVE = 0
"""The purpose of a request that wants workers, which is its fifth byte."""


def _packed(text: bytes) -> bytes:
    return struct.pack("=Q", len(text)) + text


def _strings(texts: list[bytes]) -> bytes:
    return struct.pack("=Q", len(texts)) + b"".join(map(_packed, texts))


def _send(link: socket.socket, data: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    link.sendmsg([data], rights)


def _receive(link: socket.socket) -> tuple[bytes, list[int]]:
    data, rights, _, _ = link.recvmsg(1 << 16, 4096)
    fds = array.array("i")
    for level, kind, part in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return data, list(fds)


def _contents(data: bytes, fds: list[int]) -> list[bytes]:
    """All that can be learnt of a message: its bytes, what its descriptors are, and what is in them. Closes these."""
    found = [data]
    for fd in fds:
        found.append(os.fsencode(os.readlink(f"/proc/self/fd/{fd}")))
        with contextlib.suppress(OSError):
            found.append(os.pread(fd, 1 << 20, 0))
        os.close(fd)
    return [one for one in found if one]


def _file(data: bytes) -> int:
    fd = os.memfd_create("stranger", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    return fd


@contextlib.contextmanager
def _connected(path: str, kind: int) -> Iterator[socket.socket]:
    """A connection by the descriptor of the directory, whose path may be long."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX, kind) as link:
        link.settimeout(PATIENCE_S)
        try:
            link.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
        finally:
            os.close(folder)
        yield link


def call_warm(got: list[bytes], path: str, request: str, command: list[str], seed: int | None) -> None:
    """Call a warm server with somebody's request and order a worker that runs a command.

    ``seed``: change the request, by dice.
    """
    wanted = request.encode("latin-1")
    if seed is not None:
        dice = random.Random(seed)
        wanted = dice.choice(
            [
                wanted,
                wanted[:4] + bytes([dice.randrange(5)]) + wanted[5:],
                wanted[: dice.randrange(len(wanted))],
                dice.randbytes(dice.randrange(200)),
            ]
        )
    with _connected(path, socket.SOCK_SEQPACKET) as server:
        _send(server, b"request", [_file(wanted)])
        for _ in range(2):
            data, fds = _receive(server)
            got += _contents(data, fds)
            if not data:
                return
        gate, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        null, here = os.open(os.devnull, os.O_RDWR), os.open("/", os.O_RDONLY)
        _send(
            server, b"\0" + struct.pack("=Q", 1), [_file(_plan(command)), theirs.fileno(), here, null, null]
        )
        theirs.close()
        got.append(_receive(server)[0])
        gate.settimeout(PATIENCE_S)
        got.append(gate.recv(99))
        gate.send(b"1")
        # The worker has ended, or has been ended.
        got.append(_receive(server)[0])


def _plan(command: list[str]) -> bytes:
    """The plan of a worker, as in `rust/engine/src/forkserver/plan.rs`."""
    words = [os.fsencode(word) for word in command]
    environ = _strings([b"PATH=/usr/bin:/bin"])
    rest = b"\0\1\0" + struct.pack("=QiQQQ", 0, 0, 1024, 4096, 0) + b"\0\0\0" + struct.pack("=Q", 0)
    return _strings(words) + struct.pack("=I", 1) + environ + rest


def call_job(got: list[bytes], path: str, says: str) -> None:
    """Call a job, say something, and hear all that it answers."""
    with _connected(path, socket.SOCK_STREAM) as job:
        with contextlib.suppress(BrokenPipeError):
            job.sendall(says.encode("latin-1"))
        job.settimeout(0.5)
        while data := job.recv(1 << 16):
            got.append(data)


def call_port(got: list[bytes], port: int, says: str) -> None:
    """Call a port of this machine, say something, and hear all that it answers."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as link:
        link.sendall(says.encode("latin-1"))
        link.shutdown(socket.SHUT_WR)
        link.settimeout(0.5)
        while data := link.recv(1 << 16):
            got.append(data)


def pose(got: list[bytes], path: str, is_job: bool, says: str, names: str) -> None:  # noqa: FBT001
    """Listen at a path in place of the process there, until the next order.

    ``says``: first words for all who call. ``names``: whom a false server calls its branch, ``caller`` or a
    pid; empty: it says nothing.
    """
    os.chdir(os.path.dirname(path))
    name, hidden = os.path.basename(path), "hidden"
    if os.path.lexists(name):
        os.rename(name, hidden)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if is_job else socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen(8)
        _tell({"ready": True})
        calls: list[socket.socket] = []
        while (heard := select.select([sys.stdin, listener, *calls], [], [])[0]) and sys.stdin not in heard:
            if listener in heard:
                calls.append(listener.accept()[0])
                with contextlib.suppress(OSError):
                    if says:  # an empty message looks like the end
                        calls[-1].sendall(says.encode("latin-1"))
            for call in [one for one in calls if one in heard]:
                if not _listen(got, call, names):
                    calls.remove(call)
                    call.close()
        for call in calls:
            call.close()
    sys.stdin.readline()
    os.unlink(name)
    if os.path.lexists(hidden):
        os.rename(hidden, name)


def _listen(got: list[bytes], call: socket.socket, names: str) -> bool:
    """Hear a caller, and answer the request of one that wants workers. False: it has hung up."""
    try:
        data, fds = _receive(call)
        if not data:
            return False
        is_request = data == b"request" and bool(fds) and os.pread(fds[0], 5, 0)[4:] == bytes([SERVE])
        got += _contents(data, fds)
        if is_request and not names:
            return False
        if is_request:
            pidfd = (
                call.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
                if names == "caller"
                else os.pidfd_open(int(names))
            )
            _send(call, HELLO, [pidfd])
            _send(call, READY, [])
    except OSError:
        return False
    return True


DOINGS: dict[str, Callable[..., None]] = {
    "call_warm": call_warm,
    "call_job": call_job,
    "call_port": call_port,
    "pose": pose,
}


def _tell(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    """Carry out orders until stdin ends."""
    while line := sys.stdin.readline():
        order = json.loads(line)
        got: list[bytes] = []
        error = ""
        try:
            DOINGS[order.pop("do")](got, **order)
        except OSError as problem:
            error = repr(problem)
        _tell({"got": [one.decode("latin-1") for one in got], "error": error})


if __name__ == "__main__":
    main()
