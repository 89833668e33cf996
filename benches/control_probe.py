"""A simulated head and its agents; `control_rows` runs each as a program of its own.

head AGENTS ROUNDS IDLE_S    writes its port, and when all agents are there measures: JSON on stderr
agents PORT FIRST COUNT      so many agents in one process
show AGENTS                  writes its port to stderr, and shows what agents send of their workers
writers PORT PLACE LINES     an agent whose worker writes so many lines

All measure with the one clock of this machine.
"""

from __future__ import annotations

import json
import os
import resource
import select
import sys
import threading
import time
from pathlib import Path

from dsl.control.hub import Hub, Link, connect
from dsl.control.messages import Bye, Failing, Forward, Hello, Over, Stop
from dsl.model.judgement import Absence, Report

KEY = bytes(32)
HEARTBEAT_S = 15.0
FAIL, TELL = 1, 2
BLOCK = 1000


def _raise_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _memory_kib() -> int:
    # Not Pss, which falls when simulated agents map the same files.
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1])
    raise RuntimeError("no Private_Dirty")


def _read(hub: Hub) -> list[tuple[Link | None, object]]:
    select.select([hub], [], [])
    return hub.read()


def _open(count: int, port_to: int) -> tuple[Hub, dict[int, Link], float]:
    """A head with all of its agents, and how long they took from the first to the last."""
    hub = Hub(HEARTBEAT_S, show=True)
    port = hub.listen()
    hub.expect(None, KEY, count)
    hub.start()
    os.write(port_to, b"%d\n" % port)
    links: dict[int, Link] = {}
    begin_s = 0.0
    while len(links) < count:
        for link, message in _read(hub):
            begin_s = begin_s or time.monotonic()
            if link is not None and isinstance(message, Hello):
                links[message.place] = link
    return hub, links, time.monotonic() - begin_s


def head(count: int, rounds: int, idle_s: float) -> None:
    """See the module."""
    _raise_limit()
    empty_kib = _memory_kib()
    hub, links, connected_s = _open(count, 1)
    delays_ms = [_round(hub, links, count) for _ in range(rounds)]
    kib = _memory_kib() - empty_kib
    begin_s = time.process_time()
    time.sleep(idle_s)
    busy_s = time.process_time() - begin_s
    assert not hub.read(), "somebody is lost"
    for link in links.values():
        link.send(Over())
    gone = 0
    while gone < count:
        gone += sum(isinstance(message, Bye) for _, message in _read(hub))
    hub.close(10)
    found = {"connected_s": connected_s, "delays_ms": delays_ms, "kib": kib, "idle": busy_s / idle_s}
    os.write(2, json.dumps(found).encode())


def _round(hub: Hub, links: dict[int, Link], count: int) -> float:
    """Milliseconds from the failure of one agent until the last of all has its order to stop."""
    links[count - 1].send(Forward(FAIL))
    failed_ns, stopped_ns, reports = 0, 0, 0
    while reports < count:
        for _, message in _read(hub):
            if isinstance(message, Failing):
                failed_ns = message.ended_ns
                order = Stop(15, 5.0, why="a worker has failed on another host")
                for link in links.values():
                    link.send(order)
            elif isinstance(message, Report):
                stopped_ns = max(stopped_ns, message.failed_ns)
                reports += 1
    return (stopped_ns - failed_ns) / 1e6


def agents(port: int, first: int, count: int) -> None:
    """See the module."""
    _raise_limit()
    hub = Hub(HEARTBEAT_S)
    hub.start()
    for place in range(first, first + count):
        made = hub.add(connect([f"127.0.0.1:{port}"], KEY, place, 60), "head")
        made.send(Hello("1", place, "host", os.getpid()))
    left = count
    stopped: list[tuple[Link, int]] = []
    while left:
        for link, message in _read(hub):
            assert link is not None
            if isinstance(message, Forward):
                link.send(Failing(0, 0, 1, time.monotonic_ns()))
            elif isinstance(message, Stop):
                stopped.append((link, time.monotonic_ns()))
            elif isinstance(message, Over):
                link.send(Bye())
                left -= 1
        if len(stopped) == count:  # an answer before that would be a load that the others feel
            for one, at_ns in stopped:
                one.send(Report(0, 1, absence=Absence("host", "it has ended", ended_ns=at_ns)))
            stopped.clear()
    hub.close(10)


def show(count: int) -> None:
    """See the module."""
    hub, links, _ = _open(count, 2)
    for link in links.values():
        link.send(Over())
    gone = 0
    while gone < count:
        gone += sum(isinstance(message, Bye) for _, message in _read(hub))
    hub.drain()
    hub.close(10)


def writers(port: int, place: int, lines: int) -> None:
    """See the module."""
    hub = Hub(HEARTBEAT_S)
    link = hub.add(connect([f"127.0.0.1:{port}"], KEY, place, 60), "head")
    link.send_now(Hello("1", place, "host", os.getpid()))
    link.receive(60)
    (out, write_out), (err, write_err) = os.pipe(), os.pipe()
    hub.relay(link, out, err)
    hub.start()

    def write() -> None:
        for begin in range(0, lines, BLOCK):
            text = b"".join(
                [
                    b"%d %d the line of a worker, as long as many\n" % (place, at)
                    for at in range(begin, begin + BLOCK)
                ]
            )
            left = memoryview(text)
            while left:
                left = left[os.write(write_out, left) :]

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert hub.drain()
    os.close(write_err)
    link.send(Bye())
    hub.close(10)


def main() -> None:
    """Run one of them."""
    name, *words = sys.argv[1:]
    if name == "head":
        head(int(words[0]), int(words[1]), float(words[2]))
    elif name == "agents":
        agents(int(words[0]), int(words[1]), int(words[2]))
    elif name == "show":
        show(int(words[0]))
    else:
        writers(int(words[0]), int(words[1]), int(words[2]))


main()
