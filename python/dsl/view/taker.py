"""Asks another process, the taker, what workers execute: see `dsl.view.stacks`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

from dsl._own_process import START
from dsl.errors import JobFormatError
from dsl.model.codec import Lines, to_line
from dsl.model.observation import Look, RankStacks, RankStatus
from dsl.signals import shortage

TAKE_S = 5.0
"""A taker that has not answered by then is killed, unless its caller has less time."""

_START = f"{START}from dsl.view.stacks import main; main()"


def take_stacks(look: Look, ranks: Sequence[RankStatus], within_s: float = TAKE_S) -> Iterator[RankStacks]:
    """What these workers of this machine execute, as it becomes known, for at most so long.

    A worker whose stacks could not be taken comes last, with a `problem`.
    """
    missing = {one.local_rank: one for one in ranks}
    why = "the process that takes stacks gave no answer in time"
    try:
        with _started() as taker:
            taker.sendall(b"".join([to_line(record) for record in (look, *ranks)]))
            taker.shutdown(socket.SHUT_WR)
            for stacks in _answers(taker, within_s):
                if missing.pop(stacks.local_rank, None):
                    yield stacks
    except ConnectionError:
        why = "the process that takes stacks was ended"  # as by the end of the job
    except (OSError, JobFormatError) as error:
        why = f"the process that takes stacks failed: {shortage(error) or error}"
    for one in missing.values():
        yield RankStacks(one.rank, one.local_rank, one.pid, problem=why)


def _answers(taker: socket.socket, within_s: float) -> Iterator[RankStacks]:
    lines = Lines(RankStacks)
    deadline_s = time.monotonic() + within_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        taker.settimeout(left_s)
        try:
            data = taker.recv(1 << 16)
        except TimeoutError:
            return
        if not data:
            return
        yield from lines.feed(data)


@contextlib.contextmanager
def _started() -> Iterator[socket.socket]:
    """The connection to a new taker, which ends with the block."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-c", _START],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,
                setsigmask=(),
            )
        # The engine reaps it, too, and then its pid may belong to another process.
        pidfd = None
        with contextlib.suppress(OSError):  # it has ended, or the kernel has no pidfds: it ends by itself
            pidfd = os.pidfd_open(pid)
        try:
            yield ours
        finally:
            if pidfd is not None:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
