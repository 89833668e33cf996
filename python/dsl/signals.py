"""Names of signals, a parser for the lists of signals that users write, and threads that get no signal.

And the words for what a process cannot get: such a thread, a file, memory.
"""

from __future__ import annotations

from dsl.lists import parse_number, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Linux numbers; the signal module would take a millisecond of every launch.
SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    16: "SIGSTKFLT", 17: "SIGCHLD", 18: "SIGCONT", 19: "SIGSTOP", 20: "SIGTSTP", 21: "SIGTTIN", 22: "SIGTTOU",
    23: "SIGURG", 24: "SIGXCPU", 25: "SIGXFSZ", 26: "SIGVTALRM", 27: "SIGPROF", 28: "SIGWINCH", 29: "SIGIO",
    30: "SIGPWR", 31: "SIGSYS",
}  # fmt: skip

KEYS = {2: "Ctrl-C", 3: "Ctrl-\\"}
"""Keys of a terminal, by the signal that each of them sends."""

LAST = 64
"""Real-time signals up to this one have a number and no name."""

UNTAKEABLE = (9, 19, 17, 4, 5, 6, 7, 8, 11, 31, 32, 33)
"""Signals that dsl cannot or must not handle: SIGKILL, SIGSTOP, SIGCHLD, a program's faults, two of libc."""

ENDING = (1, 2, 3, 10, 12, 15)
"""SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2 and SIGTERM: they end a process, but a job handles them."""

JOB_CONTROL = (20, 18, 28)
"""SIGTSTP, SIGCONT and SIGWINCH, which belong to the shell and the terminal."""

MORE_PROCESSES = "raise the limit of processes (ulimit -u, pids.max of the control group)"

SHORTAGES = {
    11: f"no process or thread can be started here, {MORE_PROCESSES}",
    12: "no memory is left, raise the limit of memory (ulimit -v, memory.max of the control group)",
    23: "too many files are open on this machine, raise fs.file-max",
    24: "too many files are open, raise the limit of open files (ulimit -n)",
    28: "no space is left on the disk, free some of it",
    122: "no space is left of your quota on the disk, free some of it",
}
"""What a process cannot get, by the number of the error, and how to mend it."""


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 40`` for a number without a name."""
    return SIGNALS.get(number, f"signal {number}")


def signal_word(number: int) -> str:
    """The signal as `parse_signals` reads it: ``SIGKILL`` for 9, ``40`` for a number without a name."""
    return SIGNALS.get(number, str(number))


def end_on_request(signum: int, *, is_key: bool, is_preemption: bool = False) -> str:
    """What ended a job: ``interrupted (Ctrl-C)``, ``terminated (SIGTERM)``.

    ``is_key``: a key of the terminal sent the signal. ``is_preemption``: the signal announced a preemption.
    """
    name = KEYS.get(signum) if is_key else None
    what = "interrupted" if SIGNALS.get(signum) == "SIGINT" else "terminated"
    return f"{'preempted' if is_preemption else what} ({name or signal_name(signum)})"


def parse_signals(
    text: str,
    option: str,
    *,
    job_control: str = "is always forwarded",
    warnings: list[str] | None = None,
) -> tuple[int, ...]:
    """``SIGUSR1,usr2,34`` as numbers, each once.

    ``option``: name of the text in messages. ``job_control``: why the signals of `JOB_CONTROL` are refused;
    empty: they are allowed. ``warnings``: gets a line for each item that is no signal, and the item is
    skipped; None: such an item is refused.

    Raises:
        OptionError: an item is no signal, or a signal that dsl cannot handle.
    """
    numbers = {name: number for number, name in SIGNALS.items()}
    found: dict[int, None] = {}
    for item in text.split(","):
        word = item.strip().upper()
        if not word:
            continue
        number = numbers.get(word if word.startswith("SIG") else f"SIG{word}", 0)
        if number == 0:
            number = parse_number(word) or 0
        why = "cannot be taken" if number in UNTAKEABLE else ""
        if number in JOB_CONTROL:
            why = job_control
        problem = f"{signal_word(number)} {why}" if why else ""
        if not 1 <= number <= LAST:
            if warnings is not None:
                why = "is no signal and has no effect, expected names such as SIGUSR1"
                warnings.append(f"{option} {quote(text)}: {quote(item.strip())} {why}")
                continue
            problem = f"{quote(item.strip())} is no signal, expected names such as SIGUSR1"
        if problem:
            from dsl.errors import OptionError

            raise OptionError(f"{option} {quote(text)}: {problem}")
        found[number] = None
    return tuple(found)


def start_thread(work: Callable[[], object], name: str) -> None:
    """Start a daemon thread to which no signal of the process goes: they are for its other threads.

    Raises RuntimeError: there are as many as there may be.
    """
    import signal
    from threading import Thread

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        Thread(target=work, daemon=True, name=name).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def shortage(error: Exception) -> str:
    """What this process cannot get, as a clause; empty: the error has another reason."""
    if isinstance(error, ImportError) or _is_of_import(error):
        return "a file of dsl or of its Python is gone or has changed since the start"
    number = getattr(error, "errno", None)
    if isinstance(error, MemoryError):
        number = 12
    elif isinstance(error, RuntimeError) and "start new thread" in str(error):
        number = 11
    return SHORTAGES.get(number or 0, "")


def _is_of_import(error: Exception) -> bool:
    """Whether the code of a module has raised it while it was imported, as one of another version may."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_name == "<module>":
            return True
        step = step.tb_next
    return False
