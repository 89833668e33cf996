"""Names of signals, a parser for the lists of signals that users write, and threads that get no signal."""

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


def start_thread(work: Callable[[], None], name: str) -> None:
    """Start a daemon thread to which no signal of the process goes: they are for its other threads."""
    import signal
    from threading import Thread

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        Thread(target=work, daemon=True, name=name).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
