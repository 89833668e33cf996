"""Many workers: what an idle job costs, and 4000 of them as root and as an ordinary user."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benches.launch_rows import settle
from benches.measure import Row
from benches.programs import Programs
from tests.kit import processes
from tests.kit.users import as_ordinary_user
from tests.kit.waiting import until

COUNT_LIMIT_S = 180.0


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def idle(programs: Programs, workers: int, seconds: float) -> list[Row]:
    """Wakeups and memory of guard and agent while `workers` sleep."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready"
        command = programs.launch(workers, programs.testchild, "note", str(ready), "%r", "pause")
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: _lines(ready) == workers, COUNT_LIMIT_S)
            settle(process.pid)
            (agent,) = processes.children(process.pid)
            pids = (process.pid, agent)
            before = [processes.context_switches(pid) for pid in pids]
            time.sleep(seconds)
            woken = [processes.context_switches(pid) - then for pid, then in zip(pids, before, strict=True)]
            sizes_mib = [_pss_kib(pid) / 1024 for pid in pids]
        finally:
            process.terminate()
            process.wait(COUNT_LIMIT_S)
    name = f"{workers} idle workers"
    switches = f"guard {woken[0]}, agent {woken[1]}"
    memory = f"guard {sizes_mib[0]:.1f} MiB, agent {sizes_mib[1]:.1f} MiB"
    return [
        Row(f"{name}, wakeups in {seconds:.0f} s", sum(woken), "", 0, True, switches),
        Row(f"{name}, PSS of guard and agent", sum(sizes_mib), "MiB", 30, True, memory),
    ]


def _pss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    raise RuntimeError(f"no Pss for {pid}")


def thousands(programs: Programs, workers: int) -> list[Row]:
    """Start, run, tell all to end well, exit 0: as whoever we are, and as an ordinary user if we are root."""
    rows = [
        _full_life(programs, workers, "root" if os.geteuid() == 0 else "an ordinary user", ordinary=False)
    ]
    if os.geteuid() == 0:
        rows.append(_full_life(programs, workers, "an ordinary user", ordinary=True))
    return rows


def _full_life(programs: Programs, workers: int, who: str, *, ordinary: bool) -> Row:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o777)
        ready = Path(directory) / "ready"
        words = ["catch", "USR1", "note", str(ready), "%r", "await", "USR1", "1", "exit", "0"]
        command = programs.launch(workers, programs.testchild, *words)
        if ordinary:
            command = as_ordinary_user(command[1:], Path(directory))
        code, times = _watch(command, ready, workers)
    detail = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
    return Row(f"{workers} workers as {who}: exit code", code, "", 0, True, detail)


def _watch(command: Sequence[str], ready: Path, workers: int) -> tuple[int, dict[str, float]]:
    begin = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(list(command), stdin=subprocess.DEVNULL, stderr=errors)
        try:
            until(lambda: process.poll() is not None or _lines(ready) == workers, COUNT_LIMIT_S)
            started = time.monotonic()
            process.send_signal(signal.SIGUSR1)
            code = process.wait(COUNT_LIMIT_S)
        finally:
            process.terminate()
            process.wait(COUNT_LIMIT_S)
        if code != 0:
            errors.seek(0)
            print(errors.read().decode(errors="replace")[-2000:])
    return code, {"all started": started - begin, "told to ended": time.monotonic() - started}
