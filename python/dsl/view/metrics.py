"""``--metrics``: shows the figures of a job to Prometheus, at a port or in a file.

All work is done on one thread, so the agent never waits for a reader. At a port nothing happens until
somebody asks, and many clients are served at once. The figures are at least a second old before they are
asked for again. Prometheus' own client makes the text; docs/metrics.md lists the figures.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import Literal, TypeAlias

from dsl import EngineError, Exited
from dsl.errors import MetricsError
from dsl.machine.crowd import MOST_CLIENTS, close, serve
from dsl.machine.files import reason, write_output
from dsl.model.observation import JobView, Look, NodeStatus
from dsl.model.outcome import Hang, Outcome
from dsl.plan.job import read_target
from dsl.report.speak import say
from dsl.view.lookout import Ask, Lookout
from dsl.words import printable, signal_name, with_port

Samples: TypeAlias = Sequence[tuple[Mapping[str, object], float]]
Figure: TypeAlias = tuple[str, Literal["gauge", "counter"], str, Samples]
"""Name, kind, meaning, and values by labels."""

FRESH_S = 1.0
"""Figures that are younger are shown again."""
EVERY_S = 5.0
"""Time between two writes of a file."""
REQUEST_S = 2.0
"""A client gets so long to send its request, and so long to take the answer."""
LONGEST_REQUEST = 8192
MODE = 0o644
"""Mode of a new file: any user may read it."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LONGEST_LABEL = 200
"""Characters of the value of a label."""
STATES = {"R": "running", "S": "sleeping", "I": "sleeping", "D": "disk", "T": "stopped", "t": "stopped"}
"""What the kernel's letter means. A rank with another letter, or without a process, has ended."""


class Tally:
    """What has happened in a job so far."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """Workers of this node that have failed, by how they ended."""
        self.hangs = 0

    def count_failure(self, signum: int | None, code: int) -> None:
        """Count a worker that a signal has ended, or that has ended with an exit code."""
        self.failures[f"exit code {code}" if signum is None else signal_name(signum)] += 1


class Metrics(Lookout):
    """A listener that shows the figures of a job at a port or in a file."""

    def __init__(self, target: str, command: str, *, counts_exits: bool) -> None:
        """``target``: as the option has it. ``counts_exits``: our workers are ranks of the job.

        Raises:
            MetricsError: the port or the file cannot be had, or the package that makes the text is missing.
        """
        if find_spec("prometheus_client") is None:
            raise MetricsError("--metrics needs prometheus-client: pip install prometheus-client")
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


def metrics_text(
    view: JobView,
    nodes: Sequence[NodeStatus],
    tally: Tally,
    *,
    missing: int = 0,
    ended: tuple[int, float] | None = None,
) -> str:
    """The figures of a job. ``missing``: how many hosts have not answered.

    ``ended``: exit code of the command, and when, in seconds since 1970; None while the job runs.
    """
    from prometheus_client import Metric, generate_latest
    from prometheus_client.registry import Collector

    figures = [*_of_job(view, tally, missing, ended), *_of_nodes(nodes), *_of_ranks(nodes)]

    class Figures(Collector):
        def collect(self) -> Iterator[Metric]:
            for name, kind, about, samples in figures:
                metric = Metric(name.removesuffix("_total"), about, kind)
                for labels, value in samples:
                    shown = {key: printable(str(one))[:LONGEST_LABEL] for key, one in labels.items()}
                    metric.add_sample(name, shown, value)
                if samples:
                    yield metric

    return generate_latest(Figures()).decode()


def _of_job(view: JobView, tally: Tally, missing: int, ended: tuple[int, float] | None) -> Iterator[Figure]:
    program = view.words[0].rpartition("/")[2] if view.words else ""  # its arguments may hold secrets
    about = {"version": view.version, "command": view.command, "program": program, "host": view.host}
    failures = [({"how": how}, count) for how, count in sorted(tally.failures.items())]
    yield "dsl_job_info", "gauge", "What the job is.", [({**about, "pid": view.pid}, 1)]
    yield "dsl_job_start_time_seconds", "gauge", "When the job began.", [({}, view.started_ns / 1e9)]
    yield "dsl_job_nodes", "gauge", "Nodes of the job.", [({}, view.nodes)]
    yield "dsl_job_ranks", "gauge", "Ranks of the job.", [({}, view.workers)]
    yield "dsl_job_restarts_total", "counter", "Restarts so far.", [({}, view.restarts)]
    yield "dsl_job_hangs_total", "counter", "Hangs that --hang-timeout has found.", [({}, tally.hangs)]
    meaning = "How often nodes have left or joined."
    changes = view.attempt - view.restarts  # any other attempt follows a failure
    yield "dsl_job_membership_changes_total", "counter", meaning, [({}, changes)]
    meaning = "Workers of this node that have failed, by how they ended."
    yield "dsl_job_failures_total", "counter", meaning, failures
    yield "dsl_job_silent_hosts", "gauge", "Hosts that have not answered in time.", [({}, missing)]
    if ended is not None:
        yield "dsl_job_end_time_seconds", "gauge", "When the job ended.", [({}, ended[1])]
        yield "dsl_job_exit_code", "gauge", "Exit code of the command.", [({}, ended[0])]


def _of_nodes(nodes: Sequence[NodeStatus]) -> Iterator[Figure]:
    ranks = [one for node in nodes for one in node.ranks]
    states = Counter(STATES.get(one.state, "ended") if one.pid else "ended" for one in ranks)
    places = [({"node": node.node_rank, "host": node.host}, node) for node in nodes]
    counts = [({"state": state}, count) for state, count in sorted(states.items())]
    yield "dsl_ranks", "gauge", "Ranks by what the kernel says of them.", counts
    attempts = [(labels, node.attempt) for labels, node in places]
    yield "dsl_node_attempt", "gauge", "The attempt that runs on a node, counted from 0.", attempts
    ages = [(labels, node.age_ms / 1000) for labels, node in places]
    yield "dsl_node_attempt_seconds", "gauge", "How long this attempt has run.", ages


def _of_ranks(nodes: Sequence[NodeStatus]) -> Iterator[Figure]:
    living = [
        ({"rank": one.rank, "node": node.node_rank, "host": node.host}, one)
        for node in nodes
        for one in node.ranks
        if one.pid and one.rank is not None
    ]
    cpu = [(labels, one.cpu_ms / 1000) for labels, one in living]
    yield "dsl_rank_cpu_seconds_total", "counter", "Processor time of a rank's process in this attempt.", cpu
    memory = [(labels, one.rss_bytes) for labels, one in living]
    yield "dsl_rank_resident_memory_bytes", "gauge", "Resident memory of a rank's process.", memory
    threads = [(labels, one.threads) for labels, one in living]
    yield "dsl_rank_threads", "gauge", "Threads of a rank's process.", threads
    busy = [(labels, one.gpu_percent / 100) for labels, one in living if one.gpu_percent >= 0]
    yield "dsl_rank_gpu_utilization_ratio", "gauge", "Part of the time in which a rank's GPU computed.", busy
    waits = [(labels, one.wait_percent / 100) for labels, one in living if one.wait_percent >= 0]
    meaning = "Part of the time that a rank waited for other ranks when it was last sampled."
    yield "dsl_rank_wait_ratio", "gauge", meaning, waits
    used = [(labels, one.gpu_bytes) for labels, one in living if one.gpu_bytes]
    yield "dsl_rank_gpu_memory_bytes", "gauge", "Memory of its GPU that a rank uses.", used
