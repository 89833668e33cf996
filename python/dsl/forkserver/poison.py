"""What keeps a process from being forked safely, found before the first fork."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Iterator
else:
    # `signal` would stay in the workers as a module that they have not imported.
    import _signal

# Modules after whose import a process must not fork, and why.
HARMFUL = {
    "grpc": "its threads and channels do not survive a fork",
    "mpi4py.MPI": "it starts MPI when it is imported, and MPI does not allow forks",
    "horovod.torch": "it opens its devices and connections before workers could choose theirs",
    "torch_xla": "it opens its devices before workers could choose theirs",
    "habana_frameworks.torch": "it opens its devices before workers could choose theirs",
}
_DEVICES = tuple(
    [f"/dev/{name}" for name in ("nvidia", "kfd", "dri/", "accel", "davinci", "hl", "neuron", "vfio/")]
)
_ACCELERATORS = ("cuda", "xpu", "mps", "mtia")
# Seconds that a fork and its first moments may take. A handler that waits for a lost thread waits forever.
_FORK_S = 10
# Exit codes of the child of the trial, beside 0 and the numbers of `_ACCELERATORS`.
_TRIAL_FAILED, _OPENS, _STARTS = 20, 21, 22
_OF_A_FORK = {
    _OPENS: "what was imported opens a file or a connection in each fork: no worker keeps it",
    _STARTS: "what was imported starts a thread in each fork: no worker has it",
}
# How often we look at the threads, and seconds between two looks.
_LOOKS, _LOOK_S = 10, 0.02
# PF_EXITING of the kernel's include/linux/sched.h.
_EXITING = 0x4


def open_descriptors() -> dict[int, str]:
    """Number of every open descriptor of this process, and what it leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def shared_memory() -> dict[tuple[str, str], str]:
    """Memory that this process can write and shares with its forks: device and inode, and the path."""
    found = {}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, access, _, device, inode, *path = line.split(None, 5)
            if access[1] == "w" and access[3] == "s":
                found[device, inode] = path[0].strip() if path else "memory"
    return found


def find_early_poison(*own: int) -> str | None:
    """Why this interpreter must not fork workers, whatever it imports; None if there is no reason yet.

    Call it first, before the connections ``own`` are used. A worker keeps only the descriptors of its
    streams. Code that opened another descriptor when the interpreter started would write into a file that
    the worker opens under the same number.
    """
    for reason in _flags():
        return reason
    for number, target in open_descriptors().items():
        if number > 2 and number not in own:
            return f"the start of the interpreter has opened {target}: no worker keeps it"
    return None


def find_poison(known: dict[int, str], shared: dict[tuple[str, str], str]) -> str | None:
    """Why this process must not fork workers, as a clause; None if it may.

    ``known``, ``shared``: descriptors and shared memory before anything was imported. This forks once, as a
    trial: a library that can bear forks (OpenBLAS) ends its threads for that, any other library keeps them.
    If the fork hangs, SIGALRM ends this process: its time is longer than any wait here.
    """
    of_modules = (*_flags(), *_harmful_modules(), *_accelerators(), *_folders(), *_finalizers())
    for reason in (*of_modules, *_descriptors(known), *_mappings(shared), *_children()):
        return reason
    _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGCHLD})
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {_signal.SIGALRM})
    handler = _signal.signal(_signal.SIGALRM, _signal.SIG_DFL)
    _signal.setitimer(_signal.ITIMER_REAL, 2 * _FORK_S)
    try:
        return _trial()
    finally:
        _signal.setitimer(_signal.ITIMER_REAL, 0)
        _signal.pthread_sigmask(_signal.SIG_BLOCK, {_signal.SIGALRM})
        if handler is not None:
            _signal.signal(_signal.SIGALRM, handler)


def _flags() -> Iterator[str]:
    if sys.flags.inspect:
        yield "with -i or PYTHONINSPECT the interpreter goes on behind a program, and only its own"
    is_perf: Callable[[], bool] = getattr(sys, "is_stack_trampoline_active", bool)
    if is_perf():
        yield "with -X perf or PYTHONPERFSUPPORT the interpreter writes a file for its own process"


def _harmful_modules() -> Iterator[str]:
    for name, reason in HARMFUL.items():
        if name in sys.modules:
            yield f"{name} is imported: {reason}"


