"""``--metrics``: shows the figures of a job to Prometheus, at a port or in a file.

All work is done on one thread, so the agent never waits for a reader. At a port nothing happens until
somebody asks. Many clients are served at once, each has a deadline, and where there are too many the oldest
has to go. The figures are at least a second old before they are asked for again.
"""

from __future__ import annotations

import os
import select
import socket
import time
from threading import Event, Lock
from typing import TYPE_CHECKING

from dsl import EngineError, Exited
from dsl.errors import MetricsError
from dsl.lists import with_port
from dsl.machine.output_files import reason, write_output
from dsl.model.observation import JobView, Look
from dsl.model.outcome import Hang, MembershipChanged, Outcome
from dsl.plan.outputs import read_target
from dsl.report.metrics import CONTENT_TYPE, Tally, metrics_text
from dsl.report.speak import complain, say
from dsl.signals import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Ask = Callable[[Look], "tuple[Sequence[Any], Sequence[str]]"]
    """Puts a question to all nodes of the job. Returns their answers, and the hosts that have not answered.
    Raises OSError or EngineError: the job is ending."""

FRESH_S = 1.0
"""Figures that are younger are shown again."""
EVERY_S = 5.0
"""Time between two writes of a file."""
REQUEST_S = 2.0
"""A client gets so long to send its request, and so long to take the answer."""
LONGEST_REQUEST = 8192
MOST_CLIENTS = 128
"""So many clients are served at once, and as many wait to be."""
MODE = 0o644
"""Mode of a new file: any user may read it."""


class Client:
    """One who asks for the figures."""

    def __init__(self, connection: socket.socket, poller: select.poll) -> None:
        self._connection = connection
        connection.setblocking(False)
        poller.register(connection, select.POLLIN)
        self._asked, self._left = b"", memoryview(b"")
        self.deadline_s = time.monotonic() + REQUEST_S
        """`time.monotonic` when it has to be done with what it does."""

    def go_on(self, answer: Callable[[str, str], bytes], poller: select.poll) -> bool:
        """Read more of the request, or write more of the answer; false: that is all."""
        try:
            if not self._left:
                more = self._connection.recv(LONGEST_REQUEST)
                self._asked += more
                if b"\r\n\r\n" not in self._asked and b"\n\n" not in self._asked:
                    return bool(more) and len(self._asked) <= LONGEST_REQUEST
                self._left = memoryview(answer(*_read_request(self._asked)))
                self.deadline_s = time.monotonic() + REQUEST_S
                poller.modify(self._connection, select.POLLOUT)
            self._left = self._left[self._connection.send(self._left) :]
            if not self._left:
                self._connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return True
        except (OSError, EngineError):
            return False  # it has gone, or has sent no request, or the job is ending
        return bool(self._left)

    def close(self, poller: select.poll) -> None:
        """End the connection."""
        poller.unregister(self._connection)
        self._connection.close()


