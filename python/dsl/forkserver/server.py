"""Serves orders until the engine hangs up."""

from __future__ import annotations

import os

from dsl._core import ForkLink
from dsl.forkserver import poison, streams
from dsl.forkserver.imports import Imports
from dsl.forkserver.server_command import MARK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def serve(words: Sequence[str], forget: Callable[[], None]) -> None:
    """Import modules, then fork a worker for each order, until the engine hangs up.

    ``words``: modules with commas between them, or empty; the program; the number of the link's descriptor.
    ``forget`` removes what the start of this server has left in the interpreter. This function ends the
    process; only a forked worker leaves it, by `become.LeaveServer`.
    """
    listed, *rest, fd = words
    if fd.startswith(MARK):
        from dsl.forkserver import warm

        warm.serve(words, forget)
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