def _accelerators() -> Iterator[str]:
    torch = sys.modules.get("torch")
    for kind in _ACCELERATORS if torch is not None else ():
        is_initialized = getattr(getattr(torch, kind, None), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            yield f"torch.{kind} is initialized by what was imported: a device belongs to one process"


def _descriptors(known: dict[int, str]) -> Iterator[str]:
    for number, target in open_descriptors().items():
        if known.get(number) == target:
            continue
        if target.startswith(_DEVICES):
            yield f"what was imported has opened {target}: a device belongs to one process"
        elif target.startswith("socket:"):
            yield "what was imported has opened a socket: workers would share it"
        else:
            yield f"what was imported keeps {target} open: workers would share it"


def _mappings(shared: dict[tuple[str, str], str]) -> Iterator[str]:
    """Shared memory. If a worker dies with a lock in it, workers of the next attempt cannot get that lock."""
    for place, path in shared_memory().items():
        if place not in shared:
            yield f"what was imported shares {path}, as a lock of multiprocessing is: workers would share it"


def _children() -> Iterator[str]:
    try:
        left = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    what = f"the ended process {left.si_pid}" if left else "a process"
    yield f"what was imported has left {what} behind: it would be no child of the workers"


def _folders() -> Iterator[str]:
    """Temporary folders, which the first worker to end would remove."""
    finalize = getattr(sys.modules.get("weakref"), "finalize", None)
    if "tempfile" not in sys.modules or finalize is None:
        return
    for finalizer in list(vars(finalize)["_registry"]):
        held = finalizer.peek()
        if held and getattr(held[1], "__qualname__", "").startswith("TemporaryDirectory."):
            yield "what was imported keeps a temporary folder: the first worker to end would remove it"


def _finalizers() -> Iterator[str]:
    """Finalizers of multiprocessing, which run only in the process that has registered them."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None and vars(util).get("_finalizer_registry"):
        yield "what was imported has given multiprocessing something to do at its end: no worker would do it"


def _trial() -> str | None:
    before = open_descriptors()
    try:
        pid = _fork_quietly()
    except OSError as error:
        return f"it cannot fork: {error.strerror}"
    if pid == 0:
        code = _TRIAL_FAILED
        try:
            code = _judge_from_inside(before)
        finally:
            os._exit(code)
    reason = _threads()
    status = _status_of(pid) if reason is None else None
    if status is None:
        os.kill(pid, _signal.SIGKILL)
        os.waitpid(pid, 0)
        return reason or f"a fork of it had not begun after {_FORK_S} s: what was imported hangs in it"
    code = os.waitstatus_to_exitcode(status)
    if 0 < code <= len(_ACCELERATORS):
        kind = _ACCELERATORS[code - 1]
        return f"what was imported has asked for {kind} devices: forked workers could not use them"
    if code in _OF_A_FORK:
        return _OF_A_FORK[code]
    return None if code == 0 else f"a fork of it ended with {code}"


def _status_of(pid: int) -> int | None:
    """How a child ended; None if it has not ended within `_FORK_S` seconds."""
    for _ in range(round(_FORK_S / _LOOK_S)):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        # A thread that was about to end may have taken the signal.
        _signal.sigtimedwait({_signal.SIGCHLD}, _LOOK_S)
    return None


def _fork_quietly() -> int:
    """Fork without Python's warning about threads: we are about to look for threads ourselves."""
    warnings = sys.modules.get("warnings")
    if warnings is None:
        return os.fork()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _judge_from_inside(before: dict[int, str]) -> int:
    """The exit code of the trial: 0, a kind of device that torch takes for lost, or `_OPENS` or `_STARTS`.

    Only the child of a fork can find that out. ``before``: the open descriptors before the fork.
    """
    # A descriptor that leads elsewhere than before is new, too.
    if not open_descriptors().items() <= before.items():
        return _OPENS
    if len(os.listdir("/proc/self/task")) > 1:
        return _STARTS
    module = sys.modules.get("torch._C")
    for number, kind in enumerate(_ACCELERATORS, 1):
        is_lost = getattr(module, f"_{kind}_isInBadFork", None)
        if is_lost is not None and is_lost():
            return number
    return 0


def _threads() -> str | None:
    own = str(os.getpid())
    for _ in range(_LOOKS):
        count = sum(_lives(task) for task in os.listdir("/proc/self/task") if task != own)
        if not count:
            return None
        # Python's `join` returns before a thread has ended, and there is no way to wait for its end.
        _signal.sigtimedwait((), _LOOK_S)
    what = "a thread" if count == 1 else f"{count} threads"
    return f"what was imported has started {what}, as a computation with OpenMP does: no worker has them"


def _lives(task: str) -> bool:
    """Whether a thread has not begun to end. After a wait for its end, a thread may still be listed."""
    fields = fields_of_thread(task)
    return bool(fields) and not int(fields[6]) & _EXITING


def fields_of_thread(task: str) -> list[bytes]:
    """What the kernel shows of a thread of this process, from its state on; empty if it is gone."""
    try:
        with open(f"/proc/self/task/{task}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
