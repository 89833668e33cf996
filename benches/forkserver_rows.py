"""Fork servers against torchrun, a plain start and a bare loop of forks. Needs torch beside our command."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benches.measure import Bars, Row, failed, in_turns, medians, spread, wall_s
from tests.kit import processes
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benches.programs import Programs

LIMIT_S = 600.0
# Memory of its own that a worker takes at most: one that has imported torch, one that has made a step, each
# executed, and a forked one. What does not fit is not started.
IMPORTED_MIB, STEPPED_MIB, FORKED_MIB = 310, 450, 30
FORK_SERVER = ("--start-method", "forkserver")
GLOO_ABORTS, GLOO_TRIES = "terminate called without an active exception", 3
TORCH_ALONE = (*FORK_SERVER, "--preload", "torch")
"""Without what torch imports later, for workers that do nothing more."""

# Each worker says when its own code runs: CLOCK_MONOTONIC, in a file of its own. Then it waits: the end of
# a process that has imported torch takes longer than its fork.
TELL = """
def tell(folder, rank):
    import os, signal, time
    path = os.path.join(folder, "start." + str(rank))
    with open(path + ".part", "w") as file:
        file.write(str(time.monotonic_ns()))
    os.rename(path + ".part", path)
    signal.pause()
"""
STAMP = f"""
{TELL}
import os, sys
import torch
tell(sys.argv[1], os.environ["RANK"])
"""
# What the fork server has to do at least: the same imports, and a fork for each worker.
FLOOR = f"""
{TELL}
import gc, os, signal, sys
import torch
gc.collect()
gc.freeze()
os.setpgid(0, 0)
signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
for rank in range(int(sys.argv[2])):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        tell(sys.argv[1], rank)
signal.pause()
"""
DDP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
    dist.all_gather([torch.zeros(4) for _ in range(dist.get_world_size())], torch.ones(4))
    dist.barrier()
    dist.destroy_process_group()

main()
"""
# What any launcher has to do at least for it: one import of what a first step needs, and four forks.
BARE_DDP = f"""
import gc, os, socket, sys
import torch, torch.distributed, torch.nn.parallel, torch._dynamo
with socket.create_server(("127.0.0.1", 0)) as listener:
    port = str(listener.getsockname()[1])
gc.collect()
gc.freeze()
script = compile({DDP!r}, "script.py", "exec")
pids = []
for rank in map(str, range(4)):
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK=rank, WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        exec(script, {{"__name__": "__main__"}})
        sys.exit()
    pids.append(pid)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in pids))
"""
# A step on each worker's own, then a wait, so that somebody can look at its memory.
STEP = """
import os, sys, signal
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(8, 256)).sum().backward()
optimizer.step()
with open(os.path.join(sys.argv[1], "pid." + os.environ["RANK"]), "w") as file:
    file.write(str(os.getpid()))
signal.pause()
"""
FAIL_ONCE = f"""
{TELL}
import os, sys, time, signal
import torch
folder, rank = sys.argv[1], os.environ["RANK"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    tell(folder, rank)
path = os.path.join(folder, "ready." + rank)
with open(path + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + ".part", path)
if rank != "0":
    signal.pause()
while not os.path.exists(os.path.join(folder, "go")):
    time.sleep(0.01)
with open(os.path.join(folder, "fail"), "w") as file:
    file.write(str(time.monotonic_ns()))
os._exit(3)
"""


# Preloads that must not be forked, and how many of 20 runs have each. Torch takes seconds.
POISONS = {
    "thread": ("import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()", 7),
    "socket": ("import socket\nkept = socket.create_server(('127.0.0.1', 0))", 6),
    "child": ("import subprocess\nkept = subprocess.Popen(['sleep', '5'])", 6),
    "matmul": ("import torch\nkept = torch.ones(900, 900) @ torch.ones(900, 900)", 1),
}


def has_torch() -> bool:
    """Whether torch is installed beside our command, and torchrun with it."""
    return Path(torchrun_words()[0]).exists()


