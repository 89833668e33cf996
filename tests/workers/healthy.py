"""A healthy job in which rank 0 works for long without a word, in a way that the first word names; the others wait.

Usage: ``healthy.py KIND SECONDS FOLDER [gloo]``. The folder has ``end``, a FIFO, and for ``download`` the file ``address``
with the URL of a slow server. The other ranks wait in a collective operation of gloo; without that word at the FIFO.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

KIND, SECONDS, FOLDER = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
IS_GLOO = sys.argv[4:] == ["gloo"]
RANK = int(os.environ["RANK"])
TRIAL = 100_000


def evaluate() -> None:
    """One long call of a C function."""
    begin = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", TRIAL)
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(TRIAL * SECONDS / (time.monotonic() - begin)))


def loop() -> None:
    """A long loop in Python."""
    end, total = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        total += sum(range(1000))


def checkpoint() -> None:
    end = time.monotonic() + SECONDS
    with tempfile.TemporaryFile() as file:
        while time.monotonic() < end:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.1)


def compile_() -> None:
    """One long run of a compiler after the other."""
    end = time.monotonic() + SECONDS
    source = "".join([f"int f{number}(int x) {{ return x * {number} + x / 7; }}\n" for number in range(4000)])
    while time.monotonic() < end:
        command = ["cc", "-O2", "-x", "c", "-c", "-o", os.devnull, "-"]
        subprocess.run(command, input=source, text=True, check=True)


def download() -> None:
    with urllib.request.urlopen((FOLDER / "address").read_text()) as answer:
        answer.read()


def loader() -> None:
    """A worker of a data loader sleeps for long."""
    if not IS_GLOO:
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({SECONDS})"], check=True)
        return
    from torch.utils.data import DataLoader, Dataset

    class Slow(Dataset[int]):  # type: ignore[misc]  # torch is not followed
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            time.sleep(SECONDS)
            return index

    for batch in DataLoader(Slow(), num_workers=2, persistent_workers=True):
        batch.sum()


def sleep() -> None:
    time.sleep(SECONDS)


KINDS = {
    "evaluate": evaluate,
    "loop": loop,
    "checkpoint": checkpoint,
    "compile": compile_,
    "download": download,
    "loader": loader,
    "sleep": sleep,
}


def main() -> None:
    if IS_GLOO:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if RANK == 0:
            KINDS[KIND]()
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return
    if RANK == 0:
        KINDS[KIND]()
    os.close(os.open(FOLDER / "end", os.O_RDONLY if RANK else os.O_WRONLY))


main()
