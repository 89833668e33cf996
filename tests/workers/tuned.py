"""A training script that can be tuned: it writes a metric, or goes wrong as its config says.

Usage: tuned.py [WORDS] --deepspeed_config CONFIG. What it tells of itself stands in the working directory.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

LOG = Path.cwd()
HOST = os.uname().nodename


def tell(what: str, **facts: object) -> None:
    """A line about this run, whole even beside those of others."""
    line = json.dumps({"what": what, "n": CONFIG.get("n"), "act": CONFIG.get("act", "ok"), **facts}) + "\n"
    fd = os.open(LOG / "runs", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(fd, line.encode())
    os.close(fd)


def read_config() -> dict[str, object]:
    """The config, from a file or from base64, as DeepSpeed reads it."""
    word = sys.argv[sys.argv.index("--deepspeed_config") + 1]
    text = Path(word).read_text() if word.endswith(".json") else base64.urlsafe_b64decode(word)
    config: dict[str, object] = json.loads(text)
    return config


def wait_for(begun: int) -> None:
    """Until so many runs have begun, for a bounded time."""
    deadline = time.monotonic() + 20
    while (LOG / "runs").read_text().count('"begin"') < begun:
        if time.monotonic() > deadline:
            sys.exit(f"there were never {begun} runs at once")
        time.sleep(0.005)


def write_metric(text: str) -> None:
    """The metrics, whole or not there."""
    path = Path(CONFIG["autotuning"]["metric_path"])  # type: ignore[index]
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def server() -> int:
    """The process that has forked this process's parent: for a forked worker its warm server."""
    about = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(about.rpartition(")")[2].split()[1])


def main() -> None:
    """Take the slots of this host, do as the config says, and tell of it."""
    slots = os.environ["CUDA_VISIBLE_DEVICES"]
    with contextlib.ExitStack() as stack:
        for slot in slots.split(",") if os.environ["LOCAL_RANK"] == "0" else ():
            held = stack.enter_context((LOG / f"slot-{HOST}-{slot}").open("w"))
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell("doubled", slot=slot)
        words = [word for word in sys.argv[1:] if not word.startswith("ey")]
        facts = {name.lower(): os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})  # it can be waited for
        tell("begin", host=HOST, slots=slots, words=words, pid=os.getpid(), server=server(), **facts)
        if "autotuning" not in CONFIG:
            tell("trained", words=words, config=CONFIG)
            return
        wait_for(int(CONFIG.get("wait_for", 0)))  # type: ignore[call-overload]
        act = CONFIG.get("act", "ok")
        if act == "oom":
            raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
        if act == "crash":
            sys.exit(7)
        if act in ("hang", "deaf"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN if act == "deaf" else signal.SIG_DFL)
            time.sleep(600)
        if act == "pause" and not (LOG / "paused").exists():
            signal.sigwait({signal.SIGCONT})
            (LOG / "paused").touch()
        if act == "noisy":
            print("Error: an ERROR about errors, none of them real", file=sys.stderr)
        if act == "torn":
            Path(CONFIG["autotuning"]["metric_path"]).write_text('{"throughput": 12')  # type: ignore[index]
        elif act == "pipe":
            os.mkfifo(CONFIG["autotuning"]["metric_path"])  # type: ignore[index]
        elif act == "folder":
            os.mkdir(CONFIG["autotuning"]["metric_path"])  # type: ignore[index]
        elif act == "tidy":
            shutil.rmtree(Path(CONFIG["autotuning"]["metric_path"]).parent)  # type: ignore[index]
        elif act == "other":
            write_metric('{"loss": 1.5}')
        elif act != "silent" and os.environ["RANK"] == "0":
            write_metric(json.dumps({"throughput": float(CONFIG.get("n", 1))}))  # type: ignore[arg-type]
        tell("end")


CONFIG = read_config()
main()