class Metrics:
    """A listener that shows the figures of a job at a port or in a file."""

    def __init__(self, target: str, command: str, *, counts_exits: bool) -> None:
        """``target``: as the option has it. ``counts_exits``: our workers are ranks of the job.

        Raises:
            MetricsError: the port or the file cannot be had.
        """
        self._command, self._counts_exits = command, counts_exits
        self._tally = Tally()
        self._lock = Lock()
        self._is_over = Event()
        self._text, self._asked_s = "", 0.0
        self._path, self._listener = "", None
        place = read_target(target)
        if place is not None:
            self._listener = _listen(*place)
            return
        self._path = os.path.abspath(target)
        try:
            write_output(self._path, b"", MODE, read_again=True)
        except (OSError, ValueError) as error:
            why = reason(error)
            raise MetricsError(
                f"--metrics {target!r} cannot be written: {why}, choose another file"
            ) from None

    def begin(self, ask: Ask, view: Callable[[], JobView]) -> None:
        """Show the figures from now on. Raises RuntimeError: there are too many threads."""
        self._ask, self._view = ask, view
        start_thread(self._serve if self._listener is not None else self._keep_file, "dsl-metrics")

    def hear(self, event: object) -> None:
        """Count what happens."""
        if isinstance(event, Exited):
            end = event.exit
            if self._counts_exits and end.status and not end.caused_by_stop:
                self._tally.count_failure(end.signal, end.status)
        elif isinstance(event, Hang):
            self._tally.hangs += 1
        elif isinstance(event, MembershipChanged):
            self._tally.membership_changes += 1

    def end(self, outcome: Outcome) -> None:
        """The job is over: close the port, or write the file for the last time."""
        self._is_over.set()
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._listener.close()
            return
        ended = outcome.code, time.time()
        with self._lock:
            self._write(metrics_text(self._view(), (), self._tally, ended=ended))

    def _figures(self) -> str:
        if not self._text or time.monotonic() - self._asked_s >= FRESH_S:
            nodes, missing = self._ask(Look(0))
            self._text = metrics_text(self._view(), nodes, self._tally, missing=len(missing))
            self._asked_s = time.monotonic()
        return self._text

    def _serve(self) -> None:
        try:
            self._serve_all()
        except Exception as error:  # noqa: BLE001  users never see a traceback of ours
            complain(self._command, error)

    def _serve_all(self) -> None:
        assert self._listener is not None
        own, poller = self._listener.fileno(), select.poll()
        self._listener.setblocking(False)
        poller.register(own, select.POLLIN)
        clients: dict[int, Client] = {}  # the oldest first
        while True:
            wait_s = min((one.deadline_s for one in clients.values()), default=None)
            ready = poller.poll(None if wait_s is None else max(wait_s - time.monotonic(), 0) * 1000 + 1)
            if self._is_over.is_set():
                break
            now_s = (
                time.monotonic()
            )  # before the answers, which may take long: nobody is late because of them
            for fd, _ in ready:
                if fd != own and not clients[fd].go_on(self._answer, poller):
                    clients.pop(fd).close(poller)
            if any(fd == own for fd, _ in ready):
                self._let_in(clients, poller)
            for fd in [fd for fd, one in clients.items() if one.deadline_s <= now_s]:
                clients.pop(fd).close(poller)
        for one in clients.values():
            one.close(poller)

    def _let_in(self, clients: dict[int, Client], poller: select.poll) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return  # it has gone
        except OSError:
            self._is_over.wait(FRESH_S)  # there are too many descriptors
            return
        if len(clients) == MOST_CLIENTS:
            clients.pop(next(iter(clients))).close(poller)
        clients[connection.fileno()] = Client(connection, poller)

    def _answer(self, method: str, path: str) -> bytes:
        """The answer to a request. Raises OSError, EngineError: the job is ending."""
        if method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", "only GET and HEAD are answered\n"
        elif path.partition("?")[0] != "/metrics":
            status, body = "404 Not Found", "the figures of the job are at /metrics\n"
        else:
            status, body = "200 OK", self._figures()
        data = body.encode()
        head = (
            f"HTTP/1.0 {status}",
            f"Content-Type: {CONTENT_TYPE}",
            f"Content-Length: {len(data)}",
        )
        return "\r\n".join([*head, "", ""]).encode() + (b"" if method == "HEAD" else data)

    def _keep_file(self) -> None:
        while True:
            try:
                text = self._figures()
                with self._lock:
                    if not self._is_over.is_set():
                        self._write(text)
            except (OSError, EngineError):
                pass  # between two attempts, or at the end of the job
            except Exception as error:  # noqa: BLE001  users never see a traceback of ours
                complain(self._command, error)
                return
            if self._is_over.wait(EVERY_S):
                return

    def _write(self, text: str) -> None:
        if not self._path:
            return
        try:
            write_output(self._path, text.encode(), MODE, read_again=True)
        except OSError as error:
            say(self._command, f"warning: metrics are no longer written to {self._path!r}: {reason(error)}")
            self._path = ""


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=MOST_CLIENTS)
    except OSError as error:
        # `create_server` adds words of its own to the kernel's.
        why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        where = with_port(host, port)
        raise MetricsError(f"--metrics cannot listen at {where}: {why}, choose another port") from None


def _read_request(data: bytes) -> tuple[str, str]:
    """The method and the path of a request. Raises OSError: it is none."""
    words = data.split(b"\n", 1)[0].decode("latin-1").split()
    if len(words) != 3 or not words[2].startswith("HTTP/1"):
        raise OSError("no request of HTTP")
    return words[0], words[1]
