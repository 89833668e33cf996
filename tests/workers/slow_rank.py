"""A training by gloo in which some ranks are slow. Arguments: why, digits of these ranks or ``none``, a folder.

Each rank makes the file ``ready-RANK`` there after some steps, and rank 0 counts its steps in ``steps``, a byte each.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist

EVEN_S, SLOW_S = 0.02, 0.2
kind, slow_ranks, folder = sys.argv[1:]
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
is_slow = str(rank) in slow_ranks.split(",")
pause_s = SLOW_S if is_slow else EVEN_S


class Images(torch.utils.data.IterableDataset):  # type: ignore[misc]  # torch has no types here
    """A source of data that is slow where the rank is."""

    def __iter__(self) -> Images:
        return self

    def __next__(self) -> torch.Tensor:
        if kind in ("loader", "loader-workers"):
            time.sleep(pause_s)
        return torch.ones(8)


def call_kernel() -> None:
    """In C, without a Python frame and without the interpreter's lock."""
    ctypes.CDLL(None).usleep(int(pause_s * 1e6))


def compute_batch() -> None:
    """As many products as the batch of the rank has parts."""
    begin = time.thread_time()
    while time.thread_time() - begin < pause_s / world_size:
        torch.mm(weights, weights)


def compute_beside_neighbours() -> None:
    """Each rank does the same work; the slow one shares its CPU."""
    begin = time.thread_time()
    while time.thread_time() - begin < EVEN_S / world_size:
        torch.mm(weights, weights)


def update_shared() -> None:
    """Needs what another thread of the slow rank holds for most of the time."""
    time.sleep(EVEN_S)
    with shared:
        pass


def hold_shared() -> None:
    """The other thread."""
    while True:
        with shared:
            time.sleep(SLOW_S)
        time.sleep(EVEN_S / 2)


def save_shard() -> None:
    """Writes until the disk has had so much time."""
    end = time.monotonic() + pause_s
    with open(f"{folder}/shard-{rank}", "wb") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())


def make_cycles() -> None:
    """Garbage that only the collector can free, beside much that it walks through each time."""
    time.sleep(EVEN_S)
    if is_slow:
        for _ in range(200_000):
            cycle: list[object] = []
            cycle.append(cycle)


def follow_host() -> None:
    """All ranks of one host are slow."""
    time.sleep(pause_s)


def pin_to_shared_cpu() -> None:
    """The slow rank shares a CPU with twice as many programs as the job has ranks; no other rank uses it."""
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, usable[-1:] if is_slow else usable[:-1])
    if is_slow:
        for _ in range(2 * world_size):
            subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"])


KINDS = {
    "kernel": call_kernel,
    "batch": compute_batch,
    "neighbour": compute_beside_neighbours,
    "lock": update_shared,
    "disk": save_shard,
    "collector": make_cycles,
    "host": follow_host,
}

torch.set_num_threads(1)
weights, shared = torch.ones(64, 64), threading.Lock()
kept: list[object] = []
if kind == "neighbour":
    pin_to_shared_cpu()
if kind == "lock" and is_slow:
    threading.Thread(target=hold_shared, daemon=True).start()
if kind == "collector" and is_slow:
    kept = [[] for _ in range(1_000_000)]
images = iter(torch.utils.data.DataLoader(Images(), num_workers=int(kind == "loader-workers")))
with open(f"{folder}/steps", "ab", buffering=0) as steps:
    for number in itertools.count():
        gradients = next(images)
        if kind in KINDS:
            KINDS[kind]()
        dist.all_reduce(gradients)
        if rank == 0:
            steps.write(b".")
        if number == 5:
            open(f"{folder}/ready-{rank}", "w").close()
