"""``--metrics``: shows the figures of a job to Prometheus, at a port or in a file.

All work is done on one thread, so the agent never waits for a reader. At a port nothing happens until
somebody asks, and many clients are served at once. The figures are at least a second old before they are
asked for again.
"""

from __future__ import annotations

import os
import socket
import time
from threading import Lock
from typing import TYPE_CHECKING

from dsl import EngineError, Exited
from dsl.agent.lookout import Lookout
from dsl.errors import MetricsError
from dsl.lists import with_port
from dsl.machine.crowd import MOST_CLIENTS, close, serve
from dsl.machine.output_files import reason, write_output
from dsl.model.observation import JobView, Look
from dsl.model.outcome import Hang, MembershipChanged, Outcome
from dsl.plan.outputs import read_target
from dsl.report.metrics import CONTENT_TYPE, Tally, metrics_text
from dsl.report.speak import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from dsl.agent.lookout import Ask

FRESH_S = 1.0
"""Figures that are younger are shown again."""
EVERY_S = 5.0
"""Time between two writes of a file."""
REQUEST_S = 2.0
"""A client gets so long to send its request, and so long to take the answer."""
LONGEST_REQUEST = 8192
MODE = 0o644
"""Mode of a new file: any user may read it."""


class Metrics(Lookout):
    """A listener that shows the figures of a job at a port or in a file."""

    def __init__(self, target: str, command: str, *, counts_exits: bool) -> None:
        """``target``: as the option has it. ``counts_exits``: our workers are ranks of the job.

        Raises:
            MetricsError: the port or the file cannot be had.
        """
        super().__init__(command)
        self._counts_exits = counts_exits
        self._tally = Tally()
        self._lock = Lock()
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

    def show(self, ask: Ask, view: Callable[[], JobView]) -> None:
        """Show the figures from now on. Raises RuntimeError: there are too many threads."""
        self._ask, self._view = ask, view
        is_at_port = self._listener is not None
        work = self._serve if is_at_port else lambda: self.repeat(self._keep_file, 0.0, EVERY_S)
        self.begin(work, "there are no metrics any more")

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
        if self._listener is not None:
            close(self._listener, self._is_over)
            return
        self.close()
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
        assert self._listener is not None
        serve(self._listener, self._is_over, self._answer, within_s=REQUEST_S, most_bytes=LONGEST_REQUEST)

    def _answer(self, asked: bytearray) -> bytes | None:
        """The answer to a request; None: it is not whole. Raises OSError: it gets none."""
        if b"\r\n\r\n" not in asked and b"\n\n" not in asked:
            return None
        words = asked.split(b"\n", 1)[0].decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1"):
            raise OSError("no request of HTTP")
        method, path, _ = words
        if method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", "only GET and HEAD are answered\n"
        elif path.partition("?")[0] != "/metrics":
            status, body = "404 Not Found", "the figures of the job are at /metrics\n"
        else:
            try:
                status, body = "200 OK", self._figures()
            except EngineError as error:
                raise OSError(str(error)) from None
        data = body.encode()
        head = (
            f"HTTP/1.0 {status}",
            f"Content-Type: {CONTENT_TYPE}",
            f"Content-Length: {len(data)}",
        )
        return "\r\n".join([*head, "", ""]).encode() + (b"" if method == "HEAD" else data)

    def _keep_file(self) -> None:
        text = self._figures()
        with self._lock:
            if not self._is_over.is_set():
                self._write(text)

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
