"""Functions that tests launch in workers. Each worker imports this module, so it imports little."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any


def describe(*args: object) -> dict[str, Any]:
    """What the worker sees of its place."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_ADDR", "EXTRA")
    return {
        "args": args,
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "path": sys.path,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        **{name: os.environ.get(name) for name in names},
    }


def add(first: int, second: int) -> int:
    return first + second + int(os.environ["RANK"])


def launch_inside(count: int) -> list[Any]:
    """A worker launches workers: its own rank is not theirs."""
    from dsl.functions.launcher import launch

    return launch(add, 1, 2, nproc_per_node=count)


def fail_in(rank: int) -> None:
    """One rank raises, the others wait to be stopped."""
    if os.environ["RANK"] == str(rank):
        raise ValueError("on\npurpose")
    pause()


def fail_at_place(place: str) -> str:
    """Raise in workers whose variable ``PLACE`` is this one. The others return theirs."""
    if os.environ["PLACE"] == place:
        raise ValueError("on purpose")
    return os.environ["PLACE"]


def exit_in(rank: int, code: object) -> str:
    if os.environ["RANK"] == str(rank):
        sys.exit(code)  # type: ignore[arg-type]
    return "done"


def kill_in(rank: int, number: int) -> None:
    if os.environ["RANK"] == str(rank):
        signal.raise_signal(number)
    pause()


def leave_without_result() -> None:
    os._exit(0)


def pause() -> None:
    while True:
        time.sleep(1000)


def record_and_raise(text: str) -> None:
    """Leave a record of its own, as a function under ``@record`` does, and raise all the same."""
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": text}))
    raise ValueError("another text")


def clean_and_fail_once(folder: str) -> str:
    """Removes a folder and fails in its first life; returns the folder."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        shutil.rmtree(folder)
        sys.exit(3)
    return folder


def fail_once(folder: str) -> tuple[str, bool]:
    """Fails in its first life, in which it also leaves a daemon that is deaf to SIGTERM.

    Returns the count of restarts and whether the daemon of the first life is gone.
    """
    note = Path(folder) / f"daemon{os.environ['RANK']}"
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if count != "0":
        pids = [int(path.read_text()) for path in Path(folder).glob("daemon*")]
        return count, not any(_runs(pid) for pid in pids)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
    command = [sys.executable, "-S", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.read(1)
        note.with_suffix(".part").write_text(str(daemon.pid))
        note.with_suffix(".part").rename(note)
        if os.environ["RANK"] == "0":
            until(lambda: len(list(Path(folder).glob("daemon?"))) == int(os.environ["WORLD_SIZE"]))
            os._exit(3)
        pause()
    raise AssertionError


def _runs(pid: int) -> bool:
    """Whether the process exists and is more than a zombie, which waits for its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Any) -> None:
    """Wait for what another process does, for a bounded time."""
    deadline_s = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(0.005)


def meet(folder: str) -> int:
    """Return only when every worker of two groups has come."""
    Path(folder, f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['RANK']}").touch()
    until(lambda: len(os.listdir(folder)) == 2 * int(os.environ["WORLD_SIZE"]))
    return os.getppid()


def blob(size: int) -> bytes:
    """Bytes that say which rank made them."""
    return bytes([int(os.environ["RANK"]) + 1]) * size


def length(data: bytes) -> int:
    return len(data)


def make_lock() -> object:
    return threading.Lock()


def look_at_files(secret: str) -> dict[str, Any]:
    """Modes of the files of the run, and whether the argument shows in what others can see of a process."""
    call = Path(sys.orig_argv[-3])
    shown = Path("/proc/self/cmdline").read_bytes() + Path("/proc/self/environ").read_bytes()
    folder = call.parent
    return {
        "modes": {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()},
        "folder": folder.stat().st_mode & 0o777,
        "shown": secret.encode() in shown,
        "has_secret": secret.encode() in call.read_bytes(),
    }


class Unreadable:
    """An object that can be pickled, but not be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_refuse, ())


def _refuse() -> None:
    if "RANK" not in os.environ:
        raise RuntimeError("not here")


def make_unreadable() -> Unreadable:
    return Unreadable()


def sum_over_ranks(value: float) -> list[float]:
    """An all_reduce over all workers, with the environment alone to go by."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.tensor([value, float(dist.get_rank())])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [float(number) for number in tensor]


def parents() -> tuple[int, int]:
    """The parent of this worker, and the parent of that: for a forked worker its branch and its warm server."""
    about = Path(f"/proc/{os.getppid()}/stat").read_text()
    return os.getppid(), int(about.rpartition(")")[2].split()[1])
