"""The links of a job on many hosts: a head with up to a thousand agents over loopback, and their output."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from benches.measure import Row

PROBE = Path(__file__).with_name("control_probe.py")
PROCESSES = 4
LIMIT_S = 300.0


def _start(*words: object, **streams: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(PROBE), *map(str, words)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **streams)


def _end(programs: Sequence[subprocess.Popen[bytes]]) -> None:
    for program in programs:
        program.kill()
        program.wait()


def agents(counts: Sequence[int], rounds: int, idle_s: float) -> list[Row]:
    """What a head costs that has so many agents, and how soon all of them stop when one fails."""
    rows = []
    for count, bar_ms in zip(counts, (50.0, 100.0, 500.0), strict=True):
        found = _simulate(count, rounds, idle_s)
        delays = found["delays_ms"]
        name = f"{count} agents"
        spread = f"{len(delays)} rounds, {min(delays):.1f}-{max(delays):.1f} ms"
        spread += f", all connected within {found['connected_s']:.2f} s"
        rows.append(
            Row(f"{name}, failure to last stop", statistics.median(delays), "ms", bar_ms, True, spread)
        )
        detail = f"{found['kib'] / count:.1f} KiB an agent"
        rows.append(Row(f"{name}, memory of the head", found["kib"] / 1024, "MiB", 64.0, True, detail))
        detail = f"idle for {idle_s:.0f} s, heartbeat 15 s"
        rows.append(Row(f"{name}, processor of the head", 100 * found["idle"], "%", 10.0, True, detail))
    return rows


def _simulate(count: int, rounds: int, idle_s: float) -> dict[str, Any]:
    head = _start("head", count, rounds, idle_s, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    others: list[subprocess.Popen[bytes]] = []
    try:
        port = _port(head.stdout)
        share = -(-count // PROCESSES)
        firsts = range(0, count, share)
        others = [_start("agents", port, first, min(share, count - first)) for first in firsts]
        _, said = head.communicate(timeout=LIMIT_S)
    finally:
        _end([head, *others])
    if head.returncode != 0:
        raise RuntimeError(f"the head ended with {head.returncode}: {said.decode()[-800:]}")
    found: dict[str, Any] = json.loads(said)
    return found


def _port(stream: IO[bytes] | None) -> int:
    assert stream is not None
    return int(stream.readline())


def output(count: int, lines: int) -> list[Row]:
    """Numbered lines of some agents on the head's stdout: how many are lost or torn, and how fast."""
    head = _start("show", count, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    others: list[subprocess.Popen[bytes]] = []
    try:
        port = _port(head.stderr)
        begin_s = time.monotonic()
        others = [_start("writers", port, place, lines // count) for place in range(count)]
        assert head.stdout is not None
        faults, size = _check(head.stdout, count, lines // count)
        elapsed_s = time.monotonic() - begin_s
        head.wait(LIMIT_S)
    finally:
        _end([head, *others])
    name = f"{lines / 1e6:g} million lines of {count} agents"
    detail = f"{elapsed_s:.0f} s, {size / 1e6:.0f} MB, written and checked by Python"
    return [
        Row(f"{name}, faults", faults, "", 0, True, detail),
        Row(f"{name}, rate", size / elapsed_s / 1e6, "MB/s", 10.0, False, detail),
    ]


def _check(stream: IO[bytes], count: int, each: int) -> tuple[int, int]:
    """Lines that are not the next ones of their agent, or are missing; and how many bytes there were."""
    following = [0] * count
    faults = size = 0
    for line in stream:
        size += len(line)
        words = line.split(b" ", 2)
        if len(words) != 3 or words[2] != b"the line of a worker, as long as many\n":
            faults += 1
            continue
        place, at = int(words[0]), int(words[1])
        faults += following[place] != at
        following[place] = at + 1
    return faults + sum(abs(each - found) for found in following), size