def imports(programs: Programs, most: int, bar: float, ours_runs: int, theirs_runs: int) -> Row:
    """From the start of the command to the first line of the last worker, which imports torch before."""
    workers, ours = _fitting(most, IMPORTED_MIB), "dslrun, fork server"
    takers = {
        ours: lambda: _last_start([programs.dslrun, *count_words(workers), *TORCH_ALONE], STAMP, workers),
        "torchrun": lambda: _last_start([*torchrun_words(), *count_words(workers)], STAMP, workers),
    }
    values = in_turns(takers, ours_runs, slow={"torchrun": theirs_runs})
    middle = medians(values)
    detail = f"{spread(values['torchrun'], 1, 's')} against {spread(values[ours], 1, 's')}"
    name = f"{workers} workers import torch, torchrun / dslrun with a fork server"
    bars = Bars("imports", f"{workers} workers on {os.cpu_count()} CPUs", middle)
    return Row(name, middle["torchrun"] / middle[ours], "x", bar, False, detail, bars)


def against_floor(programs: Programs, most: int, bar: float, repeats: int) -> Row:
    """The same against a program that imports torch once and forks in a loop."""
    workers = _fitting(most, FORKED_MIB)

    def floor() -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", FLOOR, folder, str(workers)]
            return to_last_start(command, Path(folder), workers)

    ours = [programs.dslrun, *count_words(workers), *TORCH_ALONE]
    takers = {"dslrun": lambda: _last_start(ours, STAMP, workers), "floor": floor}
    values = in_turns(takers, repeats)
    middle = medians(values)
    detail = f"{spread(values['dslrun'], 1, 's')} against {spread(values['floor'], 1, 's')}"
    name = f"{workers} workers import torch, fork server / bare forks"
    return Row(name, middle["dslrun"] / middle["floor"], "x", bar, True, detail)


def training(programs: Programs, bar: float, ours_runs: int, theirs_runs: int) -> Row:
    """Four ranks train three steps with DDP and gloo: the whole command."""
    with tempfile.TemporaryDirectory() as folder:
        script = write_script(folder, DDP)
        takers = {
            "dslrun": lambda: trained_s([programs.dslrun, *count_words(4), *FORK_SERVER, script]),
            "torchrun": lambda: trained_s([*torchrun_words(), *count_words(4), script]),
        }
        values = in_turns(takers, ours_runs, slow={"torchrun": theirs_runs})
    middle = medians(values)
    detail = f"{spread(values['torchrun'], 1, 's')} against {spread(values['dslrun'], 1, 's')}"
    name = "4 ranks of DDP over gloo, torchrun / dslrun with a fork server"
    return Row(name, middle["torchrun"] / middle["dslrun"], "x", bar, False, detail)


def training_floor(programs: Programs, bar: float, repeats: int) -> Row:
    """The same against a program that imports once and forks four times."""
    floor = ["env", "OMP_NUM_THREADS=1", sys.executable, "-c", BARE_DDP]
    with tempfile.TemporaryDirectory() as folder:
        script = write_script(folder, DDP)
        takers = {
            "dslrun": lambda: trained_s([programs.dslrun, *count_words(4), *FORK_SERVER, script]),
            "floor": lambda: trained_s(floor),
        }
        values = in_turns(takers, repeats)
    middle = medians(values)
    detail = f"{spread(values['dslrun'], 1, 's')} against {spread(values['floor'], 1, 's')}"
    name = "4 ranks of DDP over gloo, fork server / one import and bare forks"
    return Row(name, middle["dslrun"] / middle["floor"], "x", bar, True, detail)


def whole(programs: Programs, most: int, bar: float, ours_runs: int, theirs_runs: int) -> Row:
    """Workers import torch and end: the whole command, with the modules that the fork server guesses."""
    workers = _fitting(most, IMPORTED_MIB)
    with tempfile.TemporaryDirectory() as folder:
        script = write_script(folder, "import torch")
        takers = {
            "dslrun": lambda: wall_s([programs.dslrun, *count_words(workers), *FORK_SERVER, script]),
            "torchrun": lambda: wall_s([*torchrun_words(), *count_words(workers), script]),
        }
        values = in_turns(takers, ours_runs, slow={"torchrun": theirs_runs})
    middle = medians(values)
    detail = f"{spread(values['torchrun'], 1, 's')} against {spread(values['dslrun'], 1, 's')}"
    name = f"{workers} workers import torch and end, torchrun / dslrun with a fork server"
    return Row(name, middle["torchrun"] / middle["dslrun"], "x", bar, False, detail)


