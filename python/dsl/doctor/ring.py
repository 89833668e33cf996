"""What the workers of ``--doctor --ring`` run: each measures its device and links, and rank 0 shows the page.

Ranks meet in a store of their own at the master address, where each says which step it has come to. So when a
step does not end in time, the ranks that hold it up have names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Timer
from typing import Any

from dsl.doctor.job_checks import line_of
from dsl.doctor.ring_checks import Figures, absence, ends_of, judge, rounds, summary

MEET_S = 60.0
"""All ranks have to come within this time: the import of torch may be slow."""
STEP_S = 30.0
"""Each step has to end within this time."""
LAST_S = 2.0
"""The ranks that do not report a failure wait so long for the one that does."""
SMALL_TRIES, TRIES = 30, 10
"""The best of so many counts. What takes little time is easily disturbed."""

SMALL = 8
LARGE = {"gloo": 4 << 20, "nccl": 64 << 20}
"""Bytes that are passed."""
SIDE = {"gloo": 512, "nccl": 8192}
"""Rows of the matrices: one multiplication takes milliseconds."""

ERROR = 2


class Steps:
    """The steps of all ranks, each bounded in time."""

    def __init__(self, dist: Any, rank: int, size: int, host: str) -> None:
        """Raises RuntimeError: rank 0 cannot be reached."""
        self.rank, self.size, self._host = rank, size, host
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_first = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

        def call(*, is_master: bool) -> Any:
            limit = timedelta(seconds=MEET_S)
            store = dist.TCPStore(address, port, None, is_master, limit, wait_for_workers=False)
            store.set_timeout(2 * limit)  # our own timer comes first
            return dist.PrefixStore("dsl_ring", store)

        self.store = call(is_master=is_first)
        self._watch = call(is_master=False)  # the timer's: a connection is busy until it has an answer
        self._timer = Timer(0.0, int)

    def begin(self, step: str, within_s: float | None = None) -> None:
        """Say that this rank has come to a step. The process ends if the step takes too long."""
        self._timer.cancel()
        within_s = within_s or STEP_S
        self.store.set(f"{step}/{self.rank}", self._host)
        self._timer = Timer(within_s, self._give_up, [step, within_s])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """The last step has ended."""
        self._timer.cancel()

    def _give_up(self, step: str, within_s: float) -> None:
        """Say who is missing, unless another rank does, and end."""
        what = f"{step} did not end within {within_s:g} s"
        last = Timer(LAST_S, _end, [f"{what}, and rank 0 does not answer rank {self.rank} any more"])
        last.daemon = True
        last.start()  # a stopped process takes questions, but does not answer
        try:
            come = [one for one in range(self.size) if self._watch.check([f"{step}/{one}"])]
            known = [one for one in range(self.size) if self._watch.check([f"{MEETING}/{one}"])]
            hosts = {one: self._watch.get(f"{MEETING}/{one}").decode() for one in known}
            is_first = self._watch.add("failures", 1) == 1
        except RuntimeError:
            return  # rank 0 is gone
        last.cancel()
        if is_first:
            _end(absence(what, come, hosts, self.size))
        time.sleep(LAST_S)
        _end("")


MEETING = "the meeting of all ranks"


def fail(text: str) -> int:
    """Show an error."""
    print(f"ring: error: {text}", file=sys.stderr, flush=True)  # noqa: T201  a worker, like a script
    return ERROR


def _end(text: str) -> None:
    """End this process, whatever its threads wait for."""
    if text:
        fail(text)
    os._exit(ERROR)


def main() -> int:
    """Measure, as one rank of a job. Returns 0, 1 if something is slow, or 2."""
    rank, size, local = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    host = os.uname().nodename
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its store warns of hosts that have no name
    try:
        import torch
        from torch import distributed as dist
    except ImportError as error:
        if local:
            time.sleep(LAST_S)  # the end of one rank ends the others
            return ERROR
        return fail(f"{host}: {sys.executable} cannot import torch ({error}): install it there")
    try:
        steps = Steps(dist, rank, size, host)
    except RuntimeError:
        where = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
        return fail(f"{host}: rank {rank} cannot reach rank 0 at {where}: look at the route and the firewall")
    steps.begin(MEETING, MEET_S)
    has_device = dist.is_nccl_available() and local < torch.cuda.device_count()
    steps.store.set(f"device/{rank}", "yes" if has_device else "")
    hosts = [steps.store.get(f"{MEETING}/{one}").decode() for one in range(size)]
    is_cuda = all(steps.store.get(f"device/{one}") for one in range(size))
    backend, device = ("nccl", f"cuda:{local}") if is_cuda else ("gloo", "cpu")
    if is_cuda:
        torch.cuda.set_device(local)
    torch.set_num_threads(1)
    limit = timedelta(seconds=2 * MEET_S)
    dist.init_process_group(backend, store=steps.store, rank=rank, world_size=size, timeout=limit)
    bench = Bench(torch, dist, steps, device, LARGE[backend])
    found = bench.measure(hosts, torch.cuda.get_device_name(local) if is_cuda else "CPU", SIDE[backend])
    steps.begin("the end")
    steps.store.set(f"figures/{rank}", json.dumps(found))
    code = 0
    if rank == 0:
        all_found = [Figures(*json.loads(steps.store.get(f"figures/{one}"))) for one in range(size)]
        what = backend if is_cuda else "gloo on the CPU"
        code = show(all_found, what, f"{SMALL} bytes", f"{LARGE[backend] >> 20} MB")
    steps.end()
    dist.destroy_process_group()
    return code


def show(found: Sequence[Figures], backend: str, small: str, large: str) -> int:
    """Print the page. Returns 1 if something is slow, else 0."""
    findings = judge(found, small, large)
    lines = [*summary(found, backend, small, large), *[line_of(*one) for one in findings]]
    print("\n".join(lines), flush=True)  # noqa: T201  the answer
    return 1 if findings else 0


class Bench:
    """The measurements of one rank."""

    def __init__(self, torch: Any, dist: Any, steps: Steps, device: str, large: int) -> None:
        self._torch, self._dist, self._steps, self._device = torch, dist, steps, device
        self._buffers = [torch.zeros(size // 4, device=device) for size in (SMALL, large)]

    def measure(self, hosts: Sequence[str], device: str, side: int) -> tuple[object, ...]:
        """The fields of our `Figures`. ``hosts``: that of each rank; ``side``: rows of the matrices."""
        torch, rank = self._torch, self._steps.rank
        kind = torch.float32 if self._device == "cpu" else torch.bfloat16
        matrix = torch.ones(side, side, device=self._device, dtype=kind)
        compute_s = self._best(lambda: matrix @ matrix)
        self._steps.begin("the all_reduce over all ranks")
        reduce_s = [self._reduce(buffer) for buffer in self._buffers]
        links = []
        ends = ends_of(hosts)
        for number, pairs in enumerate(rounds(len(ends)), 1):
            self._steps.begin(f"round {number} of the links")
            for one, other in [(ends[a], ends[b]) for a, b in pairs]:
                if rank == one:
                    times = [self._pass(buffer, other, is_first=True) for buffer in self._buffers]
                    links.append((other, *times))
                elif rank == other:
                    for buffer in self._buffers:
                        self._pass(buffer, one, is_first=False)
        return rank, hosts[rank], device, compute_s, *reduce_s, links

    def _reduce(self, buffer: Any) -> float:
        return self._best(lambda: self._dist.all_reduce(buffer), _tries(buffer))

    def _pass(self, buffer: Any, other: int, *, is_first: bool) -> float:
        """Pass a buffer to a rank and back. Returns the seconds for one way."""
        ways = (self._dist.send, self._dist.recv) if is_first else (self._dist.recv, self._dist.send)
        return self._best(lambda: [way(buffer, other) for way in ways], _tries(buffer)) / 2

    def _best(self, work: Callable[[], object], tries: int = TRIES) -> float:
        """The least seconds of several tries, behind one that counts for nothing."""
        times = []
        for _ in range(1 + tries):
            begun = time.perf_counter()
            work()
            if self._device != "cpu":
                self._torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
        return min(times[1:])


def _tries(buffer: Any) -> int:
    return TRIES if len(buffer) > SMALL else SMALL_TRIES
