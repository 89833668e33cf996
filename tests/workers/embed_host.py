"""A program with a supervisor in it that does what programs do: forks, changes its group, handles signals.

Arguments: what to do (a function below), then the worker's command line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from dsl import Ended, EngineError, Event, LaunchSpec, Started, Supervisor, WorkerSpec


def started(count: int = 1, grace_s: float = 60.0) -> Supervisor:
    """A supervisor whose workers run."""
    supervisor = Supervisor()
    spec = LaunchSpec([WorkerSpec(sys.argv[2:])] * count, grace_s=grace_s)
    supervisor.start(spec)
    events: list[Event] = []
    while len([event for event in events if isinstance(event, Started)]) < count:
        events += supervisor.wait(10.0)
    return supervisor


def end(supervisor: Supervisor) -> None:
    """Wait until all has ended."""
    events: list[Event] = []
    while not (events and isinstance(events[-1], Ended)):
        events += supervisor.wait(10.0)
    supervisor.close()


def regroup() -> None:
    """The C library has each thread change its group, by a signal."""
    supervisor = started()
    os.setgid(os.getgid())
    os.setgroups(os.getgroups())
    print("changed")
    supervisor.close()


def handle() -> None:
    """A handler that runs while we wait starts a program, and lets itself be interrupted."""
    supervisor = started()
    masks: list[set[int]] = []
    children: list[subprocess.Popen[bytes]] = []

    def handler(_number: int, _frame: object) -> None:
        masks.append({int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])})
        children.append(subprocess.Popen(["sleep", "1000"]))
        supervisor.wake()

    signal.signal(signal.SIGUSR1, handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    main = threading.get_ident()
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    supervisor.wait()
    timer.join()
    (child,) = children
    child.terminate()
    try:
        code: object = child.wait(5)
    except subprocess.TimeoutExpired:
        code = "deaf"
        child.kill()
        child.wait()
    print(f"child {code} masks {masks == [{int(signal.SIGWINCH)}]}")
    supervisor.close()


def fork() -> None:
    """The child has the object, but neither its thread nor its workers."""
    supervisor = started()
    pid = os.fork()
    if pid == 0:
        calls: list[Callable[[], object]] = [
            lambda: supervisor.start(LaunchSpec([WorkerSpec(["true"])])),
            supervisor.wait,
            supervisor.fileno,
            lambda: supervisor.signal(15),
            supervisor.stop,
            supervisor.kill,
        ]
        said = set()
        for call in calls:
            try:
                call()
            except EngineError as error:
                said.add(str(error))
        supervisor.wake()
        supervisor.close()
        del supervisor, calls
        print(*said, sep="\n", flush=True)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    supervisor.stop(grace_s=0)
    end(supervisor)
    print(f"parent {os.waitstatus_to_exitcode(status)}")


def forget() -> None:
    """Nobody closes it: meanwhile another thread goes on."""
    stamps: list[float] = []
    is_over = threading.Event()

    def count() -> None:
        while not is_over.is_set():
            stamps.append(time.monotonic())

    thread = threading.Thread(target=count)
    thread.start()
    went_on, rounds = False, 0
    while not went_on and rounds < 50:  # on a busy machine the other thread may not get a turn in time
        rounds += 1
        supervisor = started(32)
        stamps.clear()
        begin = time.monotonic()
        del supervisor
        third = (time.monotonic() - begin) / 3
        went_on = any(begin + third < stamp < begin + 2 * third for stamp in stamps.copy())
    is_over.set()
    thread.join()
    print(f"went on {went_on}")


def handlers() -> dict[int, object]:
    """Handler of every signal as Python sees it."""
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def kernel_state() -> list[str]:
    """Masks of this thread and dispositions of this process as the kernel sees them."""
    with open("/proc/thread-self/status") as status:
        return [line.split()[1] for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]


def beside() -> None:
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
    supervisor = started(3)
    during = handlers(), kernel_state()
    signal.raise_signal(signal.SIGUSR1)
    end(supervisor)
    after = handlers(), kernel_state()
    alive = daemon.poll() is None
    daemon.kill()
    daemon.wait()
    code = own.wait()
    print(f"code {code} alive {alive} heard {heard} same {before == during == after}")


def leave() -> None:
    """End without a word to the group: fall off, raise, exit, or be killed, as the name of the action says."""
    _supervisor = started(2, 0.5)
    if ACTION == "raise":
        raise RuntimeError("on purpose")
    if ACTION == "exit":
        sys.exit(3)
    if ACTION == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    """There is no group where the kernel throws exit codes away."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        started()
    except EngineError as error:
        print("refused:", error)


ACTION = sys.argv[1]
own = {
    "regroup": regroup,
    "handle": handle,
    "fork": fork,
    "forget": forget,
    "beside": beside,
    "refuse": refuse,
}
own.get(ACTION, leave)()
