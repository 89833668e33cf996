"""A fork server: imports what a program needs, then forks workers until the engine hangs up."""

from __future__ import annotations

import gc
import os
import sys

from dsl._core import ForkLink
from dsl.forkserver import become, ending, hidden, poison, preload, streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from dsl.forkserver.freshness import Reads
else:
    import _signal

_NEVER = 50_000_017
"""More new objects than imports make, and a number that no module would choose by chance."""


def serve(words: Sequence[str], forget: Callable[[], None]) -> NoReturn:
    """Import modules, then fork a worker for each order, until the engine hangs up.

    ``words``: modules with commas between them, or empty; the program; the number of the link's descriptor.
    ``forget`` removes what the start of this server has left in the interpreter. This function ends the
    process; only a forked worker leaves it, by `become.LeaveServer`.
    """
    listed, *rest, fd = words
    early = poison.find_early_poison(int(fd))
    link = ForkLink(int(fd))
    if early is not None:
        link.refuse(early)
        os._exit(0)
    forget()
    imports = Imports(listed, [word for word in rest if word])
    reason = imports.settle(link.settle)
    if reason is not None:
        link.refuse(reason)
        os._exit(0)
    streams.flush()
    imports.freeze()
    imports.fork_workers(link)


class Imports:
    """What a server has imported for a program, and what that has changed in this process.

    ``listed``: modules with commas between them, or empty; ``program``: the words behind the interpreter.
    ``watched``: names of further variables that no module may ask for when it is imported. ``reads`` gets
    what modules read.
    """

    def __init__(
        self, listed: str, program: Sequence[str], watched: Sequence[str] = (), reads: Reads | None = None
    ) -> None:
        self.program = program
        self.texts: set[str] = set()
        """Files that were read to find out what to import."""
        self._start, self._notes = frozenset(sys.modules), hidden.Notes(reads.places() if reads else ())
        self._known, self._shared = poison.open_descriptors(), poison.shared_memory()
        self._folder = become.show_program(program)
        self._preloaded = ending.Preloaded()
        self._changes = become.ImportChanges()
        wanted = listed.split(",") if listed else self.wanted()
        self.names = tuple([name for name in wanted if name])
        self._failure = _import(self.names, watched, self._notes, are_guessed=not listed)
        _leave_word("after its imports")

    def wanted(self) -> tuple[str, ...]:
        """The modules that the program names itself."""
        self.texts.clear()
        return preload.guess_modules(self.program, poison.HARMFUL, self.texts)

    def settle(self, settle: Callable[[], None]) -> str | None:
        """Prepare this process for forks. Returns why it must not fork; None if it may.

        ``settle`` notes in the engine what imports have left.
        """
        changed = self._changes.settle(ForkLink.environ())
        gc.collect()
        # A signal to every process of a cgroup or a user is not meant for us; workers have their own mask.
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        # If a module fails that the user named, the name is wrong or the module is broken. A guessed module
        # may be meant for another case than this one.
        reason = self._failure or changed
        if reason is not None:
            return reason
        settle()
        return poison.find_poison(self._known, self._shared)

    def freeze(self) -> None:
        """Keep what was imported as it is, in this process and in its forks, until they import it."""
        self._preloaded.note()
        kept = hidden.Hidden(self._start, self._notes)
        self._changes.holders = [
            (kept.modules if space is sys.modules and name in kept.modules else space, name)
            for space, name in self._changes.holders
        ]
        gc.freeze()

    def fork_workers(self, link: ForkLink) -> NoReturn:
        """Fork a worker for each order, until the engine hangs up. Only a forked worker leaves this call."""
        compiled = become.compile_program(self.program, self._preloaded)
        link.ready()
        while (order := link.next()) is not None:
            try:
                pid = os.fork()
            except OSError as error:
                link.not_forked(order, error.errno or 0)
                continue
            if pid == 0:
                become.become_worker(order, self._folder, self._changes, self._preloaded, compiled)
            link.forked(order, pid)
        link.clear()
        os._exit(0)


def _import(
    names: Sequence[str], watched: Sequence[str], notes: hidden.Notes, *, are_guessed: bool
) -> str | None:
    """Import without garbage collections on the way: one after the imports finds the same in less time."""
    before, *others = gc.get_threshold()
    # Not by `gc.disable`: a module may call that itself, and mean it for the workers.
    gc.set_threshold(_NEVER, *others)
    failure = preload.import_modules(
        names,
        lambda name: _leave_word(f"while it imported {name}"),
        watched,
        are_guessed=are_guessed,
        notes=notes,
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
