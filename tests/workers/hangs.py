"""A real gloo job of which one rank, `ODD`, hangs in a way that the first word names; the other ranks wait for it.

Usage: ``hangs.py KIND FOLDER``. Where a kind needs them, the folder has ``frozen``, a file
system that lets nobody write, and ``limited``, a file with the path of the list of processes of a control
group that may have little memory. Each rank writes a file ``ready-RANK`` with its pid to the folder just before it
hangs. A line of the form ``call()  # KIND`` is where the odd rank is then; ``# others`` is where the others are.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

ODD = 2
KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK = int(os.environ["RANK"])
DATA = torch.ones(4)
MIB = 1 << 20


def ready() -> None:
    """Tell the test that the hang comes next."""
    path = FOLDER / f"ready-{RANK}"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def silence() -> int:
    """The end of a pipe into which nobody writes."""
    return os.pipe()[0]


def skip() -> None:
    dist.barrier()  # skip


def order() -> None:
    dist.broadcast(DATA, src=0)  # order
    dist.all_reduce(DATA)


class Slow(Dataset[int]):  # type: ignore[misc]  # torch is not followed
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return len(os.read(silence(), 1))  # in the worker of the data loader


def loader() -> None:
    for batch in DataLoader(Slow(), num_workers=1):  # loader
        print(batch)


def lock() -> None:
    one = threading.Lock()
    one.acquire()
    one.acquire()  # lock


def deadlock() -> None:
    one, other, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def second() -> None:
        with other:
            both.wait()
            with one:  # the second thread
                pass

    threading.Thread(target=second, name="second", daemon=True).start()
    with one:
        both.wait()
        with other:  # deadlock
            pass


def python_loop() -> None:
    while True:  # python_loop
        pass


def c_loop() -> None:
    sum(iter(int, 1))  # c_loop


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # stopped


def frozen() -> None:
    (FOLDER / "frozen" / "checkpoint").touch()  # frozen


def stdin() -> None:
    os.dup2(silence(), 0)
    sys.stdin.readline()  # stdin


def thrash() -> None:
    """Touch pages of a file that is larger than the memory we may have."""
    Path((FOLDER / "limited").read_text()).write_text(str(os.getpid()))
    size = 128 * MIB
    with (FOLDER / "data").open("wb+") as file:
        for _ in range(size // MIB):
            file.write(bytes(MIB))
        file.flush()
        os.fsync(file.fileno())
        data = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    data.madvise(mmap.MADV_RANDOM)
    ready()
    while True:
        data[random.randrange(size)]  # thrash


def handler() -> None:
    def on_signal(number: int, frame: object) -> None:
        os.read(silence(), 1)  # handler

    signal.signal(signal.SIGUSR1, on_signal)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0)


def store() -> None:
    if os.environ["MASTER_PORT"] != "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MASTER_PORT": "1"})
    ready()
    dist.init_process_group("gloo")  # store


def main() -> None:
    is_odd = RANK == ODD
    if KIND in ("store", "ended"):
        if is_odd and KIND == "store":
            store()
        ready()
        if is_odd:
            os._exit(0)  # an interpreter that has torch takes a while to end
        dist.init_process_group("gloo")  # others of store and ended
    dist.init_process_group("gloo")
    dist.all_reduce(DATA)
    if is_odd:
        if KIND != "thrash":
            ready()
        globals()[KIND]()
    ready()
    dist.all_reduce(DATA)  # others


main()
