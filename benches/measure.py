"""How the benches measure: whole commands by the wall clock, in turns, medians; one `Row` a result."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LAST_LINES = 80
"""Of a command that failed: torchrun tells of each rank in six, behind what the ranks have said."""


class Bars(NamedTuple):
    """What a chart shows of a row: how long each program took."""

    chart: str
    """The chart of `benches/charts.py`."""
    group: str
    """What was asked of all of them; the bars of a chart stand together by it."""
    seconds: dict[str, float]
    """The median of each program."""


class Row(NamedTuple):
    """One measured value against its bar."""

    name: str
    value: float
    unit: str
    bar: float
    at_most: bool
    """True if the value must not exceed the bar, False if it must reach it."""
    detail: str
    """The numbers behind the value."""
    bars: Bars | None = None
    """What a chart shows of it, if one does."""

    @property
    def passed(self) -> bool:
        """The value keeps to its bar."""
        return self.value <= self.bar if self.at_most else self.value >= self.bar


def wall_s(command: Sequence[str], *, code: int = 0, timeout_s: float = 300.0) -> float:
    """Seconds from the start of a command until it has ended, output thrown away.

    Raises:
        RuntimeError: it did not end with `code`.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        list(command), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    limit = threading.Timer(timeout_s, process.kill)
    limit.start()
    try:
        said = process.communicate()[1]  # with a timeout it would sleep and look, a millisecond or more apart
        elapsed = time.monotonic() - begin
    finally:
        limit.cancel()
    if process.returncode != code:
        raise failed(command, process.returncode, said)
    return elapsed


def failed(command: Sequence[str], code: int, said: bytes) -> RuntimeError:
    """What tells of a command that has not ended as it should: its code, and the last lines that it wrote."""
    lines = said.decode(errors="replace").rstrip().splitlines()[-LAST_LINES:]
    return RuntimeError("\n".join([f"{' '.join(command)[:200]} ended with {code}:", *lines]))


def in_turns(
    takers: Mapping[str, Callable[[], float]], repeats: int, *, slow: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Values of each taker, taken in turns so that a drift of the machine meets all of them alike.

    `slow` bounds the number of turns of those that take long. The first turn of each is thrown away.
    """
    values: dict[str, list[float]] = {name: [] for name in takers}
    for turn in range(repeats + 1):
        for name, take in takers.items():
            if turn <= (slow or {}).get(name, repeats):
                value = take()
                if turn > 0:
                    values[name].append(value)
    return values


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median of each list."""
    return {name: statistics.median(taken) for name, taken in values.items()}


def spread(values: Sequence[float], scale: float, unit: str) -> str:
    """``median (min-max) unit`` of values times `scale`."""
    middle, low, high = (scale * pick(values) for pick in (statistics.median, min, max))
    return f"{middle:.3g} ({low:.3g}-{high:.3g}) {unit}"


def _gpu() -> str:
    """Name of the first GPU; empty if there is none, or none of NVIDIA."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
    return names[0].strip() if names else ""


def machine() -> dict[str, str | int | float]:
    """Facts of this machine that belong beside every number."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_gib": round(memory_kib / 2**20, 1),
        "gpu": _gpu(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "load_1min": round(os.getloadavg()[0], 2),
        "user": "root" if os.geteuid() == 0 else "ordinary",
    }
