"""Serves orders until the engine hangs up."""

from __future__ import annotations

import gc
import os

from dsl._core import ForkLink
from dsl.forkserver import become, ending, poison, preload, streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Sequence
else:
    import _signal

_NEVER = 50_000_017
"""More new objects than imports make, and a number that no module would choose by chance."""


def serve(words: Sequence[str], forget: Callable[[], None]) -> None:
    """Import modules, then fork a worker for each order, until the engine hangs up.

    ``words``: modules with commas between them, or empty; the program; the number of the link's descriptor.
    ``forget`` removes what the start of this server has left in the interpreter. This function ends the
    process; only a forked worker leaves it, by `become.LeaveServer`.
    """
    listed, *rest, fd = words
    program = [word for word in rest if word]
    early = poison.find_early_poison(int(fd))
    link = ForkLink(int(fd))
    if early is not None:
        link.refuse(early)
        os._exit(0)
    known, shared = poison.open_descriptors(), poison.shared_memory()
    forget()
    folder = become.show_program(program)
    preloaded = ending.Preloaded()
    imports = become.ImportChanges()
    wanted = listed.split(",") if listed else preload.guess_modules(program, poison.HARMFUL)
    failure = _import([name for name in wanted if name], are_guessed=not listed)
    _leave_word("after its imports")
    changed = imports.settle(link.environ())
    gc.collect()
    # A signal to every process of a cgroup or a user is not meant for us; workers have their own mask.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    # If a module fails that the user named, the name is wrong or the module is broken. A guessed module may
    # be meant for another case than this one.
    reason = failure or changed
    if reason is None:
        link.settle()
        reason = poison.find_poison(known, shared)
    if reason is not None:
        link.refuse(reason)
        os._exit(0)
    streams.flush()
    compiled = become.compile_program(program)
    preloaded.note()
    gc.freeze()
    link.ready()
    while (order := link.next()) is not None:
        try:
            pid = os.fork()
        except OSError as error:
            link.not_forked(order, error.errno or 0)
            continue
        if pid == 0:
            become.become_worker(order, folder, imports, preloaded, compiled)
        link.forked(order, pid)
    os._exit(0)


def _import(names: Sequence[str], *, are_guessed: bool) -> str | None:
    """Import without garbage collections on the way: one after the imports finds the same in less time."""
    before, *others = gc.get_threshold()
    # Not by `gc.disable`: a module may call that itself, and mean it for the workers.
    gc.set_threshold(_NEVER, *others)
    failure = preload.import_modules(
        names, lambda name: _leave_word(f"while it imported {name}"), are_guessed=are_guessed
    )
    now, *others = gc.get_threshold()
    # A module may have multiplied the threshold that it found.
    times, rest = divmod(now, _NEVER)
    if times and not rest:
        gc.set_threshold(times * before, *others)
    return failure


def _leave_word(text: str) -> None:
    """Write a line to stderr. If this process dies now, this is its last line, and reports show that one."""
    try:
        os.write(2, f"{text}\n".encode())
    except OSError:
        return
