"""Output of many workers: how fast it gets through, whether all of it does, and what it holds up."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benches.launch_rows import settle
from benches.measure import Row, in_turns, medians, spread
from benches.programs import Programs
from tests.kit import processes
from tests.kit.users import as_ordinary_user
from tests.kit.waiting import until

PROBE = Path(__file__).with_name("log_probe.py")
WARM_UP = 4
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
LINE, WRITE = "100", "4000"
BIG_LINES, BIG_BYTES = 3, 10_000_000


def _piped(command: Sequence[str]) -> tuple[float, str]:
    """Run a command whose output somebody reads: seconds until it has ended, and what it said on stderr."""
    with tempfile.TemporaryFile() as errors:
        begin = time.monotonic()
        process = subprocess.Popen(list(command), stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        subprocess.run(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL, check=True)
        process.stdout.close()
        code = process.wait()
        elapsed = time.monotonic() - begin
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if code != 0:
        raise RuntimeError(f"{' '.join(command)[:200]} ended with {code}: {said[-800:]}")
    return elapsed, said


def _probe(*arguments: object) -> list[float]:
    """The numbers that the probe prints."""
    _, said = _piped([sys.executable, str(PROBE), *map(str, arguments)])
    return [float(word) for word in said.split()]


def _rate(programs: Programs, workers: int, mib: int, *, files: bool) -> float:
    """MB/s from the first start to the end."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        where = directory if files else "-"
        wall_s, _ = _probe("pass", workers, where, programs.testchild, "flood", mib, LINE, WRITE)
    return workers * mib * 1.048576 / wall_s


def throughput(programs: Programs, workers: int, mib: int, bar: float, repeats: int) -> Row:
    """Files of each rank and a merged, prefixed pipe."""
    for _ in range(WARM_UP):  # a virtual machine gets memory that it has not used for a while slowly
        _rate(programs, workers, mib, files=True)
    takers = {
        "both": lambda: _rate(programs, workers, mib, files=True),
        "pipe": lambda: _rate(programs, workers, mib, files=False),
    }
    values = in_turns(takers, repeats)
    detail = f"{spread(values['both'], 1, 'MB/s')}, without files {spread(values['pipe'], 1, 'MB/s')}"
    name = f"{workers} writers, files and prefixed pipe"
    return Row(name, medians(values)["both"], "MB/s", bar, False, detail)


def _marginal(takers: Mapping[str, tuple[Callable[[int], float], int]], repeats: int) -> dict[str, float]:
    """MB/s of 64 writers, from 1 MiB each to as many as given: without what a command costs anyway."""
    runs: dict[str, Callable[[], float]] = {}
    for name, (take, mib) in takers.items():
        runs[f"{name} small"] = partial(take, 1)
        runs[f"{name} large"] = partial(take, mib)
    middle = medians(in_turns(runs, repeats))
    rates = {}
    for name, (_, mib) in takers.items():
        more_s = max(middle[f"{name} large"] - middle[f"{name} small"], 1e-3)
        rates[name] = 64 * (mib - 1) * 1.048576 / more_s
    return rates


def against_torchrun(programs: Programs, scripts: Path, repeats: int) -> Row:
    """Files of each rank and a tagged console, under either command."""

    def torchrun(mib: int) -> float:
        with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
            torch = [
                str(scripts / "torchrun"),
                "--nproc-per-node",
                "64",
                "--tee",
                "3",
                "--log-dir",
                directory,
            ]
            return _piped([*torch, "--no-python", programs.testchild, "flood", str(mib), LINE, WRITE])[0]

    def dsl(mib: int) -> float:
        with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
            return _piped(_tagged(programs, mib, "--tee", "3", "--log-dir", directory))[0]

    rates = _marginal({"dsl": (dsl, 9), "torchrun": (torchrun, 3)}, repeats)
    detail = f"{rates['dsl']:.0f} MB/s against {rates['torchrun']:.0f} MB/s"
    value = rates["dsl"] / rates["torchrun"]
    return Row("64 writers, tee, dsl / torchrun, marginal", value, "x", 5.0, False, detail)


def _tagged(programs: Programs, mib: int, *options: str) -> list[str]:
    command = programs.launch(64, programs.testchild, "flood", str(mib), LINE, WRITE)
    command[1:1] = ["--tag-output", "always", *options]
    return command


def against_taggers(programs: Programs, repeats: int) -> list[Row]:
    """A tagged console alone, against mpirun and GNU parallel if they are there, and one `cat` for all."""
    flood = [programs.testchild, "flood"]

    def mpirun(mib: int) -> float:
        options = ["--allow-run-as-root", "--oversubscribe", "--tag-output", "-n", "64"]
        return _piped(["mpirun", *options, *flood, str(mib), LINE, WRITE])[0]

    def parallel(mib: int) -> float:
        words = ["parallel", "--will-cite", "--line-buffer", "--tag", "-j", "64", "-n", "0", *flood]
        return _piped([*words, str(mib), LINE, WRITE, ":::", *map(str, range(64))])[0]

    def cat(mib: int) -> float:
        script = 'i=0; while [ $i -lt 64 ]; do "$@" & i=$((i + 1)); done; wait'
        return _piped(["/bin/sh", "-c", script, "sh", *flood, str(mib), LINE, WRITE])[0]

    takers = {"dsl": (lambda mib: _piped(_tagged(programs, mib))[0], 9), "cat": (cat, 9)}
    bars = {"cat": 0.3}
    for name, take in (("mpirun", mpirun), ("parallel", parallel)):
        if shutil.which(name):
            takers[name] = (take, 3)
            bars[name] = 3.0
    rates = _marginal(takers, repeats)
    return [
        Row(
            f"64 writers, tagged console, dsl / {name}, marginal",
            rates["dsl"] / rates[name],
            "x",
            bar,
            False,
            f"{rates['dsl']:.0f} MB/s against {rates[name]:.0f} MB/s",
        )
        for name, bar in bars.items()
    ]


