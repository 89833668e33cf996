"""A program that uses the engine while it has children, handlers and a mask of its own; prints what became of them.

Arguments: directory for the worker's note, then the worker's command line.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

from dsl import Ended, Event, LaunchSpec, Supervisor, WorkerSpec


def handlers() -> dict[int, object]:
    """Handler of every signal as Python sees it."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def kernel_state() -> list[str]:
    """Masks of this thread and dispositions of this process as the kernel sees them."""
    with open("/proc/thread-self/status") as status:
        return [line.split()[1] for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]


def main() -> None:
    """Run a group to its end beside an own child, and compare before with after."""
    # The first thread of a program makes libc install handlers of its own.
    first = threading.Thread(target=int)
    first.start()
    first.join()
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    signal.signal(signal.SIGTERM, lambda *_: heard.append(2))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    before = handlers(), kernel_state()
    own = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(17)"])
    daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    supervisor = Supervisor()
    supervisor.start(LaunchSpec([WorkerSpec(sys.argv[1:])] * 3))
    during = handlers(), kernel_state()
    signal.raise_signal(signal.SIGUSR1)
    events: list[Event] = []
    while not (events and isinstance(events[-1], Ended)):
        events += supervisor.wait(10.0)
    supervisor.close()
    after = handlers(), kernel_state()
    alive = daemon.poll() is None
    daemon.kill()
    daemon.wait()
    code = own.wait()
    print(f"code {code} alive {alive} heard {heard} same {before == during == after}")


main()