def worker_cost(programs: Programs, most: int, bar: float, repeats: int) -> Row:
    """Processor time and page faults of one forked worker that imports torch and ends.

    A command with many workers less a command with one, and that by the number of workers between them.
    """
    workers = _fitting(most, FORKED_MIB)
    faults: dict[str, list[float]] = {"many": [], "one": []}

    def take(name: str, count: int, script: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall_s([programs.dslrun, *count_words(count), *FORK_SERVER, script])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        faults[name].append(after.ru_minflt - before.ru_minflt)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    with tempfile.TemporaryDirectory() as folder:
        script = write_script(folder, "import torch")
        takers = {"many": lambda: take("many", workers, script), "one": lambda: take("one", 1, script)}
        middle = medians(in_turns(takers, repeats))
    of_faults = medians({name: taken[1:] for name, taken in faults.items()})
    each_ms, each_faults = (
        (values["many"] - values["one"]) / (workers - 1) for values in (middle, of_faults)
    )
    detail = f"{each_faults:.0f} page faults a worker; {workers} workers"
    return Row(
        "processor time of a forked worker that imports torch and ends",
        1000 * each_ms,
        "ms",
        bar,
        True,
        detail,
    )


def memory(programs: Programs, most: int, bar: float) -> Row:
    """Proportional memory of a worker after its first step, all workers alive, the fork server among them."""
    few, many = _fitting(most, STEPPED_MIB), _fitting(most, FORKED_MIB)
    plain = _pss_mib([programs.dslrun, *count_words(few)], few)
    forked = _pss_mib([programs.dslrun, *count_words(many), *FORK_SERVER], many)
    detail = f"{forked:.3g} MiB a worker of {many} against {plain:.3g} of {few}"
    name = f"PSS of a worker of {many} after a step, fork server / executed"
    return Row(name, forked / plain, "x", bar, True, detail)


def restart(programs: Programs, workers: int, bar: float, repeats: int) -> Row:
    """From the failure of one worker to the first line of the last worker of the next attempt."""
    values = sorted(_restart_s(programs, workers) for _ in range(repeats))
    name = f"one of {workers} fails to the last first line of the next attempt"
    return Row(name, values[len(values) // 2], "s", bar, True, spread(values, 1000, "ms"))


def tests(path: str, words: str, bar: float) -> Row:
    """How many of our tests fail that compare executed and forked workers."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{path}"]
    if words:
        command += ["-k", words]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    failed = re.search(r"(\d+) failed", last)
    count = int(failed[1]) if failed else int(done.returncode != 0)
    return Row(f"tests that fail of tests/{path}", count, "", bar, True, last)


def poison(programs: Programs, times: int, bar: float) -> Row:
    """Jobs whose preload must not be forked: how many hang, fail, or are not told of."""
    bad = 0
    begin = time.monotonic()
    kinds = [kind for kind, (_, count) in POISONS.items() for _ in range(count * times // 20)]
    with tempfile.TemporaryDirectory() as folder:
        for kind, (text, _) in POISONS.items():
            (Path(folder) / f"poison_{kind}.py").write_text(text)
        script = write_script(folder, "print('ran')")
        # With one thread a computation is no poison.
        env = {**os.environ, "OMP_NUM_THREADS": "2"}
        for kind in kinds:
            command = [programs.dslrun, *count_words(2), *FORK_SERVER, "--preload", f"poison_{kind}", script]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=60, check=False, env=env
                )
            except subprocess.TimeoutExpired:
                bad += 1
                continue
            is_told = "fork server" in done.stderr and "executed" in done.stderr
            bad += done.returncode != 0 or done.stdout.count("ran") != 2 or not is_told
    detail = f"{len(kinds)} runs in {time.monotonic() - begin:.0f} s: {', '.join(POISONS)}"
    return Row("poisoned preloads that hang or are not fallen back from", bad, "", bar, True, detail)


def _fitting(most: int, each_mib: int) -> int:
    """How many workers fit into nine tenths of the memory that is free."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return max(1, min(most, int(line.split()[1]) // 1024 * 9 // 10 // each_mib))
    return most


def torchrun_words() -> list[str]:
    """With a port of its own: somebody else on this machine may have the one that it takes otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return [str(Path(sysconfig.get_path("scripts")) / "torchrun"), "--master-port", str(port)]


def count_words(workers: int) -> list[str]:
    """The words that ask for so many workers."""
    return ["--nproc-per-node", str(workers)]


def trained_s(command: Sequence[str]) -> float:
    """Seconds of a training; one that aborts as its workers end counts for nothing.

    With torch 2.15 on the CPU gloo does that now and then, whoever has launched the workers.
    """
    for _ in range(GLOO_TRIES - 1):
        try:
            return wall_s(command)
        except RuntimeError as problem:
            if GLOO_ABORTS not in str(problem):
                raise
    return wall_s(command)


def write_script(folder: str, text: str) -> str:
    """Write a script, and return its path."""
    path = Path(folder) / "script.py"
    path.write_text(text)
    return str(path)


def _last_start(command: Sequence[str], text: str, workers: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return to_last_start([*command, write_script(folder, text), folder], Path(folder), workers)


def to_last_start(command: Sequence[str], folder: Path, workers: int) -> float:
    """Seconds from the start of a command to the last stamp of its workers."""
    begin_ns = time.monotonic_ns()
    with _running(command) as (_, wait):
        wait(lambda: _is_complete(folder, "start", workers))
    return (max(_stamps(folder, workers)) - begin_ns) / 1e9


def _is_complete(folder: Path, kind: str, workers: int) -> bool:
    """Whether each worker has left its file of this kind."""
    return (
        sum(name.startswith(f"{kind}.") and not name.endswith(".part") for name in os.listdir(folder))
        == workers
    )


def _stamps(folder: Path, workers: int) -> list[int]:
    return [int((folder / f"start.{rank}").read_text()) for rank in range(workers)]


def _pss_mib(command: Sequence[str], workers: int) -> float:
    """MiB of proportional memory that a job takes for each of its workers."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*command, write_script(folder, STEP), folder]
        with _running(words) as (process, wait):
            wait(lambda: len(list(Path(folder).glob("pid.*"))) == workers)
            pids = {int(path.read_text()) for path in Path(folder).glob("pid.*")}
            parents = {one.ppid for one in map(processes.find, pids) if one is not None}
            servers = parents - set(processes.children(process.pid))
            return sum(_pss_kib(pid) for pid in pids | servers) / 1024 / workers


def _pss_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def _restart_s(programs: Programs, workers: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        command = [programs.dslrun, *count_words(workers), *FORK_SERVER, "--max-restarts", "1"]
        with _running([*command, write_script(directory, FAIL_ONCE), directory]) as (_, wait):
            wait(lambda: _is_complete(folder, "ready", workers))
            (folder / "go").touch()
            wait(lambda: _is_complete(folder, "start", workers))
        return (max(_stamps(folder, workers)) - int((folder / "fail").read_text())) / 1e9


@contextmanager
def _running(
    command: Sequence[str],
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[Callable[[], bool]], None]]]:
    """A command that is ended in the end, and what waits until something is so, or the command has failed.

    Raises:
        RuntimeError: it has ended before.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )

        def wait(is_so: Callable[[], bool]) -> None:
            until(lambda: is_so() or process.poll() is not None, LIMIT_S)
            if not is_so():
                errors.seek(0)
                raise failed(command, process.returncode, errors.read())

        try:
            yield process, wait
        finally:
            process.terminate()
            process.wait(LIMIT_S)
