"""The running jobs of this user, and the conversation with one of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from dsl.errors import DslError, JobFormatError
from dsl.lists import quote
from dsl.machine.sockets import ask_sockets, remove_socket
from dsl.model.codec import to_line
from dsl.model.lines import Lines
from dsl.model.observation import (
    Follow,
    Followed,
    JobView,
    Look,
    Looked,
    NodeStacks,
    NodeStatus,
    Sight,
    Signalled,
    SignalRank,
    gather,
)

CALL_S = 5.0
"""How long a job may take to say who it is."""
ANSWER_S = 15.0
"""How long a job may take to answer."""
CHUNK = 1 << 16


class RunningJob:
    """A connection to a job."""

    def __init__(self, path: str) -> None:
        """Raises OSError: no job answers there. Raises JobFormatError: its answer cannot be read."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX)
        self._lines = Lines(JobView, NodeStatus, NodeStacks, Signalled, Looked)
        self._heard: list[object] = []
        self._number = 0
        try:
            self.view = self._call(path)
            """What the job has said about itself."""
        except BaseException:
            self._socket.close()
            raise

    def _call(self, path: str) -> JobView:
        self._socket.settimeout(CALL_S)
        _connect(self._socket, path)
        view = self._next()
        if not isinstance(view, JobView):
            raise JobFormatError("the job has not said what it is")
        return view

    def look(self, what: Sight, *, with_logs: bool = False) -> tuple[list[Any], tuple[str, ...]]:
        """Ask all nodes. Returns their answers by node rank, and the names of hosts that have not answered.

        The answers are `NodeStatus`, or `NodeStacks` unless ``what`` is ``status``. ``with_logs``: with the
        paths of log files.

        Raises:
            OSError: the job has ended, or does not answer.
            JobFormatError: the answer cannot be read.
        """
        self._number += 1
        self._socket.settimeout(ANSWER_S)
        self._socket.sendall(to_line(Look(self._number, what, with_logs)))
        return gather(iter(self._next, None))

    def signal(self, node_rank: int, local_rank: int, pid: int, signum: int) -> bool:
        """Send a signal to the process group of a worker; False: it has ended, or its host does not answer.

        Raises what `look` raises.
        """
        self._number += 1
        self._socket.settimeout(ANSWER_S)
        self._socket.sendall(to_line(SignalRank(self._number, node_rank, local_rank, pid, signum)))
        is_sent = False
        while not isinstance(answer := self._next(), Looked):
            is_sent |= isinstance(answer, Signalled)
        return is_sent

    def follow(self) -> Iterator[bytes]:
        """The output of the job: the last lines that it has shown, then what it shows, until it ends.

        Raises:
            DslError: its output does not pass through dsl.
            OSError, JobFormatError: as `look`.
        """
        self._socket.settimeout(ANSWER_S)
        self._socket.sendall(to_line(Follow()))
        line = b""
        while not line.endswith(b"\n"):
            if not (byte := self._socket.recv(1)):  # what follows the line is output
                raise ConnectionResetError("the job has ended")
            line += byte
        (answer,) = Lines(Followed).feed(line)
        if answer.problem:
            raise DslError(f"job {self.view.pid} cannot be followed: {answer.problem}")
        self._socket.settimeout(None)
        while data := self._socket.recv(CHUNK):
            yield data

    def _next(self) -> object:
        while not self._heard:
            data = self._socket.recv(CHUNK)
            if not data:
                raise ConnectionResetError("the job has ended")
            self._heard += self._lines.feed(data)
        return self._heard.pop(0)

    def close(self) -> None:
        """End the connection. The job goes on."""
        self._socket.close()


def running_jobs() -> list[RunningJob]:
    """Connect to all jobs of this user, in the order of their starts. Removes sockets that jobs have left."""
    return sorted(ask_sockets(_meet, ".sock"), key=lambda one: one.view.started_ns)


def _meet(place: tuple[str, str]) -> RunningJob | None:
    try:
        return RunningJob(os.path.join(*place))
    except ConnectionRefusedError:
        remove_socket(*place)
    except (OSError, JobFormatError):
        pass  # it has just ended, or is stopped
    return None


def find_job(word: str, jobs: Sequence[RunningJob]) -> RunningJob:
    """The job that a user means: its pid, or nothing if there is only one.

    Raises:
        DslError: there is no such job, or the word is missing and there are several.
    """
    if not jobs:
        raise DslError("no job of this user runs on this machine")
    names = ", ".join(f"{one.view.pid} ({' '.join(one.view.words[:1])})" for one in jobs)
    if not word:
        if len(jobs) > 1:
            raise DslError(f"several jobs run, name one by its pid: {names}")
        return jobs[0]
    for one in jobs:
        if word == str(one.view.pid):
            return one
    raise DslError(f"no job has the pid {quote(word)}, there are: {names}")


def _connect(connection: socket.socket, path: str) -> None:
    """Connect by the descriptor of the directory: an address is at most 107 bytes long."""
    folder = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)
