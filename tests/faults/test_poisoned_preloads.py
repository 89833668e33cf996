"""What a preload may do to a fork server: it is refused or ends, the workers are executed, and nothing hangs.

``--repeats N`` repeats each case; what takes long, or needs torch, is left to `make stress`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.support.forks import Forks, Result


class Poison(NamedTuple):
    """A module that must not be imported before a fork."""

    text: str
    reason: str
    """Part of what is said of it."""
    marks: tuple[pytest.MarkDecorator, ...] = ()


FAKE_TORCH = """
import sys, types
kind = types.SimpleNamespace(is_initialized=lambda: True)
sys.modules["torch"] = types.ModuleType("torch")
sys.modules["torch"].cuda = kind
"""

# A pool of threads of the library that torch and numpy compute with.
OPENMP = """
import ctypes
library = ctypes.CDLL("libgomp.so.1")
run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
library.GOMP_parallel(run, None, 4, 0)
"""

SLOW = (pytest.mark.stress,)
TORCH = (pytest.mark.stress, pytest.mark.torch)

POISONS = {
    "thread": Poison(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "has started a thread",
    ),
    "pool": Poison("import multiprocessing.pool as p\nkept = p.ThreadPool(2)", "what was imported"),
    "socket": Poison("import socket\nkept = socket.socket()", "has opened a socket"),
    "listening": Poison(
        "import socket\nkept = socket.create_server(('127.0.0.1', 0))", "has opened a socket"
    ),
    "loop": Poison("import asyncio\nkept = asyncio.new_event_loop()", "open"),
    "file": Poison("kept = open('/proc/version')", "keeps /proc/version open"),
    "device": Poison("kept = open('/dev/zero')", "keeps /dev/zero open"),
    "lock": Poison("import multiprocessing\nkept = multiprocessing.Lock()", "workers would share it"),
    "memory": Poison("import mmap\nkept = mmap.mmap(-1, 100)", "shares /dev/zero"),
    "memory of its own": Poison("import mmap\nkept = mmap.mmap(-1, 100, mmap.MAP_PRIVATE)", ""),
    "folder": Poison("import tempfile\nkept = tempfile.TemporaryDirectory()", "keeps a temporary folder"),
    "timer": Poison("import signal\nsignal.setitimer(signal.ITIMER_REAL, 50)", "has set a timer"),
    "timer like ours": Poison("import signal\nsignal.setitimer(signal.ITIMER_REAL, 590)", "has set a timer"),
    "timer put back": Poison(
        "import signal\nkept = signal.setitimer(signal.ITIMER_REAL, 50)\nsignal.setitimer(signal.ITIMER_REAL, *kept)",
        "",
    ),
    "timer stopped": Poison("import signal\nsignal.alarm(0)", ""),
    "working directory": Poison(
        "import os, tempfile\nos.chdir(tempfile.mkdtemp())\nos.rmdir(os.getcwd())",
        "has removed the working directory",
    ),
    "arguments": Poison("import sys\nsys.argv.append('--more')", "changes sys.argv"),
    "accelerator": Poison(FAKE_TORCH, "torch.cuda is initialized"),
    "openmp": Poison(OPENMP, "has started 3 threads"),
    "grpc": Poison("import sys\nsys.modules['grpc'] = sys", "grpc is imported"),
    "child": Poison("import os\nif os.fork() == 0:\n    os._exit(0)", "left"),
    "two servers": Poison("import os\nos.fork()", "left"),
    "fork fails": Poison(
        "import os\nos.register_at_fork(after_in_child=lambda: os._exit(7))", "ended with 7"
    ),
    "fork faults": Poison(
        "import ctypes, os\nos.register_at_fork(after_in_child=lambda: ctypes.string_at(0))", "ended with -11"
    ),
    "fork hangs": Poison(
        "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(60))", "hangs in it", SLOW
    ),
    "fork never returns": Poison(
        "import os, time\nos.register_at_fork(after_in_parent=lambda: time.sleep(60))",
        "ran out of time",
        SLOW,
    ),
    "error": Poison("1 / 0", "cannot import poison: ZeroDivisionError"),
    "exit": Poison("import sys\nsys.exit(0)", "cannot import poison: SystemExit"),
    "interrupt": Poison("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "at once": Poison("import os\nos._exit(3)", "ended with code 3: while it imported poison"),
    "as if well": Poison("import os\nos._exit(0)", "while it imported poison"),
    "fault": Poison("import ctypes\nctypes.string_at(0)", "signal 11: while it imported poison"),
    "abort": Poison("import os\nos.abort()", "signal 6: while it imported poison"),
    "killed": Poison("import os\nos.kill(os.getpid(), 9)", "signal 9: while it imported poison"),
    "closed": Poison("import os\nos.closerange(0, 1000)", "ended"),
    # The limit is there, and is not waited for.
    "hangs": Poison(
        "import signal, time\nassert 500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.1)\ntime.sleep(3000)",
        "ran out of time: while it imported poison",
    ),
    "stopped children": Poison("import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)", ""),
    "matmul": Poison(
        "import torch\nkept = torch.ones(900, 900) @ torch.ones(900, 900)", "has started", TORCH
    ),
    "cuda": Poison("import torch\ntorch.cuda.is_available()", "has asked for cuda devices", TORCH),
}

WORK = """
import threading
thread = threading.Thread(target=print, args=("done",))
thread.start()
thread.join()
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", [pytest.param(name, marks=one.marks) for name, one in POISONS.items()])
def test_a_poisoned_preload_is_refused_and_workers_start_plainly(
    kind: str, tmp_path: Path, repeats: int
) -> None:
    """Or they are forked, if it is none."""
    (tmp_path / "poison.py").write_text(POISONS[kind].text)
    (tmp_path / "train.py").write_text(WORK)
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    for _ in range(repeats):
        with Forks(tmp_path, program=["train.py"], preload=["poison"], env=env) as forks:
            results = forks.run(["train.py"], ["train.py"], timeout_s=60)
        assert results == [Result(0, None, "done\n", "")] * 2
        if not POISONS[kind].reason:
            assert forks.lost is None
            continue
        assert forks.lost is not None
        assert POISONS[kind].reason in forks.lost
        assert "\n" not in forks.lost