def every_line(programs: Programs, writers: int, lines: int) -> Row:
    """Numbered lines of every kind of writer, and some of 10 MB: how many are lost, torn or misplaced."""
    each = lines // writers
    quarter = writers // 4
    words: list[str] = []
    for number, style in enumerate(("one", "two", "split", "block")):
        ranks = ",".join(str(rank) for rank in range(number * quarter, (number + 1) * quarter))
        words += ["only", ranks, "[", "numbered", "1", str(each), "60", style, "]"]
    words += ["only", "1,2", "[", "raw", "last", "]"]
    words += ["only", str(4 * quarter), "[", "numbered", "1", str(BIG_LINES), str(BIG_BYTES), "one", "]"]
    command = [sys.executable, str(PROBE), "pass", str(4 * quarter + 1)]
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        begin = time.monotonic()
        probe = subprocess.Popen(
            [*command, directory, programs.testchild, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        check = Path(programs.testchild).with_name("dsl-linecheck")
        found = subprocess.run([str(check)], stdin=probe.stdout, capture_output=True, check=True)
        assert probe.stdout is not None
        probe.stdout.close()
        probe.wait()
        elapsed = time.monotonic() - begin
        good, torn, misattributed, gaps, foreign = map(int, found.stdout.split())
        wrong_files = sum(
            _is_wrong(check, Path(directory) / f"{rank}.1", each) for rank in range(4 * quarter)
        )
    lost = 4 * quarter * each + BIG_LINES - good
    # The two unfinished lines of ranks 1 and 2 are foreign to the check.
    faults = abs(lost) + torn + misattributed + gaps + abs(foreign - 2) + wrong_files
    detail = (
        f"{lost} lost, {torn} torn, {misattributed} misattributed, {wrong_files} files wrong, "
        f"{good} good in {elapsed:.0f} s"
    )
    return Row(f"{lines / 1e6:g} million lines of {4 * quarter} writers, faults", faults, "", 0, True, detail)


def _is_wrong(check: Path, file: Path, lines: int) -> bool:
    with file.open("rb") as source:
        found = subprocess.run([str(check)], stdin=source, capture_output=True, check=True).stdout.split()
    return int(found[0]) != lines or any(int(number) for number in found[2:4])


def direct(programs: Programs) -> Row:
    """Our processor time while 64 workers write their files themselves."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        ready, done = Path(directory) / "ready", Path(directory) / "done"
        words = ["catch", "USR1", "note", str(ready), "%p", "await", "USR1", "1", "flood", "8", LINE, WRITE]
        words += ["note", str(done), "%p", "pause"]
        command = programs.launch(64, programs.testchild, *words)
        command[1:1] = ["--redirects", "3", "--log-dir", directory]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until(lambda: ready.exists() and len(ready.read_bytes().splitlines()) == 64, 60)
            settle(process.pid)
            family = [process.pid, *processes.children(process.pid)]
            before = sum(processes.processor_ns(pid) for pid in family)
            for pid in ready.read_text().split():
                os.kill(int(pid), signal.SIGUSR1)
            until(lambda: done.exists() and len(done.read_bytes().splitlines()) == 64, 120)
            spent_ns = sum(processes.processor_ns(pid) for pid in family) - before
        finally:
            process.terminate()
            process.wait()
    return Row("64 workers write 512 MiB to files, our CPU", spent_ns / 1e6, "ms", 0, True, "guard and agent")


def detection(programs: Programs, kills: int) -> Row:
    """From the kill of a quiet worker until the engine has noticed it, while 64 others flood the console."""
    flood = ("flood", "1000000", LINE, WRITE)
    delays = _probe("detect", 64, kills, programs.testchild, *flood, "--", "pause")
    delays_ms = sorted(1000 * delay for delay in delays)
    high = delays_ms[min(len(delays_ms) - 1, round(0.99 * len(delays_ms)))]
    detail = f"{len(delays_ms)} kills, p50 {statistics.median(delays_ms):.2g} ms"
    return Row("death noticed while 64 others flood, p99", high, "ms", 20.0, True, detail)


def ordinary_user(programs: Programs, workers: int) -> list[Row]:
    """Two pipes for each of 4000 workers of a user whose pipes the kernel keeps small."""
    if os.geteuid() != 0:
        return []
    with tempfile.TemporaryDirectory(dir=MEMORY) as directory:
        Path(directory).chmod(0o777)
        command = programs.launch(workers, programs.testchild, "flood", "1", LINE, WRITE)
        command[1:1] = ["--tag-output", "always"]
        elapsed, _ = _piped(as_ordinary_user(command[1:], Path(directory)))
    rate = workers * 1.048576 / elapsed
    return [Row(f"{workers} x 2 pipes as an ordinary user", rate, "MB/s", 100.0, False, f"{elapsed:.1f} s")]
